"""Paired differences of arms to the baseline, on any series that has values by unit."""

from dataclasses import dataclass, replace

import numpy as np

from lm.report.sections import Arm, Line, Section, Units, units_at
from lm.runs.series import Series, number
from lm.statistics.intervals import FEWEST, Interval, over_seeds, paired_difference, sampled


@dataclass(frozen=True)
class Difference:
    """Arm minus baseline: an interval and how it was made, or why there is none."""

    arm: str
    section: Section
    line: Line
    place: str  # label, such as `4x-8x`; empty: of a single number
    what: str  # all of these in words
    interval: Interval | None  # in the unit of the series
    note: str


def differences(arms: tuple[Arm, ...], found: tuple[Section, ...]) -> list[Difference]:
    """Of every arm to the first, in every line but the controls that has values by unit, at the farthest place that both have."""
    return [
        _of_line(arm, arms[0], section, line)
        for arm in arms[1:]
        for section in found
        for line in section.lines
        if any(one.samples and not one.control for one in (*section.of_arm(arm, line), *section.of_arm(arms[0], line)))
    ]


def _of_line(arm: Arm, base: Arm, section: Section, line: Line) -> Difference:
    measured = [[one for one in section.of_arm(each, line) if one.samples] for each in (arm, base)]
    ours, theirs = ({label for one in some for label in one.places} for some in measured)
    place = [label for label in section.places if label in (ours & theirs or ours | theirs)][-1]
    one = next(one for some in measured for one in some if place in one.places)
    interval, note = _shown(*_difference(arm, base, section, line, place), one.unit == "fraction")
    return Difference(arm.label, section, line, place, _in_words(one, line, place), interval, note)


def _in_words(one: Series, line: Line, place: str) -> str:
    where = ""
    if one.axis is not None:
        start, stop = units_at(one, place).place
        where = f" {one.axis.before} {f'{number(start)}-{number(stop)}' if one.bins else place}"
    return ", ".join(filter(None, (line.metric, line.what))) + where + (line.setting and f", {line.setting}")


def _shown(interval: Interval | None, note: str, fraction: bool) -> tuple[Interval | None, str]:
    """An interval as it may be shown: none without spread, and of a difference of fractions within -1 and 1."""
    if interval is None or not interval.bounded:
        return None, "all sequences, or all seeds, agree: their spread gives no interval" if interval else note
    return replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high)) if fraction else interval, note


def _difference(arm: Arm, base: Arm, section: Section, line: Line, place: str) -> tuple[Interval | None, str]:
    def units(one: Arm) -> dict[tuple[int, ...], Units]:
        series = {run.seeds: section.series.get((run, line)) for run in one.runs}
        return {seeds: found for seeds, each in series.items() if each and (found := units_at(each, place))}

    ours, theirs = units(arm), units(base)
    for one, found in ((arm, ours), (base, theirs)):
        if not found:
            return None, f"{one.label} was not evaluated on it"
    every = [*ours.values(), *theirs.values()]
    if len({one.identity[0] for one in every}) > 1:
        return None, "not measured on the same tokens: the data fingerprints differ"
    if len({(one.identity, one.place, one.values.shape, one.weights.tobytes()) for one in every}) > 1:
        return None, "not measured on the same tokens: the evaluation sequences or positions differ"
    if not all(np.isfinite(one.values).all() for one in every):
        return None, "not finite on some sequences"
    shared, weights = sorted(ours.keys() & theirs.keys()), every[0].weights
    if not shared:
        return None, "no seed in common: a difference could be that of the seeds"
    if len(shared) >= 2:
        values = np.array([np.average(ours[seed].values - theirs[seed].values, weights=weights) for seed in shared])
        note = f"mean over {len(shared)} paired seeds, Student t interval over seeds, on these evaluation sequences"
        return over_seeds(values).interval(), note
    mine, other = ours[shared[0]].values, theirs[shared[0]].values
    documents = len(np.unique(every[0].groups))
    over = f"{len(mine)} sequences" if documents == len(mine) else f"{documents} documents ({len(mine)} sequences)"
    note = f"paired by sequence, Student t over {over}: covers the choice of what was evaluated on, not training noise"
    alone = "one seed per arm" if len(ours) == len(theirs) == 1 else f"seed {seeds_shown(shared[0])} alone is in both arms"
    note += f"; {alone}: says nothing about the method, as differences of several times this interval can be noise of the seed"
    if documents < FEWEST:
        return None, f"sequences of {documents} documents: an interval takes at least {FEWEST}"
    interval = paired_difference(mine, other, weights, every[0].groups)
    return replace(interval, over=f"{sampled(every[0].groups)}, 1 seed"), note


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seed, and after it those of the weights it started from, if they differ."""
    before = " after ".join(map(str, reversed(seeds[:-1])))
    return f"{seeds[-1]} after {before}" if before else str(seeds[-1])
