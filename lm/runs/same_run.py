"""Check that the files of a run folder belong together. A checkpoint records its configuration and data; other files
must agree with it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lm.config.eval_config import EvalConfig
from lm.config.load import parse
from lm.config.normalizers import swap_arguments
from lm.config.tree import Config, differences, effect_of
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, Problem, RunError, as_written, one_line
from lm.files import read_json
from lm.removed_keys import without_removed
from lm.runs.evaluations import Evaluation, evaluation_path, restore_advice
from lm.runs.folder import CONFIG, EMPTY_LOG, METRICS, Log, check_fields, seal
from lm.runs.metadata import DIGEST_FIELDS, SHA256, read_without_tensors
from lm.schema import Plain, to_plain

# Entries of environment.json that a resumed run reads; a model without a training run of its own lacks some.
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
DEFAULT_DIGESTS = {"weights_sha256": {}, "log": EMPTY_LOG}  # for checkpoints of older versions, which record neither


def trained_config(metadata: dict[str, Plain], path: Path) -> Config:
    """The configuration that the model at `path` was trained with. Raises RunError if the configuration can't be
    read.
    """
    try:
        return parse(without_removed(parse_yaml(metadata["config"], "it")))
    except ConfigError as error:
        raise RunError(f"{path}: its configuration is not readable: {one_line(error)}") from None


def config_problems(
    config: Config, training_config: Config, metadata: dict[str, Plain], path: Path, branches: bool = False
) -> list[Problem]:
    """Every difference between `config` and the checkpoint's `training_config` that forbids resuming from the
    checkpoint at `path`.

    metadata: metadata of the checkpoint; `step` and `phase` say how far training has come.
    branches: whether a new run branches from the checkpoint, and may therefore have another schedule.
    """
    problems, compared_effects = [], ("same",) if branches else ("same", "branch")
    for key, (value, trained_value) in differences(
        to_plain(config, whole=True), to_plain(training_config, whole=True)
    ).items():
        on_resume = effect_of(key).on_resume
        if (
            on_resume not in compared_effects
            or (branches and key == "branch_from")
            or _is_moved_path(config, key, value, trained_value)
        ):
            continue
        remedy = "branch with that" if branches else "resume it with that, or choose another name"
        if on_resume == "branch":
            remedy = (
                "resume it with that; or go on from its step and optimizer state in a new run: "
                f"branch_from={path} name=..."
            )
        problems.append(Problem(key, value, f"the checkpoint was trained with {as_written(trained_value)}", remedy))
    # Normalizers and phases are compared up to the checkpoint's step: later ones may change.
    problems += _length_problems(config, training_config, metadata["step"], path)
    return problems + _plan_problems(config, training_config, metadata["phase"], metadata["step"], path)


def _is_moved_path(config: Config, key: str, value: Plain, trained_value: Plain) -> bool:
    """Whether two paths (values of `init_from` or `branch_from`) name the same weights of an experiment whose folder
    has moved.

    Only the last parts of the paths are compared: run name and, for `branch_from`, checkpoint. False for a run outside
    experiments.
    """
    part_count = {"init_from": 1, "branch_from": 3}.get(key)
    return (
        bool(config.experiment.name and part_count and value and trained_value)
        and Path(value).parts[-part_count:] == Path(trained_value).parts[-part_count:]
    )


def check_environment(file: Path, metadata: dict[str, Plain], checkpoint: Path) -> dict[str, Plain]:
    """The content of a run's environment.json (`file`), after a check that it names the same run and data as
    `checkpoint`.

    Raises RunError: the file is missing or damaged, or belongs to another run than the checkpoint.
    """
    environment = read_json(file)
    check_fields(environment, {name: kind for name, kind in ENVIRONMENT_FIELDS.items() if name in environment}, file)
    for name, phrase in {"wandb_id": "is a checkpoint of the run", "data_fingerprint": "was trained on tokens"}.items():
        run_id, saved_id = str(environment.get(name) or "")[:16], str(metadata.get(name) or "")[:16]
        if run_id and saved_id and run_id != saved_id:
            raise RunError(
                f"{checkpoint}: {phrase} {saved_id}, {file} says {run_id}: they are of different runs; bring back the "
                "one that belongs here"
            )
    return environment


def check_evaluations(
    run: Path, evaluations: Sequence[Evaluation], checkpoint: Path, log: Log, config_text: str | None = None
) -> bool:
    """Check evaluations and log against the digests in a checkpoint. Returns False if an older version wrote no digest
    for an evaluation.

    config_text: the content of the run's config.yaml, which is compared with the checkpoint's configuration; None: no
    comparison.

    Raises RunError: the checkpoint is missing or damaged; an evaluation measured other weights than the checkpoint
    records for its step, or configuration or log were altered.
    """
    try:
        content = read_without_tensors(checkpoint)
        saved_digests = {**DEFAULT_DIGESTS, **content["lm"], SHA256: content.get(SHA256, {})}
        check_fields(saved_digests, DIGEST_FIELDS, checkpoint)
    except RunError as error:
        raise RunError(f"{error}; bring the checkpoint back, or delete the run folder and train it again") from None
    digests_by_step = {
        int(step): set(digests) for step, digests in saved_digests["weights_sha256"].items() if step.isdigit()
    }
    if digest := saved_digests[SHA256].get("state_dict"):
        digests_by_step.setdefault(saved_digests["step"], set()).add(digest)
    is_checked = True
    for evaluation in evaluations:
        if evaluation.kind not in EvalConfig.kind_names():  # other kinds, such as a swap, may be of other weights
            continue
        step, digests = evaluation.step, digests_by_step.get(evaluation.step, set())
        if digests and evaluation.weights_sha256 not in digests:
            path = evaluation_path(run, evaluation.kind, step)
            raise RunError(
                f"{path}: is not of the weights that checkpoints/{checkpoint.name} records for step {step}; "
                f"{restore_advice(path)}"
            )
        is_checked &= step > saved_digests["step"] or bool(digests and evaluation.code)
    check_log(run, log.content, content["lm"], checkpoint)
    if config_text is not None and content["lm"]["config"]:
        check_text(run / CONFIG, config_text, content["lm"], checkpoint)
    return is_checked


def check_log(run: Path, content: bytes | None, metadata: dict[str, Plain], checkpoint: Path) -> None:
    """Check that the first bytes of a log, `content`, have the size and sha256 in a checkpoint's `metadata`; raises
    RunError if they don't. Nothing is checked if `content` is None."""
    saved_seal = {**DEFAULT_DIGESTS, **metadata}["log"]
    check_fields(saved_seal, {"bytes": int, "sha256": str}, checkpoint, "log.")
    path, n_bytes = run / METRICS, saved_seal["bytes"]
    # perhaps read before a run under way saved the checkpoint
    if content is not None and len(content) < n_bytes and path.is_file():
        content = path.read_bytes()
    if content is not None and seal(content[:n_bytes]) != saved_seal:
        advice = (
            "bring it back, delete the run folder and train it again, or go on in a new run: "
            f"branch_from={checkpoint} name=..."
        )
        reason = f"{'was altered' if path.is_file() else 'is gone'} since checkpoints/{checkpoint.name} was saved"
        raise RunError(f"{path}: {reason}; {advice}")


