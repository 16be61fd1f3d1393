"""What a phase of a run starts from: random weights, those of another run, or a checkpoint; and what is refused."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lm.attention.normalizer import make_normalizer
from lm.config.canonical import differences
from lm.config.effects import effect_of
from lm.config.training_config import Group
from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.measurement import weights_sha256
from lm.model.decoder import Decoder
from lm.model.spec import ModelSpec
from lm.model.swapped import swapped
from lm.runs.checkpoints import load_metadata
from lm.runs.consistency import config_problems, trained_config
from lm.runs.evaluations import evaluation_files
from lm.runs.folder import BEST, CHECKPOINTS, EVALUATIONS, METRICS, TOKENIZER, step_of, steps_saved
from lm.runs.identity import arm, seeds
from lm.runs.loading import Loaded, load, weights_mismatch
from lm.runs.metric_log import truncate_metrics
from lm.schema import Plain, to_plain
from lm.training.optimizers import GROUPS, State, after_swap, freeze, group_of, optimizer_mismatch
from lm.training.state import RunState


@dataclass
class PhaseStart:
    """What a phase of a run begins with. `optimizer` and `before` are cleared after use, to free their memory.

    Attributes:
        step: optimizer steps done.
        decoder: on the CPU, with the weights to train from.
        optimizer: its state by parameter name.
        before: the decoder that a swap at this step replaced.
    """

    step: int
    phase: int
    decoder: Decoder
    state: RunState = field(default_factory=RunState)
    optimizer: State = field(default_factory=dict)
    before: Decoder | None = None


# ---------------------------------------------------------------- a new run, from random weights or those of another run (init_from)


def start_new_run(config: Config, store: Store) -> tuple[PhaseStart, dict[str, Plain] | None, list[str]]:
    """The start of a new run, the origin of its weights (None: random; see `initialize_from`), and notes."""
    decoder = Decoder(config.model_in(0), store.vocab_size, config.data.seq_len, config.seed)
    origin, notes = initialize_from(config, store, decoder) if config.init_from else (None, [])
    freeze(decoder, config.train_only)
    return PhaseStart(0, 0, decoder), origin, notes


def initialize_from(config: Config, store: Store, decoder: Decoder) -> tuple[dict[str, Plain], list[str]]:
    """Give `decoder` the weights that `init_from` names; returns their origin, and notes on it.

    The origin: `path`, `step`, `tokens`, `normalizer`, and the `arm` and `seeds` of the run (lm/runs/identity.py).

    Raises:
        RunError: nothing to load there.
        ConfigError: another model, normalizer or tokenizer, with both sides and what to do.
    """
    loaded = load(config.init_from)
    models = ({"model": to_plain(model)} for model in (decoder.config, loaded.decoder.config))
    problems = [
        Problem(key, ours, f"{loaded.path} has {theirs!r}", "set it to that")
        for key, (ours, theirs) in differences(*models).items()
        if effect_of(key).affects == "model" and not key.startswith("model.normalizer")  # compared below
    ]
    problems += _normalizer_problems(config, decoder, loaded)
    problems += _tokenizer_problems(config, store, loaded)
    if config.model.position.ends and loaded.decoder.seq_len != decoder.seq_len:
        reason = f"{loaded.path} has learned positions for {loaded.decoder.seq_len}"
        problems.append(Problem("data.seq_len", decoder.seq_len, reason, "set it to that"))
    if problems:
        raise ConfigError(problems)
    decoder.load_state_dict(loaded.decoder.state_dict())
    start = {
        "path": str(loaded.path),
        "step": loaded.stamp["step"],
        "tokens": loaded.stamp["tokens_seen"],
        "normalizer": loaded.decoder.config.normalizer.label(),
    }
    if loaded.config is None:
        note = "note: what those weights were trained on is not known: what is held out here they may have seen"
        return {**start, "arm": weights_sha256(loaded.decoder)[:12], "seeds": []}, [f"weights from {loaded.path}", note]
    source = to_plain(loaded.config), loaded.environment
    notes = [f"weights from {loaded.path} (step {start['step']:,}, {start['tokens']:,} tokens)"]
    if store.fingerprint != loaded.stamp["data_fingerprint"]:
        notes.append("note: those weights were trained on other data or another split: what is held out here they may have seen")
    return {**start, "arm": arm(*source), "seeds": list(seeds(*source))}, notes


def _normalizer_problems(config: Config, decoder: Decoder, loaded: Loaded) -> list[Problem]:
    """A normalizer other than that of the weights, initial values aside, or one whose constants differ at this training length."""
    models = decoder, loaded.decoder
    labels = [model.config.normalizer.label() for model in models]
    where = "phases[0].normalizer" if config.phases else "model.normalizer"
    for ours, theirs in zip(*(model.normalizers() for model in models), strict=False):
        settled = {"init", *ours.constants()}  # initial values are replaced; constants are compared by their values below
        plain = [{key: value for key, value in to_plain(one.options).items() if key not in settled} for one in (ours, theirs)]
        if plain[0] != plain[1]:
            to = config.plan[0].normalizer.swap_arguments()
            remedy = f"convert it: lm swap {config.init_from} --to {to} -o OUT, then init_from=OUT; or keep {labels[1]}"
            return [Problem(where, labels[0], f"{loaded.path} has {labels[1]}", remedy)]
        before = theirs.constants()
        moved = [
            Problem(f"{where}.{key}", value, f"is {before[key]:g} in {loaded.path}", f"set it to {before[key]:g}")
            for key, value in ours.constants().items()
            if value != before[key]
        ]
        if moved:
            return moved
    return []


def _tokenizer_problems(config: Config, store: Store, loaded: Loaded) -> list[Problem]:
    """A tokenizer other than that of the weights."""
    if store.vocab_size != loaded.decoder.vocab_size:
        reason = f"makes a vocabulary of {store.vocab_size}, {loaded.path} has {loaded.decoder.vocab_size}"
    elif loaded.tokenizer and loaded.tokenizer.get_vocab() != store.tokenizer().get_vocab():
        reason = f"is another tokenizer than that of {loaded.path}: its token ids would stand for other text"
    else:
        return []
    file = loaded.folder / TOKENIZER
    remedy = f"set data.tokenizer={{name: file, path: {file}}}" if file.is_file() else "use the tokenizer it was trained with"
    return [Problem("data.tokenizer", config.data.tokenizer.name, reason, remedy)]


def check_trainable(config: Config, decoder: Decoder) -> None:
    """Raises ConfigError if a phase has nothing to train, or a group with its own learning rate or decay has no trained parameter."""
    shape = decoder.normalizers()[0].layer
    groups = {group_of(name, p) for name, p in decoder.named_parameters() if p.requires_grad} - {"normalizer"}
    for index, phase in enumerate(config.plan):
        made = (make_normalizer(phase.normalizer.of_layer(layer), shape) for layer in range(config.model.n_layer))
        if any(True for normalizer in made for _ in normalizer.parameters()):
            groups.add("normalizer")
        elif config.train_only:
            where = f"phases[{index}].normalizer" if config.phases else "model.normalizer"
            reason = f"{phase.normalizer.label()} has no parameters to train ({where})"
            raise ConfigError([Problem("train_only", config.train_only, reason, "drop train_only, or choose ssmax")])
    own = {name: to_plain(getattr(config.optim.groups, name)) for name in GROUPS if name not in groups}
    idle, reason = to_plain(Group()), "no trained parameter is in this group"
    if problems := [Problem(f"optim.groups.{name}", set_to, reason, "drop it") for name, set_to in own.items() if set_to != idle]:
        raise ConfigError(problems)


# ---------------------------------------------------------------- a resumed run, or the next phase of one


def start_from_checkpoint(config: Config, checkpoint: dict[str, object]) -> PhaseStart:
    """The start from a checkpoint: within its phase, or at the start of the next one, with the normalizers swapped."""
    metadata = checkpoint["lm"]
    phase = config.phase_at(metadata["step"])
    decoder = Decoder(config.model_in(metadata["phase"]), metadata["vocab_size"], config.data.seq_len, seed=None)
    decoder.load_state_dict(checkpoint["state_dict"])
    start = PhaseStart(metadata["step"], phase, decoder, RunState.of(metadata, config.run_folder / CHECKPOINTS), checkpoint["optimizer"])
    if phase != metadata["phase"]:
        start.decoder, start.before = swapped(decoder, config.model_in(phase).normalizer), decoder
        start.optimizer = after_swap(start.optimizer)
    freeze(start.decoder, config.train_only)
    return start


def check_resume(config: Config, store: Store, checkpoint: dict[str, object], path: Path) -> list[str]:
    """Check that `config` may resume from a checkpoint; returns notes on what has changed.

    Raises:
        ConfigError: every difference that would make it another run.
        RunError: the checkpoint holds weights alone, or tensors that don't fit its configuration.
    """
    saved = checkpoint["lm"]
    if not isinstance(checkpoint.get("optimizer"), dict):
        folder = config.run_folder
        raise RunError(f"{path}: holds weights alone and can't be resumed; start a new run from them: init_from={folder} name=...")
    trained = trained_config(saved, path)
    problems = config_problems(config, trained, saved, path)
    if saved["data_fingerprint"] != store.fingerprint:
        reason = f"{path} was trained on tokens with fingerprint {saved['data_fingerprint'][:16]}"
        problems.append(Problem("data", store.fingerprint[:16], reason))
    if problems:
        raise ConfigError(problems)
    spec = ModelSpec.from_training(trained, saved)
    for name, before, now in spec.changed_plugins():
        remedy = "bring that code back, or start a new run from its weights: init_from=... name=..."
        raise ConfigError([Problem("model.normalizer", name, f"its code is {now}, {path} was trained with {before}", remedy)])
    if reason := weights_mismatch(spec, checkpoint["state_dict"]):
        raise RunError(f"{path}: weights and configuration don't fit: {reason}")
    with torch.device("meta"):
        decoder = spec.decoder()
    if reason := optimizer_mismatch(decoder, trained, checkpoint["optimizer"]):
        raise RunError(f"{path}: the optimizer's state and configuration don't fit: {reason}")
    notes = []
    if any(step_of(other) > saved["step"] for other in steps_saved(path.parent)):
        notes.append(f"note: back to step {saved['step']}; checkpoints, metrics and evaluations of later steps are deleted")
    steps = trained.trainer.max_steps, config.trainer.max_steps
    if steps[0] != steps[1] and config.optim.schedule.name != "constant":
        notes.append(
            f"note: {config.optim.schedule.name} now ends at step {steps[1]}, it was headed for {steps[0]}: the learning rate jumps"
        )
    return notes


def truncate_after(run: Path, step: int) -> list[str]:
    """Delete what a run folder holds of later steps than `step`, which a resumed run makes again: lines of metrics.jsonl,
    evaluations, checkpoints, and a swap at `step` itself; and temporary files that a kill left. Returns notes on unreadable lines.
    """
    for part in (run, run / CHECKPOINTS, run / EVALUATIONS):
        for leftover in part.glob(".*"):
            if leftover.is_file():
                leftover.unlink()
    for path in steps_saved(run / CHECKPOINTS):
        if step_of(path) > step:
            path.unlink()
    best = run / CHECKPOINTS / BEST
    with contextlib.suppress(RunError):  # none, or damaged
        if load_metadata(best)["step"] > step:
            best.unlink()
    for (kind, measured_at), path in evaluation_files(run).items():
        if measured_at > step or (kind, measured_at) == ("swap", step):
            path.unlink()
    return truncate_metrics(run / METRICS, step)
