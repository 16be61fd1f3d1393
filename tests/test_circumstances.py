"""What is said beside verdicts: what was changed after final runs had been measured, and what differs between runs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import lm
from fabricated import FINGERPRINT, finish_all, keep
from trials import TWO_ARMS, written

from lm.config.load import to_yaml
from lm.errors import RunError
from lm.experiments.experiment import Experiment, TuningRun
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import PLAN, departures, open_experiment, plan_of
from lm.experiments.procedure import Procedure
from lm.experiments.summary import summary_entries
from lm.files import json_bytes, read_json, write_json
from lm.runs.evaluations import Evaluation, evaluation_files, evaluation_path, read_evaluation
from lm.runs.folder import CONFIG, ENVIRONMENT, RESOLVED_FILE

SEEDS = {"tune": None, "seeds": [1, 2, 3]}
MORE = {
    "softmax": {"model.normalizer": "softmax"},
    "ssmax": {"model.normalizer": "ssmax"},
    "log_n": {"model.normalizer": "log_n"},
}
SETTLED = {"data_fingerprint": FINGERPRINT, "precision": 32, "compile": False, "threads": 1, "seeds": [1, 2, 3]}


def started(folder: Path, overrides: list[str], **changes: object) -> Procedure:
    """An experiment all of whose runs have ended, as its first start settled it."""
    procedure = Procedure(read_experiment(written(folder, **SEEDS | changes), overrides))
    write_json(procedure.experiment.folder / RESOLVED_FILE, SETTLED | {PLAN: plan_of(procedure.experiment)})
    procedure = open_experiment(procedure.experiment.file, overrides)
    write_json(procedure.experiment.folder / RESOLVED_FILE, SETTLED | {PLAN: plan_of(procedure.experiment)})
    finish_all(procedure, lambda run: 5 - 0.1 * (run.arm == "ssmax") + 1e-3 * run.seed * (run.arm == "ssmax"))
    for run in procedure.known_runs():
        (run.config.run_folder / CONFIG).write_text(to_yaml(run.config))
        facts = {
            "git_commit": "abc",
            "git_dirty": False,
            "versions": {"torch": "2.13"},
            "device": "cpu",
            "precision": "32",
            "compile": False,
        }
        write_json(run.config.run_folder / ENVIRONMENT, {"starts": [{"step": 0, **facts}]})
    return procedure


def exploratory(procedure: Procedure) -> list[str]:
    """The arms whose verdicts are."""
    return [line["arm"] for line in summary_entries(procedure) if line.get("verdict", "").startswith("exploratory: ")]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}"]


def test_as_it_was_planned_nothing_is_said(tmp_path, overrides):
    procedure = open_experiment(started(tmp_path, overrides).experiment.file, overrides)
    assert (procedure.notes(), exploratory(procedure)) == ([], [])


@pytest.mark.parametrize(
    ("changes", "arms", "words"),
    [
        (
            {"primary": {"matters": 0.2}},
            ["ssmax"],
            r"exploratory: primary\.matters was 0\.05 when it was settled \(.*Z\), it is 0\.2",
        ),
        (
            {"primary": {"matters": 0.05, "reach": 4.95}},
            ["ssmax"],
            r"exploratory: primary\.reach was null .*, it is 4\.95",
        ),
        ({"arms": MORE}, ["log_n"], r"exploratory: arm log_n was added since the arms were settled"),
        ({"arms": dict(reversed(MORE.items()))}, ["ssmax", "softmax"], r"exploratory: the baseline is another"),
        ({"arms": dict(reversed(TWO_ARMS["arms"].items()))}, ["softmax"], r"exploratory: the baseline is another"),
        (
            {"base": {"base": TWO_ARMS["base"], "optim.lr": 0.0123}},
            [],
            r"exploratory: arm ssmax has another configuration",
        ),
    ],
)
def test_what_was_changed_after_final_runs_were_measured_is_exploratory(tmp_path, overrides, changes, arms, words):
    started(tmp_path, overrides)
    procedure = open_experiment(written(tmp_path, **SEEDS | changes), overrides, anew=True)
    assert exploratory(procedure)[: len(arms)] == arms
    assert any(re.search(words, note) for note in procedure.notes()), procedure.notes()
    if list(changes) == ["arms"] and arms == ["log_n"]:
        assert not procedure.is_exploratory("", "ssmax")


def test_what_the_primary_metric_is_measured_on_is_planned(tmp_path, overrides):
    """What `evaluate` measures beside it may be added; no run has another configuration."""
    primary = {"metric": "by_length/loss 32", "better": "lower", "matters": 0.05}

    def asked(**options: object) -> Experiment:
        evaluate = {"eval": {"by_length": options}}
        return read_experiment(written(tmp_path, **SEEDS | {"primary": primary, "evaluate": evaluate}), overrides)

    started(tmp_path, overrides)  # so that final runs have been measured
    resolved = {PLAN: plan_of(asked(lengths=[16, 32]))}
    assert departures(asked(lengths=[8, 16, 32]), resolved) == ()
    (departure,) = departures(asked(lengths=[16, 32], sequences=7), resolved)
    assert departure.exploratory
    assert departure.size_arm is None
    words = r"what by_length/loss 32 is measured on: its sequences was .* when it was settled \(.*Z\), it is 7"
    assert re.fullmatch(words, departure.words), departure.words


def test_an_arm_that_is_left_out_makes_all_exploratory(tmp_path, overrides):
    started(tmp_path, overrides, arms=MORE)
    procedure = open_experiment(written(tmp_path, **SEEDS), overrides)
    assert exploratory(procedure) == ["ssmax"]
    assert any("arm log_n is left out" in note for note in procedure.notes())


def test_arms_that_start_from_a_changed_arm_are_exploratory(tmp_path, overrides):
    def arms(steps: int) -> dict[str, object]:
        late = {"from": "ssmax", "swap": {"to": "log_n"}, "trainer.max_steps": steps}
        later = {"from": "late", "swap": {"to": "ssmax"}, "trainer.max_steps": 8}
        return TWO_ARMS["arms"] | {"late": late, "later": later}

    started(tmp_path, overrides, arms=arms(6))
    procedure = open_experiment(written(tmp_path, **SEEDS | {"arms": arms(7)}), overrides)
    assert [procedure.is_exploratory("", arm) for arm in ("ssmax", "late", "later")] == [False, True, True]
    assert any(
        "arm later starts from an arm that has another configuration since" in note for note in procedure.notes()
    )


def test_other_rows_of_a_tuning_table_are_said(tmp_path, overrides):
    experiment = started(tmp_path, overrides).experiment
    rows = [TuningRun("", "ssmax", "optim.lr", rate, 11, 5.0, None, "") for rate in (1e-3, 2e-3, 4e-3)]
    first, second = (replace(experiment, table=tuple(table)) for table in (rows[:2], rows[1:]))
    assert departures(replace(first, table=first.table[::-1]), {PLAN: plan_of(first)}) == ()
    (departure,) = departures(second, {PLAN: plan_of(first)})
    assert departure.words.startswith("tune.digest of table was ")


def test_arms_that_have_seen_other_numbers_of_tokens_are_named(tmp_path, overrides):
    base = {"base": TWO_ARMS["base"], "optim.batch_tokens": 64}
    arms = TWO_ARMS["arms"] | {"longer": {"trainer.max_steps": 12}}
    (note,) = started(tmp_path, overrides, base=base, arms=arms).notes()
    assert (
        note
        == "arms have seen different numbers of tokens, those of their sources included: softmax, ssmax: 512; longer: "
        "768"
    )


def test_without_the_file_of_the_first_start_what_was_planned_is_not_known(tmp_path, overrides):
    experiment = started(tmp_path, overrides).experiment
    (experiment.folder / RESOLVED_FILE).unlink()
    for _ in range(2):
        procedure = open_experiment(experiment.file, overrides)
        assert exploratory(procedure) == ["ssmax"]
        assert any("what was planned before the first run is not known" in note for note in procedure.notes())
        write_json(experiment.folder / RESOLVED_FILE, SETTLED | {PLAN: None})  # as a start after the loss leaves it
    write_json(experiment.folder / RESOLVED_FILE, SETTLED)
    procedure = open_experiment(experiment.file, overrides)
    assert exploratory(procedure) == []
    assert procedure.notes() == ["resolved.json is of an earlier version, which did not record primary metric and arms"]


def test_before_anything_is_measured_the_plan_may_change(arguments, tmp_path):
    from lm.experiments.experiment_folder import start

    folder = start(written(tmp_path, tune=None), arguments[1:]).experiment.folder
    start(written(tmp_path, tune=None, primary={"matters": 0.2}), arguments[1:])
    assert read_json(folder / RESOLVED_FILE)[PLAN]["primary"]["matters"] == 0.2


def test_a_margin_that_is_changed_in_the_recorded_plan_too_is_refused(arguments, tmp_path):
    from lm.experiments.experiment_folder import start

    file = start(written(tmp_path, tune=None), arguments[1:]).experiment.folder / RESOLVED_FILE
    file.write_text(file.read_text().replace('"matters": 0.05', '"matters": 0.2'))
    with pytest.raises(RunError, match=r"resolved\.json: was altered \(its sha256 differs\); bring it back"):
        open_experiment(written(tmp_path, tune=None, primary={"matters": 0.2}), arguments[1:])


def test_so_may_the_seeds(arguments, tmp_path):
    from lm.experiments.experiment_folder import start

    start(written(tmp_path, tune=None), arguments[1:])
    assert start(written(tmp_path, tune=None, seeds=[2, 3, 5, 4]), arguments[1:]).notes()[1:] == []
    assert read_json(tmp_path / "runs" / "trial" / RESOLVED_FILE)["seeds"] == [2, 3, 5, 4]


def edited(key: str, value: object) -> Callable[[Path], None]:
    """Change what a run's start used."""

    def change(folder: Path) -> None:
        environment = read_json(folder / ENVIRONMENT)
        environment["starts"][0] |= {key: value}
        write_json(folder / ENVIRONMENT, environment)

    return change


