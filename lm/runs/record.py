"""The record of a run folder is its configuration, environment, logged metrics and last evaluations. This module also
finds the settings that tell arms (compared variants) apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from lm.config.tree import distinguishes_arms, keys_recorded_at_each_start, resolve_null_model_keys
from lm.config.yaml_text import parse_yaml
from lm.errors import yaml_scalar
from lm.files import json_sha256
from lm.plain import Plain, flatten
from lm.runs.evaluations import (
    UNIGRAM_BOUND_NAME,
    UNIGRAM_LEVEL_NAME,
    VAL_LOSS,
    Evaluation,
    last_evaluations,
    weighted_mean,
)
from lm.runs.folder import (
    CONFIG_FILE,
    DIVERGED_KEY,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    Curve,
    check_log,
    logged_curve,
    read_environment,
    read_file,
    read_metrics,
    require_run,
)


def run_starts(environment: dict[str, Plain]) -> list[dict[str, Plain]]:
    """Return the settings, as dotted keys, of each start of a run that contributed steps to its weights; [] without a
    training run.

    A start is the first launch of a run, or a resumption; environment.json lists all. A start at step s replaces
    earlier starts whose step is s or more.
    """
    history: list[dict[str, Plain]] = []
    for start in environment.get("starts", []):
        history = [entry for entry in history if entry["step"] < start["step"]] + [flatten(start)]
    return history


def recorded_setting(environment: dict[str, Plain], name: str) -> Plain:
    """Return a run's value of setting `name`; None if it is not recorded. If the starts of the run differ in the value,
    the result is a text, such as `bf16-mixed, from step 500 32` for the precision.
    """
    recorded_values = [(start["step"], start[name]) for start in run_starts(environment) if start.get(name) is not None]
    changes = [next(equal_values) for _, equal_values in groupby(recorded_values, key=itemgetter(1))]
    if len(changes) < 2:
        return changes[0][1] if changes else None
    step_texts = [(step, yaml_scalar(value)[:24]) for step, value in changes]  # commits are longer
    return ", ".join(f"from step {step:,} {text}" if number else text for number, (step, text) in enumerate(step_texts))


def arm_definition(config: dict[str, Plain], environment: dict[str, Plain]) -> dict[str, Plain]:
    """Return the settings that decide what a run learns, except its seed, as dotted keys. Runs with equal settings are
    one arm.

    Equal models have equal settings (`lm.config.tree.resolve_null_model_keys`). Precision, compilation and the number
    of steps have the values that the run's starts used. Initial weights (`init_from`) and the run that this run
    branches from (`branch_from`) are identified by their arm, not by their path.
    """
    definition = {
        key: value for key, value in flatten(resolve_null_model_keys(config)).items() if distinguishes_arms(key)
    }
    settings = {key: recorded_setting(environment, key.rpartition(".")[2]) for key in keys_recorded_at_each_start()}
    definition |= {key: value for key, value in settings.items() if value is not None}
    start, swap = environment.get("started_from") or {}, environment.get("swap") or {}
    if config.get("init_from") and "arm" in start:
        definition["init_from"] = f"{start['normalizer']}, arm {start['arm']}"
    if config.get("branch_from") and "arm" in (branch := environment.get("branched_from") or {}):
        definition["branch_from"] = f"step {branch['step']:,} of arm {branch['arm']}"
    return definition | {f"swap.{name}": swap[name] for name in ("normalizer", "init", "arm") if name in swap}


def arm_hash(config: dict[str, Plain], environment: dict[str, Plain]) -> str:
    """Return the identifier of a run's arm: 12 hex digits of a hash of `arm_definition`."""
    return json_sha256(arm_definition(config, environment))[:12]


def training_seeds(config: dict[str, Plain], environment: dict[str, Plain]) -> tuple[int, ...]:
    """Return all seeds that decided a run's weights: seeds of the run that trained its initial weights, its own seed,
    and `data.seed` if it is set.

    Consecutive equal seeds are listed once.
    """
    all_seeds = [*((environment.get("started_from") or {}).get("seeds") or ()), config["seed"]]
    if isinstance(data_seed := (config.get("data") or {}).get("seed"), int):
        all_seeds.append(data_seed)
    return tuple(seed for seed, _ in groupby(all_seeds))


