"""The verdicts on tables of runs, which any program may have trained, and the checks of these tables."""

import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, get_args

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionDtype
from pandas.io.common import get_handle

from lm.errors import ConfigError, Problem, RunError, one_line
from lm.experiments.judging import DIVERGED, RUN_KEY, RUN_STATES, Judgement, PrimaryMetric, Question, SizeArm, judge
from lm.schema import Plain, build, suggest
from lm.statistics.intervals import is_unlearned
from lm.statistics.tuning import (
    MIN_TUNING_SEEDS,
    Rate,
    best_rate,
    key_values,
    rate_cell,
    rate_choice,
    rate_text,
    read_rate,
)

Direction = Literal["lower", "higher"]
_MAX_VALUE = 1e30  # largest magnitude of a value: squares and products of such values are still finite
_MIN_WEIGHT = 1e-30  # smallest weight above 0: quotients and products of such weights are still exact
_MAX_TABLE_BYTES = 2**28  # largest size of a table, after decompression


def judge_table(
    table: str | os.PathLike | pd.DataFrame,
    metric: str = "",
    better: Direction | None = None,
    matters: float = 0.01,
    baseline: str | None = None,
    condition: str = "",
    split_columns: Sequence[str] = (),
    arm: str = "arm",
    seed: str = "seed",
    target: float | None = None,
    unpaired: bool = False,
) -> Judgement:
    """Judge the arms of a table of runs. Arguments and errors are those of `lm.judge`, where `condition` is named
    `where` and `split_columns` is named `by`."""
    problems: list[Problem] = []
    primary = build(PrimaryMetric, {"metric": metric, "matters": matters}, "", problems)
    if better not in (None, *get_args(Direction)):
        problems.append(Problem("better", better, f"must be {' or '.join(get_args(Direction))}"))
    if target is not None:
        if not abs(target) <= _MAX_VALUE:
            problems.append(Problem("target", target, "must be a finite number"))
        if baseline is not None or unpaired:
            problems.append(
                Problem("target", target, "stands in place of a baseline", "leave baseline and unpaired out")
            )
    if problems:
        raise ConfigError(problems)
    source = "the table" if isinstance(table, pd.DataFrame) else str(table)
    table = table if isinstance(table, pd.DataFrame) else read_table(table)
    is_paired = not unpaired and target is None
    rows, primary = read_runs(table, source, primary, better, condition, split_columns, arm, seed, is_paired)
    selecting_rows, frame = split_by_use(rows, source)
    reported = dict.fromkeys(frame["arm"])
    arms = [*reported]
    # without them the family would be smaller
    if missing_arms := [arm for arm in dict.fromkeys(rows["arm"]) if arm not in reported]:
        reason = f"no line of {', '.join(missing_arms)} reports, only lines that choose rates"
        raise RunError(f"{source}: {reason}; add its final runs, or leave it out by a condition")
    if target is not None:
        baseline, arms = f"target {target}", [f"target {target}", *arms]
    if baseline is None and "experiment" in rows and rows["experiment"].notna().any():
        raise RunError(
            f"{source}: name the baseline: runs of an experiment are in the order of their folders; {', '.join(arms)}"
        )
    baseline = arms[0] if baseline is None else baseline
    if baseline not in arms or len(arms) < 2:
        reason = f"no arm {baseline}" if baseline not in arms else "a verdict takes two arms"
        raise RunError(f"{source}: {reason}; there is {', '.join(arms)}")
    if is_paired and frame.groupby(["size", "seed"])["arm"].nunique().max() == 1:  # no two arms share a seed
        unpaired, is_paired = True, False
    selecting_by_size = dict([*selecting_rows.groupby("size", sort=False)])
    for size, size_rows in frame.groupby("size", sort=False):
        _check_comparable(size_rows, selecting_by_size.get(size, selecting_rows[:0]), source)
    arms = baseline, *(arm for arm in arms if arm != baseline)
    order = {
        "size": dict.fromkeys(frame["size"]),
        "arm": arms,
        "seed": sorted(set(frame["seed"]), key=lambda seed: (isinstance(seed, str), seed)),
    }
    _check_seeds(frame, product(order["size"], arms[target is not None :]), order["seed"], is_paired, source)
    rates, rate_places = _judged_rates(frame, selecting_rows, primary, source)
    for by_arm in rates.values() if target is not None else ():
        by_arm[baseline] = None
    places = {
        name: frame[name].map({value: place for place, value in enumerate(values)}) for name, values in order.items()
    }
    by_unit = pd.factorize(frame["sample"], sort=True)[0]
    frame = frame.assign(unlearned=_unlearned_levels(frame, primary.better)).iloc[
        np.lexsort((by_unit, places["seed"], rate_places, places["arm"], places["size"]))
    ]
    question = Question(primary, arms, tuple(order["seed"]), rates, unpaired=unpaired, target=target)
    return judge(frame, question)


