"""The verdicts of docs/statistics.md on a long table of runs, whoever trained them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
import pandas as pd

from lm.errors import RunError, one_line
from lm.experiments.experiment import Primary
from lm.runs.folder import DIVERGED
from lm.schema import Plain
from lm.statistics.intervals import ALPHA, Interval, over_seeds_and_documents
from lm.statistics.learned import Counts, LearnedCounts, clopper_pearson, factor, has_learned, learned_verdicts, log_tokens
from lm.statistics.tuning import FEWEST_TUNING_SEEDS, Rate, best_rate, chosen, coordinates, rate_cell, rate_words, read_rate
from lm.statistics.verdicts import FEWEST_SEEDS, MOST_SEEDS, POWER, Comparison, Verdict, power, seeds_needed, verdicts

_RUN = ["size", "arm", "rate", "seed"]
JUDGED_COLUMNS = (*_RUN, "state", "note", "sample", "group", "weight", "value")
Place = tuple[str, str]  # size and arm
Pair = tuple[Rate | None, Rate | None]  # the rates of an arm and of the baseline


@dataclass(frozen=True)
class Question:
    """The question that a table of runs answers.

    Attributes:
        primary: the metric, which direction is better, and the smallest difference of interest.
        arms: their names, the baseline first.
        seeds: planned for each arm.
        rates: by size, the rate that each arm is judged at; an arm without one is not tuned. None: not known yet.
        every: rates were chosen by another metric (`lm.statistics.verdicts.Comparison`).
        looks: how often the data may be judged.
        sources: by arm that starts from the weights of others, their names.
        exploratory: by size and arm, why its verdict is exploratory.
        key: heading of the rates.
        measured_on: heading of the means.
    """

    primary: Primary
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: Mapping[str, Mapping[str, Rate | None] | None]
    every: bool = False
    looks: int = 1
    sources: Mapping[str, list[str]] = field(default_factory=dict)
    exploratory: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    key: str = "rate"
    measured_on: str = ""

    @property
    def places(self) -> list[Place]:
        """Each size with each arm but the baseline."""
        return [*product(self.rates, self.arms[1:])]


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """A run in the table.

    Attributes:
        state: finished, unfinished or diverged.
        note: how it diverged, or of a finished run that it did not learn, in words.
        values, weights: (units,).
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


