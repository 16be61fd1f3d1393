"""How much of the device's arithmetic a run uses: model FLOPs utilization (MFU), by two conventions."""

import time
from functools import lru_cache

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lm.model.counts import flops_per_token
from lm.model.decoder import Decoder

SIZE, SECONDS = 1024, 0.1  # of the matrices that are multiplied to measure a CPU, and how long


def peak_flops(accelerator: str, bf16: bool) -> float | None:
    """FLOPs a second that one device can make in this precision; None if that is not known.

    Of a GPU: its maker's figure, from Lightning's table. Of a CPU: what a matrix product reaches now, with torch's threads.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    if accelerator == "gpu":
        mistaken = "L40" in torch.cuda.get_device_name()  # Lightning takes an L40 for an L4, which has another peak
        return None if mistaken else get_available_flops(torch.device("cuda"), dtype)
    return _matmul_flops(dtype, torch.get_num_threads())


@lru_cache
def _matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """FLOPs a second of the fastest of some matrix products; `threads`: torch's, by which a process remembers it."""
    matrix, times = torch.ones(SIZE, SIZE, dtype=dtype), []
    while sum(times) < SECONDS or len(times) < 2:
        begin = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - begin)
    return 2 * SIZE**3 / min(times)


def mfu(decoder: Decoder, tokens_per_s: float, peak: float | None) -> dict[str, float]:
    """MFU at a speed on devices of `peak` FLOPs a second in all, by the metrics' names; {} if that is not known.

    `mfu/causal` counts what causal attention needs; `mfu/palm` counts all of the T x T scores, as PaLM and nanoGPT do.
    """
    if not peak:
        return {}
    counts = {"mfu/causal": flops_per_token(decoder), "mfu/palm": flops_per_token(decoder, masked=True)}
    return {name: round(flops * tokens_per_s / peak, 4) for name, flops in counts.items()}
