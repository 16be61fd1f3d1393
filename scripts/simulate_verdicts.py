"""Simulate the procedure of docs/statistics.md: how often its intervals hold, and how often its verdicts are false.

python scripts/simulate_verdicts.py [--trials 4000] [--jobs 2]
python scripts/simulate_verdicts.py --seeds   runs that fail, skewed noise and ties

A trial is an experiment that `lm.experiments.judging` judges. Every arm is tuned on a grid of four learning rates with
two seeds. The grid grows if the best rate is at its edge. Then each arm is trained with further seeds at its own best
rate and at the baseline's. The baseline is trained at the best rates of all arms (`final_run_rates`).

A final loss is the arm's curve over log2(rate) plus five random effects. They are drawn for each seed, each document,
each arm x rate x seed, each arm x document, and each arm x seed x document. All arms share a seed's effect, as seeds
share the order of data.

`--seeds` simulates experiments without tuning whose values have awkward distributions, paired and unpaired.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, get_args

import numpy as np
import pandas as pd

from lm.experiments.judging import FINISHED, PrimaryMetric, Question, Rate, judge
from lm.experiments.procedure import best_rate, final_run_rates, tuned_rates
from lm.statistics.intervals import ALPHA
from lm.statistics.verdicts import VerdictKind

DrawFunction = Callable[..., np.ndarray]  # function from a random generator and a shape to values
RATE_GRID = (1e-3, 2e-3, 4e-3, 8e-3)
CENTRAL_RATE = 3e-3
MATTERS = 0.02  # nats per token
# learning rate from which runs may go badly, and the mean of the loss that is then added
BAD_RUN_MIN_RATE, BAD_RUN_MEAN_LOSS = 4e-3, 0.1
QUESTIONS_PER_ACCURACY = 128
CONSTANT_RUN_COLUMNS = {"state": FINISHED, "note": "", "unlearned": "", "weight": 1.0}  # columns that all runs share
# standard deviations of the effects of seeds, documents and their combinations with arms
SEED_STD, DOCUMENT_STD, ARM_DOCUMENT_STD, ARM_SEED_DOCUMENT_STD = 0.01, 0.3, 0.02, 0.02
N_DOCUMENTS = 24


class TrueDifference(NamedTuple):
    """This is an arm's true difference to the baseline, on the experiment's text and over all texts.

    `rates_differ`: whether tuning chose another learning rate for the arm than for the baseline.
    """

    on_text: float
    over_texts: float
    rates_differ: bool


SizeAndArm = tuple[str, str]
TrueDifferences = dict[SizeAndArm, TrueDifference]
CoverageByComparison = np.ndarray


@dataclass(frozen=True)
class World:
    """A world holds the true effects and the noise of simulated experiments, in nats per token.

    All numbers are standard deviations, except `effects`, `octaves_from_central_rate`, `curvature`, `bad_run_chance`
    and counts.
    """

    name: str
    n_seeds: int
    effects: tuple[float, ...] = (0.0,)  # each arm's difference to the baseline, both at their best rates
    # log2(rate / CENTRAL_RATE) of each arm's best learning rate, the baseline's first; empty: all are 0
    octaves_from_central_rate: tuple[float, ...] = ()
    curvature: float = 0.02  # increase of the loss one octave (of learning rate) from the best rate
    arm_seed_std: float = 0.008  # of the effects of arm x rate x seed
    # whether effects of arm x document sum to 0 over the report text: arms that are equal are equal on it, too
    arm_document_effects_cancel: bool = False
    has_heavy_tails: bool = False  # noise is Student's t with 4 degrees of freedom
    bad_run_chance: float = 0.0  # the chance that an exponential amount is added to the loss of a run at 4e-3 or more
    is_tuned: bool = True  # False: all arms at 4e-3
    n_model_sizes: int = 1  # each with a baseline of its own; `effects` are those of every size

    @property
    def seed_prefix(self) -> tuple[int, ...]:
        """Return the first numbers of the random seeds of its trials; each trial appends its index."""
        return *self.name.encode(), self.n_seeds

    @property
    def arms(self) -> list[str]:
        """Return the names of the arms, the baseline first."""
        return ["base", *(f"arm {number}" for number in range(len(self.effects)))]

    def draw_noise(self, random: np.random.Generator, scale: float, *shape: int) -> np.ndarray:
        """Return noise of the given shape with the standard deviation `scale`."""
        return scale * (
            random.standard_t(4, shape) / math.sqrt(2) if self.has_heavy_tails else random.standard_normal(shape)
        )

    def expected_loss(self, arm: int, rate: float) -> float:
        """Return the mean loss of an arm at a learning rate."""
        added = self.bad_run_chance * BAD_RUN_MEAN_LOSS if rate >= BAD_RUN_MIN_RATE else 0.0
        distance = math.log2(rate / CENTRAL_RATE) - (self.octaves_from_central_rate or (0.0,) * len(self.arms))[arm]
        return 4 + (0.0, *self.effects)[arm] + self.curvature * distance**2 + added

    def run_noise(self, random: np.random.Generator, rate: float, seeds: int) -> np.ndarray:
        """Return the noise (seeds,) of mean 0 of an arm's runs at a learning rate."""
        noise = self.draw_noise(random, self.arm_seed_std, seeds)
        if self.bad_run_chance and rate >= BAD_RUN_MIN_RATE:
            is_unlucky = random.random(seeds) < self.bad_run_chance
            noise += is_unlucky * random.exponential(BAD_RUN_MEAN_LOSS, seeds) - self.bad_run_chance * BAD_RUN_MEAN_LOSS
        return noise

    def draw_experiment(self, random: np.random.Generator) -> tuple[pd.DataFrame, Question, TrueDifferences]:
        """Return a random experiment: its final runs, the question asked of them, and the arms' true differences to the
        baseline.
        """
        runs_by_size = {str(size): _simulate_model_size(self, random) for size in range(self.n_model_sizes)}
        frames = {size: pd.concat(blocks) for size, (blocks, *_) in runs_by_size.items()}
        frame = pd.concat(frames, names=["size"]).reset_index("size")
        rates = {size: rates for size, (_, rates, _) in runs_by_size.items()}
        primary = PrimaryMetric("loss", "lower", MATTERS)
        truths = {(size, arm): truth for size, (*_, by_arm) in runs_by_size.items() for arm, truth in by_arm.items()}
        return frame, Question(primary, tuple(self.arms), tuple(range(self.n_seeds)), rates), truths


