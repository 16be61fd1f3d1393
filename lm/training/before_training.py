"""Checks before data are prepared: all that a configuration, its model and the weights it goes on from say without them."""

import os
from pathlib import Path

import torch

from lm.attention.catalogue import make_normalizer
from lm.config.training_config import Group
from lm.config.tree import Config, differences, effect_of
from lm.data.tasks import symbol_tokenizer
from lm.errors import ConfigError, Problem, shown
from lm.model.decoder import Decoder, group_of
from lm.model.device import resolve_device
from lm.model.spec import with_steps
from lm.runs.folder import is_own
from lm.runs.loading import Loaded, load
from lm.runs.metadata import load_metadata
from lm.runs.same_run import config_problems, trained_config
from lm.schema import to_plain
from lm.training.optimizers import GROUPS, freeze, implied_state


def check_before_data(config: Config, checkpoint: Path | None) -> tuple[Config, Loaded | None]:
    """Check what needs no data, before their preparation takes minutes.

    checkpoint: where the run goes on from, its own or that of the run it branches from; None: it starts at step 0.

    Returns the configuration, with its steps where it starts from weights, whose vocabulary is known; and the weights that `init_from`
    names, for a new run.

    Raises:
        ConfigError: a device that is not there, nothing to train, a model too large for the machine, or not that of the weights.
        RunError: nothing to load there.
    """
    accelerator, _ = resolve_device(config)
    if checkpoint:
        metadata = load_metadata(checkpoint)
        config = with_steps(config, metadata["vocab_size"])
        branches = not is_own(config.run_folder, checkpoint)
        if problems := config_problems(config, trained_config(metadata, checkpoint), metadata, checkpoint, branches):
            raise ConfigError(problems)
        if branches and metadata["step"] >= config.trainer.max_steps:
            reason = f"leaves no step after step {metadata['step']} of {checkpoint} (branch_from)"
            raise ConfigError(
                [Problem("trainer.max_steps", config.trainer.max_steps, reason, "raise it; it counts all steps from the first")]
            )
    with torch.device("meta"):  # shapes without numbers; the vocabulary is not known yet
        decoder = Decoder(config.model_in(0), 1, config.data.seq_len, seed=None)
    freeze(decoder, config.train_only)
    check_trainable(config, decoder)
    _check_memory(config, decoder, accelerator)
    if checkpoint or not config.init_from:
        return config, None
    loaded = load(config.init_from)
    if problems := _source_problems(config, decoder, loaded):
        raise ConfigError(problems)
    return with_steps(config, loaded.spec.vocab_size), loaded


def _check_memory(config: Config, decoder: Decoder, accelerator: str) -> None:
    """Raises ConfigError if weights, gradients and the optimizer's state, without those of embedding and head, exceed all memory."""
    state = [value for known in implied_state(decoder, config).values() for value in known.values() if isinstance(value, torch.Tensor)]
    gradients = [p for p in decoder.parameters() if p.requires_grad]  # of their size
    needed = sum(tensor.nbytes for tensor in (*decoder.parameters(), *gradients, *state))
    if accelerator == "gpu":
        where, available = "the GPU", torch.cuda.get_device_properties(0).total_memory
    else:
        where, available = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        size = f"{sum(p.numel() for p in decoder.parameters()):,} parameters"
        reason = f"need {needed / 2**30:,.0f} GiB for weights, gradients and optimizer state, {where} has {available / 2**30:,.0f} GiB"
        raise ConfigError([Problem("model", size, reason, "lower model.n_embd, model.n_layer or model.n_mlp")])


