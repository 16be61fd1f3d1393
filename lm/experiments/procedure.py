"""The procedure of docs/statistics.md on run folders: which runs an experiment needs next, and what the finished ones show."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np

from lm.config.tree import Config, ExperimentConfig
from lm.errors import ConfigError, RunError
from lm.experiments.experiment import Arm, Experiment, Swap, Tried, config_hash, described, differing_keys
from lm.experiments.judging import ByRate, Judged, JudgedRun, Place
from lm.experiments.run_outcome import SELECTION, Outcome, unequal
from lm.runs.folder import CHECKPOINTS, SWAPPED, step_path
from lm.schema import Plain, to_plain
from lm.statistics.tuning import Rate, Tuned, best_rate, chosen, crossed_rates, rate_cell, rate_words, tuned


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
    rate: Rate | None
    seed: int
    config: Config
    outcome: Outcome
    before: Path | None = None
    swap: Swap | None = None
    trained: bool = True
    evaluate: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The run's size, arm, rate and seed in words."""
        at = "" if self.rate is None else f"at {rate_words(self.rate)}"
        return " ".join(filter(None, (self.size, self.arm, at, f"seed {self.config.seed}")))


@dataclass(frozen=True)
class Choice:
    """The learning rates of a size, as far as they are known.

    Attributes:
        runs: the tuning runs by arm and rate, and those that they start from of arms without a rate of their own; none with a table.
        final: by trained arm, the rates that its final seeds are trained at, first the one that tuning chose (`crossed_rates`).
        rates: by arm, the one that it is judged at; arms still at an edge of the grid have none. None: not known yet.
        settled: False while final runs at several rates have not ended: then `rates` are those that tuning chose.
    """

    runs: dict[str, dict[Rate, list[Run]]]
    final: dict[str, tuple[Rate | None, ...]]
    rates: dict[str, Rate | None] | None
    settled: bool = True

    @property
    def crossed(self) -> dict[str, tuple[Rate | None, ...]]:
        """The arms whose final seeds are trained at several rates."""
        return {arm: rates for arm, rates in self.final.items() if len(rates) > 1}


