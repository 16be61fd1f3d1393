"""Kernels for CUDA GPUs that others maintain: what can be shown without one. On one: scripts/gpu_check.sh."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import mark_others_slow
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lm.attention import catalogue as opt
from lm.attention import gpu_kernels
from lm.attention.catalogue import NORMALIZER_BY_OPTIONS
from lm.attention.contract import HEADS, TRAIN_LENGTH, WIDTH, random_inputs, random_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.sparse import Entmax15Normalizer

FLEX = [
    {opt.Window: opt.Window(size=20), opt.SoftCap: opt.SoftCap(cap=0.7)}.get(options, options())
    for options, normalizer in NORMALIZER_BY_OPTIONS.items()
    if normalizer.gpu_package == gpu_kernels.FLEX
]


@pytest.mark.parametrize(
    "name", mark_others_slow([options.name for options in FLEX], ["ssmax", "window", "alibi", "softcap"])
)
def test_flex_attention_computes_the_definition(name: str, monkeypatch: pytest.MonkeyPatch):
    """Not compiled, in the forward pass, which is what a CPU has; packed documents begin elsewhere in each sequence."""

    def make_mask(*arguments: object, _compile: bool) -> object:
        return create_block_mask(*arguments)

    monkeypatch.setattr(gpu_kernels, "_flex_functions", lambda: (flex_attention, make_mask))
    normalizer = random_normalizer(next(options for options in FLEX if options.name == name))
    q, k, v = random_inputs(96, normalizer=normalizer)
    starts = [torch.cat([torch.arange(n) for n in sizes]) for sizes in ([30, 66], [96])]
    for layout in (AttentionLayout.full(96), AttentionLayout.from_positions(torch.stack(starts))):
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            output = normalizer.gpu_forward(q, k, v, layout)
        torch.testing.assert_close(output, normalizer.weights(q, k, layout) @ v, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [opt.Entmax15(), opt.Sparsemax(), opt.ASEntmax()], ids=lambda options: options.name)
def test_sizes_that_adasplash_lacks_are_padded(options: object, monkeypatch: pytest.MonkeyPatch):
    """It takes heads of 16, 32, 64 ... dimensions, keys as wide as values, and powers of 2 as lengths."""

    def adasplash(q: Tensor, k: Tensor, v: Tensor, alpha: float, is_causal: bool) -> Tensor:
        assert is_causal
        assert q.shape == k.shape == v.shape
        assert q.shape[2:] == (128, 64)
        entry = {1.5: opt.Entmax15, 2.0: opt.Sparsemax}[alpha]()
        normalizer = opt.make_normalizer(entry, LayerSpec(HEADS, 64, WIDTH, TRAIN_LENGTH))
        return normalizer.weights(q, k, AttentionLayout.full(128)) @ v

    monkeypatch.setattr(gpu_kernels, "import_module", lambda name: SimpleNamespace(adasplash=adasplash))
    normalizer = random_normalizer(options, head_size=40)
    q, k, v = random_inputs(100, head_size=40, normalizer=normalizer)
    expected = normalizer.weights(q, k, AttentionLayout.full(100)) @ v
    torch.testing.assert_close(normalizer.gpu_forward(q, k, v, AttentionLayout.full(100)), expected, rtol=0, atol=1e-9)


class Right(Entmax15Normalizer):
    gpu_package = "torch"

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return self.weights(q, k, layout).to(v.dtype) @ v


class Other(Right):
    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().gpu_forward(q * 1.5, k, v, layout)


class OtherGradient(Right):
    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().gpu_forward(q, k, 2 * v - v.detach(), layout)


class Fails(Right):
    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        raise RuntimeError("no image for this device")


class Lacking(Right):
    gpu_package = "a_package_that_nobody_has"


@pytest.mark.parametrize(
    ("kind", "reason", "warns"),
    [
        (Right, "", False),
        (Other, "its results differ: output, dq, dk, dv", True),
        (OtherGradient, "its results differ: dv", True),
        (Fails, "RuntimeError: no image for this device", True),
        (Lacking, "a_package_that_nobody_has is not installed", False),
    ],
)
def test_a_kernel_that_fails_or_differs_at_its_first_use_is_not_taken(
    kind: type, reason: str, warns: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_kernels, "_KERNEL_PROBLEMS", {})
    normalizer = kind(opt.Entmax15(), LayerSpec(2, 16, WIDTH, TRAIN_LENGTH))
    call = normalizer, *torch.zeros(3, 1, 2, 20, 16, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        assert [gpu_kernels.why_unusable(*call) for _ in range(2)] == [reason] * 2
    assert [reason in str(warning.message) for warning in caught] == [True] * warns
