"""The catalogue of normalizers: which there are, the class that implements each, its source and what is known of it.

A new normalizer is an options class (`lm.attention.options`), the class that implements it (in a module of this package)
and one row here. Nothing in this module imports torch.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lm.attention import options
from lm.attention.options import Options, labelled
from lm.attention.plugins import PLUGINS
from lm.errors import Problem
from lm.schema import Plain, build, reference, variants


@dataclass(frozen=True)
class Entry:
    """One normalizer: the options' dataclass, the class that implements it, and what the docs say."""

    options: type[Options]
    implementation: str  # "module:Class"
    parameters: str
    kernel: str  # what computes a training step
    source: str
    known: str  # published figures, with their source

    def load(self) -> type:
        """The implementing `Normalizer` class (imports torch)."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(f"lm.attention.{module}"), name)


SDPA, TILES, BLOCKS, CHUNKS = "fused softmax", "tiles", "query blocks", "chunks, O(T)"

_ROWS = (
    Entry(
        options.Softmax, "query_scale:Softmax", "none", SDPA, "baseline",
        "entropy grows as ln n: attention fades with length",
    ),
    Entry(
        options.SSMax, "query_scale:SSMax", "s (and b) per layer and head", SDPA,
        "Nakanishi 2025, arXiv 2501.19399, Eq. 2",
        "training loss 0.008 nats below softmax at 162 M (same paper); validation loss 3 % worse at 1.2 B and 6 points downstream "
        "(2605.20798, secondary)",
    ),
    Entry(
        options.LogN, "query_scale:LogN", "none", SDPA, "Su 2021, kexue.fm 8823",
        "masked LM trained at 64, at 256: accuracy 34.0 % against softmax's 23.0 % (8823); causal with RoPE, at 8 times the length: under "
        "a point alone, 4 to 10 points once positions are handled (kexue.fm 9708, 9948)",
    ),
    Entry(
        options.SqrtLogN, "query_scale:SqrtLogN", "c per layer and head", SDPA,
        "Gaussian logits (extreme values)",
        "largest weight of Gaussian logits, c = 1: .46, .39, .35 at n = 64, 1,024, 16,384",
    ),
    Entry(
        options.Llama4, "query_scale:Llama4", "none", SDPA, "Llama 4's code",
        "used there in layers without positions",
    ),
    Entry(
        options.YaRN, "query_scale:YaRN", "none", SDPA, "Peng et al. 2023, arXiv 2309.00071",
        "one factor for each document; softmax up to the training length m",
    ),
    Entry(
        options.InfoScale, "query_scale:InfoScale", "none", SDPA, "arXiv 2501.08570",
        "made for models trained without it",
    ),
    Entry(
        options.Cosine, "query_scale:Cosine", "g per layer and head", SDPA,
        "Henry et al. 2020, arXiv 2010.04245; Su, kexue.fm 9859",
        "GAU trained at 512, at 4,096, with g = 4 ln n: 64.7 % against 24.2 % of plain RoPE, on repeated text (kexue.fm 9859)",
    ),
    Entry(
        options.PN, "query_scale:PN", "s, b per layer and head; p_n for each n, shared by all", SDPA,
        "Nakanishi 2025, arXiv 2501.19399, sec. 2.1", "p_n is well fitted by a1 ln n + a2 at 162 M and 1,024 tokens (same paper)",
    ),
    Entry(
        options.QASSMax, "query_scale:QASSMax", "two MLPs, 64 hidden, per layer", SDPA,
        "TabICLv2's code", "holds 100 % where SSMax fails, at 15k negatives; adopted by TabPFN-3 (TabICLv2; secondary)",
    ),
    Entry(
        options.Softmax1, "sinks:Softmax1", "none", SDPA, "Miller 2023", "removes attention sinks",
    ),
    Entry(
        options.Sink, "sinks:Sink", "b per layer and head", SDPA, "gpt-oss's code",
        "softmax times sigmoid(lse - b)",
    ),
    Entry(
        options.Relu2, "elementwise:Relu2Normalizer", "none", TILES, "Hua et al. 2022, arXiv 2202.10447",
        "a fixed n transfers to other lengths better than the sample's, softmax best (kexue.fm 9019, no figures published)",
    ),
    Entry(
        options.Relu, "elementwise:ReluNormalizer", "none", TILES, "Wortsman et al. 2023, arXiv 2309.08586",
        "no figures known to us",
    ),
    Entry(
        options.Sigmoid, "elementwise:SigmoidNormalizer", "none (or b per layer and head)", TILES,
        "arXiv 2409.04431",
        "2.4 % worse loss and 16 points downstream at 1.2 B (2605.20798, secondary)",
    ),
    Entry(
        options.Sparsemax, "sparse:Sparsemax", "none", BLOCKS, "Martins and Astudillo 2016, arXiv 1602.02068", "exact zeros",
    ),
    Entry(
        options.Entmax15, "sparse:Entmax15", "none", BLOCKS, "Peters et al. 2019, arXiv 1905.05702", "exact zeros",
    ),
    Entry(
        options.ASEntmax, "sparse:ASEntmax", "w_b, w_g (width C) per layer and head", BLOCKS,
        "arXiv 2506.16640",
        "multi-query recall to 65k from training at 64; loss better at 8 times the length (abstract)",
    ),
    Entry(
        options.Softpick, "sparse:Softpick", "none", BLOCKS, "softpick's code, 2025",
        "no sinks and 47 % exact zeros at 340 M (secondary)",
    ),
    Entry(
        options.ALiBi, "distance:ALiBi", "none", BLOCKS, "Press et al. 2021, arXiv 2108.12409",
        "trained at 4k, at 64k: loss flat (3.27), needles lost (.003): arXiv 2505.17083. The formula also where H is no power of 2, for "
        "which its authors' code interleaves two series",
    ),
    Entry(
        options.Window, "distance:Window", "none", SDPA, "Beltagy et al. 2020, arXiv 2004.05150",
        "for local layers: `[window, window, ssmax]`",
    ),
    Entry(
        options.ScaleInvariant, "distance:ScaleInvariant", "none", BLOCKS, "arXiv 2505.17083",
        "with p-RoPE, trained at 4k, at 64k: loss 3.247 (log n 3.317, softmax 5.735), needles .969 (.939, .000), same paper",
    ),
    Entry(
        options.Forget, "distance:Forget", "w (width C) and b per layer and head", BLOCKS, "arXiv 2503.02130",
        "good extrapolation, needles near-perfect within the training length (abstract)",
    ),
    Entry(
        options.Linear, "linear:Linear", "none", CHUNKS,
        "Katharopoulos et al. 2020, arXiv 2006.16236; Sun et al. 2023, arXiv 2307.08621",
        "can't concentrate: S >= .80 with identity features and Gaussian keys (Su, kexue.fm 9889)",
    ),
)  # fmt: skip

ENTRIES: dict[str, Entry] = {entry.options.name: entry for entry in _ROWS}


class OptionsByName(dict[str, type[Options]]):
    """Options by the name of their normalizer. Also finds those from outside, which it does not list (`lm.attention.plugins`)."""

    def __missing__(self, name: str) -> type[Options]:
        return PLUGINS.options(str(name))


SINGLE = OptionsByName({name: entry.options for name, entry in ENTRIES.items()})  # options of one layer's normalizer


@dataclass
class Layers(Options):
    """Another normalizer in each layer: the list, over and over, from the first layer to the last. A bare list stands for it."""

    name = "layers"
    full_formula = "layers"
    of: list[object] = variants(
        SINGLE, "the layers' normalizers, repeated from the first layer on, e.g. [window, window, {name: ssmax, bias: true}]"
    )

    def problems(self) -> list[Problem]:
        return [] if self.of else [Problem("of", [], "no normalizers given", "list one or more")]

    def layer_options(self) -> list[Options]:
        """The options in the list that could be read: others are problems already."""
        return [options for options in self.of if isinstance(options, Options)]

    def of_layer(self, layer: int) -> Options:
        return self.of[layer % len(self.of)]

    def with_changes(self, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> "Layers":
        return Layers([options.with_changes(changes, path, problems) for options in self.layer_options()])

    def label(self) -> str:
        return _listed(options.label() for options in self.of)

    def swap_arguments(self) -> str:
        return f"layers 'model.normalizer.of=[{', '.join(options.name for options in self.of)}]'"


def _listed(labels: Iterable[str]) -> str:
    return f"layers ({', '.join(labels)})"


OPTIONS = OptionsByName({**SINGLE, Layers.name: Layers})


def implementation(name: str) -> type:
    """The `Normalizer` class of options of this name (imports torch)."""
    return ENTRIES[name].load() if name in ENTRIES else PLUGINS.implementation(name)


def read(plain: Mapping[str, Plain]) -> Options | None:
    """The options that a run folder holds as plain data; None if they are not of this version of lm. Imports nothing."""
    problems: list[Problem] = []
    options = build(OPTIONS[plain["name"]], plain, "", problems) if plain["name"] in OPTIONS else None
    return None if problems else options


def label(plain: Mapping[str, Plain]) -> str:
    """The label of options that a run folder holds; of those that aren't known here with all options."""
    if plain["name"] == Layers.name:
        return _listed(map(label, plain["of"]))
    options = read(plain)
    return options.label() if options else labelled(plain["name"], {option: value for option, value in plain.items() if option != "name"})


