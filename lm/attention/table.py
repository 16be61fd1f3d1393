"""The table of normalizers: options, formula, source and implementing class of each.

A new normalizer is one class (in a module of this package) and one row here. Nothing in this
module imports torch, so that a configuration is checked before anything heavy is loaded.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from lm.errors import Problem
from lm.schema import Plain, key, reference, variants

N_HELP = "row length n: `visible` keys, length of the `sample`, or `fixed:N`"
_ROW_LENGTH = re.compile(r"visible|sample|fixed:([2-9]|[1-9][0-9]+)")


@dataclass
class Softmax:
    """softmax(z): the baseline."""

    name: ClassVar[str] = "softmax"


@dataclass
class SSMax:
    """Scalable-Softmax, arXiv 2501.19399: softmax((s ln n + b) z)."""

    name: ClassVar[str] = "ssmax"
    scale: Literal["learned", "none"] = key("learned", "s of `s ln n`, one per layer and head; `none`: s = 1 (the paper's variant c)")
    bias: bool = key(False, "learn b of `s ln n + b`, one per layer and head, from 0 (the paper's variant d)")
    init: Literal["match", "unit"] | float = key(
        "match",
        "first value of s; `match`: 1 / mean of ln n over the training length, which keeps the mean logit scale at 1, and in a swap "
        "the closed form that follows the old normalizer (docs/swapping.md); `unit`: 1",
    )
    n: str = key("visible", N_HELP)


@dataclass
class LogN:
    """Entropy-invariant scaling, kexue.fm 8823: softmax(z ln n / ln m)."""

    name: ClassVar[str] = "log_n"
    base: Literal["train"] | float = key("train", "m, the length at which this is softmax; `train`: the training length", gt=1)
    clip: bool = key(False, "never scale below 1, for models trained without it (`max(1, ln n / ln m)`)")
    n: str = key("visible", N_HELP)


@dataclass
class SqrtLogN:
    """softmax(c sqrt(2 ln n) z): the largest weight of n Gaussian logits falls slowly with n."""

    name: ClassVar[str] = "sqrt_log_n"
    n: str = key("visible", N_HELP)


@dataclass
class Llama4:
    """Llama 4's attention temperature: softmax(z (1 + a ln(1 + floor((position + 1) / f))))."""

    name: ClassVar[str] = "llama4"
    floor_scale: float = key(8192.0, "f, tokens after which the temperature first changes", gt=0)
    attn_scale: float = key(0.1, "a", ge=0)


@dataclass
class YaRN:
    """YaRN's temperature, arXiv 2309.00071: softmax(z (0.1 ln(n / m) + 1)^2) for documents longer than m."""

    name: ClassVar[str] = "yarn"
    base: Literal["train"] | float = key("train", "m, the length up to which this is softmax; `train`: the training length", gt=1)
    n: str = key("sample", N_HELP)


@dataclass
class InfoScale:
    """InfoScale, arXiv 2501.08570: softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)))."""

    name: ClassVar[str] = "infoscale"
    base: Literal["train"] | float = key("train", "m, the length at which this is softmax; `train`: the training length", gt=1)
    n: str = key("visible", N_HELP)


@dataclass
class Cosine:
    """softmax(g cos(q, k)) with a learned gain, first sqrt(D) on average (our choice); with `log_n`, g ln n."""

    name: ClassVar[str] = "cosine"
    log_n: bool = key(False, "multiply the gain by ln n (Su, kexue.fm 9859)")
    n: str = key("visible", N_HELP)


@dataclass
class PN:
    """The experiment from which SSMax was derived, arXiv 2501.19399 sec. 2.1: softmax((s p_n + b) z) with a learned table p_n."""

    name: ClassVar[str] = "p_n"


@dataclass
class QASSMax:
    """Query-aware SSMax (TabICLv2): each dimension of q scaled by MLPs of ln n and of q."""

    name: ClassVar[str] = "qassmax"
    n: str = key("visible", N_HELP)


@dataclass
class Softmax1:
    """e^z / (1 + sum e^z): softmax off by one."""

    name: ClassVar[str] = "softmax1"


@dataclass
class Sink:
    """e^z / (e^b + sum e^z): a learned sink logit."""

    name: ClassVar[str] = "sink"
    init: float = key(0.0, "first value of b")


