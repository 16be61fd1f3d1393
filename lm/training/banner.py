"""What a run is, in derived quantities: the start-up banner and environment.json."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import lm
from lm.attention.plugins import PLUGINS
from lm.config.model_config import ModelConfig
from lm.config.training_config import Groups
from lm.config.tree import Config
from lm.data.batches import train_sequences
from lm.data.store import Store
from lm.model.counts import count_parameters, estimated_memory, flops_per_token
from lm.model.decoder import Decoder
from lm.runs.folder import command_line
from lm.schema import Plain, to_plain
from lm.training.optimizers import parameter_groups
from lm.training.run_context import Machine
from lm.training.starting import PhaseStart

_IN_OTHER_LINES = ("n_layer", "block", "n_head", "n_kv_head", "head_size", "n_embd", "n_mlp", "mlp", "position", "normalizer")


def banner(config: Config, store: Store, start: PhaseStart, machine: Machine) -> str:
    """What a run prints first."""
    model, data, optim, decoder = config.model, config.data, config.optim, start.decoder
    parameters = count_parameters(decoder)
    tokens = config.trainer.max_steps * optim.batch_tokens
    flops = flops_per_token(decoder)
    memory = estimated_memory(decoder, config.micro_batch * data.seq_len, machine.bf16)
    on = "cuda" if machine.accelerator == "gpu" else "cpu"
    kernels = dict.fromkeys(normalizer.kernel_description(on) for normalizer in decoder.normalizers())
    accumulation = config.rank_sequences // config.micro_batch
    lines = {
        "run": f"{config.run_folder}  (lm {lm.__version__})",
        "model": f"{parameters['total']:,} parameters, {parameters['non_embedding']:,} without embedding and head, "
        f"{parameters['normalizer']:,} in normalizers",
        "": f"{model.n_layer} layers x {_heads(model)} x {model.key_dims}, width {model.n_embd}, "
        f"{model.block.label(model)}, {model.position.label}, vocabulary {store.vocab_size:,}",
        "options": _model_options(model),
        "normalizer": _normalizer(decoder),
        "kernel": "; ".join(kernels),
        **({"phases": _phases(config, start.phase)} if config.phases else {}),
        "data": f"{store.path}: {store.train.n_tokens:,} training tokens, {store.val.n_tokens:,} held out, "
        f"fingerprint {store.fingerprint[:16]}",
        "tokens": f"{config.trainer.max_steps:,} steps x {optim.batch_tokens:,} = {tokens:,}" + _epochs(store, config, tokens),
        **({"tasks": _tasks(store, config)} if data.tasks else {}),
        "step": f"{config.micro_batch} sequences x {data.seq_len} tokens x {accumulation} micro-batches x {config.world_size} processes",
        "optimizer": f"{_options(optim.optimizer)}; lr = {optim.lr:g}, {_options(optim.schedule)}, warm-up of {optim.warmup_steps} steps",
        **({"groups": _groups(config, decoder)} if optim.groups != Groups() else {}),
        **({"lengths": _lengths(store, config)} if data.lengths.shorter else {}),
        **({"documents": "isolated: attention and n restart at each"} if data.documents == "isolate" else {}),
        "compute": f"{flops / 1e6:,.1f} MFLOP a token, {flops * tokens:.2e} FLOP in all; memory about {memory / 2**30:.2f} GiB a process",
        "device": f"{machine.device}, precision {machine.precision}, compile {machine.compiled}",
        "seed": f"{config.seed} (initial weights, order of the batches, dropout)",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _model_options(model: ModelConfig) -> str:
    """All options of the model but its shape, position and normalizer, which have lines of their own."""
    named = {name: value for name, value in to_plain(model).items() if name not in _IN_OTHER_LINES}
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in named.items())


def _normalizer(decoder: Decoder) -> str:
    """Formula and options of the normalizer; where layers differ, of each."""
    found = []
    for options in (normalizer.options for normalizer in decoder.normalizers()):
        words = ", ".join(f"{name} = {value}" for name, value in vars(options).items())
        found.append(f"{options.name}: {options.formula()}" + (f"; {words}" if words else ""))
    if len(set(found)) == 1:
        return found[0]
    return "  |  ".join(
        f"layers {', '.join(str(i) for i, one in enumerate(found) if one == text)}: {text}" for text in dict.fromkeys(found)
    )


def _options(options: object) -> str:
    """A variant's name and options."""
    named = {name: f"{value:g}" if isinstance(value, float) else str(value).lower() for name, value in vars(options).items()}
    return ", ".join([options.name, *(f"{name} = {value}" for name, value in named.items())])


