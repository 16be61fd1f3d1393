"""This module follows the procedure of docs/statistics.md on run folders. It says which runs an experiment needs next
and by which commands, and judges finished runs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import fmean

import pandas as pd

from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.config.yaml_text import yaml_override
from lm.errors import ConfigError, RunError
from lm.experiments.definition import Arm, Experiment, Swap
from lm.experiments.judging import JUDGED_COLUMNS, Judgement, Question, Rate, SizeArm, Stage, judge
from lm.experiments.run_outcome import (
    SELECTION_METRIC,
    Outcome,
    describe_run_differences,
    describe_values_by_arm,
    units_of_part,
)
from lm.files import read_json, write_text
from lm.machine import STOP_SIGNALS
from lm.plain import to_plain
from lm.plugins import top_level_package
from lm.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE

FAILURE_SUFFIX = "failed.json"  # suffix of the file beside a run's log that says why the run failed
MAX_GRID_EXTENSIONS = 2  # how often a grid of rates may grow
LOG_FOLDER = "logs"  # folder in the experiment's folder: output, configuration, job record and failure of each run


@dataclass(frozen=True)
class Run:
    """Holds one run of an experiment: its configuration, its outcome, and the run whose weights it starts from."""

    size: str
    arm: str
    stage: Stage  # `tune` if it chooses a rate, `final` if it is judged
    rate: Rate | None
    seed: int
    config: Config
    outcome: Outcome
    source_run: "Run | None" = None  # the run whose weights this run starts from, if any
    swap: Swap | None = None  # replaces the normalizer that the weights were trained with; None: no swap
    is_trained: bool = True  # False: the swapped weights are measured without further training
    evaluation_overrides: Sequence[str] = ()  # `KEY=VALUE` arguments of the evaluation after training

    @property
    def plugin_packages(self) -> set[str]:
        """Return the packages of the plugins (code from outside lm) that the run and its source need."""
        return {
            *(top_level_package(name) for name in self.config.normalizer_names if ":" in name),
            *(self.source_run.plugin_packages if self.source_run else ()),
        }

    @property
    def has_begun(self) -> bool:
        """Return whether the run has begun, that is, whether its folder has the files that a report reads."""
        return all((self.config.run_folder / name).is_file() for name in (CONFIG_FILE, ENVIRONMENT_FILE))

    def log_file(self, suffix: str = "log") -> Path:
        """Return the run's file with `suffix` in the experiment's folder of logs; `log` is the suffix of the run's
        output."""
        folder = Path(self.config.runs)
        return (folder.parent if self.size else folder) / LOG_FOLDER / self.size / f"{self.config.name}.{suffix}"

    @property
    def label(self) -> str:
        """Return the size, arm, rate and seed in words, as messages name the run."""
        rate = "" if self.rate is None else f"at {self.rate:g}"
        return " ".join(filter(None, (self.size, self.arm, rate, f"seed {self.config.seed}")))


@dataclass(frozen=True)
class RateChoice:
    """Holds the learning rates of a size and the runs that choose them, as far as they are known."""

    # the tuning runs by arm and rate, and the runs of untuned arms that tuning runs start from; empty without a grid
    tuning_runs: dict[str, dict[Rate, list[Run]]]
    # by tuned arm, the rates at which its final seeds are trained (`final_run_rates`); the rate that tuning chose comes
    # first. Without tuning, (None,) for every arm
    rates_of_final_runs: dict[str, tuple[Rate | None, ...]]
    # by arm, the rate at which it is judged, or while final runs at several rates have not ended, the one that tuning
    # chose; arms whose best rate is at an edge of the grid have none. None: not known yet
    judged_rates: dict[str, Rate | None] | None

    @property
    def arms_with_several_rates(self) -> dict[str, tuple[Rate | None, ...]]:
        """Return the rates of each arm whose final runs (the runs that are judged) are trained at several rates."""
        return {arm: rates for arm, rates in self.rates_of_final_runs.items() if len(rates) > 1}


class Procedure:
    """Finds the runs that an experiment needs, from the experiment and the outcomes of its runs.

    read_outcome: returns the outcome of a run as it is now; the default reads run folders. Nothing else is read.
        Outcomes of runs that have ended are kept.
    """

    def __init__(self, experiment: Experiment, read_outcome: Callable[..., Outcome] = Outcome):
        self.experiment, self._read_outcome = experiment, read_outcome
        # what the experiment's recorded plan says (`lm.experiments.compare`): what differs from it, in
        # sentences, and the sizes and arms whose verdicts are exploratory for that
        self.plan_notes, self.exploratory_arms = list[str](), frozenset[SizeArm]()
        self._arms = {arm.name: arm for arm in experiment.arms}
        self._ended_outcomes: dict[Path, Outcome] = {}
        self._configs: dict[tuple, Config] = {}
        self._rate_choices: dict[str, RateChoice] = {}

    def make_run(
        self, size: str, arm: Arm, stage: Stage, rate: Rate | None, seed: int, source_rates: dict[str, Rate | None]
    ) -> Run:
        """Return the run of an arm at a stage, `tune` or `final`, with a rate and a seed. `source_rates`: by arm, the
        rates of the arms from whose weights this arm starts."""
        experiment = self.experiment
        source = (
            self.make_run(size, self._arms[arm.source_arm], stage, source_rates[arm.source_arm], seed, source_rates)
            if arm.source_arm
            else None
        )
        run_key = size, arm.name, stage, rate, seed, source and source.config.name
        config = self._configs.get(run_key)
        if config is None:
            config = experiment.run_config(size, arm, stage, rate, seed, source and source.config)
            self._configs[run_key] = config
        outcome = self._ended_outcomes.get(config.run_folder)
        if source and source.outcome.state == "diverged":  # the run has no weights to start from
            outcome = source.outcome
        elif outcome is None:
            last_step = config.trainer.max_steps if arm.is_trained else source.outcome.last_step
            metric, evaluations = experiment.primary_metric.metric, experiment.due_evaluations(size, arm, config)
            outcome = self._read_outcome(config.run_folder, last_step, metric, *evaluations)
            if outcome.has_ended:  # its folder is not read again
                self._ended_outcomes[config.run_folder] = outcome
        overrides = experiment.evaluation_overrides
        return Run(size, arm.name, stage, rate, seed, config, outcome, source, arm.swap, arm.is_trained, overrides)

    def rate_choice(self, size: str) -> RateChoice:
        """Return the tuning runs of a size and the rates of its arms, as far as they are known; settled rates are
        cached.

        An arm that starts from another arm's weights is tuned after that arm, as its runs start from that arm's runs at
        its judged rate.
        """
        if size in self._rate_choices:
            return self._rate_choices[size]
        runs: dict[str, dict[Rate, list[Run]]] = {}
        rates: dict[str, Rate | None] = {}
        rates_of_final_runs: dict[str, tuple[Rate | None, ...]] = {}
        if not self.experiment.is_tuned:
            rates = dict.fromkeys((arm.name for arm in self.experiment.arms), None)
            return RateChoice(runs, dict.fromkeys(rates, (None,)), rates)
        depths = sorted({len(self.source_arms(arm)) for arm in self.experiment.arms})
        for depth in depths:
            depth_arms = [arm for arm in self.experiment.arms if len(self.source_arms(arm)) == depth and arm.is_tuned]
            tuned = self._tuned_rates(
                size, [arm for arm in depth_arms if not arm.source_arm or arm.source_arm in rates], rates, runs
            )
            if tuned is None:
                return RateChoice(runs, rates_of_final_runs, None)
            candidates = final_run_rates(self.experiment.arms[0].name, tuned)
            best_rates = self._best_rates(size, candidates)
            rates_of_final_runs |= candidates
            rates |= best_rates or tuned
            for arm in self.experiment.arms:  # an arm without a rate of its own has the rate of its source
                rates |= {arm.name: rates[arm.source_arm]} if not arm.is_tuned and arm.source_arm in rates else {}
            if best_rates is None:
                return RateChoice(runs, rates_of_final_runs, rates if depth == depths[-1] else None)
        return self._rate_choices.setdefault(size, RateChoice(runs, rates_of_final_runs, rates))

    def _tuned_rates(
        self, size: str, arms: list[Arm], source_rates: dict[str, Rate], tuning_runs: dict[str, dict[Rate, list[Run]]]
    ) -> dict[str, Rate] | None:
        """Choose the rates of `arms` by their tuning runs, or by the experiment's table of tuning runs (`tune.table`).
        None while tuning runs have not ended.

        source_rates: the judged rates of the arms that `arms` start from. tuning_runs: this method adds the tuning runs
            to it, by arm and rate.
        """
        experiment = self.experiment
        if experiment.tuning_table is not None:
            ended = self.tuning_runs(size).dropna(subset=[experiment.rate_choice_metric]).sort_values("seed")
            costs: dict[str, dict[Rate, list[float]]] = {arm.name: {} for arm in arms}
            for name, rate, value in ended[["arm", "rate", experiment.rate_choice_metric]].itertuples(index=False):
                if name in costs:
                    costs[name].setdefault(rate, []).append(self._metric_as_cost(value))
            return interior_best_rates(costs)
        tuned, missing = dict[str, Rate](), tuple(experiment.tune.grid) if arms else ()
        for source in self._untuned_source_arms(arms):
            tuning_runs.setdefault(source.name, {}).update(
                self._runs_at_rates(size, source, "tune", (source_rates[source.name],), source_rates)
            )
        while missing:
            for arm in arms:
                tuning_runs.setdefault(arm.name, {}).update(
                    self._runs_at_rates(size, arm, "tune", missing, source_rates)
                )
            runs_by_arm = {arm.name: [*chain(*tuning_runs[arm.name].values())] for arm in arms}
            if not all(run.outcome.has_ended for run in chain(*runs_by_arm.values())):
                return None
            for arm_runs in runs_by_arm.values():
                check_comparable(arm_runs, experiment.rate_choice_metric)
            costs = {name: self._costs_by_rate(tuning_runs[name]) for name in runs_by_arm}
            tuned, missing = tuned_rates(experiment.tune.grid, costs, partial(self._is_possible_rate, size, arms))
        return tuned

    def _runs_at_rates(
        self, size: str, arm: Arm, stage: Stage, rates: Iterable[Rate | None], source_rates: dict[str, Rate | None]
    ) -> dict[Rate | None, list[Run]]:
        """Return the runs of an arm at several rates: for each rate, a list with one run for each seed of the stage."""
        seeds = self.experiment.tune.seeds if stage == "tune" else self.experiment.seeds
        return {rate: [self.make_run(size, arm, stage, rate, seed, source_rates) for seed in seeds] for rate in rates}

    def _untuned_source_arms(self, arms: Iterable[Arm]) -> list[Arm]:
        """List the untuned arms that `arms` start from, sources first; these untuned arms are trained with the tuning
        seeds, too.
        """
        names = {name for arm in arms for name in self.source_arms(arm)}
        return [arm for arm in self.experiment.arms if arm.name in names and not arm.is_tuned]

    def _best_rates(self, size: str, candidates: dict[str, tuple[Rate, ...]]) -> dict[str, Rate] | None:
        """Choose the learning rate at which each arm is judged: the best of its `candidates` on the held-out documents
        set aside for that. The `candidates` are the rates at which the arm is trained with all of the experiment's
        seeds. None while runs of arms with several candidates have not ended."""
        rates = {name: arm_rates[0] for name, arm_rates in candidates.items()}
        for name, arm_rates in candidates.items():
            if len(arm_rates) == 1:
                continue
            runs = self._runs_at_rates(size, self._arms[name], "final", arm_rates, {})
            if not all(run.outcome.has_ended for run in chain(*runs.values())):
                return None
            rates[name] = best_rate(self._costs_by_rate(runs), arm_rates)
        return rates

    def _is_possible_rate(self, size: str, arms: list[Arm], rate: Rate) -> bool:
        """Return whether the configurations of all `arms` are valid at a rate."""
        with suppress(ConfigError):
            for arm in arms:
                self.experiment.config(size, arm, self.experiment.seeds[0], rate, {"name": "any"})
            return True
        return False

    def tuning_runs(self, size: str) -> pd.DataFrame:
        """Return the tuning runs of a size, or the runs that the tuning table lists, as the rows of `tuning.csv`.

        The columns are size, arm, key and rate, seed, and the means of `SELECTION_METRIC` and of the primary metric on
        the data that choose rates. A mean is infinite if the run diverged, and missing if the run has not ended or did
        not measure the metric.
        """
        experiment, metrics = self.experiment, dict.fromkeys((SELECTION_METRIC, self.experiment.primary_metric.metric))
        names = {arm.name: place for place, arm in enumerate(experiment.arms)}
        if experiment.tuning_table is not None:
            table = experiment.tuning_table[
                (experiment.tuning_table["size"] == size) & experiment.tuning_table["arm"].isin(names)
            ]
            return table.sort_values("arm", key=lambda column: column.map(names), kind="stable", ignore_index=True)
        rows = []
        for name, by_rate in self.rate_choice(size).tuning_runs.items():
            for run in chain(*(by_rate[rate] for rate in sorted(by_rate if self._arms[name].is_tuned else ()))):
                ended, outcome = run.outcome.has_ended, run.outcome
                means = [outcome.mean(metric, for_selection=True) if ended else math.nan for metric in metrics]
                rows.append([size, name, experiment.tune.key, run.rate, run.seed, *means])
        frame = pd.DataFrame(rows, columns=["size", "arm", "key", "rate", "seed", *metrics])
        return frame.astype(dict.fromkeys(metrics, float))

    def notes(self) -> list[str]:
        """Return sentences on what limits the verdicts: changes since the plan, and differences between arms in their
        runs, rates or training tokens."""
        experiment = self.experiment
        notes = [*self.plan_notes, *describe_run_differences((run.arm, run.outcome) for run in self.known_runs())]
        for size in experiment.sizes:
            choice, prefix = self.rate_choice(size), f"{size}: " if size else ""
            for arm, arm_rates in choice.arms_with_several_rates.items():
                rates = " and ".join(f"{rate:g}" for rate in sorted(arm_rates))
                reason = "as tuning chose different rates for the arms"
                notes.append(f"{prefix}{arm}: final seeds are trained at {rates}, {reason}")
            runs = [run for run in self.final_runs_at_judged_rates(size) if run.outcome.state == "finished"]
            if words := describe_values_by_arm([(run.arm, f"{run.outcome.total_tokens:,}") for run in runs]):
                words = f"with those of their sources: {words}"
                notes.append(f"{prefix}arms have seen different numbers of tokens, {words}")
        return notes

    def source_arms(self, arm: Arm) -> list[str]:
        """Return the names of the arms that an arm starts from: its source, the source of its source, and so on."""
        return [arm.source_arm, *self.source_arms(self._arms[arm.source_arm])] if arm.source_arm else []

    def final_runs_by_rate(self, size: str) -> dict[str, dict[Rate | None, list[Run]]]:
        """Return the final runs of each arm by rate, as a list over seeds; the rate that tuning chose comes first. Arms
        whose rates are not known have none."""
        choice, runs = self.rate_choice(size), {}
        rates = choice.judged_rates or {}
        for arm in self.experiment.arms:
            own_rates = (rates[arm.name],) if arm.source_arm and arm.name in rates else ()
            arm_rates = own_rates if arm.source_arm else choice.rates_of_final_runs.get(arm.name, ())
            runs[arm.name] = self._runs_at_rates(size, arm, "final", arm_rates, rates)
        return runs

    def final_runs_at_judged_rates(self, size: str) -> list[Run]:
        """Return the runs that are judged, in the order of seeds, then arms; none before rates are known."""
        rates = self.rate_choice(size).judged_rates or {}
        return _order_by_seed(runs[rates[arm]] for arm, runs in self.final_runs_by_rate(size).items() if arm in rates)

    def known_runs(self) -> list[Run]:
        """Return all runs that the experiment needs, as far as they are known: tuning runs first, each run after its
        source."""
        runs: list[Run] = []
        for size in self.experiment.sizes:
            runs += chain(*(chain(*by_rate.values()) for by_rate in self.rate_choice(size).tuning_runs.values()))
            runs += _order_by_seed(chain(*(by_rate.values() for by_rate in self.final_runs_by_rate(size).values())))
        return list({run.config.run_folder: run for run in runs}.values())

    def judgement(self) -> Judgement:
        """Judge the runs by their folders as they are now. Raises RunError: finished runs were not measured on the same
        sequences.
        """
        experiment, blocks = self.experiment, []
        for size in experiment.sizes:
            by_arm = self.final_runs_by_rate(size)
            runs = [run for by_rate in by_arm.values() for run in chain(*by_rate.values())]
            check_comparable(runs, experiment.primary_metric.metric)
            blocks += map(self._run_rows, runs)
        question = Question(
            experiment.primary_metric,
            tuple(arm.name for arm in experiment.arms),
            experiment.seeds,
            {size: self.rate_choice(size).judged_rates for size in experiment.sizes},
            must_hold_at_all_rates=experiment.primary_metric.metric != experiment.rate_choice_metric,
            source_arms={arm.name: self.source_arms(arm) for arm in experiment.arms if arm.source_arm},
            exploratory_arms=self.exploratory_arms,
            rate_heading=experiment.tune.key,
            measured_data_text=experiment.measured_data_text(experiment.primary_metric.metric, "report"),
        )
        return judge(pd.concat(blocks) if blocks else pd.DataFrame(columns=JUDGED_COLUMNS), question)

    def _run_rows(self, run: Run) -> pd.DataFrame:
        """Return the rows of a run for `judge`, by sequence, on the held-out documents for reports. There is a single
        row if the run has not finished, or if its sequences are not from documents."""
        outcome, metric = run.outcome, self.experiment.primary_metric.metric
        has_finished = outcome.state == "finished"
        units = pd.DataFrame({"value": [outcome.mean(metric, for_selection=False)], "weight": 1.0, "group": None})
        if has_finished and self.experiment.has_text_data:
            measured = units_of_part(outcome.metric_values(metric), "reports")
            units = measured if (measured["part"] == "reports").any() else units
        note = outcome.loss_above_unigram_text if has_finished else outcome.divergence
        frame = units.assign(
            size=run.size, arm=run.arm, rate=run.rate, seed=run.seed, state=outcome.state,
            note=note and f"{run.label}: {note}", unlearned=outcome.unbeaten_level_text if has_finished else "",
        )[JUDGED_COLUMNS]  # fmt: skip
        return frame.astype({"rate": object, "group": object})  # so that frames of all runs can be joined

    def count_runs_by_arm(self, size: str) -> dict[str, int]:
        """Count the runs of each arm in a size, by the grid and rates known so far. Before tuning has ended, two final
        rates are assumed for arms that may get several."""
        arms, tune, counts = self.experiment.arms, self.experiment.tune, dict[str, int]()
        known = Counter((run.arm, run.stage) for run in self.known_runs() if run.size == size)
        is_open = self.rate_choice(size).judged_rates is None
        first_arms = [arm for arm in arms if arm.is_trained and not arm.source_arm]
        sources = self._untuned_source_arms(arm for arm in arms if arm.is_tuned)
        for arm in arms:
            n_rates = len(tune.grid) if arm.is_tuned else int(arm in sources)
            n_final_rates = 2 if len(first_arms) > 1 and arm in first_arms else 1
            counts[arm.name] = known[arm.name, "tune"] or is_open * len(tune.seeds) * n_rates
            counts[arm.name] += known[arm.name, "final"] or is_open * len(self.experiment.seeds) * n_final_rates
        return counts

    def _metric_as_cost(self, value: float) -> float:
        """Return a value of the metric that chooses rates as a cost, of which lower is better; infinite values stay
        infinite."""
        return self.experiment.rate_choice_sign * value if math.isfinite(value) else value

    def _costs_by_rate(self, runs_by_rate: dict[Rate, list[Run]]) -> dict[Rate, list[float]]:
        """Return the costs of runs on the held-out documents that choose rates, by rate as a list over seeds."""
        metric = self.experiment.rate_choice_metric
        return {
            rate: [self._metric_as_cost(run.outcome.mean(metric, for_selection=True)) for run in runs]
            for rate, runs in runs_by_rate.items()
        }


def next_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs that can be started: they have not ended, and the runs that they start from have finished."""
    return [
        run
        for run in runs
        if not run.outcome.has_ended and (not run.source_run or run.source_run.outcome.state == "finished")
    ]