def _simulate_model_size(
    world: World, random: np.random.Generator
) -> tuple[list[pd.DataFrame], dict[str, Rate], dict[str, TrueDifference]]:
    """Return the final runs of one model size, the rate at which each arm is judged, and the arms' true differences."""
    seeds, draw = world.n_seeds, partial(world.draw_noise, random)
    # tuning, by the mean over the selection text, whose documents are the same at every rate and seed
    shared, half = draw(SEED_STD, 2), math.sqrt(N_DOCUMENTS / 2)
    shifts = draw(ARM_DOCUMENT_STD / half, len(world.arms))
    losses: dict[str, dict[float, list[float]]] = {arm: {} for arm in world.arms}
    tuned, missing = ({}, RATE_GRID) if world.is_tuned else (dict.fromkeys(world.arms, 4e-3), ())
    while missing:
        for rate, (number, arm) in product(missing, enumerate(world.arms)):
            mean = world.expected_loss(number, rate) + shifts[number]
            losses[arm][rate] = list(mean + shared + world.run_noise(random, rate, 2))
        tuned, missing = tuned_rates(RATE_GRID, losses)
    crossed = final_run_rates("base", tuned)
    # final runs: by document on the text that reports, and their means on the text that selects
    by_seed, by_document = draw(SEED_STD, seeds, 1), draw(DOCUMENT_STD, N_DOCUMENTS)
    blocks, judged, true = [], {}, {}
    for number, arm in enumerate(world.arms):
        if arm not in crossed:  # tuning found no rate for it
            continue
        on_text = draw(ARM_DOCUMENT_STD, N_DOCUMENTS)
        if world.arm_document_effects_cancel:
            on_text -= on_text.mean()
        values, selected = {}, {}
        for rate in crossed[arm]:
            noise, mean = world.run_noise(random, rate, seeds)[:, None], world.expected_loss(number, rate)
            values[rate] = (
                mean + noise + draw(ARM_SEED_DOCUMENT_STD, seeds, N_DOCUMENTS) + by_seed + by_document + on_text
            )
            rest = draw(ARM_SEED_DOCUMENT_STD / half, seeds)
            selected[rate] = list(mean + by_seed[:, 0] + noise[:, 0] + shifts[number] + rest)
        judged[arm] = best_rate(selected, crossed[arm])
        best = min(world.expected_loss(number, rate) for rate in crossed[arm])
        true[arm] = best + on_text.mean(), best
        random.random(seeds)  # so that draws are those of the committed tables, in which runs could also be lost
        units = dict(zip(("seed", "group"), map(np.ravel, np.indices((seeds, N_DOCUMENTS))), strict=True))
        blocks += [
            pd.DataFrame({"arm": arm, "rate": rate, "value": values[rate].ravel(), **units, **CONSTANT_RUN_COLUMNS})
            for rate in values
        ]
    compared = [arm for arm in true if "base" in true and arm != "base"]
    return (
        blocks,
        judged,
        {arm: TrueDifference(*np.subtract(true[arm], true["base"]), tuned[arm] != tuned["base"]) for arm in compared},
    )


