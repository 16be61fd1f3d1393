"""Describe a run by its settings and derived quantities, in the banner that it prints first and in environment.json."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

import lm
from lm.config.training_config import Group, Groups
from lm.config.tree import Config
from lm.data.batches import TrainSequences, train_sequences
from lm.data.store import Store
from lm.evaluation.held_out import unigram_loss, validation_sequences
from lm.model.decoder import Decoder
from lm.model.device import Machine
from lm.model.spec import count_parameters, flops_per_token
from lm.plugins import PLUGINS
from lm.runs.evaluations import UNIGRAM, checkpoint_selection_mask
from lm.runs.folder import command_line
from lm.schema import Plain
from lm.training.optimizers import parameter_groups
from lm.training.starting import PhaseStart

# A run with fewer tokens a parameter gets a note: a quarter of the 20 that use compute best (Hoffmann et al. 2022).
MIN_TOKEN_RATIO = 5
FEW_TOKENS = (
    f"fewer than {MIN_TOKEN_RATIO} tokens a parameter: with the same compute, a smaller model on more tokens reaches a "
    "lower loss; "
    "best are about 20 (arXiv 2203.15556): trainer.tokens_per_parameter=20"
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
MIN_SEQUENCES = 32  # a run with fewer validation sequences, and fewer than `eval.sequences`, gets a note
SEQUENCES_PER_TASK = 8  # sequences of each task from which the banner estimates the fraction of answers
# Keys of `model` that the banner shows outside its line `options`.
_SHOWN_OPTIONS = (
    "n_layer",
    "block",
    "n_head",
    "n_kv_head",
    "head_size",
    "n_embd",
    "n_mlp",
    "mlp",
    "position",
    "normalizer",
)


def banner(config: Config, store: Store, start: PhaseStart, machine: Machine) -> str:
    """The text that a run prints first: model, data, lengths, optimizer, and notes on doubtful settings."""
    model, data, optim, decoder = config.model, config.data, config.optim, start.decoder
    parameters = count_parameters(decoder)
    tokens = config.trainer.max_steps * optim.batch_tokens
    flops = flops_per_token(decoder)
    device = "cuda" if machine.accelerator == "gpu" else "cpu"
    kernels = dict.fromkeys(normalizer.kernel_description(device) for normalizer in decoder.normalizers())
    reading = config.in_phase(start.phase)  # with the sequence length of the phase
    accumulation = reading.rank_sequences // reading.micro_batch
    heads_text = f"{model.n_head} heads" + (
        f" ({model.kv_heads} of keys and values)" if model.kv_heads != model.n_head else ""
    )
    options = {name: value for name, value in _changed_options(model).items() if name not in _SHOWN_OPTIONS}
    peak_source = "its maker" if device == "cuda" else "of a matrix product"
    peak_text = (
        f"peak {machine.peak_flops:.2e} FLOP/s ({peak_source})"
        if machine.peak_flops
        else "the device's peak is not known"
    )
    sequences, warmup = train_sequences(store, reading), optim.warmup(config.trainer.max_steps)
    epochs, lengths = _source_epochs(store, config), sequences.length.fractions(config.trainer.max_steps)
    token_ratio = tokens / (parameters["total"] - parameters["normalizer"])  # as `trainer.tokens_per_parameter`
    has_few_tokens = token_ratio < MIN_TOKEN_RATIO and not (config.init_from or data.symbolic)
    notes = has_few_tokens * [FEW_TOKENS] + any(number > MAX_EPOCHS for _, number in epochs) * [MANY_EPOCHS]
    documents = validation_sequences(store, config).document_labels
    if warmup < optim.warmup_steps:
        notes.append(
            f"optim.warmup_steps = {optim.warmup_steps} is more than the run's {warmup} steps: all of them are warm-up"
        )
    notes += bool(checkpoint_selection_mask(store.fingerprint, documents).all()) * [FEW_HELD_OUT]
    if len(documents) < min(config.eval.sequences, MIN_SEQUENCES):
        remedy = "raise data.val_fraction, or split files into documents by data.source.separator"
        notes.append(
            f"held-out text of {len(documents)} validation sequences, eval.sequences asks for "
            f"{config.eval.sequences:,}: {remedy}"
        )
    micro_batch_tokens = reading.micro_batch * reading.data.seq_len
    micro_batches = " or ".join(f"{micro_batch_tokens // length} sequences x {length} tokens" for length in lengths)
    length_texts = ", ".join(f"{length} tokens {fraction:.1%}" for length, fraction in lengths.items())
    lines = {
        "run": f"{config.run_folder}  (lm {lm.__version__})",
        "model": f"{parameters['total']:,} parameters, {parameters['non_embedding']:,} without embedding and head, "
        f"{parameters['normalizer']:,} in normalizers",
        "": f"{model.n_layer} layers x {heads_text} x {model.key_dims}, width {model.n_embd}, "
        f"{model.block.label(model)}, {model.position.label}, vocabulary {decoder.vocab_size:,}",
        "normalizer": _normalizer_text(decoder),
        "kernel": "; ".join(kernels),
        "phases": _phases_text(config, start.phase) if config.phases else "",
        "data": f"{store.path}: {store.train.n_tokens:,} training tokens, {store.val.n_tokens:,} held out, "
        f"fingerprint {store.fingerprint[:16]}",
        "tasks": _tasks_text(config, sequences, lengths) if data.tasks else "",
        "lengths": length_texts if data.lengths.allows_shorter else "",
        "documents": "isolated: attention and n restart at each" if data.documents == "isolate" else "",
        "tokens": f"{config.trainer.max_steps:,} steps x {optim.batch_tokens:,} = {tokens:,}, {token_ratio:.3g} a "
        "parameter"
        + (f" ({', '.join(f'{label} {number:.2f}'.strip() for label, number in epochs)} epochs)" if epochs else ""),
        "note": "; ".join(notes),
        "device": f"{machine.device}, precision {machine.precision}, compile {machine.compilation}",
        "compute": f"{flops / 1e6:,.1f} MFLOP a token, {flops * tokens:.2e} FLOP in all; {peak_text}",
        "step": f"{micro_batches} x {accumulation} micro-batches x {config.world_size} processes",
        "optimizer": f"{_variant_text(optim.optimizer)}, lr {optim.lr:g}, {_variant_text(optim.schedule)}, warm-up of "
        f"{warmup} steps; "
        f"gradients' norm {f'at most {optim.grad_clip:g}' if optim.grad_clip else 'not bounded'}"
        + (f"; z-loss x {optim.z_loss:g}" if optim.z_loss else ""),
        "groups": _groups_text(config, decoder) if optim.groups != Groups() else "",
        "options": ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items()),
        "seed": f"{config.seed} (initial weights, {'order of the batches, ' if data.seed is None else ''}dropout)"
        + ("" if data.seed is None else f", {data.seed} (order of the batches)"),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items() if text)


def _normalizer_text(decoder: Decoder) -> str:
    """Text with formula and options of the normalizer, or of each layer's normalizer if layers differ."""
    layers_by_text: dict[str, list[str]] = {}
    for layer, normalizer in enumerate(decoder.normalizers()):
        options, trained_length = normalizer.options, f"train ({normalizer.layer.train_length})"
        values = {name: trained_length if value == "train" else value for name, value in vars(options).items()}
        options_text = ", ".join(f"{name} = {value}" for name, value in values.items())
        text = f"{options.name}: {options.formula()}" + (f"; {options_text}" if options_text else "")
        layers_by_text.setdefault(text, []).append(str(layer))
    if len(layers_by_text) == 1:
        return text
    return "  |  ".join(f"layers {', '.join(layers)}: {text}" for text, layers in layers_by_text.items())


