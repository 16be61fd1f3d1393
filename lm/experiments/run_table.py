"""Tables of runs that anything has trained: what is checked of them, and the verdicts that they give."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from lm.errors import RunError, one_line
from lm.experiments.experiment import Primary
from lm.experiments.judging import ByRate, Judged, JudgedRun, Place
from lm.runs.folder import DIVERGED
from lm.statistics.tuning import FEWEST_TUNING_SEEDS, Rate, best_rate, chosen, coordinates, full_cells, rate_cell, rate_words, read_rate

RUN_KEY = ["size", "arm", "rate", "seed"]
_UNIT = ("sample", "unit")  # columns that tell a run's evaluation units apart, the first that there is
_OTHER_MARKS = {";": "semicolons", "\t": "tabs"}
_STATES = ("finished", "unfinished", DIVERGED)
_LARGEST = 1e30  # of a value: squares and products of such are still finite


def judge_table(
    table: pd.DataFrame, source: str, primary: Primary, baseline: str | None = None, where: str = "", by: Sequence[str] = ()
) -> Judged:
    """The verdicts on a table of runs: columns arm, seed and value, and any others of `lm.results`.

    Args:
        source: name of the table in errors.
        primary: the question; without a name of its metric the only one of the table.
        baseline: an arm; None: the first.
        where: a condition on columns, as of `pandas.DataFrame.query`.
        by: columns by whose values runs are judged apart, in one family; by default `size`, if there is one.

    Raises:
        RunError: columns, arms, seeds or values are missing, or there are runs twice.
    """
    if key := next((name for name in by if name in ("arm", "seed", "value")), ""):
        raise RunError(f"{source}: runs can't be judged apart by {key}")
    lines = _asked_lines(table, source, primary.metric, where, (*by, "arm", "seed", "value"))
    metric = primary.metric or (str(lines["metric"].iloc[0]) if "metric" in lines else "value")
    by = tuple(by) or tuple(name for name in ("size",) if name in lines and lines[name].notna().any())
    named = [[f"{name} {value}" if by != ("size",) else str(value) for value in lines[name]] for name in by]
    size = [", ".join(words) for words in zip(*named, strict=True)]
    unit = next((name for name in _UNIT if name in lines), None)
    units = lines[unit] if unit else pd.Series(math.nan, lines.index)
    group = units.map(str, na_action="ignore")
    if "group" in lines:
        group = lines["group"].map(str, na_action="ignore").fillna(group)
    state = lines["state"].fillna("finished") if "state" in lines else "finished"
    rate = lines["rate"] if "rate" in lines and "rate" not in by else math.nan
    weight = lines.get("weight", math.nan)
    runs = lines.assign(
        size=size if by else "", arm=lines["arm"].map(str, na_action="ignore"), rate=rate, state=state, note="", weight=weight,
        sample=units.map(str), group=group,
    )  # fmt: skip
    runs["note"] = [f"{run.arm} seed {run.seed}: {DIVERGED}" if run.state == DIVERGED else "" for run in runs.itertuples()]
    runs = _at_full_rates(runs)
    _check_lines(runs, source, [name for name in table.columns if name not in (*RUN_KEY, "value", "weight")])
    selecting, reporting = _parts(runs, source)
    arms = [*dict.fromkeys(reporting["arm"])]
    baseline = arms[0] if baseline is None else baseline
    if baseline not in arms or len(arms) < 2:
        reason = f"no arm {baseline}" if baseline not in arms else "a verdict takes two arms"
        raise RunError(f"{source}: {reason}; there is {', '.join(map(str, arms))}")
    seeds = tuple(sorted(set(reporting["seed"]), key=lambda seed: (isinstance(seed, str), seed)))
    rates: dict[str, dict[str, Rate | None]] = {}
    judged_runs: dict[Place, ByRate] = {}
    for name in dict.fromkeys(reporting["size"]):
        reported, selected = reporting[reporting["size"] == name], selecting[selecting["size"] == name]
        _check_alike(reported, selected, source)
        rates[name] = {}
        for arm in arms:
            final = reported[reported["arm"] == arm]
            place = f"{source}: {', '.join(filter(None, (str(arm), name)))}"
            for rate, runs_at_rate in final.groupby("rate", dropna=False) if len(final) else ():
                if missing := [str(seed) for seed in seeds if seed not in set(runs_at_rate["seed"])]:
                    at = "" if pd.isna(rate) else f" at {rate_words(rate)}"
                    raise RunError(f"{place}: no seed {', '.join(missing)}{at}; every arm needs the same seeds")
            if final.empty:
                raise RunError(f"{place}: no line")
            order, best = _rates(final, selected[selected["arm"] == arm], primary, f"{source}: {arm}")
            if best:
                rates[name][arm] = best[0]
            by_rate = {at: final[final["rate"].isna() if at is None else final["rate"] == rate_cell(at)] for at in order}
            judged_runs[name, arm] = {at: [_judged_run(some[some["seed"] == seed]) for seed in seeds] for at, some in by_rate.items()}
    arms = baseline, *(arm for arm in arms if arm != baseline)
    return Judged(replace(primary, metric=metric), arms, seeds, rates, judged_runs)


def _judged_run(lines: pd.DataFrame) -> JudgedRun:
    """The run of these lines, its units in one order."""
    lines = lines.sort_values("sample", kind="stable")
    first, groups = lines.iloc[0], lines["group"]
    values, weights = (lines[name].to_numpy(float) for name in ("value", "weight"))
    return JudgedRun(first["arm"], first["state"], first["note"], values, weights, None if groups.isna().any() else groups.to_numpy())


def _asked_lines(table: pd.DataFrame, source: str, metric: str, where: str, names: tuple[str, ...]) -> pd.DataFrame:
    """The lines of a metric for which a condition holds. Raises RunError: there are none."""
    if missing := [name for name in names if name not in table]:
        columns = ", ".join(map(str, table.columns))
        alike = [f"{other!r} to {name}" for name in missing for other in table if str(other).strip().casefold() == name.casefold()]
        remedy = f"; rename {', '.join(alike)}" if alike else ""
        if len(table.columns) == 1 and (marks := [word for mark, word in _OTHER_MARKS.items() if mark in columns]):
            remedy = f"; columns are separated by {marks[0]}: write the file with commas"
        raise RunError(f"{source}: has no column {', '.join(missing)}; there is {columns}{remedy}")
    if not table.columns.is_unique:
        raise RunError(f"{source}: two columns are named {table.columns[table.columns.duplicated()][0]}")
    try:
        chosen = table.eval(where) if where else None
    except Exception as error:  # of pandas, Python's parser or numexpr: the condition is wrong
        raise RunError(f"{source}: {where}: {one_line(error)}; columns: {', '.join(map(str, table.columns))}") from None
    if where and not (isinstance(chosen, pd.Series) and pd.api.types.is_bool_dtype(chosen)):
        raise RunError(f"{source}: {where}: doesn't say of each line whether it is judged; write a comparison, e.g. seed < 3")
    lines = table[chosen] if where else table
    if lines.empty:
        raise RunError(f"{source}: no line" + (f" with {where}" if where else ""))
    if "metric" not in lines:
        if metric:
            raise RunError(f"{source}: has no column metric, of which {metric} could be chosen; leave the metric out")
        return lines
    known = [str(name) for name in lines["metric"].dropna().unique()]
    if (metric and metric not in known) or (not metric and len(known) != 1):
        raise RunError(f"{source}: {f'no metric {metric}' if metric else 'name the metric'}; there is {', '.join(known)}")
    return lines[lines["metric"] == (metric or known[0])]


def _at_full_rates(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines with those of arms that lack a tuned key repeated at each rate that they stand for (`full_cells`)."""
    places = [runs["size"], runs["stage"].fillna("") if "stage" in runs else runs["size"]]
    grids = {size: lines["rate"].unique() for size, lines in runs.groupby("size")}
    full = {(size, stage): full_cells(lines["rate"].unique(), grids[size]) for (size, stage), lines in runs.groupby(places)}
    if not any(full.values()):
        return runs
    rates = [full[size, stage].get(rate, [rate]) for size, stage, rate in zip(*places, runs["rate"], strict=True)]
    return runs.assign(rate=rates).explode("rate", ignore_index=True)


