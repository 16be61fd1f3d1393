"""The token that starts a pretrained model's documents, and checks that its tokenizer goes with the model."""

import json
from pathlib import Path

from lm.config.data_config import END_OF_TEXT
from lm.data.tokenizer import NO_TOKENIZER, TOKENIZER_CONFIG, library_errors, parse_tokenizer, vocab_size
from lm.errors import DataError, RunError, one_line
from lm.files import read_json
from lm.schema import Plain


def start_token(content: str, config: dict[str, Plain], tokenizer_config: dict[str, Plain], end_of_text: str | None, path: Path) -> str:
    """The token that starts a document: `end_of_text`, else <|endoftext|> if that is a special token, else the model's BOS, else its EOS.

    Raises RunError: none of these tokens is known.
    """
    if end_of_text:
        return end_of_text
    try:
        added_tokens = json.loads(content)["added_tokens"]
        tokens = {token["id"]: token["content"] for token in added_tokens if token["special"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: its tokenizer is {NO_TOKENIZER}: {one_line(error, 160)}") from None
    if END_OF_TEXT in tokens.values():
        return END_OF_TEXT
    for kind in ("bos", "eos"):
        configured_token = tokenizer_config.get(f"{kind}_token")
        configured_token = configured_token.get("content") if isinstance(configured_token, dict) else configured_token
        ids = config.get(f"{kind}_token_id")
        index = ids[0] if isinstance(ids, list) and ids else ids
        for token in (configured_token, tokens.get(index) if isinstance(index, int) else None):
            if isinstance(token, str) and token in tokens.values():
                return token
    special_text = f"its special tokens: {', '.join(map(str, [*tokens.values()][:8]))}" if tokens else "it has no special tokens"
    raise RunError(f"{path}: no token that starts a document is known ({special_text}); name one: --end-of-text TOKEN")


def checked_vocabulary_size(content: str, end_of_text: str, vocabulary: int, path: Path) -> int:
    """The vocabulary size of a tokenizer that goes with a model of `vocabulary` tokens.

    Raises RunError: it can't be used, lacks the token, or has more tokens than the model.
    """
    try:
        with library_errors(f"its tokenizer is {NO_TOKENIZER}"):
            size = vocab_size(parse_tokenizer(content, end_of_text))
    except DataError as error:
        text = str(error).replace("set data.tokenizer.end_of_text to one", "name one with --end-of-text")
        raise RunError(f"{path}: {text}") from None
    if size > vocabulary:
        raise RunError(f"{path}: the tokenizer has ids up to {size - 1:,}, the model's vocab_size is {vocabulary:,}: of another model?")
    return size


def starting_documents(content: str, end_of_text: str) -> str:
    """A tokenizer.json whose tokenizer puts the token that starts a document before each text, and no other special token."""
    tokenizer = parse_tokenizer(content, end_of_text)
    start = {"SpecialToken": {"id": end_of_text, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    # Not by TemplateProcessing, whose templates have a meaning of their own for spaces, colons and dollars in a token.
    fields = json.loads(tokenizer.to_str())
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [start, texts[0]], "pair": [start, *texts],
        "special_tokens": {end_of_text: {"id": end_of_text, "ids": [tokenizer.token_to_id(end_of_text)], "tokens": [end_of_text]}},
    }  # fmt: skip
    return parse_tokenizer(json.dumps(fields), end_of_text).to_str()


def tokenizer_settings(folder: Path) -> dict[str, Plain]:
    """The content of tokenizer_config.json; {} if there is none."""
    return read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
