"""Arms, their labels, and whether comparing them is fair."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lm.attention import catalogue
from lm.config.effects import is_learned
from lm.errors import RunError
from lm.report.sections import Arm, Difference, Section, differences, sections, seeds_shown
from lm.runs.record import RunRecord, differing
from lm.schema import Plain

_ABSENT = "-"  # the value of a key that a run does not have
_NORMALIZER = ("model.normalizer.", "phases", "swap.")  # what a comparison of normalizers is about


@dataclass(frozen=True)
class Check:
    """One condition of a fair comparison; `ok` is None where a run doesn't say."""

    what: str
    ok: bool | None
    detail: str


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Everything a report shows, in plain data. With one arm there are no checks and no differences."""

    arms: tuple[Arm, ...]  # the baseline first
    sections: tuple[Section, ...]
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

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all arms."""
        return [run for arm in self.arms for run in arm.runs]

    def level(self, unit: str) -> tuple[str, float] | None:
        """Name and value of a level that numbers of a unit are to be compared with, such as the entropy of single tokens."""
        same = [each for section in self.sections for each in section.series.values() if each.unit == unit]
        return next(((name, level) for each in same for name, level in each.references.items() if np.isfinite(level)), None)


def across(arms: tuple[Arm, ...], value: Callable[[RunRecord], object]) -> tuple[bool | None, str]:
    """Whether all runs agree on a value (None: some don't say), and the value, by arm if arms differ."""
    by_arm = [list(dict.fromkeys(show(value(run)) for run in arm.runs)) for arm in arms]
    distinct = set().union(*by_arm)
    words = [", ".join(values) for values in by_arm]
    known = distinct - {show(None)}
    same = False if len(known) > 1 else None if known != distinct else True
    if len(set(words)) == 1:
        return same, words[0]
    return same, "; ".join(f"{arm.label}: {word}" for arm, word in zip(arms, words, strict=True))


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


def compare(records: list[RunRecord], baseline: str | None = None) -> RunComparison:
    """Group runs into arms and compare them with the baseline: an arm's label, its normalizer or one of its runs.

    Raises:
        RunError: no runs, or no such baseline.
    """
    records = list({record.folder.resolve(): record for record in records}.values())
    if not records:
        raise RunError("no run folders given")
    arms = tuple(_arms(records))
    if baseline is not None:
        known = [{arm.label, arm.runs[0].flat["model.normalizer.name"], *(run.name for run in arm.runs)} for arm in arms]
        chosen = [arm for arm, names in zip(arms, known, strict=True) if baseline in names]
        if not chosen:
            raise RunError(f"baseline '{baseline}': no such run or arm; choose from: {', '.join(arm.label for arm in arms)}")
        arms = (chosen[0], *(arm for arm in arms if arm is not chosen[0]))
    return comparison_of(arms)


def comparison_of(arms: tuple[Arm, ...]) -> RunComparison:
    """The comparison of arms with the first."""
    shown = sections(arms)
    missing = [f"{printable(run.name)}: {lack}" for arm in arms for run in arm.runs for lack in run.missing]
    apart = dict.fromkeys((arm, section.first.shown.measured_on) for arm in arms for section in shown if section.is_apart(arm))
    missing += [f"{arm.label}: the {measured_on} of its runs differ: no mean over them" for arm, measured_on in apart]
    if len(arms) == 1:
        return RunComparison(arms, shown, (), (), (), "", tuple(missing))
    diff = _config_diff(arms)
    warning = " ".join(_warnings(arms, shown, diff))
    return RunComparison(arms, shown, tuple(differences(arms, shown)), _checks(arms, shown), diff, warning, tuple(missing))


def _warnings(arms: tuple[Arm, ...], shown: tuple[Section, ...], diff: tuple[tuple[str, tuple[str, ...]], ...]) -> list[str]:
    """Words for what differs besides the normalizer."""
    keys = [key for key, _ in diff if is_learned(key) and not key.startswith(_NORMALIZER)]
    warnings = [f"The arms differ in more than the normalizer: {', '.join(keys)}."] if keys else []
    same, tokens = across(arms, lambda run: run.tokens_before)
    warnings += [f"They started from weights that had seen different numbers of tokens: {tokens}."] if same is False else []
    same, seen = across(arms, lambda run: run.tokens_seen)
    warnings += [f"The runs have not seen the same number of tokens: {seen}."] if same is False else []
    for section in shown:
        same, tokens = across(arms, section.tokens_seen)
        if same is False and tokens != seen:
            warnings.append(f"They were measured on {section.first.shown.measured_on} after different numbers of tokens: {tokens}.")
    return warnings


# ---------------------------------------------------------------- arms


