"""The catalogue of normalizers: their classes of options by name, and the function that makes a layer's normalizer from
its options.

A normalizer is two classes in one module: a dataclass of options, with formula, source and published figures, and a
subclass of `Normalizer` whose `schema` is that dataclass. A new normalizer goes into `NORMALIZERS`.
"""

import inspect
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass

from lm.attention.distance import (
    ALiBi,
    ALiBiNormalizer,
    Forget,
    ForgetNormalizer,
    ScaleInvariant,
    ScaleInvariantNormalizer,
    SoftCap,
    SoftCapNormalizer,
    StickBreaking,
    StickBreakingNormalizer,
    Window,
    WindowNormalizer,
)
from lm.attention.elementwise import Relu, Relu2, Relu2Normalizer, ReluNormalizer, Sigmoid, SigmoidNormalizer
from lm.attention.linear import Linear, LinearNormalizer
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options, label_text
from lm.attention.query_scale import (
    PN,
    Cosine,
    CosineNormalizer,
    InfoScale,
    InfoScaleNormalizer,
    Llama4,
    Llama4Normalizer,
    LogN,
    LogNNormalizer,
    PNNormalizer,
    QASSMax,
    QASSMaxNormalizer,
    Softmax,
    SoftmaxWithTemperature,
    SqrtLogN,
    SqrtLogNNormalizer,
    SSMax,
    SSMaxNormalizer,
    YaRN,
    YaRNNormalizer,
)
from lm.attention.sinks import Sink, SinkNormalizer, Softmax1, Softmax1Normalizer
from lm.attention.sparse import (
    ASEntmax,
    ASEntmaxNormalizer,
    Entmax15,
    Entmax15Normalizer,
    Softpick,
    SoftpickNormalizer,
    Sparsemax,
    SparsemaxNormalizer,
)
from lm.errors import Problem
from lm.plugins import PAGE, PLUGINS
from lm.schema import Plain, Unavailable, build, reference, variants, yaml_flow

NORMALIZERS: dict[type[Options], type[Normalizer]] = {
    Softmax: SoftmaxWithTemperature,
    SSMax: SSMaxNormalizer,
    LogN: LogNNormalizer,
    SqrtLogN: SqrtLogNNormalizer,
    Llama4: Llama4Normalizer,
    YaRN: YaRNNormalizer,
    InfoScale: InfoScaleNormalizer,
    Cosine: CosineNormalizer,
    PN: PNNormalizer,
    QASSMax: QASSMaxNormalizer,
    Softmax1: Softmax1Normalizer,
    Sink: SinkNormalizer,
    Relu2: Relu2Normalizer,
    Relu: ReluNormalizer,
    Sigmoid: SigmoidNormalizer,
    Sparsemax: SparsemaxNormalizer,
    Entmax15: Entmax15Normalizer,
    ASEntmax: ASEntmaxNormalizer,
    Softpick: SoftpickNormalizer,
    ALiBi: ALiBiNormalizer,
    Window: WindowNormalizer,
    ScaleInvariant: ScaleInvariantNormalizer,
    Forget: ForgetNormalizer,
    SoftCap: SoftCapNormalizer,
    StickBreaking: StickBreakingNormalizer,
    Linear: LinearNormalizer,
}
ENTRIES: dict[str, type[Options]] = {options.name: options for options in NORMALIZERS}


def options_class(normalizer: type) -> type[Options]:
    """Return the options class of an outside normalizer, its attribute `schema`. Raises Unavailable: the class is no
    normalizer, or sets attributes or methods where they have no effect.
    """
    schema, remedy = getattr(normalizer, "schema", None), f"see {PAGE}"
    if not (
        isinstance(schema, type)
        and issubclass(schema, Options)
        and is_dataclass(schema)
        and hasattr(schema, "full_formula")
    ):
        raise Unavailable("is no normalizer: its `schema` is no dataclass of options with a full_formula", remedy)
    if not (isinstance(normalizer, type) and issubclass(normalizer, Normalizer)):
        raise Unavailable("is no normalizer: no subclass of lm.attention.normalizer.Normalizer", remedy)
    if inspect.isabstract(normalizer):
        raise Unavailable(f"is not whole: it has no {', '.join(sorted(normalizer.__abstractmethods__))}", remedy)
    for owner, other, names in ((schema, normalizer, _OPTION_ATTRIBUTES), (normalizer, schema, _CODE_ATTRIBUTES)):
        if misplaced_names := [name for name in names if hasattr(other, name)]:
            raise Unavailable(
                f"sets {misplaced_names[0]} where it has no effect", f"set it on the class {owner.__name__}"
            )
    return schema


class Catalogue(dict[str, type[Options]]):
    """Options classes by a normalizer's name. A name that is not lm's own is a plugin's, which the look-up imports."""

    def __missing__(self, name: str) -> type[Options]:
        return PLUGINS.options(str(name), options_class)

    def suggestions(self) -> list[str]:
        """Names of lm's own normalizers and of the installed plugins, for error messages."""
        return [*self, *sorted(PLUGINS.installed())]


SINGLE = Catalogue(ENTRIES)  # options of one layer's normalizer


