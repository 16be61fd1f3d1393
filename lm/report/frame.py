"""The long table of everything that runs have measured: a pandas data frame with one line a number."""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from lm.errors import RunError
from lm.runs.evaluations import Evaluation, Series, evaluation_files, evaluation_in, selects
from lm.runs.folder import CONFIG, DIVERGED, ENVIRONMENT, SWAPPED
from lm.runs.record import RunRecord, divergence, read_run

RUN_COLUMNS = ("run", "folder", "experiment", "arm", "size", "stage", "rate", "seed", "commit", "state")
MEASURED = ("step", "tokens", "kind", "metric", "task", "setting", "unit", "better", "x", "until", "sequences", "sample", "group")
COLUMNS = (*RUN_COLUMNS, *MEASURED, "part", "weight", "value")
LOG = "log"  # kind of the numbers that were logged while training

Lines = dict[str, object]  # columns of some lines: an array, or the value that all of them have


def results(*folders: str | os.PathLike, history: bool = False) -> pd.DataFrame:
    """Everything that runs have measured, one line a number (`COLUMNS`).

    A mean is the average of `value` over the lines of a `part`, weighted by `weight`; over bins it is weighted by `until - x`, too.

    Args:
        folders: run folders, or folders that hold them, such as those of experiments.
        history: the evaluations of every step and what was logged while training (kind `log`), in place of each kind's last evaluation.

    Returns:
        The frame. Columns of the run: its name and folder, its place in an experiment, seed, git commit, and `state`: finished, unfinished
        or diverged. Without an experiment `arm` is the normalizer, without a tuned key `rate` is optim.lr, and of several keys it is text,
        `0.002 / 0.1`, with `any` for a key that the arm lacks. Columns of what was measured:
        step, tokens seen by then, kind of evaluation, metric, task, inference setting, unit of the value, the better direction, the
        place `x` on the axis, and of bins its end `until`. Columns of the sequence: `sequences` (a hash: values of equal hashes can be
        paired by `sample`), `sample`, `group` (document), and `part`: documents that select learning rates (`selects`), or all others
        (`reports`). A number that is known as a mean alone has no sample.

    Raises:
        RunError: no run there, or a file of one that can't be read.
    """
    runs = [run for folder in folders for run in _run_folders(Path(folder))]
    return frame(block for run in dict.fromkeys(runs) for block in _blocks(read_run(run), history))


def frame(blocks: Iterable[Lines]) -> pd.DataFrame:
    """The data frame of blocks of lines, with `COLUMNS`."""
    known = list(blocks)
    sizes = [len(_column(block["value"], 1)) for block in known]
    columns = {}
    for name in COLUMNS:
        parts = [_column(block.get(name), size) for block, size in zip(known, sizes, strict=True)]
        columns[name] = np.concatenate(parts) if parts else np.array([], dtype=object)
    return pd.DataFrame(columns).infer_objects()


def evaluation_blocks(evaluation: Evaluation, run: Lines) -> Iterator[Lines]:
    """The numbers of an evaluation, a block for each sample of each of its series; `run`: what all lines share."""
    shared = run | {"step": evaluation.step, "tokens": evaluation.tokens_seen, "kind": evaluation.kind}
    for series in evaluation.series:
        yield from (shared | block for block in _series_blocks(series))


def _series_blocks(series: Series) -> Iterator[Lines]:
    """The blocks of a series: of each sample, the values of all of its units, column by column; without samples the means."""
    what = {name: getattr(series, name) for name in ("metric", "setting", "unit", "better")} | {"task": series.what}
    places = np.array(series.axis.values, float) if series.axis else np.array([math.nan])
    starts, ends = (places[:-1], places[1:]) if series.bins else (places, np.full(len(places), math.nan))
    if not series.samples:
        yield what | {"x": starts, "until": ends, "part": "", "value": series.means.astype(float)}
    begin = 0
    for sample in series.samples:
        units, width = sample.values.shape
        selected = selects(series.data_fingerprint, sample.groups) if series.data_fingerprint else np.zeros(units, bool)
        of_unit = {"sample": np.arange(units), "group": sample.groups, "weight": sample.weights.astype(float)}
        of_unit["part"] = np.where(selected, "selects", "reports").astype(object)
        of_column = {"x": starts[begin : begin + width], "until": ends[begin : begin + width]}
        lines = {name: np.tile(values, width) for name, values in of_unit.items()}
        lines |= {name: np.repeat(values, units) for name, values in of_column.items()}
        yield what | lines | {"sequences": sample.sha256, "value": sample.values.T.reshape(-1).astype(float)}
        begin += width


def _column(value: object, size: int) -> np.ndarray:
    """A column of a block, (size,): an array as it is, any other value repeated."""
    if isinstance(value, np.ndarray):
        return value
    column = np.empty(size, dtype=object)
    column[:] = math.nan if value is None else value
    return column


def _run_folders(folder: Path) -> list[Path]:
    """The run folder itself, or those below it. Raises RunError: there are none."""
    if (folder / CONFIG).is_file():
        return [folder]
    below = sorted(path.parent for path in folder.glob(f"**/{CONFIG}") if (path.parent / ENVIRONMENT).is_file())
    below = [path for path in below if path.parent.name != SWAPPED]
    if not below:
        raise RunError(f"{folder}: no run folder, and none below it: name the folder of a run or an experiment")
    return below


def run_columns(record: RunRecord) -> Lines:
    """The columns `RUN` of a run."""
    place, steps_planned = record.config.get("experiment"), record.flat.get("trainer.max_steps")
    place = place if isinstance(place, dict) else {}
    steps = [evaluation.step for evaluation in record.evaluations]
    last = max(steps, default=-1)
    ended = last >= (steps_planned if isinstance(steps_planned, int) else 0)
    at_last = (each for evaluation in record.evaluations if evaluation.step == last for each in evaluation.series)
    final = next((each for each in at_last if "val/loss" in each.logged), None)
    diverged = divergence(record.logged, final if ended else None)
    state = DIVERGED if diverged else "finished" if ended else "unfinished"
    return {
        "run": record.name,
        "folder": str(record.folder),
        "experiment": place.get("name"),
        "arm": place.get("arm") or record.flat["model.normalizer.name"],
        "size": place.get("size"),
        "stage": place.get("stage"),
        "rate": place.get("rate") or record.flat.get("optim.lr"),
        "seed": record.config["seed"],
        "commit": record.commits,
        "state": state,
    }


def _blocks(record: RunRecord, history: bool) -> Iterator[Lines]:
    """The lines of a run."""
    run = run_columns(record)
    evaluations = list(record.evaluations)
    if history:
        files = sorted(evaluation_files(record.folder).items(), key=lambda item: item[0][1])
        evaluations = [each for _, path in files if (each := evaluation_in(path))]
    for evaluation in evaluations:
        yield from evaluation_blocks(evaluation, run)
    for line in record.logged if history else ():
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name not in ("step", "tokens")}
        if numbers and "tokens" in line:
            names = np.array([*numbers], dtype=object)
            shared = {"step": line["step"], "tokens": line["tokens"], "kind": LOG, "part": ""}
            yield run | shared | {"metric": names, "value": np.array([*numbers.values()], float)}
