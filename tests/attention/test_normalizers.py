"""Every normalizer: its definition, its fast path, its n, and the exact figures of its source."""

import math
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from conftest import mark_others_slow
from torch import Tensor

from lm.attention import catalogue, contract
from lm.attention import catalogue as opt
from lm.attention.catalogue import make_normalizer
from lm.attention.contract import HEADS, TRAIN_LENGTH, WIDTH, random_inputs, random_normalizer
from lm.attention.layout import AttentionLayout, attend_by_document
from lm.attention.normalizer import LayerSpec
from lm.attention.options import Options
from lm.attention.routes import attend_by_query_blocks
from lm.attention.sparse import entmax_threshold
from lm.config import normalizers as kinds
from lm.config.load import load_normalizer
from lm.errors import ConfigError
from scripts.tensor_memory import TensorMemory

# Each entry with its defaults, or with options that act within few tokens; and further choices of options.
CASES = {name: entry() for name, entry in catalogue.OPTIONS_BY_NAME.items()} | {
    "llama4": opt.Llama4(floor_scale=8.0),
    "softcap": opt.SoftCap(cap=0.7),
    "window": opt.Window(size=5),
    "softmax at temperature 0.3": opt.Softmax(temperature=0.3),
    "ssmax, init 1": opt.SSMax(init=1.0),
    "ssmax without s": opt.SSMax(scale="none"),
    "ssmax with bias": opt.SSMax(bias=True),
    "ssmax, n = sample": opt.SSMax(n="sample"),
    "ssmax, n = 100": opt.SSMax(n="fixed:100"),
    "log_n, base 512, clip": opt.LogN(base=512.0, clip=True),
    "log_n, squared": opt.LogN(power=2.0),
    "threshold, p = 1": opt.Threshold(power=1),
    "threshold, undivided": opt.Threshold(divided=False),
    "lssa, sharpened": opt.SoftplusAttention(base="head_size", sharpening=3),
    "cosine, log n": opt.Cosine(log_n=True),
    "relu2, n = sample": opt.Relu2(n="sample"),
    "relu2, n = 64": opt.Relu2(n="fixed:64"),
    "relu2, sum": opt.Relu2(n="sum"),
    "relu2, 1/n^2": opt.Relu2(form="1/n^2"),
    "sigmoid with bias": opt.Sigmoid(bias=True),
    "linear, relu, n": opt.Linear(features="relu", n="visible"),
    "linear, decay": opt.Linear(decay=True),
    "linear, identity, decay": opt.Linear(features="identity", decay=True, n="visible"),
    "window of 1": opt.Window(size=1),
    "window of few keys": opt.Window(size=3),
    "window, longer than the sequence": opt.Window(size=200),
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize(
    "case", mark_others_slow(CASES, {options.name: case for case, options in reversed(CASES.items())}.values())
)
def test_a_normalizer_keeps_the_contract(case: str):
    for check in contract.CHECKS:
        check(CASES[case])


# By default a case for each formula that is computed in blocks, tiles or chunks.
IN_BLOCKS = (
    "softmax1",
    "relu2, sum",
    "sigmoid with bias",
    "asentmax",
    "softpick",
    "forget",
    "linear",
    "stick_breaking",
)


@pytest.mark.parametrize("case", mark_others_slow(CASES, IN_BLOCKS))
def test_blocks_and_tiles_smaller_than_the_sequence_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.attention.routes.MAX_BLOCK_WEIGHTS", 2 * HEADS * 50 * 7)  # seven queries
    monkeypatch.setattr("lm.attention.elementwise_sums.TILE_SIZE", 16)
    monkeypatch.setattr("lm.attention.linear.MAX_CHUNK_TOKENS", 16)
    monkeypatch.setattr("lm.attention.linear.MAX_SEGMENT_TOKENS", 32)
    contract.check_fast_path(CASES[case])


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("linear")])
def test_linear_attention_decodes_across_chunks_and_segments(case: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.attention.linear.MAX_CHUNK_TOKENS", 4)
    monkeypatch.setattr("lm.attention.linear.MAX_SEGMENT_TOKENS", 8)
    contract.check_decoding(CASES[case])


@every_case
def test_a_block_takes_at_most_64_bytes_a_weight(options: Options):
    normalizer, layout, length = random_normalizer(options, torch.float32), AttentionLayout.full(256), 256
    q, k, v = (x.requires_grad_() for x in random_inputs(length, normalizer=normalizer, dtype=torch.float32))
    with TensorMemory() as memory:
        attend_by_query_blocks(normalizer, q, k, v, layout).sum().backward()
    assert memory.peak_bytes - 20 * q.nbytes < 64 * q.size(0) * q.size(1) * length**2


def test_row_length_policies():
    layout = AttentionLayout(torch.tensor([0, 1, 9]), torch.arange(10), torch.tensor([12]), mask_is_triangular=False)
    assert layout.n("visible").tolist() == [1, 2, 10]
    assert layout.n("sample").tolist() == [12, 12, 12]
    assert layout.n("fixed:512").tolist() == [512, 512, 512]
    assert layout.n("visible").dtype == torch.float32
    packed = AttentionLayout.from_document_lengths([2, 3])
    assert packed.n("visible").tolist() == [[1, 2, 1, 2, 3]]
    assert packed.n("sample").tolist() == [[2, 2, 3, 3, 3]]

    def n_of_sample(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return layout.n("sample")[:, None, :, None].expand(q.shape)

    assert attend_by_document(n_of_sample, *torch.zeros(3, 1, 1, 5, 1), packed).flatten().tolist() == [2, 2, 3, 3, 3]


# ---------------------------------------------------------------- identities of the other families


@pytest.mark.parametrize("size", [1, 2, 3, 64, 4096, pytest.param(131_072, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("options", "p"), [(opt.Sparsemax(), 1), (opt.Entmax15(), 2)], ids=["sparsemax", "entmax15"])
def test_thresholds_are_found_in_the_steps_they_are_given(size: int, dtype: torch.dtype, options: Options, p: int):
    """By halving, of rows that are hard for Newton's method: equal, geometric, of few levels, drawn, and one large
    entry beside many.
    """
    ranks = torch.arange(size, dtype=torch.float64)
    samples = torch.rand(4, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [ranks * 0 + 1, *(base ** (-ranks) for base in (1.001, 1.1, 16)), 1 / (1 + ranks), 1 / (2 + ranks.log1p())]
    rows += [(ranks < size // 2) * 1.0, 1 - 0.9 * (ranks >= size // 3), *samples, *samples**8]
    z = torch.stack(rows)
    z[:, 0] = 1
    z = (z - 1).to(dtype).double()
    low, high = -z.new_ones(len(z), 1), z.new_zeros(len(z), 1)
    for _ in range(60):  # to 2^-60
        middle = (low + high) / 2
        exceeds = (z - middle).relu().pow(p).sum(-1, keepdim=True) >= 1
        low, high = torch.where(exceeds, middle, low), torch.where(exceeds, high, middle)
    thresholds = entmax_threshold(z.to(dtype), p).double()
    assert (thresholds - low).abs().max() <= 64 * torch.finfo(dtype).eps
    normalizer = make_normalizer(options, LayerSpec(1, 1, 1, size))
    weights = normalizer.normalize(
        p * z.to(dtype)[:, None, None], AttentionLayout.full(size).select(slice(size - 1, size), size)
    )
    expected = (z - low).relu().pow(p)[:, None, None]
    assert (weights - expected).abs().sum(-1).max() <= 8 * size**0.5 * torch.finfo(dtype).eps
    assert (weights.sum(-1) - 1).abs().max() <= 8 * size**0.5 * torch.finfo(dtype).eps


# ---------------------------------------------------------------- figures of the source (SSMax)


@pytest.mark.parametrize("options", [opt.ALiBi(), opt.Linear(decay=True), opt.Softmax()], ids=Options.label)
def test_weights_of_equal_tokens_fall_by_the_decay(options: Options):
    normalizer, tokens = random_normalizer(options), torch.ones(1, HEADS, 20, 16, dtype=torch.float64)
    weights = normalizer.weights(tokens, tokens, AttentionLayout.full(20))
    decays = normalizer.log_decay(weights).exp()
    assert (decays.diff() > 0).all() or options.name == "softmax"
    torch.testing.assert_close(weights[0, :, -1, :-1] / weights[0, :, -1, 1:], decays.unsqueeze(1).expand(HEADS, 19))


def row_weights(options: object, logits: Tensor, s: float | None = None) -> Tensor:
    """Weights of one query over n keys whose scaled logits are `logits` (n,), float64."""
    n = len(logits)
    normalizer = make_normalizer(options, LayerSpec(1, 16, WIDTH, TRAIN_LENGTH)).double()
    if s is not None:
        with torch.no_grad():
            normalizer.s.fill_(s)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    layout = AttentionLayout(torch.tensor([n - 1]), torch.arange(n), torch.tensor([n]), mask_is_triangular=False)
    return normalizer.weights(q, logits.double().view(1, 1, n, 1), layout).flatten()


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
    assert row_weights(opt.Softmax(), logits).max().item() == pytest.approx(softmax, abs=6e-6)
    assert row_weights(opt.SSMax(), logits, s=0.43).max().item() == pytest.approx(ssmax, abs=6e-6)


MATCH = {128: 0.25785, 256: 0.21932, 512: 0.19061, 1024: 0.16847, 2048: 0.15090, 4096: 0.13663, 8192: 0.12482}


@pytest.mark.parametrize("length", MATCH)
def test_matching_first_value_keeps_the_mean_logit_scale_at_one(length: int):
    assert length / math.lgamma(length + 1) == pytest.approx(MATCH[length], abs=6e-6)
    normalizer = make_normalizer(opt.SSMax(), LayerSpec(HEADS, 16, WIDTH, length))
    assert normalizer.s.tolist() == pytest.approx([MATCH[length]] * HEADS, abs=6e-6)
    assert normalizer.scale(AttentionLayout.full(length)).mean().item() == pytest.approx(1.0, abs=1e-5)


def at_the_bounds() -> Iterator[Options]:
    """Every option of every normalizer at its least and at its largest value, the others at their defaults."""
    for options in kinds.LAYER_OPTIONS.values():
        for spec in fields(options):
            limits = spec.metadata["limits"]
            bounds = ["fixed:2", "fixed:1000000000"] if spec.name == "n" else [limits.get("ge"), limits.get("le")]
            yield from (options(**{spec.name: bound}) for bound in bounds if bound is not None)


@pytest.mark.parametrize("options", list(at_the_bounds()), ids=Options.label)
def test_options_at_their_bounds_give_finite_outputs_and_gradients(options: Options):
    normalizer = make_normalizer(options, LayerSpec(HEADS, 16, WIDTH, TRAIN_LENGTH))
    leaves = [x.requires_grad_() for x in random_inputs(50, torch.float32, normalizer=normalizer)]
    out = normalizer(*leaves, AttentionLayout.full(50))
    for tensor in contract.named_output_and_gradients(normalizer, out, leaves, torch.ones_like(out)).values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize(
    "override",
    [
        "softmax temperature=0",
        "softmax temperature=warm",
        "ssmax n=fixed:1",
        "ssmax n=fixed:" + 30 * "9",
        "ssmax init=.nan",
        "log_n base=1.0000000000000002",
        "llama4 floor_scale=1e-300",
        "window size=" + 30 * "9",
    ],
)
def test_options_beyond_what_can_be_computed_are_refused(override: str):
    name, option = override.split()
    problem = rf"^model\.normalizer\.{option.partition('=')[0]} = [^\n]*: (must be|unknown row length)[^\n]*$"
    with pytest.raises(ConfigError, match=rf"{problem}|an integer of more than 64 bits"):
        load_normalizer(name, [option])
