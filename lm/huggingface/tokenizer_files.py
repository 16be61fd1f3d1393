"""The token that starts a pretrained model's documents, and checks that its tokenizer goes with the model."""

import json
from pathlib import Path

from lm.config.data_config import END_OF_TEXT
from lm.data.tokenizer import NO_TOKENIZER, library_errors, parse_tokenizer, vocab_size
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
        if configured_tokens := _configured_tokens(kind, tokens, tokenizer_config, config):
            return configured_tokens[0]
    special_text = f"its special tokens: {', '.join(map(str, [*tokens.values()][:8]))}" if tokens else "it has no special tokens"
    raise RunError(f"{path}: no token that starts a document is known ({special_text}); name one: --end-of-text TOKEN")


def eos_tokens(content: str, end_of_text: str, *configurations: dict[str, Plain]) -> list[str]:
    """The tokens that end a document by tokenizer_config.json, config.json and generation_config.json."""
    added_tokens = parse_tokenizer(content, end_of_text).get_added_tokens_decoder()
    return _configured_tokens("eos", {index: token.content for index, token in added_tokens.items()}, *configurations)


def _configured_tokens(kind: str, tokens: dict[int, str], *configurations: dict[str, Plain]) -> list[str]:
    """The tokens of a kind, `bos` or `eos`, that configurations name or give the ids of, among `tokens` by id."""
    named_tokens: list[Plain] = []
    for fields in configurations:
        token, ids = fields.get(f"{kind}_token"), fields.get(f"{kind}_token_id")
        named_tokens.append(token.get("content") if isinstance(token, dict) else token)
        named_tokens += [tokens.get(index) for index in (ids if isinstance(ids, list) else [ids]) if isinstance(index, int)]
    return [*dict.fromkeys(token for token in named_tokens if isinstance(token, str) and token in tokens.values())]


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


def optional_json(file: Path) -> dict[str, Plain]:
    """The content of a file of settings; {} if there is none."""
    return read_json(file) if file.is_file() else {}