@dataclass
class Relu2:
    """relu(z)^2 / n, as in GAU, arXiv 2202.10447."""

    name: ClassVar[str] = "relu2"
    n: str = key("visible", "row length n: `visible` keys, length of the `sample`, `fixed:N`; or `sum`: divide each row by its sum")
    form: Literal["1/(n d)", "1/n^2"] = key("1/(n d)", "relu(q.k)^2 / (n d), d the head size; or relu(q.k / n)^2, as in GAU's own code")


@dataclass
class Relu:
    """relu(z) / n."""

    name: ClassVar[str] = "relu"
    n: str = key("visible", N_HELP)


@dataclass
class Sigmoid:
    """sigmoid(z - ln n), arXiv 2409.04431."""

    name: ClassVar[str] = "sigmoid"
    bias: bool = key(False, "add a learned b, one per layer and head, from 0")
    n: str = key("visible", N_HELP)


@dataclass
class Sparsemax:
    """The projection of z onto the simplex, arXiv 1602.02068."""

    name: ClassVar[str] = "sparsemax"


@dataclass
class Entmax15:
    """1.5-entmax, arXiv 1905.05702: between softmax and sparsemax."""

    name: ClassVar[str] = "entmax15"


@dataclass
class Softpick:
    """relu(e^z - 1) / sum |e^z - 1|."""

    name: ClassVar[str] = "softpick"


@dataclass
class ALiBi:
    """softmax(z - m t), t tokens back, arXiv 2108.12409; use it with `model.position: none`."""

    name: ClassVar[str] = "alibi"


@dataclass
class Window:
    """softmax over the latest keys alone: a sliding window."""

    name: ClassVar[str] = "window"
    size: int = key(256, "keys a query sees, its own among them", ge=1)


@dataclass
class ScaleInvariant:
    """softmax(a_t z + m_t), t tokens back, arXiv 2505.17083; the paper adds `model.qk_norm` and p-RoPE."""

    name: ClassVar[str] = "scale_invariant"
    tau: float = key(10.0, "distance, in tokens, from which on the scale grows", gt=0)


@dataclass
class Forget:
    """Forgetting attention, arXiv 2503.02130: softmax(z + c_i - c_j), c summing the logs of learned gates of first sigmoid(5)."""

    name: ClassVar[str] = "forget"


@dataclass
class ASEntmax:
    """Adaptive-scalable entmax, arXiv 2506.16640: 1.5-entmax((1 + b (ln n)^g) z), b and g from the layer's input by matrices that start
    at 0 (our choice)."""

    name: ClassVar[str] = "asentmax"
    n: str = key("visible", N_HELP)


@dataclass
class Linear:
    """Linear attention, arXiv 2006.16236: phi(q / D^(1/4)).phi(k / D^(1/4)), at O(T) a row; the scaling by D is ours."""

    name: ClassVar[str] = "linear"
    features: Literal["elu", "relu", "exp", "identity"] = key(
        "elu", "phi: elu + 1, relu, exp (of 20 at most), or the identity (weights may then be negative)"
    )
    decay: bool = key(False, "weights fade by 1 - 2^(-5 - h) a token for heads h = 0, 1 ... (RetNet's rates)")
    n: str = key("sum", "divide each row by its `sum`, or by n: `visible`, `sample` or `fixed:N`")


SINGLE: dict[str, type] = {}  # options of one layer's normalizer by name; filled from the table below


@dataclass
class Layers:
    """Another normalizer in each layer: the list, over and over, from the first layer to the last. A bare list stands for it."""

    name: ClassVar[str] = "layers"
    of: list[object] = variants(
        SINGLE, "the layers' normalizers, repeated from the first layer on, e.g. [window, window, {name: ssmax, bias: true}]"
    )


