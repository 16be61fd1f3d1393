"""This module judges a frame of runs, of lm or of other programs, as docs/statistics.md says, and puts verdicts and
noise into tables and words."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, product
from typing import Literal

import numpy as np
import pandas as pd

from lm.config.schema import key
from lm.plain import Plain, json_value
from lm.report.tables import Cell, Column, FilledColumn, Table, number_text, print_tables
from lm.statistics.intervals import Estimate, Family, estimate_over_seeds, estimate_over_seeds_and_documents
from lm.statistics.verdicts import (
    MAX_SEEDS,
    MIN_SEEDS,
    POWER,
    UNTUNED_OBSTACLE,
    Comparison,
    Obstacle,
    Verdict,
    judge_comparisons,
    pooled_std_and_interval,
    power,
    seeds_needed,
    smallest_difference,
)

FINISHED, UNFINISHED, DIVERGED_KEY = RUN_STATES = "finished", "unfinished", "diverged"
# intervals in `Judgement.summary_rows`; a CSV has columns for their ends even if all are empty
DIFFERENCE_INTERVAL_KEYS = ("difference", "alone")
MAX_PRINTED_ROWS = 500  # lines of a table that a terminal shows
NOISE_SEED_COUNTS = 3, 5, 10, 20  # numbers of seeds for which `measure_noise` gives the smallest difference
RUN_KEY_COLUMNS = ["size", "arm", "rate", "seed"]  # columns that tell the runs of a frame apart
JUDGED_COLUMNS = [
    *RUN_KEY_COLUMNS,
    "state",
    "note",
    "unlearned",
    "value",
    "weight",
    "group",
]  # as `judge` describes them
SizeArm = tuple[str, str]  # size and arm
Stage = Literal["tune", "final"]  # a run of stage `tune` chooses a rate, one of stage `final` is judged
Rate = float  # a value of the tuned key
# the runs of an arm by rate, as numbers in `Judgement.run_columns`, a run a seed; the rate that tuning chose is first
RunsByRate = dict[Rate | None, list[int]]


@dataclass
class PrimaryMetric:
    """Names the metric that decides the verdicts, settled before any run, and says how its values are compared."""

    metric: str = key("val/loss", "name in the metrics log, as `lm eval` gives it, e.g. val/loss")
    better: Literal["lower", "higher"] = key("lower", "which direction is better")
    matters: float = key(0.01, "smallest difference of interest, in the metric's unit", gt=0)
    spread: float | None = key(
        None, "standard deviation of differences between single runs that the plan expects; null: unknown", gt=0
    )


@dataclass(frozen=True, eq=False)
class Question:
    """Says what is asked of runs: which arms are compared, by which metric, and in which design."""

    primary_metric: PrimaryMetric  # the metric, the direction that is better, and the smallest difference of interest
    arms: tuple[str, ...]  # the names of the arms, the baseline first
    seeds: tuple[Plain, ...]  # the seeds that are planned for each arm
    # the rate at which each arm is judged, by size and arm; an arm without a rate is `not tuned`. A size has None if no
    # rate is known yet
    judged_rates: Mapping[str, Mapping[str, Rate | None] | None]
    # whether verdicts must hold at every pair of rates, since rates were chosen by another metric than the compared one
    must_hold_at_all_rates: bool = False
    # the names of the arms whose weights an arm starts from, by that arm
    source_arms: Mapping[str, list[str]] = field(default_factory=dict)
    exploratory_arms: Collection[SizeArm] = ()  # the sizes and arms whose verdicts are exploratory
    rate_heading: str = "rate"  # the heading of the column of rates
    # whether arms have seeds of their own, so that their runs are not paired with the baseline's by seed
    unpaired_with_baseline: bool = False
    # the number that arms are compared with; `arms` then begins with its name in place of a baseline's
    target_value: float | None = None
    measured_data_text: str = ""  # what means are measured on, for the heading of their column
    # lowest and highest value of the metric, infinite ones if it has none; None: as `Judgement.value_bounds` says
    value_bounds: tuple[float, float] | None = None

    @property
    def is_paired(self) -> bool:
        """Return whether each run of an arm is compared with the baseline's run of the same seed."""
        return not self.unpaired_with_baseline and self.target_value is None

    @property
    def compared_size_arms(self) -> list[SizeArm]:
        """Return all pairs of a size and an arm other than the baseline."""
        return [*product(self.judged_rates, self.arms[1:])]

    @property
    def comparison_alpha(self) -> float:
        """Return the error rate of one comparison's interval at which all intervals hold together with 95 %.
        Comparisons are taken as independent, the least favourable case."""
        return Family(len(self.compared_size_arms)).comparison_alpha


