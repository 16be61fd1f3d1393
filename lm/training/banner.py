"""Describe a run by derived quantities, in the banner that it prints first and in environment.json."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

import lm
from lm.config.tree import Config
from lm.data.store import Store
from lm.evaluation.held_out import unigram_loss, validation_sequences
from lm.model.decoder import Decoder
from lm.model.device import Machine
from lm.model.spec import count_parameters, flops_per_token
from lm.plugins import PLUGINS
from lm.runs.evaluations import UNIGRAM, checkpoint_selection_mask
from lm.runs.folder import command_line
from lm.schema import Plain
from lm.training.starting import PhaseStart

# A run with fewer tokens a parameter gets a note: a quarter of the 20 that use compute best (Hoffmann et al. 2022).
MIN_TOKEN_RATIO = 5
FEW_TOKENS = (
    f"fewer than {MIN_TOKEN_RATIO} tokens a parameter: with the same compute, a smaller model on more tokens reaches a "
    "lower loss; best are about 20 (arXiv 2203.15556): trainer.tokens_per_parameter=20"
)
# A run that reads text more often gets a note: up to 4 times is about as good as new text (Muennighoff et al. 2023).
MAX_EPOCHS = 16
MANY_EPOCHS = (
    f"text is read more than {MAX_EPOCHS} times: up to 4 are about as good as new text, the value of more "
    "decays (arXiv 2305.16264)"
)
FEW_HELD_OUT = (
    "too few held-out documents to choose best.ckpt on some of them and report others: all of them choose "
    "it; hold out more text"
)


def banner(config: Config, store: Store, start: PhaseStart, machine: Machine) -> str:
    """The text that a run prints first: model, data, compute, optimizer, and notes on doubtful settings. config.yaml
    has all settings.
    """
    model, data, optim, decoder = config.model, config.data, config.optim, start.decoder
    parameters, flops = count_parameters(decoder), flops_per_token(decoder)
    tokens = config.trainer.max_steps * optim.batch_tokens
    token_ratio = tokens / (parameters["total"] - parameters["normalizer"])  # as `trainer.tokens_per_parameter`
    epochs = _source_epochs(store, config)
    chooses_best = checkpoint_selection_mask(store.fingerprint, validation_sequences(store, config).document_labels)
    notes = [FEW_TOKENS] * (token_ratio < MIN_TOKEN_RATIO and not (config.init_from or data.symbolic))
    notes += [MANY_EPOCHS] * any(number > MAX_EPOCHS for number in epochs.values())
    notes += [FEW_HELD_OUT] * bool(chooses_best.all())
    device = "cuda" if machine.accelerator == "gpu" else "cpu"
    kernels = dict.fromkeys(normalizer.route(device) for normalizer in decoder.normalizers())
    phases = (
        f"[{planned.label} to step {end:,}]" if index == start.phase else f"{planned.label} to step {end:,}"
        for index, (planned, end) in enumerate(zip(config.phases, config.phase_ends, strict=False))
    )
    epoch_texts = ", ".join(f"{label} {number:.2f}".strip() for label, number in epochs.items())
    lines = {
        "run": f"{config.run_folder}  (lm {lm.__version__})",
        "model": f"{parameters['total']:,} parameters, {parameters['non_embedding']:,} without embedding and head, "
        f"{parameters['normalizer']:,} in normalizers",
        "": f"{model.n_layer} layers x {model.n_head} heads x {model.key_dims}, width {model.n_embd}, "
        f"{model.block.label(model)}, {model.position.label}, vocabulary {decoder.vocab_size:,}",
        "normalizer": _normalizer_text(decoder),
        "kernel": "; ".join(kernels),
        "phases": ", then ".join(phases),
        "data": f"{store.path}: {store.train.n_tokens:,} training tokens, {store.val.n_tokens:,} held out, "
        f"fingerprint {store.fingerprint[:16]}",
        "tasks": ", ".join(f"{weighted.task.name} {weighted.weight:.0%}" for weighted in data.tasks),
        "tokens": f"{config.trainer.max_steps:,} steps x {optim.batch_tokens:,} = {tokens:,}, {token_ratio:.3g} a "
        "parameter" + (f" ({epoch_texts} epochs)" if epochs else ""),
        "note": "; ".join(notes),
        "device": f"{config.world_size} x {machine.device}, precision {machine.precision}, compile "
        f"{machine.compilation}, micro-batches of {config.in_phase(start.phase).micro_batch} sequences",
        "compute": f"{flops / 1e6:,.1f} MFLOP a token, {flops * tokens:.2e} FLOP in all",
        "optimizer": f"{optim.optimizer.name}, lr {optim.lr:g}, {optim.schedule.name}, warm-up of "
        f"{optim.warmup(config.trainer.max_steps)} steps",
        "seed": f"{config.seed}" + ("" if data.seed is None else f", {data.seed} for the order of the batches"),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _normalizer_text(decoder: Decoder) -> str:
    """Text with formula and options of the normalizer, or of each layer's normalizer if layers differ."""
    layers_by_text: dict[str, list[str]] = {}
    for layer, normalizer in enumerate(decoder.normalizers()):
        options, length = normalizer.options, normalizer.layer.train_length
        values = {name: f"train ({length})" if value == "train" else value for name, value in vars(options).items()}
        text = f"{options.name}: {options.formula()}" + "".join(f"; {name} = {values[name]}" for name in values)
        layers_by_text.setdefault(text, []).append(str(layer))
    if len(layers_by_text) == 1:
        return text
    return "  |  ".join(f"layers {', '.join(layers)}: {text}" for text, layers in layers_by_text.items())


