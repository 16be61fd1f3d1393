"""The procedure of docs/statistics.md on run folders: which runs an experiment needs next, and what the finished ones show."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from lm.config.tree import Config, ExperimentConfig
from lm.errors import ConfigError, RunError
from lm.experiments.arms import SWAPPED, Arm, Swap
from lm.experiments.experiment import Experiment, config_hash
from lm.experiments.outcomes import SELECTION, Outcome, Values
from lm.experiments.tuning_tables import Tried, by_arm_and_rate, described, differing_keys
from lm.schema import Plain
from lm.statistics.intervals import Interval, over_seeds_and_documents
from lm.statistics.learned import Learned, has_learned, learned_verdicts
from lm.statistics.reach import factor, log_tokens
from lm.statistics.tuning import Tuned, chosen, differences, elsewhere, tuned
from lm.statistics.verdicts import Comparison, Verdict, verdicts


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        stage: it chooses a rate (`tune`), or it is judged (`final`).
        before: folder of the run whose weights it starts from, if any.
        swap: what their normalizer is swapped to first; None: it stays.
        trained: False: the swapped weights are measured as they are.
        evaluate: `KEY=VALUE` that it is measured with after training.
    """

    size: str
    arm: str
    stage: str
    rate: float | None
    seed: int
    config: Config
    outcome: Outcome
    before: Path | None = None
    swap: Swap | None = None
    trained: bool = True
    evaluate: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its size, arm, rate and seed in words."""
        at = "" if self.rate is None else f"at {self.rate:g}"
        return " ".join(filter(None, (self.size, self.arm, at, f"seed {self.seed}")))


class Procedure:
    """An experiment and the runs it consists of.

    Args:
        experiment: as its file describes it, resolved (`lm.experiments.opening.open_experiment`).
    """

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._folder = experiment.folder
        self._ended: dict[Path, Outcome] = {}
        self._configs: dict[tuple, Config] = {}
        self._evaluated: dict[tuple[str, str], dict[str, dict[str, Plain]]] = {}

    def run(self, size: str, arm: Arm, stage: str, rate: float | None, seed: int, rates: dict[str, float | None]) -> Run:
        """One run; `rates` are those of the arms before it, of which it may start from one."""
        before = None
        if arm.start:
            source = next(one for one in self.experiment.arms if one.name == arm.start)
            before = self.run(size, source, stage, rates[source.name], seed, rates)
        config = self._config(size, arm, stage, rate, seed, before.config.run_folder if before else None)
        outcome = self._ended.get(config.run_folder)
        if outcome is None:
            last_step = config.trainer.max_steps if arm.trained else before.outcome.last_step
            metric, symbolic = self.experiment.primary.metric, config.data.symbolic
            scheduled = _scheduled(arm, config, last_step)
            outcome = Outcome(config.run_folder, last_step, metric, symbolic, scheduled, self._asked(size, arm, config))
            if outcome.ended:  # for good: it is not read again
                self._ended[config.run_folder] = outcome
        if before and before.outcome.state == "diverged":  # what starts from nothing has diverged with it
            outcome = before.outcome
        start = before and before.config.run_folder
        overrides = tuple(self.experiment.evaluate_overrides)
        return Run(size, arm.name, stage, rate, seed, config, outcome, start, arm.swap, arm.trained, overrides)

    def _config(self, size: str, arm: Arm, stage: str, rate: float | None, seed: int, start: Path | None) -> Config:
        """The configuration of a run that starts from the weights of another (None: random ones), made once."""
        known = size, arm.name, stage, rate, seed, start
        if known not in self._configs:
            changes: dict[str, Plain] = {"runs": str(self._folder / size), "name": "run"}
            at = "-".join([arm.name, *([] if rate is None else [f"{rate:g}"]), f"seed{seed}"])
            if start and arm.swap and arm.trained:
                origin = hashlib.sha256(f"{start.name} {arm.swap}".encode()).hexdigest()[:8]
                changes["init_from"] = str(self._folder / size / SWAPPED / f"{at}-{origin}")
            elif start:
                changes["init_from"] = str(start)
            config = self.experiment.config(size, arm, seed, rate, changes)
            place = ExperimentConfig(self.experiment.name, arm.name, size or None, stage, rate)
            self._configs[known] = replace(config, name=f"{at}-{config_hash(config)}", experiment=place)
        return self._configs[known]

    def _asked(self, size: str, arm: Arm, config: Config) -> dict[str, dict[str, Plain]]:
        """What the evaluations of an arm's runs must have been asked for with; {} where those in training will do."""
        if not self.experiment.evaluate:
            return {}
        if (size, arm.name) not in self._evaluated:
            evaluated = self.experiment.evaluated(config)
            self._evaluated[size, arm.name] = {kind: evaluated.eval.asked(kind) for kind in evaluated.eval.wanted(evaluated.data)}
        return self._evaluated[size, arm.name]

    def tuning(self, size: str) -> tuple[dict[str, dict[float, list[Run]]], Tuned]:
        """The tuning runs of a size by arm and rate, as far as they are known, and what they say; with a table there are none. Arms that
        start from others come after these, as they start from the runs at the rate chosen for them; then `missing` is what the first
        arms lack."""
        experiment, runs, rates = self.experiment, {}, {}
        if experiment.table:
            losses = by_arm_and_rate(experiment.table, size, "selection")
            found = chosen({arm.name: losses[arm.name] for arm in experiment.arms if arm.trained})
            return {}, Tuned(self._with_untrained(found.rates), (), found.at_edge)
        for depth in sorted(set(map(self._depth, experiment.arms))):
            rates = self._with_untrained(rates)
            layer = [arm for arm in experiment.arms if self._depth(arm) == depth and arm.trained]
            known = [arm for arm in layer if not arm.start or arm.start in rates]
            asked: tuple[float, ...] = tuple(experiment.tune.grid)
            for arm in known:
                runs[arm.name] = {}
            while asked and known:
                for arm in known:
                    for rate in asked:
                        runs[arm.name][rate] = [self.run(size, arm, "tune", rate, seed, rates) for seed in experiment.tune.seeds]
                layer_runs = [one for arm in known for some in runs[arm.name].values() for one in some]
                if not all(one.outcome.ended for one in layer_runs):
                    return runs, Tuned({}, asked)
                for arm in known:
                    _check_alike([one for one in layer_runs if one.arm == arm.name], SELECTION)
                losses = {arm.name: _losses(runs[arm.name], SELECTION) for arm in known}
                found = tuned(experiment.tune.grid, losses, partial(self._possible, size, known))
                asked = found.missing
            if known:
                rates |= found.rates
        rates = self._with_untrained(rates)
        return runs, Tuned(rates, (), tuple(arm.name for arm in experiment.arms if arm.name not in rates))

    def _with_untrained(self, rates: dict[str, float]) -> dict[str, float]:
        """Rates, and for arms that are not trained the rates of those that they start from."""
        found = dict(rates)
        for arm in self.experiment.arms:
            if not arm.trained and arm.start in found:
                found[arm.name] = found[arm.start]
        return found

    def _possible(self, size: str, arms: list[Arm], rate: float) -> bool:
        """Whether the tuned key may have this value in all of these arms."""
        try:
            for arm in arms:
                self.experiment.config(size, arm, self.experiment.seeds[0], rate, {"name": "any"})
        except ConfigError:
            return False
        return True

    def tried(self, size: str) -> list[Tried]:
        """The tuning runs of a size, or the table's lines in place of them."""
        experiment = self.experiment
        if experiment.table:
            arms = [arm.name for arm in experiment.arms]
            return sorted((one for one in experiment.table if one.size == size and one.arm in arms), key=lambda one: arms.index(one.arm))
        runs, _ = self.tuning(size) if experiment.tune.grid else ({}, None)
        starts = {arm.name: arm.start for arm in experiment.arms}
        return [
            Tried(
                size, arm, experiment.tune.key, rate, one.seed, one.outcome.loss(SELECTION) if one.outcome.ended else None,
                self._tried(one.outcome),
                described(one.config, experiment.tune.key, starts[arm]),
            )
            for arm, by_rate in runs.items()
            for rate in sorted(by_rate)
            for one in by_rate[rate]
        ]  # fmt: skip

    def _tried(self, outcome: Outcome) -> float | None:
        """What is compared of a tuning run, on the selection text; infinite if it diverged; None: it has not ended."""
        if not outcome.ended:
            return None
        return self.quantity(outcome, selection=True) if outcome.state == "finished" else math.inf

    def notes(self) -> list[str]:
        """What a reader must know beside the numbers, one sentence each."""
        experiment = self.experiment
        found = [experiment.dropped_note] if experiment.dropped else []
        for size, arm in product(experiment.sizes if experiment.table else (), (one for one in experiment.arms if one.trained)):
            config = experiment.config(size, arm, experiment.seeds[0], experiment.first_rate, {"name": "any"})
            ours = described(config, experiment.tune.key, arm.start)
            theirs = {one.configuration for one in experiment.table if (one.size, one.arm) == (size, arm.name)}
            if keys := sorted({key for one in theirs for key in differing_keys(ours, one)}):
                name = " ".join(filter(None, (size, arm.name)))
                found.append(f"{name}: rates were tuned for another configuration: {', '.join(keys)} differ")
        if experiment.table and all(one.primary is None for one in experiment.table) and experiment.primary.quantity != SELECTION:
            missing = f"{experiment.tune.table} has no {experiment.primary.quantity}"
            found.append(f"{missing}: whether a difference depends on the rate was not looked at")
        if self.added:
            seeds = ", ".join(map(str, self.added))
            found.append(f"exploratory: seeds {seeds} were added after the first start; p values are too small")
        if self.left_out:
            seeds = ", ".join(map(str, self.left_out))
            found.append(f"exploratory: seeds {seeds} were planned at the first start and are left out; p values are too small")
        for size in experiment.sizes:
            seeds = {arm.name: self.finished_seeds(size, arm) for arm in experiment.arms}
            if len({some for some in seeds.values() if some}) > 1:
                each = "; ".join(f"{name} has {', '.join(map(str, some)) or 'none'}" for name, some in seeds.items())
                found.append(f"{size + ': ' if size else ''}arms have finished different seeds, means are over those in common: {each}")
        return found

    def finished_seeds(self, size: str, arm: Arm) -> tuple[int, ...]:
        """The seeds of the final runs of an arm that are finished."""
        runs = self.final(size, self.rates(size) or {})
        return tuple(one.seed for one in runs if one.arm == arm.name and one.outcome.state == "finished")

    def _depth(self, arm: Arm) -> int:
        """How many arms it starts from, one after the other."""
        return 0 if not arm.start else 1 + self._depth(next(one for one in self.experiment.arms if one.name == arm.start))

    def rates(self, size: str) -> dict[str, float | None] | None:
        """The rate of each arm that has one; None: not known yet."""
        if not self.experiment.tuned:
            return dict.fromkeys((arm.name for arm in self.experiment.arms), None)
        found = self.tuning(size)[1]
        return None if found.missing else dict(found.rates)

    def final(self, size: str, rates: dict[str, float | None]) -> Iterator[Run]:
        """The runs that are judged, by seed and arm."""
        for seed in self.experiment.seeds:
            for arm in self.experiment.arms:
                if arm.name in rates:
                    yield self.run(size, arm, "final", rates[arm.name], seed, rates)

    def known(self) -> list[Run]:
        """All runs that the experiment needs, as far as is known: those of tuning first, each after the one it starts from."""
        found: list[Run] = []
        for size in self.experiment.sizes:
            rates = dict.fromkeys((arm.name for arm in self.experiment.arms), None)
            if self.experiment.tuned:
                runs, choice = self.tuning(size)
                found += [one for by_rate in runs.values() for some in by_rate.values() for one in some]
                rates = None if choice.missing else choice.rates
            found += [] if rates is None else self.final(size, rates)
        return list({one.config.run_folder: one for one in found}.values())

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on each arm but the baseline, of several sizes on `ARM, SIZE`; with `primary.reach` the interval is of the factor.

        Raises:
            RunError: the primary metric was not measured, or its direction is another.
        """
        primary, (base, *others) = self.experiment.primary, self.experiment.arms
        pairs = {(f"{arm.name}, {size}" if size else arm.name): (size, base, arm) for size in self.experiment.sizes for arm in others}
        if primary.learned is not None:
            found = learned_verdicts({name: self.counted(*pair) for name, pair in pairs.items()})
        else:
            ratio = primary.reach is not None
            better = "lower" if ratio else primary.better
            found = verdicts({name: self.comparison(*pair) for name, pair in pairs.items()}, primary.matters, better, ratio)
            found = {name: replace(one, interval=factor(one.interval)) if ratio else one for name, one in found.items()}
        return {name: replace(one, exploratory=self.added + self.left_out) for name, one in found.items()}

    @property
    def added(self) -> tuple[int, ...]:
        """Seeds of the final runs that were not planned at the first start."""
        planned = self.experiment.planned or self.experiment.seeds
        return tuple(seed for seed in self.experiment.seeds if seed not in planned)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Seeds that were planned at the first start and that neither the file has nor `--minutes` dropped."""
        experiment = self.experiment
        return tuple(seed for seed in experiment.planned or () if seed not in experiment.seeds + experiment.dropped)

    def comparison(self, size: str, base: Arm, arm: Arm) -> Comparison:
        """What the runs so far show of an arm against the baseline."""
        rates = self.rates(size)
        if rates is None:
            return Comparison((), planned=len(self.experiment.seeds))
        if not {arm.name, base.name} <= rates.keys():
            return Comparison((), tuned=False)
        pairs = list(zip(*(self._judged(size, one, rates) for one in (arm, base)), strict=True))
        diverged = [one for pair in pairs for one in pair if one.outcome.state == "diverged"]
        why = "; ".join(f"{one.label}: {one.outcome.divergence}" for one in diverged[:3]) + ("; ..." if len(diverged) > 3 else "")
        finished = [pair for pair in pairs if all(one.outcome.state == "finished" for one in pair)]
        differences = [self._value(ours) - self._value(theirs) for ours, theirs in finished]
        unreached = ""
        if self.experiment.primary.reach is not None:
            unreached = self._unreached([one for pair in finished for one in pair])
            differences = [one for one in differences if math.isfinite(one)]
        text = [pair for pair in finished if self.experiment.primary.reach is None and not pair[0].config.data.symbolic]
        crossed = _over_documents([[one.outcome.values(self.experiment.primary.metric) for one in pair] for pair in text])
        other = self._elsewhere(size, base, arm, rates)
        return Comparison(differences, len(diverged), other, planned=len(pairs), why=why, over_documents=crossed, unreached=unreached)

    def counted(self, size: str, base: Arm, arm: Arm) -> Learned:
        """How many of the runs so far have learned, of an arm and of the baseline."""
        primary, rates = self.experiment.primary, self.rates(size)
        if rates is None:
            return Learned(0, 0, 0, 0, planned=len(self.experiment.seeds))
        if not {arm.name, base.name} <= rates.keys():
            return Learned(0, 0, 0, 0, tuned=False)
        ours, theirs = ([one for one in self._judged(size, which, rates) if one.outcome.ended] for which in (arm, base))
        learned = [sum(has_learned(self._value(one), primary.learned, primary.better) for one in runs) for runs in (ours, theirs)]
        diverged = sum(one.outcome.state == "diverged" for one in ours + theirs)
        other = {rate: float(np.mean(some)) for rate, some in self._elsewhere(size, base, arm, rates).items()}
        return Learned(learned[0], len(ours), learned[1], len(theirs), diverged, other, planned=len(self.experiment.seeds))

    def _judged(self, size: str, arm: Arm, rates: dict[str, float | None]) -> list[Run]:
        """The final runs of an arm by seed. Raises RunError if finished ones were not measured on the sequences of the baseline's."""
        runs = list(self.final(size, rates))
        _check_alike([one for one in runs if one.arm in (arm.name, self.experiment.arms[0].name)], self.experiment.primary.metric)
        return [one for one in runs if one.arm == arm.name]

    def _unreached(self, runs: list[Run]) -> str:
        """How many finished runs of each arm have no number of tokens, in words; empty if all have one."""
        primary, said = self.experiment.primary, []
        for arm in dict.fromkeys(one.arm for one in runs):
            tokens = [self.quantity(one.outcome) for one in runs if one.arm == arm]
            if never := sum(one == math.inf for one in tokens):
                said.append(f"{never} of {len(tokens)} runs of {arm} did not reach {primary.metric} {primary.reach:g}")
            if early := sum(one == 0 for one in tokens):
                said.append(f"{early} of {len(tokens)} runs of {arm} had reached {primary.reach:g} at the first evaluation")
        return "; ".join(said)

    def quantity(self, outcome: Outcome, selection: bool = False) -> float:
        """What is compared of a finished run, on the documents that report or on those that select: the primary metric, or the tokens at
        which it first reached `primary.reach` (0: before its first evaluation; infinite: never)."""
        primary = self.experiment.primary
        if primary.reach is None:
            return outcome.values(primary.metric).part(selection).mean
        return outcome.tokens_to_reach(primary.reach, selection)

    def _value(self, run: Run) -> float:
        """The primary metric on the documents that are reported on, or the logarithm of `quantity`'s tokens; NaN of a run that is not
        finished.

        Raises:
            RunError: its direction is another than the experiment says.
        """
        primary = self.experiment.primary
        self.check_direction(run.outcome)
        found = self.quantity(run.outcome) if run.outcome.state == "finished" else math.nan
        return found if primary.reach is None else log_tokens(found)

    def check_direction(self, outcome: Outcome) -> None:
        """Raises RunError if a finished run says that the primary metric's direction is another than the experiment says."""
        primary = self.experiment.primary
        found = outcome.values(primary.metric) if outcome.state == "finished" else None
        if found and found.better not in (primary.better, "none"):
            raise RunError(f"primary.better = {primary.better}: of {primary.metric}, {found.better} is better; correct the experiment")

    def _elsewhere(self, size: str, base: Arm, arm: Arm, rates: dict[str, float | None]) -> dict[float, list[float]]:
        """Arm minus baseline of the tuning seeds at other rates, as `by_rate` gives them."""
        values = self._tried_values(size)
        return elsewhere(arm.name, base.name, rates, values) if {arm.name, base.name} <= values.keys() else {}

    def by_rate(self, size: str, arm: Arm) -> dict[float, list[float]]:
        """Arm minus baseline of the tuning seeds at every rate that both have: of the primary metric on the selection text, or of 1 for a
        run that has learned and 0 else, or of the logarithm of tokens. Infinite where one of them diverged, or did not reach its level."""
        values, base = self._tried_values(size), self.experiment.arms[0]
        return differences(arm.name, base.name, values) if {arm.name, base.name} <= values.keys() and self.rates(size) else {}

    def _tried_values(self, size: str) -> dict[str, dict[float, list[float]]]:
        """The primary metric of the tuning runs by arm, rate and seed."""
        primary = self.experiment.primary

        def of_run(value: float) -> float:
            if primary.learned is not None:
                return float(has_learned(value, primary.learned, primary.better))
            if primary.reach is not None:
                return log_tokens(value)
            return -value if value == math.inf and primary.better == "higher" else value

        measured = by_arm_and_rate(self.tried(size), size, "primary") if self.experiment.tuned else {}
        return {name: {rate: list(map(of_run, some)) for rate, some in by_rate.items()} for name, by_rate in measured.items()}


