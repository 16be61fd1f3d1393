"""Make run folders of experiments as if they had been trained, with the losses that a test asks for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from lm.evaluation.held_out import Validation
from lm.evaluation.measurement import measuring_code_digest, metric_rows, sampling_unit_frame
from lm.experiments.page import experiment_files
from lm.experiments.procedure import Procedure, Run
from lm.experiments.trainer import ExperimentTrainer
from lm.files import write_together
from lm.plain import Plain
from lm.report.html import PAGE_FILE
from lm.runs.checkpoints import CHECKPOINT_FORMAT, save_checkpoint
from lm.runs.evaluations import UNIGRAM_LEVEL_NAME, Evaluation, evaluation_path, join_rows
from lm.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE, checkpoint_path, write_files

N_DOCUMENTS = 24
FINGERPRINT = "fingerprint"
EMPTY_FRAME = join_rows([])


def finish_run(
    run: Run,
    loss: float,
    more: dict[str, pd.DataFrame] | None = None,
    unigram: float = 9.0,
    asked: dict[str, Plain] | None = None,
) -> None:
    """Write what training leaves of a run: a checkpoint and the evaluations of its last step.

    Args:
        loss: validation loss.
        more: rows of other evaluations, by kind.
        unigram: loss of a model that knows only token frequencies.
        asked: keys of `eval` that asked for the validation.
    """
    step, more = run.outcome.last_step, more or {}
    save_empty_checkpoint(run.config.run_folder, step)
    write_validation(run, step, loss, unigram, asked)
    for kind in {*run.outcome.scheduled_evaluations, *more}:
        write_frame(run, kind, step, more.get(kind, EMPTY_FRAME))


def write_validation(
    run: Run, step: int, loss: float, unigram: float = 9.0, asked: dict[str, Plain] | None = None
) -> None:
    """Write a run's validation at a step, with the same loss for all documents."""
    write_frame(run, "validation", step, validation_frame(np.full(N_DOCUMENTS, loss), unigram), asked)


def validation_frame(losses: np.ndarray, unigram: float = 9.0, units: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the rows of a validation with the given losses of units; by default of documents, one sequence each."""
    units = sampling_unit_frame("held-out", np.arange(len(losses)), None, FINGERPRINT) if units is None else units
    return metric_rows(
        replace(Validation.logged_metrics[0], references=((UNIGRAM_LEVEL_NAME, unigram),)), losses[:, None], units
    )


def write_frame(run: Run, kind: str, step: int, frame: pd.DataFrame, asked: dict[str, Plain] | None = None) -> None:
    """Write rows as the file of a run's evaluation at a step."""
    folder, tokens = run.config.run_folder, step * run.config.optim.batch_tokens
    write_evaluation(
        folder,
        make_evaluation(frame, kind, step, tokens, run.config.data.seq_len, folder.name, FINGERPRINT, asked or {}),
    )


def make_evaluation(
    frame: pd.DataFrame,
    kind: str = "probe",
    step: int = 8,
    tokens: int = 256,
    seq_len: int = 64,
    weights: str = "weights",
    fingerprint: str = FINGERPRINT,
    asked: dict[str, Plain] | None = None,
) -> Evaluation:
    """Return an evaluation with the given rows."""
    code = {"lm": measuring_code_digest()}
    return Evaluation(kind, step, tokens, seq_len, fingerprint, {}, "32", weights, frame, asked or {}, code)


def write_evaluation(folder: Path, evaluation: Evaluation) -> Path:
    """Write an evaluation to a run folder, as `lm.evaluation.measurement` does, and return its path."""
    path = evaluation_path(folder, evaluation.kind, evaluation.step)
    write_files(folder, {str(path.relative_to(folder)): evaluation.file_content()}, evaluation.step)
    return path


def save_empty_checkpoint(folder: Path, step: int, config: str = "") -> None:
    """Write a checkpoint without tensors, with its lines in the manifest."""
    facts = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "tokens": 0,
        "phase": 0,
        "vocab_size": 1,
        "data_fingerprint": FINGERPRINT,
        "config": config,
    }
    path = checkpoint_path(folder / CHECKPOINTS_FOLDER, step)
    save_checkpoint({"lm": {**facts, "plugins": {}}, "state_dict": {}}, path)


def write_training_losses(run: Run, *losses: float) -> None:
    """Write a run's metrics.jsonl with the given training losses, one step each."""
    lines = [json.dumps({"step": step, "tokens": step, "train/loss": loss}) for step, loss in enumerate(losses, 1)]
    run.config.run_folder.mkdir(parents=True, exist_ok=True)
    (run.config.run_folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines))
    if run.outcome.checkpoint.exists():
        save_empty_checkpoint(run.config.run_folder, run.outcome.last_step)


def trainer_that_calls(procedure: Procedure, launch: Callable[[Run], int]) -> ExperimentTrainer:
    """Return a trainer of an experiment that calls `launch` for each run in place of a process.

    launch: function from a run to the exit status of its training.
    """
    jobs = ExperimentTrainer(procedure, [()])
    jobs.run_trainer.train = lambda run, devices: (launch(run), 0.0)
    return jobs


def finish_all_runs(procedure: Procedure, loss: Callable[[Run], float]) -> Procedure:
    """Finish all runs that the experiment comes to need, with the losses that `loss` gives, and return the
    procedure.
    """
    while unfinished := [run for run in procedure.known_runs() if not run.outcome.has_ended]:
        for run in unfinished:
            finish_run(run, loss(run))
    return procedure


def write_page(procedure: Procedure, folder: Path) -> Path:
    """Write the page of an experiment to a folder, and return its path."""
    write_together(experiment_files(procedure, folder, procedure.judgement()), "the report")
    return folder / PAGE_FILE
