"""Time alternatives side by side, interleaved in one run, so that a noisy machine slows all of them alike.

python scripts/bench.py kernels                 attention alone, forward and backward: time of each normalizer's kernel
                                                as a ratio to softmax's fused kernel; for some normalizers also time of
                                                their definition, with a full matrix of weights (dense)
python scripts/bench.py memory                  peak memory of the same at 16,384 tokens, each in its own process
python scripts/bench.py long                    loss by position of one sequence of 131,072 tokens: seconds, and
                                                memory beyond the model's
"""

import argparse
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from lm.attention import cpu_kernel
from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.config import normalizers as kinds
from lm.config.model_config import ModelConfig
from lm.evaluation.held_out import nll_by_token
from lm.evaluation.measurement import HeldOutSequences
from lm.machine import peak_process_bytes
from lm.model.decoder import Decoder
from lm.model.device import Device

StepFunction = Callable[[], None]
DENSE_NORMALIZERS = ("softmax", "relu2", "sigmoid")


def time_interleaved(
    alternatives: dict[str, StepFunction], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time each alternative's step `rounds` times, in a new random order each round, and return seconds by name.

    Three steps of each alternative are made first and not timed. clock: a function that returns seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for step in alternatives.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name in random.sample(list(alternatives), len(alternatives)):
            start = clock()
            alternatives[name]()
            times[name].append(clock() - start)
    return times


def print_ratios(times: dict[str, list[float]], base_name: str, tokens: int) -> None:
    """Print each alternative's median step time, its tokens/s, and its ratio to `base_name`.

    The ratio is the median over rounds, with a 95 % bootstrap interval. tokens: number of tokens of a step.
    """
    print(
        f"{'':<24} {'ms a step':>10} {'tokens/s':>10} {'ratio to ' + base_name:>22}   95 % interval of the median ratio"
    )
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[base_name], strict=True)]
        medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
        median = statistics.median(seconds)
        print(
            f"{name:<24} {median * 1e3:>10.1f} {tokens / median:>10,.0f} {statistics.median(ratios):>22.3f}"
            f"   {medians[50]:.3f} - {medians[1949]:.3f}"
        )


def model_config(arguments: argparse.Namespace, **changes: object) -> ModelConfig:
    """Return the configuration of the benchmarked model, with `changes` to it."""
    return ModelConfig(n_layer=arguments.n_layer, n_head=arguments.n_head, n_embd=arguments.n_embd, **changes)


def attention_step(options: object, arguments: argparse.Namespace, dense: bool = False) -> StepFunction:
    """Return a function that makes a forward and a backward pass of one attention call, (1, heads, seq_len, 64).

    options: options of the normalizer. dense: whether weights are computed as a full matrix by the normalizer's
    definition, not by its fastest kernel.
    """
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    shape = 1, arguments.n_head, arguments.seq_len, 64
    q, k, v = (torch.randn(shape, device=arguments.device).to(dtype) for _ in range(3))
    normalizer = make_normalizer(options, LayerSpec(arguments.n_head, 64, 64, arguments.seq_len)).to(arguments.device)
    layout = AttentionLayout.full(arguments.seq_len, arguments.device)
    grad = torch.randn(shape, device=arguments.device).to(dtype)
    x = torch.randn(1, arguments.seq_len, 64, device=arguments.device)
    for_q, for_k = normalizer.query_features(x), normalizer.key_features(x)
    q = q if for_q is None else torch.cat((q, for_q.detach().to(dtype)), -1)
    k = k if for_k is None else torch.cat((k, for_k.detach().to(dtype)), -1)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def step() -> None:
        out = normalizer.weights(q, k, layout).to(v.dtype) @ v if dense else normalizer(q, k, v, layout)
        out.backward(grad)
        q.grad = k.grad = v.grad = None
        if q.is_cuda:
            torch.cuda.synchronize()

    return step


def kernel_steps(arguments: argparse.Namespace) -> dict[str, StepFunction]:
    """Return an attention call by each normalizer's fastest kernel, and for some normalizers a call by the definition,
    with a full matrix of weights (dense).
    """
    alternatives = {name: attention_step(option(), arguments) for name, option in kinds.LAYER_OPTIONS.items()}
    dense = {
        f"{name}, dense": attention_step(kinds.LAYER_OPTIONS[name](), arguments, dense=True)
        for name in DENSE_NORMALIZERS
    }
    return alternatives | dense


