"""Describe a run by derived quantities, in the banner that it prints first and in environment.json."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

import lm
from lm.attention.normalizer import Normalizer
from lm.config.tree import Config
from lm.data.store import Store
from lm.machine import command_line
from lm.model.device import Machine
from lm.model.spec import count_parameters, flops_per_token
from lm.plain import Plain
from lm.plugins import PLUGINS
from lm.training.phase_start import PhaseStart


def banner(config: Config, store: Store, start: PhaseStart, machine: Machine) -> str:
    """Return the text that a run prints first: model, data, compute and optimizer. config.yaml has all settings."""
    model, optim, steps, decoder = config.model, config.optim, config.trainer.max_steps, start.decoder
    parameters, flops, tokens = count_parameters(decoder), flops_per_token(decoder), steps * optim.batch_tokens
    token_ratio = tokens / (parameters["total"] - parameters["normalizer"])  # as `trainer.tokens_per_parameter`
    epochs = tokens * config.data.text_weight / store.train.n_tokens
    phases, phase_config = zip(config.phases, config.phase_ends, strict=False), config.with_phase_seq_len(start.phase)
    lines = {
        "run": f"{config.run_folder}  (lm {lm.__version__})",
        "model": f"{parameters['total']:,} parameters, {parameters['non_embedding']:,} without embedding and head, "
        f"{parameters['normalizer']:,} in normalizers",
        "": f"{model.n_layer} layers x {model.n_head} heads x {model.key_dims}, width {model.n_embd}, "
        f"{model.block.label(model)}, {model.position.label}, vocabulary {decoder.vocab_size:,}",
        "normalizer": "  |  ".join(dict.fromkeys(map(_normalizer_text, decoder.normalizers()))),
        "kernel": "; ".join(dict.fromkeys(normalizer.kernel for normalizer in decoder.normalizers())),
        "phases": ", then ".join(f"{phase.label} to step {end:,}" for phase, end in phases),
        "data": f"{store.path}: {store.train.n_tokens:,} training tokens, {store.val.n_tokens:,} held out, "
        f"fingerprint {store.fingerprint[:16]}",
        "tokens": f"{steps:,} steps x {optim.batch_tokens:,} = {tokens:,}, {token_ratio:.3g} a parameter"
        + ("" if config.data.symbolic else f" ({epochs:.2f} epochs)"),
        "device": f"{config.world_size} x {machine.device_name}, precision {machine.precision}, compile "
        f"{machine.compilation}, micro-batches of {phase_config.micro_batch * phase_config.data.seq_len:,} tokens",
        "compute": f"{flops / 1e6:,.1f} MFLOP a token, {flops * tokens:.2e} FLOP in all",
        "optimizer": f"{optim.optimizer.name}, lr {optim.lr:g}, {optim.schedule.name}, warm-up of "
        f"{optim.n_warmup_steps(steps)} steps",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _normalizer_text(normalizer: Normalizer) -> str:
    """Return a text with the formula and options of a normalizer."""
    options, length = normalizer.options, normalizer.layer.train_length
    values = {name: f"train ({length})" if value == "train" else value for name, value in vars(options).items()}
    return f"{options.name}: {options.formula()}" + "".join(f"; {name} = {values[name]}" for name in values)


def environment_facts(
    config: Config, store: Store, start: PhaseStart, machine: Machine, earlier_facts: dict[str, Plain]
) -> dict[str, Plain]:
    """Return the content of environment.json: facts on which results depend, other than the configuration. This start's
    settings are appended to `starts`.

    earlier_facts: environment.json of a resumed run, else facts on the initial weights.
    """
    commit, dirty = git_state()
    packages = ("torch", "lightning", "datasets", "tokenizers", "wandb", "numpy")
    facts = {
        "lm": lm.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages}
        | PLUGINS.source_ids(config.normalizer_names),
        "device": machine.device_name,
        "precision": machine.precision.value,
        "compile": machine.compiles,
        "threads": torch.get_num_threads(),
        "world_size": config.world_size,
        "max_steps": config.trainer.max_steps,
        "command": command_line(),
    }
    return {
        **facts,
        "data_fingerprint": store.fingerprint,
        "symbolic": config.data.symbolic,
        "data": {"store": str(store.path), "train_tokens": store.train.n_tokens},
        "parameters": count_parameters(start.decoder),
        "flops_per_token": flops_per_token(start.decoder),
        "wandb_id": earlier_facts.get("wandb_id") or os.urandom(6).hex(),
        "starts": [
            *earlier_facts.get("starts", []),
            {"step": start.step, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts},
        ],
        "started_from": earlier_facts.get("started_from"),
        "branched_from": earlier_facts.get("branched_from"),
    }


def git_state() -> tuple[str | None, bool | None]:
    """Return the git commit of the checkout from which this package runs, and whether tracked files have uncommitted
    changes.

    If git doesn't track this package, the commit is LM_COMMIT, which a Docker image sets, or None; and the second value
    is None.
    """

    def git(*arguments: str) -> str:
        # git must not lock the user's index
        command = ["git", "--no-optional-locks", "-C", str(Path(lm.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("LM_COMMIT") or None, None
