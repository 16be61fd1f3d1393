"""Verdicts on runs, as docs/statistics.md defines them, for runs of lm and of other programs."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product

import numpy as np

from lm.experiments.experiment import PrimaryMetric
from lm.runs.evaluations import json_value
from lm.schema import Plain
from lm.statistics.intervals import over_seeds, over_seeds_and_documents
from lm.statistics.joint import Family
from lm.statistics.tokens import factor, log_tokens
from lm.statistics.tuning import Rate, rate_cell, rate_text
from lm.statistics.verdicts import (
    MAX_SEEDS,
    MIN_SEEDS,
    POWER,
    Comparison,
    Verdict,
    power,
    seeds_needed,
    smallest_difference,
    verdicts,
)

# intervals in `Judgement.entries`; a CSV has columns for their ends even if all are empty
INTERVALS = ("difference", "factor", "alone")
SizeArm = tuple[str, str]  # size and arm
RatePair = tuple[Rate | None, Rate | None]  # the rates of an arm and of the baseline


@dataclass(frozen=True, eq=False)
class JudgedRun:
    arm: str
    state: str  # finished, unfinished or diverged
    note: str  # how the run diverged, or that the finished run did not learn, in words
    # values, weights: (units,) the metric and the weight of each unit, such as a sequence; or one value of the whole
    # run, with weight 1, such as the tokens to `primary.reach`
    values: np.ndarray
    weights: np.ndarray
    documents: np.ndarray | None  # (units,) the document of each unit; None: the units are not parts of documents
    # the level that the run is not better than, such as chance, in words; empty: it has learned, or there is no level
    unlearned_level: str = ""

    @property
    def ended(self) -> bool:
        return self.state != "unfinished"

    @cached_property
    def value(self) -> float:
        """The weighted mean of `values`, e.g. of the losses of sequences; infinite if the run has not finished."""
        if self.state != "finished":
            return math.inf
        if len(self.values) == 1:
            return float(self.values[0])
        return float((self.values * self.weights).sum() / self.weights.sum())


# runs of an arm by seed, at each rate; the rate that tuning chose comes first
RunsByRate = dict[Rate | None, list[JudgedRun]]


@dataclass(frozen=True, eq=False)
class Judgement:
    """A question about arms, the runs that answer it, and the verdicts on the arms."""

    primary: PrimaryMetric  # the metric, the direction that is better, and the smallest difference of interest
    arms: tuple[str, ...]  # the names of the arms, the baseline first
    seeds: tuple[int, ...]  # the seeds that are planned for each arm
    # the rate at which each arm is judged, by size and arm; an arm without a rate is `not tuned`. A size has None if no
    # rate is known yet
    rates: Mapping[str, Mapping[str, Rate | None] | None]
    runs: Mapping[SizeArm, RunsByRate]  # the runs by size and arm; every arm has every seed at each of its rates
    # whether verdicts must hold at every pair of rates, since rates were chosen by another metric than the compared one
    all_pairs: bool = False
    # the names of the arms whose weights an arm starts from, by that arm
    sources: Mapping[str, list[str]] = field(default_factory=dict)
    exploratory: Collection[SizeArm] = ()  # the sizes and arms whose verdicts are exploratory
    rate_heading: str = "rate"  # the heading of the column of rates
    # Runs are paired by seed, unless arms have seeds of their own: `unpaired` to the baseline's, or compared with the
    # number `target`, whose name stands in the place of the baseline's
    unpaired: bool = False
    target: float | None = None
    measured_on: str = ""  # what means are measured on, for the heading of their column
    bounds: tuple[float, float] | None = None  # the least and the greatest value that the metric can have

    @property
    def is_paired(self) -> bool:
        """Whether each run of an arm is compared with the baseline's run of the same seed."""
        return not self.unpaired and self.target is None

    @property
    def size_arms(self) -> list[SizeArm]:
        """All pairs of a size and an arm other than the baseline."""
        return [*product(self.rates, self.arms[1:])]

    @property
    def alpha(self) -> float:
        """The error rate of one comparison, such that all hold together; independence is the least favourable case."""
        return Family(len(self.size_arms)).alpha

    @cached_property
    def verdicts(self) -> dict[SizeArm, Verdict]:
        """Verdicts on all arms but the baseline, by size and arm.

        With `primary.reach`, a level of the metric, an interval is of a ratio: the arm's training tokens up to that
        level, divided by the baseline's.
        """
        primary = self.primary
        results = verdicts(self.comparisons, primary.matters, primary.reach is not None)
        if primary.reach is not None:
            results = {
                size_arm: replace(
                    verdict, interval=factor(verdict.interval), single_interval=factor(verdict.single_interval)
                )
                for size_arm, verdict in results.items()
            }
        for size_arm in filter(results.__contains__, self.exploratory):
            results[size_arm] = replace(results[size_arm], exploratory=True)
        for size_arm, verdict in results.items():
            if words := self._not_learned_words(*size_arm):
                results[size_arm] = replace(verdict, reason=verdict.reason + words)
        return results

    @cached_property
    def comparisons(self) -> dict[SizeArm, Comparison]:
        """Comparisons of each arm with the baseline, by size and arm, from the runs so far."""
        return {size_arm: self._comparison(*size_arm) for size_arm in self.size_arms}

    def judged_runs(self, size: str, arm: str) -> list[JudgedRun]:
        """List an arm's final runs at the learning rate at which the arm is judged, ordered by seed; empty if no rate
        is chosen.
        """
        rates = self.rates[size] or {}
        return self.runs[size, arm][rates[arm]] if arm in rates else []

    def _comparison(self, size: str, arm: str) -> Comparison:
        rates, primary = self.rates[size], self.primary
        baseline, counts_tokens = self.arms[0], primary.reach is not None
        if rates is None or not {arm, baseline} <= rates.keys():
            return Comparison((), is_tuned=rates is None, n_planned_seeds=len(self.seeds))
        pair, (arm_runs, baseline_runs) = (rates[arm], rates[baseline]), self._runs_at_all_rates(size, arm)
        arm_rates = arm_runs.keys()
        decisive_runs = _decisive_runs(pair, arm_runs, baseline_runs)
        # before that, a diverged baseline says nothing of the arm
        has_begun = any(run.arm == arm and run.ended for run in decisive_runs)
        diverged_runs = [run for run in decisive_runs if has_begun and run.state == "diverged"]
        reason = "; ".join(run.note for run in diverged_runs[:3]) + ("; ..." if len(diverged_runs) > 3 else "")
        if diverged_runs:  # no claim is possible: only the runs at the judged rates are shown
            arm_runs, baseline_runs = {pair[0]: arm_runs[pair[0]]}, {pair[1]: baseline_runs[pair[1]]}
        else:
            arm_runs = _usable_runs(arm_runs, pair[0], counts_tokens)
            baseline_runs = _usable_runs(baseline_runs, pair[1], counts_tokens)
        planned_counts = [len(next(iter(runs.values()))) for runs in (arm_runs, baseline_runs)]
        paired_runs = ((arm_runs,), (baseline_runs,)) if self.unpaired else ((arm_runs, baseline_runs),)
        arm_runs, baseline_runs = chain.from_iterable(_finished_in_all(*group) for group in paired_runs)
        unreached_words, document_estimate = "", None
        # Without shared rates, all rates of the baseline count.
        shared_count = (
            None if arm in self.sources or diverged_runs else sum(rate in arm_rates for rate in baseline_runs) or None
        )
        values = _values(arm_runs, baseline_runs, lambda run: log_tokens(run.value) if counts_tokens else run.value)
        differences = _differences(values)
        seed_count = differences.shape[-1]
        unfinished_count = max(count - array.shape[1] for count, array in zip(planned_counts, values, strict=True))
        if counts_tokens:
            unreached_words = self._unreached_words(chain(*arm_runs.values(), *baseline_runs.values()))
        elif seed_count and not self.unpaired and (first_run := next(iter(arm_runs.values()))[0]).documents is not None:
            unit_differences = _differences(_values(arm_runs, baseline_runs, lambda run: run.values))
            document_estimate = over_seeds_and_documents(unit_differences, first_run.weights, first_run.documents)
        return Comparison(
            differences, ([*arm_runs].index(pair[0]), [*baseline_runs].index(pair[1])), len(diverged_runs),
            shared_count, self.all_pairs,
            higher_is_better=not counts_tokens and primary.better == "higher", divergence=reason,
            n_planned_seeds=seed_count + unfinished_count, document_estimate=document_estimate,
            unpaired_values=values if self.unpaired else None, unreached_runs=unreached_words,
            bounds=self._compared_bounds, not_learned=self._not_learned(pair, arm_runs, baseline_runs),
        )  # fmt: skip

    def _not_learned(self, pair: RatePair, arm_runs: RunsByRate, baseline_runs: RunsByRate) -> str:
        """Say that no run of either arm is better than a level; empty if a run at the judged rates is."""
        runs = arm_runs[pair[0]] + ([] if self.target is not None else baseline_runs[pair[1]])
        levels = dict.fromkeys(run.unlearned_level for run in runs)
        return f"no run of either arm is better than {', '.join(levels)}" if levels and "" not in levels else ""

    @cached_property
    def _compared_bounds(self) -> tuple[float, float] | None:
        """The bounds of differences, or of an arm's values where runs are unpaired. Without `bounds`, a metric of which
        more is better and whose values all lie within 0 and 1 is an accuracy.
        """
        primary, bounds = self.primary, self.bounds
        if bounds is None and primary.better == "higher" and primary.reach is None:
            values = [run.value for runs in self.runs.values() for run in chain(*runs.values())]
            if all(0 <= value <= 1 for value in values if math.isfinite(value)):
                bounds = 0.0, 1.0
        if bounds is None or self.unpaired:
            return bounds
        low, high = bounds
        return (low - high, high - low) if self.target is None else (low - self.target, high - self.target)

    def _runs_at_all_rates(self, size: str, arm: str) -> tuple[RunsByRate, RunsByRate]:
        """Return the runs of an arm, and the runs of the baseline, each by learning rate.

        If the arm starts from weights that the baseline's runs trained at one rate, only these runs of the baseline are
        returned. If it starts from random weights, the baseline's runs at rates that the arm has, too, come first.
        """
        baseline = self.arms[0]
        arm_runs = self.runs[size, arm]
        if self.target is not None:
            runs = next(iter(arm_runs.values()))
            return arm_runs, {
                None: [
                    replace(run, arm=baseline, state="finished", values=np.full_like(run.values, self.target))
                    for run in runs
                ]
            }
        sources, baseline_runs = self.sources.get(arm), self.runs[size, baseline]
        if sources is None:
            return arm_runs, {
                rate: baseline_runs[rate] for rate in sorted(baseline_runs, key=lambda rate: rate not in arm_runs)
            }
        rate = self.rates[size][baseline]
        return arm_runs, {rate: baseline_runs[rate]} if baseline in sources else baseline_runs

    def _not_learned_words(self, size: str, arm: str) -> str:
        """Name the finished runs of an arm and the baseline that did not learn: their loss ends above the unigram
        cross-entropy. The words end a verdict's reason, and are empty without such runs."""
        runs_by_seed = zip(*filter(None, (self.judged_runs(size, name) for name in (self.arms[0], arm))), strict=False)
        notes = [run.note for runs in runs_by_seed for run in runs if run.state == "finished" and run.note]
        return f"; did not learn: {'; '.join(notes[:3])}{'; ...' if len(notes) > 3 else ''}" if notes else ""

    def _unreached_words(self, runs: Iterable[JudgedRun]) -> str:
        """Count in words the runs of each arm that never reached `primary.reach`, or reached it by the first
        evaluation; empty if none.
        """
        primary, words, runs = self.primary, [], [*dict.fromkeys(runs)]
        for arm in dict.fromkeys(run.arm for run in runs):
            tokens = [run.value for run in runs if run.arm == arm]
            if unreached_count := sum(number == math.inf for number in tokens):
                words.append(
                    f"{unreached_count} of {len(tokens)} runs of {arm} did not reach {primary.metric} {primary.reach:g}"
                )
            if early_count := sum(number == 0 for number in tokens):
                words.append(
                    f"{early_count} of {len(tokens)} runs of {arm} had reached {primary.reach:g} at the first "
                    "evaluation"
                )
        return "; ".join(words)

    def entries(self) -> list[dict[str, Plain]]:
        """List an entry for each size and arm: rate, finished runs, means of the primary metric, verdict, difference
        and intervals.

        A `target` has no entry. Means are over the seeds of `common_seeds`. An arm with several rates also has a mean
        at each rate, over ended runs, null if one diverged. A difference has an interval over seeds that holds together
        with all others, one that holds by itself (`alone`), and one over seeds and documents. With `primary.reach`,
        means are geometric means of tokens, null if a run had 0 or infinite tokens. `reached` counts the runs with
        finite tokens, and factors replace differences.
        """
        arms = self.arms[self.target is not None :]
        return [self._entry(size, arm, self.common_seeds[size]) for size in self.rates for arm in arms]

    @cached_property
    def common_seeds(self) -> dict[str, list[bool]]:
        """For each size and seed, whether the size's means include the seed; this takes a finished run of every arm
        that has finished runs. If arms have seeds of their own, each mean is over an arm's own finished runs.
        """
        if not self.is_paired:
            return dict.fromkeys(self.rates, [True] * len(self.seeds))
        flags_by_size = {
            size: [[run.state == "finished" for run in self.judged_runs(size, arm)] for arm in self.arms]
            for size in self.rates
        }
        return {
            size: np.all([flags for flags in arm_flags if any(flags)] or [[False] * len(self.seeds)], axis=0).tolist()
            for size, arm_flags in flags_by_size.items()
        }

    def _entry(self, size: str, arm: str, common_seeds: list[bool]) -> dict[str, Plain]:
        """Return the entry of `entries` for a size and arm. `common_seeds`: for each seed, whether the mean includes
        it.
        """
        primary, runs = self.primary, self.judged_runs(size, arm)
        counts_tokens, runs_by_rate = primary.reach is not None, self.runs[size, arm]
        values = [run.value for run in runs if run.state == "finished"]
        common_values = [
            run.value
            for run, is_common in zip(runs, common_seeds, strict=False)
            if is_common and run.state == "finished"
        ]
        entry: dict[str, Plain] = {
            "size": size, "arm": arm, "rate": rate_cell((self.rates[size] or {}).get(arm)),
            "runs": len(values), "of": len(runs) or len(self.seeds), "mean": _mean(common_values, counts_tokens),
        }  # fmt: skip
        if len(runs_by_rate) > 1:
            entry["means_by_rate"] = {
                rate_text(rate): _mean([run.value for run in rate_runs if run.ended], counts_tokens)
                for rate, rate_runs in runs_by_rate.items()
            }
        entry |= {"reached": sum(map(math.isfinite, values))} if counts_tokens else {}
        if arm != self.arms[0]:
            verdict = self.verdicts[size, arm]
            entry |= {"verdict": verdict.label, "words": verdict.words, "reason": verdict.reason}
            intervals = {
                "factor" if counts_tokens else "difference": verdict.interval,
                "alone": verdict.single_interval,
            }
            intervals["over_seeds_and_documents"] = verdict.document_interval
            entry |= {name: json_value(interval and interval.as_list()) for name, interval in intervals.items()}
            entry |= {"p": verdict.p if verdict.seeds else None, "p_exact": verdict.p_exact}
            entry["seeds_needed"] = verdict.seeds_needed and [*verdict.seeds_needed]
        return entry

    def power_sentences(self, seed_count: int) -> Iterator[str]:
        """Yield sentences on the probability that `seed_count` seeds find a difference that matters, with a warning if
        it is below 0.5. The probability depends on the standard deviation of the measured differences or, without
        these, on the expected `primary.spread`. With fewer than MIN_SEEDS seeds a sentence says that there is no
        verdict.
        """
        primary, counts_tokens = self.primary, self.primary.reach is not None
        if seed_count < MIN_SEEDS:
            yield f"NO VERDICT: there are {seed_count} seeds, and a verdict takes {MIN_SEEDS}: add seeds"
            return
        seed_differences = [
            comparison.differences for (size, _), comparison in self.comparisons.items() if self.rates[size] is not None
        ]
        seed_differences = [
            differences for differences in seed_differences if len(differences) > 1 and np.isfinite(differences).all()
        ]
        spread, source = primary.spread, "primary.spread"
        if seed_differences:
            degrees_of_freedom = [len(differences) - 1 for differences in seed_differences]
            # variances over seeds, from standard errors: these are 0 where values differ by rounding alone
            variances = [len(differences) * over_seeds(differences).error ** 2 for differences in seed_differences]
            spread = math.sqrt(np.average(variances, weights=degrees_of_freedom))
            source = "the seeds that have ended"
        if not spread:
            reason = (
                "before seeds have ended, as the file expects no primary.spread"
                if spread is None
                else "as all seeds agree"
            )
            yield f"power: not known {reason}"
            return
        margin = math.log1p(primary.matters) if counts_tokens else primary.matters
        effect = f"a factor of {1 + primary.matters:g}" if counts_tokens else f"a difference of {primary.matters:g}"
        probability = power(seed_count, spread, margin, self.alpha)
        smallest = smallest_difference(seed_count, spread, alpha=self.alpha)
        smallest = f"a factor of {math.exp(smallest):.3g}" if counts_tokens else f"{smallest:.2g}"
        yield (
            f"power: {seed_count} seeds find {effect} with probability {probability:.2f}, by a spread of "
            f"{spread:.2g} ({source}); with probability {POWER:g} they find {smallest}"
        )
        if probability < 0.5:
            needed_seeds = seeds_needed(spread, margin, self.alpha) or f"more than {MAX_SEEDS}"
            remedy = f"probability {POWER:g} takes {needed_seeds} seeds: add seeds, or ask about a larger difference"
            yield f"LOW POWER: the experiment will more likely than not leave such a difference undecided; {remedy}"


