"""This module resolves a run's device, precision and compilation. For measurements it sums over processes and sets
evaluation mode.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from lm.attention.kernels import compiled_code_folder, cpp_compiler, cpu_instruction_sets
from lm.config.tree import Config
from lm.errors import ConfigError, Problem, RunError
from lm.machine import peak_process_bytes
from lm.plain import Plain

# FLOPs above which torch.compile saves more time than it takes (docs/speed.md). MIN_ALL_RUNS_FLOPS_TO_COMPILE is for
# all runs together that share its code, MIN_RUN_FLOPS_TO_COMPILE for each of these runs, which must load that code.
MIN_ALL_RUNS_FLOPS_TO_COMPILE = {"cpu": 1e14, "gpu": 2e16}
MIN_RUN_FLOPS_TO_COMPILE = {"cpu": 3e13, "gpu": 4e15}
# Compiling takes 20 s, loading 4 s, and compiled code saves about a twentieth of the time.


@dataclass(frozen=True)
class ResolvedSetting:
    """A resolved setting is the value of a key that may have been `auto`, and the reason for it.

    The reason is printed; it is empty for a value that the configuration gives.
    """

    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})" if self.reason else self.value


@dataclass(frozen=True)
class Machine:
    """A machine describes the device, precision and compilation of a run."""

    accelerator: str  # Lightning's name of the device, `cpu` or `gpu`
    device_name: str  # the device in words
    precision: ResolvedSetting
    compilation: ResolvedSetting  # whether the model is compiled
    launcher: str = "lightning"  # the program that started the processes

    @property
    def uses_bf16(self) -> bool:
        """True if the precision is bf16-mixed, false if it is 32."""
        return self.precision.value != "32"

    @property
    def compiles(self) -> bool:
        """True if torch.compile compiles the model."""
        return self.compilation.value == "true"


def visible_gpu_ids() -> tuple[str, ...]:
    """Return the ids, as in CUDA_VISIBLE_DEVICES, of the GPUs that child processes may use. CUDA is not initialised in
    this process.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(n_gpus)))).split(",")
    return tuple(gpu_id.strip() for gpu_id in ids[:n_gpus])


def count_gpus(config: Config) -> int:
    """Return the number of GPUs that a run takes, 0 on the CPU. Raises ConfigError: the machine lacks the GPUs that the
    configuration asks for.
    """
    accelerator, devices = config.trainer.accelerator, config.trainer.devices
    n_gpus = torch.cuda.device_count() if accelerator != "cpu" and torch.cuda.is_available() else 0
    if accelerator == "gpu" and not n_gpus:
        remedy = "set trainer.accelerator=cpu"
        raise ConfigError([Problem("trainer.accelerator", "gpu", "no CUDA GPU is visible", remedy)])
    cores = os.cpu_count() or 1  # cores of the machine: SLURM may bind each process to a few
    maximum = n_gpus or max(cores, 2)  # two processes on one core try DDP out
    if devices > maximum:
        reason = f"on a CPU each device is a process, and this machine has {cores} core{'s' * (cores > 1)}"
        reason = f"this process sees {n_gpus} GPU{'s' * (n_gpus > 1)}" if n_gpus else reason
        raise ConfigError([Problem("trainer.devices", devices, reason, f"set it to at most {maximum}")])
    return devices if n_gpus else 0


def resolve_device(config: Config) -> tuple[str, str]:
    """Return `cpu` or `gpu`, and the device's name. Raises ConfigError: the machine lacks a device that the
    configuration asks for.
    """
    return ("gpu", torch.cuda.get_device_name(0)) if count_gpus(config) else ("cpu", "cpu")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far, in bytes: memory of tensors on a GPU, or of the whole process on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_process_bytes()


def resolve_precision(config: Config, accelerator: str, recorded_environment: dict[str, Plain]) -> ResolvedSetting:
    """Resolve `trainer.precision` to `32` or `bf16-mixed`. `auto` keeps an earlier precision, else takes bf16 if the
    device has it.

    recorded_environment: the environment.json of the run that is resumed or evaluated; empty for a new run.
    """
    if config.trainer.precision != "auto":
        return ResolvedSetting(str(config.trainer.precision), "")
    if "precision" in recorded_environment:
        return ResolvedSetting(recorded_environment["precision"], "as the run was started")
    hardware = describe_bf16_hardware(accelerator)
    return (
        ResolvedSetting("bf16-mixed", f"auto: {hardware}")
        if hardware
        else ResolvedSetting("32", "auto: no native bf16 here")
    )


