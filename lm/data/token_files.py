"""Reads documents of token ids that other programs prepared: .bin files of nanoGPT, modded-nanogpt and llm.c, columns
of ids, and datasets saved by `datasets`.

A .bin file marks the beginning or end of a document by the end-of-text token. Documents are read without this token;
the store writes it before each document.
"""

import dataclasses
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np

from lm.config.data_config import FileSource, TokenizerOptions, TokenSource
from lm.data.text_files import (
    Documents,
    UnreadableError,
    append_read_error,
    dataset_documents,
    files_below,
    find_files,
    parse_document,
    read_files,
    source_files,
)
from lm.data.tokenizer import count_token_bytes, decode, encode, special_token_mask, tokenizer_from_options, vocab_size
from lm.errors import DataError
from lm.files import FileHashes, expand_home
from lm.plain import Plain

TOKENIZER_REMEDY = "set data.tokenizer to the one that made the ids"
_IDS_PER_BLOCK = 2**22  # ids of a file that are searched together
_MAX_CHECKED_IDS = 2**12  # ids of a document whose decoded text is checked
# The first bytes of files of other formats; a .bin file of nanoGPT has ids alone.
FORMAT_BY_FIRST_BYTES = {
    b"\x93NUMPY": "an array of np.save; write its ids alone: np.load(PATH).astype('<u2').tofile(PATH)",
    b"PK\x03\x04": "a zip archive, as of np.savez or torch.save; write its ids alone, by tofile",
    b"\x1f\x8b\x08": "compressed by gzip; decompress it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it",
    b"BZh": "compressed by bzip2; decompress it",
    b"\xfd7zXZ": "compressed by xz; decompress it",
    b"\x80\x04\x95": "a pickle; write its ids alone, by tofile",
    b"\x80\x05\x95": "a pickle; write its ids alone, by tofile",
    b"ARROW1": "an Arrow file; write its ids to Parquet, for data.source.format=column",
    b"PAR1": "a Parquet file; name it .parquet, and set data.source.format=column",
}