def _order_by_seed(runs: Iterable[list[Run]]) -> list[Run]:
    """Join lists of runs, each over the same seeds, into one list in the order of seeds."""
    return [*chain(*zip(*runs, strict=True))]


def check_comparable(runs: list[Run], metric: str) -> None:
    """Raise RunError unless finished runs measured a metric on the same sequences."""
    first, *others = [run for run in runs if run.outcome.state == "finished"] or [None]
    for run in others:
        if run.outcome.data_identity(metric) != first.outcome.data_identity(metric):
            folder, reason = run.config.run_folder, f"on other sequences than in {first.config.run_folder}"
            raise RunError(
                f"{folder}: {metric} was measured {reason}; measure it again as configured: lm eval {folder}"
            )


# ---------------------------------------------------------------- the choice of rates

# by rate, an arm's cost with each tuning seed, such as its final loss; infinite if that run diverged
CostsByRate = Mapping[Rate, Sequence[float]]


def tuned_rates(
    grid: Iterable[Rate], costs: Mapping[str, CostsByRate], is_possible: Callable[[Rate], bool] = lambda rate: True
) -> tuple[dict[str, Rate], tuple[Rate, ...]]:
    """Return the rate of each arm, which `interior_best_rates` finds by tuning runs, and an empty tuple. While tuning
    runs are missing, return an empty dict, and the rates at which every arm must be trained first.

    If an arm's best rate is the highest (lowest) one, twice (half) this value is added to the grid of every arm. The
    grid grows at most `MAX_GRID_EXTENSIONS` times, and only by values for which `is_possible` is true.

    Args:
        grid: planned values of the tuned key, above 0.
        costs: by arm, with several seeds at each rate.
        is_possible: function that says whether the tuned key may have a value.
    """
    rates = sorted(set(grid))
    for growths in count():
        if missing_rates := tuple(rate for rate in rates if not all(rate in by_rate for by_rate in costs.values())):
            return {}, missing_rates
        chosen = interior_best_rates(costs, rates)
        best_rates = {arm: best_rate(by_rate, rates) for arm, by_rate in costs.items() if arm not in chosen}
        # an arm that diverged at every rate grows no grid
        edges = {rate for arm, rate in best_rates.items() if mean_cost(costs[arm][rate]) < math.inf}
        low, high = rates[0], rates[-1]
        half = low // 2 if low % 2 == 0 else low / 2  # a key of whole numbers keeps them
        smaller = [half] if low in edges and is_possible(half) else []
        larger = [high * 2] if high in edges and is_possible(high * 2) else []
        if growths == MAX_GRID_EXTENSIONS or not smaller + larger:
            return chosen, ()
        rates = [*smaller, *rates, *larger]


