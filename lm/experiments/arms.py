"""The arms of an experiment: what each changes, and which earlier arm's weights it starts from, swapped or not."""

from collections.abc import Mapping
from dataclasses import dataclass

from lm.attention.catalogue import OPTIONS
from lm.config.load import merge
from lm.config.yaml_text import MAX_DEPTH
from lm.errors import ConfigError, Problem, abbreviated
from lm.runs.folder import SWAPPED
from lm.schema import Plain, Unavailable, build, flatten, is_block, key, suggest

TAKEN = {"arms": (".", ".."), "sizes": (".", "..", "logs", "report", SWAPPED, "workers")}  # sizes are folders beside these
_NAME = "letters, digits, '-', '_' and '.'"


@dataclass(frozen=True)
class Swap:
    """Another normalizer for the weights that an arm starts from, as `lm swap` gives it."""

    to: str = key("", "the new normalizer; its options are the arm's `model.normalizer`")
    init: str | float | None = key(None, "initial values of its parameters: match, unit, fit or a number; null: its default")


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        changes: how its configuration differs from the base.
        start: the earlier arm whose trained weights it starts from, if any.
        step: the step of it that the arm branches from, with optimizer state and place in the data; None: it starts from weights alone.
        swap: what becomes of their normalizer; None: it stays.
        trained: False: the swapped weights are measured as they are.
        offset: what is added to the seeds of its runs, which are paired as if it were not.
    """

    name: str
    changes: dict[str, Plain]
    start: str = ""
    swap: Swap | None = None
    trained: bool = True
    offset: int = 0
    step: int | None = None

    @property
    def tuned(self) -> bool:
        """Whether it has a learning rate of its own where the experiment tunes one; else it has that of the arm it starts from."""
        return self.trained and self.step is None


def read_arms(given: Plain, problems: list[Problem]) -> tuple[Arm, ...]:
    """The arms that an experiment's file gives; what is wrong is appended to `problems`."""
    found: dict[str, Arm] = {}
    for name, block in read_blocks("arms", given, problems).items():
        where, own = f"arms.{name}", dict(block)
        source, swap, trained, step = own.pop("from", None), own.pop("swap", None), own.pop("train", True), own.pop("step", None)
        start = None if source is None else str(source)
        changes = nested(own)
        if start is not None and start not in found:
            remedy = suggest(start, found) if found else "the first arm is the baseline, which starts from random weights"
            problems.append(Problem(f"{where}.from", source, "is no earlier arm", remedy))
        if swap is not None and start is None:
            problems.append(Problem(f"{where}.swap", swap, "there are no weights to swap", "say of which arm: `from`"))
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 1):
            problems.append(Problem(f"{where}.step", step, "must be a step of the arm it starts from, at least 1"))
        elif step is not None and (start is None or swap is not None or trained is not True):
            reason = "goes on with the optimizer state of another arm"
            problems.append(Problem(f"{where}.step", step, reason, "name the arm: `from`, and drop `swap` and `train`"))
        if not isinstance(trained, bool):
            problems.append(Problem(f"{where}.train", trained, "must be true or false"))
        elif not trained and swap is None:
            problems.append(Problem(f"{where}.train", trained, "would be the arm it starts from", "give a `swap`, or train it"))
        before = len(problems)
        made = None if swap is None else build(Swap, swap, f"{where}.swap", problems)
        if made and len(problems) == before:
            changes = _with_normalizer(changes, made, where, problems)
        if trained is False and start in found:
            given = flatten(nested(own)) if own else {}
            for path in (path for path in given if not path.startswith("model.normalizer")):
                reason = "has no effect on an arm that is not trained"
                problems.append(Problem(f"{where}.{path}", given[path], reason, "drop it, or train the arm"))
            changes = merge(merge(found[start].changes, {"phases": []}), changes)
        if step is not None and start in found:
            changes = merge(found[start].changes, changes)
        found[name] = Arm(name, changes, start or "", made, bool(trained), step=step)
    if len(found) < 2 and not problems:
        problems.append(Problem("arms", list(found), "needs a baseline and at least one other arm"))
    return tuple(found.values())


def _with_normalizer(changes: dict[str, Plain], swap: Swap, where: str, problems: list[Problem]) -> dict[str, Plain]:
    """The changes of an arm with the normalizer that its weights are swapped to."""
    try:
        options = OPTIONS[swap.to]
    except Unavailable as error:
        problems.append(Problem(f"{where}.swap.to", swap.to, error.reason, error.remedy))
        return changes
    except KeyError:
        problems.append(Problem(f"{where}.swap.to", swap.to, "unknown normalizer", suggest(swap.to, OPTIONS)))
        return changes
    given = changes.get("model", {}).get("normalizer", {}) if is_block(changes.get("model", {})) else {}
    if not is_block(given) or given.get("name", swap.to) != swap.to or "init" in given:
        reason = f"the weights are swapped to {swap.to}"
        problems.append(Problem(f"{where}.model.normalizer", given, reason, "give its options by their keys, and init in `swap`"))
    first = options.first_init()
    if swap.init is not None and first is None:
        problems.append(Problem(f"{where}.swap.init", swap.init, f"{swap.to} has no parameters to start", "drop it"))
    elif swap.init not in (None, "fit"):
        wrong: list[Problem] = []
        build(options, {"init": swap.init}, "", wrong)
        for one in wrong:
            reason = f"must be fit, or {one.reason.removeprefix('must be ')}"
            problems.append(Problem(f"{where}.swap.init", swap.init, reason, one.remedy))
    init = {} if first is None else {"init": first if swap.init in (None, "fit") else swap.init}
    return merge(changes, {"model": {"normalizer": {"name": swap.to, **init}}})


def read_blocks(where: str, given: Plain, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """A map from names to blocks of keys; an empty block may be left out."""
    if not isinstance(given, dict):
        problems.append(Problem(where, given, "must be a map from names to what they change"))
        return {}
    found = {}
    for name, changes in given.items():
        taken = str(name) in TAKEN[where]
        if taken or not all(letter.isalnum() or letter in "-_." for letter in str(name)) or not 0 < len(str(name)) <= 40:
            problems.append(Problem(f"{where}.{name}", name, f"must be a name of at most 40 {_NAME}, not {', '.join(TAKEN[where])}"))
        elif str(name) in found:
            problems.append(Problem(f"{where}.{name}", name, "is there twice"))
        elif isinstance(changes, dict | None):
            found[str(name)] = dict(changes or {})
        else:
            problems.append(Problem(f"{where}.{name}", changes, "must be a block of configuration keys"))
    return found


def nested(changes: Mapping[str, Plain]) -> dict[str, Plain]:
    """{"optim.lr": 1} as {"optim": {"lr": 1}}; what is nested already stays so."""
    plain: dict[str, Plain] = {}
    for path, value in changes.items():
        names = str(path).split(".")
        if len(names) > MAX_DEPTH:
            raise ConfigError(f"{abbreviated(str(path), 80)}: not a configuration key")
        for name in reversed(names):
            value = {name: value}
        plain = merge(plain, value)
    return plain