def is_false_verdict(kind: VerdictKind, truth: float, matters: float = MATTERS) -> bool:
    """Return whether a verdict is wrong about a true difference, for a metric of which lower values are better."""
    is_large, rounding = abs(truth) >= matters - 1e-12, 1e-12
    wrong = {
        "better": truth > -rounding, "worse": truth < rounding, "no difference above margin": is_large,
        "difference below margin": is_large or abs(truth) < rounding,
    }  # fmt: skip
    return wrong.get(kind, False)


def simulate_trials(world: "World | AwkwardWorld", trials: range) -> tuple[Counter[str], CoverageByComparison]:
    """Return counts of trials, and whether the interval of each comparison holds the true difference.

    The counts give, for each kind of verdict, the trials in which at least one comparison has it. `false` counts trials
    with a false verdict, `together` trials whose intervals all hold the truth.

    The coverage, (comparisons of all trials, 3), is of zeros and ones. The first column says whether a comparison's
    interval over seeds, by itself, holds the truth. The second says so of its interval over seeds and documents (NaN
    without documents). The third says whether tuning chose another rate for the arm than for the baseline.
    """
    counts, coverage = Counter(), []
    for trial in trials:
        frame, question, truths = world.draw_experiment(np.random.default_rng((*world.seed_prefix, trial)))
        judgement, hold, has_false_verdict = judge(frame, question), True, False
        for name, (text, population, differ) in truths.items():
            verdict, comparison = judgement.verdicts[name], judgement.comparisons[name]
            lower_truth = text if question.primary_metric.better == "lower" else -text
            has_false_verdict |= is_false_verdict(verdict.kind, lower_truth, question.primary_metric.matters)
            if not comparison.obstacle:
                documents = comparison.seed_and_document_estimate
                wide = comparison.interval_ends(ALPHA, documents) if documents else None
                ends = [interval.as_list()[1:] for interval in (verdict.unadjusted_interval, verdict.interval)]
                alone, together = (low - 1e-12 <= text <= high + 1e-12 for low, high in ends)
                coverage.append((alone, wide[0] <= population <= wide[1] if wide else math.nan, differ))
                hold &= together
        counts.update({verdict.kind for verdict in judgement.verdicts.values()})
        counts.update({"false": has_false_verdict, "together": hold})
    return counts, np.array(coverage, dtype=float).reshape(-1, 3)


def print_table(worlds: "list[World | AwkwardWorld]", trials: int, jobs: int) -> None:
    """Print a CSV line for each world. It has the percentage of intervals that hold, and the percentage of experiments
    with each kind of verdict."""
    counted = "together", "false", *get_args(VerdictKind)
    print("simulated experiments,seeds,over seeds,seeds and documents,rates differ", *counted, sep=",")
    pieces = [range(start, min(start + 250, trials)) for start in range(0, trials, 250)]
    with ProcessPoolExecutor(jobs) as pool:
        for world in worlds:
            counts, coverage = zip(*pool.map(partial(simulate_trials, world), pieces), strict=True)
            fractions = [np.nanmean(column) for column in np.concatenate(coverage).T]
            fractions += [sum(some[kind] for some in counts) / trials for kind in counted]
            print(f'"{world.name}",{world.n_seeds}', *(f"{100 * part:.1f}" for part in fractions), sep=",", flush=True)