def _source_problems(config: Config, decoder: Decoder, loaded: Loaded) -> list[Problem]:
    """Another model or normalizer than that of the weights that `init_from` names, with both sides and what to do."""
    models = ({"model": to_plain(model)} for model in (decoder.config, loaded.decoder.config))
    problems = [
        Problem(key, ours, f"{loaded.path} has {shown(theirs)}", "set it to that")
        for key, (ours, theirs) in differences(*models).items()
        if effect_of(key).affects == "model" and not key.startswith("model.normalizer")  # compared below
    ]
    problems += _normalizer_problems(config, decoder, loaded)
    if config.data.symbolic and loaded.tokenizer is not None:
        tasks = [weighted.task for weighted in config.data.tasks]
        if loaded.tokenizer.get_vocab() != symbol_tokenizer(tasks).get_vocab():
            reason = f"makes sequences of symbols, and {loaded.path} knows other tokens, of a text or of more or fewer symbols"
            problems.append(Problem("data.tasks", tasks[0].name, reason, "name what it was trained on, or drop init_from"))
    ours, theirs = decoder.config, loaded.decoder.config
    if ours.size_multipliers != theirs.size_multipliers:
        reason = f"the weights of {loaded.path} have other proportions to a base model than these learning rates are for"
        base = ", ".join(f"{name}: {value}" for name, value in theirs.base_shape.items())
        remedy = f"set model.transfer={{{base}}}" if theirs.transfer else "drop it"
        problems.append(Problem("model.transfer", ours.base_shape, reason, remedy))
    if config.model.position.ends and loaded.decoder.seq_len != decoder.seq_len:
        reason = f"{loaded.path} has learned positions for {loaded.decoder.seq_len}"
        problems.append(Problem("data.seq_len", decoder.seq_len, reason, "set it to that"))
    return problems


def _normalizer_problems(config: Config, decoder: Decoder, loaded: Loaded) -> list[Problem]:
    """A normalizer other than that of the weights, initial values aside, or one whose constants differ at this training length."""
    models = decoder, loaded.decoder
    labels = [model.config.normalizer.label() for model in models]
    where = "phases[0].normalizer" if config.phases else "model.normalizer"
    for ours, theirs in zip(*(model.normalizers() for model in models), strict=False):
        settled = {"init", *ours.constants()}  # initial values are replaced; constants are compared by their values below
        plain = [{key: value for key, value in to_plain(normalizer.options).items() if key not in settled} for normalizer in (ours, theirs)]
        if plain[0] != plain[1]:
            to = config.plan[0].normalizer.swap_arguments()
            remedy = f"convert it: lm swap {config.init_from} --to {to} -o OUT, then init_from=OUT; or keep {labels[1]}"
            return [Problem(where, labels[0], f"{loaded.path} has {labels[1]}", remedy)]
        before = theirs.constants()
        problems = [
            Problem(f"{where}.{key}", value, f"is {before[key]:g} in {loaded.path}", f"set it to {before[key]:g}")
            for key, value in ours.constants().items()
            if value != before[key]
        ]
        if problems:
            return problems
    return []


def check_trainable(config: Config, decoder: Decoder) -> None:
    """Raises ConfigError if a phase has nothing to train, or what is said of some parameters has no trained parameter."""
    shape = decoder.normalizers()[0].layer
    groups = {group_of(name, p) for name, p in decoder.named_parameters() if p.requires_grad} - {"normalizer"}
    for index, phase in enumerate(config.plan):
        normalizers = (make_normalizer(phase.normalizer.of_layer(layer), shape) for layer in range(config.model.n_layer))
        if any(True for normalizer in normalizers for _ in normalizer.parameters()):
            groups.add("normalizer")
        elif config.train_only:
            where = f"phases[{index}].normalizer" if config.phases else "model.normalizer"
            reason = f"{phase.normalizer.label()} has no parameters to train ({where})"
            raise ConfigError([Problem("train_only", config.train_only, reason, "drop train_only, or choose ssmax")])
    optimizer = config.optim.optimizer
    if optimizer.needs and optimizer.needs not in groups:
        reason = f"is for the parameters of the group {optimizer.needs}, and none of them is trained"
        raise ConfigError([Problem("optim.optimizer", optimizer.name, reason, "set it to adamw")])
    own = {name: to_plain(getattr(config.optim.groups, name)) for name in GROUPS if name not in groups}
    idle, reason = to_plain(Group()), "no trained parameter is in this group"
    if problems := [Problem(f"optim.groups.{name}", set_to, reason, "drop it") for name, set_to in own.items() if set_to != idle]:
        raise ConfigError(problems)
