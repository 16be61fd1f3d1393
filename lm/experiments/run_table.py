"""This module reads tables of runs, which any program may have trained, checks them, and judges the runs."""

import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from numbers import Real
from typing import Literal, get_args

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionDtype
from pandas.io.common import get_handle

from lm.config.schema import build_block
from lm.errors import ConfigError, Problem, RunError, one_line, suggestion_or_all_names
from lm.experiments.judging import (
    DIVERGED_KEY,
    FINISHED,
    RUN_STATES,
    Judgement,
    PrimaryMetric,
    Question,
    SizeArm,
    judge,
    measure_noise,
)
from lm.plain import Plain
from lm.statistics.intervals import is_unlearned

BetterDirection = Literal["lower", "higher"]
_RUN_COLUMNS = ["size", "arm", "seed"]  # columns that tell the runs of a table apart
_VALUE_LIMITS = 1e-30, 1e30  # of weights and values: squares and products of such numbers are finite and exact


def judge_table(
    table: str | os.PathLike | pd.DataFrame,
    metric: str,
    better: BetterDirection | None,
    matters: float,
    baseline: str | None,
    condition: str,
    split_columns: Sequence[str],
    arm_column: str,
    seed_column: str,
    target: float | None,
    unpaired: bool,
    bounds: tuple[float, float] | None,
) -> Judgement:
    """Judge the arms of a table of runs. Arguments and errors are as for `lm.judge`. Four arguments have other names
    there: `condition` is `where`, `split_columns` is `by`, `arm_column` is `arm`, and `seed_column` is `seed`."""
    problems: list[Problem] = []
    direction = {} if better is None else {"better": better}
    primary = build_block(PrimaryMetric, {"metric": metric, "matters": matters} | direction, "", problems)
    if target is not None and not (isinstance(target, Real) and math.isfinite(target)):
        problems.append(Problem("target", target, "must be a finite number"))
    if target is not None and (baseline is not None or unpaired):
        problems.append(Problem("target", target, "stands in place of a baseline", "leave baseline and unpaired out"))
    if problems:
        raise ConfigError(problems)
    source = "the table"
    if not isinstance(table, pd.DataFrame):
        source, table = str(table), read_table(table, arm_column)
    is_paired = not unpaired and target is None
    frame, primary = read_runs(
        table, source, primary, better, condition, split_columns, arm_column, seed_column, is_paired
    )
    known = dict.fromkeys(frame["arm"])
    if target is not None:
        baseline = f"target {target}"
        known = {baseline: None, **known}
    elif baseline is None and "experiment" in frame and frame["experiment"].notna().any():
        reason = "name the baseline: runs of an experiment are in the order of their folders"
        raise RunError(f"{source}: {reason}; {', '.join(known)}")
    baseline = next(iter(known)) if baseline is None else baseline
    if baseline not in known or len(known) < 2:
        reason = f"no arm {baseline}" if baseline not in known else "a verdict takes two arms"
        raise RunError(f"{source}: {reason}; there is {', '.join(known)}")
    if is_paired and frame.groupby(["size", "seed"])["arm"].nunique().max() == 1:  # no two arms share a seed
        unpaired, is_paired = True, False
    if bounds and not frame["value"][frame["state"] == FINISHED].between(*bounds).all():
        raise RunError(f"{source}: a value is outside of the bounds {bounds[0]:g} and {bounds[1]:g}")
    arms, sizes = (baseline, *(arm for arm in known if arm != baseline)), dict.fromkeys(frame["size"])
    seeds = sorted(set(frame["seed"]), key=lambda seed: (isinstance(seed, str), seed))
    for _, of_size in frame.groupby("size"):
        _check_same_units(of_size, source)
    _check_seeds(frame, product(sizes, arms[target is not None :]), seeds, is_paired, source)
    order = [pd.factorize(frame["sample"], sort=True)[0]]
    for name, values in (("seed", seeds), ("arm", arms), ("size", sizes)):
        order.append(frame[name].map({value: place for place, value in enumerate(values)}))
    frame = frame.assign(unlearned=_unbeaten_level_texts(frame, primary.better)).iloc[np.lexsort(order)]
    rates = dict.fromkeys(sizes, dict.fromkeys(arms))
    return judge(
        frame,
        Question(
            primary,
            arms,
            tuple(seeds),
            rates,
            unpaired_with_baseline=unpaired,
            target_value=target,
            value_bounds=bounds,
        ),
    )