def _decisive_runs(pair: RatePair, arm_runs: RunsByRate, baseline_runs: RunsByRate) -> list[JudgedRun]:
    """Return the runs at the judged rates (`pair`) and at the rates that tuning chose; a divergence of any of these
    affects the verdict.
    """
    chosen_runs = *next(iter(arm_runs.values())), *next(iter(baseline_runs.values()))
    return list(dict.fromkeys((*arm_runs[pair[0]], *baseline_runs[pair[1]], *chosen_runs)))


def _usable_runs(runs: RunsByRate, judged_rate: Rate | None, counts_tokens: bool) -> RunsByRate:
    """Return the runs of an arm by rate, without rates at which a run diverged or, with `counts_tokens`, never reached
    the metric's level `primary.reach`. The rate at which the arm is judged and the rate that tuning chose are always
    kept.
    """

    def has_no_value(run: JudgedRun) -> bool:
        return run.state == "diverged" or (counts_tokens and run.state == "finished" and run.value == math.inf)

    permanent_rates = judged_rate, next(iter(runs))
    return {
        rate: rate_runs
        for rate, rate_runs in runs.items()
        if rate in permanent_rates or not any(map(has_no_value, rate_runs))
    }


def _finished_in_all(*arms: RunsByRate) -> list[RunsByRate]:
    """Return the runs of each arm at the places (seeds) where the runs of all these arms have finished at all rates."""
    by_seed = zip(*chain.from_iterable(runs.values() for runs in arms), strict=True)
    seeds = [seed for seed, runs in enumerate(by_seed) if all(run.state == "finished" for run in runs)]
    return [{rate: [rate_runs[seed] for seed in seeds] for rate, rate_runs in runs.items()} for runs in arms]


def _values(
    arm_runs: RunsByRate, baseline_runs: RunsByRate, value_of: Callable[[JudgedRun], float | np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Values of the arm and of the baseline: (rates, seeds, ...), with the shape of `value_of(run)` last."""
    return tuple(
        np.array([[value_of(run) for run in runs] for runs in runs_by_rate.values()])
        for runs_by_rate in (arm_runs, baseline_runs)
    )


def _differences(values: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Values of the arm minus values of the baseline: (arm rates, baseline rates, seeds, ...), up to the last seed that
    both have."""
    (arm_values, baseline_values), count = values, min(array.shape[1] for array in values)
    with np.errstate(invalid="ignore"):
        return arm_values[:, None, :count] - baseline_values[:, :count]


def _mean(values: list[float], geometric: bool) -> float | None:
    """The arithmetic or geometric mean; None without values, if a value is not finite, or if a value of a geometric
    mean is 0.
    """
    if not values or not np.isfinite(values).all() or (geometric and not all(values)):
        return None
    return float(np.exp(np.mean(np.log(values)))) if geometric else float(np.mean(values))
