"""Optimizers, sources, tasks and evaluations from outside: the examples in docs/examples from their check to their
report.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, lm
from outside import forget, installed, outside_package

from lm.commands.extension_checks import KINDS
from lm.config.load import load_config, merge, parse
from lm.errors import ConfigError
from lm.evaluation.evaluate import suite_changes
from lm.runs.folder import ENVIRONMENT
from lm.schema import to_plain

NAMES = {
    "optimizer": "mine.optimizer:SignMomentum",
    "source": "mine.source:Sums",
    "task": "mine.task:First",
    "evaluation": "mine.evaluation:Spread",
}
LONGEST = 30  # lines of an example, blank ones aside


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the documentation's package `mine`."""
    examples = {path.stem: path.read_text() for path in (ROOT / "docs" / "examples" / "mine").glob("*.py")}
    assert examples.keys() == NAMES.keys()
    assert all(len([line for line in code.splitlines() if line]) <= LONGEST for code in examples.values())
    with outside_package("mine", examples, tmp_path, monkeypatch) as package:
        yield package


@pytest.mark.parametrize("kind", NAMES)
def test_the_examples_keep_all_promises(mine: Path, kind: str):
    result = lm("check-extension", kind, NAMES[kind])
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line.startswith(f"{NAMES[kind]}: kept: ") for line in result.stdout.splitlines()] == [True] * len(
        KINDS[kind][1]
    )


def checked_with(folder: Path, kind: str, before: str, after: str) -> subprocess.CompletedProcess:
    """The check of the example of a kind with a piece of its code changed."""
    code = folder / f"{kind}.py"
    text = code.read_text()
    assert before in text
    code.write_text(text.replace(before, after))
    return lm("check-extension", kind, NAMES[kind])


