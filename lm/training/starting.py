"""Where a run starts from: a new folder, a checkpoint of its own, or another run's weights; and what is refused."""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from lm.attention import table
from lm.config import Config
from lm.configure import parse
from lm.data.lengths import Curriculum
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.identity import arm, seeds
from lm.runs import CHECKPOINTS, ENVIRONMENT, TOKENIZER, read_json
from lm.schema import Plain, flatten, to_plain

# A resumed run may differ from its first start in these; anything else would make it another run.
# Normalizers and phases are compared step by step (`_plan_problems`): what is still to come may change, too.
FREE_TO_CHANGE = ("name", "runs", "resume", "log", "eval", "trainer", "data.root", "data.workers", "data.prepare_workers")
FREE_TO_CHANGE += ("optim.on_nonfinite", "phases", "model.normalizer")

# A model that starts from other weights may differ from theirs in these.
FREE_AT_START = ("normalizer", "dropout", "init_std")


def claim(folder: Path, resume: bool) -> None:
    """Make the run folder. Raises RunError if it exists (and holds more than nothing) or can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not resume:
            raise RunError(f"{folder}: the run folder exists; go on with resume=auto, or choose another name=...")
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: can't make the run folder: {error.strerror}; set runs=... to a folder you can write") from None


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder` meanwhile. Raises RunError if one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"{folder}: another process is training in this run folder; wait for it or stop it") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def stored(config: Config) -> Config:
    """The configuration as the run folder keeps it: how the run was resumed is not part of it."""
    return dataclasses.replace(config, resume="")


# ---------------------------------------------------------------- resume: the same run, everything


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that `resume` names; None for a new run, or for `auto` where there is none yet."""
    if not config.resume:
        return None
    path = config.run_folder / CHECKPOINTS / "last.ckpt" if config.resume == "auto" else Path(config.resume)
    if path.exists():
        if path.resolve().parent != (config.run_folder / CHECKPOINTS).resolve():
            remedy = "to start a new run from its weights: init_from=... instead"
            raise RunError(
                f"{path}: not a checkpoint of {config.run_folder}; a run goes on in its own folder: set name and runs to it; {remedy}"
            )
        return path
    if config.resume == "auto":
        others = sorted(path.parent.glob("step-*.ckpt"), key=lambda other: other.stat().st_mtime_ns)
        if others:
            raise RunError(f"{path}: missing, but the run has other checkpoints; go on from the newest with resume={others[-1]}")
        return None
    raise RunError(f"{path}: no such checkpoint (resume)")


def check_resume(config: Config, store: Store, checkpoint: dict[str, object], path: Path) -> tuple[int, list[str]]:
    """The step the checkpoint is at, and notes on what has changed and matters.

    Raises:
        ConfigError: every difference that would make it another run.
        RunError: the checkpoint holds weights alone.
    """
    saved = checkpoint["lm"]
    if "optimizer_states" not in checkpoint:
        folder = config.run_folder
        raise RunError(f"{path}: holds weights alone and can't be resumed; start a new run from them: init_from={folder} name=...")
    trained = parse(yaml.safe_load(saved["config"]))
    old, new = flatten(to_plain(trained)), flatten(to_plain(stored(config)))
    problems = [
        Problem(key, new.get(key), f"the checkpoint was trained with {old.get(key)!r}", "resume it with that, or choose another name")
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key) and not any(key == free or key.startswith((free + ".", free + "[")) for free in FREE_TO_CHANGE)
    ]
    problems += _length_problems(config, trained, saved["step"], path)
    problems += _plan_problems(config, trained, saved["phase"], saved["step"], path)
    if saved["data_fingerprint"] != store.fingerprint:
        reason = f"{path} was trained on tokens with fingerprint {saved['data_fingerprint'][:16]}"
        problems.append(Problem("data", store.fingerprint[:16], reason))
    if problems:
        raise ConfigError(problems)
    notes = []
    later = [other for other in path.parent.glob("step-*.ckpt") if int(other.stem.removeprefix("step-")) > saved["step"]]
    if later:
        notes.append(f"note: back to step {saved['step']}; checkpoints, metrics and evaluations of later steps are dropped")
    steps = trained.trainer.max_steps, config.trainer.max_steps
    if steps[0] != steps[1] and config.optim.schedule.name != "constant":
        notes.append(
            f"note: {config.optim.schedule.name} now ends at step {steps[1]}, it was headed for {steps[0]}: the learning rate jumps"
        )
    return saved["step"], notes