class Judged:
    """The verdicts that a table gives on a question.

    Args:
        table: one value a line, with `COLUMNS`. `value` is the metric of a unit, or with `primary.reach` the tokens of a run; the first
            rate of an arm is the one that tuning chose. Every arm has every seed at each of its rates.
    """

    def __init__(self, table: pd.DataFrame, question: Question):
        self.table, self.question = table, question
        by_seed: dict[Place, dict[Rate | None, dict[int, JudgedRun]]] = {}
        for (size, arm, rate, seed), lines in table.groupby(_RUN, sort=False, dropna=False):
            runs = by_seed.setdefault((size, arm), {}).setdefault(None if pd.isna(rate) else read_rate(rate), {})
            first, groups = lines.iloc[0], lines["group"]
            known = None if groups.isna().any() else groups.to_numpy()
            values, weights = (lines[name].to_numpy(float) for name in ("value", "weight"))
            runs[seed] = JudgedRun(arm, first["state"], first["note"], values, weights, known)
        self.runs = {
            place: {rate: [runs[seed] for seed in question.seeds] for rate, runs in by_rate.items()} for place, by_rate in by_seed.items()
        }

    @cached_property
    def verdicts(self) -> dict[Place, Verdict]:
        """The verdict on each arm but the baseline, in each size; with `primary.reach` the interval is of the factor."""
        question, primary = self.question, self.question.primary
        if primary.learned is not None:
            judged = learned_verdicts({place: self.counted(*place) for place in question.places}, question.looks)
        else:
            ratio = primary.reach is not None
            judged = verdicts(self.comparisons, primary.matters, "lower" if ratio else primary.better, ratio, question.looks)
            if ratio:
                judged = {place: replace(each, interval=factor(each.interval), alone=factor(each.alone)) for place, each in judged.items()}
        return {
            place: replace(each, exploratory=question.exploratory.get(place, ()), reason=each.reason + self._not_learned(*place))
            for place, each in judged.items()
        }

    @cached_property
    def comparisons(self) -> dict[Place, Comparison]:
        """The comparison that runs so far give of each arm against the baseline, in each size."""
        return {place: self._compared(*place) for place in self.question.places}

    def judged_runs(self, size: str, arm: str) -> list[JudgedRun]:
        """The runs of an arm at the rate that it is judged at, by seed; none where it has no rate."""
        rates = self.question.rates[size] or {}
        return self.runs[size, arm][rates[arm]] if arm in rates else []

    def _compared(self, size: str, arm: str) -> Comparison:
        question, rates, primary = self.question, self.question.rates[size], self.question.primary
        planned, base, reach = len(question.seeds), question.arms[0], primary.reach is not None
        if rates is None:
            return Comparison((), planned=planned)
        if not {arm, base} <= rates.keys():
            return Comparison((), tuned=False)
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
        seeds = [seed for seed in range(planned) if all(run.state == "finished" for run in _of_seed(seed, ours, theirs))]
        ours, theirs = ({rate: [runs[seed] for seed in seeds] for rate, runs in by_rate.items()} for by_rate in (ours, theirs))
        place, unreached, over_documents = ([*ours].index(at[0]), [*theirs].index(at[1])), "", None
        shared = None if arm in question.sources or diverged else sum(rate in tried for rate in theirs) or None  # each has rates of its own
        by_rates = _differences(ours, theirs, lambda run: log_tokens(run.value) if reach else run.value)
        shown = by_rates[place]
        if reach:
            unreached = self._unreached([run for by_rate in (ours, theirs) for runs in by_rate.values() for run in runs])
            shown = shown[np.isfinite(shown)]
        elif seeds:
            first = next(iter(ours.values()))[0]
            values = _differences(ours, theirs, lambda run: run.values) if first.groups is not None else None
            over_documents = None if values is None else over_seeds_and_documents(values, first.weights, first.groups)
        higher = not reach and primary.better == "higher"
        return Comparison(
            shown.tolist(), len(diverged), None if unreached else by_rates, place, shared, question.every, higher,
            planned=planned, why=why, over_documents=over_documents, unreached=unreached,
        )  # fmt: skip

    def counted(self, size: str, arm: str) -> LearnedCounts:
        """How many of the runs so far have learned, of an arm and of the baseline."""
        question, rates = self.question, self.question.rates[size]
        planned, base, primary = len(question.seeds), question.arms[0], self.question.primary
        if rates is None:
            return LearnedCounts(0, 0, 0, 0, planned=planned)
        if not {arm, base} <= rates.keys():
            return LearnedCounts(0, 0, 0, 0, tuned=False)
        at, (ours, theirs) = (rates[arm], rates[base]), self._paired(size, arm)
        seeds = [seed for seed in range(planned) if all(run.ended for run in _of_seed(seed, ours, theirs))]

        def counts(pair: Pair) -> Counts:
            learned = [
                sum(has_learned(runs[seed].value, primary.learned, primary.better) for seed in seeds)
                for runs in (ours[pair[0]], theirs[pair[1]])
            ]
            return learned[0], len(seeds), learned[1], len(seeds)

        diverged = sum(run.state == "diverged" for run in _decisive(at, ours, theirs))
        others = [] if len(ours) == len(theirs) == 1 else [counts(pair) for pair in product(ours, theirs)]
        return LearnedCounts(*counts(at), others, diverged, planned=planned)

    def _paired(self, size: str, arm: str) -> tuple[ByRate, ByRate]:
        """The runs of an arm and of the baseline at each of their rates. If the arm's weights come from the baseline, that has one rate:
        what is compared is what became of the same runs. The baseline's rates that the arm has, too, come first."""
        base = self.question.arms[0]
        sources, ours, theirs = self.question.sources.get(arm), self.runs[size, arm], self.runs[size, base]
        if sources is None:
            return ours, {rate: theirs[rate] for rate in sorted(theirs, key=lambda rate: rate not in ours)}
        rate = self.question.rates[size][base]
        return ours, {rate: theirs[rate]} if base in sources else theirs

    def _not_learned(self, size: str, arm: str) -> str:
        """The runs of an arm and of the baseline that have finished and did not learn, in words to follow a reason; empty if all did."""
        by_seed = zip(*filter(None, (self.judged_runs(size, name) for name in (self.question.arms[0], arm))), strict=True)
        lost = [run.note for runs in by_seed for run in runs if run.state == "finished" and run.note]
        return f"; did not learn: {'; '.join(lost[:3])}{'; ...' if len(lost) > 3 else ''}" if lost else ""

    def _unreached(self, runs: list[JudgedRun]) -> str:
        """How many runs of each arm have no number of tokens, in words; empty if all have one."""
        primary, words, runs = self.question.primary, [], [*dict.fromkeys(runs)]
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
        lines, arms = [], self.question.arms
        for size in self.question.rates:
            finished = [[run.state == "finished" for run in self.judged_runs(size, arm)] for arm in arms]
            common = np.all([some for some in finished if any(some)] or [[False] * len(self.question.seeds)], axis=0).tolist()
            lines += [self._line(size, arm, common) for arm in arms]
        return lines

    def _line(self, size: str, arm: str, common: list[bool]) -> dict[str, Plain]:
        """The line of an arm; `common`: whether all arms that have finished any seed have finished this one, by seed."""
        question, primary, runs = self.question, self.question.primary, self.judged_runs(size, arm)
        reach, by_rate = primary.reach is not None, self.runs.get((size, arm), {})
        values = [run.value for run in runs if run.state == "finished"]
        line: dict[str, Plain] = {
            "size": size, "arm": arm, "rate": rate_cell((question.rates[size] or {}).get(arm)),
            "runs": len(values), "of": len(question.seeds),
            "mean": _mean([run.value for run, has in zip(runs, common, strict=False) if has and run.state == "finished"], reach),
        }  # fmt: skip
        if len(by_rate) > 1:
            line["means_by_rate"] = {
                rate_words(rate): _mean([run.value for run in tried if run.ended], reach) for rate, tried in by_rate.items()
            }
        line |= {"reached": sum(map(math.isfinite, values))} if reach else {}
        if primary.learned is not None:
            learned, ended = sum(has_learned(value, primary.learned, primary.better) for value in values), sum(run.ended for run in runs)
            line |= {"learned": learned, "ended": ended, "fraction_learned": _finite(clopper_pearson(learned, ended))}
        if arm != question.arms[0]:
            verdict = self.verdicts[size, arm]
            line |= {"verdict": verdict.label, "words": verdict.words, "reason": verdict.reason}
            line |= {"factor" if reach else "difference": _finite(verdict.interval)}
            line |= {"alone": _finite(verdict.alone), "over_seeds_and_documents": _finite(verdict.over_documents)}
            line |= {"p": verdict.p, "p_exact": verdict.p_exact}
            needed = verdict.seeds_needed
            line["seeds_needed"] = needed and [needed.by_spread, needed.fewest, needed.most]
        return line

    def power(self, planned: int) -> Iterator[str]:
        """The chance that so many seeds find a difference that matters, loudly where that is less likely than not: by the spread of the
        differences that have been measured, else by the one that is expected."""
        primary, reach = self.question.primary, self.question.primary.reach is not None
        if primary.learned is not None:
            return
        measured = [each.differences for (size, _), each in self.comparisons.items() if self.question.rates[size] is not None]
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
        alpha = ALPHA / max(1, len(self.question.places)) / self.question.looks
        chance = power(planned, spread, margin, alpha) if planned >= FEWEST_SEEDS else 0.0
        yield f"power: {planned} seeds find {what} with probability {chance:.2f}, by a spread of {spread:.2g} ({source})"
        if chance < 0.5:
            needed = seeds_needed(spread, margin, alpha) or f"more than {MOST_SEEDS}"
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