def table_noise(
    table: pd.DataFrame,
    source: str,
    metric: str,
    condition: str,
    arm_column: str,
    seed_column: str,
    difference: float | None,
) -> dict[str, Plain]:
    """Measure how much runs of a table differ between seeds, as `measure_noise` does. Only rows that satisfy
    `condition` count, an expression of `pandas.DataFrame.eval` such as `step == 500`. `source` names the table in
    errors.

    Runs that have not finished don't count. If `difference` is a number, the result also says how many seeds of each
    arm detect a difference that large. Raises RunError: the table is wrong, or no arm has two finished runs.
    """
    rows, primary = read_runs(table, source, PrimaryMetric(metric), None, condition, (), arm_column, seed_column, False)
    rows = rows.query("state == 'finished'")
    rows = rows.assign(value=rows["value"] * rows["weight"], seed=rows["seed"].map(str))
    sums = rows.groupby(_RUN_COLUMNS, sort=False)[["value", "weight"]].sum()
    runs = (sums["value"] / sums["weight"]).unstack("seed")  # (sizes and arms; seeds)
    if not (noise := measure_noise(runs, seed_column in table, difference)):
        raise RunError(f"{source}: no arm has two finished runs, which differ in their seed alone")
    return {"of": f"{primary.metric} of {source}", "metric": primary.metric} | noise