def _variant_text(options: object) -> str:
    """Text with the name of an optimizer or schedule, and its options that differ from their defaults."""
    texts = {
        name: f"{value:g}" if isinstance(value, float) else str(value).lower()
        for name, value in _changed_options(options).items()
    }
    return ", ".join([options.name, *(f"{name} = {value}" for name, value in texts.items())])


def _changed_options(options: object) -> dict[str, object]:
    defaults = vars(type(options)())
    return {name: value for name, value in vars(options).items() if value != defaults[name]}


def _groups_text(config: Config, decoder: Decoder) -> str:
    """Text with size, learning-rate factor and weight decay of each parameter group."""
    groups, texts = parameter_groups(decoder, config.optim), []
    for group in groups:
        size = sum(p.numel() for _, p in group["params"])
        factors = f"lr x {group['lr_factor']:.4g}, weight decay {group['weight_decay']:.4g}"
        texts.append(f"{group['name']} {size:,} parameters, {factors}")
    later_group = config.optim.groups.normalizer
    if later_group != Group() and all(group["name"] != "normalizer" for group in groups):
        texts.append(
            f"normalizer (of later phases), lr x {later_group.lr_factor:.4g}, weight decay "
            f"{config.optim.weight_decay('normalizer'):.4g}"
        )
    return "; ".join(texts)