def read_runs(
    table: pd.DataFrame,
    source: str,
    primary: PrimaryMetric,
    better: Direction | None,
    condition: str,
    split_columns: Sequence[str],
    arm: str,
    seed: str,
    is_paired: bool,
) -> tuple[pd.DataFrame, PrimaryMetric]:
    """Return the checked rows of the runs of a table, with the columns that docs/experiments.md names, and the metric.

    The metric is that of the rows, with its direction. Unless `is_paired`, all runs are of one arm without a column
    `arm`, and each row is a run without a column `seed`. Other arguments and errors are those of `judge_table`.
    """
    table = table.reset_index(drop=True)
    if key := next((name for name in split_columns if name in ("arm", "seed", "value")), ""):
        raise RunError(f"{source}: runs can't be judged apart by {key}")
    metric = primary.metric
    value = metric if metric and (metric in table or "metric" not in table) else "value"
    columns = {"arm": arm, "seed": seed, "value": value}
    optional = () if is_paired else ("arm",) if {"unit", "sample"} & {*table} else ("arm", "seed")
    columns = {name: column for name, column in columns.items() if column in table or column not in optional}
    names = *split_columns, *columns.values()
    rows = _rows_to_judge(table, source, "" if value == metric else metric, condition, names)
    rows = rows.assign(**({"arm": "runs"} | {name: rows[column] for name, column in columns.items()}))
    if "seed" not in columns:
        keys = [name for name in (*split_columns, "size", "arm", "rate", "part", "stage") if name in rows]
        rows["seed"] = rows.groupby([*dict.fromkeys(keys)], dropna=False).cumcount() + 1
    # columns of categories can't take other values, and texts in Arrow's memory are slow to read one by one
    rows = rows.astype({name: object for name in rows.columns if isinstance(rows[name].dtype, ExtensionDtype)})
    metric = metric or (str(rows["metric"].iloc[0]) if "metric" in rows else "value")
    primary = replace(primary, metric=metric, better=_direction(rows, better, source))
    split_columns = tuple(split_columns) or tuple(
        name for name in ("size",) if name in rows and rows[name].notna().any()
    )
    labels = [
        [f"{name} {value}" if split_columns != ("size",) else str(value) for value in rows[name]]
        for name in split_columns
    ]
    size = [", ".join(words) for words in zip(*labels, strict=True)]
    blank = pd.Series(math.nan, rows.index, dtype=object)
    units = rows.get("sample", rows.get("unit", blank))  # a column that tells the evaluation units of a run apart
    group = rows.get("group", units).map(str, na_action="ignore").fillna(units.map(str, na_action="ignore"))
    state = rows.get("state", blank).fillna("finished")
    rate = rows["rate"] if "rate" in rows and "rate" not in split_columns else math.nan
    weight = rows.get("weight", math.nan)
    runs = rows.assign(
        size=size if split_columns else "", arm=rows["arm"].map(str, na_action="ignore"), rate=rate, state=state,
        weight=weight,
        sample=units.map(str), group=group, chance=pd.to_numeric(rows.get("chance", blank), errors="coerce"),
    )  # fmt: skip
    diverged_runs = runs[runs["state"] == DIVERGED]
    notes = [
        f"{arm} seed {seed}: {DIVERGED}" for arm, seed in zip(diverged_runs["arm"], diverged_runs["seed"], strict=True)
    ]
    runs["note"] = pd.Series(notes, diverged_runs.index, dtype=object).reindex(runs.index, fill_value="")
    _check_rows(runs, source, [name for name in table.columns if name not in (*RUN_KEY, "value", "weight")])
    return runs, primary


