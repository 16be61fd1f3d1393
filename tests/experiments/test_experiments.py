"""Experiments: from one file to verdicts, on run folders alone."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import lm
from fabricated import finish_all_runs, finish_run, trainer_that_calls
from manifests import write_recorded_file
from trials import write_experiment

from lm.config.training_config import LogConfig
from lm.errors import ConfigError, Diverged, RunError
from lm.evaluation.evaluate import evaluate_runs
from lm.evaluation.held_out import LongContext
from lm.evaluation.metrics import metrics_of
from lm.experiments.compare import TrainingOptions, compare_experiments, open_experiment, start_experiment
from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure, Run, forget_failures, remaining_commands
from lm.experiments.run_outcome import Outcome
from lm.experiments.trainer import ExperimentTrainer, RunsFailed, TrainingStopped
from lm.runs.evaluations import evaluation_path
from lm.training.train import train

WILD = {"optim.lr": 1e30, "optim.optimizer.weight_decay": 0, "optim.grad_clip": 0, "optim.warmup_steps": 1}  # diverges

# a run takes half a second
SHORT = [f"{key}=8" for key in ("trainer.max_steps", "trainer.checkpoint_every", "eval.every")]
SHORT += ["eval.sequences=64", "eval.long_context.length_factor=0"]

pytestmark = pytest.mark.usefixtures("runs_in_process")


@pytest.fixture
def overrides(arguments: list[str]) -> list[str]:
    """Overrides of an experiment of such runs, whose folder is below `runs`."""
    return [*arguments[1:], *SHORT]


def here(run: Run) -> int:
    """Train a run in this process."""
    try:
        return train(run.config)
    except Diverged:
        return 3


def test_two_arms_two_seeds_and_two_rates_end_in_a_verdict(tmp_path, overrides, capsys):
    path = write_experiment(tmp_path)
    procedure = Procedure(read_experiment(path, overrides))
    labels = []

    def launch(run: Run) -> int:
        """Train final runs; those of the tuning are made up, best at 2e-2."""
        labels.append(run.label)
        return here(run) if run.stage == "final" else finish_run(run, 5.0 + abs(run.rate - 2e-2)) or 0

    trainer_that_calls(procedure, launch).train_all()
    runs = procedure.known_runs()
    assert len(labels) == len(set(labels)) == len(runs)
    assert len({run.rate for run in runs if run.stage == "tune"}) > 2, "one of two rates is at an edge: the grid grows"
    assert sum(run.stage == "final" for run in runs) == 4
    assert procedure.rate_choice("").judged_rates == {"softmax": 2e-2, "ssmax": 2e-2}
    soft, scalable = procedure.judgement().summary_rows()
    assert (soft["runs"], scalable["runs"], scalable["verdict"]) == (2, 2, "incomplete")
    assert scalable["difference"][0] == pytest.approx(scalable["mean"] - soft["mean"], abs=1e-6)

    trainer_that_calls(procedure, lambda run: pytest.fail(f"{run.label} is trained again")).train_all()
    compare_experiments([read_experiment(path, overrides)], TrainingOptions(), report_only=True)
    folder = procedure.experiment.folder
    assert json.loads((folder / "verdicts.json").read_text())["arms"][1]["verdict"] == "exploratory: incomplete", (
        "no start was recorded"
    )
    assert {"verdicts.csv", "tuning.csv", "report"} <= {path.name for path in folder.iterdir()}
    assert "incomplete" in capsys.readouterr().out


def test_what_was_stopped_goes_on_and_what_failed_is_said(tmp_path, overrides):
    path = write_experiment(tmp_path, tune=None)
    procedure = Procedure(read_experiment(path, overrides))
    with pytest.raises(TrainingStopped, match=r"stopped by SIGINT: .*the same command goes on"):
        trainer_that_calls(procedure, lambda run: here(run) if run.arm == "softmax" else interrupt()).train_all()
    assert [run.outcome.state for run in procedure.known_runs()] == [
        "finished",
        "unfinished",
        "unfinished",
        "unfinished",
    ]
    labels = []
    with pytest.raises(
        RunError, match=r"2 runs failed .*ssmax-seed1-.*status 1: no output.*--retry tries others again"
    ):
        trainer_that_calls(
            procedure, lambda run: labels.append(run.label) or (here(run) if run.arm == "softmax" else 1)
        ).train_all()
    assert labels == ["ssmax seed 1", "softmax seed 2", "ssmax seed 2"]
    with pytest.raises(RunError, match="2 runs failed"):
        trainer_that_calls(procedure, lambda run: pytest.fail(f"{run.label} is tried again")).train_all()
    assert lm("compare", str(path), *overrides, "--report-only").stdout.count("status 1: no output") == 2
    jobs = trainer_that_calls(procedure, lambda run: labels.append(run.label) or 1)
    forget_failures(procedure)
    with pytest.raises(RunError, match="2 runs failed"):
        jobs.train_all()
    assert labels[3:] == ["ssmax seed 1", "ssmax seed 2"]
    assert {line["arm"]: line["runs"] for line in procedure.judgement().summary_rows()} == {"softmax": 2, "ssmax": 0}


def test_a_run_whose_last_evaluation_failed_has_failed_and_the_others_go_on(tmp_path, overrides, monkeypatch):
    path = write_experiment(
        tmp_path, tune=None, seeds=[1], primary={"metric": "long/loss as trained", "better": "lower", "matters": 0.05}
    )
    procedure = Procedure(read_experiment(path, [*overrides, "eval.long_context.length_factor=2"]))
    measure = LongContext.measure

    def train_broken(run: Run) -> int:
        monkeypatch.setattr(LongContext, "measure", measure if run.arm == "ssmax" else lambda *_: 1 / 0)
        return train(run.config)

    wrong = (
        r"1 runs failed \(softmax-\S+ primary.metric long/loss as trained was not .* \(long_context: division "
        r"by zero\); lm eval "
    )
    with pytest.raises(RunsFailed, match=wrong):
        trainer_that_calls(procedure, train_broken).train_all()
    softmax, ssmax = procedure.known_runs()
    assert (softmax.outcome.state, ssmax.outcome.state) == ("unfinished", "finished")
    evaluate_runs([softmax.config.run_folder])
    trainer_that_calls(
        Procedure(procedure.experiment), lambda run: pytest.fail(f"{run.label} is trained again")
    ).train_all()


def test_an_experiment_that_fails_or_is_not_sent_does_not_keep_the_next_from_its_work(
    tmp_path, overrides, monkeypatch, capsys
):
    names = ("fails", "is_not_sent", "goes_on")
    files = [write_experiment(tmp_path, tune=None, seeds=[1]).rename(tmp_path / f"{name}.yaml") for name in names]
    worked = []

    def work(trainer: ExperimentTrainer) -> None:
        worked.append(trainer.procedure.experiment.name)
        if worked[-1] == "fails":
            raise RunsFailed("fails failed")
        finish_all_runs(trainer.procedure, lambda run: 5.0)

    def send(log: LogConfig, name: str, *arguments: object) -> None:
        if name == "is_not_sent":
            raise RunError("the report is not sent")

    monkeypatch.setattr(ExperimentTrainer, "train_all", work)
    monkeypatch.setattr("lm.experiments.page.send_report", send)
    with pytest.raises(RunsFailed, match="fails failed; the report is not sent"):
        compare_experiments([read_experiment(path, overrides) for path in files], TrainingOptions())
    assert worked == [*names]
    assert "verdict" in capsys.readouterr().out


def interrupt() -> int:
    raise KeyboardInterrupt


def test_a_run_that_diverges_is_counted_and_not_trained_again(tmp_path, overrides, capsys):
    path = write_experiment(tmp_path, tune=None, arms={"softmax": {}, "wild": WILD})
    procedure = Procedure(read_experiment(path, overrides))
    trainer_that_calls(procedure, here).train_all()
    assert [run.outcome.state for run in procedure.known_runs()] == ["finished", "diverged"] * 2
    assert re.search(r"final: wild seed 1: diverged \(\S.*finite.*\), \d+ s; ", capsys.readouterr().out)
    trainer_that_calls(procedure, lambda run: pytest.fail(f"{run.label} is trained again")).train_all()
    _, wild = procedure.judgement().summary_rows()
    assert wild["verdict"] == "unstable"
    assert wild["reason"].startswith("2 final runs diverged: wild seed 1: "), wild["reason"]


def test_a_run_has_ended_only_with_its_last_checkpoint_and_the_primary_metric(tmp_path, overrides):
    experiment = read_experiment(
        write_experiment(tmp_path, tune=None, seeds=[1]), [*overrides, "eval.long_context.length_factor=2"]
    )
    procedure = Procedure(experiment)
    trainer_that_calls(procedure, here).train_all()
    outcome = next(iter(procedure.known_runs())).outcome
    assert outcome.state == "finished"
    assert replace(outcome, primary_metric_name="needle/exact").state == "unfinished"
    long_context = evaluation_path(outcome.folder, "long_context", outcome.last_step)
    long_context.unlink()
    assert replace(outcome).state == "unfinished", "killed after the validation"
    trainer_that_calls(Procedure(experiment), lambda run: train(replace(run.config, resume="auto"))).train_all()
    assert (replace(outcome).state, long_context.exists()) == ("finished", True)
    long_context.unlink()
    with (outcome.folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": outcome.last_step, "tokens": 0, "long_context/failed": "took too long"}) + "\n")
    assert replace(outcome).state == "finished", "eval.on_error is log"
    (outcome.folder / "checkpoints" / f"step-{outcome.last_step:06d}.ckpt").unlink()
    assert replace(outcome).state == "unfinished"


def test_a_metric_that_is_not_measured_stops_the_experiment_with_its_first_run(tmp_path, overrides):
    path = write_experiment(
        tmp_path, tune=None, primary={"metric": "tasks/mine/acc"}, evaluate={"eval.tasks": ["mine"]}
    )
    wrong = r"primary\.metric tasks/mine/acc was not measured .*; correct the file: lm metrics"
    with pytest.raises(RunError, match=wrong):
        trainer_that_calls(
            Procedure(read_experiment(path, overrides)), lambda run: finish_run(run, 5.0) or 0
        ).train_all()


def test_metrics_are_known_before_they_are_measured(tmp_path, overrides):
    settings = "inference=[{}, {rope: ntk}]"
    extra = [
        *(
            "long_context.length_factor=2",
            f"long_context.{settings}",
            "by_length.lengths=[8, 32]",
            f"by_length.{settings}",
        ),
        *("recall.tasks=[needle]", "recall.length_factors=[8, 16]", "recall.sequences=2"),
        *("needle.length_factors=[16]", "needle.trials=2", "needle.depths=[0.5]"),
    ]
    all_overrides = [*overrides, *(f"eval.{setting}" for setting in extra), "eval.sequences=4"]
    procedure = Procedure(read_experiment(write_experiment(tmp_path, tune=None, seeds=[1]), all_overrides))
    run = procedure.known_runs()[0]
    assert here(run) == 0
    with pytest.raises(ConfigError, match="is not measured by sequence at the last step; choose from: ") as error:
        read_experiment(
            write_experiment(tmp_path, tune=None, primary={"metric": "val/zzzzzzzzzzzzzzzzzz"}), all_overrides
        )
    names = str(error.value).partition("choose from: ")[2].split(", ")
    assert len(names) == 11
    frame = pd.concat([evaluation.frame for evaluation in run.outcome.last_evaluations])
    pairs = set(zip(frame["metric"], frame["about"], frame["sample"].notna(), strict=True))
    assert sorted(names) == sorted(name for name, about, has_units in pairs if has_units and about.matches(name))
    listed = metrics_of(run.config)
    assert sorted(metric.name for metric in listed if metric.can_decide) == sorted(names)
    logged = {name for line in run.outcome.log_lines for name in line} - {"step", "tokens"}
    patterns = {re.sub(r"/n\d+/", "/nN/", re.sub(r"(layer|head)\d+", r"\1#", name)) for name in logged}
    listed = {re.sub("(layer)L|(head)H", r"\1\2#", metric.name) for metric in listed}
    of_parameters = r"normalizer/.*"  # those of any normalizer are listed
    assert {name for name in listed ^ patterns if not re.match(of_parameters, name)} == set()


def test_runs_measured_on_other_sequences_are_measured_again(tmp_path, overrides, monkeypatch):
    path = write_experiment(tmp_path, tune=None, seeds=[1])
    procedure = Procedure(read_experiment(path, overrides))
    trainer_that_calls(procedure, here).train_all()
    softmax, _ = [run.config.run_folder for run in procedure.known_runs()]
    assert lm("eval", str(softmax), "eval.sequences=32").returncode == 0
    again = Procedure(procedure.experiment)
    assert [entry["runs"] for entry in again.judgement().summary_rows()] == [0, 1]
    assert remaining_commands(again.known_runs()[0]) == [["eval", str(softmax)]], "as the run is configured"
    monkeypatch.setattr(Outcome, "has_required_evaluations", True)
    with pytest.raises(RunError, match=r"val/loss was measured on other sequences than in .*lm eval"):
        Procedure(procedure.experiment).judgement()


def test_runs_on_other_text_are_not_mixed_in(tmp_path, overrides):
    path, text = write_experiment(tmp_path, tune=None), tmp_path / "texts"
    shutil.copytree(next(override for override in overrides if "paths" in override).partition("[")[2][:-1], text)
    own_overrides = [*overrides, f"data.source.paths=[{text}]", f"data.root={tmp_path / 'stores'}"]
    folder = open_experiment(read_experiment(path, own_overrides)).experiment.folder
    write_recorded_file(
        folder / "resolved.json", {"data_fingerprint": "0" * 16, "precision": 32, "compile": False, "threads": 1}
    )
    with pytest.raises(RunError, match="the text is not what the first runs were trained on"):
        start_experiment(read_experiment(path, own_overrides))


@pytest.mark.parametrize(("selecting", "changes"), [(False, {}), (True, {"tune": None})])
def test_held_out_documents_are_left_for_each_use(selecting: bool, changes: dict, tmp_path, overrides, monkeypatch):
    """Made-up draws: all held-out documents report, or all choose rates."""
    monkeypatch.setattr(
        "lm.experiments.compare.model_selection_mask",
        lambda fingerprint, documents: np.full(len(documents), selecting),
    )
    use = "report" if selecting else "choose learning rates"
    with pytest.raises(
        ConfigError,
        match=rf"base.data.val_fraction = 0.2: none of the \d+ held-out documents is left to {use} on",
    ):
        start_experiment(read_experiment(write_experiment(tmp_path, **changes), overrides))


def test_the_plan_needs_no_text_and_prepares_none(tmp_path, overrides):
    longer = ("trainer.max_steps=40", "optim.batch_tokens=512")
    missing_text = [
        *overrides,
        *longer,
        f"data.source.paths=[{tmp_path / 'nowhere'}]",
        f"data.root={tmp_path / 'stores'}",
    ]
    result = lm("compare", str(write_experiment(tmp_path)), *missing_text, "--plan")
    assert result.returncode == 0, result.stderr
    assert "16 runs, 0.3 M tokens, " in result.stdout, result.stdout
    bad_tokenizer = lm(
        "compare",
        str(write_experiment(tmp_path)),
        *missing_text,
        "--plan",
        "data.tokenizer={name: file, path: gone.json}",
    )
    counted = "16 runs; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted"
    assert f"{counted}; tokens and FLOPs: not known before lm prepare" in bad_tokenizer.stdout, bad_tokenizer.stderr
    assert not (tmp_path / "stores").exists()
    assert not (tmp_path / "runs").exists()


def test_the_first_start_settles_an_experiment(tmp_path, overrides, monkeypatch):
    path, first = (
        write_experiment(tmp_path),
        start_experiment(read_experiment(write_experiment(tmp_path), overrides)).experiment,
    )
    content = (first.folder / "resolved.json").read_text()
    monkeypatch.setattr("lm.experiments.compare._machine_settings", lambda *_: pytest.fail("was settled by the first"))
    again = start_experiment(read_experiment(path, [*overrides, "trainer.threads=null"]), jobs=7).experiment
    assert again.first_config.trainer.threads == 1
    assert (first.folder / "resolved.json").read_text() == content
    assert json.loads(content)["planned"]["shared"]["seeds"] == [1, 2]


def test_changes_of_what_is_trained_give_other_runs_and_changes_of_labels_do_not(tmp_path, overrides):
    def folders(*extra_overrides: str, **changes: object) -> list[str]:
        experiment = read_experiment(write_experiment(tmp_path, tune=None, **changes), [*overrides, *extra_overrides])
        return [run.config.run_folder.name for run in Procedure(experiment).known_runs()]

    before = folders()
    assert folders("log.every=7") == before
    assert folders(seeds=[1, 2, 3])[:4] == before
    assert folders(primary={"matters": 0.5}) == before
    for change in ("trainer.max_steps=41", "model.n_layer=1", "eval.sequences=32", "optim.lr=0.5"):
        assert not set(folders(change)) & set(before), change
