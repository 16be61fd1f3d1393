"""Byte-level BPE in the files of GPT-2 (encoder.json, vocab.bpe) and of tiktoken (ranks), as `tokenizers` objects."""

import base64
import binascii
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.data_config import END_OF_TEXT
from lm.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# How each tiktoken encoding cuts text into words, and the id of its <|endoftext|>.
_CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
ENCODINGS = {"r50k_base": (_R50K, 50256), "cl100k_base": (_CL100K, 100257), "o200k_base": (_O200K, 199999)}


def gpt2_tokenizer(vocab: Path, merges: Path) -> "Tokenizer":
    """The tokenizer of encoder.json and vocab.bpe. Raises DataError if a file is missing or of another kind."""
    try:
        ids = json.loads(read(vocab, "data.tokenizer.vocab"))
        assert all(isinstance(index, int) for index in ids.values())
    except (ValueError, AttributeError, AssertionError):
        raise DataError(f"{vocab}: not an encoder.json, which holds {{token: id}} (data.tokenizer.vocab)") from None
    try:
        lines = read(merges, "data.tokenizer.merges").decode().split("\n")
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        assert all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in pairs)
    except (ValueError, AssertionError):
        raise DataError(
            f"{merges}: not a vocab.bpe that goes with {vocab.name}: two of its tokens a line (data.tokenizer.merges)"
        ) from None
    from tokenizers import pre_tokenizers

    return _byte_level(ids, pairs, ids.get(END_OF_TEXT, max(ids.values()) + 1), pre_tokenizers.ByteLevel(add_prefix_space=False))


def tiktoken_tokenizer(path: Path, encoding: str) -> "Tokenizer":
    """The tokenizer of a rank file: lines of a token's bytes in base64 and its id, which is also its rank among merges.

    tiktoken merges the neighbours whose union ranks lowest, so that every way to cut a token in two tokens is a merge.

    Raises:
        DataError: the file is missing or not a rank file.
    """
    lines = read(path, "data.tokenizer.path").split(b"\n")
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in (line.split() for line in lines if line)}
    except (ValueError, binascii.Error):
        ranks = {}
    pattern, end = ENCODINGS[encoding]
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys() or max(ranks.values()) >= end:
        raise DataError(f"{path}: not the rank file of {encoding}, or damaged (data.tokenizer.path)")
    pairs = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
        pairs += sorted(cuts, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    cutter = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    spelled = {token: _spelled(token) for token in ranks}
    ids = {spelled[token]: rank for token, rank in ranks.items()}
    return _byte_level(ids, [(spelled[left], spelled[right]) for left, right in pairs], end, cutter, ignore_merges=True)


def _byte_level(ids: dict[str, int], pairs: list[tuple[str, str]], end: int, cutter: object, ignore_merges: bool = False) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({**ids, END_OF_TEXT: end}, pairs, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cutter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _spelled(token: bytes) -> str:
    """Bytes in GPT-2's alphabet: one printable character each."""
    return "".join(_alphabet()[byte] for byte in token)


@cache
def _alphabet() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def read(path: Path, key: str) -> bytes:
    """The content of a tokenizer's file. Raises DataError naming it, the reason and `key`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: can't read the tokenizer: {error.strerror} ({key})") from None