def _of_seed(number: int, *by_rates: ByRate) -> list[JudgedRun]:
    """All runs of one seed."""
    return [some[number] for by_rate in by_rates for some in by_rate.values()]


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


def _finite(interval: Interval | None) -> list[float | None] | None:
    """[mean, low, high], null where not finite."""
    return interval and [value if math.isfinite(value) else None for value in interval.listed()]


# ---------------------------------------------------------------- tables of anybody's runs

_UNIT = ("sample", "unit")  # columns that tell a run's evaluation units apart, the first that there is


def judge_table(
    table: pd.DataFrame, source: str, primary: Primary, baseline: str | None = None, where: str = "", by: Sequence[str] = ()
) -> Judged:
    """The verdicts on a table of runs: columns arm, seed and value, and any others of `lm.results`.

    Args:
        source: name of the table in errors.
        primary: the question; without a name of its metric the only one of the table.
        baseline: an arm; None: the first.
        where: a condition on columns, as of `pandas.DataFrame.query`.
        by: columns by whose values runs are judged apart, in one family; by default `size`, if there is one.

    Raises:
        RunError: columns, arms, seeds or values are missing, or there are runs twice.
    """
    lines = _asked_lines(table, source, primary.metric, where, (*by, "arm", "seed", "value"))
    metric = primary.metric or (str(lines["metric"].iloc[0]) if "metric" in lines else "value")
    by = tuple(by) or tuple(name for name in ("size",) if name in lines and lines[name].notna().any())
    named = [[f"{name} {value}" if by != ("size",) else str(value) for value in lines[name]] for name in by]
    size = [", ".join(words) for words in zip(*named, strict=True)]
    unit = next((name for name in _UNIT if name in lines), None)
    units = lines[unit] if unit else pd.Series(math.nan, lines.index)
    group = units.map(str, na_action="ignore")
    if "group" in lines:
        group = lines["group"].map(str, na_action="ignore").fillna(group)
    state = lines["state"].fillna("finished") if "state" in lines else "finished"
    rate = lines["rate"] if "rate" in lines and "rate" not in by else math.nan
    weight = lines["weight"].fillna(1.0) if "weight" in lines else 1.0
    runs = lines.assign(
        size=size if by else "", arm=lines["arm"].map(str, na_action="ignore"), rate=rate, state=state, note="", weight=weight,
        sample=units.map(str), group=group,
    )  # fmt: skip
    runs["note"] = [f"{run.arm} seed {run.seed}: {DIVERGED}" if run.state == DIVERGED else "" for run in runs.itertuples()]
    _check_lines(runs, source, [name for name in table.columns if name not in (*_RUN, "value", "weight")])
    selecting, reporting = _parts(runs, source)
    arms = [*dict.fromkeys(reporting["arm"])]
    baseline = arms[0] if baseline is None else baseline
    if baseline not in arms or len(arms) < 2:
        reason = f"no arm {baseline}" if baseline not in arms else "a verdict takes two arms"
        raise RunError(f"{source}: {reason}; there is {', '.join(map(str, arms))}")
    seeds = tuple(sorted(set(reporting["seed"]), key=lambda seed: (isinstance(seed, str), seed)))
    rates: dict[str, dict[str, Rate | None]] = {}
    kept = []
    for name in dict.fromkeys(reporting["size"]):
        here, tried = reporting[reporting["size"] == name], selecting[selecting["size"] == name]
        _check_alike(here, tried, source)
        rates[name] = {}
        for arm in arms:
            final = here[here["arm"] == arm]
            who = f"{source}: {', '.join(filter(None, (str(arm), name)))}"
            for rate, some in final.groupby("rate", dropna=False) if len(final) else ():
                if missing := [str(seed) for seed in seeds if seed not in set(some["seed"])]:
                    at = "" if pd.isna(rate) else f" at {rate_words(rate)}"
                    raise RunError(f"{who}: no seed {', '.join(missing)}{at}; every arm needs the same seeds")
            if final.empty:
                raise RunError(f"{who}: no line")
            order, judged = _rates(final, tried[tried["arm"] == arm], primary, f"{source}: {arm}")
            rates[name] |= {} if judged is _NOT_TUNED else {arm: judged}
            kept += [final[final["rate"].isna() if at is None else final["rate"] == rate_cell(at)] for at in order]
    question = Question(replace(primary, metric=metric), (baseline, *(arm for arm in arms if arm != baseline)), seeds, rates)
    return Judged(pd.concat(kept).sort_values("sample", kind="stable", ignore_index=True)[[*JUDGED_COLUMNS]], question)


