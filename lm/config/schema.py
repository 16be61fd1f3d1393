"""Builds dataclasses from plain data (values, lists and maps, as in YAML), with strict checks. Each dataclass describes
a block of keys.

`key` makes a field for a value, `section` a field for blocks of one dataclass, `variant` one for blocks whose `name`
selects a dataclass. A field for blocks has the metadata `default` (see `variant`) and `blocks`, which maps the names
that a user can choose to dataclasses. For a `section`, `blocks` maps "" to its one dataclass.
"""

import difflib
import functools
import operator
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, is_dataclass, replace
from dataclasses import fields as declared_fields

from lm.attention.options import key as key
from lm.config.removed_keys import removed_defaults, removed_name_advice
from lm.errors import ConfigError, PluginUnavailable, Problem, suggestion_or_all_names
from lm.plain import Plain, converted_or_missing, direct_items_with_paths, is_config_block, join_path, type_name

# {bound of a number, or of each number in a list or map: (sign, test)}
BOUND_TESTS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}


@functools.cache  # each configuration needs the fields of a class many times
def typed_fields(block_class: type) -> tuple[Field, ...]:
    """Return a dataclass's fields. Their `type` is a type, not text, even under `from __future__ import
    annotations`.
    """
    specs, hints = declared_fields(block_class), typing.get_type_hints(block_class)
    for spec in specs:
        spec.type = hints[spec.name]
    return specs


@dataclass(frozen=True)
class Effect:
    """An effect says what a key affects, whether a resumed run may change it, and in which commands it acts.
    docs/config.md explains the words.
    """

    affects: str = "training"
    on_resume: str = "same"  # or `free`, `ahead`, `branch`
    commands: tuple[str, ...] = ("train",)


# the entries of an `Effect` that a field declares; it inherits the others from the block that contains it
DeclaredEffect = dict[str, str | tuple[str, ...]] | None
BlockDefault = list | dict | str | None
BlockClasses = Mapping[str, type]


def variant(
    block_classes: BlockClasses,
    default: BlockDefault,
    help: str,
    effect: DeclaredEffect = None,
    *,
    omit_default: bool = False,
    user_settable: bool = True,
):
    """Make a field for a block whose `name` selects a dataclass in `block_classes`. A configuration that gives a name
    alone takes all defaults.

    `default` names the dataclass of which the field by default holds an instance. If `default` is None, the field is
    null by default. If it is a list, the field holds a list of such blocks. If it is a dict, the field maps names that
    the user chooses to such blocks.

    Args:
        effect: entries of an `Effect`; the field inherits the others from the block that contains it.
        omit_default: whether plain data (`lm.plain.to_plain`), and so hashes, leave the key out while it has its
            default.
        user_settable: whether users may set the key; False: lm alone sets it.
    """
    is_single_block = not isinstance(default, list | dict)
    make_default = (lambda: None if default is None else block_classes[default]()) if is_single_block else default.copy
    metadata = {"blocks": block_classes, "default": default, "help": help, "effect": effect}
    metadata |= {"omit_default": omit_default, "user_settable": user_settable}
    return field(default_factory=make_default, metadata=metadata)


def section(
    block_class: type,
    help: str,
    effect: DeclaredEffect = None,
    *,
    default: BlockDefault = "",
    user_settable: bool = True,
):
    """Make a field for a nested block, which the dataclass `block_class` describes.

    By default the field holds an instance of `block_class` with its defaults. With `default` None the block is null
    (off) until one of its keys is given. With a list as `default`, the field holds a list of blocks.
    """
    return variant({"": block_class}, default, help, effect, user_settable=user_settable)


def fields_along_path(block_class: type, path: str) -> list[Field]:
    """Return the fields along a dotted path such as `a[0].b`, the outermost first. Return [] if a block whose dataclass
    is fixed has no such key.

    The list ends early at a field of plain data. It also ends early at a block whose name selects its dataclass, if no
    known dataclass has the next key: a plugin's may have it.
    """
    specs, block_classes, is_choice = [], [block_class], False
    for name in path.split("."):
        matches = (
            spec for block in block_classes for spec in typed_fields(block) if spec.name == name.partition("[")[0]
        )
        if (spec := next(matches, None)) is None:
            return specs if is_choice else []
        specs.append(spec)
        if not (blocks := spec.metadata.get("blocks")):
            break
        block_classes, is_choice = [*blocks.values()], "" not in blocks
    return specs