def read_table(path: str | os.PathLike) -> pd.DataFrame:
    """Read a table of runs: a CSV file, JSON lines, a list of numbers, a JSON object with a list for each arm, or
    `wandb:ENTITY/PROJECT`.

    Fields of nested objects become columns such as `config.lr`. Raises RunError.
    """
    kind = "CSV"
    if not isinstance(path, str | os.PathLike):
        raise RunError(f"the table must be a CSV file or a pandas.DataFrame, not {type(path).__name__}")
    if str(path).startswith("wandb:"):
        return _wandb_rows(str(path).removeprefix("wandb:"))
    try:
        with get_handle(path, "rb", is_text=False, compression="infer") as handles:  # pandas reads no more than this
            content = handles.handle.read(_MAX_TABLE_BYTES + 1)
        if len(content) > _MAX_TABLE_BYTES:
            raise RunError(f"{path}: has more than {_MAX_TABLE_BYTES:,} bytes of text; judge it in parts")
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
            raise RunError(
                f"{path}: lines have more fields than the header: name each column, and end no line in a comma"
            )
        if "arm" in rows and rows["arm"].isna().any():  # an arm may be named None
            rows["arm"] = read(io.BytesIO(content), usecols=["arm"], dtype=str, keep_default_na=False)["arm"]
        return rows
    except FileNotFoundError:
        raise RunError(f"{path}: no such file; a table with columns arm, seed and value is needed") from None
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise RunError(f"{path}: no {kind} table: {one_line(error)}") from None


def _wandb_rows(project: str) -> pd.DataFrame:
    """A row for each run of a project of W&B, with its configuration and summary in columns such as `config.lr`."""
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
    try:
        data = json.loads(content)
    except ValueError:
        data = [json.loads(line) for line in content.splitlines() if line.strip()]
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
    return pd.json_normalize(rows).map(lambda cell: str(cell) if isinstance(cell, list) else cell)


def _direction(rows: pd.DataFrame, better: Direction | None, source: str) -> Direction:
    """Return which direction of the metric is better: the argument `better`, else the entry of the column `better`,
    else lower. Raises RunError: the column disagrees with the argument, or has two directions or an unknown one."""
    column_directions = {*rows["better"].dropna()} - {"none", ""} if "better" in rows else set()
    if len(column_directions) > 1 or column_directions - {*get_args(Direction)}:
        words = ", ".join(sorted(map(str, column_directions)))
        raise RunError(f"{source}: better is {words}; of one metric it is lower or higher in all lines")
    column_direction = next(iter(column_directions), None)
    if better and column_direction not in (None, better):
        raise RunError(
            f"{source}: better = {better}: by the column better, {column_direction} is better; leave the direction out"
        )
    return better or column_direction or "lower"


def _check_seeds(
    frame: pd.DataFrame, size_arms: Iterable[SizeArm], seeds: list[Plain], is_paired: bool, source: str
) -> None:
    """Raise RunError unless every arm of a size has runs, of all seeds at each of its rates. Arms that are not paired
    have seeds of their own.
    """
    runs = frame.drop_duplicates(RUN_KEY)
    by_rate, by_arm = (runs.groupby(RUN_KEY[:count], dropna=False, sort=False)["seed"] for count in (3, 2))
    known = {*zip(runs["size"], runs["arm"], strict=True)}
    for size, arm in size_arms:
        if (size, arm) not in known:
            raise RunError(f"{source}: {', '.join(filter(None, (arm, size)))}: no line")
    is_short = by_rate.transform("size") < (len(seeds) if is_paired else by_arm.transform("nunique"))
    if is_short.any():
        size, arm, rate, _ = runs[is_short].iloc[0][RUN_KEY]
        of_arm = runs[(runs["size"] == size) & (runs["arm"] == arm)]
        present = of_arm["seed"][(of_arm["rate"] == rate) | (of_arm["rate"].isna() & pd.isna(rate))]
        missing = [str(seed) for seed in seeds if seed not in {*present} and (is_paired or seed in {*of_arm["seed"]})]
        at_rate = "" if pd.isna(rate) else f" at {rate_text(read_rate(rate))}"
        needed = "every arm needs the same seeds, or --unpaired" if is_paired else "each rate needs it"
        name = ", ".join(filter(None, (arm, size)))
        raise RunError(f"{source}: {name}: no seed {', '.join(missing)}{at_rate}; {needed}")