def _asked_lines(table: pd.DataFrame, source: str, metric: str, where: str, names: tuple[str, ...]) -> pd.DataFrame:
    """The lines of a metric for which a condition holds. Raises RunError: there are none."""
    if missing := [name for name in names if name not in table]:
        raise RunError(f"{source}: has no column {', '.join(missing)}; there is {', '.join(map(str, table.columns))}")
    if not table.columns.is_unique:
        raise RunError(f"{source}: two columns are named {table.columns[table.columns.duplicated()][0]}")
    try:
        lines = table.query(where) if where else table
    except Exception as error:  # of pandas, Python's parser or numexpr: the condition is wrong
        raise RunError(f"{source}: {where}: {one_line(error)}; columns: {', '.join(map(str, table.columns))}") from None
    if not isinstance(lines, pd.DataFrame) or lines.empty:
        raise RunError(f"{source}: no line" + (f" with {where}" if where else ""))
    if "metric" not in lines:
        return lines
    known = [str(name) for name in lines["metric"].dropna().unique()]
    if (metric and metric not in known) or (not metric and len(known) != 1):
        raise RunError(f"{source}: {f'no metric {metric}' if metric else 'name the metric'}; there is {', '.join(known)}")
    return lines[lines["metric"] == (metric or known[0])]


