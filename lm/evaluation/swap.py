"""Copy a trained model with another normalizer (`lm swap`), and measure how the swap changes it.

It measures the loss, next-token distributions and the normalizers' factors on attention scores.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lm.attention.options import Options
from lm.config.load import command_overrides, merge, parse_config, to_yaml
from lm.config.tree import Config
from lm.config.yaml_text import yaml_override
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluate import open_device, open_store, run_or_text_config
from lm.evaluation.held_out import SwapMeasurement
from lm.files import json_bytes, new_folder
from lm.machine import command_line
from lm.model.decoder import Decoder
from lm.model.spec import check_plugin_causality, count_parameters
from lm.model.swapped import score_factors_by_length, with_normalizer
from lm.plain import Plain, to_plain
from lm.plugins import PLUGINS
from lm.runs.checkpoints import CHECKPOINT_FORMAT, save_checkpoint
from lm.runs.evaluations import Evaluation
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    TOKENIZER_FILE,
    checkpoint_path,
    write_files,
)
from lm.runs.loading import LoadedModel, load
from lm.runs.record import arm_hash

SCORE_FACTOR_LENGTHS = (16, 256)  # tokens, as in prompts, at which the factor on the scores is printed
# ratio of the new to the old factor on the scores, or of the old to the new one, above which a warning is given
MAX_SCORE_FACTOR_RATIO = 2.0


@dataclass(frozen=True, eq=False)
class SwapResult:
    """This class holds a swap's evaluation, its file, and text to print."""

    evaluation: Evaluation
    evaluation_file: Path
    description_lines: list[str]
    notes: list[str]
    warning: str


def swap_run(
    source: Path,
    checkpoint: str,
    normalizer: str,
    init: str | None,
    destination: Path,
    overrides: list[str],
    text_configs: Sequence[Path] = (),
) -> SwapResult:
    """Write a copy of a trained model with another normalizer to the run folder `destination`, which holds weights
    only.

    Both models are measured on the same held-out tokens. The result is written to `destination`'s evaluations/ and
    returned.

    Args:
        source: a run folder, a checkpoint or an export.
        checkpoint: the checkpoint of a run folder: `last`, `best` or a step.
        normalizer: name of the new normalizer.
        init: initial values of the new parameters: `match`, `unit` (docs/swapping.md) or a number; None: by `overrides`
            or default.
        overrides: changes `key=value` of the new normalizer's options and of the evaluation.
        text_configs: configurations of the text to measure on, for a model without a training run.

    Raises LMError: there is no model, its normalizer can't be swapped, its data are not those of training, or
    `destination` is not empty.
    """
    with new_folder(destination) as folder:
        model = load(source, checkpoint)
        base = run_or_text_config(model, text_configs)
        with PLUGINS.trust_user_text():
            config = _swapped_config(base, model.decoder.config.normalizer, normalizer, init, destination, overrides)
        check_plugin_causality(config)
        old, new = model.decoder, with_normalizer(model.decoder, config.model.normalizer)
        model, store = open_store(model, config, text_configs)
        # an export has no environment
        environment = {**model.environment, "data_fingerprint": model.metadata["data_fingerprint"]}
        measurement, device = SwapMeasurement(config, store, old), open_device(config, environment)
        old.to(device.device), new.to(device.device)
        facts: dict[str, Plain] = {"from": str(model.path), "arm": arm_hash(to_plain(base), environment)}
        facts["normalizer"] = old.config.normalizer.label()
        facts["init"] = getattr(config.model.normalizer, "init", None)
        notes = _closing_notes(old, new, config, destination, facts["init"])
        evaluation = measurement.evaluate(
            new, device, model.step_tokens_and_data["step"], model.step_tokens_and_data["tokens_seen"]
        )
        evaluation_file = destination / measurement.write(folder, evaluation).relative_to(folder)
        _write_run(folder, config, model, new.cpu(), {**environment, "command": command_line(), "swap": facts})
    description_lines, warning = describe_swap(old, new, evaluation.step)
    return SwapResult(evaluation, evaluation_file, description_lines, notes, warning)


def _closing_notes(old: Decoder, new: Decoder, config: Config, destination: Path, init: Plain) -> list[str]:
    """Return lines to print after the tables of a swap: facts about the new normalizers, and the command to
    go on with.
    """
    notes, label = [], new.config.normalizer.label()
    unmatched = [str(layer) for layer, each in enumerate(old.normalizers()) if each.scale_by_position() is None]
    if init == "match" and unmatched:
        layers = f" in layers {', '.join(unmatched)}" if len(unmatched) < len(old.normalizers()) else ""
        notes.append(
            f"note: {old.config.normalizer.label()} has no factor on q.k{layers} that {label} could match: parameters "
            "have their initial values; lm train ... train_only=normalizer trains them alone"
        )
    options = config.model.normalizer
    values = {name: to_plain(options)[name] for name in ("name", *options.non_defaults())}
    changes = [yaml_override("model.normalizer", values), *["phases=[]"] * bool(config.phases)]
    command = f"lm train CONFIG {shlex.join(changes)} init_from={destination} name=..."
    return [*notes, f"{destination}: weights alone; go on with: lm eval {destination}, or {command}"]