def _source_epochs(store: Store, config: Config) -> dict[str, float]:
    """The number of epochs that the run reads of each text source, by its label; a single source has none."""
    tokens = config.trainer.max_steps * config.optim.batch_tokens * config.data.text_weight
    sources = store.train.sources if tokens else []
    return {
        corpus.label if len(sources) > 1 else "": tokens * source.weight / corpus.n_tokens
        for source, corpus in zip(config.data.sources, sources, strict=False)
    }


def environment(
    config: Config, store: Store, start: PhaseStart, machine: Machine, old_facts: dict[str, Plain]
) -> dict[str, Plain]:
    """The content of environment.json: facts on which results depend, other than the configuration.

    `old_facts`: environment.json of a resumed run, else facts on the initial weights. This start's settings are
    appended to `starts`.
    """
    commit, dirty = git_state()
    packages = ("torch", "lightning", "datasets", "tokenizers", "wandb", "numpy")
    facts = {
        "lm": lm.__version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages}
        | PLUGINS.versions(config.plugin_names_by_key.values()),
        "device": machine.device,
        "precision": machine.precision.value,
        "compile": machine.compiles,
        "threads": torch.get_num_threads(),
        "world_size": config.world_size,
        "max_steps": config.trainer.max_steps,
        "on_nonfinite": config.optim.on_nonfinite,
        "command": command_line(),
    }
    level, level_name = unigram_loss(store, config.data)
    return {
        **facts,
        "data_fingerprint": store.fingerprint,
        "symbolic": config.data.symbolic,
        "data": {
            "store": str(store.path),
            "train_tokens": store.train.n_tokens,
            "val_tokens": store.val.n_tokens,
            "train_documents": store.train.n_documents,
            "val_documents": store.val.n_documents,
        },
        "unigram_cross_entropy": {
            "train": store.train.unigram_cross_entropy,
            "val": level if level_name == UNIGRAM else None,
        },
        "parameters": count_parameters(start.decoder),
        "flops_per_token": flops_per_token(start.decoder),
        "tokens_total": config.trainer.max_steps * config.optim.batch_tokens,
        "wandb_id": old_facts.get("wandb_id") or os.urandom(6).hex(),
        "starts": [
            *old_facts.get("starts", []),
            {"step": start.step, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts},
        ],
    }


def git_state() -> tuple[str | None, bool | None]:
    """Git commit of the checkout from which this package runs, and whether tracked files have uncommitted changes.

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