# ---------------------------------------------------------------- how a run came to its end

# nats per token; a run of finite losses diverged only if its training loss ends more than this above its minimum
MIN_LOSS_RISE = 0.5
RunStatus = Literal["unfinished", "finished", "diverged"]


def divergence_reason(lines: list[dict[str, Plain]], validation: Evaluation | None) -> str:
    """Return a text that says how a run diverged; it is empty if the run didn't diverge.

    A run diverged if it stopped at values that are not finite, or its final loss is not finite. It also diverged if its
    final loss is above the unigram cross-entropy, and its training loss ended more than `MIN_LOSS_RISE` above its
    minimum.

    Args:
        lines: lines of metrics.jsonl.
        validation: the validation at the run's last step; None: the run has not reached this step.
    """
    if reason := next((str(line[DIVERGED_KEY]) for line in lines if DIVERGED_KEY in line), ""):
        return reason
    if validation and not math.isfinite(_loss_and_unigram(validation)[0]):
        return "final val/loss is not finite"
    losses = logged_curve(lines, "train/loss").values
    losses = losses[np.isfinite(losses)]
    reason, has_risen = loss_above_unigram_text(validation), len(losses) and losses[-1] - losses.min() > MIN_LOSS_RISE
    return f"{reason}, training loss rose from {losses.min():.4f} to {losses[-1]:.4f}" if reason and has_risen else ""


def tokens_before_run(environment: Mapping[str, Plain]) -> int:
    """Return the number of tokens on which the initial weights of a run were trained, over all earlier runs. It is 0
    for random initial weights.
    """
    origin = environment.get("started_from") or {}
    return origin.get("tokens", 0) + origin.get("tokens_before", 0)


def loss_above_unigram_text(validation: Evaluation | None) -> str:
    """Return a text that says that the final validation loss exceeds the unigram cross-entropy. The text is empty if
    the loss is not above the unigram cross-entropy, or if one of the two is not known.
    """
    loss, level = _loss_and_unigram(validation) if validation else (0.0, math.inf)
    return f"final loss above the unigram cross-entropy ({loss:.4f} > {level:.4f})" if loss > level else ""


def _loss_and_unigram(validation: Evaluation) -> tuple[float, float]:
    """Return the validation loss and the unigram cross-entropy, which is infinite if it is not known."""
    rows = validation.frame[validation.frame["metric"] == VAL_LOSS]
    references = dict(rows["about"].iloc[0].references)
    return weighted_mean(rows), references.get(UNIGRAM_LEVEL_NAME, references.get(UNIGRAM_BOUND_NAME, math.inf))


