"""Encodes documents as tokens in several threads, and checks that each document's tokens decode to its text."""

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np

from lm.data.store import token_dtype
from lm.data.text_files import Unreadable
from lm.data.tokenizer import decode, encode, prefixes_space, special_token_mask, token_bytes, vocab_size
from lm.machine import usable_cores

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# limits of a batch, which a single longer document may exceed: encoding takes a hundred times the batch's bytes of
# memory
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 2048
PIECE_CHARACTERS = 1 << 20  # characters of each piece into which a long document is cut to be encoded
# longest word, in characters, that a tokenizer is trained on: training time grows with the square of its length
MAX_WORD_LENGTH = 1 << 12
# environment variable that turns the `tokenizers` library's own threads off
_PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"
# GPT-2, cl100k and o200k split text at these places, too
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\S\n)(?=\w)")


@dataclass(frozen=True)
class Document:
    """A document to encode, or a piece of a long document."""

    content: str | np.ndarray  # its text, or its token ids (tokens,)
    n_bytes: int  # UTF-8 bytes of the text
    index: int  # number of documents that the scan has read before this one
    location: str = ""  # the file or dataset and the place in it
    digest: int = 0  # 64-bit hash of the content
    is_first_piece: bool = True  # true if the content is the beginning of the document


# A document or piece, and the ids of its tokens in the store's dtype (tokens,), or why the tokenizer does not give it
# back.
Tokenized = tuple[Document, np.ndarray | Unreadable]


class Encoder:
    """Encodes batches of documents as token ids; documents that are token ids already pass unchanged."""

    def __init__(self, tokenizer: "Tokenizer", end_of_text: str):
        self.tokenizer, self.end_of_text_id = tokenizer, tokenizer.token_to_id(end_of_text)
        self.dtype = np.dtype(token_dtype(vocab_size(tokenizer)))
        self.bytes_per_token, self.is_special = token_bytes(tokenizer), special_token_mask(tokenizer)
        keeps_all_characters = tokenizer.normalizer is None and getattr(tokenizer.model, "unk_token", None) is None
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        is_reversible = all(
            token.special or decode(tokenizer, [index]) == token.content for index, token in added_tokens
        )
        # True if tokens that stand for as many bytes as the text are sure to decode to it.
        self.byte_count_suffices = self.bytes_per_token is not None and keeps_all_characters and is_reversible

    def __call__(self, documents: list[Document]) -> list[Tokenized]:
        """Encode documents or pieces of documents, with an end-of-text token before the first token of each document.

        A document has no ids but an `Unreadable` if its decoded tokens differ from it, or if it has a special token.
        """
        texts = [document.content for document in documents if isinstance(document.content, str)]
        text_ids = iter(encode(self.tokenizer, texts))
        tokenized: list[Tokenized] = []
        for document in documents:
            is_text = isinstance(document.content, str)
            tokens = np.array(next(text_ids) if is_text else document.content, self.dtype)
            if is_text and (problem := self._problem(document.content, tokens)):
                tokens = Unreadable(f"{document.location}: data.tokenizer: {problem}")
            elif document.is_first_piece:
                tokens = np.insert(tokens, 0, self.end_of_text_id)
            tokenized.append((document, tokens))
        return tokenized

    def _problem(self, text: str, tokens: np.ndarray) -> str:
        """Say why the tokens don't stand for the text, and what to do; empty if they do."""
        if self.byte_count_suffices and self.bytes_per_token[tokens].sum(dtype=np.float64) == len(text.encode()):
            return ""
        decoded_text = decode(self.tokenizer, tokens.tolist(), special=True)
        if decoded_text != text:
            index = next(n for n, (a, b) in enumerate(zip_longest(text, decoded_text)) if a != b)
            excerpts = [ascii(string[max(0, index - 10) : index + 20]) for string in (text, decoded_text)]
            normalizer = self.tokenizer.normalizer
            cause = f"its normalizer is {type(normalizer).__name__}; " if normalizer is not None else ""
            return (
                f"does not give text back unchanged: {excerpts[0]} is decoded as {excerpts[1]}; {cause}set "
                "data.on_error=skip to leave such documents out, or use a byte-level tokenizer, or one with byte "
                "fallback, without a normalizer or prefix space"
            )
        if self.is_special[tokens].any():
            token = self.tokenizer.id_to_token(int(tokens[self.is_special[tokens]][0]))
            return f"the text has the special token {token!r} in it as a word; use a tokenizer that keeps it as text"
        return ""