def _groups(config: Config, decoder: Decoder) -> str:
    """Size, learning rate and weight decay of each group of parameters, and epsilon where it has its own."""
    return "; ".join(
        f"{group['name']} {sum(p.numel() for _, p in group['params']):,} parameters, "
        f"lr x {getattr(config.optim.groups, group['name']).lr_factor:g}, weight decay {group['weight_decay']:g}"
        + (f", eps {group['eps']:g}" if "eps" in group else "")
        for group in parameter_groups(decoder, config.optim)
    )


def _epochs(store: Store, config: Config, tokens: int) -> str:
    """How often the run reads the text, by source."""
    text_fraction = 1 - sum(one.weight for one in config.data.tasks)
    if text_fraction < 1e-6:
        return ""
    parts = [
        (part.label, tokens * text_fraction * source.weight / part.n_tokens)
        for source, part in zip(config.data.sources, store.train.sources, strict=True)
    ]
    if len(parts) == 1:
        return f" ({parts[0][1]:.2f} epochs)"
    return f" ({', '.join(f'{label} {epochs:.2f}' for label, epochs in parts)} epochs)"


def _tasks(store: Store, config: Config) -> str:
    """The fraction of sequences of each task, and which of them must repeat."""
    texts, tokens, fractions = [], config.trainer.max_steps * config.optim.batch_tokens, _length_fractions(store, config)
    for weighted in config.data.tasks:
        text = f"{weighted.task.name} {weighted.weight:.0%}"
        for length, fraction in fractions.items():
            made, different = weighted.weight * fraction * tokens / length, weighted.task.distinct(length, "train")
            if weighted.task.vocab_size and made > different:  # sequences in text differ in their filler
                text += f" ({made:,.0f} sequences of {length} tokens, of about {different:,.0f} different ones)"
        texts.append(text)
    return ", ".join(texts)


def _lengths(store: Store, config: Config) -> str:
    """The fraction of the run's tokens in sequences of each length."""
    text = ", ".join(f"{length} tokens {fraction:.1%}" for length, fraction in _length_fractions(store, config).items())
    return "; ".join(filter(None, (text, train_sequences(store, config).length.note())))


def _length_fractions(store: Store, config: Config) -> dict[int, float]:
    return train_sequences(store, config).length.fractions(config.trainer.max_steps)


def _heads(model: ModelConfig) -> str:
    return f"{model.n_head} heads" + (f" ({model.kv_heads} of keys and values)" if model.kv_heads != model.n_head else "")


def _phases(config: Config, phase: int) -> str:
    """Each phase's normalizer and last step, the current phase in brackets."""
    ends = zip(config.phases, config.phase_ends, strict=True)
    names = [f"{one.normalizer.label()} to step {end:,}" for one, end in ends]
    return ", then ".join(f"[{name}]" if index == phase else name for index, name in enumerate(names))


def environment(config: Config, store: Store, start: PhaseStart, machine: Machine, before: dict[str, Plain]) -> dict[str, Plain]:
    """What the results depend on beside the configuration; a resumed run keeps the `starts` recorded `before`.

    What this start uses is in the last entry of `starts`, and at the top level.
    """
    commit, dirty = git_state()
    packages = [name for name in ("torch", "lightning", "datasets", "tokenizers", "wandb", "numpy") if find_spec(name)]
    used = {
        "lm": lm.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages}
        | PLUGINS.versions(config.normalizer_names),
        "device": machine.device,
        "precision": machine.precision.value,
        "compile": machine.compiles,
        "threads": torch.get_num_threads(),
        "world_size": config.world_size,
        "max_steps": config.trainer.max_steps,
        "on_nonfinite": config.optim.on_nonfinite,
        "command": command_line(),
    }
    return {
        **used,
        "data_fingerprint": store.fingerprint,
        "data": {
            "store": str(store.path),
            "train_tokens": store.train.n_tokens,
            "val_tokens": store.val.n_tokens,
            "train_documents": store.train.n_documents,
            "val_documents": store.val.n_documents,
        },
        "unigram_cross_entropy": {"train": store.train.unigram_cross_entropy, "val": store.val.unigram_cross_entropy},
        "parameters": count_parameters(start.decoder),
        "flops_per_token": flops_per_token(start.decoder),
        **({"sequence_lengths": _length_fractions(store, config)} if config.data.lengths.shorter else {}),
        "tokens_total": config.trainer.max_steps * config.optim.batch_tokens,
        "wandb_id": before.get("wandb_id") or os.urandom(6).hex(),
        "starts": [*before.get("starts", []), {"step": start.step, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **used}],
    }


def git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout this package runs from and whether it has changes; (None, None) outside one."""

    def git(*arguments: str) -> str:
        folder = Path(lm.__file__).parent
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None
