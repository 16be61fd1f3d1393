"""The procedure of docs/statistics.md simulated: how often its intervals cover the truth, and how often its verdicts are false.

python scripts/simulate_verdicts.py [--trials 10000] [--jobs 2]
python scripts/simulate_verdicts.py --learned           of metrics that a run has learned or not: the chance of each verdict
python scripts/simulate_verdicts.py --intervals         intervals over documents, beside those of the percentile bootstrap

Each trial is an experiment as `lm.statistics` judges it: every arm tuned on a grid of four learning rates with two seeds, the grid grown
where the best is at an edge, then trained with further seeds, at the rates of `crossed_rates`, and judged by
`verdicts`. A final loss is: the arm's curve over log2(rate), plus effects of the seed (shared by arms, as seeds share the order of data),
of arm x rate x seed, of the document, of arm x document and of arm x seed x document. What is drawn can have heavy tails (Student t with 4
degrees of freedom) and differ in variance between arms; from 4e-3 on runs can be unlucky, each with a chance of its own: an exponential
amount is added to their loss.
"""

import argparse
import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.stats import binom

from lm.statistics.intervals import Interval, effective_trials, mean_ends, over_seeds_and_documents, wilson
from lm.statistics.learned import Learned, learned_verdicts
from lm.statistics.tuning import Tuned, best_rate, crossed_rates, elsewhere, tuned
from lm.statistics.verdicts import Comparison, enclosing, seeds_needed, verdicts

GRID = (1e-3, 2e-3, 4e-3, 8e-3)
MATTERS = 0.02  # nats per token
UNLUCKY_FROM = 4e-3


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
    equal_on_text: bool = False  # effects of arm x document cancel over the report text: arms that are equal are equal on it, too
    heavy: bool = False
    unequal: bool = False  # the noise of arms twice that of the baseline, and documents of unequal length
    unlucky: float = 0.0  # the chance that a run at 4e-3 or more is
    unlucky_by: float = 0.1  # the mean of what it loses by that
    growing: bool = False  # arm_seed grows in proportion to the rate: it is what is said at 1e-3


def simulated(world: World, trial: int) -> tuple[list[str], list[tuple[bool, bool, bool]]]:
    """One experiment: each arm's verdict, and whether its intervals hold the truth: over seeds; over seeds and documents (or none is made);
    and whether tuning chose different rates for the two."""
    random = np.random.default_rng((*world.name.encode(), world.seeds, trial))

    def draw(scale: float, *shape: int) -> np.ndarray:
        return scale * (random.standard_t(4, shape) / math.sqrt(2) if world.heavy else random.standard_normal(shape))

    arms = ["base", *(f"arm {number}" for number in range(len(world.effects)))]
    effects, optima = (0.0, *world.effects), world.optima or (0.0,) * len(arms)
    noise = [1.0, *(2.0 if world.unequal else 1.0 for _ in world.effects)]

    def expected(arm: int, rate: float) -> float:
        unlucky = world.unlucky * world.unlucky_by if rate >= UNLUCKY_FROM else 0.0
        return 4 + effects[arm] + world.curvature * (math.log2(rate / 3e-3) - optima[arm]) ** 2 + unlucky

    def of_runs(arm: int, rate: float, seeds: int) -> np.ndarray:
        """What the runs of an arm at a rate have for themselves, of mean 0."""
        own = draw(noise[arm] * world.arm_seed * (rate / 1e-3 if world.growing else 1.0), seeds)
        if world.unlucky and rate >= UNLUCKY_FROM:
            own += (random.random(seeds) < world.unlucky) * random.exponential(world.unlucky_by, seeds) - world.unlucky * world.unlucky_by
        return own

    # Tuning: the mean over the selection text, whose documents are the same at every rate and seed.
    shared, shift = draw(world.seed, 2), draw(world.arm_document / math.sqrt(world.documents / 2), len(arms))
    losses: dict[str, dict[float, list[float]]] = {arm: {} for arm in arms}
    choice = Tuned({}, GRID)
    while choice.missing:
        for rate in choice.missing:
            for number, arm in enumerate(arms):
                losses[arm][rate] = list(expected(number, rate) + shift[number] + shared + of_runs(number, rate, 2))
        choice = tuned(GRID, losses)

    # The final seeds, at each rate that an arm is trained at: on the text that reports by document, on that which selects the mean.
    weights = random.lognormal(0, 0.6, world.documents) if world.unequal else np.ones(world.documents)
    weights /= weights.sum()
    by_seed, by_document = draw(world.seed, world.seeds, 1), draw(world.document, world.documents)
    crossed, values, means, truth, place = crossed_rates("base", choice.rates), {}, {}, {}, {}
    for number, arm in enumerate(arms):
        if arm not in crossed:
            continue
        on_text = draw(world.arm_document, world.documents)
        if world.equal_on_text:
            on_text -= weights @ on_text
        values[arm], selected, best = np.empty((len(crossed[arm]), world.seeds, world.documents)), {}, math.inf
        for of_rate, rate in zip(values[arm], crossed[arm], strict=True):
            own, at = of_runs(number, rate, world.seeds)[:, None], expected(number, rate)
            of_rate[:] = at + own + draw(noise[number] * world.arm_seed_document, world.seeds, world.documents)
            rest = draw(noise[number] * world.arm_seed_document / math.sqrt(world.documents / 2), world.seeds)
            selected[rate], best = list(at + by_seed[:, 0] + own[:, 0] + shift[number] + rest), min(best, at)
        values[arm] += by_seed + by_document + on_text
        means[arm], truth[arm] = values[arm] @ weights, np.array([best, best + weights @ on_text])
        place[arm] = crossed[arm].index(best_rate(selected, crossed[arm]))

    judged = [arm for arm in arms[1:] if {arm, "base"} <= values.keys()]
    comparisons, covered = {arm: Comparison((), tuned=False) for arm in arms[1:]}, []
    for arm in judged:
        tried = {one: dict(losses[one]) for one in (arm, "base")}
        for one in tried if len(crossed[arm]) > 1 else ():
            tried[one].update((rate, some) for rate, some in zip(crossed[one], means[one], strict=True) if rate in crossed[arm])
        order = sorted(range(len(crossed["base"])), key=lambda at: crossed["base"][at] not in crossed[arm])  # those of both come first
        shared, pair = sum(rate in crossed[arm] for rate in crossed["base"]), (place[arm], order.index(place["base"]))
        by_rates = means[arm][:, None] - means["base"][order]  # (the arm's rates, the baseline's, seeds)
        other = elsewhere(arm, "base", choice.rates, tried)
        comparisons[arm] = Comparison(by_rates[pair], by_rates=by_rates, place=pair, shared=shared, elsewhere=other)
        population, text = truth[arm] - truth["base"]
        differences = values[arm][:, None] - values["base"][order]
        over_both = over_seeds_and_documents(differences, weights, np.arange(world.documents))
        held = _holds(comparisons[arm].interval, text), _holds(enclosing(over_both, pair, False, shared), population)
        covered.append((*held, choice.rates[arm] != choice.rates["base"]))
    return [one.kind for one in verdicts(comparisons, MATTERS, "lower").values()], covered


