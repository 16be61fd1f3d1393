"""The procedure of docs/statistics.md simulated: how often its intervals cover the truth, and how often its verdicts
are false.

python scripts/simulate_verdicts.py [--trials 4000] [--jobs 2]
python scripts/simulate_verdicts.py --seeds       runs that fail, skewed noise and ties, under today's and former rules
python scripts/simulate_verdicts.py --intervals   intervals over documents, beside those of the percentile bootstrap

Each trial is an experiment as `lm.statistics` judges it: every arm tuned on a grid of four learning rates with two
seeds, the grid grown where the best is at an edge, then trained with further seeds, at the rates of `crossed_rates`,
and judged by `verdicts`. A final loss is: the arm's curve over log2(rate), plus effects of the seed (shared by arms, as
seeds share the order of data), of arm x rate x seed, of the document, of arm x document and of arm x seed x document.
What is drawn can have heavy tails (Student t with 4 degrees of freedom) and differ in variance between arms; from 4e-3
on runs can be unlucky, each with a chance of its own: an exponential amount is added to their loss. Other experiments
are not tuned, take their rates from a table, have several sizes, judge another metric than the one that chooses rates,
or an accuracy in steps of 1/128 with a ceiling, or lose runs. `--seeds` simulates experiments without tuning whose
values have awkward distributions, paired and unpaired, beside the rules of version 0.12.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lm.statistics.intervals import ALPHA, Interval, effective_trials, over_documents, over_seeds_and_documents, wilson
from lm.statistics.tuning import TuningOutcome, best_rate, crossed_rates, rate_choice, tuning_outcome
from lm.statistics.verdicts import UNTUNED, Comparison, Verdict, VerdictKind, seeds_needed, verdicts

Draw = Callable[..., np.ndarray]  # values of a random generator and a shape
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
MATTERS = 0.02  # nats per token
UNLUCKY_FROM = 4e-3
QUESTIONS = 128  # of an accuracy
KINDS = (
    "better",
    "worse",
    "difference below margin",
    "no difference above margin",
    "undecided",
    "unstable",
    "not tuned",
)


@dataclass(frozen=True)
class World:
    """What is true, in nats per token; standard deviations but for `effects`, `optima` and `curvature`."""

    name: str
    seeds: int
    effects: tuple[float, ...] = (0.0,)  # of each arm against the baseline, both at their best rates
    optima: tuple[float, ...] = ()  # log2 of each arm's best rate over 3e-3; the baseline's first; all 0 unless given
    curvature: float = 0.02  # of the loss, per octave squared from the best rate
    seed: float = 0.01
    arm_seed: float = 0.008
    document: float = 0.3
    arm_document: float = 0.02
    arm_seed_document: float = 0.02
    documents: int = 24
    # effects of arm x document cancel over the report text: arms that are equal are equal on it, too
    equal_on_text: bool = False
    heavy: bool = False
    unequal: bool = False  # the noise of arms twice that of the baseline, and documents of unequal length
    unlucky: float = 0.0  # the chance that a run at 4e-3 or more is
    unlucky_by: float = 0.1  # the mean of what it loses by that
    growing: bool = False  # arm_seed grows in proportion to the rate: it is what is said at 1e-3
    tuning: str = "grid"  # or `table`: the grid does not grow; `none`: all arms at 4e-3
    sizes: int = 1  # each with a baseline of its own; `effects` are those of every size
    other_metric: bool = False  # rates are chosen by another metric, whose best rates are an octave higher
    ceiling: bool = False  # the metric is an accuracy near 1: at most 1, of 128 questions
    lost: float = 0.0  # the chance that a final run diverges


def simulated(world: World, trial: int) -> tuple[list[Verdict], list[float], list[tuple[float, ...]], int]:
    """One experiment.

    Returns:
        Each comparison's verdict; what is true of it, NaN where it was not tuned; of each tuned one, whether its
        intervals alone hold the truth, over seeds, and over seeds and documents (NaN without), whether tuning chose
        different rates, and whether the interval that the verdict follows from holds the truth.
    """
    random = np.random.default_rng((*world.name.encode(), world.seeds, trial))
    sizes = [_Size(world, random) for _ in range(world.sizes)]
    comparisons = {
        (number, arm): comparison
        for number, size in enumerate(sizes)
        for arm, comparison in size.compared(world.seeds).items()
    }
    found_verdicts = verdicts(comparisons, MATTERS)
    truths = [size.truth(arm) for size in sizes for arm in size.arms[1:]]
    coverage = []
    differ = [differs for size in sizes for differs in size.differ]
    for comparison, verdict, (text, population), differs in zip(
        comparisons.values(), found_verdicts.values(), truths, differ, strict=True
    ):
        if not comparison.obstacle:
            over_both = comparison.document_estimate
            wide = over_both and Interval(math.nan, *map(float, comparison.interval_ends(ALPHA, over_both)))
            alone = _holds(verdict.single_interval, text), _holds(wide, population) if wide else math.nan
            coverage.append((*alone, differs, _holds(verdict.interval, text)))
    return list(found_verdicts.values()), [text for text, _ in truths], coverage


class _Size:
    """The runs of one size, tuned and trained."""

    def __init__(self, world: World, random: np.random.Generator):
        self.world, self.random = world, random
        self.arms = ["base", *(f"arm {number}" for number in range(len(world.effects)))]
        self.effects, self.optima = (0.0, *world.effects), world.optima or (0.0,) * len(self.arms)
        self.noise_source = [1.0, *(2.0 if world.unequal else 1.0 for _ in world.effects)]
        self._tune()
        self._train(world.seeds)

    def draw(self, scale: float, *shape: int) -> np.ndarray:
        """Noise of a standard deviation."""
        return scale * (
            self.random.standard_t(4, shape) / math.sqrt(2) if self.world.heavy else self.random.standard_normal(shape)
        )

    def expected(self, arm: int, rate: float, octaves: float = 0.0) -> float:
        """The mean of an arm at a rate; the metric's best rate may be some octaves from the one that chooses."""
        unlucky = self.world.unlucky * self.world.unlucky_by if rate >= UNLUCKY_FROM else 0.0
        return (
            4
            + self.effects[arm]
            + self.world.curvature * (math.log2(rate / 3e-3) - self.optima[arm] - octaves) ** 2
            + unlucky
        )

    def of_runs(self, arm: int, rate: float, seeds: int) -> np.ndarray:
        """What the runs of an arm at a rate have for themselves, of mean 0."""
        world = self.world
        noise = self.draw(self.noise_source[arm] * world.arm_seed * (rate / 1e-3 if world.growing else 1.0), seeds)
        if world.unlucky and rate >= UNLUCKY_FROM:
            random = self.random
            noise += (random.random(seeds) < world.unlucky) * random.exponential(
                world.unlucky_by, seeds
            ) - world.unlucky * world.unlucky_by
        return noise

    def _tune(self) -> None:
        """The rates of the arms: by the mean over the selection text, whose documents are the same at every rate and
        seed.
        """
        world, arms = self.world, self.arms
        shared = self.draw(world.seed, 2)
        self.shift = self.draw(world.arm_document / math.sqrt(world.documents / 2), len(arms))
        octaves = 1.0 if world.other_metric else 0.0
        losses: dict[str, dict[float, list[float]]] = {arm: {} for arm in arms}
        self.choice = TuningOutcome(dict.fromkeys(arms, 4e-3)) if world.tuning == "none" else TuningOutcome({}, GRID)
        while self.choice.missing:
            for rate in self.choice.missing:
                for number, arm in enumerate(arms):
                    mean = self.expected(number, rate, octaves) + self.shift[number]
                    losses[arm][rate] = list(mean + shared + self.of_runs(number, rate, 2))
            self.choice = tuning_outcome([GRID], losses) if world.tuning == "grid" else rate_choice(losses)
        self.crossed = (
            crossed_rates("base", self.choice.rates) if world.tuning != "none" else {arm: (4e-3,) for arm in arms}
        )

    def _train(self, seeds: int) -> None:
        """The final seeds, at each rate that an arm is trained at: on the text that reports by document, on that which
        selects the mean.
        """
        world = self.world
        weights = self.random.lognormal(0, 0.6, world.documents) if world.unequal else np.ones(world.documents)
        self.weights = weights / weights.sum()
        by_seed, by_document = self.draw(world.seed, seeds, 1), self.draw(world.document, world.documents)
        self.values, self.selected, self.true, self.lost = {}, {}, {}, {}
        for number, arm in enumerate(self.arms):
            if arm not in self.crossed:
                continue
            on_text = self.draw(world.arm_document, world.documents)
            if world.equal_on_text:
                on_text -= self.weights @ on_text
            values, selected, means = np.empty((len(self.crossed[arm]), seeds, world.documents)), {}, []
            for of_rate, rate in zip(values, self.crossed[arm], strict=True):
                noise, mean = self.of_runs(number, rate, seeds)[:, None], self.expected(number, rate)
                of_rate[:] = (
                    mean
                    + noise
                    + self.draw(self.noise_source[number] * world.arm_seed_document, seeds, world.documents)
                )
                rest = self.draw(
                    self.noise_source[number] * world.arm_seed_document / math.sqrt(world.documents / 2), seeds
                )
                selecting = self.expected(number, rate, 1.0) if world.other_metric else mean
                selected[rate] = selecting + by_seed[:, 0] + noise[:, 0] + self.shift[number] + rest
                means.append(mean)
            self.values[arm], self.selected[arm] = values + by_seed + by_document + on_text, selected
            self.true[arm] = np.array([[mean, mean + self.weights @ on_text] for mean in means])
            self.lost[arm] = self.random.random(seeds) < world.lost

    def compared(self, seeds: int) -> dict[str, Comparison]:
        """What the first seeds show of each arm."""
        comparisons = {arm: Comparison((), obstacle=UNTUNED) for arm in self.arms[1:]}
        self.judged_at = {arm: self._best(arm, seeds) for arm in self.values}
        for arm in self.arms[1:]:
            if not {arm, "base"} <= self.values.keys():
                continue
            n_lost = int(self.lost[arm][:seeds].sum() + self.lost["base"][:seeds].sum())
            order = sorted(
                range(len(self.crossed["base"])), key=lambda place: self.crossed["base"][place] not in self.crossed[arm]
            )
            shared = sum(rate in self.crossed[arm] for rate in self.crossed["base"])  # the rates of both come first
            place = self.judged_at[arm], order.index(self.judged_at["base"])
            arm_values, base_values = (self.values[name][:, :seeds] for name in (arm, "base"))
            # (rates of the arm, of the base, seeds, documents)
            differences = self._measured(arm_values)[:, None] - self._measured(base_values)[order]
            by_rates, documents = differences @ self.weights, np.arange(self.world.documents)
            over_both = None if self.world.ceiling else over_seeds_and_documents(differences, self.weights, documents)
            comparisons[arm] = Comparison(
                by_rates, place, shared, self.world.other_metric, document_estimate=over_both,
                obstacle=("unstable", "", "runs diverged") if n_lost else None,
                bounds=(-1.0, 1.0) if self.world.ceiling else None,
            )  # fmt: skip
        return comparisons

    def _best(self, arm: str, seeds: int) -> int:
        losses = {rate: list(losses[:seeds]) for rate, losses in self.selected[arm].items()}
        return self.crossed[arm].index(best_rate(losses, self.crossed[arm]))

    def _measured(self, losses: np.ndarray) -> np.ndarray:
        """What is compared: losses by document, or the error rate of questions, of which most have the right answer."""
        if not self.world.ceiling:
            return losses
        wrong = np.round(np.clip((losses @ self.weights)[..., None] - 4.0, 0, 1) * QUESTIONS) / QUESTIONS
        return np.broadcast_to(wrong, losses.shape)

    def truth(self, arm: str) -> tuple[float, float]:
        """The difference of the arms at the best of their rates: on this text, and over texts; NaN without a rate. Of
        another metric than the one that chooses, at the rates that are judged."""
        if not {arm, "base"} <= self.true.keys():
            return math.nan, math.nan
        rates = [
            self.judged_at[name] if self.world.other_metric else int(self.true[name][:, 0].argmin())
            for name in (arm, "base")
        ]
        population, text = self.true[arm][rates[0]] - self.true["base"][rates[1]]
        return float(text), float(population)

    @property
    def differ(self) -> list[bool]:
        """Of each arm, whether tuning chose another rate than the baseline's."""
        return [self.choice.rates.get(arm) != self.choice.rates.get("base") for arm in self.arms[1:]]


