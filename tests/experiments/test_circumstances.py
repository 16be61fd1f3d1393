"""What is said beside verdicts: what was changed after final runs had been measured, and what differs between runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated import FINGERPRINT, finish_all_runs, write_evaluation
from manifests import write_recorded_file
from trials import TWO_ARM_EXPERIMENT, write_experiment

from lm.config.load import to_yaml
from lm.errors import RunError
from lm.experiments.compare import PLAN_KEY, open_experiment
from lm.experiments.definition import present_plan, read_experiment
from lm.experiments.procedure import Procedure
from lm.files import read_json
from lm.runs.evaluations import evaluation_files, load_evaluation
from lm.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE, EXPERIMENT_SETTINGS_FILE

SEEDS = {"tune": None, "seeds": [1, 2, 3]}
MORE = {
    "softmax": {"model.normalizer": "softmax"},
    "ssmax": {"model.normalizer": "ssmax"},
    "log_n": {"model.normalizer": "log_n"},
}
SETTLED = {"data_fingerprint": FINGERPRINT, "precision": 32, "compile": False, "threads": 1, "seeds": [1, 2, 3]}


def started(folder: Path, overrides: list[str], **changes: object) -> Procedure:
    """An experiment all of whose runs have ended, as its first start settled it."""
    procedure = Procedure(read_experiment(write_experiment(folder, **SEEDS | changes), overrides))
    write_recorded_file(procedure.experiment.folder / EXPERIMENT_SETTINGS_FILE, SETTLED)
    procedure = open_experiment(procedure.experiment)
    write_recorded_file(
        procedure.experiment.folder / EXPERIMENT_SETTINGS_FILE, SETTLED | {PLAN_KEY: present_plan(procedure.experiment)}
    )
    finish_all_runs(procedure, lambda run: 5 - 0.1 * (run.arm == "ssmax") + 1e-3 * run.seed * (run.arm == "ssmax"))
    for run in procedure.known_runs():
        write_recorded_file(run.config.run_folder / CONFIG_FILE, to_yaml(run.config))
        facts = {
            "git_commit": "abc",
            "git_dirty": False,
            "versions": {"torch": "2.13"},
            "device": "cpu",
            "precision": "32",
            "compile": False,
        }
        write_recorded_file(run.config.run_folder / ENVIRONMENT_FILE, {"starts": [{"step": 0, **facts}]})
    return procedure


def exploratory(procedure: Procedure) -> list[str]:
    """The arms whose verdicts are."""
    return [
        line["arm"]
        for line in procedure.judgement().summary_rows()
        if line.get("verdict", "").startswith("exploratory: ")
    ]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}"]


def test_as_it_was_planned_nothing_is_said(tmp_path, overrides):
    procedure = open_experiment(started(tmp_path, overrides).experiment)
    assert (procedure.notes(), exploratory(procedure)) == ([], [])


@pytest.mark.parametrize(
    ("changes", "arms", "words"),
    [
        ({"primary": {"matters": 0.2}}, ["ssmax"], "primary.matters was 0.05, is 0.2"),
        ({"seeds": [1, 2, 3, 7]}, ["ssmax"], "seeds was [1, 2, 3], is [1, 2, 3, 7]"),
        ({"seeds": [1, 2]}, ["ssmax"], "seeds was [1, 2, 3], is [1, 2]"),
        ({"arms": MORE}, ["log_n"], "log_n: added"),
        ({"arms": dict(reversed(MORE.items()))}, ["ssmax", "softmax"], "baseline was 'softmax', is 'log_n'"),
        (
            {"arms": dict(reversed(TWO_ARM_EXPERIMENT["arms"].items()))},
            ["softmax"],
            "baseline was 'softmax', is 'ssmax'",
        ),
        ({"base": {"base": TWO_ARM_EXPERIMENT["base"], "optim.lr": 0.0123}}, [], "optim.lr was 0.01, is 0.0123"),
        ({"evaluate": {"eval.sequences": 4}}, ["ssmax"], "val/loss: sequences was"),
    ],
)
def test_what_was_changed_after_final_runs_were_measured_is_exploratory(tmp_path, overrides, changes, arms, words):
    started(tmp_path, overrides)
    procedure = open_experiment(read_experiment(write_experiment(tmp_path, **SEEDS | changes), overrides))
    assert exploratory(procedure)[: len(arms)] == arms
    (line,) = [note for note in procedure.notes() if note.startswith("exploratory: changed since the plan: ")]
    assert words in line
    if list(changes) == ["arms"] and arms == ["log_n"]:
        assert ("", "ssmax") not in procedure.exploratory_arms


def test_an_arm_that_is_left_out_makes_all_exploratory(tmp_path, overrides):
    started(tmp_path, overrides, arms=MORE)
    procedure = open_experiment(read_experiment(write_experiment(tmp_path, **SEEDS), overrides))
    assert exploratory(procedure) == ["ssmax"]
    assert procedure.notes() == ["exploratory: changed since the plan: log_n: left out"]


def test_arms_that_start_from_a_changed_arm_are_exploratory(tmp_path, overrides):
    def arms(steps: int) -> dict[str, object]:
        late = {"from": "ssmax", "swap": {"to": "log_n"}, "trainer.max_steps": steps}
        later = {"from": "late", "swap": {"to": "ssmax"}, "trainer.max_steps": 8}
        return TWO_ARM_EXPERIMENT["arms"] | {"late": late, "later": later}

    started(tmp_path, overrides, arms=arms(6))
    procedure = open_experiment(read_experiment(write_experiment(tmp_path, **SEEDS | {"arms": arms(7)}), overrides))
    assert procedure.exploratory_arms == {("", "late"), ("", "later")}
    assert procedure.plan_notes == ["exploratory: changed since the plan: late: trainer.max_steps was 6, is 7"]


def test_arms_that_have_seen_other_numbers_of_tokens_are_named(tmp_path, overrides):
    base = {"base": TWO_ARM_EXPERIMENT["base"], "optim.batch_tokens": 64}
    arms = TWO_ARM_EXPERIMENT["arms"] | {"longer": {"trainer.max_steps": 12}}
    (note,) = started(tmp_path, overrides, base=base, arms=arms).notes()
    words = "512 (softmax, ssmax); 768 (longer)"
    assert note == f"arms have seen different numbers of tokens, with those of their sources: {words}"


def test_without_the_file_of_the_first_start_what_was_planned_is_not_known(tmp_path, overrides):
    experiment = started(tmp_path, overrides).experiment
    (experiment.folder / EXPERIMENT_SETTINGS_FILE).unlink()
    for _ in range(2):
        procedure = open_experiment(experiment)
        assert exploratory(procedure) == ["ssmax"]
        assert any("what was planned before the first run is not known" in note for note in procedure.notes())
        write_recorded_file(
            experiment.folder / EXPERIMENT_SETTINGS_FILE, SETTLED | {PLAN_KEY: None}
        )  # as a start after the loss leaves it


def test_before_anything_is_measured_the_plan_may_change(arguments, tmp_path):
    from lm.experiments.compare import start_experiment

    folder = start_experiment(read_experiment(write_experiment(tmp_path, tune=None), arguments[1:])).experiment.folder
    start_experiment(read_experiment(write_experiment(tmp_path, tune=None), [*arguments[1:], "log.progress=none"]))
    changed = write_experiment(tmp_path, tune=None, primary={"matters": 0.2}, seeds=[2, 3, 5, 4])
    assert start_experiment(read_experiment(changed, arguments[1:])).plan_notes == []
    plan = read_json(folder / EXPERIMENT_SETTINGS_FILE)[PLAN_KEY]["shared"]
    assert (plan["primary.matters"], plan["seeds"]) == (0.2, [2, 3, 4, 5])


def test_a_margin_that_is_changed_in_the_recorded_plan_too_is_refused(arguments, tmp_path):
    from lm.experiments.compare import start_experiment

    file = (
        start_experiment(read_experiment(write_experiment(tmp_path, tune=None), arguments[1:])).experiment.folder
        / EXPERIMENT_SETTINGS_FILE
    )
    file.write_text(file.read_text().replace('matters": 0.05', 'matters": 0.2'))
    with pytest.raises(RunError, match=r"resolved\.json: was altered, .*; bring it back"):
        open_experiment(read_experiment(write_experiment(tmp_path, tune=None, primary={"matters": 0.2}), arguments[1:]))


def edited(key: str, value: object) -> Callable[[Path], None]:
    """Change what a run's start used."""

    def change(folder: Path) -> None:
        environment = read_json(folder / ENVIRONMENT_FILE)
        environment["starts"][0] |= {key: value}
        write_recorded_file(folder / ENVIRONMENT_FILE, environment)

    return change