def _holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


def many(world: World, trials: range) -> tuple[Counter, np.ndarray]:
    """Of many trials: how many had each verdict on any arm; and, as `simulated` gives them, how often intervals held and rates differed,
    with the number of intervals last, (4,)."""
    some, covered = Counter(), []
    for trial in trials:
        kinds, held = simulated(world, trial)
        some.update(set(kinds))
        covered += held
    return some, np.array([*np.sum(covered, 0), len(covered)])


def report(worlds: list[World], trials: int, jobs: int) -> None:
    """Print a table, one line a world."""
    kinds = ("better", "worse", "different but below what matters", "equivalent", "not resolved", "depends on the rate", "not tuned")
    print(f"{trials} experiments a line; % of experiments with such a verdict on any arm; coverage in % of intervals\n")
    print("| world | seeds | over seeds | over seeds and documents | rates differ | " + " | ".join(kinds) + " |")
    print("|---|" + "---:|" * (4 + len(kinds)))
    with ProcessPoolExecutor(jobs) as pool:
        for world in worlds:
            pieces = [range(start, min(start + 250, trials)) for start in range(0, trials, 250)]
            found = list(pool.map(many, [world] * len(pieces), pieces))
            some, (seeds, both, differ, n) = sum((one[0] for one in found), Counter()), sum(one[1] for one in found)
            cells = [f"{100 * count / n:.1f}" for count in (seeds, both, differ)] + [f"{100 * some[kind] / trials:.1f}" for kind in kinds]
            print(f"| {world.name} | {world.seeds} | " + " | ".join(cells) + " |", flush=True)


def all_worlds() -> list[World]:
    """Equal arms with plain and with awkward noise, and arms that differ by what matters."""
    worlds = []
    for seeds in (3, 5, 10):
        plain = World("4 equal arms", seeds, (0.0,) * 4, equal_on_text=True)
        unlucky = replace(plain, unlucky=0.2, curvature=0.05, optima=(0.4,) * 5)
        worlds += [
            plain,
            replace(plain, name="4 equal arms, heavy tails", heavy=True),
            replace(plain, name="4 equal arms, heavy tails, unequal variances", heavy=True, unequal=True),
            replace(plain, name="4 equal arms, nearly flat over rates", curvature=0.002),
            replace(plain, name="4 equal arms of different best rates", optima=(0.0, 0.5, -0.5, 0.3, 1.0)),
            replace(plain, name="4 equal arms that differ by text", equal_on_text=False),
            replace(plain, name="4 equal arms that differ by text, heavy, unequal", equal_on_text=False, heavy=True, unequal=True),
            replace(unlucky, name="4 equal arms, a fifth of runs unlucky by 0.1"),
            replace(unlucky, name="4 equal arms, a fifth of runs unlucky by 0.2", unlucky_by=0.2),
            replace(unlucky, name="4 equal arms, noise grows with the rate", unlucky=0.0, growing=True),
            replace(plain, name=f"1 arm better by {MATTERS:g}", effects=(-MATTERS,)),
            replace(unlucky, name="1 arm better by 0.05, a fifth of runs unlucky by 0.1", effects=(-0.05,), optima=(0.4,) * 2),
        ]
    spread = math.sqrt(2 * (0.008**2 + 0.02**2 / 24))
    planned = World(f"1 arm better by {MATTERS:g}, planned", seeds_needed(spread, MATTERS), (-MATTERS,), equal_on_text=True)
    return [*worlds, planned, replace(planned, name=f"{planned.name}, best rate on the grid", optima=(0.4, 0.4))]