def _check_lines(runs: pd.DataFrame, source: str, others: list[str]) -> None:
    """Raises RunError: no number, no arm or seed, or a unit of a run twice; `others`: columns in which these may differ."""
    rated = runs["rate"].notna()
    if unknown := [*map(str, set(runs["state"]) - set(_STATES))]:
        raise RunError(f"{source}: state {', '.join(sorted(unknown))}; it is {', '.join(_STATES[:-1])} or {_STATES[-1]}")
    if runs["value"].map(lambda value: isinstance(value, bool | np.bool_)).any():
        raise RunError(f"{source}: values are true and false; write numbers, such as 1 and 0")
    unweighted = runs["weight"].isna().groupby([runs[name] for name in RUN_KEY], dropna=False).transform("all")
    for name in ("value", "weight"):
        runs[name] = pd.to_numeric(runs[name], errors="coerce")
    runs.loc[unweighted, "weight"] = 1.0
    runs["rate"] = runs["rate"].map(_finite_rate)
    total = runs.groupby(RUN_KEY, dropna=False)["weight"].transform("sum")
    for name, wrong in (
        ("arm", runs["arm"].isna() | (runs["arm"] == "")),
        ("seed", runs["seed"].isna()),
        ("finite value", ~np.isfinite(runs["value"]) & (runs["state"] == "finished")),
        (f"value below {_LARGEST:g}", (runs["value"].abs() > _LARGEST) & (runs["state"] == "finished")),
        ("finite rate", rated & runs["rate"].isna()),
        ("weight above 0", ~((runs["weight"] >= 0) & (total > 0))),
    ):
        if wrong.any():
            run, count = runs[wrong].iloc[0], int(wrong.sum())
            which, them = (f"{count} lines have", "them") if count > 1 else ("a line has", "it")
            raise RunError(f"{source}: {which} no {name}, the first of arm {run['arm']}, seed {run['seed']}; correct or drop {them}")
    if len({len(coordinates(read_rate(rate))) for rate in runs["rate"].dropna().unique()}) > 1:
        raise RunError(f"{source}: rates are of one tuned key in some lines, and of several in others")
    twice = runs.duplicated([*RUN_KEY, "sample", *(name for name in ("part", "stage") if name in runs)], keep=False)
    if twice.any():
        run = runs[twice].iloc[0]
        same = runs[twice & (runs["arm"] == run["arm"]) & (runs["seed"] == run["seed"])]
        differ = [name for name in others if same[name].nunique(dropna=False) > 1]
        how = f"they differ in {', '.join(differ)}: choose by a condition, or judge apart by it" if differ else "drop all but one"
        raise RunError(f"{source}: {len(same)} lines are of arm {run['arm']}, seed {run['seed']}; {how}")