def effect_at(block_class: type, path: str) -> Effect | None:
    """Return the effect of the key at the dotted `path`; None if `block_class` has no such key.

    A path into a key's plain data has the key's effect. An option of a plugin has the effect of the plugin's block. If
    a field declares what a key `affects` but not `on_resume`, the latter follows. It is `same` (a resumed run must keep
    the value) if the key affects model, training or seed, else `free` (the run may change it).
    """
    specs, entries = fields_along_path(block_class, path), {}
    for changes in (spec.metadata["effect"] or {} for spec in specs):
        if affects := changes.get("affects"):
            entries["on_resume"] = "same" if affects in ("model", "training", "seed") else "free"
        entries |= changes
    return Effect(**entries) if specs else None


def build_block(
    block_class: type, data: Plain, path: str, problems: list[Problem], choices: BlockClasses | None = None
):
    """Return an instance of `block_class` made from plain `data`. Append each problem of a single key to `problems`.

    Keys in the attribute `required_keys` of `block_class` must be given. Their values must not be empty, nor be lists
    with an empty text.

    Args:
        path: the block's path, which begins the paths of problems.
        choices: {name: dataclass} from which the block's name selected `block_class`, for advice on keys of other
            choices.
    """
    specs, values = {spec.name: spec for spec in typed_fields(block_class)}, {}
    if not isinstance(data, Mapping):
        problems.append(Problem(path, data, "must be a block of keys", f"keys: {', '.join(specs)}"))
        return block_class()
    for name, value in data.items():
        key_path = join_path(path, name)
        if name in specs:
            values[name] = _field_value(specs[name], value, key_path, problems)
        elif defaults := removed_defaults(path, getattr(block_class, "name", ""), name):
            if value not in defaults:
                problems.append(Problem(key_path, value, "is no key of lm any more", "see CHANGELOG.md"))
        elif name != "name" or not hasattr(block_class, "name"):
            advice = _key_advice(block_class, str(name), choices or {}, path)
            problems.append(Problem(key_path, value, "unknown key", advice))
    block = block_class(**{name: value for name, value in values.items() if value is not MISSING})
    for name in getattr(block_class, "required_keys", ()):
        value = values.get(name, getattr(block, name))
        if value is not MISSING and (not value or "" in [*value]):
            problems.append(Problem(join_path(path, name), value, "must be given", specs[name].metadata["help"]))
    return block


def _key_advice(block_class: type, name: str, choices: BlockClasses, path: str) -> str:
    """Return advice on the unknown key `name` of the block at `path`: where a key of this name, or a similar one,
    exists.
    """
    if ":" in name:
        return "write a space after the colon"
    if owners := [choice for choice, options in choices.items() if fields_along_path(options, name)]:
        return f"it is an option of {', '.join(owners)}, not of {block_class.name}"
    paths = [*dict.fromkeys(_key_paths(block_class))]
    match = difflib.get_close_matches(name, [path.rpartition(".")[2] for path in paths], n=1)
    found_paths = [join_path(path, inner) for inner in paths if inner.rpartition(".")[2] in match]
    if match and match[0] not in paths and len(found_paths) <= 3:
        return f"did you mean {' or '.join(found_paths)}?"
    return suggestion_or_all_names(name, [spec.name for spec in typed_fields(block_class)])


def _key_paths(block_class: type) -> Iterator[str]:
    """Yield the path of each key of `block_class` that a user may set. Keys of nested blocks count, those in lists and
    maps of blocks do not.
    """
    for spec in typed_fields(block_class):
        yield spec.name
        if not isinstance(spec.metadata.get("default"), list | dict) and spec.metadata.get("user_settable", True):
            for block in spec.metadata.get("blocks", {}).values():
                yield from (f"{spec.name}.{inner}" for inner in _key_paths(block))


