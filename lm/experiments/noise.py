"""The noise of runs: how far runs scatter that differ in their seed alone, and which differences seeds find."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import chdtri

from lm.errors import RunError
from lm.experiments.judging import RUN_KEY, Judgement, PrimaryMetric
from lm.experiments.run_table import read_runs, read_table, split_by_use
from lm.plain import Plain
from lm.report.frame import results
from lm.statistics.verdicts import MAX_SEEDS, POWER, seeds_needed, smallest_difference

_SEED_COUNTS = 3, 5, 10, 20  # numbers of seeds for which the smallest difference is given


def noise_entries(
    paths: Sequence[Path],
    metric: str,
    condition: str,
    split_columns: Sequence[str],
    arm: str,
    seed: str,
    difference: float | None,
) -> list[dict[str, Plain]]:
    """Measure the noise of runs, in run folders or a table, on the lines that satisfy `condition`; an entry for each
    value of the columns `split_columns`, or one of all runs.

    Runs that have not finished don't count. `arm` and `seed` name columns. `difference`: the seeds that find it are
    counted. Raises RunError: the table can't be read, or no arm has two finished runs.
    """
    source = ", ".join(map(str, paths))
    table = read_table(paths[0], arm) if len(paths) == 1 and not paths[0].is_dir() else results(*paths)
    rows, primary = read_runs(table, source, PrimaryMetric(metric), None, condition, split_columns, arm, seed, False)
    rows = split_by_use(rows, source)[1].query("state == 'finished'")
    rows = rows.assign(value=rows["value"] * rows["weight"], rate=rows["rate"].map(str), seed=rows["seed"].map(str))
    sums = rows.groupby(RUN_KEY, sort=False)[["value", "weight"]].sum()
    runs = (sums["value"] / sums["weight"]).unstack("seed")  # (sizes, arms and rates; seeds)
    groups = runs.groupby("size", sort=False) if split_columns else [("", runs)]
    entries = []
    for name, group in groups:
        if not (noise := noise_of(group, seed in table, difference)):
            of_group = f" of {name}" if name else ""
            raise RunError(f"{source}: no arm{of_group} has two finished runs, which differ in their seed alone")
        title = ", ".join(filter(None, (f"{primary.metric} of {source}", name)))
        entries.append({"of": title, "metric": primary.metric, "by": name} | noise)
    return entries


def noise_of(runs: pd.DataFrame, is_paired: bool, difference: float | None = None) -> dict[str, Plain] | None:
    """The noise of runs, a line for each arm of a size and a column for each seed; None if no arm has two runs.

    Spreads are standard deviations with 95 % intervals, pooled over arms: of single runs, and of differences between
    two arms paired by seed, over the seeds that all arms of a size share. `is_paired`: whether seeds have names.
    """
    degrees = runs.count(axis=1) - 1
    largest = float(runs.abs().max(axis=None))
    single = _spread((degrees * runs.var(axis=1)).sum(), degrees.clip(lower=0).sum(), largest)
    if not single:
        return None
    squares = paired_degrees = 0
    for _, size_runs in runs.groupby("size") if is_paired else ():
        shared = size_runs.dropna(axis=1).to_numpy()
        if min(shared.shape) > 1:
            residuals = shared - shared.mean(1, keepdims=True) - shared.mean(0) + shared.mean()
            squares += 2 * (residuals**2).sum()
            paired_degrees += (shared.shape[0] - 1) * (shared.shape[1] - 1)
    paired = _spread(squares, paired_degrees, largest)
    designs = {"paired by seed": (paired[0], 1)} if paired else {}  # spread and `arms` of `power`
    designs |= {"unpaired": (math.sqrt(2) * single[0], 2), "against a number": (single[0], 1)}
    designs = {name: design for name, design in designs.items() if design[0]}  # equal runs say nothing of others
    noise = {
        "runs": int(runs.count().sum()),
        "single_runs": single,
        "paired_differences": paired,
        "smallest_difference": {
            str(count): {name: float(smallest_difference(count, *spread)) for name, spread in designs.items()}
            for count in (_SEED_COUNTS if designs else ())
        },
    }
    if difference is not None and designs:
        counts = {name: seeds_needed(spread, difference, arms=arms) for name, (spread, arms) in designs.items()}
        noise["seeds_needed"] = {"difference": difference} | counts
    return noise


def noise_sentences(noise: dict[str, Plain]) -> Iterator[str]:
    """Put an entry of `noise_entries` into sentences."""
    paired = noise["paired_differences"]
    yield f"{noise['of']}: {noise['runs']} runs"
    yield f"single runs scatter by {_spread_words(noise['single_runs'])}"
    words = paired and f"differences paired by seed scatter by {_spread_words(paired)}"
    yield words or "no arms share two seeds to pair runs by"
    for count, smallest in noise["smallest_difference"].items():
        found = ", ".join(f"{value:.3g} {name}" for name, value in smallest.items())
        yield f"{count} seeds find a difference of {found}, with probability {POWER:g}"
    if needed := noise.get("seeds_needed"):
        counts = {name: count for name, count in needed.items() if name != "difference"}
        words = ", ".join(f"{count or f'more than {MAX_SEEDS}'} {name}" for name, count in counts.items())
        yield f"a difference of {needed['difference']:g} takes these seeds of each arm: {words}"


def experiment_noise(judgement: Judgement) -> str:
    """A sentence on the noise of an experiment's final runs, each arm at the rate at which it is judged; empty while no
    arm has two.
    """
    size_arms = [size_arm for size_arm in judgement.runs_by_arm if judgement.judged_runs(*size_arm)]
    values = [judgement.judged_values(*size_arm) for size_arm in size_arms]
    index = pd.MultiIndex.from_tuples(size_arms, names=("size", "arm")) if size_arms else None
    noise = noise_of(pd.DataFrame(values, index).replace(math.inf, math.nan), True) if size_arms else None
    if not noise:
        return ""
    paired = noise["paired_differences"]
    words = f", differences paired by seed by {_spread_words(paired)}" if paired else ""
    return f"noise: single runs scatter by {_spread_words(noise['single_runs'])}{words}"


def _spread(squares: float, degrees: int, largest: float) -> list[float] | None:
    """The standard deviation of a sum of squares, and the ends of its 95 % interval; None without degrees. It is 0 up
    to 1e-9 times the `largest` value, which is rounding.
    """
    if not degrees:
        return None
    squares *= math.sqrt(squares / degrees) > 1e-9 * largest
    return np.sqrt(squares / np.array([degrees, *chdtri(degrees, [0.025, 0.975])])).tolist()


def _spread_words(spread: list[float]) -> str:
    value, low, high = spread
    if not value:
        return "0 (all are equal)"
    return f"{value:.3g} (standard deviation; 95% interval {low:.3g} to {high:.3g}, alone)"