def check_config(
    file: Path, config: Config, training_config: Config, metadata: dict[str, Plain], checkpoint: Path
) -> None:
    """Check that `checkpoint` could be resumed with `config`, read from `file` (`config_problems`). Raises RunError if
    not.

    training_config, metadata: configuration with which the checkpoint's run was trained, and the checkpoint's metadata.
    """
    if problems := config_problems(config, training_config, metadata, checkpoint):
        reasons = "; ".join(
            f"{problem.path} = {as_written(problem.value)}: {problem.reason}" for problem in problems[:3]
        )
        raise RunError(f"{file}: is not of the run of {checkpoint}: {reasons}; bring back the one that belongs here")


def check_text(file: Path, text: str, metadata: dict[str, Plain], checkpoint: Path) -> None:
    """Check that a run's config.yaml, given as `text`, agrees with that in its checkpoint (`check_config`); raises
    RunError if not, or if it is empty.

    Nothing else is checked if the checkpoint's configuration can't be read, because an older version wrote it, or
    because it names code outside lm, which reports do not import.
    """
    if text == metadata["config"]:
        return
    if not text.strip():
        raise RunError(f"{file}: holds no configuration; bring it back")
    try:
        training_config = trained_config(metadata, checkpoint)
    except RunError:
        return
    try:
        config = parse(without_removed(parse_yaml(text, file.name)))
    except ConfigError as error:
        raise RunError(
            f"{file}: is not of the run of {checkpoint}: {one_line(error)}; bring back the one that belongs here"
        ) from None
    check_config(file, config, training_config, metadata, checkpoint)