def judge(frame: pd.DataFrame, question: Question) -> "Judgement":
    """Judge runs, whoever trained them.

    frame: a row for each unit of a run, such as a sequence, or one for the run; every arm has every seed at each of its
        rates. The rows of a run are consecutive, its units in the same order in all runs. An arm's runs are grouped by
        rate, and sorted by seed in each group. The first group has the rate that tuning chose. Columns:

        size, arm, rate, seed: of the run.
        state: one of RUN_STATES.
        note: how the run diverged, or that it finished and did not learn, in words; else empty.
        unlearned: the level that the run is not better than, such as chance, in words; empty: it has learned, or there
            is no level.
        value, weight: the metric and the weight of the unit.
        group: the unit's document; missing: units are not parts of documents.
    """
    numbers = frame.groupby(RUN_KEY_COLUMNS, sort=False, dropna=False).ngroup().to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    runs = frame.iloc[starts].reset_index(drop=True)
    units = [slice(start, stop) for start, stop in pairwise([*starts.tolist(), len(frame)])]
    values, weights = frame["value"].to_numpy(float), frame["weight"].to_numpy(float)
    means = values[starts]
    for number in np.flatnonzero(np.diff(starts, append=len(frame)) > 1):
        unit_values, unit_weights = values[units[number]], weights[units[number]]
        means[number] = (unit_values * unit_weights).sum() / unit_weights.sum()
    runs["value"] = np.where(runs["state"] == FINISHED, means, math.inf)
    runs_by_arm: dict[SizeArm, RunsByRate] = {}
    for number, (size, arm, cell) in enumerate(zip(runs["size"], runs["arm"], runs["rate"], strict=True)):
        by_rate = runs_by_arm.setdefault((size, arm), {})
        by_rate.setdefault(None if pd.isna(cell) else cell, []).append(number)
    columns = {name: runs[name].to_numpy() for name in ("state", "note", "unlearned", "value")}
    sampling_unit_columns = {name: frame[name].to_numpy() for name in ("value", "weight", "group")}
    return Judgement(question, columns, runs_by_arm, sampling_unit_columns, units)