def interior_best_rates(costs: Mapping[str, CostsByRate], rates: Iterable[Rate] | None = None) -> dict[str, Rate]:
    """Return each arm's rate of lowest mean cost among `rates` (None: all rates of the arm). An arm gets no rate if its
    best rate is the smallest or largest of them, or has a diverged run."""
    chosen = {}
    for arm, by_rate in costs.items():
        candidates = list(by_rate if rates is None else rates)
        best = best_rate(by_rate, candidates)
        if best not in (min(candidates), max(candidates)) and mean_cost(by_rate[best]) < math.inf:
            chosen[arm] = best
    return chosen


def final_run_rates(baseline: str, rates: Mapping[str, Rate]) -> dict[str, tuple[Rate, ...]]:
    """Return the rates of each arm's final runs (the runs that are judged): its own rate, then the baseline's; for the
    baseline, all arms' rates.

    As tuning seeds are few, a rate chosen for an arm is tried with the baseline, too, and vice versa, before a verdict
    names a difference.

    Args:
        baseline: the baseline; if it has no rate, every arm is trained at its own rate alone.
        rates: by arm, as tuning chose them.
    """
    opposite_rates = (
        {arm: rates.values() if arm == baseline else (rates[baseline],) for arm in rates} if baseline in rates else {}
    )
    return {arm: tuple(dict.fromkeys((rate, *opposite_rates.get(arm, ())))) for arm, rate in rates.items()}


