"""The verdicts of docs/statistics.md on runs, whoever trained them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from lm.experiments.experiment import Primary
from lm.schema import Plain
from lm.statistics.intervals import ALPHA, Interval, over_seeds_and_documents
from lm.statistics.learned import LearnedCounts, clopper_pearson, factor, has_learned, learned_verdicts, log_tokens
from lm.statistics.tuning import Rate, rate_cell, rate_words
from lm.statistics.verdicts import FEWEST_SEEDS, MOST_SEEDS, POWER, Comparison, Verdict, power, seeds_needed, verdicts

INTERVALS = ("difference", "factor", "alone")  # of a line: their ends have columns even where there are none
Place = tuple[str, str]  # size and arm
Pair = tuple[Rate | None, Rate | None]  # the rates of an arm and of the baseline


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """A run that is judged.

    Attributes:
        state: finished, unfinished or diverged.
        note: how it diverged, or of a finished run that it did not learn, in words.
        values, weights: (units,) the metric of each unit, or one number of the whole run, such as the tokens of `primary.reach`.
        groups: (units,) documents; None: not of documents.
    """

    arm: str
    state: str
    note: str
    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray | None

    @property
    def ended(self) -> bool:
        return self.state != "unfinished"

    @cached_property
    def value(self) -> float:
        """The weighted mean over units; infinite of a run that has not finished."""
        return float(np.average(self.values, weights=self.weights)) if self.state == "finished" else math.inf


ByRate = dict[Rate | None, list[JudgedRun]]  # runs of an arm by seed, at each rate; first the one that tuning chose


@dataclass(frozen=True, eq=False)
class Judged:
    """A question, the runs that answer it, and their verdicts.

    Attributes:
        primary: the metric, which direction is better, and the smallest difference of interest.
        arms: their names, the baseline first.
        seeds: planned for each arm.
        rates: by size, the rate that each arm is judged at; an arm without one is not tuned. None: not known yet.
        runs: by size and arm; every arm has every seed at each of its rates.
        every: rates were chosen by another metric (`lm.statistics.verdicts.Comparison`).
        looks: how often the data may be judged.
        sources: by arm that starts from the weights of others, their names.
        exploratory: sizes and arms whose verdicts are exploratory.
        key: heading of the rates.
        measured_on: heading of the means.
    """

    primary: Primary
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: Mapping[str, Mapping[str, Rate | None] | None]
    runs: Mapping[Place, ByRate]
    every: bool = False
    looks: int = 1
    sources: Mapping[str, list[str]] = field(default_factory=dict)
    exploratory: Collection[Place] = ()
    key: str = "rate"
    measured_on: str = ""

    @property
    def places(self) -> list[Place]:
        """Each size with each arm but the baseline."""
        return [*product(self.rates, self.arms[1:])]

    @property
    def alpha(self) -> float:
        """The level of one comparison at one look, at which all hold together with 95 %."""
        return ALPHA / max(1, len(self.places)) / self.looks

    @cached_property
    def verdicts(self) -> dict[Place, Verdict]:
        """The verdict on each arm but the baseline, in each size; with `primary.reach` the interval is of the factor."""
        primary = self.primary
        if primary.learned is not None:
            judged = learned_verdicts({place: self.counted(*place) for place in self.places}, self.looks)
        else:
            ratio = primary.reach is not None
            judged = verdicts(self.comparisons, primary.matters, ratio, self.looks)
            if ratio:
                judged = {place: replace(each, interval=factor(each.interval), alone=factor(each.alone)) for place, each in judged.items()}
        return {
            place: replace(each, exploratory=place in self.exploratory, reason=each.reason + self._not_learned(*place))
            for place, each in judged.items()
        }

    @cached_property
    def comparisons(self) -> dict[Place, Comparison]:
        """The comparison that runs so far give of each arm against the baseline, in each size."""
        return {place: self._compared(*place) for place in self.places}

    def judged_runs(self, size: str, arm: str) -> list[JudgedRun]:
        """The runs of an arm at the rate that it is judged at, by seed; none where it has no rate."""
        rates = self.rates[size] or {}
        return self.runs[size, arm][rates[arm]] if arm in rates else []

    def _compared(self, size: str, arm: str) -> Comparison:
        rates, primary = self.rates[size], self.primary
        planned, base, reach = len(self.seeds), self.arms[0], primary.reach is not None
        if rates is None or not {arm, base} <= rates.keys():
            return Comparison((), tuned=rates is None, planned=planned)
        at, (ours, theirs) = (rates[arm], rates[base]), self._paired(size, arm)
        tried = ours.keys()
        decisive = _decisive(at, ours, theirs)
        begun = any(run.arm == arm and run.ended for run in decisive)  # else a baseline that diverged says nothing of the arm
        diverged = [run for run in decisive if begun and run.state == "diverged"]
        why = "; ".join(run.note for run in diverged[:3]) + ("; ..." if len(diverged) > 3 else "")
        if diverged:  # nothing can be claimed: what there is at the rates that are judged is shown
            ours, theirs = {at[0]: ours[at[0]]}, {at[1]: theirs[at[1]]}
        else:
            ours, theirs = _usable(ours, at[0], reach), _usable(theirs, at[1], reach)
        by_seed = zip(*ours.values(), *theirs.values(), strict=True)
        seeds = [seed for seed, runs in enumerate(by_seed) if all(run.state == "finished" for run in runs)]
        ours, theirs = ({rate: [runs[seed] for seed in seeds] for rate, runs in by_rate.items()} for by_rate in (ours, theirs))
        unreached, over_documents = "", None
        shared = None if arm in self.sources or diverged else sum(rate in tried for rate in theirs) or None  # each has rates of its own
        by_rates = _differences(ours, theirs, lambda run: log_tokens(run.value) if reach else run.value)
        if reach:
            unreached = self._unreached([run for by_rate in (ours, theirs) for runs in by_rate.values() for run in runs])
        elif seeds:
            first = next(iter(ours.values()))[0]
            values = _differences(ours, theirs, lambda run: run.values) if first.groups is not None else None
            over_documents = None if values is None else over_seeds_and_documents(values, first.weights, first.groups)
        higher = not reach and primary.better == "higher"
        return Comparison(
            by_rates, ([*ours].index(at[0]), [*theirs].index(at[1])), len(diverged), shared, self.every, higher, planned=planned,
            why=why, over_documents=over_documents, unreached=unreached,
        )  # fmt: skip

    def counted(self, size: str, arm: str) -> LearnedCounts:
        """How many of the runs so far have learned, of an arm and of the baseline."""
        rates, planned, base, primary = self.rates[size], len(self.seeds), self.arms[0], self.primary
        if rates is None or not {arm, base} <= rates.keys():
            return LearnedCounts([(0, 0)], 0, tuned=rates is None, planned=planned)
        at, (ours, theirs) = (rates[arm], rates[base]), self._paired(size, arm)
        by_seed = zip(*ours.values(), *theirs.values(), strict=True)
        seeds = [seed for seed, runs in enumerate(by_seed) if all(run.ended for run in runs)]

        def learned(runs: list[JudgedRun]) -> int:
            return sum(has_learned(runs[seed].value, primary.learned, primary.better) for seed in seeds)

        pairs = [(learned(ours[rate]), learned(theirs[other])) for rate, other in (at, *product(ours, theirs))]
        diverged = sum(run.state == "diverged" for run in _decisive(at, ours, theirs))
        return LearnedCounts(pairs, len(seeds), diverged, planned=planned)

    def _paired(self, size: str, arm: str) -> tuple[ByRate, ByRate]:
        """The runs of an arm and of the baseline at each of their rates. If the arm's weights come from the baseline, that has one rate:
        what is compared is what became of the same runs. The baseline's rates that the arm has, too, come first."""
        base = self.arms[0]
        sources, ours, theirs = self.sources.get(arm), self.runs[size, arm], self.runs[size, base]
        if sources is None:
            return ours, {rate: theirs[rate] for rate in sorted(theirs, key=lambda rate: rate not in ours)}
        rate = self.rates[size][base]
        return ours, {rate: theirs[rate]} if base in sources else theirs

    def _not_learned(self, size: str, arm: str) -> str:
        """The runs of an arm and of the baseline that have finished and did not learn, in words to follow a reason; empty if all did."""
        by_seed = zip(*filter(None, (self.judged_runs(size, name) for name in (self.arms[0], arm))), strict=True)
        lost = [run.note for runs in by_seed for run in runs if run.state == "finished" and run.note]
        return f"; did not learn: {'; '.join(lost[:3])}{'; ...' if len(lost) > 3 else ''}" if lost else ""

    def _unreached(self, runs: list[JudgedRun]) -> str:
        """How many runs of each arm have no number of tokens, in words; empty if all have one."""
        primary, words, runs = self.primary, [], [*dict.fromkeys(runs)]
        for arm in dict.fromkeys(run.arm for run in runs):
            tokens = [run.value for run in runs if run.arm == arm]
            if never := sum(number == math.inf for number in tokens):
                words.append(f"{never} of {len(tokens)} runs of {arm} did not reach {primary.metric} {primary.reach:g}")
            if early := sum(number == 0 for number in tokens):
                words.append(f"{early} of {len(tokens)} runs of {arm} had reached {primary.reach:g} at the first evaluation")
        return "; ".join(words)

    def lines(self) -> list[dict[str, Plain]]:
        """One entry for each size and arm: rate, finished runs, mean of the primary metric over the seeds that all arms have finished, and
        at each rate of an arm that has several; verdict, and the difference with its interval over seeds and that over seeds and documents.
        With `primary.reach` geometric means of tokens over the runs that `reached` it, and factors in place of differences; if runs learn
        or don't, how many `learned` of those that `ended`, and the fraction's interval."""
        return [self._line(size, arm, self.common(size)) for size in self.rates for arm in self.arms]

    def common(self, size: str) -> list[bool]:
        """By seed, whether all arms that have finished any seed have finished this one: means are over these."""
        finished = [[run.state == "finished" for run in self.judged_runs(size, arm)] for arm in self.arms]
        return np.all([seeds for seeds in finished if any(seeds)] or [[False] * len(self.seeds)], axis=0).tolist()

    @property
    def leaves_out(self) -> bool:
        """Whether a finished run is in no mean, as another arm has not finished its seed."""
        return any(
            run.state == "finished" and not has
            for size, arm in product(self.rates, self.arms)
            for run, has in zip(self.judged_runs(size, arm), self.common(size), strict=False)
        )

    def _line(self, size: str, arm: str, common: list[bool]) -> dict[str, Plain]:
        """The line of an arm; `common`: the seeds that its mean is over."""
        primary, runs = self.primary, self.judged_runs(size, arm)
        reach, by_rate = primary.reach is not None, self.runs[size, arm]
        values = [run.value for run in runs if run.state == "finished"]
        line: dict[str, Plain] = {
            "size": size, "arm": arm, "rate": rate_cell((self.rates[size] or {}).get(arm)),
            "runs": len(values), "of": len(self.seeds),
            "mean": _mean([run.value for run, has in zip(runs, common, strict=False) if has and run.state == "finished"], reach),
        }  # fmt: skip
        if len(by_rate) > 1:
            line["means_by_rate"] = {
                rate_words(rate): _mean([run.value for run in tried if run.ended], reach) for rate, tried in by_rate.items()
            }
        line |= {"reached": sum(map(math.isfinite, values))} if reach else {}
        if primary.learned is not None:
            learned, ended = sum(has_learned(value, primary.learned, primary.better) for value in values), sum(run.ended for run in runs)
            line |= {"learned": learned, "ended": ended, "fraction_learned": finite(clopper_pearson(learned, ended))}
        if arm != self.arms[0]:
            verdict = self.verdicts[size, arm]
            line |= {"verdict": verdict.label, "words": verdict.words, "reason": verdict.reason}
            line |= {"factor" if reach else "difference": finite(verdict.interval)}
            line |= {"alone": finite(verdict.alone), "over_seeds_and_documents": finite(verdict.over_documents)}
            line |= {"p": verdict.p, "p_exact": verdict.p_exact}
            line["seeds_needed"] = verdict.seeds_needed and [*verdict.seeds_needed]
        return line

    def power(self, planned: int) -> Iterator[str]:
        """The chance that so many seeds find a difference that matters, loudly where that is less likely than not: by the spread of the
        differences that have been measured, else by the one that is expected."""
        primary, reach = self.primary, self.primary.reach is not None
        if primary.learned is not None:
            return
        measured = [each.differences for (size, _), each in self.comparisons.items() if self.rates[size] is not None]
        measured = [differences for differences in measured if len(differences) > 1 and np.isfinite(differences).all()]
        spread, source = primary.spread, "primary.spread"
        if measured:
            degrees = [len(differences) - 1 for differences in measured]
            spread = math.sqrt(np.average([np.var(differences, ddof=1) for differences in measured], weights=degrees))
            source = "the seeds that have ended"
        if spread is None:
            yield "power: not known before seeds have ended, as the file expects no primary.spread"
            return
        margin = math.log1p(primary.matters) if reach else primary.matters
        what = f"a factor of {1 + primary.matters:g}" if reach else f"a difference of {primary.matters:g}"
        chance = power(planned, spread, margin, self.alpha) if planned >= FEWEST_SEEDS else 0.0
        yield f"power: {planned} seeds find {what} with probability {chance:.2f}, by a spread of {spread:.2g} ({source})"
        if chance < 0.5:
            needed = seeds_needed(spread, margin, self.alpha) or f"more than {MOST_SEEDS}"
            remedy = f"probability {POWER:g} takes {needed} seeds: add seeds, or ask about a larger difference"
            yield f"LOW POWER: the experiment will more likely than not leave such a difference undecided; {remedy}"