def all_worlds() -> list[World]:
    """Return worlds with equal arms, with plain and awkward noise, and with arms that differ by what matters."""
    untuned: dict[str, object] = {"is_tuned": False}
    noisy = untuned | {"arm_seed_std": 0.02}
    changes = {
        "4 equal arms": {},
        "4 equal arms, heavy tails": {"has_heavy_tails": True},
        "4 equal arms, nearly flat over rates": {"curvature": 0.002},
        "4 equal arms of different best rates": {"octaves_from_central_rate": (0.0, 0.5, -0.5, 0.3, 1.0)},
        "4 equal arms that differ by text, heavy tails": {
            "arm_document_effects_cancel": False,
            "has_heavy_tails": True,
        },
        "4 equal arms, a fifth of runs unlucky by 0.1": {
            "bad_run_chance": 0.2,
            "curvature": 0.05,
            "octaves_from_central_rate": (0.4,) * 5,
        },
        "4 equal arms, noise as under AdamW": {"arm_seed_std": 0.03},
        "4 equal arms, not tuned, heavy tails": untuned | {"has_heavy_tails": True},
        "2 equal arms in 3 sizes, not tuned": untuned | {"n_model_sizes": 3, "effects": (0.0,) * 2},
        f"4 arms worse by exactly {MATTERS:g}, not tuned": untuned | {"effects": (MATTERS,) * 4},
        f"1 arm better by {MATTERS:g}": {"effects": (-MATTERS,)},
        "1 arm equal, not tuned, noise as under AdamW": noisy | {"effects": (0.0,)},
        f"1 arm better by {MATTERS:g}, not tuned, noise as under AdamW": noisy | {"effects": (-MATTERS,)},
    }
    plain = World("", 0, (0.0,) * 4, arm_document_effects_cancel=True)
    return [replace(plain, name=name, n_seeds=seeds, **some) for seeds in (3, 5, 10) for name, some in changes.items()]


# ---------------------------------------------------------------- awkward distributions


def _accuracies_with_failures(chance: float) -> DrawFunction:
    """Return a distribution of accuracies near 1 in steps of 1/128, which are 0 with the given chance."""

    def draw(random: np.random.Generator, *shape: int) -> np.ndarray:
        accuracies = (
            1 - np.round(np.abs(random.normal(0, 0.01, shape)) * QUESTIONS_PER_ACCURACY) / QUESTIONS_PER_ACCURACY
        )
        return np.where(random.random(shape) < chance, 0.0, accuracies)

    return draw


def _normal_noise(mean: float, deviation: float) -> DrawFunction:
    """Return a normal distribution."""
    return lambda random, *shape: mean + random.normal(0, deviation, shape)


def _lognormal_noise(log_std: float, mean_before_shift: float, shift: float = 0.0) -> DrawFunction:
    """Return a function that draws one-sided noise: `shift` plus log-normal values with the mean `mean_before_shift`.
    Most results are near `shift`, and a few are far above. log_std: standard deviation of the logarithm."""
    return lambda random, *shape: mean_before_shift * random.lognormal(-(log_std**2) / 2, log_std, shape) + shift


