"""A run that resumes or branches from a checkpoint may differ only in some settings from the run that saved the
checkpoint. This module finds the differences that are forbidden.
"""

from pathlib import Path

from lm.config.load import parse_config
from lm.config.normalizers import swap_arguments
from lm.config.removed_keys import drop_removed_keys
from lm.config.tree import Config, config_differences, key_effect
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, Problem, RunError, one_line, value_text
from lm.plain import Plain, to_plain


def trained_config(metadata: dict[str, Plain], path: Path) -> Config:
    """Return the configuration that the model at `path` was trained with. Raises RunError: the configuration can't be
    read."""
    try:
        return parse_config(drop_removed_keys(parse_yaml(metadata["config"], "it")))
    except ConfigError as error:
        raise RunError(f"{path}: its configuration is not readable: {one_line(error)}") from None


def resume_problems(
    config: Config, training_config: Config, metadata: dict[str, Plain], path: Path, is_branch: bool = False
) -> list[Problem]:
    """Return every difference between `config` and the checkpoint's `training_config` that forbids resuming from the
    checkpoint at `path`.

    Args:
        metadata: metadata of the checkpoint; `step` and `phase` say how far training has come.
        is_branch: whether a new run branches from the checkpoint, and may therefore have another schedule.
    """
    problems, step = [], metadata["step"]
    remedy = "branch with that" if is_branch else "resume it with that, or choose another name"
    in_new_run = f"resume it with that; or go on from its step and optimizer state in a new run: branch_from={path}"
    for key, (value, trained) in config_differences(
        to_plain(config, include_omittable_keys=True), to_plain(training_config, include_omittable_keys=True)
    ).items():
        effect = key_effect(key).on_resume
        if is_branch and (effect == "branch" or key == "branch_from"):
            continue
        if effect in ("same", "branch"):
            reason = f"the checkpoint was trained with {value_text(trained)}"
            problems.append(Problem(key, value, reason, remedy if effect == "same" else f"{in_new_run} name=..."))
    return problems + _phase_problems(config, training_config, metadata["phase"], step, path)


def _phase_problems(config: Config, training_config: Config, phase: int, step: int, checkpoint: Path) -> list[Problem]:
    """Return a problem for each key of a training phase in which `config`, of the resumed run, differs from
    `training_config`, of the checkpoint's training. Phases after the checkpoint's phase, `phase`, may change.
    """
    problems = []
    if phase >= len(config.phases_or_default):
        reason = f"{checkpoint} is in phase {phase + 1}"
        return [Problem("phases", len(config.phases_or_default), reason, "resume it with the phases it had")]
    for index in range(phase + 1):
        setting = f"phases[{index}]" if config.phases else "model"
        planned, trained = config.phases_or_default[index], training_config.phases_or_default[index]
        layers = range(training_config.model.n_layer)
        if any(planned.normalizer.options_of_layer(n) != trained.normalizer.options_of_layer(n) for n in layers):
            reason = f"the checkpoint was trained with {trained.normalizer.label()}"
            remedy = (
                f"to change it now: lm swap {checkpoint} --to {swap_arguments(planned.normalizer)} -o OUT, then "
                "init_from=OUT in a run of another name"
            )
            problems.append(Problem(f"{setting}.normalizer", planned.normalizer.label(), reason, remedy))
        new, old = (to_plain(phase, include_omittable_keys=True) for phase in (planned, trained))
        problems += [
            Problem(f"{setting}.{name}", new[name], f"the checkpoint was trained with {value_text(old[name])}")
            for name in ("position", "seq_len", "lr_factor", "warmup_steps")
            if new[name] != old[name]
        ]
        end, trained_end = config.phase_ends[index], training_config.phase_ends[index]
        if step < config.trainer.max_steps and (end < step if index == phase else end != trained_end):
            reason = f"ends the phase at step {end}; {checkpoint}, at step {step}, was trained with {trained_end}"
            remedy = f"the same end is until={trained_end / config.trainer.max_steps:.6g}"
            problems.append(Problem(f"phases[{index}].until", planned.until, reason, remedy))
    return problems
