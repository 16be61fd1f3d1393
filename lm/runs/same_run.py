"""Whether the files of a run folder belong together: a checkpoint records its configuration and data, and the other files must agree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lm.config.eval_config import EvalConfig
from lm.config.load import parse
from lm.config.tree import Config, differences, effect_of
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, Problem, RunError, one_line, shown
from lm.runs.evaluations import Evaluation, evaluation_path, remedy
from lm.runs.folder import EMPTY_LOG, METRICS, Log, check_fields, read_json
from lm.runs.metadata import SEALS, SHA256, without_tensors
from lm.schema import Plain, to_plain

# Entries of environment.json that a resumed run goes by; a model without a training run of its own lacks some.
ENVIRONMENT_FIELDS = {
    "wandb_id": str,
    "data_fingerprint": str,
    "precision": Literal["32", "bf16-mixed"],
    "compile": bool,
    "starts": list[dict],
    "started_from": dict | None,
    "branched_from": dict,
    "tokenizer_sha256": str,
}
NO_SEALS = {"weights_sha256": {}, "log": EMPTY_LOG}  # of an older version


def trained_config(metadata: dict[str, Plain], path: Path) -> Config:
    """The configuration that the model at `path` was trained with. Raises RunError if it can't be read."""
    try:
        return parse(parse_yaml(metadata["config"], "it"))
    except ConfigError as error:
        raise RunError(f"{path}: its configuration is not readable: {one_line(error)}") from None


def config_problems(config: Config, trained: Config, metadata: dict[str, Plain], path: Path, branches: bool = False) -> list[Problem]:
    """Every difference between `config` and what the checkpoint at `path` was `trained` with that would make it another run.

    metadata: the checkpoint's; `step` and `phase` say how far training has come.
    branches: whether a new run branches from it, which may have another schedule.
    """
    problems = []
    for key, (ours, theirs) in differences(to_plain(config), to_plain(trained)).items():
        on_resume = effect_of(key).on_resume
        if (
            on_resume not in ("same", "branch")
            or (branches and (on_resume == "branch" or key == "branch_from"))
            or _moved(config, key, ours, theirs)
        ):
            continue
        remedy = "branch with that" if branches else "resume it with that, or choose another name"
        if on_resume == "branch":
            remedy = f"resume it with that; or go on from its step and optimizer state in a new run: branch_from={path} name=..."
        problems.append(Problem(key, ours, f"the checkpoint was trained with {shown(theirs)}", remedy))
    # Normalizers and phases are compared up to the step: later ones may change.
    problems += _length_problems(config, trained, metadata["step"], path)
    return problems + _plan_problems(config, trained, metadata["phase"], metadata["step"], path)


def _moved(config: Config, key: str, ours: Plain, theirs: Plain) -> bool:
    """Whether a key names the run that both start from in their experiment, which lies elsewhere now: its name, and the step of its
    checkpoint, say all that decides its weights."""
    parts = {"init_from": 1, "branch_from": 3}.get(key)
    return bool(config.experiment.name and parts and ours and theirs) and Path(ours).parts[-parts:] == Path(theirs).parts[-parts:]


def check_environment(file: Path, metadata: dict[str, Plain], path: Path) -> dict[str, Plain]:
    """The content of a run's environment.json, of the same run and data as the checkpoint at `path`.

    Raises:
        RunError: it is missing, damaged, or of another run.
    """
    environment = read_json(file)
    check_fields(environment, {name: kind for name, kind in ENVIRONMENT_FIELDS.items() if name in environment}, file)
    for name, what in {"wandb_id": "is a checkpoint of the run", "data_fingerprint": "was trained on tokens"}.items():
        ours, theirs = str(environment.get(name) or "")[:16], str(metadata.get(name) or "")[:16]
        if ours and theirs and ours != theirs:
            raise RunError(f"{path}: {what} {theirs}, {file} says {ours}: they are of different runs; bring back the one that belongs here")
    return environment


def check_measured(run: Path, evaluations: Sequence[Evaluation], checkpoint: Path, log: Log) -> bool:
    """Whether all that was measured up to a checkpoint is known to be of the run's weights; False where an older version left no digest.

    Raises:
        RunError: the checkpoint is missing or damaged, an evaluation is of other weights than the run had at that step, or what was logged
            before the checkpoint was altered since.
    """
    try:
        content = without_tensors(checkpoint)
        seals = {**NO_SEALS, **content["lm"], SHA256: content.get(SHA256, {})}
        check_fields(seals, SEALS, checkpoint)
        check_fields(seals["log"], {"bytes": int, "sha256": str}, checkpoint, "log.")
    except RunError as error:
        raise RunError(f"{error}; bring the checkpoint back, or delete the run folder and train it again") from None
    weights = {int(step): set(known) for step, known in seals["weights_sha256"].items() if step.isdigit()}
    if own := seals[SHA256].get("state_dict"):
        weights.setdefault(seals["step"], set()).add(own)
    checked = True
    for evaluation in evaluations:
        if evaluation.kind not in EvalConfig.known():  # others, such as a swap, may be of other weights
            continue
        step, known = evaluation.step, weights.get(evaluation.step, set())
        if known and evaluation.weights_sha256 not in known:
            path = evaluation_path(run, evaluation.kind, step)
            raise RunError(f"{path}: is not of the weights that checkpoints/{checkpoint.name} records for step {step}; {remedy(path)}")
        checked &= step > seals["step"] or bool(known and evaluation.code)
    if log.is_altered(seals["log"]):
        again = "bring it back, or delete the run folder and train it again"
        raise RunError(f"{run / METRICS}: was altered since checkpoints/{checkpoint.name} was saved; {again}")
    return checked


def _length_problems(config: Config, trained: Config, step: int, path: Path) -> list[Problem]:
    """A curriculum of lengths follows trainer.max_steps: another may not change the steps that are done."""
    lengths = config.data.lengths
    begins = (lengths.begins(config.data.seq_len, each.trainer.max_steps) for each in (trained, config))
    before, now = ({first: length for first, length in each.items() if first < step} for each in begins)
    if lengths != trained.data.lengths or before == now:
        return []
    reason = f"begins the lengths of data.lengths at other steps than {path} was trained with"
    return [Problem("trainer.max_steps", config.trainer.max_steps, reason, f"set it to {trained.trainer.max_steps}")]


def _plan_problems(config: Config, trained: Config, phase: int, step: int, path: Path) -> list[Problem]:
    """Differences in normalizers and phases up to `step`, which lies in (or at the end of) `phase` of the trained plan."""
    problems, layers = [], range(trained.model.n_layer)
    for index in range(phase + 1):
        where = f"phases[{index}]" if config.phases else "model"
        if index >= len(config.plan):
            return [*problems, Problem("phases", len(config.plan), f"{path} is in phase {phase + 1}", "resume it with the phases it had")]
        ours, theirs = (plan[index].normalizer.label() for plan in (config.plan, trained.plan))
        if any(config.plan[index].normalizer.of_layer(layer) != trained.plan[index].normalizer.of_layer(layer) for layer in layers):
            to = config.plan[index].normalizer.swap_arguments()
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
