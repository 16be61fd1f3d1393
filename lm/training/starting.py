"""The start of a phase of a run, from random weights, another run's weights, or a checkpoint; with checks that they fit
the run.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from tokenizers import Tokenizer

from lm.config.model_config import Position
from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.model.decoder import Decoder
from lm.model.spec import ModelSpec
from lm.model.swapped import with_model
from lm.runs.checkpoints import best_step, load_checkpoint, weights_sha256
from lm.runs.folder import CHECKPOINTS, TOKENIZER, is_own, read_environment, step_of, step_path, step_paths
from lm.runs.loading import LoadedModel, check_finite
from lm.runs.record import arm, seeds, tokens_before
from lm.runs.same_run import trained_config
from lm.schema import Plain, to_plain
from lm.training.optimizers import freeze, saved_state


@dataclass(frozen=True)
class Best:
    """The lowest loss (nats per target) so far on validation sequences that choose the best checkpoint, with its step
    and the hash of these sequences."""

    step: int
    loss: float
    sequences_sha256: str


@dataclass
class RunState:
    """The state of a run besides weights and optimizer, kept as metadata of checkpoints; equal on all ranks, except
    time.
    """

    best: Best | None = None  # the lowest validation so far
    skipped: int = 0  # steps whose update was skipped
    skipped_in_a_row: int = 0  # number of consecutive skipped steps up to the last step
    # nll_since_line, z_loss_since_line, targets_since_line: losses (nats) and targets over all ranks since the last
    # logged line
    nll_since_line: float = 0.0
    z_loss_since_line: float = 0.0
    targets_since_line: int = 0
    elapsed_s: float = 0.0  # seconds of training

    @classmethod
    def from_plain(cls, metadata: dict[str, Plain], folder: Path) -> "RunState":
        """The run state in a checkpoint's `metadata`; without `best` if `folder` no longer has the checkpoint of the
        best step.
        """
        best = metadata["best"] and Best(**metadata["best"])
        # deleted as a run went back
        if best and not step_path(folder, best.step).exists() and best_step(folder) != best.step:
            best = None
        return cls(**{spec.name: metadata[spec.name] for spec in fields(cls)} | {"best": best})

    def is_best(self, step: int) -> bool:
        return self.best is not None and self.best.step == step

    def count_step(self, nll: float, z_loss: float, targets: int) -> None:
        """Add a step that was not skipped to the sums since the last logged line; `nll`, `z_loss`: sums over its
        targets (nats).
        """
        self.skipped_in_a_row = 0
        self.nll_since_line += nll
        self.z_loss_since_line += z_loss
        self.targets_since_line += targets

    def take_mean_losses(self) -> tuple[float, float]:
        """Mean loss and z-loss (nats per target) since the last call, over all ranks; NaN if every step was skipped.
        Resets the sums.
        """
        targets = self.targets_since_line or math.nan
        means = self.nll_since_line / targets, self.z_loss_since_line / targets
        self.nll_since_line, self.z_loss_since_line, self.targets_since_line = 0.0, 0.0, 0
        return means


@dataclass
class PhaseStart:
    """The start of a phase, a part of a run with its own normalizers, positions and sequence length."""

    step: int  # optimizer steps done
    phase: int
    # on the CPU, with the weights to train from; where training continues, Lightning loads them into it
    decoder: Decoder
    state: RunState = field(default_factory=RunState)
    content: dict[str, object] | None = None  # of the checkpoint from which training continues
    replaced_decoder: Decoder | None = (
        None  # the decoder that a swap at this step replaced, until its effect is measured
    )


# ---------------------------------------------------------------- a new run, from random weights or those of another
# run (init_from)


def start_new_run(
    config: Config, store: Store, source: LoadedModel | None = None
) -> tuple[PhaseStart, dict[str, Plain], list[str]]:
    """The start of a new run, facts on its initial weights for environment.json ({} for random weights), and notes to
    print.

    The facts have one entry, `started_from`, with `path`, `step`, `tokens` and `normalizer` of the source model, and
    `weights`, 12 digits of its weights' sha256. It also has `arm` and `seeds` of the run that trained the model
    (lm.runs.record); if no run did, `arm` is `weights`, and `seeds` is empty. `tokens_before` is the number of tokens
    on which the initial weights of that run were trained, if any.

    source: the model that `init_from` names; its decoder is moved to the meta device to free memory.

    Raises ConfigError: the data's tokenizer is not the tokenizer of `source`.
    """
    if source and (problems := _tokenizer_problems(config, store, source)):
        raise ConfigError(problems)
    vocab_size = source.spec.vocab_size if source else store.vocab_size
    decoder = Decoder(config.model_in(0), vocab_size, config.data.seq_len, config.seed)
    freeze(decoder, config.train_only)
    start = PhaseStart(0, 0, decoder)
    if source is None:
        return start, {}, []
    decoder.load_state_dict(source.decoder.state_dict())
    source.decoder.to("meta")  # or the weights would be held twice during training
    origin = {
        "path": str(source.path),
        "step": source.stamp["step"],
        "tokens": source.stamp["tokens_seen"],
        "normalizer": source.decoder.config.normalizer.label(),
        "weights": weights_sha256(decoder.state_dict())[:12],
    }
    if earlier_tokens := tokens_before(source.environment):
        origin["tokens_before"] = earlier_tokens
    unknown_note = "note: what those weights were trained on is not known: what is held out here they may have seen"
    if source.config is None:
        origin |= {"arm": origin["weights"], "seeds": []}
        return start, {"started_from": origin}, [f"weights from {source.path}", unknown_note]
    source_run = to_plain(source.config), source.environment
    notes = [f"weights from {source.path} (step {origin['step']:,}, {origin['tokens']:,} tokens)"]
    notes += _change_notes(
        (source.decoder.config.position, decoder.config.position), (source.decoder.seq_len, decoder.seq_len)
    )
    if origin["tokens"] == 0:  # a swap of a model without a training run
        notes.append(unknown_note)
    elif store.fingerprint != source.stamp["data_fingerprint"]:
        notes.append(
            "note: those weights were trained on other data or another split: what is held out here they may have seen"
        )
    return start, {"started_from": {**origin, "arm": arm(*source_run), "seeds": list(seeds(*source_run))}}, notes


def _change_notes(positions: tuple[Position, Position], lengths: tuple[int, int]) -> list[str]:
    """Notes on what trained weights are given anew: positions and training length, each before and after."""
    notes = []
    if positions[0] != positions[1]:
        notes.append(f"note: positions change: {positions[0].label} -> {positions[1].label}")
    if lengths[0] != lengths[1]:
        notes.append(f"note: the training length, which n and m go by, changes from {lengths[0]:,} to {lengths[1]:,}")
    return notes


def _encoding_rules(tokenizer: Tokenizer) -> dict[str, Plain]:
    """The settings of a tokenizer that determine the token ids of a text."""
    return {
        name: part for name, part in json.loads(tokenizer.to_str()).items() if name not in ("truncation", "padding")
    }


def _tokenizer_problems(config: Config, store: Store, loaded_model: LoadedModel) -> list[Problem]:
    """A list with a problem if the data's tokenizer is not the model's, else []; the model may have more token ids than
    its tokenizer.
    """
    has_tokenizer = loaded_model.tokenizer is not None
    if store.vocab_size > loaded_model.decoder.vocab_size or (
        not has_tokenizer and store.vocab_size < loaded_model.decoder.vocab_size
    ):
        reason = f"makes a vocabulary of {store.vocab_size}, {loaded_model.path} has {loaded_model.decoder.vocab_size}"
    elif has_tokenizer and _encoding_rules(loaded_model.tokenizer) != _encoding_rules(store.tokenizer()):
        reason = f"is another tokenizer than that of {loaded_model.path}: its token ids would stand for other text"
    else:
        return []
    file = loaded_model.folder / TOKENIZER
    remedy = (
        f"set data.tokenizer={{name: file, path: {file}}}"
        if file.is_file()
        else "use the tokenizer it was trained with"
    )
    return [Problem("data.tokenizer", config.data.tokenizer.name, reason, remedy)]


# ---------------------------------------------------------------- a resumed run, or its next phase


def start_from_checkpoint(config: Config, checkpoint: dict[str, object]) -> PhaseStart:
    """The start of training from a checkpoint; if it was saved at the end of a phase, with the next phase's normalizers
    and positions.
    """
    metadata = checkpoint["lm"]
    phase = config.phase_at(metadata["step"])
    decoder = Decoder(config.model_in(metadata["phase"]), metadata["vocab_size"], config.data.seq_len, seed=None)
    state = RunState.from_plain(metadata, config.run_folder / CHECKPOINTS)
    start = PhaseStart(metadata["step"], phase, decoder, state, checkpoint)
    if (model := config.model_in(phase)) != decoder.config:
        decoder.load_state_dict(checkpoint["state_dict"])
        start.decoder, start.replaced_decoder = with_model(decoder, model), decoder
    freeze(start.decoder, config.train_only)
    return start


def branch(config: Config, store: Store, path: Path) -> tuple[PhaseStart, dict[str, Plain], list[str]]:
    """The start of a new run from an earlier run's checkpoint at `path`, facts on the earlier run for environment.json,
    notes to print.

    `lm.training.before_training` has checked that the configurations of the two runs differ only where branching allows
    it.

    Raises ConfigError or RunError where `check_resume` does, and RunError if checkpoint or environment.json of the
    earlier run are missing, damaged, or of different runs.
    """
    checkpoint, run = load_checkpoint(path), path.resolve().parent.parent
    notes, metadata = check_resume(config, store, checkpoint, path), checkpoint["lm"]
    run_facts = read_environment(run)
    old_facts = {
        **run_facts,
        "starts": [entry for entry in run_facts.get("starts", []) if entry["step"] < metadata["step"]],
    }
    new_facts = {name: run_facts[name] for name in ("precision", "compile") if name in run_facts}
    trained, phase = trained_config(metadata, path), metadata["phase"]
    arm_id = arm(to_plain(trained), old_facts)
    new_facts["branched_from"] = {
        "path": str(path),
        "step": metadata["step"],
        "tokens": metadata["tokens"],
        "arm": arm_id,
    }
    notes += _change_notes(
        (trained.model_in(phase).position, config.model_in(phase).position), (trained.data.seq_len, config.data.seq_len)
    )
    branch_note = f"branches from {path} at step {metadata['step']:,}, with its optimizer state"
    start = start_from_checkpoint(config, checkpoint)
    start.state.elapsed_s = 0.0  # the new run counts its own steps alone
    return start, {**new_facts, "started_from": run_facts.get("started_from")}, [branch_note, *notes]


def check_resume(config: Config, store: Store, checkpoint: dict[str, object], path: Path) -> list[str]:
    """Check that a run can continue from a checkpoint; return notes to print. Configurations were compared by
    `check_before_data`.

    Raises:
        ConfigError: the data or a plugin's code differ from those of the checkpoint.
        RunError: the checkpoint holds weights alone, or weights that aren't finite.
    """
    metadata = checkpoint["lm"]
    if saved_state(checkpoint) is None:
        raise RunError(
            f"{path}: holds weights alone and can't be resumed; start a new run from them: "
            f"init_from={path.parent.parent} name=..."
        )
    saved_config = trained_config(metadata, path)
    if metadata["data_fingerprint"] != store.fingerprint:
        reason = f"{path} was trained on tokens with fingerprint {metadata['data_fingerprint'][:16]}"
        remedy = "bring that text and tokenizer back, or start a new run from its weights: init_from=... name=..."
        raise ConfigError([Problem("data", store.fingerprint[:16], reason, remedy)])
    spec = ModelSpec.from_training(saved_config, metadata)
    keys_by_name = {name: key for key, name in reversed(config.plugin_names_by_key.items())}
    for name, old_code, new_code in spec.changed_plugins():
        if name in keys_by_name:
            remedy = "bring that code back, or start a new run from its weights: init_from=... name=..."
            reason = f"its code is {new_code}, {path} was trained with {old_code}"
            raise ConfigError([Problem(keys_by_name[name].removesuffix(".name"), name, reason, remedy)])
    check_finite(checkpoint["state_dict"], path)
    notes, step, is_own_checkpoint = [], metadata["step"], is_own(config.run_folder, path)
    if is_own_checkpoint:
        notes.append(f"goes on from step {step:,} of {config.trainer.max_steps:,}: {path}")
        if any(step_of(checkpoint_path) > step for checkpoint_path in step_paths(path.parent)):
            notes.append(f"note: back to step {step}; checkpoints, metrics and evaluations of later steps are deleted")
    max_steps = saved_config.trainer.max_steps, config.trainer.max_steps
    rates = (  # a run at its end planned no rate for a further step
        saved_config.lr_at(min(step, max_steps[0] - 1)),
        config.lr_at(step),
    )
    jump_text = ""
    if not math.isclose(*rates, rel_tol=0.01):
        factor = f", by a factor of {rates[1] / rates[0]:.3g}" if rates[0] else ""
        jump_text = f"the learning rate jumps from {rates[0]:.4g} to {rates[1]:.4g} at step {step + 1}{factor}"
    if is_own_checkpoint and max_steps[0] != max_steps[1] and config.optim.schedule.name != "constant":
        text = f"{config.optim.schedule.name} now ends at step {max_steps[1]}, it was headed for {max_steps[0]}"
        notes.append(f"note: {text}" + (f": {jump_text}" if jump_text else ""))
    elif jump_text:
        notes.append(f"note: {jump_text}")
    return notes
