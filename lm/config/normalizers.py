"""The key `model.normalizer`: options by a normalizer's name, lists of them for layers, plugins, and the text of
docs/normalizers.md.
"""

import inspect
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass

from lm.attention.catalogue import ENTRIES, NORMALIZERS, implementation
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options, label_text, yaml_scalar
from lm.errors import Problem
from lm.plugins import PAGE, PLUGINS
from lm.schema import (
    Plain,
    Unavailable,
    build,
    cross_key_problems,
    fields,
    reference,
    to_plain,
    variants,
    yaml_flow,
)


def options_class(normalizer: type) -> type[Options]:
    """Return the options class of an outside normalizer, its attribute `schema`. Raises Unavailable: the class is no
    normalizer.
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
    return schema


class Catalogue(dict[str, type[Options]]):
    """Options classes by a normalizer's name. A name that is not lm's own is a plugin's, which the look-up imports."""

    def __missing__(self, name: str) -> type[Options]:
        options = PLUGINS.options(str(name), options_class)
        NORMALIZERS[options] = PLUGINS.implementation(options.name)
        return options

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

    def label(self) -> str:
        return _layers_label(options.label() for options in self.of)


def _layers_label(labels: Iterable[str]) -> str:
    return f"layers ({', '.join(labels)})"


OPTIONS = Catalogue({**SINGLE, Layers.name: Layers})


def with_changes(options: Options, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> Options:
    """Return the options of a trained normalizer, updated from `changes`; keys that are none of its options are
    ignored. Problems with the new values, at keys below `path`, are appended to `problems`."""
    if isinstance(options, Layers):
        return Layers([with_changes(layer, changes, path, problems) for layer in options.of])
    names = {spec.name for spec in fields(type(options))}
    overrides = {option: value for option, value in changes.items() if option in names}
    violations = [
        Problem(f"{path}.{option}", overrides[option], reason)
        for option, reason in options.fixed_by_training.items()
        if option in overrides
    ]
    changed = build(type(options), {**to_plain(options), **overrides}, path, violations)
    problems += violations or cross_key_problems(changed, path)
    return changed


def swap_arguments(options: Options) -> str:
    """The arguments of `lm swap --to` that set these options, except `init`. Example: `ssmax
    model.normalizer.bias=true`.
    """
    if isinstance(options, Layers):
        entries = [{"name": layer.name, **layer.non_defaults("init")} for layer in options.of]
        return f"layers {shlex.quote(f'model.normalizer.of={yaml_flow(entries)}')}"
    overrides = options.non_defaults("init").items()
    return " ".join([options.name, *(f"model.normalizer.{option}={yaml_scalar(value)}" for option, value in overrides)])


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

Kernels: *fused softmax* is PyTorch's (no T x T weights), where a bias of each key is one more dimension of it, in bf16
three; *tiles* are ours, forward and backward in tiles of 256 x 256 with fp32 sums, on CUDA GPUs in a Triton kernel;
*blocks of 64 queries* have a backward pass by hand; *query blocks* compute the definition for some queries at a time
and recompute it in the backward pass: on a CPU 2^18 to 2^21 weights at a time, on a GPU up to 2^27, as a sixteenth of
the memory that was free at the first call allows (64 bytes a weight). Decoding, and the last layer in training on tasks
alone, take query blocks in place of tiles or *chunks* (a running state). Packed documents are computed one by one.

On CUDA GPUs PyTorch's *FlexAttention* computes windows, softcap, scale_invariant, and packed documents of most entries
by fused softmax, up to 32,768 tokens; in bf16 *adasplash* computes entmax15, asentmax and sparsemax, *fla-core*
stick-breaking (`pip install -e '.[kernels]'`). The first call of each with an entry's options and sizes
compares output and gradients with query blocks on the device; where they differ or an error arises, other routes take
its place, with a warning. Nobody has run these on a GPU yet: `bash scripts/gpu_check.sh` does. For softpick no
package that is maintained has a kernel.

The first call of the Triton kernel compares it with the tiles on the device, and takes tiles, with a warning, if it
raises an error or differs. If it reads beyond its memory, the process ends ([limits](tools.md#limits)). It wants
triton 3.4 (CUDA builds of torch bring it), compute capability 8.0, heads of at most 128, bf16 or fp32 (multiplied in
full precision). A run prints the kernel it takes. Where the table names no kernel for CUDA, a GPU takes the CPU's.

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
