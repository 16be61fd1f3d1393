"""Attention under bf16 autocast, as training runs it, against the same in fp64: forward and backward, every entry."""

from functools import cache, partial

import pytest
import torch
from test_normalizers import CASES
from torch import Tensor

from lm.attention import catalogue as opt
from lm.attention.catalogue import make_normalizer
from lm.attention.contract import assert_matches_definition, random_inputs, random_normalizer
from lm.attention.elementwise_sums import TileSums, compute_sums
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.routes import append_bias, attend_by_query_blocks
from lm.config.model_config import ModelConfig, NoPosition, Rope
from lm.model.blocks import Attention, ForwardContext, HeadNorm
from lm.model.rope import rope_rotation

HEADS, SIZE, TRAIN_LENGTH = 2, 64, 256
INPUTS = ("dq", "dk", "dv")
slow = partial(pytest.param, marks=pytest.mark.slow)

# Relative errors may be so many times softmax's; 2 where nothing is said.
LARGER = {
    "ssmax, init 1": (8.0, "logits are ln n times softmax's, and so is what the rounding of q and k does to them"),
    "ssmax without s": (8.0, "as with s = 1"),
    "cosine, log n": (2.5, "its logits grow as ln n, beyond softmax's from the training length, here 256, on"),
    "softmax at temperature 0.3": (
        4.0,
        "logits are 3.3 times softmax's, and so is what the rounding of q and k does to them",
    ),
}
# Entries compared at q and k as RoPE leaves them and the kernel takes them, in bf16: their derivative jumps, or grows
# without bound, where a score is 0, so that in the first rows one score whose sign that rounding changes decides the
# error of all gradients, by chance.
AT_ROUNDED = ("relu", "relu2, sum", "threshold", "threshold, p = 1", "threshold, undivided")


def relative(values: Tensor, exact: Tensor) -> float:
    return float((values.double() - exact).norm() / exact.norm())


def rounded(x: Tensor) -> Tensor:
    """x rounded to bf16, and the gradient of x."""
    return x + (x.bfloat16().to(x.dtype) - x).detach()


def results(
    options: object, length: int, rope: bool, exact: bool, device: str = "cpu", size: int = SIZE
) -> dict[str, Tensor]:
    """The heads' outputs and all gradients, of inputs rounded to bf16; `exact`: in fp64 on the CPU, else under
    autocast.
    """
    device = "cpu" if exact else device
    position = Rope() if rope else NoPosition()
    config = ModelConfig(n_layer=1, n_head=HEADS, n_embd=HEADS * size, position=position, normalizer=options)
    attention = Attention(config, TRAIN_LENGTH, 0)
    if exact and any(options == CASES[name] for name in AT_ROUNDED):
        attention.normalizer.register_forward_pre_hook(
            lambda _, arguments: (*map(rounded, arguments[:2]), *arguments[2:])
        )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.normalizer.parameters():
            if parameter.dim() == 2:
                parameter.zero_()  # what is drawn by the decoder
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if exact:  # by the definition
        attention.normalizer.forward = partial(attend_by_query_blocks, attention.normalizer)
    dtype = torch.float64 if exact else torch.float32
    attention.to(device, dtype)
    q, k, v, grad = (torch.randn(1, HEADS, length, size, generator=generator).bfloat16().to(device) for _ in range(4))
    x = torch.randn(1, length, HEADS * size, generator=generator).bfloat16().to(device)
    layout = AttentionLayout.full(length, device)
    rotation = rope_rotation(layout.positions, size, position) if rope else None
    leaves = [tensor.to(torch.float64 if exact else torch.bfloat16).requires_grad_() for tensor in (q, k, v)]
    x = x.to(dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16, enabled=not exact):
        out = attention.attend(x, *leaves, ForwardContext(layout, rotation, 1.0, None))
    parameters = dict(attention.normalizer.named_parameters())
    grad = grad.transpose(1, 2).flatten(2).to(out.dtype)
    sources = [*leaves, x, *parameters.values()]
    tensors = torch.autograd.grad(out, sources, grad, allow_unused=True, materialize_grads=True)
    tensors = (out.detach(), *tensors)
    return {name: value.cpu() for name, value in zip(("out", *INPUTS, "dx", *parameters), tensors, strict=True)}


Results = dict[str, Tensor] | None