def read_runs(
    table: pd.DataFrame,
    source: str,
    primary: PrimaryMetric,
    better: BetterDirection | None,
    condition: str,
    split_columns: Sequence[str],
    arm_column: str,
    seed_column: str,
    is_paired: bool,
) -> tuple[pd.DataFrame, PrimaryMetric]:
    """Return the checked rows of the runs of a table, with the columns that docs/experiments.md names, and the metric.

    Rows that chose a rate (`tune` in the column `stage`, or `selects` in the column `part`) are left out. If `primary`
    does not name the metric, the returned metric takes its name from the column `metric`. The better direction is the
    argument `better`, else the entry of the column `better`, else lower.

    Rows of ranges of positions, as `lm.results` has them, become their mean over all positions.

    Unless `is_paired`, the columns of arms and seeds may be missing: without arms all runs are one arm, without seeds
    each row is a run. Other arguments and errors are as for `judge_table`.
    """
    table = table.reset_index(drop=True)
    if key := next((name for name in split_columns if name in ("arm", "seed", "value")), ""):
        raise RunError(f"{source}: runs can't be judged apart by {key}")
    metric = primary.metric
    value = metric if metric and (metric in table or "metric" not in table) else "value"
    columns = {"arm": arm_column, "seed": seed_column, "value": value}
    optional = () if is_paired else ("arm",) if {"unit", "sample"} & {*table} else ("arm", "seed")
    columns = {name: column for name, column in columns.items() if column in table or column not in optional}
    required_columns = *split_columns, *columns.values()
    rows = _rows_to_judge(table, source, "" if value == metric else metric, condition, required_columns)
    known = rows
    for name, use in (("stage", "tune"), ("part", "selects")):
        rows = rows[rows[name] != use] if name in rows else rows
    if rows.empty:
        raise RunError(f"{source}: no line reports: all are of runs that chose rates")
    # the family would be smaller
    if "arm" in columns and (missing := {*known[arm_column].dropna()} - {*rows[arm_column]}):
        reason = f"no line of {', '.join(sorted(map(str, missing)))} reports, only lines that choose rates"
        raise RunError(f"{source}: {reason}; add its final runs, or leave it out by a condition")
    rows = rows.assign(**({"arm": "runs"} | {name: rows[column] for name, column in columns.items()}))
    if "until" in rows and rows["until"].notna().any():  # of `lm.results`: ranges of positions
        from lm.runs.evaluations import grouped_mean  # imports torch

        keys = rows.columns.difference(["x", "until", "value", value])
        rows = grouped_mean(rows, keys, rows["until"] - rows["x"])
    if "seed" not in columns:
        keys = [name for name in (*split_columns, "size", "arm") if name in rows]
        rows["seed"] = rows.groupby([*dict.fromkeys(keys)], dropna=False).cumcount() + 1
    # columns of categories can't take other values, and texts in Arrow's memory are slow to read one by one
    rows = rows.astype({name: object for name in rows.columns if isinstance(rows[name].dtype, ExtensionDtype)})
    metric = metric or (str(rows["metric"].iloc[0]) if "metric" in rows else "value")
    primary = replace(primary, metric=metric, better=_better_direction(rows, better, source))
    has_sizes = "size" in rows and bool(rows["size"].notna().any())
    split_columns = [*split_columns] or ["size"] * has_sizes
    labels = [
        [str(value) if split_columns == ["size"] else f"{name} {value}" for value in rows[name]]
        for name in split_columns
    ]
    size = [", ".join(words) for words in zip(*labels, strict=True)] if labels else ""
    blank = pd.Series(math.nan, rows.index, dtype=object)
    units = rows.get("sample", rows.get("unit", blank))  # a column that tells the evaluation units of a run apart
    group = rows.get("group", units).map(str, na_action="ignore").fillna(units.map(str, na_action="ignore"))
    state = rows.get("state", blank).fillna(FINISHED)
    runs = rows.assign(
        size=size, arm=rows["arm"].map(str, na_action="ignore"), state=state, weight=rows.get("weight", math.nan),
        sample=units.map(str), group=group, chance=rows.get("chance", blank),
    )  # fmt: skip
    if "rate" in runs and "rate" not in split_columns:
        for (_, name), count in runs.groupby(["size", "arm"])["rate"].nunique().items():
            if count > 1:
                remedy = "take one by a condition (--where 'rate == 1e-3'); lm judge takes --by rate, too"
                raise RunError(f"{source}: arm {name} has {count} rates: {remedy}")
    _check_and_convert_rows(
        runs, source, [name for name in table.columns if name not in (*_RUN_COLUMNS, "value", "weight")]
    )
    runs["rate"] = None  # lines of another rate are of another run
    is_diverged = runs["state"] == DIVERGED_KEY
    runs["note"] = (runs["arm"] + " seed " + runs["seed"].astype(str) + f": {DIVERGED_KEY}").where(is_diverged, "")
    return runs, primary