def _check_lines(runs: pd.DataFrame, source: str, others: list[str]) -> None:
    """Raises RunError: no number, no arm or seed, or a unit of a run twice; `others`: columns in which these may differ."""
    rated = runs["rate"].notna()
    for name in ("value", "weight"):
        runs[name] = pd.to_numeric(runs[name], errors="coerce")
    runs["rate"] = runs["rate"].map(_finite_rate)
    total = runs.groupby(_RUN, dropna=False)["weight"].transform("sum")
    for name, wrong in (
        ("arm", runs["arm"].isna()),
        ("seed", runs["seed"].isna()),
        ("finite value", ~np.isfinite(runs["value"]) & (runs["state"] == "finished")),
        ("finite rate", rated & runs["rate"].isna()),
        ("weight above 0", ~((runs["weight"] >= 0) & (total > 0))),
    ):
        if wrong.any():
            run = runs[wrong].iloc[0]
            raise RunError(f"{source}: {int(wrong.sum())} lines have no {name}, the first of {run['arm']} seed {run['seed']}")
    if len({len(coordinates(read_rate(rate))) for rate in runs["rate"].dropna().unique()}) > 1:
        raise RunError(f"{source}: rates are of one tuned key in some lines, and of several in others")
    twice = runs.duplicated([*_RUN, "sample", *(name for name in ("part", "stage") if name in runs)], keep=False)
    if twice.any():
        run = runs[twice].iloc[0]
        same = runs[twice & (runs["arm"] == run["arm"]) & (runs["seed"] == run["seed"])]
        differ = [name for name in others if same[name].nunique(dropna=False) > 1]
        how = f"they differ in {', '.join(differ)}: choose by a condition, or judge apart by it" if differ else "drop all but one"
        raise RunError(f"{source}: {len(same)} lines are of {run['arm']} seed {run['seed']}; {how}")


def _finite_rate(cell: float | str) -> float | str:
    """The cell of a rate with its values as numbers; NaN: one of them is none, or not finite."""
    try:
        rate = read_rate(cell)
        return rate_cell(rate) if all(map(math.isfinite, coordinates(rate))) else math.nan
    except (TypeError, ValueError):
        return math.nan