class Procedure:
    """An experiment and the runs it consists of.

    Args:
        experiment: as its file describes it, resolved (`lm.experiments.experiment_folder.open_experiment`).
    """

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self._folder = experiment.folder
        self._ended: dict[Path, Outcome] = {}
        self._configs: dict[tuple, Config] = {}
        self._choices: dict[str, Choice] = {}
        self._evaluated: dict[tuple[str, str], dict[str, dict[str, Plain]]] = {}

    def run(self, size: str, arm: Arm, stage: str, rate: Rate | None, seed: int, rates: dict[str, Rate | None]) -> Run:
        """One run; `rates` are those of the arms before it, of which it may start from one."""
        before = None
        if arm.start:
            source = next(other for other in self.experiment.arms if other.name == arm.start)
            before = self.run(size, source, stage, rates[source.name], seed, rates)
        config = self._config(size, arm, stage, rate, seed, before.config if before else None)
        outcome = self._ended.get(config.run_folder)
        if outcome is None:
            last_step = config.trainer.max_steps if arm.trained else before.outcome.last_step
            kinds = {kind: each for kind, each in config.eval.kinds.items() if each.wanted(config.data)}
            scheduled = tuple(kind for kind, each in kinds.items() if not arm.trained or each.is_due(last_step, last_step))
            metric, asked = self.experiment.primary.metric, self._asked(size, arm, config)
            outcome = Outcome(config.run_folder, last_step, metric, scheduled, asked)
            if outcome.ended:  # for good: it is not read again
                self._ended[config.run_folder] = outcome
        if before and before.outcome.state == "diverged":  # what starts from nothing has diverged with it
            outcome = before.outcome
        start, overrides = before and before.config.run_folder, tuple(self.experiment.evaluate_overrides)
        return Run(size, arm.name, stage, rate, seed, config, outcome, start, arm.swap, arm.trained, overrides)

    def _config(self, size: str, arm: Arm, stage: str, rate: Rate | None, seed: int, before: Config | None) -> Config:
        """The configuration of a run that starts from another (None: from random weights), made once."""
        start = before and before.run_folder
        known = size, arm.name, stage, rate, seed, start
        if known not in self._configs:
            changes: dict[str, Plain] = {"runs": str(self._folder / size), "name": "run"}
            tuned_keys = self.experiment.tuned_keys(size, arm, rate)
            values = "_".join(f"{value:g}" for value in tuned_keys.values())
            at = "-".join(filter(None, (arm.name, values, f"seed{seed}")))
            if start and arm.swap and arm.trained:
                digest = hashlib.sha256(" ".join([start.name, str(arm.swap), *self._options(size, arm, rate)]).encode()).hexdigest()[:8]
                changes["init_from"] = str(self._folder / size / SWAPPED / f"{at}-{digest}")
            elif start and arm.step is not None:
                changes |= {"branch_from": str(step_path(start / CHECKPOINTS, arm.step)), "init_from": before.init_from}
            elif start:
                changes["init_from"] = str(start)
            config = self.experiment.config(size, arm, seed, rate, changes)
            unmoved = config  # starting weights count by their path below the default folder of runs: an experiment may be moved
            if start:
                paths = {name: path for name in ("init_from", "branch_from") if (path := getattr(config, name))}
                below = Path(Config().runs, self.experiment.name)
                unmoved = replace(config, **{name: str(below / Path(path).relative_to(self._folder)) for name, path in paths.items()})
            cell = rate_cell(rate, [key in tuned_keys for key in self.experiment.tune.keys])
            place = ExperimentConfig(self.experiment.name, arm.name, size or None, stage, cell)
            self._configs[known] = replace(config, name=f"{at}-{config_hash(unmoved)}", experiment=place)
        return self._configs[known]

    def _options(self, size: str, arm: Arm, rate: Rate | None) -> list[str]:
        """The options of an arm's normalizer that are not at their defaults, but for `init`, which its swap says."""
        normalizer = self.experiment.config(size, arm, self.experiment.seeds[0], rate, {"name": "any"}).model.normalizer
        own, defaults = to_plain(normalizer), to_plain(type(normalizer)())
        return [f"{key}={value}" for key, value in sorted(own.items()) if key not in ("name", "init") and value != defaults.get(key)]

    def _asked(self, size: str, arm: Arm, config: Config) -> dict[str, dict[str, Plain]]:
        """The options with which the evaluations of an arm's runs must have been asked for; {} where those in training will do."""
        if not self.experiment.evaluate:
            return {}
        if (size, arm.name) not in self._evaluated:
            evaluated = self.experiment.evaluated(config)
            self._evaluated[size, arm.name] = {kind: evaluated.eval.asked(kind) for kind in evaluated.eval.wanted(evaluated.data)}
        return self._evaluated[size, arm.name]

    def choice(self, size: str) -> Choice:
        """The tuning runs of a size and the rates of its arms, as far as they are known; settled rates are kept.

        Arms that start from others are tuned after these, as they start from the runs at the rate that these are judged at.
        """
        if size in self._choices:
            return self._choices[size]
        choice = self._choice(size)
        if choice.settled and choice.rates is not None:
            self._choices[size] = choice
        return choice

    def _choice(self, size: str) -> Choice:
        """The result of `choice`, by the run folders as they are now."""
        runs: dict[str, dict[Rate, list[Run]]] = {}
        rates: dict[str, Rate | None] = {}
        final: dict[str, tuple[Rate | None, ...]] = {}
        if not self.experiment.tuned:
            rates = dict.fromkeys((arm.name for arm in self.experiment.arms), None)
            return Choice(runs, dict.fromkeys(rates, (None,)), rates)
        depths = sorted({len(self.sources(arm)) for arm in self.experiment.arms})
        for depth in depths:
            layer = [arm for arm in self.experiment.arms if len(self.sources(arm)) == depth and arm.tuned]
            outcome = self._tuned(size, [arm for arm in layer if not arm.start or arm.start in rates], rates, runs)
            if outcome.missing:
                return Choice(runs, final, None)
            crossed = crossed_rates(self.experiment.arms[0].name, outcome.rates)
            best = self._best(size, crossed)
            final |= crossed
            rates |= best or outcome.rates
            for arm in self.experiment.arms:  # those without a rate of their own have that of the arm they start from
                rates |= {arm.name: rates[arm.start]} if not arm.tuned and arm.start in rates else {}
            if best is None:
                return Choice(runs, final, rates if depth == depths[-1] else None, settled=False)
        return Choice(runs, final, rates)

    def _tuned(self, size: str, arms: list[Arm], rates: dict[str, Rate], runs: dict[str, dict[Rate, list[Run]]]) -> Tuned:
        """The rates by the tuning runs of arms, or by the table in place of them; they start from others at `rates`, and are added to
        `runs`."""
        experiment = self.experiment
        if experiment.table:
            losses = experiment.costs_of(experiment.table, size)
            return chosen({arm.name: losses[arm.name] for arm in arms})
        outcome, missing = Tuned({}), tuple(experiment.tune.rates) if arms else ()
        for source in self._untuned_sources(arms):
            at = rates[source.name]
            runs.setdefault(source.name, {})[at] = [self.run(size, source, "tune", at, seed, rates) for seed in experiment.tune.seeds]
        while missing:
            for arm, rate in product(arms, missing):
                runs.setdefault(arm.name, {})[rate] = [self.run(size, arm, "tune", rate, seed, rates) for seed in experiment.tune.seeds]
            by_arm = [[*chain(*runs[arm.name].values())] for arm in arms]
            if not all(run.outcome.ended for run in chain(*by_arm)):
                return Tuned({}, missing)
            for some in by_arm:
                check_alike(some, experiment.primary.metric if experiment.tune.metric == "primary" else SELECTION)
            losses = {arm.name: self._costs(runs[arm.name]) for arm in arms}
            outcome = tuned(experiment.tune.axes, losses, partial(self._possible, size, arms))
            missing = outcome.missing
        return outcome

    def _untuned_sources(self, arms: Iterable[Arm]) -> list[Arm]:
        """The arms without a rate of their own that some arms start from, which the tuning seeds take, too; each after its own source."""
        names = {name for arm in arms for name in self.sources(arm)}
        return [arm for arm in self.experiment.arms if arm.name in names and not arm.tuned]

    def _best(self, size: str, crossed: dict[str, tuple[Rate, ...]]) -> dict[str, Rate] | None:
        """The rate that each arm is judged at: of those that its final seeds are trained at, the best on the selection text, as in
        tuning. None while runs at several rates have not ended."""
        rates = {}
        for arm in self.experiment.arms:
            tried = crossed.get(arm.name, ())
            if len(tried) > 1:
                runs = {rate: [self.run(size, arm, "final", rate, seed, {}) for seed in self.experiment.seeds] for rate in tried}
                if not all(run.outcome.ended for run in chain(*runs.values())):
                    return None
                rates[arm.name] = best_rate(self._costs(runs), tried)
            elif tried:
                rates[arm.name] = tried[0]
        return rates

    def _possible(self, size: str, arms: list[Arm], rate: Rate) -> bool:
        """Whether the tuned keys may have these values in all of these arms."""
        try:
            for arm in arms:
                self.experiment.config(size, arm, self.experiment.seeds[0], rate, {"name": "any"})
        except ConfigError:
            return False
        return True

    def tried(self, size: str) -> list[Tried]:
        """The tuning runs of a size, or the table's lines in place of them."""
        experiment = self.experiment
        names = [arm.name for arm in experiment.arms]
        if experiment.table:
            mine = (run for run in experiment.table if run.size == size and run.arm in names)
            return sorted(mine, key=lambda run: names.index(run.arm))
        starts, tune, lines = {arm.name: arm.start for arm in experiment.arms if arm.tuned}, experiment.tune, []
        for arm, by_rate in ((arm, by_rate) for arm, by_rate in self.choice(size).runs.items() if arm in starts):
            for tried, run in ((rate, run) for rate in sorted(by_rate) for run in by_rate[rate]):
                ended = run.outcome.ended
                selection = run.outcome.mean(SELECTION, selection=True) if ended else None
                primary = self.quantity(run.outcome, selection=True) if ended else None
                settings = described(run.config, tune.keys, starts[arm])
                lines.append(Tried(size, arm, tune.heading, tried, run.seed, selection, primary, settings))
        return lines

    def notes(self) -> list[str]:
        """Notes that a reader must know beside the numbers, one sentence each."""
        experiment = self.experiment
        notes: list[str] = []
        for size, arm in product(experiment.sizes if experiment.table else (), (arm for arm in experiment.arms if arm.tuned)):
            config = experiment.config_of(size, arm)
            ours = described(config, experiment.tune.keys, arm.start)
            theirs = {run.configuration for run in experiment.table if (run.size, run.arm) == (size, arm.name)}
            if keys := sorted({key for configuration in theirs for key in differing_keys(ours, configuration)}):
                name = " ".join(filter(None, (size, arm.name)))
                notes.append(f"{name}: rates were tuned for another configuration: {', '.join(keys)} differ")
        for seeds, what in (
            (self.added, "were added after the first start"),
            (self.left_out, "were planned at the first start and are left out"),
        ):
            notes += [f"exploratory: seeds {', '.join(map(str, seeds))} {what}; p values are too small"] if seeds else []
        if experiment.more_seeds:
            n, more = len(set(experiment.seeds) - set(experiment.more_seeds)), len(experiment.more_seeds)
            why = "that is trained if the first leaves a comparison undecided"
            why = "the first left a comparison undecided" if experiment.look == 2 else why
            notes.append(f"look {experiment.look} of 2, each with half of the 5 %: {n} seeds, then {more} more; {why}")
        notes += [f"exploratory: {each.words}" if each.exploratory else each.words for each in experiment.departures]
        notes += unequal((run.arm, run.outcome) for run in self.known())
        for size in experiment.sizes:
            choice, seeds = self.choice(size), {arm.name: [] for arm in experiment.arms}
            for arm, tried in choice.crossed.items():
                name, rates = ", ".join(filter(None, (arm, size))), " and ".join(map(rate_words, sorted(tried)))
                at = f"; judged at {rate_words(choice.rates[arm])}" if choice.settled and choice.rates else ""
                notes.append(f"{name}: final seeds are trained at {rates}, as tuning chose different rates for the arms{at}")
            for run in self.final(size):
                seeds[run.arm] += [str(run.seed)] if run.outcome.state == "finished" else []
            if len({*map(tuple, filter(None, seeds.values()))}) > 1:
                each = "; ".join(f"{name} has {', '.join(some) or 'none'}" for name, some in seeds.items())
                notes.append(f"{size + ': ' if size else ''}arms have finished different seeds, means are over those in common: {each}")
        return notes

    def exploratory(self, size: str, arm: str) -> bool:
        """Whether the verdict on an arm is exploratory."""
        departures = (each.place in (None, (size, arm)) for each in self.experiment.departures if each.exploratory)
        return bool(self.added or self.left_out) or any(departures)

    def sources(self, arm: Arm) -> list[str]:
        """The arms that it starts from, one after the other."""
        if not arm.start:
            return []
        return [arm.start, *self.sources(next(other for other in self.experiment.arms if other.name == arm.start))]

    def final(self, size: str) -> Iterator[Run]:
        """The runs that are judged, by seed and arm; none before rates are known."""
        rates = self.choice(size).rates or {}
        for seed in self.experiment.seeds:
            for arm in self.experiment.arms:
                if arm.name in rates:
                    yield self.run(size, arm, "final", rates[arm.name], seed, rates)

    def judged(self) -> Judged:
        """The verdicts on what the run folders hold now.

        Raises:
            RunError: finished runs were not measured on the same sequences, or the primary metric's direction is another.
        """
        experiment = self.experiment
        places = [(size, arm.name) for size in experiment.sizes for arm in experiment.arms[1:]]
        return Judged(
            experiment.primary,
            tuple(arm.name for arm in experiment.arms),
            experiment.seeds,
            {size: self.choice(size).rates for size in experiment.sizes},
            {place: by_rate for size in experiment.sizes for place, by_rate in self._judged_runs(size).items()},
            every=experiment.primary.quantity != experiment.chosen_by,
            looks=experiment.looks,
            sources={arm.name: self.sources(arm) for arm in experiment.arms if arm.start},
            exploratory=[place for place in places if self.exploratory(*place)],
            key=experiment.tune.heading,
            measured_on="report text",
        )

    def _judged_runs(self, size: str) -> dict[Place, ByRate]:
        """The final runs of a size, of each arm at each of its rates, first the one that tuning chose."""
        experiment, choice = self.experiment, self.choice(size)
        rates = choice.rates or {}
        runs: dict[Place, dict[Rate | None, list[Run]]] = {}
        for arm in experiment.arms:
            tried = choice.final.get(arm.name, ()) if not arm.start else (rates[arm.name],) if arm.name in rates else ()
            runs[size, arm.name] = {rate: [self.run(size, arm, "final", rate, seed, rates) for seed in experiment.seeds] for rate in tried}
        check_alike([run for by_rate in runs.values() for run in chain(*by_rate.values())], experiment.primary.metric)
        judged = partial(self._judged_run, experiment.primary.reach is not None or experiment.first_config.data.symbolic)
        return {place: {rate: [*map(judged, some)] for rate, some in by_rate.items()} for place, by_rate in runs.items()}

    def _judged_run(self, whole: bool, run: Run) -> JudgedRun:
        """The numbers of a run that are judged: those of the units of held-out text that report, or a single one of the `whole`."""
        outcome = run.outcome
        self.check_direction(outcome)
        note = outcome.divergence if outcome.state == "diverged" else outcome.not_learned if outcome.state == "finished" else ""
        of = run.arm, outcome.state, note and f"{run.label}: {note}"
        units = outcome.values(self.experiment.primary.metric) if outcome.state == "finished" and not whole else None
        if not units or not units.fingerprint:
            return JudgedRun(*of, np.array([self.quantity(outcome)]), np.ones(1), None)
        units = units.part(selection=False)
        return JudgedRun(*of, units.values.astype(float), units.weights.astype(float), units.groups)

    def crossed(self, size: str) -> Iterator[Run]:
        """The final runs of arms whose seeds are trained at several rates, at each of them, by seed and arm."""
        crossed = self.choice(size).crossed
        for seed in self.experiment.seeds:
            for arm in self.experiment.arms:
                for rate in crossed.get(arm.name, ()):
                    yield self.run(size, arm, "final", rate, seed, {})

    def known(self) -> list[Run]:
        """All runs that the experiment needs, as far as is known: those of tuning first, each after the one it starts from."""
        runs: list[Run] = []
        for size in self.experiment.sizes:
            runs += chain(*(chain(*by_rate.values()) for by_rate in self.choice(size).runs.values()), self.crossed(size), self.final(size))
        return list({run.config.run_folder: run for run in runs}.values())

    def n_runs(self, size: str) -> dict[str, int]:
        """Runs of each arm in a size, as far as its grid and its rates are known; before tuning has ended, as if it chose two rates."""
        choice, tune, counts = self.choice(size), self.experiment.tune, {}
        crossed = {arm.name for arm in self.experiment.arms if arm.trained and not arm.start} if tune.grid else set()
        untuned = self._untuned_sources(arm for arm in self.experiment.arms if arm.tuned) if tune.grid else []
        for arm in self.experiment.arms:
            grid = self._distinct(size, arm, {*tune.rates, *choice.runs.get(arm.name, ())}) if arm.tuned else int(arm in untuned)
            rates = self._distinct(size, arm, choice.final.get(arm.name, ())) or (2 if len(crossed) > 1 and arm.name in crossed else 1)
            counts[arm.name] = len(self.experiment.seeds) * rates + grid * len(tune.seeds)
        return counts

    def _distinct(self, size: str, arm: Arm, rates: Iterable[Rate | None]) -> int:
        """How many different runs of a seed an arm has at these rates."""
        return len({str(self.experiment.tuned_keys(size, arm, rate)) for rate in rates})

    @property
    def added(self) -> tuple[int, ...]:
        """Seeds of the final runs that were not planned at the first start."""
        planned = self.experiment.planned or self.experiment.seeds
        return tuple(seed for seed in self.experiment.seeds if seed not in planned)

    @property
    def left_out(self) -> tuple[int, ...]:
        """Seeds that were planned at the first start and that the file has no longer."""
        return tuple(seed for seed in self.experiment.planned or () if seed not in self.experiment.all_seeds)

    def quantity(self, outcome: Outcome, selection: bool = False) -> float:
        """The number by which a run is compared, on the documents that report or on those that select: the primary metric, or the tokens
        at which it first reached `primary.reach` (0: before its first evaluation; infinite: never). Infinite of a run that has not
        finished."""
        primary = self.experiment.primary
        if primary.reach is None:
            return outcome.mean(primary.metric, selection)
        return outcome.tokens_to_reach(primary.reach, primary.better, selection)

    def choosing(self, outcome: Outcome) -> float:
        """The value of a run that chooses rates; infinite of a run that has not finished."""
        return self.quantity(outcome, True) if self.experiment.tune.metric == "primary" else outcome.mean(SELECTION, True)

    def _costs(self, by_rate: dict[Rate, list[Run]]) -> dict[Rate, list[float]]:
        """The costs that the choice of a rate minimizes, by rate and seed."""
        return {rate: [self.experiment.cost(self.choosing(run.outcome)) for run in runs] for rate, runs in by_rate.items()}

    def check_direction(self, outcome: Outcome) -> None:
        """Raises RunError if a finished run says that the primary metric's direction is another than the experiment says."""
        primary = self.experiment.primary
        series = outcome.series(primary.metric) if outcome.state == "finished" else None
        if series and series.better not in (primary.better, "none"):
            raise RunError(f"primary.better = {primary.better}: of {primary.metric}, {series.better} is better; correct the experiment")


def check_alike(runs: list[Run], metric: str) -> None:
    """Raises RunError if a metric was not measured on the same sequences in all runs that are finished."""
    finished = [run for run in runs if run.outcome.state == "finished"]
    for run in finished:
        if run.outcome.values(metric).identity != finished[0].outcome.values(metric).identity:
            where = f"{run.config.run_folder}: {metric} was measured on other sequences than in {finished[0].config.run_folder}"
            raise RunError(f"{where}; measure it again as the run is configured: lm eval {run.config.run_folder}")


def next_look(procedure: Procedure) -> Procedure:
    """The experiment with the seeds of its second look, once all runs of the first have ended and left a comparison undecided; else as it
    is."""
    experiment = procedure.experiment
    if not experiment.more_seeds or experiment.look == 2 or not all(run.outcome.ended for run in procedure.known()):
        return procedure
    if all(verdict.kind != "undecided" for verdict in procedure.judged().verdicts.values()):
        return procedure
    return Procedure(replace(experiment, seeds=experiment.seeds + experiment.more_seeds, look=2))
