"""The noise of runs: how far runs scatter that differ in their seed alone, and which differences seeds find."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.special import chdtri

from lm.errors import RunError
from lm.experiments.experiment import PrimaryMetric
from lm.experiments.run_table import RUN_KEY, read_runs, read_table, split_by_use
from lm.report.frame import results
from lm.statistics.verdicts import MAX_SEEDS, POWER, seeds_needed, smallest_difference

_SEED_COUNTS = 3, 5, 10, 20  # numbers of seeds for which the smallest difference is given


def noise_sentences(
    paths: Sequence[Path], metric: str, condition: str, arm: str, seed: str, difference: float | None
) -> Iterator[str]:
    """Yield sentences on the noise of runs, in run folders or a table, on the lines that satisfy `condition`.

    Spreads are standard deviations, pooled over arms: of single runs, and of differences between two arms paired by
    seed, over the seeds that all arms share. Runs that have not finished don't count. `arm` and `seed` name columns.
    Raises RunError: the table can't be read, or no arm has two finished runs.
    """
    source = ", ".join(map(str, paths))
    table = read_table(paths[0]) if len(paths) == 1 and not paths[0].is_dir() else results(*paths)
    rows, primary = read_runs(table, source, PrimaryMetric(metric), None, condition, (), arm, seed, False)
    rows = split_by_use(rows, source)[1].query("state == 'finished'")
    rows = rows.assign(value=rows["value"] * rows["weight"], rate=rows["rate"].map(str), seed=rows["seed"].map(str))
    sums = rows.groupby(RUN_KEY, sort=False)[["value", "weight"]].sum()
    runs = (sums["value"] / sums["weight"]).unstack("seed")  # (sizes, arms and rates; seeds)
    degrees = runs.count(axis=1) - 1
    single = _spread((degrees * runs.var(axis=1)).sum(), degrees.sum())
    if not single:
        raise RunError(f"{source}: no arm has two finished runs, which differ in their seed alone")
    yield f"{primary.metric} of {source}: {len(sums)} runs"
    yield f"single runs scatter by {single[1]}"
    squares = degrees = 0
    for _, size_runs in runs.groupby("size"):
        shared = size_runs.dropna(axis=1).to_numpy() if seed in table else np.empty((1, 0))
        if min(shared.shape) > 1:
            residuals = shared - shared.mean(1, keepdims=True) - shared.mean(0) + shared.mean()
            squares = squares + 2 * (residuals**2).sum()
            degrees = degrees + (shared.shape[0] - 1) * (shared.shape[1] - 1)
    paired = _spread(squares, degrees)
    yield f"differences paired by seed scatter by {paired[1]}" if paired else "no arms share two seeds to pair runs by"
    designs = {"paired by seed": (paired[0], 1)} if paired else {}  # spread and `arms` of `power`
    designs |= {"unpaired": (math.sqrt(2) * single[0], 2), "against a number": (single[0], 1)}
    for count in _SEED_COUNTS:
        found = (f"{smallest_difference(count, *spread):.3g} {name}" for name, spread in designs.items())
        yield f"{count} seeds find a difference of {', '.join(found)}, with probability {POWER:g}"
    if difference:
        counts = {name: seeds_needed(spread, difference, arms=arms) for name, (spread, arms) in designs.items()}
        words = ", ".join(f"{count or f'more than {MAX_SEEDS}'} {name}" for name, count in counts.items())
        yield f"a difference of {difference:g} takes these seeds of each arm: {words}"


def _spread(squares: float, degrees: int) -> tuple[float, str] | None:
    """The standard deviation of a sum of squares, and in words with its 95 % interval; None without degrees."""
    if not degrees:
        return None
    value, low, high = np.sqrt(squares / np.array([degrees, *chdtri(degrees, [0.025, 0.975])]))
    return value, f"{value:.3g} (standard deviation; 95% interval {low:.3g} to {high:.3g})"