# ---------------------------------------------------------------- the record of a run folder


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run record holds the configuration, environment, logged metrics and last evaluations that a run folder
    contains."""

    folder: Path
    name: str
    config: dict[str, Plain]
    environment: dict[str, Plain]
    log_lines: list[dict[str, Plain]]  # lines of its metrics.jsonl
    evaluations: tuple[Evaluation, ...]  # the last of each kind

    @cached_property
    def final_evaluations(self) -> list[Evaluation]:
        """Return the evaluations of the run's last step; an empty list before the run has reached this step."""
        steps = flatten(self.config).get("trainer.max_steps")
        last_step = steps if isinstance(steps, int) else 0
        return [evaluation for evaluation in self.evaluations if evaluation.step >= last_step]

    @cached_property
    def divergence_reason(self) -> str:
        """Return a text that says how the run diverged; it is empty if the run didn't diverge."""
        validations = (each for each in self.final_evaluations if (each.frame["metric"] == VAL_LOSS).any())
        return divergence_reason(self.log_lines, next(validations, None))

    @property
    def state(self) -> RunStatus:
        """Return `diverged`, `finished` if the run was measured at its last step, else `unfinished`."""
        return "diverged" if self.divergence_reason else "finished" if self.final_evaluations else "unfinished"

    @cached_property
    def flat_config(self) -> dict[str, Plain]:
        """Return the configuration as dotted keys; values of `arm_definition` take precedence."""
        return flatten(self.config) | self.arm_definition

    @cached_property
    def arm_definition(self) -> dict[str, Plain]:
        """Return the settings that decide what the run learns, except its seed, as dotted keys. Runs of one arm share
        all of them.
        """
        return arm_definition(self.config, self.environment)

    @property
    def is_symbolic(self) -> bool:
        """Return whether the run was trained on tasks over symbols, not on text."""
        return self.environment.get("symbolic", False)

    @property
    def phase_starts_and_normalizers(self) -> list[tuple[int, dict[str, Plain]]]:
        """Return a pair for each training phase: the step after which the phase begins, and the keys of its
        normalizer.
        """
        phases = self.config.get("phases") or [{"normalizer": self.config["model"]["normalizer"]}]
        start_steps = [0, *(round(phase["until"] * self.config["trainer"]["max_steps"]) for phase in phases[:-1])]
        return [(start, phase["normalizer"]) for start, phase in zip(start_steps, phases, strict=True)]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds of runs that trained the initial weights, then the run's own seeds. Runs of two arms with
        equal seeds are paired.
        """
        return training_seeds(self.config, self.environment)

    @property
    def tokens_seen(self) -> int | None:
        """Return the number of tokens that the run had seen at its last validation. Without one, it is the number at
        the first of the other `evaluations`; without evaluations, at the last logged step.
        """
        if self.evaluations:
            return self.evaluations[0].tokens_seen
        tokens = self.curve("train/loss").tokens
        return int(tokens[-1]) if len(tokens) else None

    def curve(self, name: str) -> Curve:
        """Return the curve of the metric that the run logged as `name`."""
        return logged_curve(self.log_lines, name)

    @property
    def tokens_before_run(self) -> int:
        """Return the number of tokens on which the run's initial weights were trained, over all earlier runs. It is 0
        for random initial weights.
        """
        return tokens_before_run(self.environment)

    def recorded_setting(self, name: str) -> Plain:
        """Return the value of setting `name`, such as `precision`; None if it is not recorded. If resumptions changed
        the setting, the value is a text that lists all values.
        """
        return recorded_setting(self.environment, name)

    @property
    def commits_text(self) -> str | None:
        """Return a text that lists the git commits of the run's launch and resumptions, and marks uncommitted changes.
        It is None if no commit is recorded.
        """
        entries = [start for start in run_starts(self.environment) if start.get("git_commit")]
        labels = dict.fromkeys(
            f"{start['git_commit'][:12]}{' with uncommitted changes' * bool(start.get('git_dirty'))}"
            for start in entries
        )
        return ", then ".join(labels) or None

    def environment_entry(self, path: str) -> Plain:
        """Return the entry of environment.json at a dotted `path`, such as `parameters.total`; None if there is no such
        entry.
        """
        return flatten(self.environment).get(path)


def read_run(folder: Path, known_evaluations: Mapping[Path, Evaluation] = MappingProxyType({})) -> RunRecord:
    """Read the record of a run folder. Evaluations and metrics may be absent.

    known_evaluations: evaluations that have been read already, by file path.

    Raises RunError: `folder` is not a run folder, or a file in it can't be read.
    """
    folder = Path(folder)
    require_run(folder, CONFIG_FILE, ENVIRONMENT_FILE)
    config, environment = parse_yaml(read_file(folder, CONFIG_FILE), CONFIG_FILE), read_environment(folder)
    lines, evaluations = read_metrics(folder), last_evaluations(folder, known_evaluations)
    if (folder / METRICS_FILE).is_file():
        check_log(folder)
    return RunRecord(folder, folder.resolve().name, config, environment, lines, tuple(evaluations))
