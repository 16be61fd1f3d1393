"""`lm.functional`: every entry, forward and backward, is its definition in fp64, in whatever sequences; and what it
refuses.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lm.functional as L
from lm.attention import catalogue as opt
from lm.attention.catalogue import OPTIONS_BY_NAME
from lm.attention.contract import HEAD_SIZE, HEADS, TRAIN_LENGTH, WIDTH, random_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.errors import ConfigError

CASES = [
    *(entry() for entry in OPTIONS_BY_NAME.values()),
    opt.SSMax(bias=True), opt.SSMax(scale="none"), opt.SSMax(n="fixed:40"), opt.SSMax(n="sample"),
    opt.LogN(base=20.0, clip=True),
    opt.Cosine(log_n=True), opt.Relu2(n="sum"), opt.Sigmoid(bias=True), opt.Window(size=5),
    opt.Softmax(temperature=0.5),
]  # fmt: skip
LENGTHS = [11, 1, 19, 9]  # of the documents in a sequence
TOKENS = sum(LENGTHS)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def packed() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)


# How the documents of two sequences of `TOKENS` are given, and their layout.
GIVEN: dict[str, tuple[dict, Callable[[], AttentionLayout]]] = {
    "whole": ({}, lambda: AttentionLayout.full(TOKENS)),
    "positions": ({"positions": packed()}, lambda: AttentionLayout.from_positions(packed())),
    "cu_seqlens": (
        {"cu_seqlens": torch.tensor([0, *LENGTHS, *LENGTHS]).cumsum(0).int()},
        lambda: AttentionLayout.from_positions(packed()),
    ),
    "a layout": ({"positions": AttentionLayout.full(TOKENS)}, lambda: AttentionLayout.full(TOKENS)),
}


def inputs(heads: int = HEADS) -> tuple[Tensor, ...]:
    """x, q, k, v, leaves in fp64; most normalizers don't read x."""
    sizes = (HEADS, HEAD_SIZE), (heads, HEAD_SIZE), (heads, HEAD_SIZE)
    return drawn(2, TOKENS, WIDTH, seed=4), *(drawn(2, h, TOKENS, d, seed=seed) for seed, (h, d) in enumerate(sizes))