@dataclass(frozen=True)
class Entry:
    """One row: the options' dataclass, the class that implements it, and what the docs say."""

    options: type
    implementation: str  # "module:Class"
    formula: str
    parameters: str
    cost: str  # of a training step, or the kernel that sets it
    sums_to_one: bool | str  # or with which option
    source: str
    known: str  # figures of others, with their source

    def load(self) -> type:
        """The implementing `Normalizer` class (imports torch)."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(f"lm.attention.{module}"), name)


def formula(options: Mapping[str, Plain]) -> str:
    """The formula of a normalizer with these options (plain data), without what they switch off; its name if it is not in the table."""
    if options["name"] not in ENTRIES:
        return str(options["name"])
    text = ENTRIES[options["name"]].formula
    if options["name"] == SSMax.name:
        text = text if options.get("bias") else text.replace(" + b", "")
        text = text.replace("s ln n", "ln n") if options.get("scale") == "none" else text
    return text


SDPA, TILES, BLOCKS, CHUNKS = "fused softmax", "tiles", "query blocks", "chunks, O(T)"

_ROWS = (
    Entry(
        Softmax, "query_scale:Softmax", "softmax(z)", "none", SDPA, True, "baseline",
        "entropy grows as ln n: attention fades with length",
    ),
    Entry(
        SSMax, "query_scale:SSMax", "softmax((s ln n + b) z)", "s (and b) per layer and head", SDPA, True,
        "Nakanishi 2025, arXiv 2501.19399, Eq. 2",
        "training loss 0.008 nats below softmax at 162 M (same paper); validation loss 3 % worse at 1.2 B and 6 points downstream "
        "(2605.20798, secondary)",
    ),
    Entry(
        LogN, "query_scale:LogN", "softmax(z ln n / ln m)", "none", SDPA, True, "Su 2021, kexue.fm 8823",
        "masked LM trained at 64, at 256: accuracy 34.0 % against softmax's 23.0 % (8823); causal with RoPE, at 8 times the length: under "
        "a point alone, 4 to 10 points once positions are handled (kexue.fm 9708, 9948)",
    ),
    Entry(
        SqrtLogN, "query_scale:SqrtLogN", "softmax(c sqrt(2 ln n) z)", "c per layer and head", SDPA, True,
        "Gaussian logits (extreme values)",
        "largest weight of Gaussian logits .46, .42, .37 at n = 64, 1,024, 16,384",
    ),
    Entry(
        Llama4, "query_scale:Llama4", "softmax(z (1 + a ln(1 + floor((p + 1) / f))))", "none", SDPA, True, "Llama 4's code",
        "used there in layers without positions",
    ),
    Entry(
        YaRN, "query_scale:YaRN", "softmax(z (0.1 ln(n / m) + 1)^2)", "none", SDPA, True, "Peng et al. 2023, arXiv 2309.00071",
        "one factor a document; softmax up to the training length m",
    ),
    Entry(
        InfoScale, "query_scale:InfoScale", "softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)))", "none", SDPA, True, "arXiv 2501.08570",
        "made for models trained without it",
    ),
    Entry(
        Cosine, "query_scale:Cosine", "softmax(g cos(q, k)) or softmax(g ln n cos(q, k))", "g per layer and head", SDPA, True,
        "Henry et al. 2020, arXiv 2010.04245; Su, kexue.fm 9859",
        "GAU trained at 512, at 4,096, with g = 4 ln n: 64.7 % against 24.2 % of plain RoPE, on repeated text (kexue.fm 9859)",
    ),
    Entry(
        PN, "query_scale:PN", "softmax((s p_n + b) z)", "s, b per layer and head; p_n for each n, shared by all", SDPA, True,
        "Nakanishi 2025, arXiv 2501.19399, sec. 2.1", "p_n is well fitted by a1 ln n + a2 at 162 M and 1,024 tokens (same paper)",
    ),
    Entry(
        QASSMax, "query_scale:QASSMax", "softmax(z), q times B(ln n) (1 + tanh G(q))", "two MLPs, 64 hidden, per layer", SDPA, True,
        "TabICLv2's code", "holds 100 % where SSMax fails, at 15k negatives; adopted by TabPFN-3 (TabICLv2; secondary)",
    ),
    Entry(
        Softmax1, "sinks:Softmax1", "e^z / (1 + sum e^z)", "none", SDPA, False, "Miller 2023", "removes attention sinks",
    ),
    Entry(
        Sink, "sinks:Sink", "e^z / (e^b + sum e^z)", "b per layer and head", SDPA, False, "gpt-oss's code",
        "softmax times sigmoid(lse - b)",
    ),
    Entry(
        Relu2, "pointwise:Relu2Normalizer", "relu(z)^2 / n", "none", TILES, "n: sum", "Hua et al. 2022, arXiv 2202.10447",
        "a fixed n transfers to other lengths better than the sample's, softmax best (kexue.fm 9019, no figures published)",
    ),
    Entry(
        Relu, "pointwise:ReluNormalizer", "relu(z) / n", "none", TILES, False, "Wortsman et al. 2023, arXiv 2309.08586",
        "no figures known to us",
    ),
    Entry(
        Sigmoid, "pointwise:SigmoidNormalizer", "sigmoid(z - ln n (+ b))", "none (or b per layer and head)", TILES, False,
        "arXiv 2409.04431",
        "2.4 % worse loss and 16 points downstream at 1.2 B (2605.20798, secondary)",
    ),
    Entry(
        Sparsemax, "sparse:Sparsemax", "relu(z - tau)", "none", BLOCKS, True, "Martins and Astudillo 2016, arXiv 1602.02068", "exact zeros",
    ),
    Entry(
        Entmax15, "sparse:Entmax15", "relu(z / 2 - tau)^2", "none", BLOCKS, True, "Peters et al. 2019, arXiv 1905.05702", "exact zeros",
    ),
    Entry(
        ASEntmax, "sparse:ASEntmax", "1.5-entmax((1 + b (ln n)^g) z)", "w_b, w_g (width C) per layer and head", BLOCKS, True,
        "arXiv 2506.16640",
        "multi-query recall to 65k from training at 64; loss better at 8 times the length (abstract)",
    ),
    Entry(
        Softpick, "sparse:Softpick", "relu(e^z - 1) / (sum |e^z - 1| + 1e-8)", "none", BLOCKS, False, "softpick's code, 2025",
        "no sinks and 47 % exact zeros at 340 M (secondary)",
    ),
    Entry(
        ALiBi, "distance:ALiBi", "softmax(z - 2^(-8 h / H) t)", "none", BLOCKS, True, "Press et al. 2021, arXiv 2108.12409",
        "trained at 4k, at 64k: loss flat (3.27), needles lost (.003): arXiv 2505.17083. The formula also where H is no power of 2, for "
        "which its authors' code interleaves two series",
    ),
    Entry(
        Window, "distance:Window", "softmax(z), t < w", "none", SDPA, True, "Beltagy et al. 2020, arXiv 2004.05150",
        "for local layers: `[window, window, ssmax]`",
    ),
    Entry(
        ScaleInvariant, "distance:ScaleInvariant", "softmax(a_t z + m_t)", "none", BLOCKS, True, "arXiv 2505.17083",
        "with p-RoPE, trained at 4k, at 64k: loss 3.247 (log n 3.317, softmax 5.735), needles .969 (.939, .000), same paper",
    ),
    Entry(
        Forget, "distance:Forget", "softmax(z + c_i - c_j)", "w (width C) and b per layer and head", BLOCKS, True, "arXiv 2503.02130",
        "good extrapolation, needles near-perfect within the training length (abstract)",
    ),
    Entry(
        Linear, "linear:Linear", "phi(q).phi(k) (g^t) / sum, or / n", "none", CHUNKS, "n: sum",
        "Katharopoulos et al. 2020, arXiv 2006.16236; Sun et al. 2023, arXiv 2307.08621",
        "can't concentrate: S >= .80 with identity features and Gaussian keys (Su, kexue.fm 9889)",
    ),
)  # fmt: skip

ENTRIES: dict[str, Entry] = {entry.options.name: entry for entry in _ROWS}


def _whether(sums_to_one: bool | str) -> str:
    """As the docs say it."""
    return f"with `{sums_to_one}`" if isinstance(sums_to_one, str) else "yes" if sums_to_one else "no"


def label(plain: dict[str, Plain]) -> str:
    """A normalizer's name with the options that aren't its defaults: `ssmax (init=1.0)`."""
    if plain["name"] == Layers.name:
        return f"layers ({', '.join(map(label, plain['of']))})"
    schema = OPTIONS.get(plain["name"])
    defaults = {spec.name: spec.default for spec in fields(schema)} if schema else {}
    options = {key: value for key, value in plain.items() if key != "name"}
    changed = [f"{key}={_shown(value)}" for key, value in options.items() if key not in defaults or defaults[key] != value]
    return f"{plain['name']} ({', '.join(changed)})" if changed else plain["name"]


def arguments(plain: dict[str, Plain]) -> str:
    """A normalizer as `lm swap --to` takes it: `ssmax model.normalizer.bias=true`; first values left out."""
    if plain["name"] == Layers.name:
        return f"layers 'model.normalizer.of=[{', '.join(one['name'] for one in plain['of'])}]'"
    defaults = {spec.name: spec.default for spec in fields(OPTIONS[plain["name"]])}
    changed = {key: value for key, value in plain.items() if key not in ("name", "init") and value != defaults[key]}
    return " ".join([plain["name"], *(f"model.normalizer.{key}={_shown(value)}" for key, value in changed.items())])


def _shown(value: Plain) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


SINGLE |= {name: entry.options for name, entry in ENTRIES.items()}
OPTIONS: dict[str, type] = {**SINGLE, Layers.name: Layers}


def of_layer(options: object, layer: int) -> object:
    """The options of one layer's normalizer."""
    return options.of[layer % len(options.of)] if isinstance(options, Layers) else options