def _length_problems(config: Config, trained: Config, step: int, path: Path) -> list[Problem]:
    """A curriculum of lengths follows trainer.max_steps: another may not change the steps that are done."""
    lengths = config.data.lengths
    if lengths != trained.data.lengths or not isinstance(lengths, dict) or 0 not in lengths:
        return []
    before, now = (Curriculum(lengths, one.trainer.max_steps).until(step) for one in (trained, config))
    if before == now:
        return []
    reason = f"begins the lengths of data.lengths at other steps than {path} was trained with"
    return [Problem("trainer.max_steps", config.trainer.max_steps, reason, f"set it to {trained.trainer.max_steps}")]


def _plan_problems(config: Config, trained: Config, phase: int, step: int, path: Path) -> list[Problem]:
    """Differences in normalizers and phases up to `step`, which lies in (or at the end of) `phase` of the trained plan."""
    problems = []
    for index in range(phase + 1):
        where = f"phases[{index}]" if config.phases else "model"
        if index >= len(config.plan):
            return [*problems, Problem("phases", len(config.plan), f"{path} is in phase {phase + 1}", "resume it with the phases it had")]
        ours, theirs = (table.label(to_plain(plan[index].normalizer)) for plan in (config.plan, trained.plan))
        if config.plan[index].normalizer != trained.plan[index].normalizer:
            to = table.arguments(to_plain(config.plan[index].normalizer))
            remedy = f"to change it now: lm swap {path} --to {to} -o OUT, then init_from=OUT in a run of another name"
            problems.append(Problem(f"{where}.normalizer", ours, f"the checkpoint was trained with {theirs}", remedy))
        if config.plan[index].warmup_steps != trained.plan[index].warmup_steps:
            reason = f"the checkpoint was trained with {trained.plan[index].warmup_steps}"
            problems.append(Problem(f"{where}.warmup_steps", config.plan[index].warmup_steps, reason))
    ends, before = config.phase_ends, trained.phase_ends
    moved = [index for index in range(phase) if ends[index] != before[index]] + ([phase] if ends[phase] < step else [])
    for index in moved if step < config.trainer.max_steps else ():
        reason = f"ends the phase at step {ends[index]}; {path}, at step {step}, was trained with its end at {before[index]}"
        remedy = f"the same end is until={before[index] / config.trainer.max_steps:.6g}"
        problems.append(Problem(f"phases[{index}].until", config.plan[index].until, reason, remedy))
    return problems


# ---------------------------------------------------------------- init_from: a new run, the weights alone