def _accuracies_of_8_questions(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw accuracies of 8 questions, on which seeds often agree."""
    return random.binomial(8, 0.97, shape) / 8


_LOGNORMAL_SCALE = 0.01 / math.sqrt(math.expm1(1))
_ZERO_MEAN_LOGNORMAL_NOISE = _lognormal_noise(1, _LOGNORMAL_SCALE, -_LOGNORMAL_SCALE)  # of standard deviation 0.01
_MEAN_WITHOUT_FAILURE = 1 - 0.01 * math.sqrt(2 / math.pi)  # the mean of an accuracy that does not fail, about


class AwkwardDistribution(NamedTuple):
    """It holds functions that draw values of runs of the baseline and of the arms, and the arms' mean difference to the
    baseline."""

    draw_baseline: DrawFunction
    draw_arm: DrawFunction
    mean_difference: float
    is_accuracy: bool


AWKWARD_DISTRIBUTIONS: dict[str, AwkwardDistribution] = {
    "equal accuracies, all arms fail in 29 % of seeds": AwkwardDistribution(
        _accuracies_with_failures(0.29),
        _accuracies_with_failures(0.29),
        0.0,
        True,
    ),
    "arms fail in 29 % of seeds, the baseline never": AwkwardDistribution(
        _accuracies_with_failures(0.0),
        _accuracies_with_failures(0.29),
        -0.29 * _MEAN_WITHOUT_FAILURE,
        True,
    ),
    "arms fail in 25.2 % of seeds, the baseline never": AwkwardDistribution(
        _accuracies_with_failures(0.0),
        _accuracies_with_failures(0.252),
        -0.25,
        True,
    ),
    "equal accuracies near 1": AwkwardDistribution(
        _accuracies_with_failures(0.0), _accuracies_with_failures(0.0), 0.0, True
    ),
    "equal accuracies of 8 questions, ties": AwkwardDistribution(
        _accuracies_of_8_questions, _accuracies_of_8_questions, 0.0, True
    ),
    "equal losses, one-sided noise (lognormal, sigma 1)": AwkwardDistribution(
        _ZERO_MEAN_LOGNORMAL_NOISE, _ZERO_MEAN_LOGNORMAL_NOISE, 0.0, False
    ),
    "equal losses, the arms' noise one-sided (sigma 1)": AwkwardDistribution(
        _normal_noise(0.0, 0.01), _ZERO_MEAN_LOGNORMAL_NOISE, 0.0, False
    ),
    "arms worse by 0.02 through rare high losses (sigma 2)": AwkwardDistribution(
        _normal_noise(0.0, 0.001),
        _lognormal_noise(2, MATTERS),
        MATTERS,
        False,
    ),
    "equal losses": AwkwardDistribution(_normal_noise(0.0, 0.01), _normal_noise(0.0, 0.01), 0.0, False),
    f"arms better by {MATTERS:g}": AwkwardDistribution(
        _normal_noise(0.0, 0.01), _normal_noise(-MATTERS, 0.01), -MATTERS, False
    ),
}


@dataclass(frozen=True)
class AwkwardWorld:
    """An awkward world has arms without tuning, whose runs have a distribution of `AWKWARD_DISTRIBUTIONS`."""

    distribution: str  # key of `AWKWARD_DISTRIBUTIONS`
    arms: int
    n_seeds: int
    is_unpaired: bool

    @property
    def name(self) -> str:
        """Return the name that the printed table shows."""
        return f"{self.distribution}, {'unpaired' if self.is_unpaired else 'paired'}, {self.arms} arms"

    @property
    def seed_prefix(self) -> tuple[int, ...]:
        """Return the first numbers of the random seeds of its trials; each trial appends its index."""
        return *self.distribution.encode(), self.arms, self.n_seeds, self.is_unpaired

    def draw_experiment(self, random: np.random.Generator) -> tuple[pd.DataFrame, Question, TrueDifferences]:
        """Return a random experiment: its final runs, the question asked of them, and the arms' true differences to the
        baseline.
        """
        draw_baseline, draw_arm, truth, is_accuracy = AWKWARD_DISTRIBUTIONS[self.distribution]
        values, arms = draw_arm(random, self.arms, self.n_seeds), [f"arm {number}" for number in range(self.arms)]
        values = np.concatenate([draw_baseline(random, 1, self.n_seeds), values])
        columns = {
            "arm": np.repeat(["base", *arms], self.n_seeds),
            "seed": np.tile(np.arange(self.n_seeds), len(values)),
        }
        constants = {"size": "", "rate": None, "group": None, **CONSTANT_RUN_COLUMNS}
        frame = pd.DataFrame({**columns, "value": values.ravel(), **constants})
        primary = PrimaryMetric("value", *(("higher", 0.25) if is_accuracy else ("lower", MATTERS)))
        rates = {"": dict.fromkeys(["base", *arms])}
        question = Question(
            primary, ("base", *arms), tuple(range(self.n_seeds)), rates, unpaired_with_baseline=self.is_unpaired
        )
        return frame, question, {("", arm): TrueDifference(truth, truth, False) for arm in arms}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", action="store_true")
    arguments = parser.parse_args()
    awkward = [AwkwardWorld(*case) for case in product(AWKWARD_DISTRIBUTIONS, (1, 4), (5, 11, 20), (False, True))]
    print_table(awkward if arguments.seeds else all_worlds(), arguments.trials, arguments.jobs)
