"""This module checks a run before its data are prepared, and makes the start of each phase: from random weights,
another run's weights, or a checkpoint.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lm.config.model_config import Position
from lm.config.normalizers import swap_arguments
from lm.config.training_config import ParameterGroup
from lm.config.tree import Config, config_differences, key_effect
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError, value_text
from lm.model.decoder import Decoder, parameter_group
from lm.model.device import resolve_device
from lm.model.spec import ModelSpec, check_plugin_causality, with_steps
from lm.model.swapped import rebuild_decoder
from lm.plain import Plain, to_plain
from lm.runs.checkpoints import weights_sha256
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    TOKENIZER_FILE,
    check_log,
    checkpoint_path,
    checkpoint_paths,
    checkpoint_step,
    owns_checkpoint,
    read_environment,
)
from lm.runs.loading import LoadedModel, check_finite, load
from lm.runs.record import arm_hash, tokens_before_run, training_seeds
from lm.runs.resume_checks import resume_problems, trained_config
from lm.training.optimizers import PARAMETER_GROUP_NAMES, freeze, saved_optimizer_state

# ---------------------------------------------------------------- checks that need no data


def check_before_preparation(
    config: Config, checkpoint: Path | None, checkpoint_content: dict[str, object] | None
) -> tuple[Config, LoadedModel | None]:
    """Check everything that needs no data, before the preparation of the data takes minutes.

    Return the configuration and, for a new run, the model that `init_from` names, else None. If checkpoint or model
    give the vocabulary size, `tokens_per_parameter` of the returned configuration is converted to a number of steps.

    Args:
        checkpoint: the path of the checkpoint that the run resumes or branches from; None: the run starts at step
            0.
        checkpoint_content: the content of `checkpoint`.

    Raises:
        ConfigError: the device is missing, nothing is trained, the configuration doesn't fit the checkpoint or the
            weights, or a user's normalizer sees later tokens.
        RunError: the model can't be loaded, or a package that an evaluation needs is missing.
    """
    resolve_device(config)
    if checkpoint:
        metadata = checkpoint_content["lm"]
        trained = trained_config(metadata, checkpoint)
        config = with_steps(config, metadata["vocab_size"])
        is_branch = not owns_checkpoint(config.run_folder, checkpoint)
        problems = resume_problems(config, trained, metadata, checkpoint, is_branch)
        if is_branch and not problems:
            shapes = (_valueless_decoder(side, metadata["phase"]) for side in (config, trained))
            problems = _changed_option_problems(config, *shapes, checkpoint)
        if is_branch and metadata["step"] >= config.trainer.max_steps:
            reason = f"leaves no step after step {metadata['step']} of {checkpoint} (branch_from)"
            remedy = "raise it; it counts all steps from the first"
            problems = [Problem("trainer.max_steps", config.trainer.max_steps, reason, remedy)]
        if problems:
            raise ConfigError(problems)
    _check_trainable(config)
    check_plugin_causality(config)
    if checkpoint or not config.init_from:
        return config, None
    initial_model, shape = load(config.init_from), _valueless_decoder(config, 0)
    models = (
        {"model": to_plain(model, include_omittable_keys=True)}
        for model in (shape.config, initial_model.decoder.config)
    )
    problems = [
        Problem(key, value, f"{initial_model.path} has {value_text(initial_value)}", "set it to that")
        for key, (value, initial_value) in config_differences(*models).items()
        # normalizers are compared below; positions without weights may change
        if key_effect(key).affects == "model" and not key.startswith(("model.normalizer", "model.position"))
    ]
    if problems := problems or _changed_option_problems(config, shape, initial_model.decoder, initial_model.path):
        raise ConfigError(problems)
    return with_steps(config, initial_model.spec.vocab_size), initial_model


def _valueless_decoder(config: Config, phase: int) -> Decoder:
    """Return a phase's decoder on the meta device, where weights have shapes but no values. Its vocabulary has size 1,
    as the true size is not known before the data are prepared.
    """
    with torch.device("meta"):
        return Decoder(config.model_in_phase(phase), 1, config.data.seq_len, seed=None)


def _check_trainable(config: Config) -> None:
    """Check that parameters are trained in each phase, and in each group that `optim.groups` sets. Raises ConfigError
    otherwise.
    """
    problems, groups = [], set()
    for index, phase in enumerate(config.phases_or_default):
        freeze(shape := _valueless_decoder(config, index), config.train_only)
        trained = {parameter_group(name, p) for name, p in shape.named_parameters() if p.requires_grad}
        groups |= trained
        if not trained:
            setting = f"phases[{index}].normalizer" if config.phases else "model.normalizer"
            reason = f"{phase.normalizer.label()} has no parameters to train ({setting})"
            problems.append(Problem("train_only", config.train_only, reason, "drop train_only, or choose ssmax"))
    for name in PARAMETER_GROUP_NAMES:
        if name not in groups and (options := getattr(config.optim.groups, name)) != ParameterGroup():
            reason = "no trained parameter is in this group"
            problems.append(Problem(f"optim.groups.{name}", to_plain(options), reason, "drop it"))
    if problems:
        raise ConfigError(problems)


def _changed_option_problems(
    config: Config, decoder: Decoder, saved_decoder: Decoder, path: Path | str
) -> list[Problem]:
    """Return problems if `decoder` differs from the decoder `saved_decoder` at `path` in its table of learned positions
    or in options of a normalizer. Options that set initial values (`init`) may differ. Constants that may depend on the
    training length (`Normalizer.length_constants`) are compared by their values, not by how options state them.
    """
    problems, positions = [], (decoder.config.position, saved_decoder.config.position)
    is_learned = any(position.has_length_limit for position in positions)
    if is_learned and (positions[0] != positions[1] or decoder.seq_len != saved_decoder.seq_len):
        reason = (
            f"{path} has {positions[1].label} for {saved_decoder.seq_len} tokens, and learned positions are weights"
        )
        problems.append(Problem("model.position", positions[0].name, reason, "set it and data.seq_len to that"))
    setting = "phases[0].normalizer" if config.phases else "model.normalizer"
    for pair in zip(decoder.normalizers(), saved_decoder.normalizers(), strict=True):
        options = [
            to_plain(normalizer.options, include_omittable_keys=True) | normalizer.length_constants()
            for normalizer in pair
        ]
        if changes := {
            key: (value, old)
            for key, (value, old) in config_differences({"normalizer": options[0]}, {"normalizer": options[1]}).items()
            if not key.endswith(".init")
        }:
            arguments = swap_arguments(config.phases_or_default[0].normalizer)
            remedy = f"set it to that, or convert it: lm swap {path} --to {arguments} -o OUT, then init_from=OUT"
            problems += [
                Problem(key.replace("normalizer", setting, 1), value, f"{path} has {value_text(old)}", remedy)
                for key, (value, old) in changes.items()
            ]
            break
    return problems


# ---------------------------------------------------------------- the state of a run


@dataclass(frozen=True)
class BestStep:
    """The best step has the lowest loss (nats per target) so far on the validation sequences that choose the best
    checkpoint. The hash of these sequences tells whether losses can be compared.
    """

    step: int
    loss: float
    sequences_sha256: str


@dataclass
class RunState:
    """The run state is stored as metadata in checkpoints, beside weights and optimizer state. It is equal on all ranks,
    except `elapsed_s`.
    """

    best: BestStep | None = None  # the lowest validation so far
    # loss (nats) and targets over all ranks since the last logged line
    nll_since_line: float = 0.0
    targets_since_line: int = 0
    elapsed_s: float = 0.0  # seconds of training

    @classmethod
    def from_metadata(cls, metadata: dict[str, Plain], checkpoints_folder: Path) -> "RunState":
        """Return the run state in a checkpoint's `metadata`. Its `best` is None if
        `checkpoints_folder` no longer has the checkpoint of the best step.
        """
        best = metadata["best"] and BestStep(**metadata["best"])
        if best and not checkpoint_path(checkpoints_folder, best.step).exists():  # deleted as a run went back
            best = None
        return cls(**{spec.name: metadata[spec.name] for spec in fields(cls)} | {"best": best})

    def take_mean_loss(self) -> float:
        """Return the mean loss (nats per target) over all ranks since the last call, and reset the sums."""
        mean, self.nll_since_line, self.targets_since_line = self.nll_since_line / self.targets_since_line, 0.0, 0
        return mean


@dataclass
class PhaseStart:
    """A phase start holds everything from which the training of a phase begins. A phase is a stretch of steps of a run
    that has its own normalizers, positions and sequence length.
    """

    step: int  # optimizer steps done
    phase: int
    # on the CPU, with the weights to train from; where training continues, Lightning loads them into it
    decoder: Decoder
    run_state: RunState = field(default_factory=RunState)
    checkpoint_content: dict[str, object] | None = None  # of the checkpoint from which training continues
    replaced_decoder: Decoder | None = (
        None  # the decoder that a swap at this step replaced, until its effect is measured
    )


# ---------------------------------------------------------------- a new run, from random weights or those of another
# run (init_from)


EnvironmentFacts = dict[str, Plain]  # entries of environment.json


def start_new_run(
    config: Config, store: Store, initial_model: LoadedModel | None = None
) -> tuple[PhaseStart, EnvironmentFacts, list[str]]:
    """Return the start of a new run, facts on its initial weights for environment.json ({} for random weights), and
    notes to print.

    The facts have one entry, `started_from`, with `path`, `step`, `tokens` and `normalizer` of the source model, and
    `weights`, 12 digits of its weights' sha256. The entry also has `arm` and `seeds` of the run that trained the source
    model (`lm.runs.record`). If no run trained it, `arm` equals `weights`, and `seeds` is empty. If that run started
    from trained weights itself, `tokens_before` is the number of tokens that those weights had seen.

    initial_model: the model that `init_from` names; its decoder is moved to the meta device to free memory.

    Raises ConfigError: the data's tokenizer is not the tokenizer of `initial_model`.
    """
    vocab_size = initial_model.spec.vocab_size if initial_model else store.vocab_size
    if initial_model:
        _check_tokenizer(config, store, initial_model)
    decoder = Decoder(config.model_in_phase(0), vocab_size, config.data.seq_len, config.seed)
    freeze(decoder, config.train_only)
    start = PhaseStart(0, 0, decoder)
    if initial_model is None:
        return start, {}, []
    decoder.load_state_dict(initial_model.decoder.state_dict())
    initial_model.decoder.to("meta")  # or the weights would be held twice during training
    origin = {
        "path": str(initial_model.path),
        "step": initial_model.step_tokens_and_data["step"],
        "tokens": initial_model.step_tokens_and_data["tokens_seen"],
        "normalizer": initial_model.decoder.config.normalizer.label(),
        "weights": weights_sha256(decoder.state_dict())[:12],
    }
    if earlier_tokens := tokens_before_run(initial_model.environment):
        origin["tokens_before"] = earlier_tokens
    origin |= {"arm": origin["weights"], "seeds": []}
    if initial_model.config:
        run = to_plain(initial_model.config), initial_model.environment
        origin |= {"arm": arm_hash(*run), "seeds": list(training_seeds(*run))}
    notes = [f"weights from {initial_model.path} (step {origin['step']:,}, {origin['tokens']:,} tokens)"]
    notes += _position_and_length_notes(initial_model.decoder.config.position, initial_model.decoder.seq_len, config, 0)
    if not origin["tokens"] or store.fingerprint != initial_model.step_tokens_and_data["data_fingerprint"]:
        known = "on other data or another split" if origin["tokens"] else "on text that is not known"
        notes.append(f"note: those weights were trained {known}: what is held out here they may have seen")
    return start, {"started_from": origin}, notes


def _position_and_length_notes(position: Position, length: int, config: Config, phase: int) -> list[str]:
    """Return notes to print if a phase has another position encoding or training length than its initial weights, which
    were trained with `position` and `length`."""
    notes, new_position = [], config.model_in_phase(phase).position
    if position != new_position:
        notes.append(f"note: positions change: {position.label} -> {new_position.label}")
    if length != config.data.seq_len:
        lengths = f"{length:,} to {config.data.seq_len:,}"
        notes.append(f"note: the training length, which n and m go by, changes from {lengths}")
    return notes


def _check_tokenizer(config: Config, store: Store, model: LoadedModel) -> None:
    """Check that the data's tokenizer is the model's; the model may have more token ids than its tokenizer. Raises
    ConfigError otherwise.
    """

    def encoding_rules(tokenizer: Tokenizer) -> dict[str, Plain]:
        rules = json.loads(tokenizer.to_str())
        return {name: part for name, part in rules.items() if name not in ("truncation", "padding")}

    size, tokenizer = model.decoder.vocab_size, model.tokenizer
    if store.vocab_size > size or (tokenizer is None and store.vocab_size < size):
        reason = f"makes a vocabulary of {store.vocab_size}, {model.path} has {size}"
    elif tokenizer is not None and encoding_rules(tokenizer) != encoding_rules(store.tokenizer()):
        reason = f"is another tokenizer than that of {model.path}: its token ids would stand for other text"
    else:
        return
    file, remedy = model.folder / TOKENIZER_FILE, "use the one it was trained with"
    if file.is_file() and not config.data.symbolic:
        remedy = f"set data.tokenizer={{name: file, path: {file}}}"
    raise ConfigError([Problem("data.tokenizer", config.data.tokenizer.name, reason, remedy)])


# ---------------------------------------------------------------- a resumed run or a branch, or a run's next phase


def start_from_checkpoint(config: Config, checkpoint_content: dict[str, object]) -> PhaseStart:
    """Return the start of training from a checkpoint. If it was saved at the end of a phase, the start has the next
    phase's normalizers and positions.
    """
    metadata = checkpoint_content["lm"]
    phase = config.phase_index(metadata["step"])
    decoder = Decoder(config.model_in_phase(metadata["phase"]), metadata["vocab_size"], config.data.seq_len, seed=None)
    state = RunState.from_metadata(metadata, config.run_folder / CHECKPOINTS_FOLDER)
    start = PhaseStart(metadata["step"], phase, decoder, state, checkpoint_content)
    if (model := config.model_in_phase(phase)) != decoder.config:
        decoder.load_state_dict(checkpoint_content["state_dict"])
        is_swap = model.normalizer != decoder.config.normalizer
        start.decoder, start.replaced_decoder = rebuild_decoder(decoder, model, is_swap), decoder
    freeze(start.decoder, config.train_only)
    return start


def resume_or_branch(
    config: Config, store: Store, checkpoint_content: dict[str, object], path: Path
) -> tuple[PhaseStart, EnvironmentFacts, list[str]]:
    """Return the start of a run from a checkpoint, and notes to print. The second item is what environment.json says of
    the run that saved the checkpoint. `check_before_preparation` has compared the configurations.

    checkpoint_content, path: content and path of the checkpoint.

    Raises:
        ConfigError: the data or a plugin's code differ from what the checkpoint was trained with.
        RunError: the checkpoint holds weights alone, or weights that aren't finite; the log was altered, or
            environment.json is missing.
    """
    metadata, run = checkpoint_content["lm"], path.resolve().parent.parent
    if saved_optimizer_state(checkpoint_content) is None:
        reason = "holds weights alone and can't be resumed; start a new run from them"
        raise RunError(f"{path}: {reason}: init_from={path.parent.parent} name=...")
    trained = trained_config(metadata, path)
    remedy = "or start a new run from its weights: init_from=... name=..."
    if metadata["data_fingerprint"] != store.fingerprint:
        reason = f"{path} was trained on tokens with fingerprint {metadata['data_fingerprint'][:16]}"
        remedy = f"bring that text and tokenizer back, {remedy}"
        raise ConfigError([Problem("data", store.fingerprint[:16], reason, remedy)])
    for name, old_code, new_code in ModelSpec.from_training(trained, metadata).changed_plugins():
        if name in config.normalizer_names:
            reason = f"its code is {new_code}, {path} was trained with {old_code}"
            raise ConfigError([Problem("model.normalizer", name, reason, f"bring that code back, {remedy}")])
    check_finite(checkpoint_content["state_dict"], path)
    facts, step = read_environment(run), metadata["step"]
    start, notes = start_from_checkpoint(config, checkpoint_content), []
    old_steps, steps = trained.trainer.max_steps, config.trainer.max_steps
    # a run at its end planned no rate for a further step
    rates = trained.lr_at(min(step, old_steps - 1)), config.lr_at(step)
    if not math.isclose(*rates, rel_tol=0.01):
        factor = f", by a factor of {rates[1] / rates[0]:.3g}" if rates[0] else ""
        notes = [f"note: the learning rate jumps from {rates[0]:.4g} to {rates[1]:.4g} at step {step + 1}{factor}"]
    if owns_checkpoint(config.run_folder, path):
        check_log(run, step)
        if any(checkpoint_step(other) > step for other in checkpoint_paths(path.parent)):
            later = "checkpoints, metrics and evaluations of later steps are deleted"
            notes.insert(0, f"note: back to step {step}; {later}")
        return start, facts, [f"goes on from step {step:,} of {steps:,}: {path}", *notes]
    start.run_state.elapsed_s = 0.0  # the new run counts its own steps alone
    earlier = facts | {"starts": [entry for entry in facts.get("starts", []) if entry["step"] < step]}
    branched_from = {
        "path": str(path),
        "step": step,
        "tokens": metadata["tokens"],
        "arm": arm_hash(to_plain(trained), earlier),
    }
    notes += _position_and_length_notes(
        trained.model_in_phase(metadata["phase"]).position, trained.data.seq_len, config, metadata["phase"]
    )
    kept = {name: facts[name] for name in ("precision", "compile", "started_from") if name in facts}
    note = f"branches from {path} at step {step:,}, with its optimizer state"
    return start, kept | {"branched_from": branched_from}, [note, *notes]