def _scheduled(arm: Arm, config: Config, last_step: int) -> tuple[str, ...]:
    """The kinds of evaluation, beside the validation, of a run's last step; of one that is not trained all that `lm eval` measures."""
    wanted = {kind: one for kind, one in config.eval.kinds.items() if one.wanted(config.data)}
    return tuple(kind for kind, one in wanted.items() if not arm.trained or one.is_due(last_step, last_step))


def _over_documents(pairs: list[list[Values]]) -> Interval | None:
    """The difference of pairs of runs, one a seed, over seeds and documents; None without held-out documents, or with too few of either."""
    if not pairs or not pairs[0][0].held_out:
        return None
    parts = [[one.part(selection=False) for one in pair] for pair in pairs]
    first = parts[0][0]
    return over_seeds_and_documents(np.stack([ours.values - theirs.values for ours, theirs in parts]), first.weights, first.groups)


def _check_alike(runs: list[Run], metric: str) -> None:
    """Raises RunError if a metric was not measured on the same sequences in all runs that are finished."""
    first: tuple[Run, Values] | None = None
    for run in runs:
        if run.outcome.state != "finished":
            continue
        found = run.outcome.values(metric)
        first = first or (run, found)
        if found.identity != first[1].identity:
            where = f"{run.config.run_folder}: {metric} was measured on other sequences than in {first[0].config.run_folder}"
            raise RunError(f"{where}; measure it again as the run is configured: lm eval {run.config.run_folder}")


def _losses(by_rate: dict[float, list[Run]], metric: str) -> dict[float, list[float]]:
    return {rate: [one.outcome.loss(metric) for one in runs] for rate, runs in by_rate.items()}
