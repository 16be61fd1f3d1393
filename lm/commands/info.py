"""Collects facts about this installation: versions, devices, kernels and the mode of wandb."""

import platform
from importlib import metadata
from pathlib import Path

import torch

import lm
from lm.attention.kernels import cpp_compiler
from lm.config.training_config import LogConfig
from lm.machine import usable_cores
from lm.model.device import native_bf16_hardware
from lm.plain import Plain
from lm.training.banner import git_state
from lm.training.wandb_runs import wandb_mode

PACKAGES = (
    "torch",
    "lightning",
    "datasets",
    "tokenizers",
    "wandb",
    "omegaconf",
    "numpy",
    "pandas",
    "transformers",
    "triton",
)


def installation_facts() -> dict[str, Plain]:
    """Return the facts that `lm info` prints, by heading: lm (version, commit, folder), versions, devices, kernels,
    wandb.
    """
    (commit, dirty), compiler = git_state(), cpp_compiler()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    bf16 = native_bf16_hardware("gpu" if gpus else "cpu") or "emulated"
    return {
        "lm": {"version": lm.__version__, "commit": commit, "changed": dirty, "folder": str(Path(lm.__file__).parent)},
        "versions": {"python": platform.python_version(), "platform": platform.platform()}
        | {name: _version(name) for name in PACKAGES},
        "devices": {"cores": usable_cores(), "GPUs": gpus, "CUDA of torch": torch.version.cuda, "bf16": bf16},
        "kernels": {"torch.compile": f"yes, with {compiler}" if compiler else "no: neither g++ nor clang++"},
        "wandb": wandb_mode(LogConfig()),
    }


def _version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
