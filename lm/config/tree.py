"""Defines the configuration of a run as a tree of dataclasses, its canonical form, and the effect of each key.

`lm.config.load` reads and checks configurations.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from lm.config.data_config import DataConfig
from lm.config.eval_config import EvalConfig
from lm.config.model_config import ModelConfig
from lm.config.removed_keys import drop_removed_keys
from lm.config.schema import Effect, build_block, effect_at, key, section
from lm.config.training_config import LogConfig, OptimConfig, Phase, TrainerConfig
from lm.files import expand_home
from lm.plain import Plain, flatten, to_plain


@dataclass
class ExperimentConfig:
    """The options of the block `experiment`, which `lm compare` sets in each run: the run's experiment, arm, size,
    stage (tuning or final) and learning rate. In runs of other commands these options are null.
    """

    name: str | None = key(None, "name of the experiment")
    arm: str | None = key(None, "arm of the run")
    size: str | None = key(None, "size of the run's model; null if the experiment has one size")
    stage: Literal["tune", "final"] | None = key(
        None, "`tune`: the run helps to choose a learning rate; `final`: it is judged"
    )
    rate: float | None = key(None, "value of the key that the experiment tunes")


@dataclass
class Config:
    """The configuration of a run."""

    name: str = key("", "name of the run; empty: the first configuration file's name, or `run`", {"affects": "label"})
    runs: str = key("runs", "folder that holds the run folders", {"affects": "label"})
    resume: str = key(
        "",
        "`auto`: go on from the run's last checkpoint; or the path of one of its checkpoints; empty: a new run",
        {"affects": "label"},
    )
    init_from: str = key("", "start a new run from these weights: a run folder, a checkpoint or an export")
    branch_from: str = key(
        "",
        "start a new run at a step of another one, with its weights, optimizer state and place in the data, under "
        "another length or schedule: a checkpoint, or a run folder for its last; all other keys as they were",
        omit_default=True,
    )
    train_only: Literal["normalizer"] | None = key(
        None, "`normalizer`: train the normalizer's parameters alone; null: everything"
    )
    seed: int = key(
        1,
        "seed of initial weights, dropout and, unless data.seed is given, the order of the batches",
        {"affects": "seed"},
        ge=0,
        lt=2**31,
    )
    data: DataConfig = section(DataConfig, "corpus, tokenizer and sequences")
    model: ModelConfig = section(ModelConfig, "the decoder", {"affects": "model"})
    phases: list[Phase] = section(
        Phase,
        "parts of training, with a normalizer each; empty: `model.normalizer` throughout",
        {"on_resume": "ahead"},
        default=[],
    )
    optim: OptimConfig = section(OptimConfig, "optimizer and schedule")
    trainer: TrainerConfig = section(TrainerConfig, "steps, devices and precision", {"affects": "execution"})
    eval: EvalConfig = section(
        EvalConfig,
        "what is measured while training and by `lm eval`",
        {"affects": "evaluation", "commands": ("train", "eval", "swap")},
    )
    experiment: ExperimentConfig = section(
        ExperimentConfig,
        "the experiment and arm that the run belongs to",
        {"affects": "label", "commands": ("train", "swap")},
        user_settable=False,
    )
    log: LogConfig = section(LogConfig, "metrics and progress", {"affects": "label"})

    @property
    def run_folder(self) -> Path:
        """Return the folder that the run is written to."""
        return expand_home(self.runs) / self.name

    @property
    def world_size(self) -> int:
        """Return the number of processes on all machines together."""
        return self.trainer.devices * self.trainer.num_nodes

    @property
    def sequences_per_rank(self) -> int:
        """Return the number of sequences that each process sees in one optimizer step."""
        return self.optim.batch_tokens // (self.data.seq_len * self.world_size)

    @property
    def micro_batch(self) -> int:
        """Return the number of sequences in one forward pass: `trainer.micro_batch`, or a default if that is null.

        The default is the largest divisor of `sequences_per_rank` that gives at most 16,384 tokens, at least 1.
        """
        max_sequences = max(1, 16384 // self.data.seq_len)
        divisors = [
            size
            for size in range(1, min(self.sequences_per_rank, max_sequences) + 1)
            if self.sequences_per_rank % size == 0
        ]
        return self.trainer.micro_batch or divisors[-1]

    @property
    def checkpoint_every(self) -> int:
        """Return the number of steps between checkpoints: `trainer.checkpoint_every`, or a tenth of the run if that is
        null.
        """
        return self.trainer.checkpoint_every or max(1, self.trainer.max_steps // 10)

    @property
    def validation_every(self) -> int:
        """Return the number of steps between validations: `eval.every`, or a twentieth of the run if that is null."""
        return self.eval.every or max(1, self.trainer.max_steps // 20)

    @property
    def phases_or_default(self) -> list[Phase]:
        """Return the phases of training: the key `phases`, or if that is empty a single phase with
        `model.normalizer`.
        """
        return self.phases or [Phase(1.0, self.model.normalizer)]

    @property
    def normalizer_names(self) -> set[str]:
        """Return the names of the normalizers of all layers and phases."""
        return {options.name for phase in self.phases_or_default for options in phase.normalizer.layer_options()}

    @property
    def phase_ends(self) -> list[int]:
        """Return the number of optimizer steps that are done at the end of each phase of `phases_or_default`."""
        return [round(phase.until * self.trainer.max_steps) for phase in self.phases_or_default]

    def phase_index(self, step: int) -> int:
        """Return the index in `phases_or_default` of the phase in which training is after `step` steps. After all
        steps, return the last index.
        """
        return min(bisect_right(self.phase_ends, step), len(self.phases_or_default) - 1)

    def model_in_phase(self, phase_index: int) -> ModelConfig:
        """Return the decoder's options in a phase of `phases_or_default`, with this phase's normalizer and positions.
        Formulas of normalizers and positions take `data.seq_len` as the training length in all phases, also in a phase
        that has a `seq_len` of its own.
        """
        positions = [entry.position for entry in self.phases_or_default[: phase_index + 1] if entry.position]
        position = positions[-1] if positions else self.model.position
        return replace(self.model, normalizer=self.phases_or_default[phase_index].normalizer, position=position)

    def with_phase_seq_len(self, phase_index: int) -> "Config":
        """Return the configuration with a phase's sequence length in `data.seq_len`, by which training reads data."""
        lengths = [entry.seq_len for entry in self.phases_or_default[: phase_index + 1] if entry.seq_len]
        return replace(self, data=replace(self.data, seq_len=lengths[-1])) if lengths else self

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, 0-based, times the learning-rate factor of the step's
        phase.
        """
        return self.optim.lr_at(step, self.trainer.max_steps) * self.phases_or_default[self.phase_index(step)].lr_factor


# ---------------------------------------------------------------- one form for equal configurations


def resolve_null_model_keys(config: dict[str, Plain]) -> dict[str, Plain]:
    """Return a configuration (plain data, as in config.yaml) in a canonical form: configurations of one model have
    equal `model` blocks.

    Null keys of `model` get the values that they stand for. Removed keys at their former defaults are left out. No
    plugin is imported; the `model` block of an invalid configuration is returned unchanged.
    """
    model = config.get("model")
    if not isinstance(model, dict):
        return config
    config = drop_removed_keys(config)
    model, problems = config["model"], []
    model_config = build_block(
        ModelConfig, {name: value for name, value in model.items() if name != "normalizer"}, "model", problems
    )
    if problems:
        return config
    resolved_values = {
        name: value for name, value in model_config.block.resolved_options(model_config).items() if name in model
    }
    # A key whose resolved value is null is left out: it has the value of another key.
    model = {
        name: value
        for name, value in (model | resolved_values).items()
        if value is not None or name not in resolved_values
    }
    return config | {"model": model}


def config_differences(config_a: dict[str, Plain], config_b: dict[str, Plain]) -> dict[str, tuple[Plain, Plain]]:
    """Map each dotted key in which two configurations (plain data) differ to its two values; None where a key is
    absent.

    A key written alike in both, e.g. `head_size: null`, is left out, even if another key such as `n_embd` changes its
    resolved value. If the `name` of a block differs, other options of the block are left out.
    """
    flat_configs = [flatten(config) for config in (config_a, config_b)]
    resolved_configs = [flatten(resolve_null_model_keys(config)) for config in (config_a, config_b)]
    values = {
        key: tuple(config.get(key) for config in resolved_configs) for key in resolved_configs[0] | resolved_configs[1]
    }
    changes = {
        key: (a, b)
        for key, (a, b) in values.items()
        if a != b and flat_configs[0].get(key, a) != flat_configs[1].get(key, b)
    }
    renamed_blocks = tuple(key.removesuffix("name") for key in changes if key.endswith(".name"))
    return {key: pair for key, pair in changes.items() if key.endswith(".name") or not key.startswith(renamed_blocks)}


# ---------------------------------------------------------------- the effect of a key


@lru_cache(maxsize=2**14)  # a report of many runs asks for the same keys of each
def key_effect(path: str) -> Effect:
    """Return the effect of the key at a dotted path: what it affects, and in which commands. A key unknown to this
    version affects training.
    """
    return effect_at(Config, path) or Effect()


def distinguishes_arms(path: str) -> bool:
    """Return whether the key at `path` affects the weights that a run learns; False for a seed. Runs that differ in
    such a key belong to different arms.
    """
    return key_effect(path).affects in ("model", "training", "numerics")


@lru_cache(maxsize=1)
def keys_recorded_at_each_start() -> tuple[str, ...]:
    """Return the paths of keys that distinguish arms and may change on resume. environment.json records their values at
    each start of a run.
    """
    paths = flatten(to_plain(Config(), include_omittable_keys=True))
    return tuple(path for path in paths if distinguishes_arms(path) and key_effect(path).on_resume == "free")


def model_function_options(model: ModelConfig) -> dict[str, Plain]:
    """Return {dotted path within `model`: value} of the options that determine which function a model's weights
    compute. The values are as `resolve_null_model_keys` gives them.
    """
    plain = resolve_null_model_keys({"model": to_plain(model)})["model"]
    return {path: value for path, value in flatten(plain).items() if key_effect(f"model.{path}").affects == "model"}