def can_cut_between_words(tokenizer: "Tokenizer") -> bool:
    """Return whether the pieces of `split_text` encode to the same tokens as the whole text, judged by a short test
    text.
    """
    if tokenizer.normalizer is not None or tokenizer.pre_tokenizer is None or prefixes_space(tokenizer):
        return False
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    text = "ab cd 12 Ef. gh, ij\nkl.\nmn"
    word_starts = {begin for _, (begin, _) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    cuts = {cut.start() for cut in _BETWEEN_WORDS.finditer(text)}
    return cuts <= word_starts and not any(
        re.search(r"\s", token.content) or token.lstrip or token.rstrip for token in added_tokens
    )


def split_text(text: str) -> Iterator[str]:
    """Split a text between words: yield pieces a little longer than `PIECE_CHARACTERS` characters, then the rest of the
    text.
    """
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS and (cut := _BETWEEN_WORDS.search(text, begin + PIECE_CHARACTERS)):
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def split_long_words(text: str) -> Iterator[str]:
    """Yield a text in parts to train a tokenizer on; words of `MAX_WORD_LENGTH` or more characters, e.g. base64, are
    cut at this length.
    """
    begin = 0
    for word in re.finditer(rf"(?<!\S)\S{{{MAX_WORD_LENGTH},}}", text):
        for end in range(word.start() + MAX_WORD_LENGTH, word.end() + 1, MAX_WORD_LENGTH):
            yield text[begin:end]
            begin = end
    yield text[begin:]


def encode_all(documents: Iterator[Document], tokenizer: "Tokenizer", end_of_text: str) -> Iterator[Tokenized]:
    """Encode documents in batches with a thread a core, parallel as `tokenizers` releases the GIL; yield documents, or
    pieces of documents, in order.

    Long documents are encoded in pieces if this leaves their tokens unchanged (`can_cut_between_words`): memory holds
    few pieces at a time.
    """
    encoder = Encoder(tokenizer, end_of_text)
    is_divisible = encoder.bytes_per_token is not None and can_cut_between_words(tokenizer)
    document_pieces = (
        _split_document(document) if is_divisible and isinstance(document.content, str) else [document]
        for document in documents
    )
    queue: deque[Future[list[Tokenized]]] = deque()
    workers = usable_cores()
    thread_pool, sets_variable = ThreadPoolExecutor(workers), workers > 1 and _PARALLELISM_VARIABLE not in os.environ
    if sets_variable:  # each thread encodes alone: the library's own threads would take all cores
        os.environ[_PARALLELISM_VARIABLE] = "false"
    try:
        for batch in _batches(chain.from_iterable(document_pieces)):
            queue.append(thread_pool.submit(encoder, batch))
            if len(queue) == 2 * workers - 1:
                yield from queue.popleft().result()
        while queue:
            yield from queue.popleft().result()
    finally:
        thread_pool.shutdown(cancel_futures=True)
        if sets_variable:
            del os.environ[_PARALLELISM_VARIABLE]


def _split_document(document: Document) -> Iterator[Document]:
    end = 0
    for text in split_text(document.content):
        begin, end = end, end + len(text)
        yield replace(document, content=text, n_bytes=len(text.encode()), is_first_piece=begin == 0)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and (size + document.n_bytes > BATCH_BYTES or len(batch) == BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.n_bytes
    if batch:
        yield batch