class Vocabulary:
    """Checks documents of token ids against a tokenizer's vocabulary, and counts the bytes of their text."""

    def __init__(self, options: TokenizerOptions):
        self.tokenizer, self.end_of_text_token = tokenizer_from_options(options), options.end_of_text
        self.end_of_text_id = self.tokenizer.token_to_id(options.end_of_text)
        self.bytes_per_token, self.special_token_mask = (
            count_token_bytes(self.tokenizer),
            special_token_mask(self.tokenizer),
        )
        if self.tokenizer.decoder is None:  # decoded text then has a space between any two tokens
            reason = "the tokenizer has no decoder, without which bytes of text can't be counted"
            remedy = "give its tokenizer.json one, e.g. Fuse, or WordPiece where each token is a word"
            raise DataError(f"data.tokenizer: {reason}; {remedy}")
        self.is_decoder_checked = self.bytes_per_token is not None
        model = self.tokenizer.model
        # the token of unknown text, unless all bytes are known: it may then be the one that pads
        self.unknown_id = None
        if self.bytes_per_token is None and not getattr(model, "byte_fallback", False):
            self.unknown_id = self.tokenizer.token_to_id(getattr(model, "unk_token", None) or "")
        self.valid_id_mask = np.zeros(vocab_size(self.tokenizer), bool)  # (V,), true for ids that the tokenizer has
        self.valid_id_mask[list(self.tokenizer.get_vocab().values())] = True

    def check_and_strip_ids(self, ids: Plain | np.ndarray, location: str) -> np.ndarray:
        """Check a document's ids, and return them without a leading or trailing end-of-text token: uint32 (tokens,),
        empty for None.

        Raises UnreadableError: `ids` are no whole numbers, the tokenizer lacks an id, or an end-of-text token is inside
        the document.
        """
        ids = _id_array(ids, location)
        is_wrong = (ids < 0) | (ids >= len(self.valid_id_mask))
        is_wrong |= ~self.valid_id_mask[np.where(is_wrong, 0, ids)]
        if is_wrong.any():
            index = int(is_wrong.argmax())
            reason = f"a tokenizer of the ids 0 to {len(self.valid_id_mask) - 1:,} does not have"
            raise UnreadableError(
                f"{location}: token {index:,} has the id {ids[index]}, which {reason}; {TOKENIZER_REMEDY}"
            )
        for place, end in (("begins", ids), ("ends", ids[::-1])):
            if len(ids) > 1 and end[0] == end[1] != self.unknown_id and self.special_token_mask[end[0]]:
                n_equal = int((end != end[0]).argmax()) or len(end)
                token = f"the special token {self.tokenizer.id_to_token(int(end[0]))} (id {end[0]})"
                reason = f"{place} in {n_equal:,} times {token}: padding, which would be trained on"
                raise UnreadableError(f"{location}: {reason}; cut each row by its attention_mask")
        n_leading = int(len(ids) > 0 and ids[0] == self.end_of_text_id)
        n_trailing = int(len(ids) > n_leading and ids[-1] == self.end_of_text_id)
        document = ids[n_leading : len(ids) - n_trailing].astype(np.uint32)
        if len(positions := np.flatnonzero(document == self.end_of_text_id)):
            end_of_text = f"the end of text {self.end_of_text_token} (id {self.end_of_text_id})"
            reason = f"{end_of_text} is inside the document, at token {n_leading + positions[0]:,}"
            remedy = "split the document there, or set data.tokenizer.end_of_text to the token that separates documents"
            raise UnreadableError(f"{location}: {reason}; {remedy}")
        if not self.is_decoder_checked and len(document) > 1:
            self._check_decoder(document[:_MAX_CHECKED_IDS], location)
        return document

    def _check_decoder(self, ids: np.ndarray, location: str) -> None:
        """Raise DataError if decoding `ids`, encoding the text and decoding again gives another text.

        A decoder may put spaces between letters, so that the text has more bytes. Ids with a special or unknown token
        are not checked.
        """
        if (self.special_token_mask[ids] | (ids == self.unknown_id)).any():
            return
        text = decode(self.tokenizer, ids.tolist())
        decoded_again = decode(self.tokenizer, encode(self.tokenizer, [text])[0], keep_special=True)
        if decoded_again != text:
            reason = f"its ids decode to {text[:30]!a}, whose own ids decode to {decoded_again[:30]!a}"
            remedy = "bytes of text can't be counted so; give the tokenizer.json the decoder that fits its tokens"
            raise DataError(f"{location}: {reason}; {remedy}, or {TOKENIZER_REMEDY}")
        self.is_decoder_checked = True

    def utf8_text(self, ids: np.ndarray) -> bytes:
        """Return the UTF-8 bytes of the decoded text of `ids`."""
        return decode(self.tokenizer, ids.tolist()).encode()

    def n_bytes(self, ids: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the decoded text of `ids`."""
        if self.bytes_per_token is None:
            return len(self.utf8_text(ids))
        return int(self.bytes_per_token[ids].sum(dtype=np.float64))


def _id_array(ids: Plain | np.ndarray, location: str) -> np.ndarray:
    """Return `ids` as an array of whole numbers, (tokens,); empty for None, a blank document. Raises UnreadableError
    for other values.
    """
    try:
        array = np.empty(0, np.uint32) if ids is None or (isinstance(ids, list) and not ids) else np.asarray(ids)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UnreadableError(f"{location} does not hold a list of token ids; remove the row or set data.source.column")
    return array


# ---------------------------------------------------------------- sources of ids


def token_documents(source: TokenSource, vocabulary: Vocabulary) -> Documents:
    """Yield the documents of token ids in a source's files, and their locations."""
    list_files, read_file = TOKEN_FORMATS[source.format]
    for path in list_files(source):
        yield from append_read_error(read_file(path, source, vocabulary), str(path))


def held_out_source(source: TokenSource) -> TokenSource | None:
    """Return a source of the files in `validation_paths`, all of whose documents are held out. Return None if there are
    no such files.
    """
    paths = source.validation_paths
    return dataclasses.replace(source, paths=paths, validation_paths=[]) if paths else None


def tokens_identity(source: TokenSource, hashes: FileHashes) -> dict[str, Plain]:
    """Return plain data that identifies the documents: the format, and paths and sha256 of the training and the
    held-out files. Paths are as `source` gives them, with folders and patterns (globs) replaced by the files in them.
    """

    def hash_files(token_source: TokenSource | None) -> list[Plain]:
        paths = TOKEN_FORMATS[source.format][0](token_source) if token_source else []
        files = [file for path in paths for file in (sorted(files_below(path)) if path.is_dir() else [path])]
        return [{"path": str(path), "sha256": hashes.sha256(path)} for path in files]

    return {
        "format": source.format,
        "files": hash_files(source),
        "validation_files": hash_files(held_out_source(source)),
        **({"column": source.column} if source.format in ("column", "saved") else {}),
    }


# ---------------------------------------------------------------- streams: documents are separated by end of text


HEADER_INT_COUNT = 256  # int32 numbers: magic, version, number of ids, zeros
# by (magic, version): dtype of ids, as llm.c writes for GPT-2 and Llama 3
DTYPE_BY_HEADER = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def _read_header(path: Path) -> tuple[int, int, int]:
    """Return a file's first three int32: magic, version and number of ids if it has a header. Return zeros if it is too
    short for a header.
    """
    header = np.fromfile(path, "<i4", HEADER_INT_COUNT)
    return tuple(header[:3].tolist()) if len(header) == HEADER_INT_COUNT else (0, 0, 0)


def _read_nanogpt(path: Path, source: TokenSource, vocabulary: Vocabulary) -> Documents:
    """Yield the documents of a file of uint16 ids without a header, in which the end-of-text token follows each
    document.
    """
    if _read_header(path)[:2] in DTYPE_BY_HEADER:
        raise UnreadableError(f"{path}: has the header of data.source.format=modded-nanogpt; set that")
    if not (size := path.stat().st_size):
        raise UnreadableError(f"{path}: is empty; remove it")
    with open(path, "rb") as file:
        first_bytes = file.read(64)
    for start, kind in FORMAT_BY_FIRST_BYTES.items():
        if first_bytes.startswith(start):
            raise UnreadableError(f"{path}: is {kind}")
    if len(first_bytes) == 64 and not first_bytes.translate(None, bytes(range(9, 127))):
        raise UnreadableError(f"{path}: is text; name it .txt, or .jsonl, and set data.source={{name: files, ...}}")
    if size % 2:
        raise UnreadableError(f"{path}: has {size:,} bytes, not 2 for each id: damaged, or of another format")
    ids = np.memmap(path, "<u2", "r")
    low_halves, high_halves = ids[:_IDS_PER_BLOCK:2], ids[1:_IDS_PER_BLOCK:2]
    if size % 4 == 0 and len(high_halves) >= 64 and high_halves.max() < 16 <= low_halves.max():
        reason = "every second id is below 16, as in ids of 4 bytes, and 2 are read"
        raise UnreadableError(f"{path}: {reason}; write them to Parquet, for data.source.format=column")
    yield from _split_ids(path, ids, vocabulary, end_of_text_is_last=True)


def _read_modded_nanogpt(path: Path, source: TokenSource, vocabulary: Vocabulary) -> Documents:
    """Yield the documents of a file with a header, in which the end-of-text token precedes each document."""
    *header, count = _read_header(path)
    size = path.stat().st_size
    if (dtype := DTYPE_BY_HEADER.get(tuple(header))) is None:
        known_headers = " or ".join(f"{magic} {version}" for magic, version in DTYPE_BY_HEADER)
        raise UnreadableError(
            f"{path}: begins with {header[0]} {header[1]}, not with {known_headers}: damaged, or of another format"
        )
    expected_size = 4 * HEADER_INT_COUNT + count * np.dtype(dtype).itemsize
    if count < 1 or size != expected_size:
        raise UnreadableError(
            f"{path}: has {size:,} bytes, not the {expected_size:,} of {count:,} ids that its header says: damaged"
        )
    yield from _split_ids(
        path, np.memmap(path, dtype, "r", 4 * HEADER_INT_COUNT), vocabulary, end_of_text_is_last=False
    )


def _split_ids(path: Path, ids: np.ndarray, vocabulary: Vocabulary, end_of_text_is_last: bool) -> Documents:
    """Yield the documents of an array of ids. The end-of-text token follows each document if `end_of_text_is_last`,
    else it precedes each document.
    """
    begin = number = 0
    borders = (
        start + np.flatnonzero(ids[start : start + _IDS_PER_BLOCK] == vocabulary.end_of_text_id)
        for start in range(0, len(ids), _IDS_PER_BLOCK)
    )
    for end in chain(chain.from_iterable((indices + end_of_text_is_last).tolist() for indices in borders), [len(ids)]):
        if end > begin:
            number += 1
            location = f"{path}: document {number:,}, from id {begin:,} on"
            yield parse_document(vocabulary.check_and_strip_ids, ids[begin:end], location), location
        begin = end


# ---------------------------------------------------------------- formats


def _bin_files(source: TokenSource) -> list[Path]:
    """Return the .bin files that the source names."""
    supported_text = f".bin files, which data.source.format={source.format} reads"
    return find_files(source.paths, lambda path, in_folder: path.suffix.lower() == ".bin", supported_text)


def _column_files(source: TokenSource) -> list[Path]:
    """Return the .jsonl and .parquet files that the source names."""
    return source_files(FileSource(source.paths, []))


def _read_column(path: Path, source: TokenSource, vocabulary: Vocabulary) -> Documents:
    """Yield the documents of a .jsonl or .parquet file, whose column holds lists of ids."""
    return read_files([path], FileSource([str(path)], [], source.column), vocabulary.check_and_strip_ids)


def _saved_dataset_folders(source: TokenSource) -> list[Path]:
    """Return the folders that the source names. Raises DataError if one was not written by `Dataset.save_to_disk`."""
    paths = sorted(map(expand_home, source.paths))
    for path in paths:
        if not (path / "state.json").is_file():
            reason = "no folder of `Dataset.save_to_disk`, or of a split of a saved `DatasetDict`"
            raise DataError(f"{path}: is {reason}: it has no state.json (data.source.paths)")
    return paths


def _read_saved_dataset(path: Path, source: TokenSource, vocabulary: Vocabulary) -> Documents:
    """Yield the documents of a dataset that was saved to a folder."""
    import datasets

    dataset = datasets.load_from_disk(os.fspath(path))
    yield from dataset_documents(dataset, source.column, str(path), vocabulary.check_and_strip_ids)


# {format: (lists a source's files or folders, reads the documents of one of them)}
TOKEN_FORMATS: dict[
    str, tuple[Callable[[TokenSource], list[Path]], Callable[[Path, TokenSource, Vocabulary], Documents]]
] = {
    "nanogpt": (_bin_files, _read_nanogpt),
    "modded-nanogpt": (_bin_files, _read_modded_nanogpt),
    "column": (_column_files, _read_column),
    "saved": (_saved_dataset_folders, _read_saved_dataset),
}