def _decisive(at: Pair, ours: ByRate, theirs: ByRate) -> list[JudgedRun]:
    """The runs without which nothing can be said: at the rates that are judged, and at those that tuning chose."""
    return list(dict.fromkeys((*ours[at[0]], *theirs[at[1]], *next(iter(ours.values())), *next(iter(theirs.values())))))


def _usable(runs: ByRate, judged: Rate | None, reach: bool) -> ByRate:
    """Without the other rates at which one of the runs diverged, or never reached the level: they can't be an arm's best."""

    def lost(run: JudgedRun) -> bool:
        return run.state == "diverged" or (reach and run.state == "finished" and run.value == math.inf)

    return {rate: some for rate, some in runs.items() if rate in (judged, next(iter(runs))) or not any(map(lost, some))}


def _differences(ours: ByRate, theirs: ByRate, value: Callable[[JudgedRun], float | np.ndarray]) -> np.ndarray:
    """Arm minus baseline at each pair of rates, (the arm's rates, the baseline's, seeds, and the shape of a run's value)."""
    mine, others = (np.array([[value(run) for run in runs] for runs in by_rate.values()]) for by_rate in (ours, theirs))
    with np.errstate(invalid="ignore"):
        return mine[:, None] - others


def _mean(values: list[float], geometric: bool) -> float | None:
    """The arithmetic or geometric mean; None without values, or where one is not finite (of a geometric one, or 0)."""
    if not values or not np.isfinite(values).all() or (geometric and not all(values)):
        return None
    return float(np.exp(np.mean(np.log(values)))) if geometric else float(np.mean(values))


def finite(interval: Interval | None) -> list[float | None] | None:
    """[mean, low, high], null where not finite."""
    return interval and [value if math.isfinite(value) else None for value in interval.listed()]
