"""What is read back is verified: bytes, configurations that are data, files that belong together."""

import json
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from folders import curves_of, file_contents, last_checkpoint, rewrite_archive, rewrite_checkpoint
from manifests import edit_json, write_recorded_file

import lm
from lm.config.load import load_config, parse_config, to_yaml
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import evaluate_runs
from lm.evaluation.swap import swap_run
from lm.files import read_json
from lm.runs.folder import MANIFEST_FILE, read_config, read_entries
from lm.runs.loading import export, save_model
from lm.training.step_callbacks import Checkpoints
from lm.training.train import train

SHORT = ["trainer.max_steps=4", "trainer.checkpoint_every=2", "eval.long_context.length_factor=0"]


@pytest.fixture(scope="module")
def finished(tiny_below, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two finished runs, `a` and `b`, of one configuration, and the export of `a`."""
    runs = tmp_path_factory.mktemp("finished")
    for name in "ab":
        train(tiny_below(runs, f"name={name}", *SHORT))
    export(runs / "a", "last", runs / "exported")
    return runs


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The run `a`, to be damaged; `b` and `exported` lie beside it."""
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path / "runs" / "a"


@pytest.fixture
def use(tiny, tmp_path: Path) -> dict[str, Callable[[Path], object]]:
    """All that reads a model back: what a run folder, a checkpoint or an export is given to."""
    return {
        "resume": lambda source: train(tiny("name=a", "resume=auto", *SHORT, "trainer.max_steps=6")),
        "eval": lambda source: evaluate_runs([source]),
        "swap": lambda source: swap_run(source, "last", "ssmax", None, tmp_path / "out", []),
        "export": lambda source: export(source, "last", tmp_path / "out"),
        "load": lm.load,
        "init_from": lambda source: train(tiny("name=new", f"init_from={source}", *SHORT)),
    }


USERS = ("resume", "eval", "swap", "export", "load", "init_from")
OF_EXPORTS = ("swap", "export", "load", "init_from")


def refuses(use: dict[str, Callable[[Path], object]], user: str, source: Path, words: str) -> None:
    """One line that says so, and nothing written."""
    before = file_contents(source.parents[1])
    with pytest.raises(RunError, match=words) as error:
        use[user](source)
    assert "\n" not in str(error.value)
    assert file_contents(source.parents[1]) == before


# ---------------------------------------------------------------- bytes


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def flip_member(path: Path, name: str) -> None:
    """Flip the lowest bit of the byte in the middle of a member of an archive."""
    with zipfile.ZipFile(path) as archive:
        (member,) = (member for member in archive.infolist() if member.filename.endswith(f"/{name}"))
    lengths = struct.unpack("<HH", path.read_bytes()[member.header_offset + 26 : member.header_offset + 30])
    flip(path, member.header_offset + 30 + sum(lengths) + member.file_size // 2)


ALTERED = r"was altered, or is of another folder \(its sha256 is not in manifest\.jsonl\)"
# a resume first looks whether a newer checkpoint is there
ALTERED_CHECKPOINT = (
    rf"step-000004\.ckpt: ({ALTERED}|not a readable checkpoint: .*); bring it back; the newest beside it is .*"
)
ALTERED_CHECKPOINT += r"step-000002\.ckpt"
NOT_FINITE = r"norm\.weight holds numbers that are not finite"


def exchanged(*names: str) -> Callable[[dict[str, bytes]], object]:
    return lambda content: content.update(zip(names, [content[name] for name in reversed(names)], strict=True))


def archive_anew(change: Callable[[dict[str, bytes]], object]) -> Callable[[Path], object]:
    """Write the archive of a checkpoint anew, so that its CRCs hold."""

    def damage(run: Path) -> None:
        path = last_checkpoint(run)
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        rewrite_archive(path, change)

    return damage


def diverged(run: Path) -> torch.nn.Module:
    """The run's decoder with a weight that is not finite, as its last checkpoint has it then, too."""
    decoder = lm.load(run).decoder
    decoder.norm.weight.data[3] = float("nan")
    rewrite_checkpoint(last_checkpoint(run), lambda content: content.update(state_dict=decoder.state_dict()))
    return decoder


def other_environment(run: Path) -> None:
    file = run / "environment.json"
    file.write_text(json.dumps(read_json(file) | {"data_fingerprint": "0" * 64}))


def other_tokenizer(run: Path) -> None:
    file = run / "tokenizer.json"
    file.write_text(file.read_text().replace("endoftext", "endoftexts"))


def others_checkpoint(run: Path) -> None:
    """Of the same configuration and data."""
    shutil.copyfile(last_checkpoint(run.parent / "b"), last_checkpoint(run))


BUT_RESUME = USERS[1:]  # which writes the store's tokenizer anew
DAMAGED = {  # of a run: how it is damaged, what is then said, and to whom
    "a flipped byte of weights": (
        lambda run: flip_member(last_checkpoint(run), "data/0"), ALTERED_CHECKPOINT, USERS
    ),
    "a flipped byte of metadata": (
        lambda run: flip_member(last_checkpoint(run), "data.pkl"), ALTERED_CHECKPOINT, USERS
    ),
    # data/2 and data/8 are of one shape
    "exchanged tensors": (archive_anew(exchanged("data/2", "data/8")), ALTERED_CHECKPOINT, USERS),
    "a tensor left out": (archive_anew(lambda content: content.pop("data/2")), ALTERED_CHECKPOINT, USERS),
    "another run's checkpoint": (others_checkpoint, rf"a/checkpoints/step-.*: {ALTERED}; bring it back", USERS),
    "weights that aren't finite": (diverged, rf"step-000004\.ckpt: {NOT_FINITE}; use weights from before", USERS),
    "another environment": (other_environment, rf"environment\.json: {ALTERED}; bring it back", USERS),
    "another tokenizer": (other_tokenizer, rf"tokenizer\.json: {ALTERED}; bring back the one that", BUT_RESUME),
    "no tokenizer": (
        lambda run: (run / "tokenizer.json").unlink(), r"tokenizer\.json: can't be read: No such file", BUT_RESUME
    ),
    "no manifest": (
        lambda run: (run / MANIFEST_FILE).unlink(),
        r"/a: has no manifest\.jsonl: it is of lm 0\.11 or earlier, and lm 0\.11 reads it, or", USERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_run_is_one_line_for_all_that_read_it(run: Path, use, what: str):
    damage, words, users = DAMAGED[what]
    damage(run)
    for user in users:
        refuses(use, user, run, words)


DAMAGED_EXPORTS = {
    "header": lambda folder: flip(folder / "model.safetensors", 100),
    "tensor": lambda folder: flip(folder / "model.safetensors", -1),
    "lm.json": lambda folder: flip(folder / "lm.json", 100),
    "tokenizer.json": lambda folder: flip(folder / "tokenizer.json", 100),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("what", DAMAGED_EXPORTS)
def test_a_damaged_export_is_one_line_for_all_that_read_it(run: Path, use, what: str):
    exported = run.parent / "exported"
    DAMAGED_EXPORTS[what](exported)
    for user in OF_EXPORTS:
        refuses(use, user, exported, rf"({ALTERED}|not readable|can't be read: No such file or directory; )")


def test_weights_that_are_not_finite_are_neither_written_nor_read(run: Path, use, monkeypatch: pytest.MonkeyPatch):
    decoder = diverged(run)
    with pytest.raises(RunError, match=NOT_FINITE):
        save_model(decoder, run.parent / "diverged")
    assert not (run.parent / "diverged").exists()
    with monkeypatch.context() as patched:
        patched.setattr("lm.runs.loading.check_finite", lambda weights, path: None)
        save_model(decoder, run.parent / "diverged", run / "tokenizer.json")
    for user in OF_EXPORTS:
        refuses(use, user, run.parent / "diverged", rf"diverged: {NOT_FINITE}")


def test_the_weights_of_a_checkpoint_in_the_manifest_are_those_of_its_evaluations(run: Path):
    (result,) = evaluate_runs([run])
    lines = [line for line in read_entries(run) if line["file"] == "checkpoints/step-000004.ckpt"]
    assert [line["weights"] for line in lines] == [result.evaluation.weights_sha256]


def test_a_checkpoint_outside_a_run_folder_is_read(run: Path, tmp_path: Path):
    kept = shutil.copy(run / "checkpoints" / "step-000002.ckpt", tmp_path / "kept.ckpt")
    assert lm.load(kept).metadata["step"] == 2


def test_an_export_of_lm_0_11_is_read(run: Path, capsys: pytest.CaptureFixture):
    exported = run.parent / "exported"
    edit_json(exported / "lm.json", lambda content: content.update(format=5, tokenizer_sha256="x", tensor_sha256={}))
    (exported / MANIFEST_FILE).unlink()
    assert lm.load(exported).metadata["step"] == 4
    assert "exported by lm 0.11, without a manifest.jsonl: its files are not checked" in capsys.readouterr().err


def test_the_checkpoint_that_a_phase_begins_with_is_verified(tiny, monkeypatch: pytest.MonkeyPatch):
    save = Checkpoints.save

    def damaged(self: Checkpoints, trainer, module) -> None:
        save(self, trainer, module)
        flip_member(self.folder / f"step-{trainer.global_step:06d}.ckpt", "data/0")

    monkeypatch.setattr(Checkpoints, "save", damaged)
    phases = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]"
    with pytest.raises(RunError, match=rf"step-000002\.ckpt: {ALTERED}"):
        train(tiny("name=phases", phases, *SHORT))


# ---------------------------------------------------------------- configurations are data

SECRET = "${oc.env:LM_TEST_SECRET}"


def test_nothing_is_interpolated_in_what_is_read_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model of others' could copy its user's environment into what the user exports, swaps or measures."""
    monkeypatch.setenv("LM_TEST_SECRET", "hush")
    stored = yaml.safe_load((run / "config.yaml").read_text())
    stored["data"]["source"]["paths"] = [SECRET]
    write_recorded_file(run / "config.yaml", yaml.safe_dump(stored, sort_keys=False))
    for path in (run / "checkpoints").glob("*.ckpt"):
        rewrite_checkpoint(path, lambda content: content["lm"].update(config=yaml.safe_dump(stored)))
    config = lm.load(run).config
    assert config.data.source.paths == read_config(run).data.source.paths == [SECRET]
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
    exported = export(run, "last", tmp_path / "again")
    swap_run(exported, "last", "ssmax", None, tmp_path / "swapped", [])
    evaluate_runs([run, tmp_path / "swapped"], overrides=["eval.sequences=2"])
    for folder in (run, exported, tmp_path / "swapped"):
        assert not [path for path, content in file_contents(folder).items() if b"hush" in content]
    assert lm.load(exported).config.data.source.paths == [SECRET]


def test_what_a_user_writes_is_interpolated(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LM_TEST_ROWS", "3")
    (tmp_path / "own.yaml").write_text(
        "eval: {sequences: '${oc.decode:${oc.env:LM_TEST_ROWS}}', needle: {trials: '${eval.sequences}'}}"
    )
    config = load_config([str(tmp_path / "own.yaml"), "name=${oc.env:LM_TEST_ROWS}", "runs=${name}"])
    assert (config.eval.sequences, config.eval.needle.trials, config.name, config.runs) == (3, 3, "3", "3")
    (result,) = evaluate_runs([run], overrides=["eval.sequences=${oc.decode:${oc.env:LM_TEST_ROWS}}"])
    assert len(curves_of(result.evaluation)[0].points[0].values) == 3
    with pytest.raises(ConfigError, match="nowhere"):
        evaluate_runs([run], overrides=["eval.sequences=${nowhere}"])


DOUBLED = "a0: &a0 [1, 1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))


@pytest.mark.parametrize(
    "config",
    ["seed: [", "- 1", "seed: x", "seed: !!python/object/apply:os.getcwd []", "x: " + "[" * 1000, DOUBLED],
    ids=["open", "list", "text", "object", "deep", "doubled"],
)
@pytest.mark.parametrize("user", ["resume", "load"])
def test_a_checkpoints_configuration_that_is_none_is_one_line(run: Path, use, user: str, config: str):
    rewrite_checkpoint(last_checkpoint(run), lambda content: content["lm"].update(config=config))
    refuses(use, user, run, r"step-000004\.ckpt: its configuration is not readable")


# ---------------------------------------------------------------- files that belong together


def test_a_swapped_export_knows_its_data_and_its_tokenizer(run: Path, use, tmp_path: Path):
    swap_run(run.parent / "exported", "last", "ssmax", None, run.parent / "swapped", [])
    file = run.parent / "swapped" / "environment.json"
    assert read_json(file)["data_fingerprint"] == read_json(run / "environment.json")["data_fingerprint"]
    (run.parent / "swapped" / "tokenizer.json").unlink()
    for user in BUT_RESUME:
        refuses(
            use, user, run.parent / "swapped", r"tokenizer\.json: can't be read: No such file .*; bring back the one"
        )


def test_an_edited_result_is_measured_again(run: Path, capsys: pytest.CaptureFixture):
    (first,) = evaluate_runs([run], overrides=["eval.sequences=5"])
    (second,) = evaluate_runs([run], overrides=["eval.sequences=5"])
    assert (first.is_cached, second.is_cached) == (False, True)
    capsys.readouterr()
    for damage in (
        lambda text: text.replace('"step": ', '"step": 1'),
        lambda text: text.replace(",reports,", ",selects,"),
        lambda text: text[:100],
        lambda text: "",
    ):
        file = max((run / "evaluations").glob("validation.step-*.csv"))
        file.write_text(damage(file.read_text()))
        (result,) = evaluate_runs([run], overrides=["eval.sequences=5"])
        assert not result.is_cached
        assert result.evaluation.file_content() == first.evaluation.file_content()
        assert re.search(
            r"note: .*validation\.step-\d+\.csv: not as it was written: measured again", capsys.readouterr().err
        )
