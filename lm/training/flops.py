"""FLOPs a second, of a device and of a run."""

import re
import time
from functools import lru_cache

import torch

from lm.model.decoder import Decoder
from lm.model.spec import flops_per_token

# TFLOP/s of GPUs in bf16 (tensor cores, dense, fp32 accumulation) and in fp32, by their makers' data sheets.
# Lightning's table differs in bf16: an A40 has a fourth of its figure, an RTX 4090 half, an H200 the figure for sparse
# matrices. It also takes an L40 for an L4.
GPU_TFLOPS = {
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
MAX_MATRIX_ROWS, MEASURING_SECONDS = 1024, 0.1  # for the FLOPs of a CPU: most rows of the square matrices, time limit


def peak_flops(accelerator: str, bf16: bool) -> float | None:
    """Peak FLOPs a second of one device in bf16 or fp32; None if it is not known.

    The peak of a GPU comes from the maker's data sheet; the peak of a CPU is measured by timing matrix products with
    torch's threads.
    """
    if accelerator == "gpu":
        # as in NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-40GB
        name_words = re.split("[ -]", torch.cuda.get_device_name().upper())
        name = " ".join(word for word in name_words if not re.fullmatch(r"NVIDIA|GEFORCE|SXM\d|\d+GB|HBM\d\w*", word))
        return GPU_TFLOPS[name][0 if bf16 else 1] * 1e12 if name in GPU_TFLOPS else None
    return _matmul_flops(torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())


@lru_cache
def _matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """Highest FLOPs a second over matrix products timed on the CPU; `threads` (torch's number) is only part of the
    cache key.

    Matrices grow only while time remains, as a CPU that emulates bf16 takes seconds for one product of
    `MAX_MATRIX_ROWS` rows.
    """
    n_rows, best_flops_per_s, end = MAX_MATRIX_ROWS // 8, 0.0, time.perf_counter() + MEASURING_SECONDS
    while (begin := time.perf_counter()) < end:
        matrix = torch.ones(n_rows, n_rows, dtype=dtype)
        start = time.perf_counter()
        matrix @ matrix
        seconds = time.perf_counter() - start
        best_flops_per_s = max(best_flops_per_s, 2 * n_rows**3 / seconds)
        n_rows = min(MAX_MATRIX_ROWS, 2 * n_rows) if 8 * seconds < end - begin else n_rows
    return best_flops_per_s


def mfu(decoder: Decoder, length: int, tokens_per_s: float, peak: float | None) -> dict[str, float]:
    """Model FLOPs utilization (MFU) on sequences of `length` tokens, by metric name.

    The result is {} if `peak`, the peak FLOPs a second of all devices together, is not known.
    `mfu/causal` counts the scores that causal attention needs; `mfu/palm` counts scores of all pairs of tokens, as PaLM
    and nanoGPT do.
    """
    if not peak:
        return {}
    counts = {"mfu/causal": flops_per_token(decoder, length), "mfu/palm": flops_per_token(decoder, length, True)}
    return {name: round(flops * tokens_per_s / peak, 4) for name, flops in counts.items()}