def read_table(path: str | os.PathLike, arm_column: str) -> pd.DataFrame:
    """Read a table of runs: a CSV file, JSON lines, a list of numbers, a JSON object with a list for each arm, or
    `wandb:ENTITY/PROJECT`.

    Fields of nested objects become columns such as `config.lr`. Texts in `arm_column` stay as they are,
    even None and true. Raises RunError: the table can't be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise RunError(f"the table must be a CSV file or a pandas.DataFrame, not {type(path).__name__}")
    if str(path).startswith("wandb:"):
        return _wandb_rows(str(path).removeprefix("wandb:"))
    kind = "CSV"
    try:
        with get_handle(path, "rb", is_text=False, compression="infer") as handles:
            content = handles.handle.read()
        if content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):  # perhaps after a byte order mark
            kind = "JSON"
            return _json_rows(content)
        header = content.split(b"\n", 1)[0].decode(errors="replace")
        read = partial(pd.read_csv, sep=next((mark for mark in "\t;" if mark in header and "," not in header), ","))
        names = read(io.BytesIO(content), header=None, nrows=1, dtype=str).iloc[0].fillna("")
        if len(names) == 1 and pd.notna(pd.to_numeric(names, errors="coerce")[0]):  # numbers alone, without a header
            return read(io.BytesIO(content), header=None, names=["value"])
        # pandas renames the second of two equal names, and takes ` value` for another name than `value`
        if (is_repeated := names.str.strip().str.casefold().duplicated()).any():
            name = names[is_repeated].iloc[0].strip() or "nothing"
            raise RunError(f"{path}: two columns are named {name}; rename or drop one")
        rows = read(io.BytesIO(content))
        if not isinstance(rows.index, pd.RangeIndex):  # pandas takes the first field for a name of the line
            raise RunError(f"{path}: lines have more fields than the header: name each column, end no line in a comma")
        # an arm may be named None or true
        if arm_column in rows and (rows[arm_column].isna().any() or rows[arm_column].dtype == bool):
            rows[arm_column] = read(io.BytesIO(content), usecols=[arm_column], dtype=str, keep_default_na=False)[
                arm_column
            ]
        return rows
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; a table with columns arm, seed and value is needed") from None
    except RunError:
        raise
    except Exception as error:  # of pandas, or of one of six kinds of compression: the file can't be read
        raise RunError(f"{path}: no {kind} table: {one_line(error)}") from None


def _wandb_rows(project: str) -> pd.DataFrame:
    """Read the runs of a project of W&B, a row each, with configuration and summary in columns such as `config.lr`.
    Raises RunError: the project can't be read."""
    try:
        import wandb  # takes half a second to import

        runs = wandb.Api().runs(project, lazy=False)
        rows = [
            {"run": run.name, "state": run.state, "config": run.config, "summary": dict(run.summary)} for run in runs
        ]
    except Exception as error:  # of wandb or its helper process: the project can't be read
        raise RunError(f"wandb:{project}: {one_line(error)}") from None
    table = _flat_rows(rows)
    return table.assign(state=[state if state == "finished" else "unfinished" for state in table.get("state", ())])


def _json_rows(content: bytes) -> pd.DataFrame:
    """Read rows from a JSON text: JSON lines, a list of numbers or objects, or an object with a list for each arm.
    Raises ValueError: the text is of another form."""
    try:
        data = json.loads(content)
    except ValueError:
        data = []
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                data += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
    if isinstance(data, dict):
        if all(isinstance(values, list) for values in data.values()):
            data = [{"arm": arm, "value": value} for arm, values in data.items() for value in values]
        else:
            data = [data]
    rows = [{"value": row} if isinstance(row, int | float) else row for row in data]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is neither an object nor a number")
    return _flat_rows(rows)


def _flat_rows(rows: list[dict[str, Plain]]) -> pd.DataFrame:
    """Make a frame of objects, a row each; fields of nested objects become columns such as `config.lr`, lists become
    texts."""
    return pd.json_normalize(rows).map(lambda cell: str(cell) if isinstance(cell, list) else cell)


def _better_direction(rows: pd.DataFrame, better: BetterDirection | None, source: str) -> BetterDirection:
    """Return which direction of the metric is better: the argument `better`, else the entry of the column `better`,
    else lower. Raises RunError: the column has several directions, or an unknown one."""
    found = {*rows["better"].dropna()} - {"none", ""} if "better" in rows else set()
    found |= {better} - {None}
    if len(found) > 1 or found - {*get_args(BetterDirection)}:
        words = ", ".join(sorted(map(str, found)))
        raise RunError(f"{source}: better is {words}; of one metric it is lower or higher in all lines, as in --better")
    return next(iter(found), "lower")