def best_rate(by_rate: CostsByRate, rates: Iterable[Rate]) -> Rate:
    """Return the rate of the lowest mean cost. If costs are equal, for example because all runs solve a task, return
    the rate nearest to the grid's middle."""
    rates = sorted(rates)
    middle = (len(rates) - 1) / 2
    return min(rates, key=lambda rate: (mean_cost(by_rate[rate]), abs(rates.index(rate) - middle)))


def mean_cost(costs: Sequence[float]) -> float:
    """Return the mean cost over seeds; infinite if any cost is not finite, so that tuning avoids rates at which some
    seeds diverge."""
    return fmean(costs) if all(map(math.isfinite, costs)) else math.inf


# ---------------------------------------------------------------- what is left to do of a run


def remaining_commands(run: Run) -> list[list[str]]:
    """List the arguments of each `lm` command that a run still needs, in order; [] if the run has ended. This function
    also writes the configuration file that `lm train` reads, beside the run's log. Each command can be stopped and
    started again.
    """
    if run.outcome.has_ended:
        return []
    config, folder, outcome, arguments = run.config, run.config.run_folder, run.outcome, []
    plugins = [f"--allow-plugin={package}" for package in sorted(run.plugin_packages)]
    swapped_folder = Path(config.init_from) if run.is_trained else folder
    if run.swap and not (swapped_folder / CONFIG_FILE).exists():
        # `name` and `init` are options of the command; without the labels lm.results has the source's arm
        labels = {name: value for name, value in to_plain(config.experiment).items() if value is not None}
        blocks = {"model.normalizer": to_plain(config.model.normalizer), "experiment": labels}
        overrides = [
            yaml_override(f"{block}.{name}", value)
            for block, options in blocks.items()
            for name, value in options.items()
            if (block, name) not in (("model.normalizer", "name"), ("model.normalizer", "init"))
        ]
        init = [] if run.swap.init is None else [f"--init={run.swap.init}"]
        swap = ["swap", str(run.source_run.config.run_folder), f"--to={run.swap.to}", f"--out={swapped_folder}"]
        arguments.append([*swap, *init, *overrides, *plugins])
    if run.is_trained and (
        not outcome.is_trained or not outcome.has_all_evaluations or outcome.has_required_evaluations
    ):
        # `lm train` makes the evaluations that a kill left out, too
        file = run.log_file("yaml")
        write_text(file, to_yaml(config))
        arguments.append(["train", str(file), "resume=auto", "log.progress=none"])
    if not run.is_trained or not outcome.has_required_evaluations:
        arguments.append(["eval", str(folder), *run.evaluation_overrides, *plugins])
    return arguments