def _unlearned_levels(frame: pd.DataFrame, better: str) -> pd.Series:
    """The column `unlearned` of `judge`, by the column `chance`."""
    levels = pd.Series("", frame.index)
    is_known = frame["chance"].notna() & (frame["state"] == "finished")
    for _, run in frame[is_known].groupby(RUN_KEY, dropna=False):
        mean, level = (np.average(run[name], weights=run["weight"]) for name in ("value", "chance"))
        groups = run["group"].to_numpy() if run["group"].notna().any() else None
        if is_unlearned(mean, level, better, run["value"].to_numpy(), run["weight"].to_numpy(), groups):
            levels[run.index] = f"chance ({level:.3g})"
    return levels


def _rows_to_judge(
    table: pd.DataFrame, source: str, metric: str, condition: str, names: tuple[str, ...]
) -> pd.DataFrame:
    """Select the rows of `metric` that satisfy `condition`. Raises RunError: no row does, or one of the columns `names`
    is missing.
    """
    if missing_names := [name for name in names if name not in table]:
        columns = ", ".join(map(str, table.columns))
        renames = [
            f"{column!r} to {name}"
            for name in missing_names
            for column in table
            if str(column).strip().casefold() == name.casefold()
        ]
        remedy = f"; rename {', '.join(renames)}" if renames else ""
        if "seed" in missing_names and not renames:
            remedy = "; name the column of seeds, or judge runs without seeds --unpaired"
        raise RunError(f"{source}: has no column {', '.join(missing_names)}; there is {columns}{remedy}")
    if not table.columns.is_unique:
        raise RunError(f"{source}: two columns are named {table.columns[table.columns.duplicated()][0]}")
    try:
        mask = table.eval(condition) if condition else None
    except Exception as error:  # of pandas, Python's parser or numexpr: the condition is wrong
        raise RunError(
            f"{source}: {condition}: {one_line(error)}; columns: {', '.join(map(str, table.columns))}"
        ) from None
    if condition and not (isinstance(mask, pd.Series) and pd.api.types.is_bool_dtype(mask)):
        raise RunError(
            f"{source}: {condition}: doesn't say of each line whether it is judged; write a comparison, e.g. seed < 3"
        )
    rows = table[mask] if condition else table
    if rows.empty:
        raise RunError(f"{source}: no line" + (f" with {condition}" if condition else ""))
    if "metric" not in rows:
        return rows
    metrics = [str(name) for name in rows["metric"].dropna().unique()]
    if (metric and metric not in metrics) or (not metric and len(metrics) != 1):
        advice = f"no metric {metric}; {suggest(metric, metrics)}" if metric else f"name one of {', '.join(metrics)}"
        raise RunError(f"{source}: {advice}")
    return rows[rows["metric"].map(str, na_action="ignore") == (metric or metrics[0])]