def _check_seeds(
    frame: pd.DataFrame, size_arms: Iterable[SizeArm], seeds: list[Plain], is_paired: bool, source: str
) -> None:
    """Raise RunError if an arm of a size has no run, or if runs are paired and it lacks one of `seeds`."""
    seeds_by_arm = frame.groupby(["size", "arm"], sort=False)["seed"].agg(set)
    for size, arm in size_arms:
        name = ", ".join(filter(None, (arm, size)))
        if (size, arm) not in seeds_by_arm:
            raise RunError(f"{source}: {name}: no line")
        own = seeds_by_arm[size, arm]
        if is_paired and len(own) < len(seeds):
            missing = ", ".join(str(seed) for seed in seeds if seed not in own)
            raise RunError(f"{source}: {name}: no seed {missing}; every arm needs the same seeds, or --unpaired")


def _unbeaten_level_texts(frame: pd.DataFrame, better: str) -> pd.Series:
    """Return the column `unlearned` that `judge` takes: `chance (LEVEL)` for runs that are not better than the level in
    the column `chance`, else an empty text. Of losses, `learning nothing (LEVEL)`."""
    levels = pd.Series("", frame.index)
    is_known = frame["chance"].notna() & (frame["state"] == FINISHED)
    for _, run in frame[is_known].groupby(_RUN_COLUMNS, dropna=False):
        mean, level = (np.average(run[name], weights=run["weight"]) for name in ("value", "chance"))
        groups = run["group"].to_numpy() if run["group"].notna().any() else None
        if is_unlearned(mean, level, better, run["value"].to_numpy(), run["weight"].to_numpy(), groups):
            levels[run.index] = f"{'chance' if better == 'higher' else 'learning nothing'} ({level:.3g})"
    return levels


def _rows_to_judge(
    table: pd.DataFrame, source: str, metric: str, condition: str, required_columns: tuple[str, ...]
) -> pd.DataFrame:
    """Select rows of `metric` that satisfy `condition`, an expression of `pandas.DataFrame.eval` such as `seed < 3`.

    Raises RunError: no row does, or one of `required_columns` is missing. `source` names the table in errors.
    """
    if missing_names := [name for name in required_columns if name not in table]:
        remedy = "; name the column of seeds, or judge runs without seeds --unpaired" * ("seed" in missing_names)
        columns = ", ".join(map(str, table.columns)) or "none"
        raise RunError(f"{source}: has no column {', '.join(missing_names)}; there is {columns}{remedy}")
    if not table.columns.is_unique:
        raise RunError(f"{source}: two columns are named {table.columns[table.columns.duplicated()][0]}")
    rows = table
    if condition:
        try:
            mask = table.eval(condition)
        except Exception as error:  # of pandas, Python's parser or numexpr: the condition is wrong
            reason = f"{one_line(error)}; columns: {', '.join(map(str, table.columns))}"
            raise RunError(f"{source}: {condition}: {reason}") from None
        if not (isinstance(mask, pd.Series) and pd.api.types.is_bool_dtype(mask)):
            reason = "doesn't say of each line whether it is judged; write a comparison, e.g. seed < 3"
            raise RunError(f"{source}: {condition}: {reason}")
        rows = table[mask]
    if rows.empty:
        raise RunError(f"{source}: no line" + (f" with {condition}" if condition else ""))
    if "metric" not in rows:
        return rows
    metrics = [str(name) for name in rows["metric"].dropna().unique()]
    if (metric and metric not in metrics) or (not metric and len(metrics) != 1):
        advice = (
            f"no metric {metric}; {suggestion_or_all_names(metric, metrics)}"
            if metric
            else f"name one of {', '.join(metrics)} (--metric)"
        )
        raise RunError(f"{source}: {advice}")
    return rows[rows["metric"].map(str, na_action="ignore") == (metric or metrics[0])]


