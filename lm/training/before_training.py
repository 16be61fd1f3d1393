"""Check the configuration, its model, and the weights from which the run starts, before data are prepared."""

import os
from pathlib import Path

import torch

from lm.attention.catalogue import make_normalizer
from lm.config.normalizers import swap_arguments
from lm.config.training_config import Group
from lm.config.tree import Config, differences, effect_of
from lm.data.tasks import symbol_tokenizer
from lm.errors import ConfigError, Problem, as_written
from lm.evaluation.evaluation_kind import measurement_types
from lm.model.causality import check_causality
from lm.model.decoder import Decoder, group_of
from lm.model.device import resolve_device
from lm.model.spec import with_steps
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import is_own
from lm.runs.loading import LoadedModel, load
from lm.runs.same_run import config_problems, trained_config
from lm.schema import to_plain
from lm.training.optimizers import GROUPS, freeze, implied_state


def check_before_data(config: Config, checkpoint: Path | None) -> tuple[Config, LoadedModel | None]:
    """Check everything that needs no data, before the preparation of the data takes minutes.

    checkpoint: the checkpoint that the run resumes or branches from; None: the run starts at step 0.

    Returns the configuration and, for a new run, the model that `init_from` names, else None. If checkpoint or model
    give the vocabulary size, `tokens_per_parameter` of the returned configuration is converted to a number of steps.

    Raises:
        ConfigError: the device is missing, nothing is trained, the model is too large for the machine, or the
            configuration doesn't fit the checkpoint or the weights, or a normalizer from outside sees later tokens.
        RunError: the checkpoint or the model can't be loaded, or a package that an evaluation needs is missing.
    """
    accelerator, _ = resolve_device(config)
    if checkpoint:
        metadata = load_checkpoint(checkpoint)["lm"]
        config = with_steps(config, metadata["vocab_size"])
        branches = not is_own(config.run_folder, checkpoint)
        if problems := config_problems(config, trained_config(metadata, checkpoint), metadata, checkpoint, branches):
            raise ConfigError(problems)
        if branches:
            _check_branch(config, trained_config(metadata, checkpoint), metadata["phase"], checkpoint)
        if branches and metadata["step"] >= config.trainer.max_steps:
            reason = f"leaves no step after step {metadata['step']} of {checkpoint} (branch_from)"
            raise ConfigError(
                [
                    Problem(
                        "trainer.max_steps",
                        config.trainer.max_steps,
                        reason,
                        "raise it; it counts all steps from the first",
                    )
                ]
            )
    with torch.device("meta"):  # shapes without values, and a vocabulary of 1, as it is not known yet
        decoder = Decoder(config.model_in(0), 1, config.data.seq_len, seed=None)
    freeze(decoder, config.train_only)
    check_trainable(config, decoder)
    check_causality(config)
    measurement_types(config)  # imports what the evaluations need
    _check_memory(config, decoder, accelerator)
    if checkpoint or not config.init_from:
        return config, None
    source_model = load(config.init_from)
    if problems := _source_problems(config, decoder, source_model):
        raise ConfigError(problems)
    return with_steps(config, source_model.spec.vocab_size), source_model


def _check_memory(config: Config, decoder: Decoder, accelerator: str) -> None:
    """Check that weights, gradients and optimizer state, without embedding and head, fit in memory (GPU or host);
    raises ConfigError.
    """
    state = [
        value
        for entries in implied_state(decoder, config).values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p for p in decoder.parameters() if p.requires_grad]  # each gradient has its parameter's size
    needed_bytes = sum(tensor.nbytes for tensor in (*decoder.parameters(), *gradients, *state))
    if accelerator == "gpu":
        owner, capacity = "the GPU", torch.cuda.get_device_properties(0).total_memory
    else:
        owner, capacity = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > capacity:
        size_text = f"{sum(p.numel() for p in decoder.parameters()):,} parameters"
        reason = (
            f"need {needed_bytes / 2**30:,.0f} GiB for weights, gradients and optimizer state, {owner} has "
            f"{capacity / 2**30:,.0f} GiB"
        )
        raise ConfigError([Problem("model", size_text, reason, "lower model.n_embd, model.n_layer or model.n_mlp")])


def _source_problems(config: Config, decoder: Decoder, source_model: LoadedModel) -> list[Problem]:
    """A problem for each key (model, normalizer, tasks, learned positions) that doesn't fit `source_model`, which
    `init_from` names.
    """
    models = ({"model": to_plain(model, whole=True)} for model in (decoder.config, source_model.decoder.config))
    problems = [
        Problem(key, value, f"{source_model.path} has {as_written(source_value)}", "set it to that")
        for key, (value, source_value) in differences(*models).items()
        # normalizers are compared below; positions without weights may change
        if effect_of(key).affects == "model" and not key.startswith(("model.normalizer", "model.position"))
    ]
    problems += _position_problems(decoder, source_model.decoder, source_model.path)
    problems += _normalizer_problems(config, decoder, source_model.decoder, config.init_from)
    if config.data.symbolic and source_model.tokenizer is not None:
        tasks = [weighted.task for weighted in config.data.tasks]
        if source_model.tokenizer.get_vocab() != symbol_tokenizer(tasks).get_vocab():
            reason = (
                f"makes sequences of symbols, and {source_model.path} knows other tokens, of a text or of more or "
                "fewer symbols"
            )
            problems.append(
                Problem("data.tasks", tasks[0].name, reason, "name what it was trained on, or drop init_from")
            )
    return problems