def errors(
    options: object, length: int, rope: bool, device: str = "cpu", size: int = SIZE, exact: Results = None
) -> dict[str, float]:
    """Relative errors of what isn't 0; `exact`: the results in fp64, if they are there."""
    rounded_results = results(options, length, rope, False, device, size)
    exact = exact or results(options, length, rope, True, device, size)
    return {name: relative(rounded_results[name], value) for name, value in exact.items() if value.norm() > 0}


@cache
def softmax_errors(length: int, rope: bool, device: str, size: int) -> dict[str, float]:
    return errors(opt.Softmax(), length, rope, device, size)


def check_errors(
    name: str, length: int, rope: bool, device: str = "cpu", size: int = SIZE, exact: Results = None
) -> None:
    """Errors are at most twice softmax's, or as `LARGER` says."""
    base, factor = softmax_errors(length, rope, device, size), LARGER.get(name, (2.0, ""))[0]
    for label, error in errors(CASES[name], length, rope, device, size, exact).items():
        if label in base:
            assert error <= factor * base[label], label
        else:  # gradients that softmax doesn't have; sums over the tokens, of both signs
            assert error <= 0.05 * factor * max(1, length / 2048), label


SHORT = (64, 64), (64, 48)  # length and head size
PAIRED = ((64, 48, True), (640, 64, True))  # also beyond the 512 tokens of the short route


@pytest.mark.parametrize(
    ("length", "size", "rope"),
    [
        shape if shape in PAIRED else slow(*shape)
        for shape in (
            (*shape, rope)
            for shape in (*SHORT, (640, 64), (1024, 64), (1024, 48), (4096, 64))
            for rope in (False, True)
        )
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_errors_under_autocast_are_at_most_twice_softmaxs(name: str, length: int, size: int, rope: bool):
    """Whether 1 / sqrt(D) is a power of two, so that a scaled q is not rounded, or isn't."""
    check_errors(name, length, rope, size=size)


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (length, size) if length == 640 and size < 64 else slow(length, size)
        for length in (640, 2048, 8192)
        for size in (16, 48, 64)
    ],
)
@pytest.mark.parametrize("name", ["alibi", "forget", "sink", "linear"])
def test_errors_do_not_grow_with_the_bias_of_far_keys(name: str, length: int, size: int):
    check_errors(name, length, rope=False, size=size)


@pytest.mark.parametrize("compiles", [False, slow(True)])
def test_bf16_keys_hold_every_bit_of_their_bias(compiles: bool):
    """Compiled code computes in fp32 what eager code rounds to bf16 between two operations."""
    q, k, _ = (x.bfloat16() for x in random_inputs(100))
    bias = 4096 * torch.randn(2, q.size(1), 100, generator=torch.Generator().manual_seed(0))
    for requires_grad in (False, True):
        append = torch.compile(append_bias) if compiles else append_bias
        long_q, long_k = append(q, k, bias.requires_grad_(requires_grad))
        products, old_products = (a.double() @ b.double().mT for a, b in ((long_q, long_k), (q, k)))
        actual = (products - old_products).detach()
        expected = (bias - bias[..., 50, None]).detach().double().unsqueeze(-2).expand_as(actual)
        torch.testing.assert_close(actual, expected, rtol=2e-7, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [opt.ALiBi(), opt.Forget(), opt.Sink()], ids=lambda options: options.name)
def test_the_bias_of_keys_in_a_long_sequence_has_the_definitions_gradients(options: object, dtype: torch.dtype):
    """Also where parameters are in fp32, and queries, keys and values in fp64; and of tensors whose last dimension lies
    apart in memory, which PyTorch's kernel would misread.
    """
    normalizer = random_normalizer(options, dtype)
    leaves = [x.mT.contiguous().mT for x in random_inputs(600, batch=1, normalizer=normalizer)]
    assert_matches_definition(normalizer, normalizer, leaves, AttentionLayout.full(600), 1e-4)