@dataclass(frozen=True, eq=False)
class Judgement:
    """Holds the runs of a frame and computes the verdicts on them, as `judge` returns it."""

    question: Question
    # by column of the frame, an entry for each run; `value` is the mean over units, infinite unless finished
    run_columns: dict[str, np.ndarray]
    runs_by_arm: dict[SizeArm, RunsByRate]
    sampling_unit_columns: dict[str, np.ndarray]  # value, weight and group of all units
    unit_slices: list[slice]  # the units of each run

    @property
    def primary_metric(self) -> PrimaryMetric:
        """Return the metric that decides the verdicts."""
        return self.question.primary_metric

    @cached_property
    def _finished_mask(self) -> np.ndarray:
        """Return whether each run has finished, (runs,) bool."""
        return self.run_columns["state"] == FINISHED

    @cached_property
    def verdicts(self) -> dict[SizeArm, Verdict]:
        """Return the verdicts on all arms but the baseline, by size and arm."""
        baseline, results = self.question.arms[0], judge_comparisons(self.comparisons, self.primary_metric.matters)
        for size_arm in filter(results.__contains__, self.question.exploratory_arms):
            results[size_arm] = replace(results[size_arm], plan_changed_after_results=True)
        # the finished runs that did not learn: their loss ends above the unigram cross-entropy
        has_note = {*np.flatnonzero(self._finished_mask & (self.run_columns["note"] != ""))}
        for (size, arm), verdict in results.items() if has_note else ():
            runs_by_seed = zip(
                *filter(None, (self.runs_at_judged_rate(size, name) for name in (baseline, arm))), strict=False
            )
            if notes := [self.run_columns["note"][run] for run in chain(*runs_by_seed) if run in has_note]:
                results[size, arm] = replace(verdict, reason=f"{verdict.reason}; did not learn: {_join_notes(notes)}")
        return results

    @cached_property
    def comparisons(self) -> dict[SizeArm, Comparison]:
        """Return the comparisons of each arm with the baseline, by size and arm, from the runs so far."""
        return {size_arm: self._comparison(*size_arm) for size_arm in self.question.compared_size_arms}

    def runs_at_judged_rate(self, size: str, arm: str) -> list[int]:
        """Return the indices, in `run_columns`, of an arm's runs at the rate at which the arm is judged, ordered by
        seed. The list is empty while no rate is chosen.
        """
        rates = self.question.judged_rates[size] or {}
        return self.runs_by_arm.get((size, arm), {}).get(rates[arm], []) if arm in rates else []

    def judged_values_or_inf(self, size: str, arm: str) -> np.ndarray:
        """Return the values of `runs_at_judged_rate`, infinite where a run has not finished."""
        return self.run_columns["value"][self.runs_at_judged_rate(size, arm)]

    def _comparison(self, size: str, arm: str) -> Comparison:
        """Return the comparison of an arm with the baseline in one model size. It holds the differences between their
        runs by learning rate and seed, and what keeps the arm from a verdict."""
        question, rates, baseline = self.question, self.question.judged_rates[size], self.question.arms[0]
        if rates is None or not {arm, baseline} <= rates.keys():
            return Comparison(
                (), obstacle=UNTUNED_OBSTACLE if rates is not None else _incomplete_obstacle(0, len(question.seeds))
            )
        pair = rates[arm], rates[baseline]
        arm_runs, baseline_runs = self._arm_and_baseline_runs(size, arm)
        # the rates of the baseline that the arm was trained at, too; all, if the arm starts from the baseline's weights
        shared_rates = (baseline_runs if arm in question.source_arms else arm_runs).keys()
        if obstacle := self._divergence_obstacle(
            pair, arm_runs, baseline_runs
        ):  # only runs at the judged rates are shown
            arm_runs, baseline_runs = {pair[0]: arm_runs[pair[0]]}, {pair[1]: baseline_runs[pair[1]]}
            shared_rates = baseline_runs.keys()
        arm_runs = self._drop_diverged_rates(arm_runs, pair[0])
        baseline_runs = self._drop_diverged_rates(baseline_runs, pair[1])
        place = [*arm_runs].index(pair[0]), [*baseline_runs].index(pair[1])
        sides = [np.array([*runs.values()]) for runs in (arm_runs, baseline_runs)]  # (rates, seeds), numbers of runs
        is_finished = [self._finished_mask[runs].all(0) for runs in sides]
        if not question.unpaired_with_baseline:
            is_finished = [is_finished[0] & is_finished[1]] * 2
        sides = [runs[:, mask] for runs, mask in zip(sides, is_finished, strict=True)]
        values = [self.run_columns["value"][runs] for runs in sides]
        if question.target_value is not None:
            values[1] = np.full_like(values[1], question.target_value)
        differences = _differences_by_rate_pair(*values)
        n_seeds, n_missing = differences.shape[2], max(len(mask) - mask.sum() for mask in is_finished)
        if not obstacle and n_missing:
            obstacle = _incomplete_obstacle(n_seeds, n_seeds + n_missing)
        if not obstacle and n_seeds >= MIN_SEEDS:
            runs = chain(sides[0][place[0]], sides[1][place[1]] if question.target_value is None else ())
            if all(levels := dict.fromkeys(self.run_columns["unlearned"][run] for run in runs)):
                words = f"no run of either arm is better than {', '.join(levels)}"
                obstacle = "not learned", words, words
        seed_and_document_estimate = None
        if not question.unpaired_with_baseline and n_seeds:
            seed_and_document_estimate = self._seed_and_document_estimate(*sides)
        return Comparison(
            differences, place, sum(rate in shared_rates for rate in baseline_runs) or None,
            question.must_hold_at_all_rates,
            higher_is_better=self.primary_metric.better == "higher",
            possible_range=self._possible_range,
            unpaired_values=tuple(values) if question.unpaired_with_baseline else None,
            seed_and_document_estimate=seed_and_document_estimate, obstacle=obstacle,
        )  # fmt: skip

    def _arm_and_baseline_runs(self, size: str, arm: str) -> tuple[RunsByRate, RunsByRate]:
        """Return the runs of an arm, and the runs of the baseline, each by learning rate.

        If the arm starts from the baseline's weights, only the baseline's runs at its judged rate are returned. If the
        arm starts from random weights, rates at which both have runs come first among the baseline's, as
        `Comparison.n_shared_rates` needs.
        """
        baseline = self.question.arms[0]
        arm_runs = self.runs_by_arm[size, arm]
        if self.question.target_value is not None:  # the baseline has a run for each of the arm, with the target value
            return arm_runs, {None: next(iter(arm_runs.values()))}
        sources, baseline_runs = self.question.source_arms.get(arm), self.runs_by_arm[size, baseline]
        if sources is None:
            return arm_runs, dict(sorted(baseline_runs.items(), key=lambda item: item[0] not in arm_runs))
        rate = self.question.judged_rates[size][baseline]
        return arm_runs, {rate: baseline_runs[rate]} if baseline in sources else baseline_runs

    def _divergence_obstacle(
        self, pair: tuple[Rate | None, Rate | None], arm_runs: RunsByRate, baseline_runs: RunsByRate
    ) -> Obstacle | None:
        """Return the obstacle that diverged runs are to a verdict; None if no run diverged, or while no run of the arm
        has ended. Only runs at two rates of arm and baseline count: the rate at which they are judged (`pair`), and the
        rate that tuning chose.
        """
        chosen = [next(iter(runs.values())) for runs in (arm_runs, baseline_runs)]
        runs = dict.fromkeys(chain(arm_runs[pair[0]], baseline_runs[pair[1]], *chosen))
        diverged = [run for run in runs if self.run_columns["state"][run] == DIVERGED_KEY]
        # before a run of the arm has ended, a diverged baseline says nothing of the arm
        if not diverged or all(
            self.run_columns["state"][run] == UNFINISHED for run in chain(arm_runs[pair[0]], chosen[0])
        ):
            return None
        words = f"{len(diverged)} final run{'s' * (len(diverged) > 1)} diverged"
        return "unstable", f"{words}: {_join_notes(self.run_columns['note'][diverged].tolist())}", words

    def _drop_diverged_rates(self, runs: RunsByRate, judged_rate: Rate | None) -> RunsByRate:
        """Return the runs of an arm by rate, without rates at which a run diverged. The rate at which the arm is judged
        and the rate that tuning chose are always kept.
        """
        permanent_rates = judged_rate, next(iter(runs))
        return {
            rate: rate_runs
            for rate, rate_runs in runs.items()
            if rate in permanent_rates or all(self.run_columns["state"][run] != DIVERGED_KEY for run in rate_runs)
        }

    def _seed_and_document_estimate(self, arm_runs: np.ndarray, baseline_runs: np.ndarray) -> Estimate | None:
        """Return the estimate, over seeds and documents, of the mean difference between paired runs of an arm and the
        baseline. None if units don't belong to documents.

        arm_runs, baseline_runs: the indices of these runs in `run_columns`, (rates, seeds).
        """
        rows, (values, weights, groups) = self.unit_slices[arm_runs[0, 0]], self.sampling_unit_columns.values()
        if pd.isna(groups[rows.start]):
            return None
        units = [
            np.array([[values[self.unit_slices[run]] for run in rate_runs] for rate_runs in runs])
            for runs in (arm_runs, baseline_runs)
        ]
        if self.question.target_value is not None:
            units[1] = np.full_like(units[1], self.question.target_value)
        return estimate_over_seeds_and_documents(_differences_by_rate_pair(*units), weights[rows], groups[rows])

    @cached_property
    def value_bounds(self) -> tuple[float, float] | None:
        """Return the lowest and the highest value that the metric can have; None if it has no such values.

        If the question doesn't give them, they are 0 and 1 where higher is better and the values of all runs lie within
        0 and 1, as for an accuracy.
        """
        if bounds := self.question.value_bounds:
            return bounds if np.isfinite(bounds).all() else None
        values = self.run_columns["value"]  # infinite for unfinished runs
        is_accuracy = (
            self.primary_metric.better == "higher" and ((values >= 0) & (values <= 1) | ~np.isfinite(values)).all()
        )
        return (0.0, 1.0) if is_accuracy else None

    @cached_property
    def _possible_range(self) -> tuple[float, float] | None:
        """Return the lowest and the highest value that `value_bounds` allow for what is judged; None without bounds.
        If runs are paired, this is the difference from the baseline or from the target. If runs are unpaired, it is the
        metric itself.
        """
        if self.value_bounds is None or self.question.unpaired_with_baseline:
            return self.value_bounds
        (low, high), target = self.value_bounds, self.question.target_value
        return (low - high, high - low) if target is None else (low - target, high - target)

    def summary_rows(self) -> list[dict[str, Plain]]:
        """List an entry for each size and arm: rate, finished runs, means of the primary metric, verdict, difference
        and intervals.

        The baseline has an entry, a target value (`Question.target_value`) has none. Means are over the seeds of
        `common_seed_masks`. A difference has three intervals. `difference`, over seeds, holds simultaneously with those
        of all other comparisons. `alone`, over seeds, holds by itself. The third is `over_seeds_and_documents`.
        """
        arms = self.question.arms[self.question.target_value is not None :]
        return [self._summary_row(size, arm) for size in self.question.judged_rates for arm in arms]

    @cached_property
    def common_seed_masks(self) -> dict[str, np.ndarray]:
        """Return, by size, a mask over seeds: whether the means of the size's arms include a seed. They do if every arm
        that has finished runs has a finished run with this seed.

        If runs are not paired by seed, the mask is True for all seeds: each mean is over an arm's own finished runs.
        """
        common = {size: np.ones(len(self.question.seeds), bool) for size in self.question.judged_rates}
        for size, arm in product(common, self.question.arms) if self.question.is_paired else ():
            if (is_finished := self._finished_mask[self.runs_at_judged_rate(size, arm)]).any():
                common[size] &= is_finished
        return common

    def _summary_row(self, size: str, arm: str) -> dict[str, Plain]:
        """Return the entry of an arm of a size in `summary_rows`."""
        question, runs = self.question, self.runs_at_judged_rate(size, arm)
        values, is_finished = self.run_columns["value"][runs], self._finished_mask[runs]
        common_values = values[is_finished & self.common_seed_masks[size][: len(runs)]]
        entry: dict[str, Plain] = {
            "size": size, "arm": arm, "rate": (question.judged_rates[size] or {}).get(arm),
            "runs": int(is_finished.sum()), "of": len(runs) or len(question.seeds),
            "mean": json_value(common_values.mean()) if len(common_values) else None,
        }  # fmt: skip
        if arm != question.arms[0]:
            verdict = self.verdicts[size, arm]
            entry |= {
                "verdict": verdict.kind_with_exploratory_mark,
                "words": verdict.statement_with_seeds,
                "reason": verdict.reason,
            }
            intervals = {
                "difference": verdict.interval,
                "alone": verdict.unadjusted_interval,
                "over_seeds_and_documents": verdict.seed_and_document_interval,
            }
            entry |= {name: interval and json_value(interval.as_list()) for name, interval in intervals.items()}
            entry["p"] = verdict.p if verdict.seed_count else None
            entry["seeds_needed"] = verdict.seeds_needed and [*verdict.seeds_needed]
        return entry

    def power_sentences(self, seed_count: int) -> Iterator[str]:
        """Yield sentences on the probability that `seed_count` seeds find a difference that matters, with a warning if
        it is below 0.5. The probability depends on the standard deviation of the measured differences or, without
        these, on the expected `primary.spread`. With fewer than MIN_SEEDS seeds a sentence says that there is no
        verdict.
        """
        primary, margin, alpha = self.primary_metric, self.primary_metric.matters, self.question.comparison_alpha
        if seed_count < MIN_SEEDS:
            yield f"NO VERDICT: a verdict takes {MIN_SEEDS} seeds, not {seed_count}: add seeds"
            return
        measured = [comparison.judged_differences for comparison in self.comparisons.values()]
        measured = [differences for differences in measured if len(differences) > 1 and np.isfinite(differences).all()]
        spread, source = primary.spread, "primary.spread"
        if measured:
            # variances over seeds, from standard errors: these are 0 where values differ by rounding alone
            variances = [
                len(differences) * estimate_over_seeds(differences).standard_error ** 2 for differences in measured
            ]
            spread = math.sqrt(np.average(variances, weights=[len(differences) - 1 for differences in measured]))
            source = "the seeds that have ended"
        if not spread:
            unknown = "before seeds have ended, as the file expects no primary.spread"
            yield f"power: not known {unknown if spread is None else 'as all seeds agree'}"
            return
        probability = power(seed_count, spread, margin, alpha)
        yield (
            f"power: {seed_count} seeds find a difference of {margin:g} with probability {probability:.2f}, by a "
            f"spread of {spread:.2g} ({source}); with probability {POWER:g} they find "
            f"{smallest_difference(seed_count, spread, alpha=alpha):.2g}"
        )
        if probability < 0.5:
            needed_seeds = seeds_needed(spread, margin, alpha) or f"more than {MAX_SEEDS}"
            remedy = f"probability {POWER:g} takes {needed_seeds} seeds: add seeds, or ask about a larger difference"
            yield f"LOW POWER: the experiment will more likely than not leave such a difference undecided; {remedy}"


