"""Every normalizer: its definition, its fast path, its n, and the exact figures of its source."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm.attention import table
from lm.attention.lengths import RowLength, Rows
from lm.attention.normalizers import Normalizer, make_normalizer

# One row an entry and choice of options; a new normalizer adds its row here.
CASES = {
    "softmax": table.Softmax(),
    "ssmax": table.SSMax(),
    "ssmax, init 1": table.SSMax(init=1.0),
    "ssmax without s": table.SSMax(scale="none"),
    "ssmax with bias": table.SSMax(bias=True),
    "ssmax, n = sample": table.SSMax(n="sample"),
    "ssmax, n = 100": table.SSMax(n="fixed:100"),
    "log_n": table.LogN(),
    "log_n, base 512, clip": table.LogN(base=512.0, clip=True),
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
HEADS, TRAIN_LENGTH = 3, 64


def made(options: object, dtype: torch.dtype = torch.float64) -> Normalizer:
    """The normalizer with its parameters moved off their first values."""
    normalizer = make_normalizer(options, HEADS, TRAIN_LENGTH).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype))
    return normalizer


def inputs(length: int, dtype: torch.dtype = torch.float64, rows: int = 2, size: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, HEADS, length, size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def test_every_registered_normalizer_is_tested():
    assert {options.name for options in CASES.values()} == set(table.ENTRIES)


@every_case
@pytest.mark.parametrize("length", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("size", [16, 40])
def test_fast_path_equals_the_definition_forward_and_backward(options: object, length: int, size: int):
    normalizer, rows = made(options), Rows.full(length)
    q, k, v = (x.requires_grad_() for x in inputs(length, size=size))
    parameters = list(normalizer.parameters())
    fast = normalizer(q, k, v, rows)
    slow = normalizer.weights(q, k, rows) @ v
    assert torch.allclose(fast, slow, rtol=0, atol=1e-10)
    gradient = torch.randn_like(slow)
    for a, b in zip(
        torch.autograd.grad(fast, [q, k, v, *parameters], gradient),
        torch.autograd.grad(slow, [q, k, v, *parameters], gradient),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-10 * max(1, length))


@every_case
def test_bf16_error_is_at_most_twice_that_of_the_definition_in_bf16(options: object):
    length = 200
    normalizer, rows = made(options, torch.float32), Rows.full(length)
    q, k, v = inputs(length, torch.bfloat16)
    exact = made(options).weights(q.double(), k.double(), rows) @ v.double()
    with torch.no_grad():
        fast = normalizer(q.float(), k.float(), v, rows)
        plain = normalizer.weights(q, k, rows) @ v
    assert fast.dtype == torch.bfloat16
    error, allowed = (fast - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * allowed + 2**-8


@every_case
def test_gradients_are_right_by_finite_differences(options: object):
    normalizer, rows = made(options), Rows.full(6)
    q, k, v = (x.requires_grad_() for x in inputs(6, rows=1, size=4))
    parameters = tuple(normalizer.parameters())

    def run(q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(
            normalizer, dict(zip([n for n, _ in normalizer.named_parameters()], values, strict=True)), (q, k, v, rows)
        )

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters), eps=1e-6, atol=1e-6)


@every_case
def test_weights_are_causal_non_negative_and_sum_to_one(options: object):
    normalizer, rows = made(options), Rows.full(33)
    q, k, _ = inputs(33)
    weights = normalizer.weights(q, k, rows)
    assert (weights >= 0).all()
    assert (weights.triu(1) == 0).all()
    assert torch.allclose(weights.sum(-1), torch.ones(2, HEADS, 33, dtype=torch.float64))


@every_case
def test_a_future_token_changes_nothing_earlier(options: object):
    normalizer, rows = made(options), Rows.full(40)
    q, k, v = inputs(40)
    before = normalizer(q, k, v, rows)
    for x in (q, k, v):
        x[:, :, 25:] += 3.0
    assert torch.equal(before[:, :, :25], normalizer(q, k, v, rows)[:, :, :25])


@every_case
def test_step_by_step_decoding_equals_the_whole_row(options: object):
    length = 30
    normalizer = made(options)
    q, k, v = inputs(length)
    whole = normalizer(q, k, v, Rows.full(length))
    positions = torch.arange(length)
    for t in range(length):
        rows = Rows(positions[t : t + 1], positions[: t + 1], torch.tensor([length]), causal=False)
        step = normalizer(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], rows)
        assert torch.allclose(step, whole[:, :, t : t + 1], rtol=0, atol=1e-12)


@every_case
def test_n_follows_positions_not_the_width_of_the_tensor(options: object):
    """Two documents side by side in a batch, one padded to the other's width, give what each gives alone."""
    normalizer = made(options)
    short, long = 9, 21
    q, k, v = inputs(long)
    alone = normalizer(q[:1, :, :short], k[:1, :, :short], v[:1, :, :short], Rows.full(short))
    positions = torch.arange(long).expand(2, long)
    rows = Rows(positions, positions, torch.tensor([[short], [long]]), causal=True)
    batched = normalizer(q, k, v, rows)
    assert torch.allclose(batched[:1, :, :short], alone, rtol=0, atol=1e-12)


