"""How much of the device's arithmetic a run uses: model FLOPs utilization (MFU), by two conventions."""

import re
import time
from functools import lru_cache

import torch

from lm.model.counts import flops_per_token
from lm.model.decoder import Decoder

# TFLOP/s of cards in bf16 (tensor cores, dense, sums in fp32) and in fp32, by their makers' data sheets. Lightning's table has others for
# bf16: an A40's and an RTX 4090's are a fourth and half of these, an H200's is for sparse matrices; and it takes an L40 for an L4.
GPUS = {
    "A10": (125, 31.2),
    "A40": (149.7, 37.4),
    "A100": (312, 19.5),
    "A100 PCIE": (312, 19.5),
    "H100": (989.4, 66.9),  # SXM
    "H100 NVL": (835.5, 60),
    "H100 PCIE": (756, 51.2),
    "H200": (989.4, 66.9),  # SXM
    "H200 NVL": (835.5, 60),
    "L4": (121, 30.3),
    "L40": (181, 90.5),
    "L40S": (362, 91.6),
    "RTX A6000": (154.8, 38.7),
    "RTX 3090": (71, 35.6),
    "RTX 4090": (165.2, 82.6),
}
SIZE, SECONDS = 1024, 0.1  # of the matrices that are multiplied to measure a CPU, and how long


def peak_flops(accelerator: str, bf16: bool) -> float | None:
    """FLOPs a second that one device can make in this precision; None if that is not known.

    Of a GPU: its maker's figure. Of a CPU: what a matrix product reaches now, with torch's threads.
    """
    if accelerator == "gpu":
        words = re.split("[ -]", torch.cuda.get_device_name().upper())  # as in NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-40GB
        name = " ".join(word for word in words if not re.fullmatch(r"NVIDIA|GEFORCE|SXM\d|\d+GB|HBM\d\w*", word))
        return GPUS[name][0 if bf16 else 1] * 1e12 if name in GPUS else None
    return _matmul_flops(torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())


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
