"""The long table of every number that runs have measured: a pandas data frame with one row per number."""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from lm.errors import RunError
from lm.files import expand_home
from lm.report.comparison import arm_label
from lm.runs.evaluations import Evaluation, Series, evaluation_files, load_evaluation, selection_mask, series_names
from lm.runs.folder import CONFIG, ENVIRONMENT, SWAPPED
from lm.runs.record import RunRecord, read_run

RUN_COLUMNS = ("run", "folder", "experiment", "arm", "size", "stage", "rate", "seed", "commit", "state")
MEASURED_COLUMNS = (
    "step",
    "tokens",
    "kind",
    "metric",
    "quantity",
    "task",
    "setting",
    "unit",
    "better",
    "x",
    "until",
    "sequences",
    "sample",
    "group",
)
COLUMNS = (*RUN_COLUMNS, *MEASURED_COLUMNS, "part", "weight", "value")

# a block of rows of the frame, by column: an array, or the one value that all its rows have
RowBlock = dict[str, object]


def results(*folders: str | os.PathLike, history: bool = False) -> pd.DataFrame:
    """The numbers that runs have measured, as a data frame with one row per number (`COLUMNS`).

    A mean is the average of `value` over the rows of a `part`, weighted by `weight`; over bins it is weighted by `until
    - x`, too.

    Args:
        folders: run folders, or folders that hold run folders, such as folders of experiments.
        history: whether to return evaluations of all steps and numbers logged in training (kind `log`); else each
            kind's last evaluation.

    Returns:
        The frame. Columns of the run: name, folder, experiment with its arm, size, stage and rate, seed, git commit,
            and `state` (finished,
        unfinished or diverged). Without an experiment `arm` is the normalizer with its options. `rate` is the value of
        the tuned key, or optim.lr if no key is tuned. The `rate` of several keys is text, `0.002 / 0.1`, with `any` for
        a key that the arm lacks.

        Columns of the measurement: step, tokens seen by then, kind of evaluation, metric by its name in metrics.jsonl,
            quantity (such as
        `accuracy`, which is also the metric where metrics.jsonl has none), task (with its options where the evaluation
        has another task of that name), inference setting, unit of the value, and the better direction. `x` is the point
        on the axis or the start of a bin, and `until` the end of a bin.

        Columns of the sequences: `sequences` is their hash, and values of equal hashes can be paired by `sample`.
            `group` is the document.
        `part` is `selects` for held-out documents that choose learning rates and checkpoints, and `reports` for all
        others. A number of which only the mean is stored has no sample.

    Raises RunError: a folder without runs, or a file of a run that can't be read.
    """
    if non_paths := [folder for folder in folders if not isinstance(folder, str | os.PathLike)]:
        raise RunError(
            f"{non_paths[0]!r}: must be the path of a folder, not {type(non_paths[0]).__name__}; several are several "
            "arguments"
        )
    if not folders:
        raise RunError("no run folder given, e.g. runs/softmax")
    runs = [run for folder in folders for run in _run_folders(expand_home(folder))]
    return frame(block for run in dict.fromkeys(runs) for block in _run_blocks(read_run(run), history))


def frame(blocks: Iterable[RowBlock]) -> pd.DataFrame:
    """Join blocks of rows into a data frame with `COLUMNS`; NaN where a block lacks a column."""
    columns: dict[str, list[np.ndarray]] = {name: [np.array([], object)] for name in COLUMNS}
    for block in blocks:
        for name, arrays in columns.items():
            value = math.nan if block.get(name) is None else block[name]
            arrays.append(
                value if isinstance(value, np.ndarray) else np.full(len(np.asarray(block["value"])), value, object)
            )
    return pd.DataFrame(
        {name: np.concatenate(arrays[1:] or arrays) for name, arrays in columns.items()}
    ).infer_objects()


def evaluation_blocks(evaluation: Evaluation, run_values: RowBlock) -> Iterator[RowBlock]:
    """Yield the rows of an evaluation: blocks for each of its series. `run_values`: the run's columns, which all of
    these rows share.
    """
    shared_columns = run_values | {"step": evaluation.step, "tokens": evaluation.tokens_seen, "kind": evaluation.kind}
    for series, task in series_names(evaluation.series).items():
        yield from (shared_columns | {"task": task} | block for block in _series_blocks(series))