def defined(normalizer: Normalizer, x: Tensor, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """The definition: dense weights times values, features and shared heads by hand."""
    of_q, of_k = normalizer.query_features(x), normalizer.key_features(x)
    k, v = (part.repeat_interleave(HEADS // part.size(1), 1) for part in (k, v))
    q, k = (part if features is None else torch.cat((part, features), -1) for part, features in ((q, of_q), (k, of_k)))
    return normalizer.weights(q, k, layout) @ v


def assert_same(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    grad = drawn(*expected.shape, seed=9).detach()
    for grad_a, grad_b in zip(
        *(
            torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
            for out in (actual, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(grad_a, grad_b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_attention_and_its_gradients_are_the_definition(options: opt.Options, given: str):
    normalizer, (arguments, layout) = random_normalizer(options), GIVEN[given]
    leaves = inputs(heads=2)
    out = L.attention(normalizer, *leaves[1:], x=leaves[0], **arguments)
    assert_same(out, defined(normalizer, *leaves, layout()), [*leaves, *normalizer.parameters()])


@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_fewer_queries_than_keys_go_on_from_earlier_ones(options: opt.Options):
    normalizer = random_normalizer(options)
    x, q, k, v = inputs()
    last = slice(TOKENS - 3, TOKENS)
    if normalizer.reads_layer_input:
        with pytest.raises(ConfigError, match="reads the layer's input"):
            L.attention(normalizer, q[:, :, last], k, v)
        return
    out = L.attention(normalizer, q[:, :, last], k, v)
    expected = defined(normalizer, x, q[:, :, last], k, v, AttentionLayout.continuation(TOKENS - 3, 3, TOKENS))
    assert_same(out, expected, [q, k, v, *normalizer.parameters()])


SCALED = [
    options
    for options in CASES
    if random_normalizer(options).fused_inputs(*(drawn(1, HEADS, 4, HEAD_SIZE, seed=0),) * 2, AttentionLayout.full(4))
]


@pytest.mark.parametrize("options", SCALED, ids=lambda options: options.label())
def test_plain_softmax_of_scaled_queries_is_the_definition(options: opt.Options):
    normalizer, layout = random_normalizer(options), AttentionLayout.from_positions(packed())
    x, q, k, v = inputs()
    scaled_q, scaled_k = L.scaled(normalizer, q, k, positions=packed())
    weights = (scaled_q @ scaled_k.mT / HEAD_SIZE**0.5).masked_fill(~layout.visible(), -torch.inf).softmax(-1)
    assert_same(weights @ v, defined(normalizer, x, q, k, v, layout), [q, k, v, *normalizer.parameters()])


def test_queries_are_rounded_once_to_their_dtype():
    q, k = drawn(1, HEADS, TOKENS, HEAD_SIZE, seed=0).bfloat16(), drawn(1, HEADS, TOKENS, HEAD_SIZE, seed=1).bfloat16()
    ssmax = L.make_module({"name": "ssmax", "init": 0.2}, HEADS, HEAD_SIZE, TRAIN_LENGTH)
    exact = q.double() * (0.2 * torch.arange(1, TOKENS + 1).double().log()).view(-1, 1)
    scaled_q, _ = L.scaled(ssmax, q, k)
    assert scaled_q.dtype == torch.bfloat16
    torch.testing.assert_close(scaled_q.double(), exact, rtol=2**-8, atol=0)


# as many sequences as heads: a parameter could be taken for another axis's
Q = drawn(4, HEADS, 10, HEAD_SIZE, seed=0).detach()


@pytest.mark.parametrize(
    ("said", "given", "options"),
    [
        ("begin with 0", (Q, Q, Q), {"positions": torch.tensor([0, 1, 2, 5, 6, 0, 1, 2, 3, 4])}),
        ("in 4 sequences of 10 queries", (Q, Q, Q), {"positions": torch.arange(10).expand(3, 10)}),
        ("cu_seqlens, must begin with 0", (Q, Q, Q), {"cu_seqlens": torch.tensor([0, 9, 40])}),
        ("cu_seqlens must end with the number of tokens, 40", (Q, Q, Q), {"cu_seqlens": torch.tensor([0, 9])}),
        (
            "give positions or cu_seqlens, not both",
            (Q, Q, Q),
            {"positions": torch.arange(10), "cu_seqlens": torch.tensor([0, 40])},
        ),
        ("10 queries are not the last of 9 tokens", (Q, Q[:, :, 1:], Q[:, :, 1:]), {}),
        ("H a multiple of K", (Q, Q[:, :3], Q[:, :3]), {}),
        (r"\(4, 10, 4, 16\) .* are not \(B, H, T, D\) .* for 4 heads", (Q.transpose(1, 2),) * 3, {}),
    ],
)
def test_what_fits_no_sequences_or_heads_is_refused(said: str, given: tuple, options: dict):
    with pytest.raises(ValueError, match=said):
        L.attention(L.make_module("log_n", HEADS, HEAD_SIZE, 8), *given, **options)


def test_unknown_names_and_options_and_queries_that_are_not_scaled_are_refused():
    for said, name in (("did you mean 'ssmax'", "ssmaxx"), ("normalizer.n = 'wide'", {"name": "ssmax", "n": "wide"})):
        with pytest.raises(ConfigError, match=said):
            L.make_module(name, HEADS, HEAD_SIZE, 8)
    with pytest.raises(ConfigError, match=r"relu2.*is no softmax of scaled queries"):
        L.scaled(L.make_module("relu2", HEADS, HEAD_SIZE, 8), Q, Q)


@pytest.mark.parametrize("length", [20, 700])
@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_outputs_have_the_dtype_of_the_values_under_autocast_too(options: opt.Options, length: int):
    normalizer = random_normalizer(options).float()
    q, x = drawn(1, HEADS, length, HEAD_SIZE, seed=0).float(), drawn(1, length, WIDTH, seed=1).float()
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            assert L.attention(normalizer, q, q, q.to(dtype), x=x).dtype == dtype
