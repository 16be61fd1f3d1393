"""Options of the key `model.normalizer`: lm's own normalizers by name, a list with one for each layer, and plugins."""

import inspect
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass

from lm.attention.catalogue import NORMALIZER_BY_OPTIONS, OPTIONS_BY_NAME
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options, label_text
from lm.config.schema import build_block, cross_key_problems, typed_fields, variant
from lm.config.yaml_text import yaml_flow
from lm.errors import PluginUnavailable, Problem, yaml_scalar
from lm.plain import Plain, to_plain
from lm.plugins import PLUGINS, REQUIREMENTS_PAGE


def options_class(normalizer: type) -> type[Options]:
    """Return the class of a plugin's options: the attribute `schema` of the normalizer that the plugin defines.

    Raises PluginUnavailable: `normalizer` is not a complete subclass of `Normalizer` with a dataclass of options.
    """
    schema, remedy = getattr(normalizer, "schema", None), f"see {REQUIREMENTS_PAGE}"
    if not (
        isinstance(schema, type)
        and issubclass(schema, Options)
        and is_dataclass(schema)
        and hasattr(schema, "full_formula")
    ):
        raise PluginUnavailable("is no normalizer: its `schema` is no dataclass of options with a full_formula", remedy)
    if not (isinstance(normalizer, type) and issubclass(normalizer, Normalizer)):
        raise PluginUnavailable("is no normalizer: no subclass of lm.attention.normalizer.Normalizer", remedy)
    if inspect.isabstract(normalizer):
        raise PluginUnavailable(f"is not whole: it has no {', '.join(sorted(normalizer.__abstractmethods__))}", remedy)
    return schema


class Catalogue(dict[str, type[Options]]):
    """A catalogue maps a normalizer's name to its class of options. If lm has no normalizer of that name, the look-up
    imports the plugin of that name.
    """

    def __missing__(self, name: str) -> type[Options]:
        """Import the plugin `name`, register its normalizer, and return its class of options."""
        plugin = PLUGINS.import_plugin(str(name), options_class)
        NORMALIZER_BY_OPTIONS[plugin.options_class] = plugin.normalizer_class
        return plugin.options_class

    def suggestions(self) -> list[str]:
        """Return the names of lm's own normalizers and of the installed plugins, for error messages."""
        return [*self, *sorted(PLUGINS.installed_plugins())]


LAYER_OPTIONS = Catalogue(OPTIONS_BY_NAME)  # options of one layer's normalizer


@dataclass
class LayerList(Options):
    """Each layer has a normalizer of its own: layer i takes entry i of the list `of`. The list is repeated if the model
    has more layers. A configuration may give the list alone.
    """

    name = "layers"
    full_formula = "layers"
    required_keys = ("of",)
    of: list[Options] = variant(
        LAYER_OPTIONS,
        [],
        "the layers' normalizers, repeated from the first layer on, e.g. [window, window, {name: ssmax, bias: true}]",
    )

    def layer_options(self) -> list[Options]:
        """Return the options of each normalizer in the list `of`."""
        return self.of

    def label(self) -> str:
        return _layers_label(options.label() for options in self.of)


def _layers_label(labels: Iterable[str]) -> str:
    return f"layers ({', '.join(labels)})"


NORMALIZER_OPTIONS = Catalogue({**LAYER_OPTIONS, LayerList.name: LayerList})


def change_options(options: Options, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> Options:
    """Return the options of a trained normalizer, with the values in `changes`. Keys that are none of its options are
    ignored.

    Problems with the new values, at keys below `path`, are appended to `problems`.
    """
    if isinstance(options, LayerList):
        return LayerList([change_options(layer, changes, path, problems) for layer in options.of])
    names = {spec.name for spec in typed_fields(type(options))}
    overrides = {option: value for option, value in changes.items() if option in names}
    violations = [
        Problem(f"{path}.{option}", overrides[option], reason)
        for option, reason in options.fixed_by_training.items()
        if option in overrides
    ]
    changed = build_block(type(options), {**to_plain(options), **overrides}, path, violations)
    problems += violations or cross_key_problems(changed, path)
    return changed


def swap_arguments(options: Options) -> str:
    """Return the arguments of `lm swap --to` that set these options, except `init`, such as `ssmax
    model.normalizer.bias=true`.
    """
    if isinstance(options, LayerList):
        entries = [{"name": layer.name, **layer.non_defaults("init")} for layer in options.of]
        return f"layers {shlex.quote(f'model.normalizer.of={yaml_flow(entries)}')}"
    overrides = options.non_defaults("init").items()
    return " ".join([options.name, *(f"model.normalizer.{option}={yaml_scalar(value)}" for option, value in overrides)])


def options_from_plain(plain_options: Mapping[str, Plain]) -> Options | None:
    """Make options from the plain data in a run folder. Return None for a plugin, which is not imported, and for
    options that this version of lm rejects.
    """
    problems: list[Problem] = []
    schema = NORMALIZER_OPTIONS.get(plain_options["name"])
    options = build_block(schema, plain_options, "", problems) if schema else None
    return None if problems else options


def description(plain_options: Mapping[str, Plain]) -> str:
    """Return the formula, source and `label` of the normalizer that has these options, plain data from a run folder."""
    entry, options = OPTIONS_BY_NAME.get(plain_options["name"]), options_from_plain(plain_options)
    formula, source = options.formula() if options else plain_options["name"], f" ({entry.source})" if entry else ""
    return f"{formula}{source}; {label(plain_options)}"


def label(plain_options: Mapping[str, Plain]) -> str:
    """Return the label of a normalizer, given as plain data in a run folder: its name and the options that differ from
    their defaults.

    An example is `ssmax (n=sample)`. The label lists all options if `options_from_plain` returns None.
    """
    if plain_options["name"] == LayerList.name:
        return _layers_label(map(label, plain_options["of"]))
    options = options_from_plain(plain_options)
    return (
        options.label()
        if options
        else label_text(
            plain_options["name"], {option: value for option, value in plain_options.items() if option != "name"}
        )
    )
