"""Makes tokenizers: trains a byte-level BPE on the training documents, or reads a tokenizer.json.

Errors that the `tokenizers` library raises on a user's tokenizer or text become a DataError (`convert_library_errors`).
"""

import hashlib
import json
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import (
    END_OF_TEXT,
    MAX_VOCAB,
    PretrainedTokenizer,
    TokenizerFile,
    TokenizerOptions,
    TrainedTokenizer,
)
from lm.errors import DataError, LMError, is_rust_panic, one_line, one_line_with_cause
from lm.files import expand_home
from lm.plain import Plain, to_plain

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

NOT_A_TOKENIZER = "not a tokenizer.json of the `tokenizers` library"


@contextmanager
def convert_library_errors(failure: str, remedy: str = "") -> Iterator[None]:
    """Return a context that turns errors and panics of the `tokenizers` library into DataErrors.

    The text is `failure: the library's message`, then `remedy`. The library panics, e.g., if a pattern takes too long.
    LMError, OSError and MemoryError, which reading texts may raise, pass unchanged.
    """
    try:
        yield
    except (LMError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        raise DataError(f"{failure}: {one_line(error)}{remedy}") from None


def tokenizer_identity(options: TokenizerOptions) -> dict[str, Plain]:
    """Return plain data that identifies a tokenizer: its options and the sha256 of its file. Raises DataError if the
    file is missing.
    """
    if isinstance(options, TrainedTokenizer):
        return to_plain(options) | {"special_tokens": []}  # a key of earlier versions, whose stores are found
    key = "path" if isinstance(options, TokenizerFile) else "sha256"
    sha256 = hashlib.sha256(_tokenizer_json(options)).hexdigest()
    return {"name": options.name, "end_of_text": options.end_of_text, key: sha256}


def tokenizer_from_options(options: TokenizerFile | PretrainedTokenizer) -> "Tokenizer":
    """Load the tokenizer whose file or pretrained model `options` name, as `parse_tokenizer` does. Raises DataError if
    the file can't be read.
    """
    source, key = (options.path, "path") if isinstance(options, TokenizerFile) else (options.model, "model")
    content = _tokenizer_json(options)
    with convert_library_errors(f"{source}: {NOT_A_TOKENIZER}", f" (data.tokenizer.{key})"):
        try:
            return parse_tokenizer(content, options.end_of_text)
        except DataError as error:
            raise DataError(f"{source}: {error}") from None


def _tokenizer_json(options: TokenizerFile | PretrainedTokenizer) -> bytes:
    """Return the bytes of the tokenizer.json that `options` name.

    Raises DataError: there is no such file, folder or model, it has no tokenizer, or the hub can't be reached.
    """
    if isinstance(options, TokenizerFile):
        try:
            return expand_home(options.path).read_bytes()
        except OSError as error:
            raise DataError(
                f"{options.path}: can't read the tokenizer: {error.strerror} (data.tokenizer.path)"
            ) from None
    folder = expand_home(options.model)
    if not os.path.exists(folder):
        folder = download_files(options.model, options.revision, [TOKENIZER_FILE], " (data.tokenizer.model)")
    elif options.revision:
        raise DataError(f"{folder}: is on this machine, not on the hub; set data.tokenizer.revision to null")
    return require_tokenizer_json(folder).encode()


def train_tokenizer(texts: Iterator[str], options: TrainedTokenizer) -> "Tokenizer":
    """Train a byte-level BPE. Token ids from 0 on are <|endoftext|>, all 256 bytes (so every text can be encoded), then
    merges.

    The same texts give the same tokenizer, on any number of cores.

    Raises DataError: the texts support fewer than `options.vocab_size` entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with convert_library_errors("data.tokenizer: can't be trained"):
        tokenizer.train_from_iterator(texts, trainer)
    n_entries = tokenizer.get_vocab_size()
    if n_entries < options.vocab_size:
        raise DataError(
            f"data.tokenizer.vocab_size = {options.vocab_size}: the training text supports only {n_entries} entries; "
            f"set it to {n_entries} or less, or add text"
        )
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path, end_of_text: str) -> "Tokenizer":
    """Load a tokenizer.json. The tokenizer encodes text that looks like a special token as ordinary text.

    Raises DataError: the file is missing or invalid, uses BPE dropout, has an id of `MAX_VOCAB` or above, two tokens of
    one id, or no token `end_of_text`.
    """
    return tokenizer_from_options(TokenizerFile(str(path), end_of_text))


def parse_tokenizer(content: str | bytes, end_of_text: str) -> "Tokenizer":
    """Make a tokenizer, as `load_tokenizer` does, from the content of a tokenizer.json. The library's errors are not
    converted.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content if isinstance(content, str) else content.decode())
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise DataError(
            f"model.dropout = {dropout:g} gives a text different tokens each time; set it to null in the file"
        )
    if (size := vocab_size(tokenizer)) > MAX_VOCAB:
        raise DataError(f"its largest id is {size - 1:,}; a vocabulary has at most {MAX_VOCAB:,} entries")
    file = json.loads(content)
    # By the file: the library gives an added token another id than the file's if another token has that id.
    added_ids = {token["content"]: token["id"] for token in file.get("added_tokens") or []}
    tokens_by_id: dict[int, str] = {}
    for token, index in (tokenizer.get_vocab() | added_ids).items():
        if (other := tokens_by_id.setdefault(index, token)) != token:
            first, second = sorted((other, token))  # the vocabulary has no order
            raise DataError(f"{first!r} and {second!r} both have the id {index:,}; give each token an id of its own")
    _check_merges_complete(file["model"], added_ids)
    if tokenizer.token_to_id(end_of_text) is None:
        special_names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        listing = f"it has {', '.join(special_names[:8])}" if special_names else "it has no special tokens"
        raise DataError(f"no token '{end_of_text}'; set data.tokenizer.end_of_text to one that ends a text ({listing})")
    # special, even if it is an ordinary added token in the file, which text could encode to
    tokenizer.add_special_tokens([end_of_text])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # files do not keep this setting
    return tokenizer