def start_from(config: Config, store: Store, decoder: object) -> tuple[dict[str, Plain], list[str]]:
    """Give `decoder` the weights that `init_from` names; where they come from, and notes on it.

    The former: `path`, `step`, `tokens`, and what tells like weights of other seeds: `normalizer`, `arm` and `seeds` (lm/identity.py).

    Raises:
        RunError: nothing to load there.
        ConfigError: another model, normalizer or tokenizer, with both sides and what to do.
    """
    from lm.loading import load

    loaded = load(config.init_from)
    problems = []
    ours, theirs = (flatten(to_plain(model)) for model in (decoder.config, loaded.decoder.config))
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE_AT_START):
            problems.append(Problem(f"model.{key}", ours.get(key), f"{loaded.path} has {theirs.get(key)!r}", "set it to that"))
    problems += _normalizer_problems(config, decoder, loaded)
    if store.vocab_size != loaded.decoder.vocab_size:
        reason = f"makes a vocabulary of {store.vocab_size}, {loaded.path} has {loaded.decoder.vocab_size}"
        problems.append(Problem("data.tokenizer", config.data.tokenizer.name, reason, _tokenizer_remedy(loaded.folder / TOKENIZER)))
    elif loaded.tokenizer and loaded.tokenizer.get_vocab() != store.tokenizer().get_vocab():
        reason = f"is another tokenizer than that of {loaded.path}: its token ids would stand for other text"
        problems.append(Problem("data.tokenizer", config.data.tokenizer.name, reason, _tokenizer_remedy(loaded.folder / TOKENIZER)))
    if config.model.position.name == "learned" and loaded.decoder.seq_len != decoder.seq_len:
        reason = f"{loaded.path} has learned positions for {loaded.decoder.seq_len}"
        problems.append(Problem("data.seq_len", decoder.seq_len, reason, "set it to that"))
    if problems:
        raise ConfigError(problems)
    decoder.load_state_dict(loaded.decoder.state_dict())
    environment = read_json(loaded.folder / ENVIRONMENT) if (loaded.folder / ENVIRONMENT).is_file() else {}
    source = to_plain(loaded.config), environment
    start = {
        "path": str(loaded.path),
        "step": loaded.facts["step"],
        "tokens": loaded.facts["tokens"],
        "normalizer": table.label(to_plain(loaded.decoder.config.normalizer)),
        "arm": arm(*source),
        "seeds": list(seeds(*source)),
    }
    notes = [f"weights from {loaded.path} (step {start['step']:,}, {start['tokens']:,} tokens)"]
    if store.fingerprint != loaded.facts["data_fingerprint"]:
        notes.append("note: those weights were trained on other data or another split: what is held out here they may have seen")
    return start, notes


def _normalizer_problems(config: Config, decoder: object, loaded: object) -> list[Problem]:
    """A normalizer other than that of the weights, first values aside, or one that means another thing at this length."""
    models = decoder, loaded.decoder
    labels = [table.label(to_plain(model.config.normalizer)) for model in models]
    where = "phases[0].normalizer" if config.phases else "model.normalizer"
    for ours, theirs in zip(*(model.normalizers() for model in models), strict=False):
        settled = {"init", *ours.constants()}  # first values are replaced; constants are compared by what they come to
        plain = [{key: value for key, value in to_plain(one.options).items() if key not in settled} for one in (ours, theirs)]
        if plain[0] != plain[1]:
            to = table.arguments(to_plain(config.plan[0].normalizer))
            remedy = f"convert it: lm swap {config.init_from} --to {to} -o OUT, then init_from=OUT; or keep {labels[1]}"
            return [Problem(where, labels[0], f"{loaded.path} has {labels[1]}", remedy)]
        before = theirs.constants()
        moved = [key for key, value in ours.constants().items() if value != before[key]]
        if moved:
            return [
                Problem(f"{where}.{key}", ours.constants()[key], f"is {before[key]:g} in {loaded.path}", f"set it to {before[key]:g}")
                for key in moved
            ]
    return []


def _tokenizer_remedy(file: Path) -> str:
    return f"set data.tokenizer={{name: file, path: {file}}}" if file.is_file() else "use the tokenizer it was trained with"


def check_train_only(config: Config, decoder: object) -> None:
    """Raises ConfigError if there is nothing to train in some phase."""
    from lm.attention.normalizers import make_normalizer

    shape = decoder.normalizers()[0].shape
    for index, phase in enumerate(config.plan):
        made = (make_normalizer(table.of_layer(phase.normalizer, layer), shape) for layer in range(config.model.n_layer))
        if not any(True for normalizer in made for _ in normalizer.parameters()):
            where = f"phases[{index}].normalizer" if config.phases else "model.normalizer"
            reason = f"{table.label(to_plain(phase.normalizer))} has no parameters to train ({where})"
            raise ConfigError([Problem("train_only", config.train_only, reason, "drop train_only, or choose ssmax")])