def from_others(folder: Path) -> None:
    """Make a run and the baseline's start from one path whose weights changed in between."""
    for path, weights in ((folder, "b2"), *((path, "a1") for path in folder.parent.glob("softmax-*"))):
        origin = {"path": "runs/x", "tokens": 0, "weights": weights}
        write_recorded_file(path / ENVIRONMENT_FILE, read_json(path / ENVIRONMENT_FILE) | {"started_from": origin})


def other_code(folder: Path) -> None:
    for path in evaluation_files(folder).values():
        write_evaluation(folder, replace(load_evaluation(path), code={"lm": "other"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited("git_commit", "def"), "runs differ in git commit: abc (softmax); def (ssmax)"),
        (edited("git_dirty", True), "3 of 6 runs are of a git tree with uncommitted changes: their code is not known"),
        (edited("versions", {"torch": "2.14"}), "runs differ in torch: 2.13 (softmax); 2.14 (ssmax)"),
        (edited("device", "H100"), "runs differ in device: cpu (softmax); H100 (ssmax)"),
        (edited("precision", "bf16-mixed"), "runs differ in precision: 32 (softmax); bf16-mixed (ssmax)"),
        (from_others, "runs differ in weights of runs/x: a1 (softmax); b2 (ssmax)"),
        (edited("compile", True), "runs differ in compile: False (softmax); True (ssmax)"),
        (other_code, "runs differ in measuring code of lm: "),
    ],
)
def test_what_differs_between_runs_is_said(tmp_path, overrides, change, said: str):
    procedure = started(tmp_path, overrides)
    for run in procedure.known_runs():
        if run.arm == "ssmax":
            change(run.config.run_folder)
    (note,) = open_experiment(procedure.experiment).notes()
    assert note.startswith(said)
