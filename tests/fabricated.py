"""Run folders of experiments as if they had been trained: in an instant, with the losses that a test asks for."""

import json
from collections.abc import Callable

import numpy as np

from lm.experiments.procedure import Procedure, Run
from lm.runs.evaluations import Evaluation, evaluation_path
from lm.runs.folder import CHECKPOINTS, METRICS, step_path, write_json
from lm.runs.series import Sample, Series
from lm.runs.validation import validation_series
from lm.schema import Plain

DOCUMENTS = 24
FINGERPRINT = "fingerprint"


def finish(run: Run, loss: float, *more: Series, unigram: float = 9.0, asked: dict[str, Plain] | None = None) -> None:
    """Leave of a run what training leaves: a checkpoint and the evaluations of its last step, of which the validation was `asked` for with
    these keys of `eval`; others have the series that are in `more`."""
    folder, step = run.config.run_folder, run.outcome.last_step
    checkpoint = step_path(folder / CHECKPOINTS, step)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.touch()
    validate(run, step, loss, unigram, asked)
    for kind in {*run.outcome.scheduled, *(one.kind for one in more)}:
        evaluated(run, kind, step, [one for one in more if one.kind == kind])


def validate(run: Run, step: int, loss: float, unigram: float = 9.0, asked: dict[str, Plain] | None = None) -> None:
    """A validation at a step: all documents have the same loss."""
    sample = Sample("held-out", np.full((DOCUMENTS, 1), loss), np.ones(DOCUMENTS), np.arange(DOCUMENTS))
    series = validation_series(loss, None, unigram, run.config.data.seq_len, sample, FINGERPRINT)
    evaluated(run, "validation", step, series, asked)


def evaluated(run: Run, kind: str, step: int, series: list[Series], asked: dict[str, Plain] | None = None) -> None:
    """An evaluation's file."""
    tokens = step * run.config.optim.batch_tokens
    one = Evaluation(kind, step, tokens, FINGERPRINT, {}, "32", "weights", tuple(series), asked or {})
    write_json(evaluation_path(run.config.run_folder, kind, step), one.plain())


def logged(run: Run, *losses: float) -> None:
    """A run's log of these training losses."""
    lines = [json.dumps({"step": step, "tokens": step, "train/loss": loss}) for step, loss in enumerate(losses, 1)]
    run.config.run_folder.mkdir(parents=True, exist_ok=True)
    (run.config.run_folder / METRICS).write_text("".join(f"{line}\n" for line in lines))


def finish_all(procedure: Procedure, loss: Callable[[Run], float]) -> Procedure:
    """Finish all runs that the experiment comes to need, each with the loss that is given for it; returns the procedure."""
    while left := [one for one in procedure.known() if not one.outcome.ended]:
        for one in left:
            finish(one, loss(one))
    return procedure