def _incomplete_obstacle(ended: int, planned: int) -> Obstacle:
    """Return the obstacle `incomplete` to a verdict on an arm of which `ended` of `planned` seeds have ended."""
    progress = f"{ended} of {planned} seeds have ended"
    return "incomplete", progress, progress


def _join_notes(notes: list[str]) -> str:
    """Join the first three notes, and mark that there are more."""
    return f"{'; '.join(notes[:3])}{'; ...' * (len(notes) > 3)}"


def _differences_by_rate_pair(arm_values: np.ndarray, baseline_values: np.ndarray) -> np.ndarray:
    """Return the values of the arm minus those of the baseline at each pair of their rates. The shape is (arm rates,
    baseline rates, seeds, ...), up to the last seed that both have."""
    count = min(arm_values.shape[1], baseline_values.shape[1])
    with np.errstate(invalid="ignore"):
        return arm_values[:, None, :count] - baseline_values[:, :count]


# ---------------------------------------------------------------- verdicts as a table and in words


def summary_table(judgement: Judgement, entries: list[dict[str, Plain]]) -> Table:
    """Return a table with a row for each of `entries`, the sizes and arms of `Judgement.summary_rows`."""
    verdicts = [judgement.verdicts.get((entry["size"], entry["arm"])) for entry in entries]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[FilledColumn]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    question, baseline = judgement.question, judgement.question.arms[0]
    columns = column("size", [entry["size"] or None for entry in entries], kind="label")
    columns += column("arm", [entry["arm"] for entry in entries], kind="label")
    # first, so that it is in sight on a narrow screen
    columns += column("verdict", [verdict and verdict.statement_with_seeds for verdict in verdicts], kind="words")
    columns += column(
        question.rate_heading, [None if entry["rate"] is None else f"{entry['rate']:g}" for entry in entries]
    )
    columns += column("seeds", [f"{entry['runs']} of {entry['of']}" for entry in entries])
    omits_finished_runs = any(entry["runs"] > sum(judgement.common_seed_masks[entry["size"]]) for entry in entries)
    basis = ", ".join(filter(None, (question.measured_data_text, "common seeds" * omits_finished_runs)))
    columns += column(
        f"mean {judgement.primary_metric.metric}", [number_text(entry["mean"]) for entry in entries], basis
    )
    columns += column(
        f"difference to {baseline}",
        [verdict and verdict.interval for verdict in verdicts],
        "interval over seeds, all together 95%",
        "difference",
    )
    columns += column(
        "on other text of the kind",
        [verdict and verdict.seed_and_document_interval for verdict in verdicts],
        "interval over seeds and documents, all together 95%",
        "difference",
    )
    columns += column(
        "p", [f"{verdict.p:.2g}" if verdict and verdict.seed_count else None for verdict in verdicts], "adjusted"
    )
    return Table("Summary", "", tuple(columns))