# A change of the example, of its kind, that breaks one promise, and what is said.
BROKEN = {
    "rate": ("optimizer", '1 - group["lr"] * group["weight_decay"]', "1 - 0.01", "at a rate of 0 no parameter changes"),
    "few parameters": (
        "optimizer",
        "Signs(groups,",
        "Signs([group for group in groups if group['name'] != 'vectors'],",
        "other parameters than those of `groups`",
    ),
    "period": (
        "optimizer",
        "        for group in self.param_groups:",
        "        self.count = getattr(self, 'count', 0) + 1\n        for group in self.param_groups[self.count % 5 == "
        "0 :]:",
        "goes on to the bit",
    ),
    "question": (
        "task",
        "np.array([[length, length + 1]])",
        "np.array([[length + 1, length + 2]])",
        "the question [257, 258), not within",
    ),
    "vocabulary": ("task", "tokens[0]\n", "self.vocab_size\n", "token 17, not in 0 to 16"),
    "no question": (
        "task",
        "Example(tokens, last, first, needles=first)",
        "Example(tokens, *[last[:0]] * 3)",
        "0 questions",
    ),
    "state": (
        "optimizer",
        "self.state[parameter].setdefault",
        "self.__dict__.setdefault(id(parameter), {}).setdefault",
        "goes on to the bit",
    ),
    "ascent": ("optimizer", ".sub_(", ".add_(", "lower the loss"),
    "documents": (
        "source",
        "range(60))",
        "range(60)) + str(__import__('time').perf_counter())",
        "the second call gives other documents",
    ),
    "identity": ("source", "return {}", "return {1: set()}", "stopped by TypeError"),
    "draw": (
        "task",
        "draw.integers(self.symbols, length + 1)",
        "np.random.randint(self.symbols, size=length + 1)",
        "differs the second time",
    ),
    "evidence": ("task", "first, last = np.array([[0, 1]])", "first, last = np.array([[1, 2]])", "is not the answer"),
    "noise": (
        "evaluation",
        ".std(-1)",
        ".std(-1) + __import__('torch').rand(1)",
        "the second time it gives other numbers",
    ),
    "weights": (
        "evaluation",
        "return decoder.head(",
        "decoder.head.weight.data.mul_(2)\n            return decoder.head(",
        "weights have changed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_promise_is_named(mine: Path, case: str):
    kind, before, after, message = BROKEN[case]
    result = checked_with(mine, kind, before, after)
    assert result.returncode == 1
    assert any("BROKEN" in line and message in line for line in result.stdout.splitlines()), result.stdout


# A change of the example, of its kind, that leaves nothing to be used, and the cause.
USELESS = {
    "signature": ("optimizer", "def make(self, groups, decoder):", "def make(self, groups):",
        "takes 2 positional arguments but 3"),
    "no optimizer": ("optimizer", "return Signs(", "Signs(", "gives NoneType, not a torch.optim.Optimizer"),
    "raises": ("optimizer", "return Signs(", "raise ValueError('no')  # ",
        "ValueError: no; optimizer mine.optimizer:SignMomentum failed"),
    "no gradients": ("optimizer", "loss = torch.enable_grad()(closure)()", "loss = None",
        "computes the gradients, 0 times"),
    "documents": ("source", "def documents(self", "def documents(self, more",
        "missing 1 required positional argument: 'more'"),
    "few tokens": ("task", "integers(self.symbols, length + 1)", "integers(self.symbols, length)",
        "gives tokens of shape (256,)"),
    "no sequence": ("task", "return Example(", "Example(", "`make` gives NoneType, not an Example"),
    "no class": ("evaluation", "mine.evaluation:Measured", "mine.evaluation:Missing", "has no attribute 'Missing'"),
    "no series": ("evaluation", "return [self.series(", "[self.series(",
        "`measure` gives NoneType, not a list of Series"),
}  # fmt: skip


@pytest.mark.parametrize("case", USELESS)
def test_code_that_can_not_be_used_is_said_so_once_with_the_cause(mine: Path, case: str):
    kind, before, after, message = USELESS[case]
    result = checked_with(mine, kind, before, after)
    assert (result.returncode, result.stdout.count("\n")) == (1, 1), result.stdout
    assert message in result.stdout
    assert "hint" not in result.stdout


def test_a_run_of_all_but_the_task_is_trained_resumed_evaluated_and_reported(
    mine: Path, arguments: list[str], tmp_path: Path
):
    overrides = [
        "data.source={name: 'mine.source:Sums', count: 80}",
        "optim.optimizer={name: 'mine.optimizer:SignMomentum', beta: 0.8}",
        "data.tokenizer.vocab_size=300", "optim.lr=1e-3", "eval.others=[{name: 'mine.evaluation:Spread', position: 4}]",
        "eval.long_context.length_factor=0",
    ]  # fmt: skip
    run = [*(argument for argument in arguments if not argument.startswith("data.source")), *overrides, "name=run"]
    result = lm("train", *run)
    assert result.returncode == 0, result.stderr
    folder = load_config(run).run_folder
    environment = json.loads((folder / ENVIRONMENT).read_text())
    for kind in ("optimizer", "source", "evaluation"):
        assert re.fullmatch("source sha256 [0-9a-f]{12}", environment["versions"][NAMES[kind]])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert any("spread/logits" in line for line in lines)
    assert (folder / "evaluations" / "spread.step-000008.json").is_file()
    for kind, status in (("optimizer", 2), ("evaluation", 0)):  # what is measured may change, what is trained may not
        code = mine / f"{kind}.py"
        before = code.read_text()
        code.write_text(f"{before}# edited\n")
        forget("mine")
        resumed = lm("train", *run, "trainer.max_steps=10", "resume=auto")
        assert resumed.returncode == status, resumed.stderr
        assert bool(status) == (f"error: optim.optimizer = '{NAMES['optimizer']}': its code is" in resumed.stderr)
        code.write_text(before)
    forget("mine")
    (tmp_path / "imported").unlink()
    for command in (["eval", folder], ["generate", folder], ["export", folder, "-o", tmp_path / "out"]):
        refusal = lm(*map(str, command))
        assert (refusal.returncode, len(refusal.stderr.strip().splitlines())) == (1, 1), refusal.stderr
        assert "--allow-plugin mine" in refusal.stderr
    assert lm("report", str(folder)).returncode == 0
    assert not (tmp_path / "imported").exists()
    allowed = lm("eval", str(folder), "--allow-plugin", "mine")
    assert allowed.returncode == 0, allowed.stderr
    assert "spread" in allowed.stdout
    counts = [len([*(folder / "evaluations" / "cache").glob("spread-*.json")])]
    for sequences in (3, 3, 4):  # which `options` leaves out
        assert lm("eval", str(folder), "--allow-plugin", "mine", f"eval.sequences={sequences}").returncode == 0
        counts.append(len([*(folder / "evaluations" / "cache").glob("spread-*.json")]))
    assert [count - counts[0] for count in counts] == [0, 1, 1, 2]


def test_a_suite_and_an_error_name_the_block_of_an_evaluation_from_outside(mine: Path, arguments: list[str]):
    code, imports = (
        mine / "evaluation.py",
        "from lm.config.inference_config import InferenceSetting\nfrom lm.schema import key, sections",
    )
    keys = (
        '    quick_suite = {"position": 3}\n    inference: list[InferenceSetting] = sections(InferenceSetting, '
        '"settings")\n'
    )
    code.write_text(
        code.read_text().replace("from lm.schema import key", imports).replace("    position:", f"{keys}    position:")
    )
    config = load_config([*arguments, f"eval.others=[{{name: '{NAMES['evaluation']}', max_seconds: 60}}]"])
    (evaluation,) = parse(merge(to_plain(config), suite_changes("quick", config))).eval.others
    assert (evaluation.position, evaluation.max_seconds) == (3, 60)
    with pytest.raises(ConfigError, match=r"eval\.others\[0\]\.inference\[0\]\.normalizer\.clip = true"):
        load_config(
            [
                *arguments,
                f"eval.others=[{{name: '{NAMES['evaluation']}', inference: [{{normalizer: {{clip: true}}}}]}}]",
            ]
        )


def test_a_task_from_outside_makes_training_sequences_and_is_asked_for(
    mine: Path, arguments: list[str], tmp_path: Path
):
    run = [
        *arguments,
        "name=first",
        "data.tasks=[{weight: 1, task: {name: 'mine.task:First', symbols: 8}}]",
        "eval.recall.sequences=8",
    ]
    run.append("eval.long_context.length_factor=0")
    result = lm("train", *run)
    assert result.returncode == 0, result.stderr
    folder = load_config(run).run_folder
    assert "recall/" in (folder / "metrics.jsonl").read_text()
    (evaluation,) = (folder / "evaluations").glob("recall.step-*.json")
    assert f'"{NAMES["task"]}"' in str(json.loads(evaluation.read_text())["code"]).replace("'", '"'), (
        "another task is measured anew"
    )
    forget("mine")
    (tmp_path / "imported").unlink()
    report = lm("report", str(folder))
    assert report.returncode == 0, report.stderr
    refusal = lm("eval", str(folder))
    assert (refusal.returncode, refusal.stderr.count("\n")) == (1, 1), refusal.stderr
    assert "--allow-plugin mine" in refusal.stderr
    assert not (tmp_path / "imported").exists()


def test_an_entry_point_gives_a_bare_name(mine: Path, arguments: list[str]):
    installed(mine, "".join(f"[lm.{kind}s]\nshort = {name}\n" for kind, name in NAMES.items()))
    rest = [
        argument for argument in arguments if not argument.endswith(".yaml") and not argument.startswith("data.source")
    ]
    tasks = ["data.tasks=[{weight: 1, task: short}]", "eval.long_context.length_factor=0"]
    config = load_config(
        [*rest, "optim.optimizer=short", "data.source=short", "eval.others=[short]", *tasks, "name=short"]
    )
    assert {*config.plugin_names_by_key.values()} == set(NAMES.values())
    assert lm("check-extension", "source", "short").returncode == 0
    with pytest.raises(ConfigError, match="unknown name; did you mean 'short'"):
        load_config([*rest, "optim.optimizer=shorts", "name=short"])
    with pytest.raises(ConfigError, match="unknown name; choose from: adamw, muon, short"):
        load_config([*rest, "optim.optimizer=unlike", "name=short"])


def test_an_entry_point_with_a_built_in_name_is_said_to_be_another(
    mine: Path, arguments: list[str], capsys: pytest.CaptureFixture
):
    installed(mine, f"[lm.optimizers]\nadamw = {NAMES['optimizer']}\n")
    for _ in range(2):
        assert not load_config([*arguments, "optim.optimizer=adamw"]).plugin_names_by_key
    note = f"note: adamw is lm's own; the entry point of that name is meant by {NAMES['optimizer']}\n"
    assert capsys.readouterr().err == note


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.source:Sums", "is no optimizer: no dataclass that is a subclass of lm.config.training_config.Optimizer"),
        ("mine.optimizer:Signs", "is no optimizer"),
        ("mine.optimizer:Missing", "can't be imported: AttributeError"),
        ("lm.config.training_config:AdamW", "is not whole: it has no make"),
        ("mine.optimizer:", "names no class; write package.module:Class"),
        (":Signs", "names no class; write package.module:Class"),
    ],
)
def test_a_name_of_another_kind_is_refused_in_one_line(mine: Path, arguments: list[str], name: str, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        load_config([*arguments, f"optim.optimizer={{name: '{name}'}}"])
    assert len(str(error.value).splitlines()) == 1


IN_TEXT = """
from dataclasses import dataclass
from lm.config.task_config import Task
from lm.data.tasks import Example, span

@dataclass
class Last(Task):
    def entropy(self, length):
        return 0.0

    def make(self, draw, length, text):
        return Example(text.filler(draw, length + 1), span(length), span(0, 0), span(0, 0))
"""


def test_a_task_in_text_is_checked_on_text(mine: Path):
    (mine / "last.py").write_text(IN_TEXT)
    result = lm("check-extension", "task", "mine.last:Last")
    assert (result.returncode, result.stdout.count("kept: ")) == (0, len(KINDS["task"][1])), (
        result.stdout + result.stderr
    )


def test_what_is_no_extension_is_not_checked():
    result = lm("check-extension", "source", "package")
    message = (
        "error: source = 'package': is lm's own, and promises nothing to others; name yours: package.module:Class\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.parametrize(
    ("given", "said"),
    [("5", "document 2 is int, not a text; check"), ('"\\ud800"', "document 2 holds a lone surrogate")],
)
def test_a_document_that_is_no_text_is_one_line(mine: Path, arguments: list[str], given: str, said: str):
    code, loop = (mine / "source.py").read_text(), "        for number in range(self.count):"
    assert loop in code
    (mine / "source.py").write_text(code.replace(loop, f"        yield 'a text'\n        yield {given}\n{loop}"))
    rest = [argument for argument in arguments if not argument.startswith("data.source")]
    result = lm("prepare", *rest, "data.source=mine.source:Sums")
    assert (result.returncode, result.stderr.count("error")) == (1, 1), result.stderr
    assert f"data.source: mine.source:Sums: {said}" in result.stderr


# A change of an example, of its kind, that only lm stumbles over, the key that names it, and the error.
UNUSABLE = {
    "no optimizer": ("optimizer", "return Signs(", "Signs(", "optim.optimizer=",
        "TypeError: `make` of mine.optimizer:SignMomentum gives"),
    "closure": ("optimizer", "loss = torch.enable_grad()(closure)()", "loss = None", "optim.optimizer=",
        "hasn't been executed"),
    "file": ("source", "for number in", "open('/nowhere')\n        for number in", "data.source=",
        "failed in Sums.documents"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_lm_can_not_use_is_one_line_with_the_check(mine: Path, arguments: list[str], case: str):
    kind, before, after, key, message = UNUSABLE[case]
    code = mine / f"{kind}.py"
    assert before in code.read_text()
    code.write_text(code.read_text().replace(before, after, 1))
    rest = [argument for argument in arguments if not argument.startswith("data.source") or kind != "source"]
    result = lm("train", *rest, "name=fails", f"{key}{{name: '{NAMES[kind]}'}}")
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (result.returncode, "Traceback" in result.stderr) == (1, False), result.stderr
    assert message in line
    assert line.endswith(f"check it with lm check-extension {kind} {NAMES[kind]}")
