"""Every file of a run folder, damaged, and every command that reads it: an error of one line and nothing written, or a
result.
"""

import itertools
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, lm, mark_others_slow
from folders import file_contents, last_checkpoint
from texts import write_texts, write_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers
from trials import write_experiment

from lm.experiments.compare import start_experiment
from lm.experiments.definition import read_experiment
from lm.training.train import train

SHORT = ["trainer.max_steps=4", "eval.sequences=64", "eval.long_context.length_factor=0"]
# the commands on a run folder; {out}: a folder that is not there, {configured}: configuration and overrides of the runs
WHOLE = {
    "report": "report {run} -o {out}",
    "compare": "compare {file} {overrides} --report-only",
    "eval": "eval {run} eval.sequences=4",
    "diagnose": "diagnose {run} eval.diagnostics.sequences=1",
    "generate": "generate {run} --prompt word --max-new-tokens 2",
    "export": "export {run} -o {out}",
    "swap": "swap {run} --to log_n -o {out} eval.sequences=4",
    "resume": "train {run}/config.yaml runs={runs} resume=auto trainer.max_steps=5",
    "init_from": "train {configured} init_from={run} name=new trainer.max_steps=2 eval.sequences=4",
}
DAMAGE = {"empty": lambda content: b"", "half": lambda content: content[: len(content) // 2]}


@pytest.fixture(scope="module")
def trained(corpus: Path, store_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The file of an experiment whose two runs have ended, and its overrides without `runs`; they lie in `runs` beside
    the file.
    """
    folder = tmp_path_factory.mktemp("trained")
    file = write_experiment(folder, tune=None, seeds=[1])
    overrides = [f"data.source.paths=[{corpus}]", f"data.root={store_root}", *SHORT]
    for run in start_experiment(read_experiment(file, [*overrides, f"runs={folder / 'runs'}"])).known_runs():
        train(run.config)
    return file, overrides


@pytest.fixture
def words(trained: tuple[Path, list[str]], tmp_path: Path) -> dict[str, list[str]]:
    """What stands for each {name} in `WHOLE`, of a copy of the runs."""
    shutil.copytree(trained[0].parent, tmp_path / "copy", symlinks=True)
    runs = tmp_path / "copy" / "runs"
    overrides = [*trained[1], f"runs={runs}"]
    (run,) = (path for path in (runs / "trial").iterdir() if path.name.startswith("softmax"))
    words_of = {"{file}": [str(tmp_path / "copy" / "trial.yaml")], "{overrides}": overrides}
    return words_of | {
        "{configured}": [str(ROOT / "tests" / "tiny.yaml"), *overrides],
        "{run}": [str(run)],
        "{runs}": [str(run.parent)],
        "{out}": [str(tmp_path / "out")],
    }


def arguments(command: str, words: dict[str, list[str]]) -> list[str]:
    """The command line of an entry of `WHOLE`."""
    words_found: list[str] = []
    for part in command.split():
        name = next((name for name in words if name in part), "")
        words_found += [part.replace(name, word) for word in words[name]] if name else [part]
    return words_found


def check(folder: Path, *command: str, words: str = "") -> str:
    """Run a command: it ends well, or with an error of one line that has `words` in it, and below `folder` all is as it
    was. The line.
    """
    before = file_contents(folder)
    result = lm(*command)
    assert "Traceback" not in result.stderr, result.stderr
    if result.returncode == 0:
        assert not words, f"{command} is not refused"
        return ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == errors[0] or "problems in the configuration" in errors[0], result.stderr
    assert words in errors[0]
    after = file_contents(folder)
    assert {path for path in {**before, **after} if before.get(path) != after.get(path)} == set(), errors[0]
    return errors[0]


QUICK = {("resume", "half"), ("compare", "half")}  # by default what goes on with a run, and what reads many


@pytest.mark.parametrize("case", mark_others_slow(itertools.product(WHOLE, DAMAGE), QUICK), ids="-".join)
def test_a_damaged_file_of_a_run_is_one_line_or_no_difference(
    case: tuple[str, str], words: dict[str, list[str]], tmp_path: Path
):
    (command, damage), run, backup = case, Path(words["{run}"][0]), tmp_path / "whole"
    shutil.copytree(tmp_path / "copy", backup)
    files = [
        path
        for path in run.rglob("*")
        if path.is_file() and path.suffix != ".png" and (path.suffix != ".ckpt" or path == last_checkpoint(run))
    ]
    assert {"config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json", last_checkpoint(run).name} < {
        path.name for path in files
    }
    for path in files:
        content = DAMAGE[damage](path.read_bytes())
        path.write_bytes(content)
        if not check(tmp_path / "copy", *arguments(WHOLE[command], words)) or path.suffix == ".ckpt":
            shutil.rmtree(tmp_path / "copy")
            shutil.copytree(backup, tmp_path / "copy")
            shutil.rmtree(words["{out}"][0], ignore_errors=True)
        else:
            shutil.copyfile(backup / path.relative_to(tmp_path / "copy"), path)
    assert check(tmp_path / "copy", *arguments(WHOLE[command], words)) == "", "undamaged"


# ---------------------------------------------------------------- tokenizers that fail at a text


def test_a_tokenizer_that_fails_at_a_text_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RUST_BACKTRACE", "0")  # the library prints where it failed before it raises
    file = write_tokenizer(tmp_path / "panics.json")
    tokenizer = Tokenizer.from_file(str(file))
    splitter = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # takes too long at a text that ends in b
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.save(str(file))
    texts = write_texts(tmp_path / "text", [f"text {number} " * 400 + "a" * 60 + "b" for number in range(8)])
    options = [f"data.source.paths=[{texts}]", f"data.root={tmp_path / 'stores'}", f"runs={tmp_path / 'runs'}"]
    options += [f"data.tokenizer={{name: file, path: {file}}}", "name=new"]
    words = "data.tokenizer: can't encode "
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / ".lock").touch()
    line = check(tmp_path, "train", str(ROOT / "tests" / "tiny.yaml"), *options, words=words)
    assert "Onig: Regex search error: retry-limit-in-match over; use another tokenizer, or other text" in line
    assert not list((tmp_path / "runs").glob("*"))