def print_memory(arguments: argparse.Namespace) -> None:
    """Print the peak resident memory that one forward and backward pass adds, each alternative in a new process."""
    alternatives = [(name, False) for name in kinds.LAYER_OPTIONS] + [(name, True) for name in DENSE_NORMALIZERS]
    print(f"peak memory added by one forward and backward, {arguments.n_head} heads, {arguments.seq_len:,} tokens, MiB")
    for name, dense in alternatives:
        command = [sys.executable, __file__, "memory-of", name + (":dense" if dense else "")]
        options = [
            "--seq-len",
            str(arguments.seq_len),
            "--n-head",
            str(arguments.n_head),
            *([] if arguments.bf16 else ["--fp32"]),
        ]
        result = subprocess.run([*command, *options], capture_output=True, text=True)
        figure = result.stdout.strip() or result.stderr.strip().splitlines()[-1]
        print(f"{name + (', dense' if dense else ''):<24} {figure:>10}", flush=True)


def print_peak_memory_of_call(arguments: argparse.Namespace) -> None:
    """Print the peak of resident memory above what was there before one attention call, in MiB. It needs a
    new process.
    """
    name, _, dense = arguments.path.partition(":")
    step = attention_step(kinds.LAYER_OPTIONS[name](), arguments, dense=bool(dense))
    before = peak_process_bytes()
    step()
    print(f"{(peak_process_bytes() - before) / 2**20:,.0f}")


def measure_long_evaluation(arguments: argparse.Namespace) -> None:
    """Print the seconds and the peak memory, beyond model and sequence, of the loss by position of one long
    sequence.
    """
    if arguments.fused:
        cpu_kernel.why_unusable = lambda v: "PyTorch's is measured"
    device = Device(torch.device(arguments.device), arguments.bf16)
    decoder = Decoder(
        model_config(arguments, normalizer=kinds.LAYER_OPTIONS[arguments.normalizer]()), arguments.vocab_size, 1024
    ).to(device.device)
    tokens = np.random.default_rng(0).integers(arguments.vocab_size, size=(1, arguments.seq_len + 1))
    held_out = HeldOutSequences(tokens, np.ones(arguments.vocab_size, np.float32))
    on_gpu = device.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else peak_process_bytes()
    start = time.perf_counter()
    nll_by_token(decoder, held_out, device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_process_bytes()
    print(
        f"{arguments.normalizer}, {arguments.seq_len:,} tokens, "
        f"{sum(p.numel() for p in decoder.parameters()) / 1e6:.1f} M parameters, "
        f"{device.precision}, {torch.get_num_threads()} threads: {seconds:.1f} s, peak memory "
        f"+{(peak - before) / 2**20:,.0f} MiB"
    )


DEFAULT_LENGTHS = {"kernels": 2048, "memory": 16384, "memory-of": 16384, "long": 131072}


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "memory", "memory-of", "long"])
    parser.add_argument("path", nargs="?", help=argparse.SUPPRESS)  # of memory-of: what is measured
    parser.add_argument("--n-layer", type=int, default=6)
    parser.add_argument("--n-head", type=int, default=6)
    parser.add_argument("--n-embd", type=int, default=384)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, help="default: of kernels 2,048, of memory 16,384, of long 131,072")
    parser.add_argument("--normalizer", default="softmax", choices=list(kinds.LAYER_OPTIONS), help="of `long`")
    parser.add_argument("--fused", action="store_true", help="PyTorch's attention on a CPU, too, of `long`")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", help="these sides, beside the one that they are compared with")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, which other processes disturb less")
    parser.add_argument("--fp32", dest="bf16", action="store_false", help="fp32 instead of bf16 autocast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    arguments.seq_len = arguments.seq_len or DEFAULT_LENGTHS[arguments.what]
    functions = {"memory": print_memory, "memory-of": print_peak_memory_of_call, "long": measure_long_evaluation}
    if arguments.what in functions:
        return functions[arguments.what](arguments)
    torch.manual_seed(0)
    random.seed(0)
    alternatives = kernel_steps(arguments)
    name = (
        torch.cuda.get_device_name()
        if "cuda" in arguments.device
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    print(f"{name}, torch {torch.__version__}, {vars(arguments)}")
    if arguments.only:
        alternatives = {name: alternatives[name] for name in ("softmax", *arguments.only)}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    print_ratios(time_interleaved(alternatives, arguments.rounds, clock), "softmax", arguments.seq_len)


if __name__ == "__main__":
    main()