def _field_value(spec: Field, value: Plain, path: str, problems: list[Problem]):
    """Return the value of a field, made from plain data. If the data are wrong, append a problem and return MISSING."""

    def refuse(reason: str, remedy: str = ""):
        problems.append(Problem(path, value, reason, remedy))
        return MISSING

    blocks, default = spec.metadata.get("blocks"), spec.metadata.get("default")
    if isinstance(default, dict):
        if not is_config_block(value):
            return refuse("must be a map from names to blocks")
        return {
            name: _build_selected_block(blocks, None, item, f"{path}.{name}", problems) for name, item in value.items()
        }
    if isinstance(default, list):
        content = [value] if "" not in blocks and not isinstance(value, list) else value or []
        if not isinstance(content, list):
            return refuse("must be a list of blocks")
        return [
            _build_selected_block(blocks, None, item, item_path, problems)
            for item_path, item in direct_items_with_paths(content, path)
        ]
    if blocks:
        return None if value is default is None else _build_selected_block(blocks, default, value, path, problems)
    if (result := converted_or_missing(spec.type, value)) is MISSING:
        remedy = f"quote it in the YAML ({spec.metadata['help']})" * (spec.type is str)
        return refuse(f"must be {type_name(spec.type)}{removed_name_advice(value)}", remedy)
    limits, values = spec.metadata["limits"], result.values() if isinstance(result, dict) else result
    numbers = [item for item in (values if isinstance(values, Iterable) else [values]) if type(item) in (int, float)]
    if not all(BOUND_TESTS[name][1](number, limit) for name, limit in limits.items() for number in numbers):
        return refuse(f"must be {limits_text(limits)}")
    return result


def limits_text(limits: Mapping[str, float]) -> str:
    """Return bounds as text, e.g. `>= 1 and < 10`."""
    texts = (
        f"{BOUND_TESTS[name][0]} {limit if type(limit) is int else f'{limit:g}'}" for name, limit in limits.items()
    )
    return " and ".join(texts)


def _build_selected_block(blocks: BlockClasses, default: str | None, value: Plain, path: str, problems: list[Problem]):
    """Build the block that `value`, a name or keys, describes, and check its keys. If no dataclass has the
    name, append a problem and return MISSING.
    """
    if "" in blocks:
        return build_block(blocks[""], value, path, problems)
    if isinstance(value, list) and "layers" in blocks:
        value = {"name": "layers", "of": value}
    value = {"name": value} if isinstance(value, str) else value
    if not is_config_block(value) or value.get("name", default) is None:
        problems.append(
            Problem(path, value, "must be a name or a block with a 'name'", suggestion_or_all_names("", blocks))
        )
        return MISSING
    name = value.get("name", default)
    try:
        block_class = blocks[name if isinstance(name, str) else ""]  # no block has an empty name
    except PluginUnavailable as error:
        reason = error.reason, error.remedy
    except KeyError:
        reason = "unknown name", suggestion_or_all_names(name, blocks) + removed_name_advice(name)
    else:
        return build_block(block_class, value, path, problems, blocks)
    problems.append(Problem(f"{path}.name", name, *reason))
    return MISSING


def build_named_block(block_classes: BlockClasses, value: Plain, path: str, default: str | None = None):
    """Return the block that `value`, a name or a block with a name, selects from `block_classes`. Without a name,
    `default` is taken.

    Raises ConfigError: one message lists all problems of single keys, or if there are none, all contradictions between
    the block's keys.
    """
    problems: list[Problem] = []
    block = _build_selected_block(block_classes, default, value, path, problems)
    if problems := problems or cross_key_problems(block, path):
        raise ConfigError(problems)
    return block


def cross_key_problems(block, path: str = "") -> list[Problem]:
    """Return the problems that concern several keys of `block`, or of a block within it. The methods `problems` of the
    dataclasses report them.
    """
    own_problems = getattr(block, "problems", list)()
    problems = [replace(problem, key_path=join_path(path, problem.key_path)) for problem in own_problems]
    for spec in typed_fields(type(block)):
        for item_path, item in direct_items_with_paths(getattr(block, spec.name), join_path(path, spec.name)):
            problems += cross_key_problems(item, item_path) if is_dataclass(item) else []
    return problems