def describe_swap(old: Decoder, new: Decoder, trained_steps: int) -> tuple[list[str], str]:
    """Return lines to print on a swap after `trained_steps` training steps, and a warning.

    The lines give both normalizers, the new parameters with one value per head, and the factor on q.k / sqrt(D) before
    and after. The factor is given at short lengths and at the training length. Layers whose scores are no multiple of
    q.k / sqrt(D) have no factor.

    The warning names factors that changed by more than `MAX_SCORE_FACTOR_RATIO` times; it is empty if there are none.
    """
    lines = [f"{old.config.normalizer.label()} -> {new.config.normalizer.label()}, step {trained_steps}"]
    parameters: dict[str, list[Tensor]] = {}
    for normalizer in new.normalizers():
        for name, parameter in normalizer.named_parameters():
            if parameter.shape == (normalizer.layer.n_head,):
                parameters.setdefault(name, []).append(parameter.detach().cpu())
    lines += [f"{name} = {_mean_and_range_text(torch.cat(values))}" for name, values in parameters.items()]
    lengths = sorted({min(length, old.seq_len) for length in (*SCORE_FACTOR_LENGTHS, old.seq_len)})
    # (lengths, 2, layers, H)
    factors = torch.stack([score_factors_by_length(model, lengths) for model in (old, new)], 1)
    layers = factors.isfinite().all(-1).flatten(0, 1).all(0).nonzero().flatten().tolist()
    layers_note = f", layers {', '.join(map(str, layers))}" if len(layers) < len(old.normalizers()) else ""
    deviations = []
    for length, (before, after) in zip(lengths, factors[:, :, layers], strict=True) if layers else ():
        change = f"{_mean_and_range_text(before)} -> {_mean_and_range_text(after)}"
        lines.append(f"factor on the scores at n = {length:,}{layers_note}: {change}")
        ratios = (after / before).flatten()
        ratio = float(ratios[ratios.log().abs().argmax()])
        if not 1 / MAX_SCORE_FACTOR_RATIO <= ratio <= MAX_SCORE_FACTOR_RATIO:
            deviations.append(f"{ratio:.2g} times the old one at n = {length:,}")
    warning = (
        f"warning: the factor on the scores is {', '.join(deviations)}: documents of such lengths may get much worse; "
        "measure them by eval.swap_lengths; docs/swapping.md says which options keep the factor"
    )
    return lines, warning if deviations else ""


def _mean_and_range_text(values: Tensor) -> str:
    """Return text with the mean of values by layer and head, and their range if they differ."""
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return f"{values.mean():.3g}" + f" ({low} to {high} over layers and heads)" * (low != high)


def _swapped_config(
    base: Config, old: Options, name: str, init: str | None, destination: Path, overrides: list[str]
) -> Config:
    """Return the configuration of the new run folder. Imports the plugins that `name` or `overrides` name."""
    chosen_init = [f"model.normalizer.init={init}"] if init is not None else []
    changes = command_overrides("swap", [*overrides, *chosen_init])
    user_options = changes.get("model", {}).get("normalizer", {})
    if not isinstance(user_options, dict) or "name" in user_options:
        reason = f"the new normalizer is --to {name}"
        raise ConfigError([Problem("model.normalizer", user_options, reason, "set its options by their keys")])
    plain = merge({**to_plain(base), "experiment": {}}, {"model": {"normalizer": to_plain(old)}})
    plain = merge(merge(plain, {"model": {"normalizer": {"name": name}}}), changes)
    fields = {"name": destination.name, "runs": str(destination.parent), "resume": "", "train_only": None, "phases": []}
    config = parse_config({**plain, **fields, "init_from": "", "branch_from": ""})
    normalizer = config.model.normalizer
    default_init = getattr(type(normalizer), "init", None)
    if "init" not in user_options and default_init is not None:  # not that of an old one of the same name
        config.model.normalizer = replace(normalizer, init=default_init)
    return config


def _write_run(
    folder: Path, config: Config, model: LoadedModel, decoder: Decoder, environment: dict[str, Plain]
) -> None:
    """Write a run folder with one checkpoint of weights, from which no run can be resumed."""
    metadata = {**model.metadata, "format": CHECKPOINT_FORMAT, "config": to_yaml(config), "phase": 0, "best": None}
    metadata["plugins"] = PLUGINS.source_ids(config.normalizer_names)
    path = checkpoint_path(folder / CHECKPOINTS_FOLDER, model.metadata["step"])
    save_checkpoint({"state_dict": decoder.state_dict(), "lm": metadata}, path)
    environment = {**environment, "symbolic": config.data.symbolic, "parameters": count_parameters(decoder)}
    files = {CONFIG_FILE: to_yaml(config).encode(), ENVIRONMENT_FILE: json_bytes(environment)}
    write_files(
        folder, files | ({TOKENIZER_FILE: (model.folder / TOKENIZER_FILE).read_bytes()} if model.tokenizer else {})
    )