def _arms(records: list[RunRecord]) -> list[Arm]:
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in records:
        key = json.dumps(record.arm_definition, sort_keys=True, default=str)
        groups.setdefault((key, seen[key, record.seeds]), []).append(record)  # a seed run twice is another arm, not a seed
        seen[key, record.seeds] += 1
    runs = [sorted(group, key=lambda run: run.seeds) for group in groups.values()]
    labels = [arm_label(group[0]) for group in runs]
    if len(set(labels)) < len(labels):
        keys = [
            key for key, _ in _config_diff([Arm("", tuple(group)) for group in runs]) if is_learned(key) and not key.startswith(_NORMALIZER)
        ]
        keys = keys if len(keys) <= 3 else []  # else the runs' names tell them apart
        said = (
            lambda run: [f"{key.split('.')[-1]}={_short(run, key)}" for key in keys],
            lambda run: [run.name],
            lambda run: [str(run.folder)],
        )
        for more in said:
            repeated = {label for label, count in Counter(labels).items() if count > 1}
            both = zip(labels, runs, strict=True)
            labels = [", ".join([label, *more(group[0])]) if label in repeated else label for label, group in both]
    return [Arm(printable(label), tuple(group)) for label, group in zip(labels, runs, strict=True)]


def _short(run: RunRecord, key: str) -> Plain:
    """A path's last part, also of the starting weights; other values as they are."""
    value = run.config[key] if key in ("init_from", "branch_from") else run.flat.get(key)
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def arm_label(run: RunRecord) -> str:
    """The run's normalizer, or those of its phases, `softmax -> ssmax at step 175`, or what was swapped in after training."""
    (_, first), *later = run.phases
    if run.config.get("init_from"):  # the weights that it started from have replaced the initial values
        first = {key: value for key, value in first.items() if key != "init"}
    names = [catalogue.label(first), *(f"{catalogue.label(normalizer)} at step {step}" for step, normalizer in later)]
    before = run.measured("swap.normalizer")
    return " -> ".join([f"{before}", f"{names[0]} after training (init {run.measured('swap.init')})"] if before else names)


def _config_diff(arms: tuple[Arm, ...] | list[Arm]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A key that is null (off) is as one that a run lacks: keys added since a run was made are no difference."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.flat if key not in ("name", "seed"))

    def written(run: RunRecord, key: str) -> str:
        value = run.flat.get(key, _ABSENT)
        return "null" if value is None else printable(str(value).lower() if isinstance(value, bool) else str(value))

    lines = {key: tuple(", ".join(dict.fromkeys(written(run, key) for run in arm.runs)) for arm in arms) for key in keys}
    return tuple(item for item in lines.items() if len({_ABSENT if value == "null" else value for value in item[1]}) > 1)


# ---------------------------------------------------------------- fairness


def _checks(arms: tuple[Arm, ...], shown: tuple[Section, ...]) -> tuple[Check, ...]:
    def same(what: str, value: Callable[[RunRecord], object]) -> Check:
        return Check(what, *across(arms, value))

    def config(*prefixes: str) -> Callable[[RunRecord], str]:
        return lambda run: ", ".join(f"{key}={value}" for key, value in run.flat.items() if key.startswith(prefixes))

    def outside(run: RunRecord) -> int | None:
        total, normalizer = run.measured("parameters.total"), run.measured("parameters.normalizer")
        return None if total is None or normalizer is None else total - normalizer

    same_code, code = across(arms, lambda run: run.commits)  # equal commits with uncommitted changes say nothing
    seeds = [tuple(seeds_shown(run.seeds) for run in arm.runs) for arm in arms]
    by_sequences = {section.first.shown.measured_on: section for section in shown}
    by_arm = "; ".join(f"{arm.label}: {', '.join(s)}" for arm, s in zip(arms, seeds, strict=True))
    unequal = [f"{printable(run.name)}: {'; '.join(what)}" for arm in arms for run in arm.runs if (what := differing(run.environment))]
    return (
        same("tokens seen", lambda run: run.tokens_seen),
        same("tokens in the weights started from", lambda run: run.tokens_before),
        *(same(f"tokens seen, {name}", section.tokens_seen) for name, section in list(by_sequences.items())[1:]),
        same("data fingerprint", lambda run: run.measured("data_fingerprint")),
        *(same(f"{name} (sha256)", section.sha256) for name, section in by_sequences.items()),
        same("tokens in a step", lambda run: run.flat.get("optim.batch_tokens")),
        same("steps", lambda run: run.flat.get("trainer.max_steps")),
        Check("seeds", len(set(seeds)) == 1, by_arm if len(set(seeds)) > 1 else ", ".join(seeds[0])),
        same("learning rate and schedule", config("optim.lr", "optim.warmup_steps", "optim.schedule.")),
        same("parameters outside the normalizer", outside),
        same("precision", lambda run: run.used("precision")),
        same("device", lambda run: run.used("device")),
        Check("what each start of a run used", not unequal, ". ".join(unequal) or "the same at every start"),
        Check("code", None if same_code and "uncommitted" in code else same_code, code),
    )