@pytest.mark.parametrize("options", [opt.ALiBi(), opt.Forget()], ids=lambda options: options.name)
def test_the_bias_of_keys_is_exact_in_every_layout(options: object):
    """One sequence, packed documents with and without a mask, and decoding, in bf16, against the definition."""
    (q, k, v), normalizer = (
        random_inputs(700, batch=1, normalizer=random_normalizer(options)),
        random_normalizer(options, torch.float32),
    )
    steps, state, decoded = ((0, 600), (600, 601), (601, 700)), None, []
    low_q, low_k, low_v = q.float(), k.float(), v.bfloat16()
    for a, b in steps:
        new = slice(a, b)
        output, state = normalizer.decode(
            *(x[:, :, new] for x in (low_q, low_k, low_v)), AttentionLayout.continuation(a, b - a, 700), state
        )
        decoded.append(output)
    documents, whole = AttentionLayout.from_document_lengths([90, 600, 10]), AttentionLayout.full(700)
    for layout, output in (
        (whole, torch.cat(decoded, 2)),
        (whole, normalizer(low_q, low_k, low_v, whole)),
        (documents, normalizer(low_q, low_k, low_v, documents)),
        (documents, normalizer.attend(low_q, low_k, low_v, documents)),
    ):
        assert relative(output, random_normalizer(options).weights(q, k, layout) @ v) < 4e-3


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_errors_do_not_grow_with_the_number_of_blocks_and_tiles(name: str, monkeypatch: pytest.MonkeyPatch):
    """A key's gradient is a sum over blocks of queries: in bf16 it would lose what is small beside what is summed
    already.
    """
    exact = results(CASES[name], 512, rope=False, exact=True, size=48)
    monkeypatch.setattr("lm.attention.routes.MAX_BLOCK_WEIGHTS", HEADS * 512 * 4)
    monkeypatch.setattr("lm.attention.elementwise_sums.TILE_SIZE", 16)
    monkeypatch.setattr("lm.attention.linear.MAX_CHUNK_TOKENS", 16)
    check_errors(name, 512, rope=False, size=48, exact=exact)


@pytest.mark.parametrize("options", [opt.Forget(), opt.ASEntmax()], ids=lambda options: options.name)
def test_features_reach_the_normalizer_unrounded(options: object):
    """Without RoPE queries and keys are in bf16; a sum of gates that were rounded with them is off by tenths after
    2,048 tokens.
    """
    config = ModelConfig(n_layer=1, n_head=HEADS, n_embd=HEADS * SIZE, position=NoPosition(), normalizer=options)
    attention, seen = Attention(config, TRAIN_LENGTH, 0), []
    with torch.no_grad():
        for number, parameter in enumerate(attention.normalizer.parameters()):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    attention.normalizer.register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[:2]))
    x = torch.randn(1, 50, HEADS * SIZE, generator=torch.Generator().manual_seed(9))
    q, k, v = x.bfloat16().unflatten(-1, (HEADS, SIZE)).transpose(1, 2).expand(3, 1, HEADS, 50, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        attention.attend(x, q, k, v, ForwardContext(AttentionLayout.full(50), None, 1.0, None))
    for argument, features in zip(
        seen, (attention.normalizer.query_features(x), attention.normalizer.key_features(x)), strict=True
    ):
        if features is not None:
            assert torch.equal(argument[..., SIZE:], features)


def test_norms_of_queries_and_keys_take_bf16_without_a_warning_and_give_fp32(recwarn: pytest.WarningsRecorder):
    norm = HeadNorm(SIZE, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, HEADS, 5, SIZE).bfloat16()
    torch.set_warn_always(True)  # torch gives this warning once a process
    try:
        with torch.autocast("cpu", torch.bfloat16):
            normed = norm(x)
    finally:
        torch.set_warn_always(False)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert not recwarn.list
    assert normed.dtype == torch.float32
    assert float(((normed.double() - exact) / exact).abs().max()) < 1e-6


@pytest.mark.parametrize("route", ["blocks", "tiles"])
def test_the_backward_pass_recomputes_the_function_of_the_forward_pass(route: str, monkeypatch: pytest.MonkeyPatch):
    """Forward under autocast and backward without it, or the other way round, is the gradient of what either computes
    alone.
    """
    monkeypatch.setattr("lm.attention.elementwise_sums.TILE_SIZE", 16)
    entmax = make_normalizer(opt.Entmax15(), LayerSpec(HEADS, SIZE, HEADS * SIZE, TRAIN_LENGTH))
    tensors = [torch.randn(1, HEADS, 40, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    routes = []
    for forward in (False, True):
        for backward in (False, True):
            q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                out = (
                    entmax(q, k, v, AttentionLayout.full(40))
                    if route == "blocks"
                    else compute_sums(TileSums, "relu2", q, k, v)
                )
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                routes.append((out, *torch.autograd.grad(out, (q, k, v), tensors[3])))
    for other in routes[1:]:
        for a, b in zip(routes[0], other, strict=True):
            assert torch.equal(a, b)