def _parts(runs: pd.DataFrame, source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The lines that choose rates and those that are judged. Tuning runs choose, if there are any; without a part that selects, all lines
    of a run do both. Raises RunError: unknown parts, or no line that reports."""
    part = runs["part"].fillna("") if "part" in runs else pd.Series("", runs.index)
    if unknown := set(part) - {"", "selects", "reports"}:
        raise RunError(f"{source}: part {', '.join(map(str, unknown))}; it is selects or reports")
    tuning = runs["stage"] == "tune" if "stage" in runs else pd.Series(False, runs.index)
    split = (part == "selects").any()
    reporting = runs[~tuning & (part != "selects")]
    if reporting.empty:
        raise RunError(f"{source}: no line reports")
    chooses = (part == "selects") if split else tuning
    return runs[chooses], reporting


def _check_alike(reporting: pd.DataFrame, selecting: pd.DataFrame, source: str) -> None:
    """Raises RunError: runs were measured on different units, or arms tuned over different rates or with fewer than two seeds."""
    finished = reporting[reporting["state"] == "finished"]
    if finished.groupby(["arm", "rate", "seed"], dropna=False)["sample"].agg(frozenset).nunique() > 1:
        raise RunError(f"{source}: runs were not measured on the same units")
    tuning = _tuning(selecting)
    grids = {arm: frozenset(rates) for arm, rates in tuning.groupby("arm")["rate"] if rates.nunique() > 1}
    if len(set(grids.values())) > 1:
        words = "; ".join(f"{arm} {', '.join(map(rate_words, sorted(map(read_rate, grid))))}" for arm, grid in grids.items())
        raise RunError(f"{source}: arms are tuned over different rates: {words}")
    seeds = tuning[tuning["arm"].isin(grids)].groupby(["arm", "rate"])["seed"].nunique()
    if (seeds < FEWEST_TUNING_SEEDS).any():
        arm, rate = seeds.idxmin()
        raise RunError(f"{source}: {arm} has {seeds.min()} seed at {rate_words(rate)}; tuning takes {FEWEST_TUNING_SEEDS}")


def _tuning(selecting: pd.DataFrame) -> pd.DataFrame:
    """The lines that choose among rates: those of tuning runs, if there are any."""
    tuning = selecting[selecting["stage"] == "tune"] if "stage" in selecting else selecting[:0]
    return selecting if tuning.empty else tuning


_NOT_TUNED = object()


def _rates(final: pd.DataFrame, selecting: pd.DataFrame, primary: Primary, who: str) -> tuple[list[Rate | None], object]:
    """The rates of an arm's runs, first the one that tuning chose, and the one that it is judged at. Raises RunError: nothing chooses."""
    rates = [None if pd.isna(rate) else read_rate(rate) for rate in final["rate"].unique()]
    tuning = _tuning(selecting)
    first = _costs(tuning, primary)
    if len(first) < 2:
        if len(rates) > 1:
            raise RunError(f"{who} has {len(rates)} rates and no line that selects one: add a column part, or judge apart by rate")
        return rates, rates[0]
    best = chosen({who: first}).rates.get(who)
    if best is None:
        return rates, _NOT_TUNED
    if best not in rates:
        raise RunError(f"{who}: {rate_words(best)} is the best rate, but no line at it reports")
    order = [best, *(rate for rate in rates if rate != best)]
    after = (_costs(selecting.drop(tuning.index), primary) or _costs(final, primary)) if "stage" in tuning else first
    return order, best_rate(after, rates) if set(rates) <= after.keys() else best


def _costs(lines: pd.DataFrame, primary: Primary) -> dict[Rate, list[float]]:
    """The numbers that the choice of a rate minimizes, by rate and seed; infinite of a run that diverged."""
    costs: dict[Rate, list[float]] = {}
    for (rate, _), run in lines.groupby(["rate", "seed"]):
        mean = float(np.average(run["value"], weights=run["weight"])) * (-1 if primary.better == "higher" else 1)
        costs.setdefault(read_rate(rate), []).append(math.inf if (run["state"] == DIVERGED).any() else mean)
    return costs