def _holds(interval: Interval, value: float) -> bool:
    return interval.low - 1e-12 <= value <= interval.high + 1e-12


def false(kind: VerdictKind, truth: float) -> bool:
    """Whether a word does not hold of a true difference; the metric is better when lower."""
    rounding = 1e-12
    too_large = abs(truth) >= MATTERS - rounding
    wrong = {
        "better": truth > -rounding, "worse": truth < rounding, "no difference above margin": too_large,
        "difference below margin": too_large or abs(truth) < rounding,
    }  # fmt: skip
    return wrong.get(kind, False)


def many(world: World, trials: range) -> tuple[Counter, np.ndarray]:
    """Of many trials: how many had each verdict on any comparison, and `false` any false word; `together`, in how many
    all intervals that verdicts follow from hold; and what `simulated` says of
    intervals, (intervals, 4).
    """
    counts, coverage = Counter(), []
    for trial in trials:
        found_verdicts, truths, intervals = simulated(world, trial)
        counts.update({verdict.kind for verdict in found_verdicts})
        counts["false"] += any(
            false(verdict.kind, truth) for verdict, truth in zip(found_verdicts, truths, strict=True)
        )
        counts["together"] += all(holds for *_, holds in intervals)
        coverage += intervals
    return counts, np.array(coverage, dtype=float).reshape(-1, 4)


