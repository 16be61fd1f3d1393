"""Check lm on a GPU: tests, kernels, speed and memory. It prints one table, and exits with status 1 if anything failed.

bash scripts/gpu_check.sh [--out runs/gpu_check] [--only tests kernels ...]

The figures are also written to gpu_check.json. NANOGPT=path/to/nanoGPT/model.py times nanoGPT's own model beside lm's.
It takes at most nine minutes on an H200 with 16 cores. Without a GPU every part runs at a tiny size on the CPU, to
check the script itself.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
import types
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from bench import attention_step, time_interleaved
from torch.profiler import ProfilerActivity, profile

from lm.attention.catalogue import make_normalizer
from lm.attention.elementwise_sums import why_no_triton
from lm.attention.gpu_kernels import why_unusable
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.query_scale import QueryScale
from lm.config import normalizers as kinds
from lm.config.load import load_config
from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.evaluation.held_out import nll_by_token
from lm.evaluation.measurement import HeldOutSequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.spec import flops_per_token

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# by a part of a kernel's name
FUSED_KERNEL_NAMES = {"flash": "flash", "cudnn": "cudnn", "fmha": "memory-efficient", "cutlass": "memory-efficient"}

# parts of the names of kernels, by kind; the first kind that fits counts
KERNEL_KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "addmm", "bmm", "linear"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "loss": ("log_softmax", "nll", "logsumexp", "cross_entropy"),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
    "compiled code": ("triton",),
    "element by element": ("elementwise", "reduce", "vectorized"),
}
# dense bf16 FLOPs a second, by the makers' data sheets
BF16_PEAKS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA A100-SXM4-80GB": 312e12}
STEP_TOKENS, VOCAB_SIZE = (65536, 50304) if ON_GPU else (64, 100)

ReportLine = tuple[str, str, Literal["ok", "failed", "skipped"]]  # what was checked, the figure, the state


def main() -> int:
    """Run the `CHECKS`, print their lines and write them to gpu_check.json; return 1 if anything failed, else
    0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = (
        torch.cuda.get_device_name()
        if ON_GPU
        else f"{platform.machine()} CPU, tiny sizes: this checks the script, not a GPU"
    )
    print(f"{name}; torch {torch.__version__}, python {platform.python_version()}\n", flush=True)
    facts = {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "parts": {},
    }
    for part in arguments.only:
        start = time.perf_counter()
        try:
            lines = CHECKS[part](arguments.out)
        except Exception as error:  # a part that fails must not hide what the others show
            traceback.print_exc()
            lines = [(part, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", "failed")]
        seconds = time.perf_counter() - start
        facts["parts"][part] = {"seconds": round(seconds, 1), "lines": lines}
        print(f"== {part} ({seconds:.0f} s)")
        for label, figure, state in lines:
            print(f"{label:<44} {figure:<52} {state}", flush=True)
        (arguments.out / "gpu_check.json").write_text(json.dumps(facts, indent=1) + "\n")
    failed = [label for part in facts["parts"].values() for label, _, state in part["lines"] if state == "failed"]
    print(f"\n{len(failed)} failed{': ' + ', '.join(failed) if failed else ''}; {arguments.out / 'gpu_check.json'}")
    return bool(failed)


def run_gpu_tests(output_folder: Path) -> list[ReportLine]:
    """Run `pytest -m gpu`, and return a line for each test."""
    file, processes = output_folder / "tests.xml", min(16, os.cpu_count() or 1)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-n",
        str(processes),
        f"--junitxml={file}",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    file.unlink(missing_ok=True)
    result = subprocess.run(
        [*command, "tests/attention/test_gpu.py"], capture_output=True, text=True, check=False, env=environment
    )
    (output_folder / "tests.txt").write_text(result.stdout + result.stderr)
    if not file.exists():
        last_line = ["no output", *(result.stdout + result.stderr).strip().splitlines()][-1]
        return [("pytest -m gpu", last_line, "failed")]
    states: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = case.get("name").partition("[")[0].removeprefix("test_").replace("_", " ")
        tags = {child.tag for child in case} & {"failure", "error", "skipped"}
        states.setdefault(name, Counter())["skipped" if tags == {"skipped"} else "failed" if tags else "passed"] += 1
    return [
        (
            name,
            ", ".join(f"{count} {state}" for state, count in counts.items()),
            next(
                word
                for word, state in (("failed", "failed"), ("ok", "passed"), ("skipped", "skipped"))
                if counts[state]
            ),
        )
        for name, counts in states.items()
    ]


def sdpa_kernels(output_folder: Path) -> list[ReportLine]:
    """Return which SDPA kernel each query-scaling normalizer runs on, by the kernel names in a profile."""
    lines = []
    heads, length = (12, 1024) if ON_GPU else (2, 64)
    for name, option in kinds.LAYER_OPTIONS.items():
        normalizer = make_normalizer(option(), LayerSpec(heads, 64, 64 * heads, length)).to(DEVICE)
        if not isinstance(normalizer, QueryScale) and name not in ("qassmax", "sink", "softmax1", "window"):
            continue
        q, k, v = (
            torch.randn(4, heads, length, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        layout = AttentionLayout.full(length, DEVICE)
        normalizer(q, k, v, layout).sum().backward()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        with profile(activities=activities) as profiled:
            normalizer(q, k, v, layout).sum().backward()
        names = [event.key for event in profiled.key_averages() if not ON_GPU or event.self_device_time_total > 0]
        kernels_seen = dict.fromkeys(
            label for word, label in FUSED_KERNEL_NAMES.items() for name_seen in names if word in name_seen.lower()
        )
        lines.append(
            (
                f"SDPA's kernel for {name}",
                ", ".join(kernels_seen) or "math",
                "ok" if kernels_seen or not ON_GPU else "failed",
            )
        )
    return lines


def time_kernels(output_folder: Path) -> list[ReportLine]:
    """Time attention alone, forward and backward, of every normalizer, also as a ratio to softmax. Check that the
    Triton kernel of elementwise normalizers and the kernels of other packages can be used.
    """
    arguments = argparse.Namespace(
        bf16=True, n_head=16 if ON_GPU else 2, seq_len=4096 if ON_GPU else 64, device=DEVICE.type
    )
    reason = why_no_triton(DEVICE, torch.bfloat16, 64)
    lines = [("kernel of relu2, relu, sigmoid", reason or "Triton", "ok" if not reason or not ON_GPU else "failed")]
    for name, option in kinds.LAYER_OPTIONS.items():
        normalizer = make_normalizer(option(), LayerSpec(2, 64, 128, 256)).to(DEVICE)
        if package := normalizer.gpu_package:
            layer_input = torch.randn(1, 256, 128, device=DEVICE)
            q, k, v = torch.randn(3, 1, 2, 256, 64, device=DEVICE, dtype=torch.bfloat16)
            q, k = normalizer.append_features(layer_input, q, k)
            reason = why_unusable(normalizer, q, k, v)
            is_wrong = ON_GPU and reason and "not installed" not in reason
            lines.append(
                (f"kernel of {package} for {name}", reason or "passes its check", "failed" if is_wrong else "ok")
            )
    times = time_interleaved(
        {name: attention_step(option(), arguments) for name, option in kinds.LAYER_OPTIONS.items()}, 5 if ON_GPU else 1
    )
    base = float(np.median(times["softmax"]))
    shape = f"1 x {arguments.n_head} heads x {arguments.seq_len:,} x 64"
    return lines + [
        (f"{name}, {shape}", f"{1e3 * np.median(seconds):.2f} ms, {np.median(seconds) / base:.2f} x softmax", "ok")
        for name, seconds in times.items()
    ]


def measure_speed(output_folder: Path) -> list[ReportLine]:
    """Return tokens/s and model FLOP utilisation of training steps at GPT-2's shape with RoPE, 65,536 tokens a step."""
    lines = []
    peak = BF16_PEAKS.get(torch.cuda.get_device_name()) if ON_GPU else None
    for length in (1024, 8192) if ON_GPU else (32,):
        for normalizer, compiled in (("softmax", False), ("softmax", True), ("ssmax", True), ("relu2", False)):
            torch.cuda.empty_cache()
            tokens, flops, seconds, memory = time_training(normalizer, length, compiled and ON_GPU)
            utilisation = f", MFU {flops * tokens / seconds / peak:.1%}" if peak else ""
            name = f"{normalizer}, {length:,}, {'compiled' if compiled else 'eager'}"
            lines.append((name, f"{tokens / seconds:,.0f} tokens/s{utilisation}, {memory / 2**30:.1f} GiB", "ok"))
    return lines


def gpt2_config(normalizer: str) -> ModelConfig:
    """Return the configuration of GPT-2's shape with RoPE; a tiny one without a GPU."""
    shape = [
        "configs/softmax.yaml",
        "configs/models/gpt2-124m.yaml",
        "model.position=rope",
        f"model.normalizer={normalizer}",
    ]
    small = ["model.n_layer=1", "model.n_head=2", "model.n_embd=64"]
    return load_config([*shape, *([] if ON_GPU else small)]).model


class StepCosts(NamedTuple):
    """These are the costs of a training step, and its tokens."""

    tokens: int
    flops_per_token: int
    seconds: float
    peak_bytes: int


def time_training(normalizer: str, length: int, compiled: bool) -> StepCosts:
    """Time training steps (forward, backward, AdamW, bf16); the seconds are the median over steps."""
    decoder = Decoder(gpt2_config(normalizer), VOCAB_SIZE, length).to(DEVICE)
    if compiled:
        decoder.compile_blocks(n_lengths=1)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    step = training_step(decoder, lambda sequences: decoder.summed_loss(Batch.from_sequences(sequences)), length)
    times = time_interleaved({"step": step}, 10 if ON_GPU else 1)["step"]
    peak_bytes = torch.cuda.max_memory_allocated() if ON_GPU else 0
    return StepCosts(STEP_TOKENS, flops_per_token(decoder), float(np.median(times)), peak_bytes)


def training_step(
    module: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], length: int
) -> Callable[[], None]:
    """Return a function that trains on `STEP_TOKENS` random tokens, in micro-batches of up to 16,384.

    loss: function from sequences (B, T + 1) to the summed loss of their tokens.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    sequences = torch.randint(VOCAB_SIZE, (STEP_TOKENS // length, length + 1), device=DEVICE)

    def step() -> None:
        for part in sequences.split(max(1, 16384 // length)):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                value = loss(part)
            (value / STEP_TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.synchronize()

    return step


def profile_step(output_folder: Path) -> list[ReportLine]:
    """Return where a compiled step of GPT-2's shape at 1,024 tokens spends its time, by kind of kernel.

    If NANOGPT names a model.py, nanoGPT's own model is profiled, too.
    """
    length = 1024 if ON_GPU else 32
    decoder = Decoder(gpt2_config("softmax"), VOCAB_SIZE, length).to(DEVICE)
    if ON_GPU:
        decoder.compile_blocks(n_lengths=1)
    step = training_step(decoder, lambda sequences: decoder.summed_loss(Batch.from_sequences(sequences)), length)
    lines, steps = [], {"lm": step}
    if path := os.environ.get("NANOGPT"):
        steps["nanoGPT"] = nanogpt_step(path, length)
    for name, seconds in time_interleaved(steps, 10 if ON_GPU else 1).items():
        lines.append((f"{name}, {length:,} tokens", f"{STEP_TOKENS / np.median(seconds):,.0f} tokens/s", "ok"))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    for name, model_step in steps.items():
        with profile(activities=activities) as profiled:
            start = time.perf_counter()
            model_step()
            wall_ms = 1e3 * (time.perf_counter() - start)
        milliseconds: Counter[str] = Counter()
        for event in profiled.key_averages():
            spent = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
            kind = next(
                (kind for kind, words in KERNEL_KINDS.items() if any(w in event.key.lower() for w in words)), "other"
            )
            milliseconds[kind] += spent / 1e3
        lines += [
            (f"{name}: {kind}", f"{spent:.1f} ms, {spent / wall_ms:.0%} of {wall_ms:.0f} ms", "ok")
            for kind, spent in milliseconds.most_common()
        ]
        lines.append((f"{name}: no kernel runs", f"{wall_ms - milliseconds.total():.1f} ms", "ok"))
        profiled.export_chrome_trace(str(output_folder / f"{name}.json"))
    return lines


def nanogpt_step(path: str, length: int) -> Callable[[], None]:
    """Return a training step of nanoGPT's model of the same shape, compiled whole as its train.py does.

    path: nanoGPT's model.py.
    """
    module = import_from_path(path)
    config = gpt2_config("softmax")
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    gpt = module.GPT(module.GPTConfig(block_size=length, vocab_size=VOCAB_SIZE, dropout=0.0, bias=False, **sizes)).to(
        DEVICE
    )
    compiled = torch.compile(gpt) if ON_GPU else gpt

    def loss(sequences: torch.Tensor) -> torch.Tensor:
        tokens, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        return compiled(tokens, targets)[1] * targets.numel()

    return training_step(gpt, loss, length)


def import_from_path(path: str) -> types.ModuleType:
    """Return the module that the file at `path` defines."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def measure_long_evaluation(output_folder: Path) -> list[ReportLine]:
    """Measure the loss by position of one sequence of 131,072 tokens, at GPT-2's shape with RoPE: seconds and peak
    memory.
    """
    length, vocab, lines = (131072, 50304, []) if ON_GPU else (256, 100, [])
    for normalizer in ("softmax", "ssmax", "relu2"):
        decoder = Decoder(gpt2_config(normalizer), vocab, 1024).to(DEVICE)
        tokens = np.random.default_rng(0).integers(vocab, size=(1, length + 1))
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        nll = nll_by_token(decoder, HeldOutSequences(tokens, np.ones(vocab, np.float32)), Device(DEVICE, True))
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before if ON_GPU else 0
        state = "ok" if np.isfinite(nll).all() else "failed"
        lines.append(
            (
                f"evaluation of {length:,} tokens, {normalizer}",
                f"{seconds:.1f} s, peak memory +{peak / 2**30:.2f} GiB",
                state,
            )
        )
    return lines


CHECKS: dict[str, Callable[[Path], list[ReportLine]]] = {
    "tests": run_gpu_tests,
    "backends": sdpa_kernels,
    "kernels": time_kernels,
    "speed": measure_speed,
    "where": profile_step,
    "long": measure_long_evaluation,
}

if __name__ == "__main__":
    sys.exit(main())