def check(options: object, path: str) -> list[Problem]:
    """What the types of the options can't say: the row-length policy and contradictory pairs."""
    if isinstance(options, Layers):
        problems = [problem for index, one in enumerate(options.of) for problem in check(one, f"{path}.of[{index}]")]
        return problems if options.of else [Problem(f"{path}.of", [], "no normalizers given", "list one or more")]
    problems = []
    policy = getattr(options, "n", "visible")
    if not _ROW_LENGTH.fullmatch(policy) and not (isinstance(options, Relu2 | Linear) and policy == "sum"):
        problems.append(Problem(f"{path}.n", policy, "unknown row length", "choose visible, sample or fixed:N (N a whole number from 2)"))
    if isinstance(options, SSMax) and options.scale == "none" and options.init != "match":
        problems.append(Problem(f"{path}.init", options.init, "scale: none has no s to start", "drop init, or set scale: learned"))
    if isinstance(options, Linear) and options.features == "identity" and options.n == "sum":
        problems.append(Problem(f"{path}.n", options.n, "weights of either sign may sum to 0", f"set {path}.n=visible"))
    if isinstance(options, Relu2) and options.n == "sum" and options.form != "1/(n d)":
        problems.append(Problem(f"{path}.form", options.form, "rows divided by their sum have no n", "drop it"))
    return problems