def _check_rows(runs: pd.DataFrame, source: str, columns: list[str]) -> None:
    """Check the rows, and convert their values, weights and rates into numbers in place. Raises RunError: a number, arm
    or seed is missing or invalid, or a run has several rows for one sequence. `columns`: those in which such rows
    differ are named in the error.
    """
    has_rate = runs["rate"].notna()
    if unknown_states := [*map(str, set(runs["state"]) - set(RUN_STATES))]:
        raise RunError(
            f"{source}: state {', '.join(sorted(unknown_states))}; it is {', '.join(RUN_STATES[:-1])} or "
            f"{RUN_STATES[-1]}"
        )
    if runs["value"].map(lambda value: isinstance(value, bool | np.bool_)).any():
        raise RunError(f"{source}: values are true and false; write numbers, such as 1 and 0")
    is_unweighted = runs["weight"].isna().groupby([runs[name] for name in RUN_KEY], dropna=False).transform("all")
    for name in ("value", "weight"):
        runs[name] = pd.to_numeric(runs[name], errors="coerce").astype(float)
    runs.loc[is_unweighted, "weight"] = 1.0
    runs["rate"] = runs["rate"].map(_finite_rate, na_action="ignore")
    magnitude, total_weight = runs["value"].abs(), runs.groupby(RUN_KEY, dropna=False)["weight"].transform("sum")
    for name, is_wrong in (
        ("arm", runs["arm"].isna() | (runs["arm"] == "")),
        ("seed", runs["seed"].isna()),
        ("finite value", ~np.isfinite(runs["value"]) & (runs["state"] == "finished")),
        (f"value below {_MAX_VALUE:g}", (magnitude > _MAX_VALUE) & (runs["state"] == "finished")),
        ("value of 0 or above 1e-100", (magnitude > 0) & (magnitude.max() < 1e-100)),  # their squares would be 0
        ("finite rate", has_rate & runs["rate"].isna()),
        ("weight above 0", ~((runs["weight"] >= 0) & (total_weight > 0))),
        (
            f"weight of 0 or between {_MIN_WEIGHT:g} and {_MAX_VALUE:g}",
            ~runs["weight"].between(_MIN_WEIGHT, _MAX_VALUE) & (runs["weight"] != 0),
        ),
    ):
        if is_wrong.any():
            run, count = runs[is_wrong].iloc[0], int(is_wrong.sum())
            subject, pronoun = (f"{count} lines have", "them") if count > 1 else ("a line has", "it")
            remedy = f"correct or drop {pronoun}"
            if name == "finite value":  # dropping it would cost all arms this seed, and hide a divergence
                remedy = (
                    f"correct {pronoun}, or write {DIVERGED} in a column state: a run that diverged makes the "
                    "verdict unstable"
                )
            raise RunError(
                f"{source}: {subject} no {name}, the first of arm {run['arm']}, seed {run['seed']}; {remedy}"
            )
    if len({len(key_values(read_rate(rate))) for rate in runs["rate"].dropna().unique()}) > 1:
        raise RunError(f"{source}: rates are of one tuned key in some lines, and of several in others")
    is_duplicate = runs.duplicated(
        [*RUN_KEY, "sample", *(name for name in ("part", "stage") if name in runs)], keep=False
    )
    if is_duplicate.any():
        run = runs[is_duplicate].iloc[0]
        duplicates = runs[is_duplicate & (runs["arm"] == run["arm"]) & (runs["seed"] == run["seed"])]
        differing_columns = [name for name in columns if duplicates[name].nunique(dropna=False) > 1]
        remedy = "drop all but one"
        if differing_columns:
            remedy = f"they differ in {', '.join(differing_columns)}: choose by a condition, or judge apart by it"
        raise RunError(f"{source}: {len(duplicates)} lines are of arm {run['arm']}, seed {run['seed']}; {remedy}")


def _finite_rate(cell: float | str) -> float | str:
    """Convert a rate in a table into the number or text of `rate_cell`; NaN if one of its values is not a finite
    number.
    """
    try:
        rate = read_rate(cell)
        return rate_cell(rate) if all(map(math.isfinite, key_values(rate))) else math.nan
    except (TypeError, ValueError):
        return math.nan


