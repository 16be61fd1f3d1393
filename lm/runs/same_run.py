"""Differences between a configuration and that of the checkpoint from which a run goes on or branches, as far as they
forbid it.
"""

from pathlib import Path

from lm.config.load import parse
from lm.config.normalizers import swap_arguments
from lm.config.tree import Config, differences, effect_of
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, Problem, RunError, as_written, one_line
from lm.removed_keys import without_removed
from lm.schema import Plain, to_plain


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
        entries = [
            (
                run_config.model_in(index).position,
                run_config.in_phase(index).data.seq_len,
                run_config.plan[index].lr_factor,
            )
            for run_config in (config, training_config)
        ]
        for name, new, trained in zip(("position", "seq_len", "lr_factor"), *entries, strict=True):
            if new != trained and index:  # those of the first phase are compared as keys of model and data
                value, trained = (getattr(entry, "label", entry) for entry in (new, trained))
                problems.append(Problem(f"{setting}.{name}", value, f"the checkpoint was trained with {trained}"))
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
