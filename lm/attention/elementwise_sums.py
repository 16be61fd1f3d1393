"""Elementwise attention, sums of f(q.k / sqrt(D) + b) v: by the Triton kernel where it is supported and works, else by tiles."""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from lm.attention.score_functions import Relu, Relu2, ScoreFunction, Sigmoid
from lm.attention.tiles import tiles

LARGEST_HEAD = 128  # dimensions of a key that the Triton kernel holds
OLDEST_TRITON = (3, 4)


def interpreted() -> bool:
    """True if Triton's kernels are run by its interpreter, on any device: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_tiles(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Why `elementwise_attention` takes tiles instead of the Triton kernel, for keys of `size` dimensions; empty if it takes the kernel."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the Triton kernel has no {dtype}"
    if size > LARGEST_HEAD:
        return f"the Triton kernel has no head size over {LARGEST_HEAD}"
    if device.type != "cuda" and not interpreted():
        return "the Triton kernel needs a CUDA GPU"
    return _unusable(device)


@cache
def _unusable(device: torch.device) -> str:
    """The reason that keeps this machine's Triton, or this device, from running the kernel; empty if nothing."""
    if not find_spec("triton"):
        return "triton is not installed"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:  # 3.2 aborts, compiling for wide values
        return f"the Triton kernel needs triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}, this is {triton.__version__}"
    if interpreted():
        return ""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernel needs a GPU of compute capability 8.0"
    return _trial(device)


def _trial(device: torch.device) -> str:
    """Run the Triton kernel on a device: what goes wrong, which is also a warning; empty if nothing.

    Triton compiles at the first use, for which the machine may lack a C compiler or Python's headers.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            *x, grad = torch.arange(4 * 80 * 16.0, device=device).sin().bfloat16().view(4, 1, 1, 80, 16)
            shift = x[0][..., 0].float()
            cases = product((Relu2(), Relu(), Sigmoid()), (None, shift), (False, True))
            wrong = [f.kind for f, b, over_sum in cases if not _agree(f, x, b, over_sum, grad)]
        if not wrong:
            return ""
        problem = f"its results are not those of the tiles ({', '.join(dict.fromkeys(wrong))})"
    except Exception as error:  # whatever Triton, the compilers it calls or the driver may raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    warnings.warn(f"the Triton kernel does not work on {device}, tiles take its place: {problem}", stacklevel=2)
    return f"the Triton kernel does not work here: {problem}"


def _agree(f: ScoreFunction, x: list[Tensor], shift: Tensor | None, over_sum: bool, grad: Tensor) -> bool:
    """True if the Triton kernel gives what the tiles give, forward and backward, for bf16 `x` (q, k, v)."""
    from lm.attention import triton_kernels

    leaves = [tensor.detach().requires_grad_() for tensor in (*x, *([] if shift is None else [shift]))]
    outs = [route(f, *leaves[:3], *(leaves[3:] or [None]), over_sum) for route in (triton_kernels.elementwise_attention, tiles)]
    fused, expected = ((out, *torch.autograd.grad(out, leaves, grad)) for out in outs)
    return all(bool((a - b).abs().max() <= b.abs().max() / 32) for a, b in zip(fused, expected, strict=True))


@torch.compiler.disable
def elementwise_attention(f: ScoreFunction, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None = None, over_sum: bool = False) -> Tensor:
    """sum_{j <= i} f(q_i.k_j / sqrt(D) + shift_i) v_j, (B, H, T, E) in the dtype of `v`, by the Triton kernel or by tiles (`why_tiles`).

    q, k: (B, H, T, D), v: (B, H, T, E), all of one dtype; shift: fp32, broadcastable to (B, H, T), or None for 0.
    1 / sqrt(D) is a factor on the scores in fp32: a scaled q would be rounded once more, to `q.dtype`. `over_sum`: each row divided by
    its sum of f, which f must keep from being negative.
    """
    if why_tiles(q.device, q.dtype, q.size(-1)):
        return tiles(f, q, k, v, shift, over_sum)
    from lm.attention import triton_kernels

    return triton_kernels.elementwise_attention(f, q, k, v, shift, over_sum)