def _check_merges_complete(model: dict[str, Plain], added_tokens: Container[str]) -> None:
    """Raise DataError if more than a tenth of a byte-pair model's tokens are made by no merge, as in a truncated file
    of merges.

    transformers reads such a file without an error. Tokens that need no merge do not count: single characters, added
    tokens, and marks such as <mask>.
    """
    if not model.get("merges") or any(
        map(model.get, ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    ):
        return
    merged_tokens = {"".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]}
    tokens = [token for token in model["vocab"] if len(token) > 1 and token[0] != "<" and token not in added_tokens]
    if (n_lost := sum(token not in merged_tokens for token in tokens)) > len(tokens) / 10:
        raise DataError(
            f"no merge makes {n_lost:,} of its {len(tokens):,} tokens: its file of merges was cut short; fetch it again"
        )


def encode(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens. Raises DataError if the library can't encode a
    text.
    """
    with convert_library_errors("data.tokenizer: can't encode text", "; use another tokenizer, or other text"):
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def encode_with_offsets(tokenizer: "Tokenizer", text: str) -> "Encoding":
    """Encode a text without special tokens. The result has `ids` and `offsets` (characters). Raises DataError if the
    library can't encode the text.
    """
    with convert_library_errors(
        f"data.tokenizer: can't encode a text that begins {text[:40]!r}", "; use another tokenizer, or other text"
    ):
        return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: "Tokenizer", tokens: Sequence[int], keep_special: bool = False) -> str:
    """Return the text of token ids. Raises DataError if the library can't decode the ids.

    keep_special: whether the text includes special tokens.
    """
    with convert_library_errors(f"data.tokenizer: can't decode {len(tokens)} tokens", "; use another tokenizer"):
        return tokenizer.decode(tokens, skip_special_tokens=not keep_special)


def adds_leading_space(tokenizer: "Tokenizer") -> bool:
    """Return whether the tokenizer puts something, mostly a space, before a text that begins with a letter."""
    return len("".join(encode_with_offsets(tokenizer, "x").tokens)) > 1


def special_token_mask(tokenizer: "Tokenizer") -> np.ndarray:
    """Return a mask of the vocabulary, (V,) bool, that is true for special tokens."""
    is_special = np.zeros(vocab_size(tokenizer), bool)
    is_special[[index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]] = True
    return is_special


def vocab_size(tokenizer: "Tokenizer") -> int:
    """Return the size V of the vocabulary: one more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1


def count_token_bytes(tokenizer: "Tokenizer") -> np.ndarray | None:
    """Return the number of UTF-8 bytes of each token's text, (V,) fp32, 0 for special tokens. Return None if the
    tokenizer is not byte-level.
    """
    from tokenizers import decoders, pre_tokenizers

    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    n_bytes, alphabet = np.zeros(vocab_size(tokenizer), np.float32), set(pre_tokenizers.ByteLevel.alphabet())
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        # A byte-level vocabulary writes each byte as one character; a token with other characters is decoded as it is.
        n_bytes[index] = len(token) if alphabet.issuperset(token) else len(token.encode())
    for index, added_token in tokenizer.get_added_tokens_decoder().items():
        n_bytes[index] = 0 if added_token.special else len(added_token.content.encode())
    return n_bytes


# ---------------------------------------------------------------- tokenizers of pretrained models


TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


def download_files(name: str, revision: str | None, patterns: list[str], error_suffix: str = "") -> Path:
    """Download the files of a model on the hub whose names match `patterns`. Return their folder in the cache, which is
    named by the commit.

    error_suffix: text appended to error messages.

    Raises DataError: `name` is no valid name or no model of the hub, or there is no network and the files are not in
    the cache.
    """
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DataError(
            f"{name}: no such folder or file, and not a name on the hub, such as HuggingFaceTB/SmolLM2-135M"
            f"{error_suffix}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # many kinds: offline, no such model, no permission
        raise DataError(
            f"{name}: no such folder, and the hub does not give it: {one_line_with_cause(error, 200)}{error_suffix}"
        ) from None


def read_tokenizer_json(path: Path) -> str | None:
    """Return the text of the tokenizer.json at `path`, a file or its folder. Return None if the folder has none.

    Raises DataError: the file can't be read.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not readable: {one_line(error, 160)}") from None


def require_tokenizer_json(path: Path) -> str:
    """Return the text of the tokenizer.json at `path`, a file or its folder. Raises DataError if there is none."""
    content = read_tokenizer_json(path)
    if content is None:
        remedy = "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise DataError(f"{path}: has no {TOKENIZER_FILE}; from older files {remedy}")
    return content
