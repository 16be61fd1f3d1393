"""Run folders of experiments as if they had been trained: in an instant, with the losses that a test asks for."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.experiments.engine import ExperimentTrainer
from lm.experiments.page import experiment_files
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Slots
from lm.files import json_bytes, write_together
from lm.report.html import PAGE
from lm.runs.checkpoints import CHECKPOINT_FORMAT, link_checkpoint, save_checkpoint
from lm.runs.evaluations import Evaluation, Sample, Series, evaluation_path, measuring_code, validation_series
from lm.runs.folder import CHECKPOINTS, LAST, METRICS, step_path
from lm.runs.manifest import write_files
from lm.schema import Plain

DOCUMENTS = 24
FINGERPRINT = "fingerprint"


def finish(run: Run, loss: float, *curves: Series, unigram: float = 9.0, asked: dict[str, Plain] | None = None) -> None:
    """Leave of a run what training leaves: a checkpoint and the evaluations of its last step, of which the validation
    was `asked` for with these keys of `eval`; others have the series that are in `more`."""
    step = run.outcome.last_step
    save(run.config.run_folder, step)
    validate(run, step, loss, unigram, asked)
    for kind in {*run.outcome.scheduled_evaluations, *(curve.kind for curve in curves)}:
        evaluated(run, kind, step, [curve for curve in curves if curve.kind == kind])


def validate(run: Run, step: int, loss: float, unigram: float = 9.0, asked: dict[str, Plain] | None = None) -> None:
    """A validation at a step: all documents have the same loss."""
    sample = Sample("held-out", np.full((DOCUMENTS, 1), loss), np.ones(DOCUMENTS), np.arange(DOCUMENTS))
    series = validation_series(loss, None, unigram, run.config.data.seq_len, sample, FINGERPRINT)
    evaluated(run, "validation", step, series, asked)


def evaluated(run: Run, kind: str, step: int, series: list[Series], asked: dict[str, Plain] | None = None) -> None:
    """An evaluation's file."""
    folder, tokens = run.config.run_folder, step * run.config.optim.batch_tokens
    keep(
        folder,
        Evaluation(
            kind, step, tokens, FINGERPRINT, {}, "32", folder.name, tuple(series), asked or {}, {"lm": measuring_code()}
        ),
    )


def keep(folder: Path, evaluation: Evaluation) -> Path:
    """An evaluation in a run folder, written as `lm.evaluation.evaluation_kind` does."""
    path = evaluation_path(folder, evaluation.kind, evaluation.step)
    write_files(folder, {str(path.relative_to(folder)): json_bytes(evaluation.plain())}, evaluation.step)
    return path


def save(folder: Path, step: int, config: str = "") -> None:
    """A checkpoint without tensors, with its lines in the manifest."""
    facts = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "tokens": 0,
        "phase": 0,
        "vocab_size": 1,
        "data_fingerprint": FINGERPRINT,
        "config": config,
    }
    path = step_path(folder / CHECKPOINTS, step)
    save_checkpoint({"lm": {**facts, "plugins": {}}, "state_dict": {}}, path)
    link_checkpoint(LAST, path)


def logged(run: Run, *losses: float) -> None:
    """A run's log of these training losses."""
    lines = [json.dumps({"step": step, "tokens": step, "train/loss": loss}) for step, loss in enumerate(losses, 1)]
    run.config.run_folder.mkdir(parents=True, exist_ok=True)
    (run.config.run_folder / METRICS).write_text("".join(f"{line}\n" for line in lines))
    if run.outcome.checkpoint.exists():
        save(run.config.run_folder, run.outcome.last_step)


def launching(procedure: Procedure, launch: Callable[[Run], int], slots: Slots | None = None) -> ExperimentTrainer:
    """The work on an experiment whose runs a function trains in place of a process; it returns the exit status."""
    jobs = ExperimentTrainer(procedure, slots or Slots(1))
    jobs.trainer.train = lambda run, devices: (launch(run), 0.0)
    return jobs


def finish_all(procedure: Procedure, loss: Callable[[Run], float]) -> Procedure:
    """Finish all runs that the experiment comes to need, each with the loss that is given for it; returns the
    procedure.
    """
    while unfinished := [run for run in procedure.known_runs() if not run.outcome.ended]:
        for run in unfinished:
            finish(run, loss(run))
    return procedure


def write_page(procedures: list[Procedure], folder: Path) -> Path:
    """Write the page of experiments into a folder, as `lm compare --out` does; returns its path."""
    write_together(experiment_files(procedures, folder), "the report")
    return folder / PAGE
