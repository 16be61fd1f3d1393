"""Arms, their labels, whether comparing them is fair, and their paired differences."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lm.attention import catalogue
from lm.config.effects import is_learned
from lm.config.task_config import task_names
from lm.errors import RunError
from lm.evaluation.statistics import FEWEST, Interval, groups_of, over_seeds, paired_difference, unit_resampled, wilson
from lm.runs.identity import unlike
from lm.runs.record import AnswersRight, LongContext, RunRecord, Setting, Validation
from lm.schema import Plain

_NORMALIZER = ("model.normalizer.", "phases", "swap.")  # what a comparison of normalizers is about


VALIDATION, LONG = (lambda run: run.validation), (lambda run: run.long_context)


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RunRecord, ...]  # by seed

    def mean(
        self, value: Callable[[RunRecord], float | None], on: Callable[[RunRecord], Validation | LongContext | None] | None = None
    ) -> float | None:
        """Mean over the runs that have the value; None if it was measured in evaluations, `on`, of different rows."""
        values = self.values(value)
        return float(np.mean(values)) if values and not (on and self.apart(on)) else None

    def apart(self, on: Callable[[RunRecord], Validation | LongContext | None]) -> bool:
        """Whether its runs were evaluated on different rows."""
        return len({found.identity for run in self.runs if (found := on(run))}) > 1

    def values(self, value: Callable[[RunRecord], float | None]) -> list[float]:
        """The value of each run that has it."""
        return [found for found in map(value, self.runs) if found is not None]


@dataclass(frozen=True)
class Difference:
    """Arm minus baseline: an interval and how it was made, or why there is none."""

    arm: str
    what: str
    of: tuple[str, ...]  # (): validation loss; (way,): of long rows, the model used so; (task, way): share of answers right
    length: int  # where the rows or their positions end
    interval: Interval | None  # nats per token, or of the share
    note: str


@dataclass(frozen=True)
class Check:
    """One condition of a fair comparison; `ok` is None where a run doesn't say."""

    what: str
    ok: bool | None
    detail: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything a report shows, in plain data. With one arm there are no checks and no differences."""

    arms: tuple[Arm, ...]  # the baseline first
    differences: tuple[Difference, ...]
    checks: tuple[Check, ...]
    config_diff: tuple[tuple[str, tuple[str, ...]], ...]  # key, its value in each arm
    warning: str  # what differs besides the normalizer: configuration, tokens seen; empty: nothing
    missing: tuple[str, ...]

    @property
    def title(self) -> str:
        if len(self.arms) > 1:
            return " vs ".join(arm.label for arm in self.arms)
        return f"{self.arms[0].label}: {', '.join(printable(run.name) for run in self.arms[0].runs)}"

    def across(self, value: Callable[[RunRecord], object]) -> tuple[bool | None, str]:
        """Whether all runs agree on a value (None: some don't say), and the value, by arm if arms differ."""
        by_arm = [list(dict.fromkeys(show(value(run)) for run in arm.runs)) for arm in self.arms]
        distinct = set().union(*by_arm)
        words = [", ".join(values) for values in by_arm]
        known = distinct - {show(None)}
        same = False if len(known) > 1 else None if known != distinct else True
        if len(set(words)) == 1:
            return same, words[0]
        return same, "; ".join(f"{arm.label}: {word}" for arm, word in zip(self.arms, words, strict=True))


def show(value: object) -> str:
    """A value as text: thousands separated, unknown said."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def printable(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def compare(records: list[RunRecord], baseline: str | None = None) -> Comparison:
    """Group runs into arms and compare them with the baseline: an arm's label, its normalizer or one of its runs.

    Raises:
        RunError: no runs, or no such baseline.
    """
    records = list({record.folder.resolve(): record for record in records}.values())
    if not records:
        raise RunError("no run folders given")
    arms = _arms(_named(records))
    if baseline is not None:
        known = [{arm.label, arm.runs[0].flat["model.normalizer.name"], *(run.name for run in arm.runs)} for arm in arms]
        chosen = [arm for arm, names in zip(arms, known, strict=True) if baseline in names]
        if not chosen:
            raise RunError(f"baseline '{baseline}': no such run or arm; choose from: {', '.join(arm.label for arm in arms)}")
        arms = chosen[:1] + [arm for arm in arms if arm is not chosen[0]]
    missing = tuple(f"{printable(run.name)}: {lack}" for arm in arms for run in arm.runs for lack in run.missing)
    for arm in arms:
        kinds = [name for name, on in (("validation", VALIDATION), ("long-context", LONG)) if arm.apart(on)]
        missing += tuple(f"{arm.label}: the {name} rows of its runs differ: no mean of their losses" for name in kinds)
    result = Comparison(tuple(arms), (), (), (), "", missing)
    if len(arms) == 1:
        return result
    diff = _config_diff(arms)
    other = [key for key, _ in diff if not key.startswith(_NORMALIZER) and is_learned(key)]
    warning = f"The arms differ in more than the normalizer: {', '.join(other)}." if other else ""
    same_start, start = result.across(lambda run: run.tokens_before)
    if same_start is False:
        warning = f"{warning} They started from weights that had seen different numbers of tokens: {start}.".strip()
    same_tokens, tokens = result.across(lambda run: run.tokens_seen)
    if same_tokens is False:
        warning = f"{warning} The runs have not seen the same number of tokens: {tokens}.".strip()
    same_answers, tokens = result.across(_tokens_asked)
    if same_answers is False:
        warning = f"{warning} They were asked for answers after different numbers of tokens: {tokens}.".strip()
    return Comparison(result.arms, tuple(_differences(arms)), _checks(result), diff, warning, missing)


# ---------------------------------------------------------------- arms


def _named(records: list[RunRecord]) -> list[RunRecord]:
    """The records with a name for each task they were asked for: one of two tasks of a kind by the options in which they differ."""
    tasks = {json.dumps(one.task, sort_keys=True): one.task for record in records for one in record.answers}
    names = dict(zip(tasks, task_names(list(tasks.values())), strict=True))
    return [
        replace(record, answers=tuple(replace(one, name=names[json.dumps(one.task, sort_keys=True)]) for one in record.answers))
        for record in records
    ]


def _arms(records: list[RunRecord]) -> list[Arm]:
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in records:
        key = json.dumps(record.learned, sort_keys=True, default=str)
        groups.setdefault((key, seen[key, record.seeds]), []).append(record)  # a seed run twice is another arm, not a seed
        seen[key, record.seeds] += 1
    runs = [sorted(group, key=lambda run: run.seeds) for group in groups.values()]
    labels = [arm_label(group[0]) for group in runs]
    if len(set(labels)) < len(labels):
        bare = [Arm(label, tuple(group)) for label, group in zip(labels, runs, strict=True)]
        keys = [key for key, _ in _config_diff(bare) if is_learned(key) and not key.startswith(_NORMALIZER)]
        keys = keys if len(keys) <= 3 else []  # else the runs' names tell them apart
        repeated = {label for label, count in Counter(labels).items() if count > 1}
        for index, group in enumerate(runs):
            if labels[index] in repeated:
                labels[index] = ", ".join([labels[index], *(f"{key.split('.')[-1]}={_short(group[0], key)}" for key in keys)])
        repeated = {label for label, count in Counter(labels).items() if count > 1}
        labels = [f"{label}, {group[0].name}" if label in repeated else label for label, group in zip(labels, runs, strict=True)]
        repeated = {label for label, count in Counter(labels).items() if count > 1}
        labels = [f"{label}, {group[0].folder}" if label in repeated else label for label, group in zip(labels, runs, strict=True)]
    return [Arm(printable(label), tuple(group)) for label, group in zip(labels, runs, strict=True)]


def _short(run: RunRecord, key: str) -> Plain:
    """A path's last part, also of the starting weights; other values as they are."""
    value = run.config[key] if key == "init_from" else run.flat.get(key)
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def arm_label(run: RunRecord) -> str:
    """The run's normalizer, or those of its phases, `softmax -> ssmax at step 175`, or what was swapped in after training."""
    (_, first), *later = run.phases
    if run.config.get("init_from"):  # the weights that it started from have replaced the first values
        first = {key: value for key, value in first.items() if key != "init"}
    names = [catalogue.label(first), *(f"{catalogue.label(normalizer)} at step {step}" for step, normalizer in later)]
    before = run.measured("swap.normalizer")
    return " -> ".join([f"{before}", f"{names[0]} after training (init {run.measured('swap.init')})"] if before else names)


def _config_diff(arms: list[Arm]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.flat if key not in ("name", "seed"))
    lines = []
    for key in keys:
        values = tuple(", ".join(dict.fromkeys(_value(run, key) for run in arm.runs)) for arm in arms)
        if len(set(values)) > 1:
            lines.append((key, values))
    return tuple(lines)


def _value(run: RunRecord, key: str) -> str:
    value = run.flat.get(key)
    return (
        ("null" if value is None else printable(str(value).lower() if isinstance(value, bool) else str(value))) if key in run.flat else "-"
    )


# ---------------------------------------------------------------- fairness


def _checks(comparison: Comparison) -> tuple[Check, ...]:
    def same(what: str, value: Callable[[RunRecord], object]) -> Check:
        return Check(what, *comparison.across(value))

    def config(*prefixes: str) -> Callable[[RunRecord], str]:
        return lambda run: ", ".join(f"{key}={value}" for key, value in run.flat.items() if key.startswith(prefixes))

    long = ways_used(comparison.arms)
    same_code, code = comparison.across(lambda run: run.commits)  # equal commits with uncommitted changes say nothing
    seeds = [tuple(seeds_shown(run.seeds) for run in arm.runs) for arm in comparison.arms]
    by_arm = "; ".join(f"{arm.label}: {', '.join(s)}" for arm, s in zip(comparison.arms, seeds, strict=True))
    unequal = [
        f"{printable(run.name)}: {'; '.join(found)}" for arm in comparison.arms for run in arm.runs if (found := unlike(run.environment))
    ]
    return (
        same("tokens seen", lambda run: run.tokens_seen),
        same("tokens in the weights started from", lambda run: run.tokens_before),
        *([same("tokens seen, long-context evaluation", lambda run: run.long_context and run.long_context.tokens_seen)] if long else []),
        same("data fingerprint", lambda run: run.measured("data_fingerprint")),
        same("validation rows (sha256)", lambda run: run.validation and run.validation.identity[1]),
        *([same("long-context rows (sha256)", lambda run: run.long_context and run.long_context.identity[1])] if long else []),
        *([same("rows with questions (sha256)", _rows_asked)] if asked(comparison.arms) else []),
        *([same("tokens seen, answers", _tokens_asked)] if asked(comparison.arms) else []),
        same("tokens in a step", lambda run: run.flat.get("optim.batch_tokens")),
        same("steps", lambda run: run.flat.get("trainer.max_steps")),
        Check("seeds", len(set(seeds)) == 1, by_arm if len(set(seeds)) > 1 else ", ".join(seeds[0])),
        same("learning rate and schedule", config("optim.lr", "optim.warmup_steps", "optim.schedule.")),
        same("parameters outside the normalizer", _parameters_outside),
        same("precision", lambda run: run.used("precision")),
        same("device", lambda run: run.used("device")),
        Check("what each start of a run used", not unequal, ". ".join(unequal) or "the same at every start"),
        Check("code", None if same_code and "uncommitted" in code else same_code, code),
    )


def _rows_asked(run: RunRecord) -> str | None:
    """One hash of all rows that the run was asked in."""
    rows = ", ".join(sorted({one.rows_sha256 for one in run.answers}))
    return hashlib.sha256(rows.encode()).hexdigest() if rows else None


def _tokens_asked(run: RunRecord) -> str | None:
    """Tokens that the run had seen when it was asked."""
    return ", ".join(f"{tokens:,}" for tokens in sorted({one.tokens_seen for one in run.answers})) or None


def _parameters_outside(run: RunRecord) -> int | None:
    total, normalizer = run.measured("parameters.total"), run.measured("parameters.normalizer")
    return None if total is None or normalizer is None else total - normalizer


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seed, and after it those of the weights it started from, if they differ."""
    before = " after ".join(map(str, reversed(seeds[:-1])))
    return f"{seeds[-1]} after {before}" if before else str(seeds[-1])


# ---------------------------------------------------------------- differences


def ranges(evaluation: LongContext) -> list[tuple[str, int, int]]:
    """(label, start, stop) of the position ranges: within 1x, 1x-2x, 2x-4x ... of the training length."""
    stops = [evaluation.seq_len]
    while stops[-1] < evaluation.length:
        stops.append(min(stops[-1] * 2, evaluation.length))
    stops[0] = min(stops[0], evaluation.length)
    times = [stop / evaluation.seq_len for stop in stops]
    labels = [f"within {times[0]:g}x", *(f"{low:g}x-{high:g}x" for low, high in pairwise(times))]
    return list(zip(labels, [0, *stops[:-1]], stops, strict=True))


def setting_of(run: RunRecord, way: str) -> Setting | None:
    """The run's long-context numbers, with the model used in this way."""
    settings = run.long_context.settings if run.long_context else ()
    return next((setting for setting in settings if setting.label == way), None)


def ways_used(arms: tuple[Arm, ...] | list[Arm]) -> list[str]:
    """Every way that some run was used in, in the order of their files."""
    long = [run.long_context for arm in arms for run in arm.runs if run.long_context]
    return list(dict.fromkeys(setting.label for evaluation in long for setting in evaluation.settings))


def asked(arms: tuple[Arm, ...] | list[Arm]) -> list[tuple[str, str]]:
    """Every (task, way) that some run was asked for answers of, in the order of their files."""
    return list(dict.fromkeys((one.name, one.way) for arm in arms for run in arm.runs for one in run.answers))


def lengths_asked(arms: tuple[Arm, ...] | list[Arm], of: tuple[str, str] | None = None) -> list[int]:
    """The lengths of rows, ascending, in which some run was asked; `of` one (task, way), or of any."""
    return sorted({one.length for arm in arms for run in arm.runs for one in run.answers if of in (None, (one.name, one.way))})


def answers_of(run: RunRecord, of: tuple[str, str], length: int) -> AnswersRight | None:
    """The run's answers of a (task, way) in rows of one length."""
    return next((one for one in run.answers if (one.name, one.way, one.length) == (*of, length)), None)


def share_right(arm: Arm, of: tuple[str, str], length: int) -> Interval | None:
    """Share of answers right: Wilson's interval over questions; of several seeds Student's t, but never a narrower one than that."""
    found = [one for run in arm.runs if (one := answers_of(run, of, length))]
    if len({one.rows_sha256 for one in found}) != 1:  # none, or of different rows, which have no mean
        return None
    mean, questions = float(np.mean([one.share for one in found])), int(found[0].questions.sum())
    interval = wilson(mean * questions, questions)
    if len(found) == 1:
        return replace(interval, over="questions, 1 seed")
    seeds = over_seeds(np.array([one.share for one in found]))
    return Interval(mean, min(interval.low, max(0.0, seeds.low)), max(interval.high, min(1.0, seeds.high)), seeds.over)


@dataclass(frozen=True, eq=False)
class _Sample:
    """One number a row, and what must be equal for rows to be pairs."""

    identity: tuple[str, str]
    where: tuple[int, int]  # positions, from and to
    rows: np.ndarray  # (rows,) nats per token, or share of answers right
    weights: np.ndarray  # (rows,) how many of them are in each
    documents: np.ndarray  # (rows,) labels: equal for rows of one document


def _validation_rows(run: RunRecord) -> _Sample | None:
    found = run.validation
    return found and _Sample(found.identity, (0, found.seq_len), found.nll_by_row, found.targets_by_row, found.document_by_row)


def farthest(evaluation: LongContext) -> tuple[int, int]:
    """(start, stop) of the farthest range, moved to the first bucket edge within it: rows are kept by bucket."""
    start, starts = ranges(evaluation)[-1][1], evaluation.bucket_edges[:-1]
    return int(min(starts[starts >= start], default=starts[-1])), evaluation.length


def _farthest_rows(run: RunRecord, way: str) -> _Sample | None:
    setting = setting_of(run, way)
    if setting is None:
        return None
    start, stop = farthest(run.long_context)
    edges = run.long_context.bucket_edges
    inside = edges[:-1] >= start
    rows = np.average(setting.nll_by_row[:, inside], axis=1, weights=np.diff(edges)[inside])
    return _Sample(run.long_context.identity, (start, stop), rows, np.ones(len(rows)), run.long_context.document_by_row)


def _rows_of_answers(run: RunRecord, of: tuple[str, str], length: int) -> _Sample | None:
    found = answers_of(run, of, length)
    return found and _Sample(("", found.rows_sha256), (0, length), found.by_row, found.questions, np.arange(len(found.by_row)))


def _differences(arms: list[Arm]) -> list[Difference]:
    base, found = arms[0], []
    for arm in arms[1:]:
        found.append(Difference(arm.label, "validation loss", (), arm.runs[0].seq_len, *_difference(arm, base, _validation_rows)))
        for way in ways_used([base, arm]):
            long = next(run.long_context for run in (*arm.runs, *base.runs) if setting_of(run, way))
            start, stop = farthest(long)
            what = f"loss at positions {start:,}-{stop:,}, {way}"
            values = _difference(arm, base, lambda run, way=way: _farthest_rows(run, way))
            found.append(Difference(arm.label, what, (way,), stop, *values))
        for of in asked([base, arm]):
            both = set(lengths_asked([arm], of)) & set(lengths_asked([base], of))
            length = max(both or lengths_asked([base, arm], of))
            values = _difference(arm, base, lambda run, of=of, length=length: _rows_of_answers(run, of, length))
            what = f"answers right, {of[0]} in rows of {length:,}, {of[1]}"
            found.append(Difference(arm.label, what, of, length, *_of_shares(*values)))
    return found


def _of_shares(interval: Interval | None, note: str) -> tuple[Interval | None, str]:
    """A difference of shares lies within -1 and 1, and its interval is not a point because all rows, at 0 or 1 say, agree."""
    if interval is None or interval.low == interval.high:
        return None, "all rows, or all seeds, agree: their spread gives no interval" if interval else note
    return replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high)), note


