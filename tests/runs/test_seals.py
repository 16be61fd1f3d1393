"""What a verdict or report rests on is checked by the manifest: an edit is one line."""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pandas as pd
import pytest
import torch
import yaml
from conftest import ROOT, mark_others_slow
from fabricated import EMPTY_FRAME, finish_all_runs, make_evaluation, save_empty_checkpoint, write_validation
from manifests import record_files, write_recorded_file
from reported import two_runs

from lm.config.load import load_config, to_yaml
from lm.errors import RunError
from lm.evaluation.measurement import Measurement, measuring_code_digest
from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure, Run
from lm.model.device import Device
from lm.runs.evaluations import evaluation_path
from lm.runs.folder import CONFIG_FILE, DIVERGED_KEY, MANIFEST_FILE, METRICS_FILE
from lm.runs.record import read_run

ARMS = {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}}


def opened(folder: Path) -> Procedure:
    """The experiment in a folder, as of now."""
    return Procedure(read_experiment(folder / "trial.yaml", ["data.source.paths=[.]", f"runs={folder / 'runs'}"]))


def finished(folder: Path, **changes: object) -> Procedure:
    """An experiment whose runs have ended, each with a log and evaluations at two steps."""
    content = {"base": str(ROOT / "tests" / "tiny.yaml"), "arms": ARMS, **changes}
    (folder / "trial.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    procedure = opened(folder)

    def loss(run: Run) -> float:
        return 5 - 0.1 * (run.arm == "ssmax") + 0.001 * run.seed

    finish_all_runs(procedure, loss)
    for run in procedure.known_runs():
        lines = [{"step": step, "tokens": step, "val/loss": loss} for step, loss in ((4, 6.0), (8, loss(run)))]
        (run.config.run_folder / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_validation(run, 4, 6.0)
        write_recorded_file(run.config.run_folder / CONFIG_FILE, to_yaml(run.config))
        save_empty_checkpoint(run.config.run_folder, run.outcome.last_step, to_yaml(run.config))
    return Procedure(procedure.experiment)


TUNED = {"tune": {"grid": [1e-3, 2e-3, 4e-3]}}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of finished experiments, with and without tuning, to be copied."""
    folders = {stage: tmp_path_factory.mktemp(stage) for stage in ("final", "tune")}
    for stage, folder in folders.items():
        finished(folder, **(TUNED if stage == "tune" else {}))
    return folders


def ours(procedure: Procedure, arm: str = "ssmax") -> Run:
    return next(run for run in procedure.known_runs() if run.arm == arm)


def file_of(run: Run, step: int | None = None) -> Path:
    """The validation at a step, by default the last."""
    return evaluation_path(run.config.run_folder, "validation", run.outcome.last_step if step is None else step)


def copied(procedure: Procedure) -> None:
    """The baseline's numbers in place of an arm's, as `cp` does."""
    shutil.copy(file_of(ours(procedure, "softmax")), file_of(ours(procedure)))


def moved(procedure: Procedure) -> None:
    """An earlier evaluation in place of the last."""
    shutil.copy(file_of(ours(procedure), 4), file_of(ours(procedure)))


def lowered(procedure: Procedure) -> None:
    """Every value lower by 1."""
    path = file_of(ours(procedure))
    head, _, table = path.read_text().partition("\n")
    before = pd.read_csv(StringIO(table))
    path.write_text(f"{head}\n{before.assign(value=before['value'] - 1).to_csv(index=False)}")


def resealed(procedure: Procedure) -> None:
    """Every value lower by 1, with a line in the manifest."""
    lowered(procedure)
    record_files(ours(procedure).config.run_folder)


def unsealed(procedure: Procedure) -> None:
    """The line of an evaluation taken out of the manifest."""
    path, name = ours(procedure).config.run_folder / MANIFEST_FILE, file_of(ours(procedure)).name
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if name not in line))


def without_manifest(procedure: Procedure) -> None:
    (ours(procedure).config.run_folder / MANIFEST_FILE).unlink()


def with_others_manifest(procedure: Procedure) -> None:
    """The baseline's manifest in place of an arm's."""
    shutil.copy(*(ours(procedure, arm).config.run_folder / MANIFEST_FILE for arm in ("softmax", "ssmax")))


def with_manifest_cut(procedure: Procedure) -> None:
    path = ours(procedure).config.run_folder / MANIFEST_FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])


def relogged(procedure: Procedure) -> None:
    path = ours(procedure).config.run_folder / METRICS_FILE
    path.write_text(path.read_text().replace("6.0", "7.0"))


def without_log(procedure: Procedure) -> None:
    (ours(procedure).config.run_folder / METRICS_FILE).unlink()


def without_last_line(procedure: Procedure) -> None:
    """A log that lost the validation of the last step."""
    path = ours(procedure).config.run_folder / METRICS_FILE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def with_other_warmup(procedure: Procedure) -> None:
    """A key changed in config.yaml that is no part of the plan."""
    path = ours(procedure).config.run_folder / CONFIG_FILE
    path.write_text(path.read_text().replace("warmup_steps: ", "warmup_steps: 1"))


def with_empty_config(procedure: Procedure) -> None:
    (ours(procedure).config.run_folder / CONFIG_FILE).write_bytes(b"")


def diverged(procedure: Procedure) -> None:
    with (ours(procedure).config.run_folder / METRICS_FILE).open("a") as log:
        log.write(json.dumps({"step": 8, DIVERGED_KEY: "the loss is not finite"}) + "\n")


def emptied(procedure: Procedure) -> None:
    """A checkpoint of 0 bytes."""
    ours(procedure).outcome.checkpoint.write_bytes(b"")


def exchanged(procedure: Procedure) -> None:
    """The baseline's checkpoint in place of an arm's."""
    ours(procedure).outcome.checkpoint.write_bytes(ours(procedure, "softmax").outcome.checkpoint.read_bytes())


ALTERED = r"was altered, or is of another folder \(its sha256 is not in manifest\.jsonl\); bring it back"
EDITS = {
    copied: rf"validation\.step-\d+\.csv: {ALTERED}, or measure it again: lm eval .* --checkpoint \d+$",
    moved: rf"validation\.step-\d+\.csv: {ALTERED}, or measure it again: lm eval ",
    lowered: rf"validation\.step-\d+\.csv: {ALTERED}, or measure it again: lm eval ",
    resealed: r"step-\d+\.csv: val/loss is \d\.\d+, metrics\.jsonl says \d\.\d+: delete the file, and lm eval",
    unsealed: rf"validation\.step-\d+\.csv: {ALTERED}, or measure it again: lm eval ",
    without_manifest: r"ssmax-[^/]*: has no manifest\.jsonl: it is of lm 0\.11 or earlier, and lm 0\.11 reads it, or",
    with_others_manifest: rf"config\.yaml: {ALTERED}",
    with_manifest_cut: ALTERED,
    relogged: r"metrics\.jsonl: was altered since step-\d+\.ckpt was saved; bring it back",
    without_log: r"metrics\.jsonl: is gone since step-\d+\.ckpt was saved; bring it back",
    without_last_line: r"metrics\.jsonl: was altered since step-\d+\.ckpt was saved; bring it back",
    with_other_warmup: rf"config\.yaml: {ALTERED}",
    with_empty_config: rf"config\.yaml: {ALTERED}",
    diverged: r"metrics\.jsonl: says that the run diverged, but .*ckpt exists: bring it back",
    emptied: rf"step-\d+\.ckpt: {ALTERED}$",
    exchanged: rf"step-\d+\.ckpt: {ALTERED}$",
}


CASES = mark_others_slow(
    itertools.product(("final", "tune"), EDITS), {*itertools.product(["final"], EDITS), ("tune", copied)}
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].__name__}")
def test_nothing_is_judged_on_what_was_changed_after_it_was_measured(
    tmp_path, originals: dict[str, Path], case: tuple[str, Callable[[Procedure], None]]
):
    stage, edit = case
    procedure = opened(Path(shutil.copytree(originals[stage], tmp_path / "copy")))
    assert procedure.judgement().summary_rows()
    edit(procedure)  # of the runs the first: of tuning, if there is any
    edited = Procedure(procedure.experiment)
    with pytest.raises(RunError, match=EDITS[edit]) as error:
        edited.tuning_runs("") if stage == "tune" else edited.judgement()
    assert "\n" not in str(error.value)


PLACES = {  # of a run, and of another in its place: stage, arm, rate, seed
    "another seed": (("final", "ssmax", 2e-3, 2), ("final", "ssmax", 2e-3, 1)),
    "the baseline": (("final", "ssmax", 2e-3, 2), ("final", "softmax", 2e-3, 2)),
    "a tuning run": (("final", "ssmax", 2e-3, 2), ("tune", "ssmax", 2e-3, 101)),
    "a final run": (("tune", "ssmax", 2e-3, 101), ("final", "ssmax", 2e-3, 2)),
    "another rate": (("tune", "ssmax", 1e-3, 101), ("tune", "ssmax", 2e-3, 101)),
}


WAYS = [(name, "copy") for name in PLACES]
WAYS += [("another seed", way) for way in ("link", "config.yaml alone")]


@pytest.mark.parametrize(
    "case", mark_others_slow(WAYS, [("another seed", "link"), ("a tuning run", "copy")]), ids="-".join
)
def test_a_folder_holds_the_run_that_its_name_says(tmp_path, originals: dict[str, Path], case: tuple[str, str]):
    """Another run in its place gave another interval, without a word."""
    procedure = opened(Path(shutil.copytree(originals["tune"], tmp_path / "copy")))
    assert procedure.judgement().summary_rows()
    place, way = case
    folders = {(run.stage, run.arm, run.rate, run.seed): run.config.run_folder for run in procedure.known_runs()}
    folder, other = (folders[run] for run in PLACES[place])
    if way != "config.yaml alone":
        shutil.rmtree(folder)
        folder.symlink_to(other) if way == "link" else shutil.copytree(other, folder)
    if way != "link":
        write_recorded_file(folder / CONFIG_FILE, (other / CONFIG_FILE).read_text())
    with pytest.raises(RunError, match=rf"is of another run than {folder.name}: its name is {other.name}; ") as error:
        Procedure(procedure.experiment).judgement().summary_rows()
    assert "\n" not in str(error.value)


def test_a_run_is_reported_without_its_checkpoints(tmp_path):
    folder = two_runs(tmp_path)[0]
    shutil.rmtree(folder / "checkpoints")
    assert read_run(folder).evaluations


def test_what_was_measured_by_other_code_is_measured_again(tmp_path, monkeypatch):
    class Probe(Measurement):
        kind = "long_context"
        options: ClassVar = {}

        def measure(self, decoder, device):
            return []

    probe = Probe(
        load_config([str(ROOT / "tests" / "tiny.yaml"), "data.source.paths=[.]"]), SimpleNamespace(fingerprint="data")
    )
    device = Device(torch.device("cpu"), False)
    evaluation = replace(make_evaluation(EMPTY_FRAME, "long_context", weights="w"), **probe.result_inputs("w", device))
    probe.write(tmp_path, evaluation)
    assert probe.cached_result(tmp_path, "w", device, 8).code == {"lm": measuring_code_digest()}
    monkeypatch.setattr("lm.evaluation.measurement.measuring_code_digest", lambda: "other")
    assert probe.cached_result(tmp_path, "w", device, 8) is None