def from_others(folder: Path) -> None:
    """Make a run and the baseline's start from one path whose weights changed in between."""
    for path, weights in ((folder, "b2"), *((path, "a1") for path in folder.parent.glob("softmax-*"))):
        write_json(
            path / ENVIRONMENT,
            read_json(path / ENVIRONMENT) | {"started_from": {"path": "runs/x", "tokens": 0, "weights": weights}},
        )


def other_code(folder: Path) -> None:
    for path in evaluation_files(folder).values():
        keep(folder, Evaluation.from_plain(read_evaluation(path) | {"code": {"lm": "other"}}))


def old(folder: Path) -> None:
    """As an earlier version wrote it."""
    path = evaluation_path(folder, "validation", 8)
    path.write_bytes(
        json_bytes(
            {name: value for name, value in json.loads(path.read_text()).items() if name not in ("sha256", "code")}
        )
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited("git_commit", "def"), "runs differ in git commit: abc (softmax); def (ssmax)"),
        (edited("git_dirty", True), "3 of 6 runs are of a git tree with uncommitted changes: their code is not known"),
        (edited("versions", {"torch": "2.14"}), "runs differ in torch: 2.13 (softmax); 2.14 (ssmax)"),
        (edited("device", "H100"), "runs differ in device: cpu (softmax); H100 (ssmax)"),
        (edited("precision", "bf16-mixed"), "runs differ in precision: 32 (softmax); bf16-mixed (ssmax)"),
        (
            from_others,
            "runs started from different weights of runs/x: a1 (softmax); b2 (ssmax); they are not comparable",
        ),
        (edited("compile", True), "runs differ in compile: False (softmax); True (ssmax)"),
        (other_code, "runs were measured by different code of lm: "),
        (old, "3 runs' evaluations carry no digest (made by an earlier version)"),
    ],
)
def test_what_differs_between_runs_is_said(tmp_path, overrides, change, said: str):
    procedure = started(tmp_path, overrides)
    for run in procedure.known_runs():
        if run.arm == "ssmax":
            change(run.config.run_folder)
    (note,) = open_experiment(procedure.experiment.file, overrides).notes()
    assert note.startswith(said)


def test_notes_stand_under_the_verdicts_in_their_file_and_on_the_page(tmp_path, overrides):
    procedure = started(tmp_path, overrides)
    for run in procedure.known_runs():
        other_code(run.config.run_folder)
    result = lm("compare", str(procedure.experiment.file), *overrides, "--report-only")
    note = "runs were measured by other code than today's; lm eval RUN measures them again"
    assert result.returncode == 0, result.stderr
    assert note in result.stdout.splitlines()
    folder = procedure.experiment.folder
    assert read_json(folder / "verdicts.json")["notes"] == [note]
    assert "runs were measured by other code than today" in (folder / "report" / "report.html").read_text()