def split_by_use(runs: pd.DataFrame, source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split the rows into rows that choose rates and rows that are judged. Rows with `selects` in column `part` choose
    rates; without such rows, rows with `tune` in column `stage` do. Raises RunError: a part is unknown, or no row is
    left to be judged.
    """
    part = runs["part"].fillna("") if "part" in runs else pd.Series("", runs.index)
    if unknown_parts := set(part) - {"", "selects", "reports"}:
        raise RunError(f"{source}: part {', '.join(map(str, unknown_parts))}; it is selects or reports")
    is_tuning = runs["stage"] == "tune" if "stage" in runs else pd.Series(False, runs.index)
    is_selecting = part == "selects"
    reporting_rows = runs[~is_tuning & ~is_selecting]
    if reporting_rows.empty:
        raise RunError(f"{source}: no line reports")
    return runs[is_selecting if is_selecting.any() else is_tuning], reporting_rows


def _check_comparable(reporting_rows: pd.DataFrame, selecting_rows: pd.DataFrame, source: str) -> None:
    """Check that all runs have the same units (such as sequences), with the same weights and groups. Check that all
    arms were tuned at the same rates with the same seeds, with at least `MIN_TUNING_SEEDS` seeds, and that tuning has
    ended. Raises RunError.
    """
    stages = (
        [rows for _, rows in selecting_rows.groupby("stage", dropna=False)]
        if "stage" in selecting_rows
        else [selecting_rows]
    )
    for rows in (reporting_rows, *stages):
        rows = rows[rows["state"] == "finished"]
        run_columns = [rows[name] for name in ("arm", "rate", "seed")]
        by_run = rows["weight"].groupby(run_columns, dropna=False)
        if by_run.ngroups == len(rows) and rows["group"].isna().all():
            continue  # each run has one value, of no unit
        weight_fraction = (rows["weight"] / by_run.transform("sum")).round(12)
        units = pd.MultiIndex.from_arrays([rows["sample"], rows["group"].map(str), weight_fraction])
        if not _same_in_all(units, by_run.ngroup()):
            has_same_samples = _same_in_all(pd.Index(rows["sample"]), by_run.ngroup())
            reason = ": a unit's weight or group is not the same in all" if has_same_samples else ""
            raise RunError(f"{source}: runs were not measured on the same units{reason}")
    tuning_rows = _tuning_rows(selecting_rows)
    grids = {arm: frozenset(rates) for arm, rates in tuning_rows.groupby("arm")["rate"] if rates.nunique() > 1}
    if len(set(grids.values())) > 1:
        words = "; ".join(
            f"{arm} {', '.join(map(rate_text, sorted(map(read_rate, grid))))}" for arm, grid in grids.items()
        )
        raise RunError(f"{source}: arms are tuned over different rates: {words}")
    tuning_runs = tuning_rows[tuning_rows["arm"].isin(grids)]
    if len(unfinished := tuning_runs[tuning_runs["state"] == "unfinished"]):
        arm, rate, seed = unfinished.iloc[0][["arm", "rate", "seed"]]
        raise RunError(
            f"{source}: {arm} at {rate_text(read_rate(rate))}, seed {seed}, has not ended: the rate can't be chosen yet"
        )
    seeds_by_rate = tuning_runs.groupby(["arm", "rate"])["seed"].agg(frozenset)
    if seeds_by_rate.nunique() > 1:
        arm, rate = seeds_by_rate.map(len).idxmin()
        missing_seeds = ", ".join(map(str, {*tuning_runs["seed"]} - seeds_by_rate[arm, rate]))
        remedy = "a run that diverged before it was measured takes a line with state diverged"
        raise RunError(
            f"{source}: {arm} at {rate_text(read_rate(rate))} has no run of seed {missing_seeds}, others have; {remedy}"
        )
    seeds = seeds_by_rate.map(len)
    if (seeds < MIN_TUNING_SEEDS).any():
        arm, rate = seeds.idxmin()
        raise RunError(f"{source}: {arm} has {seeds.min()} seed at {rate_text(rate)}; tuning takes {MIN_TUNING_SEEDS}")


def _same_in_all(units: pd.Index, run_numbers: pd.Series) -> bool:
    """Whether all runs have the same set of units, of which no run has one twice."""
    if not len(units):
        return True
    codes, run_sizes = units.factorize()[0], np.bincount(run_numbers)
    codes = codes[np.lexsort((codes, run_numbers))]
    return len(set(run_sizes)) == 1 and not np.ptp(codes.reshape(len(run_sizes), -1), axis=0).any()


def _tuning_rows(selecting_rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of runs with stage `tune` among rows that may choose a rate; without such runs, return all of the
    rows.
    """
    tuning_rows = selecting_rows[selecting_rows["stage"] == "tune"] if "stage" in selecting_rows else selecting_rows[:0]
    return selecting_rows if tuning_rows.empty else tuning_rows


def _judged_rates(
    frame: pd.DataFrame, selecting_rows: pd.DataFrame, primary: PrimaryMetric, source: str
) -> tuple[dict[str, dict[str, Rate | None]], pd.Series]:
    """Return the rate at which each arm of a size is judged, without arms for which tuning found no rate; and the place
    of each row's rate among those of its arm, where the rate that tuning chose is first. Raises RunError: no row
    chooses one of several rates, or no run has the tuned rate.
    """
    places, selecting = pd.Series(0, frame.index), selecting_rows.groupby(["size", "arm"]).indices
    rates: dict[str, dict[str, Rate | None]] = {size: {} for size in frame["size"].unique()}
    known = frame.drop_duplicates(["size", "arm", "rate"])
    counts = known.groupby(["size", "arm"])["rate"].transform("size")
    for size, arm, cell, count in zip(known["size"], known["arm"], known["rate"], counts, strict=True):
        if count == 1 and (size, arm) not in selecting:
            rates[size][arm] = None if pd.isna(cell) else read_rate(cell)
        elif arm not in rates[size]:
            final_rows = frame[(frame["size"] == size) & (frame["arm"] == arm)]
            choosing_rows = selecting_rows.iloc[selecting.get((size, arm), [])]
            order, judged = _ordered_and_judged_rates(final_rows, choosing_rows, primary, f"{source}: {arm}")
            if judged:
                rates[size][arm] = judged[0]
            codes, cells = pd.factorize(final_rows["rate"], use_na_sentinel=False)
            by_cell = [order.index(None if pd.isna(cell) else read_rate(cell)) for cell in cells]
            places[final_rows.index] = np.array(by_cell)[codes]
    return rates, places


def _ordered_and_judged_rates(
    final_rows: pd.DataFrame, selecting_rows: pd.DataFrame, primary: PrimaryMetric, label: str
) -> tuple[list[Rate | None], list[Rate | None]]:
    """Return the rates of an arm's runs, with the rate that tuning chose first; and a list that holds the judged rate,
    empty if tuning found no rate. `label`: names the arm in errors. Raises RunError: no row chooses one of several
    rates, or no run has the tuned rate.
    """
    rates = [None if pd.isna(rate) else read_rate(rate) for rate in final_rows["rate"].unique()]
    tuning_rows = _tuning_rows(selecting_rows)
    tuning_costs = _costs(tuning_rows, primary)
    if len(tuning_costs) < 2:
        if len(rates) > 1:
            raise RunError(
                f"{label} has {len(rates)} rates and no line that selects one: add a column part, or judge apart by "
                "rate"
            )
        return rates, rates[:1]
    tuned_rate = rate_choice({label: tuning_costs}).rates.get(label)
    if tuned_rate is None:
        return rates, []
    if tuned_rate not in rates:
        raise RunError(f"{label}: {rate_text(tuned_rate)} is the best rate, but no line at it reports")
    rate_order = [tuned_rate, *(rate for rate in rates if rate != tuned_rate)]
    final_costs = tuning_costs
    if "stage" in tuning_rows:
        final_costs = _costs(selecting_rows.drop(tuning_rows.index), primary) or _costs(final_rows, primary)
    return rate_order, [best_rate(final_costs, rates) if set(rates) <= final_costs.keys() else tuned_rate]


def _costs(rows: pd.DataFrame, primary: PrimaryMetric) -> dict[Rate, list[float]]:
    """Costs that the chosen rate minimizes: for each rate a list over seeds; infinite for a run that diverged."""
    costs: dict[Rate, list[float]] = {}
    for (rate, _), run in rows.groupby(["rate", "seed"]):
        mean = float(np.average(run["value"], weights=run["weight"])) * (-1 if primary.better == "higher" else 1)
        costs.setdefault(read_rate(rate), []).append(math.inf if (run["state"] == DIVERGED).any() else mean)
    return costs