def _length_problems(config: Config, training_config: Config, step: int, checkpoint: Path) -> list[Problem]:
    """A list with a problem if `config` gives steps up to `step` other sequence lengths than `training_config`, with
    which they were trained, as `trainer.max_steps` differs; else an empty list."""
    lengths = config.data.lengths
    schedules = (
        lengths.length_by_step(config.data.seq_len, run_config.trainer.max_steps)
        for run_config in (training_config, config)
    )
    trained_lengths, new_lengths = (
        {start: length for start, length in schedule.items() if start < step} for schedule in schedules
    )
    if lengths != training_config.data.lengths or trained_lengths == new_lengths:
        return []
    reason = f"begins the lengths of data.lengths at other steps than {checkpoint} was trained with"
    return [
        Problem("trainer.max_steps", config.trainer.max_steps, reason, f"set it to {training_config.trainer.max_steps}")
    ]


def _plan_problems(config: Config, training_config: Config, phase: int, step: int, checkpoint: Path) -> list[Problem]:
    """Problems where normalizer, warm-up or end of a phase differ from training, for phases from 0 to `phase`, the
    checkpoint's phase.
    """
    problems = []
    for index in range(phase + 1):
        setting = f"phases[{index}]" if config.phases else "model"
        if index >= len(config.plan):
            reason = f"{checkpoint} is in phase {phase + 1}"
            return [*problems, Problem("phases", len(config.plan), reason, "resume it with the phases it had")]
        warmup_steps, trained_warmup_steps = (plan[index].warmup_steps for plan in (config.plan, training_config.plan))
        normalizer, trained_normalizer = (plan[index].normalizer for plan in (config.plan, training_config.plan))
        if any(
            normalizer.layer_option(layer) != trained_normalizer.layer_option(layer)
            for layer in range(training_config.model.n_layer)
        ):
            reason = f"the checkpoint was trained with {trained_normalizer.label()}"
            remedy = (
                f"lm swap {checkpoint} --to {swap_arguments(normalizer)} -o OUT, then init_from=OUT in a run of "
                "another name"
            )
            problems.append(Problem(f"{setting}.normalizer", normalizer.label(), reason, f"to change it now: {remedy}"))
        if warmup_steps != trained_warmup_steps:
            problems.append(
                Problem(
                    f"{setting}.warmup_steps", warmup_steps, f"the checkpoint was trained with {trained_warmup_steps}"
                )
            )
    new_ends, trained_ends = config.phase_ends, training_config.phase_ends
    moved_phases = [index for index in range(phase) if new_ends[index] != trained_ends[index]] + (
        [phase] if new_ends[phase] < step else []
    )
    for index in moved_phases if step < config.trainer.max_steps else ():
        new_end, trained_end = new_ends[index], trained_ends[index]
        reason = (
            f"ends the phase at step {new_end}; {checkpoint}, at step {step}, was trained with its end at {trained_end}"
        )
        remedy = f"the same end is until={trained_end / config.trainer.max_steps:.6g}"
        problems.append(Problem(f"phases[{index}].until", config.plan[index].until, reason, remedy))
    return problems