# ---------------------------------------------------------------- runs that failed


@dataclass(frozen=True)
class Failure:
    """Says why a run ended without a result."""

    status: int  # the exit status of the run; if a signal killed it, minus the number of the signal
    reason: str  # why the run failed: the last line of its output, the signal, or the measurement that is missing
    log: str  # path of the file that holds all output of the run

    def __str__(self) -> str:
        return f"status {self.status}: {self.reason}" if self.status else self.reason

    @property
    def was_interrupted(self) -> bool:
        """Return whether a signal stopped or killed the run, which the next start then continues."""
        return self.status < 0 or self.status - 128 in STOP_SIGNALS


def read_failure(run: Run) -> Failure | None:
    """Return the recorded failure of a run; interrupted runs have none. Raises RunError: the file is damaged."""
    path = run.log_file(FAILURE_SUFFIX)
    return Failure(**read_json(path)) if path.exists() else None


def failed_runs(procedure: Procedure) -> list[tuple[Run, Failure]]:
    """Return the runs of an experiment that have failed, each with its failure."""
    pairs = ((run, read_failure(run)) for run in procedure.known_runs())
    return [(run, failure) for run, failure in pairs if failure and not run.outcome.has_ended]


def forget_failures(procedure: Procedure) -> None:
    """Delete the records of failures, so that the runs that failed are tried again."""
    for run in procedure.known_runs():
        run.log_file(FAILURE_SUFFIX).unlink(missing_ok=True)