@cache
def describe_bf16_hardware(accelerator: str) -> str:
    """Describe this machine's hardware that computes in bf16; empty if it has none (emulation is slower than fp32)."""
    if accelerator == "gpu":
        return "the GPU has bf16" if torch.cuda.get_device_capability()[0] >= 8 else ""
    instructions = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in cpu_instruction_sets()]
    return f"the CPU has {instructions[0]}" if instructions else ""


def resolve_compile(
    config: Config,
    flops: float,
    accelerator: str,
    recorded_environment: dict[str, Plain],
    n_runs: int = 1,
) -> ResolvedSetting:
    """Resolve `trainer.compile` to `true` or `false`. `auto` keeps a resumed run's choice, else compiles if possible
    and if it saves time.

    On a CPU, `auto` compiles no run that trains on synthetic tasks alone, without text. Uncompiled steps are then
    faster: in the last layer they skip the tokens before the first target (`Decoder.loss`).

    Args:
        flops: the FLOPs of the whole run.
        recorded_environment: the environment.json of the resumed run; empty for a new run.
        n_runs: the number of runs that share the compiled code, which the first of them makes.
    """
    setting, reason = config.trainer.compile, ""
    compiler = cpp_compiler()
    if setting == "auto" and "compile" in recorded_environment:
        setting, reason = recorded_environment["compile"], "as the run was started"
    if setting is True and not compiler:
        problem = Problem(
            "trainer.compile", True, "no C++ compiler found", "install g++ or clang++, or set trainer.compile=false"
        )
        raise ConfigError([problem])
    if setting != "auto":
        return ResolvedSetting(str(setting).lower(), reason)
    if not compiler:
        return ResolvedSetting("false", "auto: no C++ compiler found")
    if accelerator == "cpu" and not config.data.text_weight:
        return ResolvedSetting("false", "auto: steps on tasks alone compute less eager")
    run_threshold, total_threshold = MIN_RUN_FLOPS_TO_COMPILE[accelerator], MIN_ALL_RUNS_FLOPS_TO_COMPILE[accelerator]
    saves_time = flops * n_runs >= total_threshold and flops >= run_threshold
    thresholds = f"{run_threshold:.0e} a run and {total_threshold:.0e} in all"
    reason = f"auto: {flops:.1e} FLOP a run, runs: {n_runs}; it pays from {thresholds}"
    return ResolvedSetting(str(saves_time).lower(), reason)


def use_compile_cache() -> None:
    """Cache the code that torch.compile makes in `compiled_code_folder`, unless TORCHINDUCTOR_CACHE_DIR names a folder.

    If `compiled_code_folder` can't be written, torch's default folder stays. Several processes can safely use the cache
    at once.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes a second to import

    # torch sets its default, too, as it is imported
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") not in (None, default_cache_dir()):
        return
    if folder := compiled_code_folder():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Device:
    """A device says where and how a process measures a model: torch device, bf16 autocast, and its rank among all
    processes.
    """

    device: torch.device
    bf16: bool
    rank: int = 0
    world_size: int = 1
    progress_label: str = ""  # of the progress bar of measurements; empty: none is shown

    @property
    def precision(self) -> str:
        """Name of the precision, as results record it."""
        return "bf16-mixed" if self.bf16 else "32"

    def autocast(self) -> torch.autocast:
        """Return a context of autocast to bf16, which does nothing if the precision is 32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def all_reduce_sum(device: Device, compute: Callable[[], Tensor]) -> Tensor:
    """Return the sum over ranks of the tensors that `compute` returns, on the CPU. All ranks must call this function.

    If `compute` fails on a rank, this rank raises its error, and the other ranks raise RunError.
    """
    if device.world_size == 1:
        return compute().cpu()
    failure, values = None, torch.empty(0)
    try:
        values = compute()
    except Exception as error:  # the other ranks must learn of any error
        failure = error
    has_failed = torch.tensor(float(failure is not None), device=device.device)
    torch.distributed.all_reduce(has_failed, torch.distributed.ReduceOp.MAX)
    if has_failed:
        raise failure or RunError("failed on another process")
    total = values.to(device.device)
    torch.distributed.all_reduce(total)
    return total.cpu()


def preserved_random_state() -> AbstractContextManager:
    """Return a context that restores torch's random state when it ends, on the CPU and on the GPU that this process
    uses.
    """
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Return a context with `models` in evaluation mode and without gradients. When it ends, it restores the modes and
    torch's random state.
    """
    in_training = [module for model in models for module in model.modules() if module.training]
    try:
        with preserved_random_state(), torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for module in in_training:
            module.training = True