@dataclass
class Layers(Options):
    """Options of a normalizer per layer: layer i takes entry i mod len(of) of the list `of`. A configuration may give
    the list alone.
    """

    name = "layers"
    full_formula = "layers"
    of: list[Options] = variants(
        SINGLE,
        "the layers' normalizers, repeated from the first layer on, e.g. [window, window, {name: ssmax, bias: true}]",
    )

    def problems(self) -> list[Problem]:
        return [] if self.of else [Problem("of", [], "no normalizers given", "list one or more")]

    def layer_options(self) -> list[Options]:
        """The options of each normalizer in the list `of`."""
        return self.of

    def with_changes(self, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> "Layers":
        return Layers([options.with_changes(changes, path, problems) for options in self.layer_options()])

    def label(self) -> str:
        return _layers_label(options.label() for options in self.of)

    def swap_arguments(self) -> str:
        entries = [{"name": options.name, **options.non_defaults("init")} for options in self.of]
        return f"layers {shlex.quote(f'model.normalizer.of={yaml_flow(entries)}')}"


def _layers_label(labels: Iterable[str]) -> str:
    return f"layers ({', '.join(labels)})"


OPTIONS = Catalogue({**SINGLE, Layers.name: Layers})


# attributes of options
_OPTION_ATTRIBUTES = ("full_formula", "sums_to_one", "over_sum", "fixed_by_training", "formula", "problems")
_CODE_ATTRIBUTES = (
    "score_map",
    "initialise",
    "define_scores",
    "normalize",
    "scale_by_position",
    "visible",
    "log_sum",
    "forward",
    "decode",
)


def implementation(name: str) -> type[Normalizer]:
    """The class of the normalizer whose options have the name `name`, from lm or from an imported plugin."""
    return NORMALIZERS[ENTRIES[name]] if name in ENTRIES else PLUGINS.implementation(name)


def make_normalizer(options: Options, layer: LayerSpec) -> Normalizer:
    """The normalizer that `options` describe, for a layer."""
    return implementation(options.name)(options, layer)


def options_from_plain(plain: Mapping[str, Plain]) -> Options | None:
    """Options made of those in a run folder, `plain`. None for plugins, which are not imported, and if this version of
    lm rejects them.
    """
    problems: list[Problem] = []
    options = build(OPTIONS[plain["name"]], plain, "", problems) if plain["name"] in OPTIONS else None
    return None if problems else options


def label(plain: Mapping[str, Plain]) -> str:
    """The label of a normalizer from its options in a run folder: its name and the options that differ from their
    defaults, such as `ssmax (n=sample)`. The label names all options if `options_from_plain` returns None."""
    if plain["name"] == Layers.name:
        return _layers_label(map(label, plain["of"]))
    options = options_from_plain(plain)
    return (
        options.label()
        if options
        else label_text(plain["name"], {option: value for option, value in plain.items() if option != "name"})
    )


def description(name: str) -> list[str]:
    """Lines on one normalizer: formula, learned parameters, source, published figures, and an option a line."""
    entry = ENTRIES[name]
    facts = {
        "weights": entry.full_formula,
        "parameters": entry.learned_parameters,
        "kernel": implementation(name).kernel,
    }
    facts |= {"source": entry.source, "known": entry.known}
    lines = [name, *(f"  {fact:<11} {text}" for fact, text in facts.items() if text)]
    options = reference(entry)
    return lines + [f"  {path:<11} {kind}, default {default}: {text}" for path, kind, default, text in options]


_HEAD = """# Normalizers

One of your own: [normalizers-own.md](normalizers-own.md).

Generated by `scripts/generate.py`. `z = q.k / sqrt(D)`, `D`: head size; `n`: row length; `m`: training length; `t`: how
many tokens back a key is; `p`: position. Every entry works in ordinary attention and in GAU (`model.block: gau`), with
packed documents, and decodes with a cache of keys and values. Weights are causal; `n` comes from positions, never from
widths. Scores, thresholds and sums are in fp32 at least, whatever `trainer.precision` says. Operands in bf16 are those
of products with values, within PyTorch's fused softmax, and of scores in *tiles*. A row that is divided by a sum below
1e-24 has weights 0.

Kernels: *fused softmax* is PyTorch's (no T x T weights); *tiles* are ours, forward and backward in tiles of 256 x 256
with fp32 sums, on CUDA GPUs in a Triton kernel; *query blocks* compute the definition for some queries at a time and
recompute it in the backward pass: on a CPU 2^18 to 2^21 weights at a time, on a GPU up to 2^27, as a sixteenth of the
memory that was free at the first call allows (64 bytes a weight). Decoding, and the last layer in training on tasks
alone, take query blocks in place of tiles or *chunks* (a running state). Packed documents are computed one by one.

The first call of the Triton kernel compares it with the tiles on the device, and takes tiles, with a warning, if it
raises an error or differs. If it reads beyond its memory, the process ends ([limits](limits.md)). It wants triton 3.4
(CUDA builds of torch bring it), compute capability 8.0, heads of at most 128, bf16 or fp32 (multiplied in full
precision). A run prints the kernel it takes.

| `model.normalizer` | weights | parameters | rows sum to 1 | kernel | source | what is known |
|---|---|---|---|---|---|---|"""


def markdown() -> str:
    """The text of docs/normalizers.md: a table with one row per normalizer, then a table of all options."""
    lines = [_HEAD]
    for name, entry in ENTRIES.items():
        sums = "with `n: sum`" if entry.over_sum else "yes" if entry.sums_to_one else "no"
        facts = (
            entry.full_formula,
            entry.learned_parameters,
            sums,
            implementation(name).kernel,
            entry.source,
            entry.known,
        )
        lines.append(_table_row(f"`{name}`", *facts))
    lines += ["", "## Options", "", "| key | type | default | what it is |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        lines += [
            _table_row(f"`{path}`", kind, f"`{default}`", text) for path, kind, default, text in reference(option, name)
        ]
    return "\n".join(lines) + "\n"


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |"