def _check_and_convert_rows(runs: pd.DataFrame, source: str, columns_named_in_error: list[str]) -> None:
    """Check the rows, and convert the columns `value`, `weight` and `chance` into numbers in place.

    Raises RunError: a number, arm or seed is missing or invalid, or a run has several rows for one sequence. The error
    then names the columns, among `columns_named_in_error`, in which these several rows differ.
    """
    if unknown_states := {*map(str, runs["state"].unique())} - {*RUN_STATES}:
        raise RunError(f"{source}: state {', '.join(sorted(unknown_states))}; it is {', '.join(RUN_STATES)}")
    has_weight, has_chance = runs["weight"].notna(), runs["chance"].notna()
    for name in ("value", "weight"):
        runs[name] = pd.to_numeric(runs[name], errors="coerce").astype(float)
    if not has_weight.all():  # a run without weights has equal ones
        run_has_weight = has_weight.groupby([runs[name] for name in _RUN_COLUMNS], dropna=False).transform("any")
        runs["weight"] = runs["weight"].where(run_has_weight, 1.0)
    runs["chance"] = pd.to_numeric(runs["chance"], errors="coerce").replace([math.inf, -math.inf], math.nan)
    total_weight = runs.groupby(_RUN_COLUMNS, dropna=False)["weight"].transform("sum")
    for name, is_wrong in (
        ("arm", runs["arm"].isna() | (runs["arm"] == "")),
        ("seed", runs["seed"].isna()),
        (f"value up to {_VALUE_LIMITS[1]:g}", ~(runs["value"].abs() <= _VALUE_LIMITS[1]) & (runs["state"] == FINISHED)),
        ("finite chance", has_chance & runs["chance"].isna()),
        (
            "weight from {:g} to {:g}".format(*_VALUE_LIMITS),
            ~(runs["weight"].eq(0) | runs["weight"].between(*_VALUE_LIMITS)) | (total_weight == 0),
        ),
    ):
        if is_wrong.any():
            run, count = runs[is_wrong].iloc[0], int(is_wrong.sum())
            subject, pronoun = (f"{count} lines have", "them") if count > 1 else ("a line has", "it")
            remedy = f"correct or drop {pronoun}"
            if "value" in name:  # dropping it would cost all arms this seed, and hide a divergence
                remedy = f"correct {pronoun}, or write {DIVERGED_KEY} in a column state: the verdict is then unstable"
            raise RunError(
                f"{source}: {subject} no {name}, the first of arm {run['arm']}, seed {run['seed']}; {remedy}"
            )
    if (is_duplicate := runs.duplicated([*_RUN_COLUMNS, "sample"], keep=False)).any():
        run = runs[is_duplicate].iloc[0]
        duplicates = runs[is_duplicate & (runs["arm"] == run["arm"]) & (runs["seed"] == run["seed"])]
        differing = ", ".join(name for name in columns_named_in_error if duplicates[name].nunique(dropna=False) > 1)
        remedy = f"they differ in {differing}: choose by a condition, or judge apart by it" if differing else ""
        lines = f"{len(duplicates)} lines are of arm {run['arm']}, seed {run['seed']}"
        raise RunError(f"{source}: {lines}; {remedy or 'drop all but one'}")


def _check_same_units(rows: pd.DataFrame, source: str) -> None:
    """Raise RunError unless all runs have the same units (such as sequences), with the same weights and groups."""
    rows = rows[rows["state"] == FINISHED]
    if rows["group"].isna().all():
        return  # each run has one value, of no unit
    run = rows.groupby(_RUN_COLUMNS, dropna=False)
    units = pd.DataFrame({"sample": rows["sample"], "group": rows["group"].map(str)})
    units["weight"] = (rows["weight"] / run["weight"].transform("sum")).round(12)
    for columns, reason in ((["sample"], ""), ([*units], ": a unit's weight or group is not the same in all")):
        hashes = pd.util.hash_pandas_object(units[columns], index=False)
        if hashes.groupby(run.ngroup()).sum().nunique() > 1:
            raise RunError(f"{source}: runs were not measured on the same units{reason}")