def _check_branch(config: Config, trained: Config, phase: int, checkpoint: Path) -> None:
    """Check that positions and training length of a branch fit the weights of `checkpoint`, trained by `trained`.

    Raises ConfigError otherwise.
    """
    with torch.device("meta"):
        decoders = [Decoder(side.model_in(phase), 1, side.data.seq_len, seed=None) for side in (config, trained)]
    if problems := _position_problems(*decoders, checkpoint) + _normalizer_problems(config, *decoders, checkpoint):
        raise ConfigError(problems)


def _position_problems(decoder: Decoder, source: Decoder, path: Path) -> list[Problem]:
    """A problem if learned positions, which are weights, differ in the decoder at `path`."""
    positions = decoder.config.position, source.config.position
    if not any(position.has_last_position for position in positions):
        return []
    if positions[0] != positions[1]:
        reason = f"{path} has {positions[1].label}, and learned positions are weights"
        return [Problem("model.position", positions[0].name, reason, "set it to that")]
    if decoder.seq_len != source.seq_len:
        reason = f"{path} has learned positions for {source.seq_len}"
        return [Problem("data.seq_len", decoder.seq_len, reason, "set it to that")]
    return []


def _normalizer_problems(config: Config, decoder: Decoder, source: Decoder, path: Path | str) -> list[Problem]:
    """Problems if a normalizer's options (except initial values), or its constants (`Normalizer.constants`), differ in
    the decoder `source` at `path`.
    """
    models = decoder, source
    labels = [model.config.normalizer.label() for model in models]
    setting = "phases[0].normalizer" if config.phases else "model.normalizer"
    for normalizer, source_normalizer in zip(*(model.normalizers() for model in models), strict=False):
        # initial values are replaced; constants are compared by their values below
        excluded_keys = {"init", *normalizer.constants()}
        options = [
            {key: value for key, value in to_plain(layer_normalizer.options).items() if key not in excluded_keys}
            for layer_normalizer in (normalizer, source_normalizer)
        ]
        if options[0] != options[1]:
            arguments = swap_arguments(config.plan[0].normalizer)
            remedy = f"convert it: lm swap {path} --to {arguments} -o OUT, then init_from=OUT; or keep {labels[1]}"
            return [Problem(setting, labels[0], f"{path} has {labels[1]}", remedy)]
        constants = source_normalizer.constants()
        if problems := [
            Problem(
                f"{setting}.{key}",
                value,
                f"is {constants[key]:g} in {path}",
                f"set it to {constants[key]:g}",
            )
            for key, value in normalizer.constants().items()
            if value != constants[key]
        ]:
            return problems
    return []


def check_trainable(config: Config, decoder: Decoder) -> None:
    """Check that parameters are trained in each phase (each choice of normalizers), in the group that the optimizer
    needs, and in each group that `optim.groups` sets. Raises ConfigError otherwise."""
    layer_shape = decoder.normalizers()[0].layer
    groups = {group_of(name, p) for name, p in decoder.named_parameters() if p.requires_grad} - {"normalizer"}
    for index, phase in enumerate(config.plan):
        normalizers = (
            make_normalizer(phase.normalizer.layer_option(layer), layer_shape) for layer in range(config.model.n_layer)
        )
        if any(True for normalizer in normalizers for _ in normalizer.parameters()):
            groups.add("normalizer")
        elif config.train_only:
            setting = f"phases[{index}].normalizer" if config.phases else "model.normalizer"
            reason = f"{phase.normalizer.label()} has no parameters to train ({setting})"
            raise ConfigError([Problem("train_only", config.train_only, reason, "drop train_only, or choose ssmax")])
    optimizer = config.optim.optimizer
    if optimizer.needs and optimizer.needs not in groups:
        reason = f"is for the parameters of the group {optimizer.needs}, and none of them is trained"
        raise ConfigError([Problem("optim.optimizer", optimizer.name, reason, "set it to adamw")])
    group_options = {name: to_plain(getattr(config.optim.groups, name)) for name in GROUPS if name not in groups}
    defaults, reason = to_plain(Group()), "no trained parameter is in this group"
    if problems := [
        Problem(f"optim.groups.{name}", options, reason, "drop it")
        for name, options in group_options.items()
        if options != defaults
    ]:
        raise ConfigError(problems)
