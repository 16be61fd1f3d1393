"""`lm.functional`: every entry, forward and backward, is its definition in fp64, in whatever sequences; and what it
refuses.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lm.functional as L
from lm.attention import catalogue as opt
from lm.attention.catalogue import ENTRIES
from lm.attention.contract import HEADS, SIZE, TRAIN_LENGTH, WIDTH, randomized
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.config.model_config import ModelConfig
from lm.errors import ConfigError
from lm.model.decoder import Decoder
from lm.plain import to_plain

CASES = [
    *(entry() for entry in ENTRIES.values()),
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


def inputs(normalizer: Normalizer, heads: int = HEADS) -> tuple[Tensor, ...]:
    """x, q, k, v, leaves in fp64; x is unused by most."""
    sizes = (HEADS, SIZE), (heads, SIZE), (heads, SIZE)
    return drawn(2, TOKENS, WIDTH, seed=4), *(drawn(2, h, TOKENS, d, seed=seed) for seed, (h, d) in enumerate(sizes))


def reads_input(normalizer: Normalizer) -> bool:
    return any(
        getattr(normalizer, name)(torch.zeros(1, 1, WIDTH).double()) is not None
        for name in ("query_features", "key_features")
    )


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
    normalizer, (arguments, layout) = randomized(options), GIVEN[given]
    leaves, parameters = inputs(normalizer, heads=2), dict(normalizer.named_parameters())
    x = {"x": leaves[0]} if reads_input(normalizer) else {}
    out = L.attention(to_plain(options), *leaves[1:], parameters, train_length=TRAIN_LENGTH, **x, **arguments)
    assert_same(out, defined(normalizer, *leaves, layout()), [*leaves, *parameters.values()])


@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_fewer_queries_than_keys_go_on_from_earlier_ones(options: opt.Options):
    normalizer = randomized(options)
    x, q, k, v = inputs(normalizer)
    parameters, last = dict(normalizer.named_parameters()), slice(TOKENS - 3, TOKENS)
    if reads_input(normalizer):
        with pytest.raises((ConfigError, RuntimeError)):
            L.attention(to_plain(options), q[:, :, last], k, v, parameters, train_length=TRAIN_LENGTH)
        return
    out = L.attention(to_plain(options), q[:, :, last], k, v, parameters, train_length=TRAIN_LENGTH)
    expected = defined(normalizer, x, q[:, :, last], k, v, AttentionLayout.continuing(TOKENS - 3, 3, TOKENS))
    assert_same(out, expected, [q, k, v, *parameters.values()])


SCALED = [
    options
    for options in CASES
    if randomized(options).fused_inputs(*(drawn(1, HEADS, 4, SIZE, seed=0),) * 2, AttentionLayout.full(4))
]


@pytest.mark.parametrize("options", SCALED, ids=lambda options: options.label())
def test_plain_softmax_of_scaled_queries_is_the_definition(options: opt.Options):
    normalizer = randomized(options)
    x, q, k, v = inputs(normalizer)
    parameters, layout = dict(normalizer.named_parameters()), AttentionLayout.from_positions(packed())
    scaled_q, scaled_k = L.scaled(to_plain(options), q, k, parameters, positions=packed(), train_length=TRAIN_LENGTH)
    weights = (scaled_q @ scaled_k.mT / SIZE**0.5).masked_fill(~layout.visible(), -torch.inf).softmax(-1)
    assert_same(weights @ v, defined(normalizer, x, q, k, v, layout), [q, k, v, *parameters.values()])


@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_initial_parameters_are_those_of_a_model(options: opt.Options):
    model = ModelConfig(1, n_head=HEADS, n_embd=HEADS * SIZE, normalizer=options)
    (normalizer,) = Decoder(model, 10, TRAIN_LENGTH).normalizers()
    expected = dict(normalizer.named_parameters())
    first = L.parameters(to_plain(options), HEADS, SIZE, TRAIN_LENGTH, HEADS * SIZE)
    assert first.keys() == expected.keys()
    for name, parameter in expected.items():
        if name.endswith("hidden.weight"):
            assert (first[name].shape, first[name].std()) == (
                parameter.shape,
                pytest.approx(parameter.std().item(), rel=0.3),
            )
        else:
            assert torch.equal(first[name], parameter)


def test_queries_are_rounded_once_to_their_dtype():
    q, k = drawn(1, HEADS, TOKENS, SIZE, seed=0).bfloat16(), drawn(1, HEADS, TOKENS, SIZE, seed=1).bfloat16()
    s = {"s": torch.full((HEADS,), 0.2)}
    exact = q.double() * (0.2 * torch.arange(1, TOKENS + 1).double().log()).view(-1, 1)
    scaled_q, _ = L.scaled("ssmax", q, k, s)
    assert scaled_q.dtype == torch.bfloat16
    torch.testing.assert_close(scaled_q.double(), exact, rtol=2**-8, atol=0)


# as many sequences as heads: a parameter could be taken for another axis's
Q = drawn(4, HEADS, 10, SIZE, seed=0).detach()
S = torch.tensor([0.1, 0.5, 1.0, 2.0])
FORGET = L.parameters("forget", HEADS, SIZE, 8, WIDTH)


@pytest.mark.parametrize(
    ("said", "name", "given", "options"),
    [
        ("did you mean 'ssmax'", "ssmaxx", (Q, Q, Q), {}),
        ("normalizer.n = 'wide'", {"name": "ssmax", "n": "wide"}, (Q, Q, Q), {}),
        ("temperature = .*0.5.*: must be a number", {"name": "softmax", "temperature": torch.tensor(0.5)}, (Q, Q, Q),
            {}),
        (r"ssmax has the parameters .*'s': \(4,\).*, not \{\}", "ssmax", (Q, Q, Q), {}),
        (r"'s': \(4,\).* not .*'s': \(4, 1\)", "ssmax", (Q, Q, Q, {"s": S[:, None]}), {}),
        ("train_length = null", "log_n", (Q, Q, Q), {}),
        ("train_length = 1: must be a whole number, 2 or more", "log_n", (Q, Q, Q), {"train_length": 1}),
        ("reads the layer's input", "forget", (Q, Q, Q, FORGET), {}),
        (r"x \(4, 9, 12\) must be \(B, T, C\)", "forget", (Q, Q, Q, FORGET), {"x": torch.zeros(4, 9, WIDTH)}),
        ("at each query and key", "forget", (Q[:, :, :2], Q, Q, FORGET), {"x": torch.zeros(4, 2, WIDTH)}),
        ("cu_seqlens must be whole", "softmax", (Q, Q, Q), {"cu_seqlens": torch.tensor([0, 15, 10, 40])}),
        ("from 0 to the 40 tokens", "softmax", (Q, Q, Q), {"cu_seqlens": torch.tensor([0, 9])}),
        ("from 0 on by 1", "softmax", (Q, Q, Q), {"positions": torch.tensor([0, 1, 2, 5, 6, 0, 1, 2, 3, 4])}),
        (r"positions \(3, 10\) must be whole numbers for 10 queries", "softmax", (Q, Q, Q),
            {"positions": torch.arange(10).expand(3, 10)}),
        ("give positions or cu_seqlens", "softmax", (Q, Q, Q), {"positions": S, "cu_seqlens": S}),
        ("10 queries are not the last of 9 tokens", "softmax", (Q, Q[:, :, 1:], Q[:, :, 1:]), {}),
        ("H a multiple of K", "softmax", (Q, Q[:, :3], Q[:, :3]), {}),
        (r"must be \(B, H, T, D\)", "softmax", (Q, Q, Q[:, :, 1:]), {}),
    ],
)  # fmt: skip
def test_what_fits_no_such_normalizer_sequences_or_heads_is_refused(
    said: str, name: L.Named, given: tuple, options: dict
):
    with pytest.raises((ValueError, ConfigError), match=said):
        L.attention(name, *given, **options)


def test_queries_are_scaled_for_softmax_alone():
    with pytest.raises(ConfigError, match=r"relu2.*is no softmax of scaled queries"):
        L.scaled("relu2", Q, Q)


@pytest.mark.parametrize("sizes", [(4, 16, 1), (4, 16, 0), (0, 16, 8), (4, 0, 8), (4, 16, 8, 0), (4, 16, 8.0)])
def test_parameters_are_made_of_sizes_that_a_layer_has(sizes: tuple):
    with pytest.raises(ConfigError, match="must be a whole number"):
        L.parameters("ssmax", *sizes)


def test_a_call_leaves_the_callers_draws_as_they_are():
    parameters = L.parameters("qassmax", HEADS, SIZE, 8)
    L._cached_module.cache_clear()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    L.attention("qassmax", Q.float(), Q.float(), Q.float(), parameters)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("length", [20, 700])
@pytest.mark.parametrize("options", CASES, ids=lambda options: options.label())
def test_outputs_have_the_dtype_of_the_values_under_autocast_too(options: opt.Options, length: int):
    normalizer = randomized(options).float()
    q, x = drawn(1, HEADS, length, SIZE, seed=0).float(), drawn(1, length, WIDTH, seed=1).float()
    layer_inputs = (
        {"x": x} if any(getattr(normalizer, name)(x) is not None for name in ("query_features", "key_features")) else {}
    )
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            out = L.attention(
                to_plain(options),
                q,
                q,
                q.to(dtype),
                dict(normalizer.named_parameters()),
                train_length=TRAIN_LENGTH,
                **layer_inputs,
            )
        assert out.dtype == dtype