@every_case
@pytest.mark.parametrize("fill", [0.0, 1e4, -1e4])
def test_extreme_and_identical_inputs_stay_finite(options: object, fill: float):
    normalizer, rows = made(options, torch.float32), Rows.full(50)
    q, k, v = (x.requires_grad_() for x in inputs(50, torch.float32))
    out = normalizer(q * 0 + (fill or 1.0), k * (1e4 if fill else 0.0) + fill, v, rows)
    out.sum().backward()
    assert out.isfinite().all()
    for x in (q, k, v, *normalizer.parameters()):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_row_length_policies():
    rows = Rows(torch.tensor([0, 1, 9]), torch.arange(10), torch.tensor([12]), causal=False)
    assert RowLength("visible")(rows).tolist() == [1, 2, 10]
    assert RowLength("sample")(rows).tolist() == [12, 12, 12]
    assert RowLength("fixed:512")(rows).tolist() == [512, 512, 512]
    assert RowLength("visible")(rows).dtype == torch.float32


# ---------------------------------------------------------------- figures of the source (SSMax)


def row_weights(options: object, logits: Tensor, s: float | None = None) -> Tensor:
    """Weights of one query over n keys whose scaled logits are `logits` (n,), float64."""
    n = len(logits)
    normalizer = make_normalizer(options, 1, TRAIN_LENGTH).double()
    if s is not None:
        with torch.no_grad():
            normalizer.s.fill_(s)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    rows = Rows(torch.tensor([n - 1]), torch.arange(n), torch.tensor([n]), causal=False)
    return normalizer.weights(q, logits.double().view(1, 1, n, 1), rows).flatten()


FIGURE_1 = {  # n: largest weight under softmax and under SSMax with s = 0.43
    2: (0.99331, 0.81612),
    10: (0.94283, 0.94010),
    100: (0.59986, 0.99506),
    1_000: (0.12935, 0.99965),
    10_000: (0.01463, 0.99998),
    100_000: (0.00148, 1.00000),
}


@pytest.mark.parametrize("n", FIGURE_1)
def test_vector_of_the_papers_figure_1(n: int):
    """One element +3, all others -2."""
    logits = torch.full((n,), -2.0)
    logits[n // 2] = 3.0
    softmax, ssmax = FIGURE_1[n]
    assert row_weights(table.Softmax(), logits).max().item() == pytest.approx(softmax, abs=6e-6)
    assert row_weights(table.SSMax(), logits, s=0.43).max().item() == pytest.approx(ssmax, abs=6e-6)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(2, 400), s=st.floats(0.05, 3.0), scale=st.floats(0.01, 8.0), seed=st.integers(0, 2**31))
