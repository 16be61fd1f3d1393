"""The catalogue of normalizers maps each class of options to the class of normalizer that it configures.

A normalizer is two classes in one module. One is a dataclass of options, with the formula, its source and published
results. The other is a subclass of `Normalizer` whose `schema` is that dataclass. The catalogue holds all such
subclasses in the modules `MODULES`. `lm.config.normalizers` adds the subclasses of imported plugins.
"""

from lm.attention import distance, elementwise, linear, query_scale, reweighted, sinks, sparse
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options

MODULES = query_scale, sinks, elementwise, reweighted, sparse, distance, linear
NORMALIZER_BY_OPTIONS: dict[type[Options], type[Normalizer]] = {
    member.schema: member
    for module in MODULES
    for member in vars(module).values()
    if isinstance(member, type) and issubclass(member, Normalizer) and hasattr(member, "schema")
}
OPTIONS_BY_NAME: dict[str, type[Options]] = {options.name: options for options in NORMALIZER_BY_OPTIONS}
globals().update({options.__name__: options for options in NORMALIZER_BY_OPTIONS})  # as `catalogue.SSMax`


def make_normalizer(options: Options, layer: LayerSpec) -> Normalizer:
    """Make the normalizer that `options` describe, for one layer."""
    return NORMALIZER_BY_OPTIONS[type(options)](options, layer)


def normalizer_class(name: str) -> type[Normalizer]:
    """Return the class of the normalizer whose options are named `name`, from lm or from an imported plugin."""
    return next(normalizer for options, normalizer in NORMALIZER_BY_OPTIONS.items() if options.name == name)
