"""The tokenizer of a GGUF file, from its metadata, as a tokenizer.json: byte-level BPE (`gpt2`) or sentencepiece's BPE (`llama`)."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lm.errors import RunError, one_line
from lm.schema import Plain

# How text is cut into words before byte-level BPE, by `tokenizer.ggml.pre`; `""` is GPT-2's own.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + "DIGITS" + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "gpt-2": "",
    "smollm": r"\p{N}",
    "llama-bpe": _WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    "qwen2": _WORDS.replace("DIGITS", r"\p{N}"),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPACE = "▁"  # stands for a space in sentencepiece's tokens


def gguf_tokenizer(metadata: dict[str, Plain], path: Path) -> str | None:
    """The content of a tokenizer.json; None: the file has no tokenizer.

    Raises:
        RunError: a kind of tokenizer that is not read, for which a tokenizer.json must be given, or a damaged one.
    """
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    kind, pre = own.get("model"), own.get("pre")
    if kind is None:
        return None
    if kind != "llama" and (kind != "gpt2" or pre not in CUTS):
        what = f"tokenizer.ggml.model = {kind!r}, pre = {pre!r}"
        raise RunError(f"{path}: {what}: not a tokenizer that is read from GGUF; name its tokenizer.json with --tokenizer")
    try:
        tokenizer = _sentencepiece(own) if kind == "llama" else _byte_level(own, CUTS[pre], pre)
        tokens = list(zip(own["tokens"], own["token_type"], strict=True))
        special = (CONTROL, UNKNOWN)
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in tokens if kind in special])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in tokens if kind == USER_DEFINED])
    except Exception as error:  # all that the library raises
        reason = f"has no tokenizer.ggml.{error.args[0]}" if isinstance(error, KeyError) else f"is damaged: {one_line(error, 160)}"
        raise RunError(f"{path}: its tokenizer {reason}; name its tokenizer.json with --tokenizer") from None
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1)


def _byte_level(own: dict[str, Plain], cut: str, pre: str) -> Tokenizer:
    pairs = [tuple(merge.split(" ")) for merge in own["merges"]]
    tokenizer = Tokenizer(models.BPE(_numbered(own["tokens"]), pairs, ignore_merges=pre == "llama-bpe"))
    steps = [pre_tokenizers.Split(Regex(cut), "isolated")] if cut else []
    words = pre in ("gpt-2", "smollm")  # GPT-2's, after the cut
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(own: dict[str, Plain]) -> Tokenizer:
    """BPE over all of a text at once, with a space before it; what no token covers is spelled in bytes."""
    tokens, kinds = own["tokens"], own["token_type"]
    scores = {token: score for token, score, kind in zip(tokens, own["scores"], kinds, strict=True) if kind == NORMAL}
    unknown = tokens[own.get("unknown_token_id", 0)]
    bpe = models.BPE(_numbered(tokens), _merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = own.get("add_space_prefix", True)
    spaces = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The pairs that sentencepiece joins, first those that make the token of the highest score: it lists no merges."""
    cuts = ((token[:n], token[n:], score) for token, score in scores.items() for n in range(1, len(token)))
    pairs = [cut for cut in cuts if cut[0] in scores and cut[1] in scores]
    return [(left, right) for left, right, _ in sorted(pairs, key=lambda cut: (-cut[2], -len(cut[0])))]


def _numbered(tokens: list[str]) -> dict[str, int]:
    numbered = {token: index for index, token in enumerate(tokens)}
    if len(numbered) < len(tokens):
        raise ValueError("it lists a token twice")
    return numbered