def report(worlds: list[World], trials: int, jobs: int) -> None:
    """Print a table, one line a world."""
    print(f"{trials} experiments a line; % of experiments with such a verdict on any arm; coverage in % of intervals\n")
    coverage = ("over seeds", "over seeds and documents", "rates differ", "all together")
    print("| world | seeds | " + " | ".join((*coverage, "any false word", *KINDS)) + " |")
    print("|---|" + "---:|" * (len(KINDS) + 6))
    with ProcessPoolExecutor(jobs) as pool:
        for world in worlds:
            pieces = [range(start, min(start + 250, trials)) for start in range(0, trials, 250)]
            results = list(pool.map(many, [world] * len(pieces), pieces))
            counts = sum((counts for counts, _ in results), Counter())
            covering = np.concatenate([part for _, part in results])
            cells = ["" if np.isnan(column).all() else f"{100 * np.nanmean(column):.1f}" for column in covering.T[:3]]
            cells += [f"{100 * counts[kind] / trials:.1f}" for kind in ("together", "false", *KINDS)]
            print(f"| {world.name} | {world.seeds} | " + " | ".join(cells) + " |", flush=True)


def all_worlds() -> list[World]:
    """Equal arms with plain and with awkward noise, arms that differ by what matters, and experiments of other
    kinds.
    """
    worlds = []
    for seeds in (3, 5, 10):
        plain = World("4 equal arms", seeds, (0.0,) * 4, equal_on_text=True)
        unlucky = replace(plain, unlucky=0.2, curvature=0.05, optima=(0.4,) * 5)
        untuned = replace(plain, name="4 equal arms, not tuned", tuning="none")
        worlds += [
            plain,
            replace(plain, name="4 equal arms, heavy tails", heavy=True),
            replace(plain, name="4 equal arms, heavy tails, unequal variances", heavy=True, unequal=True),
            replace(plain, name="4 equal arms, nearly flat over rates", curvature=0.002),
            replace(plain, name="4 equal arms of different best rates", optima=(0.0, 0.5, -0.5, 0.3, 1.0)),
            replace(plain, name="4 equal arms that differ by text", equal_on_text=False),
            replace(
                plain,
                name="4 equal arms that differ by text, heavy, unequal",
                equal_on_text=False,
                heavy=True,
                unequal=True,
            ),
            replace(unlucky, name="4 equal arms, a fifth of runs unlucky by 0.1"),
            replace(unlucky, name="4 equal arms, a fifth of runs unlucky by 0.2", unlucky_by=0.2),
            replace(unlucky, name="4 equal arms, noise grows with the rate", unlucky=0.0, growing=True),
            replace(plain, name="4 equal arms, noise as under AdamW", arm_seed=0.03),
            replace(plain, name="4 equal arms, rates from a table", tuning="table"),
            untuned,
            replace(untuned, name="4 equal arms, not tuned, heavy tails", heavy=True),
            replace(untuned, name="4 equal arms that differ by text, not tuned", equal_on_text=False),
            replace(untuned, name="2 equal arms in 3 sizes, not tuned", sizes=3, effects=(0.0,) * 2),
            replace(untuned, name="4 equal arms, not tuned, an accuracy near 1 in steps of 1/128", ceiling=True),
            replace(plain, name="4 equal arms, another metric than the one that chooses rates", other_metric=True),
            replace(untuned, name="4 equal arms, not tuned, one run in 50 diverges", lost=0.02),
            replace(untuned, name=f"4 arms worse by exactly {MATTERS:g}, not tuned", effects=(MATTERS,) * 4),
            replace(
                untuned,
                name=f"2 arms equal, 2 better by exactly {MATTERS:g}, not tuned",
                effects=(0.0, 0.0, -MATTERS, -MATTERS),
            ),
            replace(plain, name=f"1 arm better by {MATTERS:g}", effects=(-MATTERS,)),
            replace(
                unlucky,
                name="1 arm better by 0.05, a fifth of runs unlucky by 0.1",
                effects=(-0.05,),
                optima=(0.4,) * 2,
            ),
        ]
    for effect in (0.0, -MATTERS):
        words = "equal" if not effect else f"better by {MATTERS:g}"
        untuned = World(
            f"1 arm {words}, not tuned, noise as under AdamW",
            5,
            (effect,),
            equal_on_text=True,
            tuning="none",
            arm_seed=0.02,
        )
        worlds += [untuned, replace(untuned, seeds=15)]
    several = World("4 equal arms, not tuned", 5, (0.0,) * 4, equal_on_text=True, tuning="none", arm_seed=0.02)
    spread = math.sqrt(2 * (0.008**2 + 0.02**2 / 24))
    planned_world = World(
        f"1 arm better by {MATTERS:g}, planned", seeds_needed(spread, MATTERS), (-MATTERS,), equal_on_text=True
    )
    return [
        *worlds,
        several,
        planned_world,
        replace(planned_world, name=f"{planned_world.name}, best rate on the grid", optima=(0.4, 0.4)),
    ]