def print_verdicts(judgement: Judgement, entries: list[dict[str, Plain]], title: str) -> None:
    """Print the entries of a judgement as a table of numbers, and below the table each verdict with its reason. Only
    the first MAX_PRINTED_ROWS entries are printed.
    """
    n_entries, entries = len(entries), entries[:MAX_PRINTED_ROWS]
    table = summary_table(judgement, entries)
    number_columns = tuple((column, cells) for column, cells in table.filled_columns if column.kind != "words")
    print_tables(replace(table, title=title, filled_columns=number_columns))
    for entry in entries:
        if "verdict" in entry:
            arm = " ".join(filter(None, (entry["size"], entry["arm"])))
            open_question = judgement.verdicts[entry["size"], entry["arm"]].no_answer_reason
            reason = entry["reason"].removeprefix(open_question).lstrip(":; ")  # the verdict's words end with it
            print(": ".join(filter(None, (arm, entry["words"], reason))))
    if n_entries > len(entries):
        print(f"printed: the first {len(entries)} of {n_entries} lines; lm judge --json and verdicts.json hold all")


# ---------------------------------------------------------------- the noise of runs


def measure_noise(runs: pd.DataFrame, is_paired: bool, difference: float | None = None) -> dict[str, Plain] | None:
    """Compute how runs scatter that differ in their seed alone; None if no arm has two runs.

    The result has two standard deviations with 95 % intervals, pooled over arms. `single_runs` is that of single runs.
    `paired_differences` is that of differences between two arms' runs of one seed, over the seeds that all arms of a
    size share. `smallest_difference` has, for some numbers of seeds, the smallest difference that they detect, in each
    design (such as paired or unpaired).

    Args:
        runs: a row for each arm of a size, a column for each seed.
        is_paired: whether columns are known seeds, so that runs of two arms can be paired.
        difference: a difference; the result then has the number of seeds that detects it in each design
            (`seeds_needed`).
    """
    degrees = runs.count(axis=1) - 1
    largest = float(runs.abs().max(axis=None))
    single = pooled_std_and_interval((degrees * runs.var(axis=1)).sum(), degrees.clip(lower=0).sum(), largest)
    if not single:
        return None
    squares = paired_degrees = 0
    for _, size_runs in runs.groupby("size") if is_paired else ():
        shared = size_runs.dropna(axis=1).to_numpy()
        if min(shared.shape) > 1:
            residuals = shared - shared.mean(1, keepdims=True) - shared.mean(0) + shared.mean()
            squares += 2 * (residuals**2).sum()
            paired_degrees += (shared.shape[0] - 1) * (shared.shape[1] - 1)
    paired = pooled_std_and_interval(squares, paired_degrees, largest)
    designs = {"paired by seed": (paired[0], 1)} if paired else {}  # spread and `degrees_per_seed` of `power`
    designs |= {"unpaired": (math.sqrt(2) * single[0], 2), "against a number": (single[0], 1)}
    designs = {name: design for name, design in designs.items() if design[0]}  # equal runs say nothing of others
    noise = {
        "runs": int(runs.count().sum()),
        "single_runs": single,
        "paired_differences": paired,
        "smallest_difference": {
            str(count): {name: float(smallest_difference(count, *spread)) for name, spread in designs.items()}
            for count in (NOISE_SEED_COUNTS if designs else ())
        },
    }
    if difference is not None and designs:
        counts = {
            name: seeds_needed(spread, difference, degrees_per_seed=degrees)
            for name, (spread, degrees) in designs.items()
        }
        noise["seeds_needed"] = {"difference": difference} | counts
    return noise


