"""Keys of the blocks `optim`, `phases`, `trainer` and `log`: the options of training."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from lm.attention.options import Options
from lm.config.data_config import MAX_SEQ_LEN
from lm.config.model_config import POSITIONS, Position
from lm.config.normalizers import NORMALIZER_OPTIONS
from lm.config.removed_keys import removed_name_advice
from lm.config.schema import key, section, variant
from lm.errors import Problem


@dataclass
class ConstantRate:
    """The learning rate stays at its peak after warm-up."""

    name: ClassVar[str] = "constant"

    def rate_factor(self, step: int, warmup_steps: int, max_steps: int) -> float:
        """Return the learning rate of a step after warm-up, as a fraction of the peak; `step` is counted from 0 at the
        start of the run.
        """
        return 1.0


@dataclass
class CosineRate:
    """The learning rate decays along half a cosine, from the peak to `final_fraction` of the peak."""

    name: ClassVar[str] = "cosine"
    final_fraction: float = key(0.1, "final learning rate, as a fraction of the peak", ge=0, le=1)

    def rate_factor(self, step: int, warmup_steps: int, max_steps: int) -> float:
        progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass
class WSDRate:
    """The learning rate warms up, stays at its peak, and decays linearly in the last steps, a fraction `decay_fraction`
    of all (WSD).
    """

    name: ClassVar[str] = "wsd"
    decay_fraction: float = key(0.2, "fraction of all steps over which the rate decays", gt=0, le=1)
    final_fraction: float = key(0.0, "final learning rate, as a fraction of the peak", ge=0, le=1)

    def rate_factor(self, step: int, warmup_steps: int, max_steps: int) -> float:
        decay_steps = max(1, round(self.decay_fraction * max_steps))
        return self.final_fraction + (1 - self.final_fraction) * min(1.0, (max_steps - step) / decay_steps)


class OptimizerOptions:
    """Base class of the options of optimizers, the rules by which gradients become updates."""

    name: ClassVar[str]
    # weight decay of the groups in DECAYED_GROUPS; 0 for an optimizer without this option
    weight_decay: ClassVar[float] = 0.0


@dataclass
class AdamW(OptimizerOptions):
    """These are the options of AdamW (arXiv 1711.05101), which updates all parameters."""

    name: ClassVar[str] = "adamw"
    beta1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = key(
        0.1, "weight decay, times the learning rate, of matrices, embedding and head; optim.groups sets others", ge=0
    )


@dataclass
class Muon(AdamW):
    """Muon (kellerjordan.github.io/posts/muon) updates each projection in the group `matrices`. AdamW, with the options
    of `AdamW`, updates all other parameters.
    """

    name: ClassVar[str] = "muon"
    momentum: float = key(0.95, "decay of the gradients' running mean, which is orthogonalised", ge=0, lt=1)

    def relative_rate(self, n_outputs: int, n_inputs: int) -> float:
        """Return the learning rate of a projection from `n_inputs` to `n_outputs` dimensions, as a multiple of the
        group's learning rate. Muon's updates then have about the size of AdamW's updates (arXiv 2502.16982).
        """
        return 0.2 * math.sqrt(max(n_outputs, n_inputs))


OPTIMIZERS = {v.name: v for v in (AdamW, Muon)}  # each of these has a builder in lm.training.optimizers
# groups with the optimizer's weight decay if `groups.*.weight_decay` is null
DECAYED_GROUPS = ("matrices", "embedding", "head")


@dataclass
class ParameterGroup:
    """The learning rate and weight decay of one group of parameters."""

    lr_factor: float = key(1.0, "multiplies the schedule's learning rate", ge=0)
    weight_decay: float | None = key(
        None, "weight decay; null: the optimizer's for matrices, embedding and head, 0 for others", ge=0
    )


@dataclass
class ParameterGroups:
    """The options of each group of parameters; each trained parameter is in exactly one group."""

    matrices: ParameterGroup = section(ParameterGroup, "parameters of rank 2 and more that are in no other group")
    embedding: ParameterGroup = section(ParameterGroup, "embeddings of tokens (also a tied head) and learned positions")
    head: ParameterGroup = section(ParameterGroup, "the output matrix")
    vectors: ParameterGroup = section(
        ParameterGroup, "parameters of rank below 2 that are in no other group: gains and biases"
    )
    normalizer: ParameterGroup = section(ParameterGroup, "all parameters of normalizers")


@dataclass
class OptimConfig:
    """The options of the block `optim`: the optimizer, the batch size and the learning rate by step."""

    lr: float = key(1e-3, "peak learning rate", {"on_resume": "branch"}, gt=0)
    optimizer: OptimizerOptions = variant(OPTIMIZERS, "adamw", "how gradients become updates")
    groups: ParameterGroups = section(ParameterGroups, "learning rate and weight decay of groups of parameters")
    grad_clip: float = key(1.0, "largest norm of the gradient; 0: no clipping", ge=0)
    warmup_steps: int = key(
        100, "steps of linear warm-up; in a shorter run, all steps", {"on_resume": "branch"}, ge=0, le=10**9
    )
    schedule: ConstantRate | CosineRate | WSDRate = variant(
        {v.name: v for v in (ConstantRate, CosineRate, WSDRate)},
        "cosine",
        "learning rate after warm-up",
        {"on_resume": "branch"},
    )
    batch_tokens: int = key(8192, "tokens in one optimizer step, over all devices", ge=2, le=10**9)

    def lr_at(self, step: int, max_steps: int) -> float:
        """Return the learning rate of the 0-based `step`. Warm-up is linear and ends at the peak: step 0 has the rate
        lr / warmup_steps.
        """
        warmup_steps = self.n_warmup_steps(max_steps)
        factor = (
            (step + 1) / warmup_steps
            if step < warmup_steps
            else self.schedule.rate_factor(step, warmup_steps, max_steps)
        )
        return self.lr * factor

    def n_warmup_steps(self, max_steps: int) -> int:
        """Return the number of warm-up steps in a run of `max_steps` steps."""
        return min(self.warmup_steps, max_steps)

    def weight_decay(self, group: str) -> float:
        """Return the weight decay coefficient of `group`: a step subtracts learning rate x coefficient x weight from
        each weight.
        """
        group_decay = getattr(self.groups, group).weight_decay
        optimizer_decay = self.optimizer.weight_decay if group in DECAYED_GROUPS else 0.0
        return optimizer_decay if group_decay is None else group_decay


@dataclass
class Phase:
    """A phase is a part of training. A later phase may change the normalizer, the position encoding, the sequence
    length and the learning rate; it keeps weights and optimizer state.
    """

    until: float = key(1.0, "where the phase ends, as a fraction of trainer.max_steps; 1 for the last", gt=0, le=1)
    normalizer: Options | None = variant(
        NORMALIZER_OPTIONS, None, "how attention scores become weights, in this phase; null: as in the phase before"
    )
    position: Position | None = variant(
        POSITIONS, None, "position information in this phase; null: as in the phase before", omit_default=True
    )
    seq_len: int | None = key(
        None,
        "tokens in a training sequence in this phase; null: as in the phase before, in the first data.seq_len. "
        "Normalizers and evaluations still take data.seq_len as the training length",
        ge=2,
        le=MAX_SEQ_LEN,
        omit_default=True,
    )
    lr_factor: float = key(1.0, "factor on all learning rates in this phase", gt=0, le=1e6, omit_default=True)

    @property
    def label(self) -> str:
        """Return the normalizer, and what else the phase changes, in words."""
        changes = [
            self.position.label if self.position else "",
            f"sequences of {self.seq_len:,} tokens" if self.seq_len else "",
            f"rates x {self.lr_factor:g}" if self.lr_factor != 1 else "",
        ]
        return ", ".join(filter(None, [self.normalizer.label(), *changes]))

    warmup_steps: int = key(
        0, "steps of linear warm-up, from the phase's start, for the new normalizer's parameters only", ge=0, le=10**9
    )


MODEL_COMMANDS = ("train", "eval", "swap", "diagnose")  # the commands that run a model


def class_name_problems(key: str, entries: list[str | dict], known_names: Sequence[str] = ()) -> Iterator[Problem]:
    """Yield a problem for each of `entries` that is neither one of `known_names` nor the import path of a class,
    `package.module:Class`.

    Args:
        key: the configuration key that lists the entries, for the problems.
        entries: names, or blocks with a key `name`.
    """
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if name not in known_names and not (isinstance(name, str) and all(name.partition(":"))):
            remedy = f"write package.module:Class, or {{name: package.module:Class}}{removed_name_advice(name)}"
            reason = f"names no class{''.join(f', nor {known_name}' for known_name in known_names)}"
            yield Problem(key, entry, reason, remedy)


@dataclass
class TrainerConfig:
    """The options of the block `trainer`: steps, devices, precision, checkpoints and callbacks."""

    max_steps: int | None = key(
        1000,
        "optimizer steps; null: as tokens_per_parameter says",
        {"affects": "training", "on_resume": "free"},
        ge=1,
        le=10**9,
    )
    tokens_per_parameter: float | None = key(
        None,
        "in place of max_steps: training tokens per parameter, normalizers' parameters not counted; of the two keys, "
        "the last given counts",
        gt=0,
        le=10**6,
    )
    accelerator: Literal["auto", "cpu", "gpu"] = key(
        "auto", "`auto`: the GPU if there is one", {"commands": MODEL_COMMANDS}
    )
    devices: int = key(1, "processes on this machine, one for each device (DDP)", ge=1, le=1024)
    num_nodes: int = key(1, "number of machines", ge=1, le=10**4)
    micro_batch: int | None = key(
        None, "sequences in one forward pass; null: as many as have at most 16,384 tokens", ge=1, le=10**6
    )
    precision: Literal["auto", 32, "bf16-mixed"] = key(
        "auto",
        "`auto`: bf16-mixed where the device has native bf16, else 32",
        {"affects": "numerics", "commands": MODEL_COMMANDS},
    )
    compile: Literal["auto", True, False] = key(
        "auto",
        "torch.compile; `auto`: if the run, or its experiment, is long enough to gain time",
        {"affects": "numerics"},
    )
    activation_checkpointing: bool = key(
        False,
        "keep only the inputs of layers for the backward pass, which computes other activations again: less memory, "
        "more time",
        omit_default=True,
    )
    threads: int | None = key(
        None,
        "CPU threads of each process; null: usable cores / devices, at most OMP_NUM_THREADS",
        {"commands": MODEL_COMMANDS},
        ge=1,
        le=1024,
    )
    checkpoint_every: int | None = key(None, "steps between checkpoints; null: ten a run", ge=1, le=10**9)
    keep_checkpoints: int = key(
        2,
        "number of last checkpoints to keep, beside the best (lowest selection loss) and those at phases' ends",
        ge=1,
        le=10**6,
    )
    callbacks: list[str | dict] = key(
        [],
        "your own Lightning Callbacks, each package.module:Class or {name: package.module:Class, OPTION: VALUE}; what"
        " they give to self.log is in metrics.jsonl and can decide an experiment",
        {"affects": "training", "on_resume": "free"},
        omit_default=True,
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each entry of `callbacks` that names no class."""
        yield from class_name_problems("callbacks", self.callbacks)


@dataclass
class LogConfig:
    """The options of the block `log`: which metrics are logged when and where, and how progress is shown."""

    every: int = key(10, "steps between logged metrics", ge=1, le=10**9)
    wandb: Literal["auto", "online", "offline", "disabled"] = key(
        "auto", "`auto`: online with credentials, else offline, or in an experiment disabled"
    )
    to: list[str | dict] = key(
        ["wandb"],
        "where metrics go beside metrics.jsonl: wandb, or Lightning's Loggers (TensorBoard and your own), named as in "
        "trainer.callbacks",
    )
    progress: Literal["auto", "bar", "lines", "none"] = key("auto", "`auto`: a bar on a terminal, else lines")

    @property
    def logger_classes(self) -> list[str | dict]:
        """Return the entries of `to` that name classes: loggers other than wandb."""
        return [entry for entry in self.to if entry != "wandb"]

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each entry of `to` that is neither `wandb` nor names a class."""
        yield from class_name_problems("to", self.to, ["wandb"])

    def is_due(self, step: int, max_steps: int) -> bool:
        """Return whether metrics are logged after optimizer step `step`, 1-based."""
        return step % self.every == 0 or step in (1, max_steps)
