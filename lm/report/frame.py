"""This module makes the long table of every number that runs have measured: a pandas data frame with one row per
number."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from lm.errors import RunError
from lm.files import expand_home
from lm.report.comparison import normalizer_history_label
from lm.runs.evaluations import Evaluation, chance_level, evaluation_files, evaluation_rows, load_evaluation
from lm.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE, SWAPPED_FOLDER
from lm.runs.record import RunRecord, read_run

RUN_COLUMNS = ("run", "folder", "experiment", "arm", "size", "stage", "rate", "seed", "commit", "state")
MEASUREMENT_COLUMNS = (
    "step",
    "tokens",
    "kind",
    "metric",
    "quantity",
    "task",
    "setting",
    "unit",
    "better",
    "chance",
    "x",
    "until",
    "sequences",
    "sample",
    "group",
)
FRAME_COLUMNS = (*RUN_COLUMNS, *MEASUREMENT_COLUMNS, "part", "weight", "value")


def results(*folders: str | os.PathLike, history: bool = False) -> pd.DataFrame:
    """Return the numbers that runs have measured, as a data frame with one row per number (`FRAME_COLUMNS`).

    A mean is the average of `value`, weighted by `weight`, over the rows of one `part` of the held-out documents. Over
    bins it is weighted by `until - x`, too.

    Args:
        folders: run folders, or folders that hold run folders, such as folders of experiments.
        history: whether to return evaluations of all steps and numbers logged in training (kind `log`); else each
            kind's last evaluation.

    Returns:
        The frame. Columns of the run: name, folder, experiment with its arm, size, stage and rate, seed, git commit,
        and `state` (finished, unfinished or diverged). `stage` is `tune` or `final`. Without an experiment `arm` is the
        normalizer with its options. `rate` is the value of the tuned key, or optim.lr if no key is tuned.

        Columns of the measurement: step, tokens seen by then, kind of evaluation, metric, quantity (such as
        `accuracy`), task, inference setting, unit and better direction. `metric` is the name in metrics.jsonl, or the
        quantity where that file has no name. `task` includes the task's options if two tasks of the evaluation have the
        same name. `chance` is the value of a model that has learned nothing. `x` is the point on the axis or the start
        of a bin, and `until` the end of a bin.

        Columns of the sequences: `sequences` is their hash, and values of equal hashes can be paired by `sample`.
        `group` is the document. `part` is `selects` for held-out documents that choose learning rates and checkpoints,
        and `reports` for all others. A number of which only the mean is stored has no sample.

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
    return concatenate_blocks([block for run in dict.fromkeys(runs) for block in _run_blocks(read_run(run), history)])


def concatenate_blocks(row_blocks: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Join blocks of rows into a data frame with `FRAME_COLUMNS`; missing where a block lacks a column."""
    row_blocks = [block for block in row_blocks if len(block)]
    frame = pd.concat(row_blocks, ignore_index=True) if row_blocks else pd.DataFrame()
    return frame.reindex(columns=FRAME_COLUMNS).infer_objects()


def evaluation_block(evaluation: Evaluation, run_values: dict[str, Any]) -> pd.DataFrame:
    """Return the rows of an evaluation. `run_values`: the run's columns, which all of these rows share."""
    rows = evaluation_rows([evaluation])
    about, has_unit = rows["about"], rows["sample"].notna()
    levels = {metric: chance_level(metric)[1] for metric in about.cat.categories}
    columns = run_values | {"task": rows["task_label"], "tokens": rows["tokens_seen"]}
    columns["chance"] = [levels[metric] for metric in about]
    columns["part"] = rows["part"].mask((rows["part"] == "") & has_unit, "reports")
    # a number of which only the mean is stored has neither sequences nor a weight
    columns |= {name: rows[name].where(has_unit) for name in ("sequences", "weight")}
    return rows.assign(**columns).reindex(columns=FRAME_COLUMNS)


def _run_folders(folder: Path) -> list[Path]:
    """Return [folder] for a run folder, else the run folders below it except those in a folder named `swapped`. Raises
    RunError: there are none."""
    if (folder / CONFIG_FILE).is_file():
        return [folder]
    parents = (path.parent for path in folder.glob(f"**/{CONFIG_FILE}"))
    run_folders = sorted(
        path for path in parents if (path / ENVIRONMENT_FILE).is_file() and path.parent.name != SWAPPED_FOLDER
    )
    if not run_folders:
        raise RunError(f"{folder}: no run folder, and none below it: name the folder of a run or an experiment")
    return run_folders


def run_columns(record: RunRecord) -> dict[str, Any]:
    """Return the columns that describe a run, by name; all rows of the run share the values."""
    experiment = record.config.get("experiment")
    experiment = experiment if isinstance(experiment, dict) else {}
    return {
        "run": record.name,
        "folder": str(record.folder),
        "experiment": experiment.get("name"),
        "arm": experiment.get("arm") or normalizer_history_label(record),
        "size": experiment.get("size"),
        "stage": experiment.get("stage"),
        "rate": experiment.get("rate") or record.flat_config.get("optim.lr"),
        "seed": record.config["seed"],
        "commit": record.commits_text,
        "state": record.state,
    }


def _run_blocks(record: RunRecord, history: bool) -> Iterator[pd.DataFrame]:
    """Yield the blocks of rows of a run: of its evaluations and, with `history`, of its log."""
    run_values = run_columns(record)
    evaluations = list(record.evaluations)
    if history:
        files = sorted(evaluation_files(record.folder).items(), key=lambda item: item[0][1])
        evaluations = [load_evaluation(path) for _, path in files]
    for evaluation in evaluations:
        yield evaluation_block(evaluation, run_values)
    log = [line for line in record.log_lines if "tokens" in line] if history else []
    if log:
        numbers = pd.DataFrame(log).select_dtypes("number").melt(["step", "tokens"], var_name="metric").dropna()
        yield numbers.sort_values("step", kind="stable").assign(kind="log", part="", **run_values)