def _source_epochs(store: Store, config: Config) -> list[tuple[str, float]]:
    """Pairs of a text source's label (empty for a single source) and the number of epochs that the run reads of it."""
    text_weight = config.data.text_weight
    if not text_weight:
        return []
    tokens = config.trainer.max_steps * config.optim.batch_tokens * text_weight
    source_pairs = list(zip(config.data.sources, store.train.sources, strict=True))
    return [
        (corpus.label if len(source_pairs) > 1 else "", tokens * source.weight / corpus.n_tokens)
        for source, corpus in source_pairs
    ]


def _tasks_text(config: Config, sequences: TrainSequences, fractions: dict[int, float]) -> str:
    """Text with each task's name and weight; if sequences must repeat, also the numbers of drawn and of distinct
    sequences.

    If the run trains on text, too, it ends with the fraction of targets that are answers to tasks, estimated from the
    first sequences of each task at the first length. fractions: fraction of the run's tokens at each sequence length.
    """
    texts, tokens = [], config.trainer.max_steps * config.optim.batch_tokens
    for weighted in config.data.tasks:
        text = f"{weighted.task.name} {weighted.weight:.0%}"
        for length, fraction in fractions.items():
            n_drawn = weighted.weight * fraction * tokens / length
            n_distinct = weighted.task.n_distinct(length, "train")
            if weighted.task.vocab_size and n_drawn > n_distinct:  # sequences in text differ in their filler
                text += f" ({n_drawn:,.0f} sequences of {length} tokens, of about {n_distinct:,.0f} different ones)"
        texts.append(text)
    if config.data.text_weight:
        slots = np.arange(SEQUENCES_PER_TASK)
        answers = sum(
            weighted.weight * stream.read(slots, sequences.length(0))[1].mean()
            # text comes after the tasks
            for weighted, stream in zip(config.data.tasks, sequences.streams, strict=False)
        )
        texts.append(f"answers are about {answers / (answers + config.data.text_weight):.0%} of the targets")
    return ", ".join(texts)


def _phases_text(config: Config, phase: int) -> str:
    """Text with what each phase has, and its last step; the phase with index `phase` is in brackets."""
    ends = zip(config.phases, config.phase_ends, strict=True)
    names = [f"{planned_phase.label} to step {end:,}" for planned_phase, end in ends]
    return ", then ".join(f"[{name}]" if index == phase else name for index, name in enumerate(names))


def environment(
    config: Config, store: Store, start: PhaseStart, machine: Machine, old_facts: dict[str, Plain]
) -> dict[str, Plain]:
    """The content of environment.json: facts on which results depend, other than the configuration.

    `old_facts`: environment.json of a resumed run, else facts on the initial weights. This start's settings are
    appended to `starts`.
    """
    commit, dirty = git_state()
    packages = [name for name in ("torch", "lightning", "datasets", "tokenizers", "wandb", "numpy") if find_spec(name)]
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
    lengths = train_sequences(store, config).length
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
        "peak_flops": machine.peak_flops,
        **(
            {"sequence_lengths": lengths.fractions(config.trainer.max_steps)}
            if config.data.lengths.allows_shorter
            else {}
        ),
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