def markdown() -> str:
    """docs/normalizers.md: the table, one row an entry, then each entry's options."""
    lines = [
        "# Normalizers",
        "",
        "Generated by `lm normalizers`; a test keeps it true. `z = q.k / sqrt(D)`, `D`: head size; `n`: row length; `m`: training length;",
        "`t`: how many tokens back a key is; `p`: position. Every entry works in ordinary attention and in GAU (`model.block: gau`), with",
        "packed documents, and decodes with a cache of keys and values. Weights are causal; `n` comes from positions, never from widths.",
        "Scores, thresholds and sums are in fp32 at least, whatever `trainer.precision` says; only their products with values and the",
        "products inside PyTorch's fused softmax have bf16 operands. A row that is divided by a sum below 1e-24 has weights 0.",
        "",
        "Kernels: *fused softmax* is PyTorch's (no T x T weights); *tiles* are ours, forward and backward in tiles of 256 x 256 with fp32",
        "sums, on CUDA GPUs in a Triton kernel; *query blocks* take the definition for some queries at a time and make it again in the",
        "backward pass. Rows that are not one document each (packed, decoding) take query blocks where tiles or *chunks* (a running",
        "state) would serve whole rows.",
        "",
        "The Triton kernel has been compiled for GPUs and run in Triton's interpreter, but never on a GPU: the first call compares it with",
        "the tiles on the device, and takes tiles, with a warning, if it fails or differs. It wants triton 3.4 (CUDA builds of torch bring",
        "it), compute capability 8.0, heads of at most 128, bf16 or fp32 (multiplied in full precision). A run prints the kernel it takes.",
        "",
        "| `model.normalizer` | weights | parameters | rows sum to 1 | kernel | source | what is known |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in ENTRIES.items():
        cells = (f"`{name}`", entry.formula, entry.parameters, _whether(entry.sums_to_one), entry.cost, entry.source, entry.known)
        lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    lines += ["", "## Options", "", "| key | type | default | what it is |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        for path, kind, default, text in reference(option, name):
            lines.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in (f"`{path}`", kind, f"`{default}`", text)) + " |")
    return "\n".join(lines) + "\n"