def markdown() -> str:
    """docs/normalizers.md: the table, one row an entry, then each entry's options."""
    lines = [
        "# Normalizers",
        "",
        "One of your own: [normalizers-own.md](normalizers-own.md).",
        "",
        "Generated by `lm normalizers`; a test keeps it true. `z = q.k / sqrt(D)`, `D`: head size; `n`: row length; `m`: training length;",
        "`t`: how many tokens back a key is; `p`: position. Every entry works in ordinary attention and in GAU (`model.block: gau`), with",
        "packed documents, and decodes with a cache of keys and values. Weights are causal; `n` comes from positions, never from widths.",
        "Scores, thresholds and sums are in fp32 at least, whatever `trainer.precision` says; only their products with values and the",
        "products inside PyTorch's fused softmax have bf16 operands. A row that is divided by a sum below 1e-24 has weights 0.",
        "",
        "Kernels: *fused softmax* is PyTorch's (no T x T weights); *tiles* are ours, forward and backward in tiles of 256 x 256 with fp32",
        "sums, on CUDA GPUs in a Triton kernel; *query blocks* compute the definition for some queries at a time and recompute it in the",
        "backward pass: on a CPU 2^21 weights at a time, on a GPU up to 2^27, as a sixteenth of the memory that was free at the first",
        "call allows (64 bytes a weight). Sequences that are not one document each (packed, decoding) take query blocks where tiles or",
        "*chunks* (a running state) would serve whole documents.",
        "",
        "The Triton kernel has been compiled for GPUs and run in Triton's interpreter, but never on a GPU: the first call compares it with",
        "the tiles on the device, and takes tiles, with a warning, if it fails or differs. It wants triton 3.4 (CUDA builds of torch bring",
        "it), compute capability 8.0, heads of at most 128, bf16 or fp32 (multiplied in full precision). A run prints the kernel it takes.",
        "",
        "| `model.normalizer` | weights | parameters | rows sum to 1 | kernel | source | what is known |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in ENTRIES.items():
        sums = "with `n: sum`" if entry.options.over_sum else "yes" if entry.options.sums_to_one else "no"
        cells = (f"`{name}`", entry.options.full_formula, entry.parameters, sums, entry.kernel, entry.source, entry.known)
        lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    lines += ["", "## Options", "", "| key | type | default | what it is |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        for path, kind, default, text in reference(option, name):
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in (f"`{path}`", kind, f"`{default}`", text)) + " |")
    return "\n".join(lines) + "\n"