def _finite_rate(cell: float | str) -> float | str:
    """The cell of a rate with its values as numbers; NaN: one of them is none, or not finite."""
    try:
        rate = read_rate(cell)
        return rate_cell(rate) if all(map(math.isfinite, coordinates(rate))) else math.nan
    except (TypeError, ValueError):
        return math.nan


def _parts(runs: pd.DataFrame, source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The lines that choose rates and those that are judged. Tuning runs choose, if there are any; without a part that selects, all lines
    of a run do both. Raises RunError: unknown parts, or no line that reports."""
    part = runs["part"].fillna("") if "part" in runs else pd.Series("", runs.index)
    if unknown := set(part) - {"", "selects", "reports"}:
        raise RunError(f"{source}: part {', '.join(map(str, unknown))}; it is selects or reports")
    tuning = runs["stage"] == "tune" if "stage" in runs else pd.Series(False, runs.index)
    split = (part == "selects").any()
    reporting = runs[~tuning & (part != "selects")]
    if reporting.empty:
        raise RunError(f"{source}: no line reports")
    chooses = (part == "selects") if split else tuning
    return runs[chooses], reporting


def _check_alike(reporting: pd.DataFrame, selecting: pd.DataFrame, source: str) -> None:
    """Raises RunError: runs were measured on different units, or these have other weights or groups; or arms were tuned over different
    rates or with fewer than two seeds."""
    stages = [lines for _, lines in selecting.groupby("stage", dropna=False)] if "stage" in selecting else [selecting]
    for lines in (reporting, *stages):
        finished = lines[lines["state"] == "finished"]
        runs = [finished[name] for name in ("arm", "rate", "seed")]
        part = (finished["weight"] / finished["weight"].groupby(runs, dropna=False).transform("sum")).round(12)
        unit = pd.Series([*zip(finished["sample"], finished["group"].map(str), part, strict=True)], finished.index, dtype=object)
        if unit.groupby(runs, dropna=False).agg(frozenset).nunique() > 1:
            same = finished.groupby(["arm", "rate", "seed"], dropna=False)["sample"].agg(frozenset).nunique() == 1
            what = ": a unit's weight or group is not the same in all" if same else ""
            raise RunError(f"{source}: runs were not measured on the same units{what}")
    tuning = _tuning(selecting)
    grids = {arm: frozenset(rates) for arm, rates in tuning.groupby("arm")["rate"] if rates.nunique() > 1}
    if len(set(grids.values())) > 1:
        words = "; ".join(f"{arm} {', '.join(map(rate_words, sorted(map(read_rate, grid))))}" for arm, grid in grids.items())
        raise RunError(f"{source}: arms are tuned over different rates: {words}")
    seeds = tuning[tuning["arm"].isin(grids)].groupby(["arm", "rate"])["seed"].nunique()
    if (seeds < FEWEST_TUNING_SEEDS).any():
        arm, rate = seeds.idxmin()
        raise RunError(f"{source}: {arm} has {seeds.min()} seed at {rate_words(rate)}; tuning takes {FEWEST_TUNING_SEEDS}")


def _tuning(selecting: pd.DataFrame) -> pd.DataFrame:
    """The lines that choose among rates: those of tuning runs, if there are any."""
    tuning = selecting[selecting["stage"] == "tune"] if "stage" in selecting else selecting[:0]
    return selecting if tuning.empty else tuning


def _rates(final: pd.DataFrame, selecting: pd.DataFrame, primary: Primary, who: str) -> tuple[list[Rate | None], list[Rate | None]]:
    """The rates of an arm's runs, first the one that tuning chose, and the one that it is judged at, if it is tuned. Raises RunError:
    nothing chooses."""
    rates = [None if pd.isna(rate) else read_rate(rate) for rate in final["rate"].unique()]
    tuning = _tuning(selecting)
    first = _costs(tuning, primary)
    if len(first) < 2:
        if len(rates) > 1:
            raise RunError(f"{who} has {len(rates)} rates and no line that selects one: add a column part, or judge apart by rate")
        return rates, rates[:1]
    best = chosen({who: first}).rates.get(who)
    if best is None:
        return rates, []
    if best not in rates:
        raise RunError(f"{who}: {rate_words(best)} is the best rate, but no line at it reports")
    order = [best, *(rate for rate in rates if rate != best)]
    after = (_costs(selecting.drop(tuning.index), primary) or _costs(final, primary)) if "stage" in tuning else first
    return order, [best_rate(after, rates) if set(rates) <= after.keys() else best]


def _costs(lines: pd.DataFrame, primary: Primary) -> dict[Rate, list[float]]:
    """The numbers that the choice of a rate minimizes, by rate and seed; infinite of a run that diverged."""
    costs: dict[Rate, list[float]] = {}
    for (rate, _), run in lines.groupby(["rate", "seed"]):
        mean = float(np.average(run["value"], weights=run["weight"])) * (-1 if primary.better == "higher" else 1)
        costs.setdefault(read_rate(rate), []).append(math.inf if (run["state"] == DIVERGED).any() else mean)
    return costs