def _series_blocks(series: Series) -> Iterator[RowBlock]:
    """Yield blocks of rows with a series' values: for each sample a block, with a row for each of its units at each
    axis value or bin.

    A unit is a sequence, document or trial. A series without samples gives one block, which holds its means.
    """
    series_values = {name: getattr(series, name) for name in ("setting", "unit", "better")}
    series_values["quantity"], names = series.metric, np.array(series.names, object)
    axis_values = np.array(series.axis.values, float) if series.axis else np.array([math.nan])
    starts, ends = (
        (axis_values[:-1], axis_values[1:]) if series.bins else (axis_values, np.full(len(axis_values), math.nan))
    )
    if not series.samples:
        yield series_values | {
            "x": starts,
            "until": ends,
            "metric": names,
            "part": "",
            "value": series.means.astype(float),
        }
    first_column = 0
    for sample in series.samples:
        unit_count, column_count = sample.values.shape
        is_selecting = (
            selection_mask(series.data_fingerprint, sample.groups)
            if series.data_fingerprint
            else np.zeros(unit_count, bool)
        )
        unit_columns = {"sample": np.arange(unit_count), "group": sample.groups, "weight": sample.weights.astype(float)}
        unit_columns["part"] = np.where(is_selecting, "selects", "reports").astype(object)
        axis_columns = {
            "x": starts[first_column : first_column + column_count],
            "until": ends[first_column : first_column + column_count],
            "metric": names[first_column : first_column + column_count],
        }
        row_columns = {name: np.tile(values, column_count) for name, values in unit_columns.items()}
        row_columns |= {name: np.repeat(values, unit_count) for name, values in axis_columns.items()}
        yield (
            series_values
            | row_columns
            | {"sequences": sample.sha256, "value": sample.values.T.reshape(-1).astype(float)}
        )
        first_column += column_count


def _run_folders(folder: Path) -> list[Path]:
    """Return [folder] for a run folder, else the run folders below it except those in a folder named `swapped`. Raises
    RunError: there are none."""
    if (folder / CONFIG).is_file():
        return [folder]
    parents = (path.parent for path in folder.glob(f"**/{CONFIG}"))
    run_folders = sorted(path for path in parents if (path / ENVIRONMENT).is_file() and path.parent.name != SWAPPED)
    if not run_folders:
        raise RunError(f"{folder}: no run folder, and none below it: name the folder of a run or an experiment")
    return run_folders


def run_columns(record: RunRecord) -> RowBlock:
    experiment = record.config.get("experiment")
    experiment = experiment if isinstance(experiment, dict) else {}
    return {
        "run": record.name,
        "folder": str(record.folder),
        "experiment": experiment.get("name"),
        "arm": experiment.get("arm") or arm_label(record),
        "size": experiment.get("size"),
        "stage": experiment.get("stage"),
        "rate": experiment.get("rate") or record.flat.get("optim.lr"),
        "seed": record.config["seed"],
        "commit": record.commits,
        "state": record.state,
    }


def _run_blocks(record: RunRecord, history: bool) -> Iterator[RowBlock]:
    run_values = run_columns(record)
    evaluations = list(record.evaluations)
    if history:
        files = sorted(evaluation_files(record.folder).items(), key=lambda item: item[0][1])
        evaluations = [evaluation for _, path in files if (evaluation := load_evaluation(path))]
    for evaluation in evaluations:
        yield from evaluation_blocks(evaluation, run_values)
    for log_line in record.log_lines if history else ():
        numbers = {
            name: value
            for name, value in log_line.items()
            if isinstance(value, int | float) and name not in ("step", "tokens")
        }
        if numbers and "tokens" in log_line:
            metric_names = np.array([*numbers], dtype=object)
            shared_columns = {"step": log_line["step"], "tokens": log_line["tokens"], "kind": "log", "part": ""}
            yield run_values | shared_columns | {"metric": metric_names, "value": np.array([*numbers.values()], float)}