def noise_sentences(noise: dict[str, Plain]) -> Iterator[str]:
    """Put the noise of runs into sentences. `noise`: the result of `measure_noise`, to which the caller has added an
    entry `of`, which names the runs."""
    paired = noise["paired_differences"]
    yield f"{noise['of']}: {noise['runs']} runs"
    yield f"single runs scatter by {_spread_text(noise['single_runs'])}"
    words = paired and f"differences paired by seed scatter by {_spread_text(paired)}"
    yield words or "no arms share two seeds to pair runs by"
    for count, smallest in noise["smallest_difference"].items():
        found = ", ".join(f"{value:.3g} {name}" for name, value in smallest.items())
        yield f"{count} seeds find a difference of {found}, with probability {POWER:g}"
    if needed := noise.get("seeds_needed"):
        counts = {name: count for name, count in needed.items() if name != "difference"}
        words = ", ".join(f"{count or f'more than {MAX_SEEDS}'} {name}" for name, count in counts.items())
        yield f"a difference of {needed['difference']:g} takes these seeds of each arm: {words}"


def power_and_noise_sentences(judgement: Judgement, seed_count: int) -> Iterator[str]:
    """Yield the `power_sentences` of an experiment, and one on how its final runs scatter, each arm at its judged rate,
    once an arm has two such runs."""
    yield from judgement.power_sentences(seed_count)
    size_arms = [size_arm for size_arm in judgement.runs_by_arm if judgement.runs_at_judged_rate(*size_arm)]
    if not size_arms:
        return
    values = [judgement.judged_values_or_inf(*size_arm) for size_arm in size_arms]
    index = pd.MultiIndex.from_tuples(size_arms, names=("size", "arm"))
    if noise := measure_noise(pd.DataFrame(values, index).replace(math.inf, math.nan), True):
        paired = noise["paired_differences"]
        words = f", differences paired by seed by {_spread_text(paired)}" if paired else ""
        yield f"noise: single runs scatter by {_spread_text(noise['single_runs'])}{words}"


def _spread_text(spread: list[float]) -> str:
    """Say a standard deviation with the ends of its interval, as `pooled_std_and_interval` gives them, in words."""
    value, low, high = spread
    if not value:
        return "0 (all are equal)"
    return f"{value:.3g} (standard deviation; 95% interval {low:.3g} to {high:.3g}, alone)"
