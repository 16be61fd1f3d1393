"""Generate text with a trained model, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lm.data.tokenizer import decode, encode_with_offsets
from lm.errors import ConfigError, Problem, RunError
from lm.model.blocks import DecodingCache
from lm.model.decoder import Decoder
from lm.runs.loading import load


@dataclass(frozen=True)
class Sampling:
    """This class holds options that say how the tokens of a sequence are sampled."""

    temperature: float = 1.0  # divides the logits; 0: always the most probable token
    top_k: int | None = None  # draw among the k most probable tokens only
    seed: int = 0  # seed of the random draws


@torch.no_grad()
def generate(decoder: Decoder, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
    """Yield new token ids after `prompt` (at least one id), each as soon as it is sampled, with a cache of keys and
    values.

    In a normalizer's formula n is the number of tokens so far with the option `n: visible`. With `n: sample` it is,
    from the first step on, the length of the prompt plus `max_new_tokens` (docs/n.md).

    Raises RunError: the logits are not finite.
    """
    generator, cache = torch.Generator().manual_seed(sampling.seed), DecodingCache(len(prompt) + max_new_tokens)
    tokens = prompt
    for _ in range(max_new_tokens):
        inputs = torch.tensor([tokens], device=decoder.head.weight.device)
        hidden = decoder(inputs, cache=cache, output_start=len(tokens) - 1)[:, 0]
        tokens = [sample_token(decoder.head(hidden).float().cpu()[0], sampling, generator)]
        yield tokens[0]


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token id sampled from next-token logits (V,) fp32. Raises RunError: the logits are not finite."""
    scaled = logits / (sampling.temperature or 1.0)
    if not scaled.isfinite().all():
        raise RunError(
            "the model's logits are not finite, divided by the temperature: raise --temperature, or take an earlier "
            "checkpoint"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = logits.argsort(descending=True)[: sampling.top_k]
    probabilities = scaled[order].softmax(-1)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def generate_text(source: Path, checkpoint: str, prompt: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
    """Return an iterator over pieces of text for `lm generate`: first the prompt, then each piece as soon as it is
    generated. `checkpoint` is `last`, `best` or a step.

    Raises:
        RunError: there is no model at `source`, or it has no tokenizer.
        ConfigError: the tokenizer has no token for a part of the prompt, or there are more tokens than learned
            positions.
    """
    model = load(source, checkpoint)
    tokenizer, start = model.tokenizer_and_start_id()
    encoding, unknown_token = encode_with_offsets(tokenizer, prompt), getattr(tokenizer.model, "unk_token", None)
    unknown = (span for token, span in zip(encoding.tokens, encoding.offsets, strict=True) if token == unknown_token)
    for begin, end in unknown:
        if (text := prompt[begin:end]) != unknown_token:
            examples = " ".join(filter(None, map(tokenizer.id_to_token, range(3))))
            remedy = f"its tokens are such as `{examples}`"
            raise ConfigError([Problem("--prompt", text, "the model has no token for it", remedy)])
    ids = [start, *encoding.ids]
    if model.spec.model.position.has_length_limit and len(ids) + max_new_tokens > model.decoder.seq_len:
        room = model.decoder.seq_len - len(ids)
        raise ConfigError(
            [Problem("--max-new-tokens", max_new_tokens, f"learned positions leave room for {room} after the prompt")]
        )
    return text_pieces(tokenizer, ids[1:], model.end_ids, generate(model.decoder, ids, max_new_tokens, sampling))


def text_pieces(
    tokenizer: Tokenizer, prompt_ids: list[int], end_ids: list[int], new_tokens: Iterator[int]
) -> Iterator[str]:
    """Yield the text of `prompt_ids`, then the characters that each new token completes. Generation ends at a token of
    `end_ids`.
    """
    shown, ids = decode(tokenizer, prompt_ids), list(prompt_ids)
    yield shown
    for token in takewhile(lambda token: token not in end_ids, new_tokens):
        ids.append(token)
        text = decode(tokenizer, ids)
        if not text.endswith("\ufffd") and (piece := text[len(shown) :]):  # else a character is unfinished
            yield piece
            shown += piece