def _failing(chance: float) -> Draw:
    """Accuracies near 1 in steps of 1/128, or 0 with a chance."""

    def draw(random: np.random.Generator, *shape: int) -> np.ndarray:
        accuracies = 1 - np.round(np.abs(random.normal(0, 0.01, shape)) * QUESTIONS) / QUESTIONS
        return np.where(random.random(shape) < chance, 0.0, accuracies)

    return draw


def _coarse(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Accuracies of 8 questions, of which most are right, so that seeds often agree."""
    return random.binomial(8, 0.97, shape) / 8


def _lognormal(sigma: float) -> Draw:
    """Losses of one-sided noise, whose standard deviation is 0.01."""

    def draw(random: np.random.Generator, *shape: int) -> np.ndarray:
        deviation = math.sqrt(math.expm1(sigma**2)) * math.exp(sigma**2 / 2)
        return 0.01 / deviation * (random.lognormal(0, sigma, shape) - math.exp(sigma**2 / 2))

    return draw


def _normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(0, 0.01, shape)


def _rare(sigma: float) -> Draw:
    """Losses that most seeds have near 0, and a few far above, so that the mean is `MATTERS`."""
    return lambda random, *shape: MATTERS * random.lognormal(-(sigma**2) / 2, sigma, shape)


def _quiet(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.normal(0, 0.001, shape)


@dataclass(frozen=True)
class Awkward:
    """Arms without tuning, whose runs have values of one distribution, and the baseline's of another."""

    name: str
    baseline: Draw
    arm: Draw
    mean_difference: float  # arm minus baseline, in expectation
    margin: float
    is_accuracy: bool = False
    effect: float = 0.0  # added to the arm's values


def awkward_worlds() -> list[Awkward]:
    """Runs that fail altogether, one-sided noise, ties; and plain noise, for the power."""
    stable = 0.01 * math.sqrt(2 / math.pi)  # the mean distance from 1 of an accuracy that does not fail, about
    loses = {chance: -chance * (1 - stable) for chance in (0.25, 0.29)}
    return [
        Awkward("equal accuracies, all arms fail in 29 % of seeds", _failing(0.29), _failing(0.29), 0, 0.25, True),
        Awkward("arms fail in 29 % of seeds, the baseline never", _failing(0), _failing(0.29), loses[0.29], 0.25, True),
        Awkward("arms fail in 25.2 % of seeds, the baseline never", _failing(0), _failing(0.252), -0.25, 0.25, True),
        Awkward("equal accuracies near 1", _failing(0), _failing(0), 0, 0.25, True),
        Awkward("equal accuracies of 8 questions, ties", _coarse, _coarse, 0, 0.25, True),
        Awkward("equal losses, one-sided noise (lognormal, sigma 1)", _lognormal(1), _lognormal(1), 0, MATTERS),
        Awkward("equal losses, the arms' noise one-sided (sigma 1)", _normal, _lognormal(1), 0, MATTERS),
        Awkward("arms worse by 0.02 through rare high losses (sigma 2)", _quiet, _rare(2), MATTERS, MATTERS),
        Awkward("equal losses", _normal, _normal, 0, MATTERS),
        Awkward(f"arms better by {MATTERS:g}", _normal, _normal, -MATTERS, MATTERS, effect=-MATTERS),
    ]


def awkward_experiments(world: Awkward, arms: int, seeds: int, unpaired: bool, trials: range) -> np.ndarray:
    """Of many experiments, (trials, 8): whether a word is false; whether all intervals together hold the truth; the
    part of intervals that hold it alone; whether some arm is called better, or not different above the margin; the
    same two and false words by Student's t at 0.05 / arms, as in version 0.12; and the mean ratio of the intervals'
    lengths to those.
    """
    rows = []
    for trial in trials:
        random = np.random.default_rng((*world.name.encode(), arms, seeds, unpaired, trial))
        values, baseline = world.arm(random, arms, seeds) + world.effect, world.baseline(random, 1, seeds)
        new, old = {}, {}
        bounds = (0.0, 1.0) if unpaired else (-1.0, 1.0)
        for arm, row in enumerate(values):
            pair = (row[None], baseline) if unpaired else None
            old[arm] = Comparison(row - baseline[0], higher_is_better=world.is_accuracy, unpaired_values=pair)
            new[arm] = replace(old[arm], bounds=bounds if world.is_accuracy else None)
        found_verdicts = [*verdicts(new, world.margin).values()]
        intervals = [
            Interval(math.nan, *map(float, comparison.interval_ends(ALPHA / arms))) for comparison in old.values()
        ]
        old_words = [_word(interval, world) for interval in intervals]
        ratios = [
            (verdict.interval.high - verdict.interval.low) / (interval.high - interval.low)
            for verdict, interval in zip(found_verdicts, intervals, strict=True)
            if interval.bounded
        ]
        words = [verdict.kind for verdict in found_verdicts]
        rows.append(
            [
                any(_is_false(word, world) for word in words),
                all(_holds(verdict.interval, world.mean_difference) for verdict in found_verdicts),
                np.mean([_holds(verdict.single_interval, world.mean_difference) for verdict in found_verdicts]),
                "better" in words,
                "no difference above margin" in words,
                any(_is_false(word, world) for word in old_words),
                "better" in old_words,
                "no difference above margin" in old_words,
                np.mean(ratios) if ratios else np.nan,
            ]
        )
    return np.array(rows, dtype=float)


def _word(interval: Interval, world: Awkward) -> str:
    """The word that follows from an interval."""
    is_within = -world.margin < interval.low and interval.high < world.margin
    if interval.low > 0 or interval.high < 0:
        return "difference below margin" if is_within else ("worse", "better")[(interval.low > 0) == world.is_accuracy]
    return "no difference above margin" if is_within else "undecided"


def _is_false(word: str, world: Awkward) -> bool:
    truth = -world.mean_difference if world.is_accuracy else world.mean_difference
    is_large = abs(truth) >= world.margin - 1e-12
    wrong = {"better": truth >= 0, "worse": truth <= 0, "no difference above margin": is_large}
    return (wrong | {"difference below margin": is_large or truth == 0}).get(word, False)


def report_awkward(trials: int, jobs: int) -> None:
    """Print a table of `awkward_worlds`, a line for each design, number of arms and number of seeds, as CSV."""
    columns = "false words,all hold together,hold alone,better,no difference above margin"
    columns += ",former false words,former better,former no difference above margin,length to former"
    print(f"simulated experiments,design,arms,seeds,{columns}")
    with ProcessPoolExecutor(jobs) as pool:
        designs = [*product((1, 4), (5, 11, 20), (False, True))]
        for name, (arms, seeds, unpaired) in product(range(len(awkward_worlds())), designs):
            pieces = [range(start, min(start + 250, trials)) for start in range(0, trials, 250)]
            results = [pool.submit(_awkward_piece, name, arms, seeds, unpaired, piece) for piece in pieces]
            with np.errstate(invalid="ignore"):
                means = 100 * np.nanmean(np.concatenate([result.result() for result in results]), axis=0)
            cells = ",".join("" if math.isnan(mean) else f"{mean:.1f}" for mean in means)
            world = awkward_worlds()[name]
            print(f'"{world.name}",{"unpaired" if unpaired else "paired"},{arms},{seeds},{cells}', flush=True)


def _awkward_piece(number: int, *arguments: object) -> np.ndarray:
    return awkward_experiments(awkward_worlds()[number], *arguments)


def report_intervals(trials: int) -> None:
    """Print how often intervals hold the truth. Over documents: `over_documents`, and the percentile bootstrap with
    1,000 resamples. Of fractions over sequences that ask several questions: Wilson's of `effective_trials`, and of all
    questions as if independent.
    """
    random = np.random.default_rng(0)
    print("| documents | their lengths | coverage, % | percentile bootstrap, % |\n|---:|---|---:|---:|")
    for documents, spread in ((4, 0.0), (4, 0.6), (8, 0.0), (8, 0.6), (20, 0.0), (20, 0.6)):
        hits = np.zeros(2)
        for _ in range(trials):
            weights = random.lognormal(0, spread, documents)
            values = (
                0.1
                + 0.1 * random.standard_normal(documents)
                + 0.05 * random.standard_normal(documents) / np.sqrt(weights)
            )
            interval = over_documents(values, weights)
            resamples = random.integers(0, documents, (1000, documents))
            means = (weights[resamples] * values[resamples]).sum(1) / weights[resamples].sum(1)
            hits += interval.low <= 0.1 <= interval.high, np.quantile(means, 0.025) <= 0.1 <= np.quantile(means, 0.975)
        lengths = f"log-normal, sigma {spread:g}" if spread else "equal"
        print(
            f"| {documents} | {lengths} | " + " | ".join(f"{100 * fraction:.1f}" for fraction in hits / trials) + " |",
            flush=True,
        )
    correlations = (0.0, 0.1, 0.4, 0.8)
    headings = " | ".join(f"correlation {correlation:g}" for correlation in correlations)
    print(f"\n| sequences | questions in each | right | {headings} |")
    print("|---:|---:|---:|" + "---:|" * len(correlations))
    for sequences, size, chance in product((8, 32, 128), (1, 8), (0.5, 0.95)):
        cells = []
        for correlation in correlations[: len(correlations) if size > 1 else 1]:
            hits, counts = np.zeros(2), np.full(sequences, size)
            for _ in range(trials):
                rest = 1 / correlation - 1 if correlation else math.inf  # sum of the beta distribution's parameters
                chances = random.beta(chance * rest, (1 - chance) * rest, sequences) if correlation else chance
                right = random.binomial(size, chances, sequences)
                for column, number in enumerate((effective_trials(right, counts), counts.sum())):
                    interval = wilson(right.sum() / counts.sum() * number, number)
                    hits[column] += interval.low <= chance <= interval.high
            cells.append(", ".join(f"{100 * fraction:.1f}" for fraction in hits / trials))
        print(
            f"| {sequences} | {size} | {chance:g} | {' | '.join(cells + [''] * (len(correlations) - len(cells)))} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--intervals", action="store_true")
    parser.add_argument("--seeds", action="store_true")
    arguments = parser.parse_args()
    if arguments.intervals:
        report_intervals(arguments.trials)
    elif arguments.seeds:
        report_awkward(arguments.trials, arguments.jobs)
    else:
        report(all_worlds(), arguments.trials, arguments.jobs)