def test_largest_weight_is_within_the_papers_bounds(n: int, s: float, scale: float, seed: int):
    """1/((n-1) n^-s(zmax-z2nd) + 1) <= max <= 1/((n-1) n^-s(zmax-zmin) + 1), and softmax's upper bound."""
    z = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    top = z.sort(descending=True).values
    largest = row_weights(table.SSMax(), z, s).max().item()
    s = float(torch.tensor(s, dtype=torch.float32))  # as `fill_` and ln n (fp32) have it, up to 1e-6 below
    low = 1 / ((n - 1) * n ** (-s * (top[0] - top[1]).item()) + 1)
    high = 1 / ((n - 1) * n ** (-s * (top[0] - top[-1]).item()) + 1)
    assert low * (1 - 1e-4) <= largest <= high * (1 + 1e-4)
    softmax_high = 1 / ((n - 1) * math.exp(-(top[0] - top[-1]).item()) + 1)
    assert row_weights(table.Softmax(), z).max().item() <= softmax_high * (1 + 1e-12)


MATCH = {128: 0.25785, 256: 0.21932, 512: 0.19061, 1024: 0.16847, 2048: 0.15090, 4096: 0.13663, 8192: 0.12482}


@pytest.mark.parametrize("length", MATCH)
def test_matching_first_value_keeps_the_mean_logit_scale_at_one(length: int):
    assert length / math.lgamma(length + 1) == pytest.approx(MATCH[length], abs=6e-6)
    normalizer = make_normalizer(table.SSMax(), HEADS, length)
    assert normalizer.s.tolist() == pytest.approx([MATCH[length]] * HEADS, abs=6e-6)
    assert normalizer.scale(Rows.full(length)).mean().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("policy", ["visible", "sample", "fixed:1000"])
def test_matching_holds_for_every_row_length(policy: str):
    normalizer = make_normalizer(table.SSMax(n=policy), HEADS, 100)
    assert normalizer.scale(Rows.full(100)).mean().item() == pytest.approx(1.0, abs=1e-5)


def test_ssmax_with_s_one_over_log_n_is_softmax_at_that_n():
    z = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(row_weights(table.SSMax(), z, s=1 / math.log(50)), row_weights(table.Softmax(), z), atol=1e-6)


def test_log_n_is_softmax_at_its_base_and_ssmax_with_fixed_s():
    z = torch.randn(512, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(row_weights(table.LogN(base=512.0), z), row_weights(table.Softmax(), z), atol=1e-6)
    z = z[:77]
    assert torch.allclose(row_weights(table.LogN(base=512.0), z), row_weights(table.SSMax(), z, s=1 / math.log(512)), atol=1e-6)


def test_log_n_clip_is_softmax_below_its_base():
    z = torch.randn(77, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_weights(table.LogN(base=512.0, clip=True), z), row_weights(table.Softmax(), z))


def test_ssmax_with_s_zero_is_uniform_and_with_bias_one_is_softmax():
    z = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(row_weights(table.SSMax(), z, s=0.0), torch.full((50,), 1 / 50, dtype=torch.float64))
    normalizer = make_normalizer(table.SSMax(bias=True), HEADS, TRAIN_LENGTH).double()
    with torch.no_grad():
        normalizer.s.zero_()
        normalizer.b.fill_(1.0)
    q, k, v = inputs(20)
    assert torch.equal(normalizer(q, k, v, Rows.full(20)), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_published_mistake_adding_log_n_to_logits_is_a_no_op_but_ssmax_is_not():
    z = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose((z - 0.43 * math.log(50)).softmax(0), row_weights(table.Softmax(), z))
    assert (row_weights(table.SSMax(), z, s=0.43) - row_weights(table.Softmax(), z)).abs().max() > 0.01


def test_published_mistake_padded_width_is_not_n():
    """The first queries of a wide row must see ln of their own few keys."""
    scale = make_normalizer(table.SSMax(init=1.0), 1, TRAIN_LENGTH).scale(Rows.full(512)).flatten()
    assert torch.allclose(scale, torch.arange(1, 513).float().log())


def test_parameters_of_a_normalizer_are_rank_one_one_a_head():
    assert [(n, tuple(p.shape)) for n, p in make_normalizer(table.SSMax(bias=True), 5, 64).named_parameters()] == [
        ("s", (5,)),
        ("b", (5,)),
    ]
    assert not list(make_normalizer(table.SSMax(scale="none"), 5, 64).parameters())