def _difference(arm: Arm, base: Arm, sample: Callable[[RunRecord], _Sample | None]) -> tuple[Interval | None, str]:
    ours, theirs = ({run.seeds: found for run in one.runs if (found := sample(run))} for one in (arm, base))
    for one, samples in ((arm, ours), (base, theirs)):
        if not samples:
            return None, f"{one.label} was not evaluated on it"
    every = [*ours.values(), *theirs.values()]
    if len({one.identity[0] for one in every}) > 1:
        return None, "not measured on the same tokens: the data fingerprints differ"
    if len({(one.identity, one.where, one.rows.shape, one.weights.tobytes()) for one in every}) > 1:
        return None, "not measured on the same tokens: the evaluation rows or positions differ"
    if not all(np.isfinite(one.rows).all() for one in every):
        return None, "not finite on some rows"
    shared, weights = sorted(ours.keys() & theirs.keys()), every[0].weights
    if not shared:
        return None, "no seed in common: a difference could be that of the seeds"
    if len(shared) >= 2:
        values = np.array([np.average(ours[seed].rows - theirs[seed].rows, weights=weights) for seed in shared])
        return over_seeds(values), f"mean over {len(shared)} paired seeds, Student t interval over seeds, on these evaluation rows"
    mine, other = ours[shared[0]].rows, theirs[shared[0]].rows
    documents = len(np.unique(every[0].documents))
    groups = groups_of(every[0].documents)
    over = f"{len(mine)} rows" if documents == len(mine) else f"{documents} documents ({len(mine)} rows)"
    if groups is None:
        over = f"{len(mine)} rows of only {documents} documents, as if they were independent"
    note = f"paired bootstrap over {over}: covers the choice of what was evaluated on, not training noise"
    alone = "one seed per arm" if len(ours) == len(theirs) == 1 else f"seed {seeds_shown(shared[0])} alone is in both arms"
    note += f"; {alone}: says nothing about the method, as differences of several times this interval can be noise of the seed"
    if len(mine) < FEWEST:
        return None, f"{len(mine)} evaluation rows are too few for an interval (at least {FEWEST})"
    interval = paired_difference(mine, other, weights, groups)
    return replace(interval, over=f"{unit_resampled(documents, len(mine))}, 1 seed"), note