def report_intervals(trials: int) -> None:
    """Print how often intervals hold the truth. Over documents: `mean_ends`, and the percentile bootstrap with 1,000 resamples. Of
    fractions over sequences that ask several questions: Wilson's of `effective_trials`, and of all questions as if independent."""
    random = np.random.default_rng(0)
    print("| documents | their lengths | coverage, % | percentile bootstrap, % |\n|---:|---|---:|---:|")
    for documents, spread in ((4, 0.0), (4, 0.6), (8, 0.0), (8, 0.6), (20, 0.0), (20, 0.6)):
        covered = np.zeros(2)
        for _ in range(trials):
            weights = random.lognormal(0, spread, documents)
            values = 0.1 + 0.1 * random.standard_normal(documents) + 0.05 * random.standard_normal(documents) / np.sqrt(weights)
            low, high = mean_ends(values[:, None], weights)
            drawn = random.integers(0, documents, (1000, documents))
            means = (weights[drawn] * values[drawn]).sum(1) / weights[drawn].sum(1)
            covered += low[0] <= 0.1 <= high[0], np.quantile(means, 0.025) <= 0.1 <= np.quantile(means, 0.975)
        lengths = f"log-normal, sigma {spread:g}" if spread else "equal"
        print(f"| {documents} | {lengths} | " + " | ".join(f"{100 * fraction:.1f}" for fraction in covered / trials) + " |", flush=True)
    correlations = (0.0, 0.1, 0.4, 0.8)
    print("\n| sequences | questions in each | right | " + " | ".join(f"correlation {one:g}" for one in correlations) + " |")
    print("|---:|---:|---:|" + "---:|" * len(correlations))
    for sequences, size, chance in product((8, 32, 128), (1, 8), (0.5, 0.95)):
        cells = []
        for correlation in correlations[: len(correlations) if size > 1 else 1]:
            covered, asked = np.zeros(2), np.full(sequences, size)
            for _ in range(trials):
                rest = 1 / correlation - 1 if correlation else math.inf  # sum of the beta distribution's parameters
                chances = random.beta(chance * rest, (1 - chance) * rest, sequences) if correlation else chance
                right = random.binomial(size, chances, sequences)
                for column, number in enumerate((effective_trials(right, asked), asked.sum())):
                    found = wilson(right.sum() / asked.sum() * number, number)
                    covered[column] += found.low <= chance <= found.high
            cells.append(", ".join(f"{100 * fraction:.1f}" for fraction in covered / trials))
        print(f"| {sequences} | {size} | {chance:g} | {' | '.join(cells + [''] * (len(correlations) - len(cells)))} |", flush=True)


def report_learned() -> None:
    """Print the chances of `better` and `worse` of one arm, in % and exact: the numbers of both arms' runs that learn are binomial."""
    chances = [(0.5, 0.5), (0.9, 0.9), (0.5, 0.9), (0.2, 0.9), (0.0, 0.9), (0.0, 1.0)]
    print("| seeds | " + " | ".join(f"{base:g} and {arm:g}" for base, arm in chances) + " |")
    print("|---:|" + "---:|" * len(chances))
    for seeds in (4, 5, 6, 8, 10, 15, 20):
        cells = []
        for base, arm in chances:
            kinds: Counter = Counter()
            for theirs, ours in product(range(seeds + 1), repeat=2):
                found = learned_verdicts({"arm": Learned(ours, seeds, theirs, seeds, planned=seeds)})["arm"]
                kinds[found.kind] += binom.pmf(theirs, seeds, base) * binom.pmf(ours, seeds, arm)
            cells.append(f"{100 * kinds['better']:.1f}, {100 * kinds['worse']:.1f}")
        print(f"| {seeds} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--learned", action="store_true")
    parser.add_argument("--intervals", action="store_true")
    arguments = parser.parse_args()
    if arguments.learned:
        report_learned()
    elif arguments.intervals:
        report_intervals(arguments.trials)
    else:
        report(all_worlds(), arguments.trials, arguments.jobs)
