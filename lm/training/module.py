"""The LightningModule that computes loss and gradient of each optimizer step, and functions that compute metrics of its
decoder.

The functions give values of the normalizers' parameters, and the metrics that `log.dynamics` names. Metrics are named
`METRIC/layerL/headH`, or `METRIC/layerL` if they have one value a layer; layers and heads count from 0. Values stay on
the device until `copied_to_host` copies all of them to the host at once.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lm.config.tree import Config
from lm.data.batches import IGNORED, Batch, TrainLoader, train_loader, train_sequences
from lm.data.store import Store
from lm.errors import Diverged
from lm.evaluation.evaluation_kind import Measurement
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.device import Device, Machine, eval_mode, use_compile_cache
from lm.plugins import PLUGINS
from lm.progress import StepProgress
from lm.training.mirror import MetricLog
from lm.training.optimizers import load_named_state, make_optimizer, set_learning_rates
from lm.training.starting import PhaseStart, RunState


@contextmanager
def _without_torchmetrics() -> Iterator[None]:
    """Put an empty stand-in in place of torchmetrics while Lightning is imported, as lm logs nothing through
    torchmetrics.

    torchmetrics imports scipy, matplotlib and transformers, and takes many times as long to import as Lightning. Code
    that imports torchmetrics before or afterwards gets the package itself.
    """
    stand_in = ModuleType("torchmetrics")
    stand_in.__version__ = "1.0.0"  # the newest version that Lightning tells from older ones
    stand_in.Metric, stand_in.MetricCollection = type("Metric", (), {}), type("MetricCollection", (), {})
    is_stand_in = sys.modules.setdefault("torchmetrics", stand_in) is stand_in
    try:
        yield
    finally:
        if is_stand_in:
            del sys.modules["torchmetrics"]


with _without_torchmetrics():
    import lightning as L

NamedValues = tuple[list[str], Tensor]  # names of metrics, and their values (names,)


def copied_to_host(metrics: Iterable[NamedValues]) -> dict[str, float]:
    """All metrics as floats by name, copied from the device to the host in one transfer."""
    metrics = list(metrics)
    names = [name for group, _ in metrics for name in group]
    return (
        dict(zip(names, torch.cat([values.double() for _, values in metrics]).tolist(), strict=True)) if names else {}
    )


def normalizer_parameters(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield `normalizer/NAME/layerL/headH` for each normalizer's parameter with one value a head. For any other
    parameter yield its root mean square, `normalizer/NAME/layerL/rms`. A parameter shared by layers is named after the
    first of these layers.
    """
    logged_parameters: set[nn.Parameter] = set()
    for layer, normalizer in enumerate(decoder.normalizers()):
        for name, parameter in normalizer.named_parameters():
            if parameter in logged_parameters:
                continue
            logged_parameters.add(parameter)
            prefix, values = f"normalizer/{name}/layer{layer}", parameter.detach().float()
            # a submodule's bias may have this shape by chance
            if "." not in name and values.shape == (normalizer.layer.n_head,):
                yield _head_metrics(prefix, values)
            else:
                yield [f"{prefix}/rms"], values.square().mean().sqrt().view(1)


def logit_scales(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield c(n), the factor on q.k / sqrt(D) for a query that sees n keys in a sequence of the training length L; D is
    the head size.

    `logit_scale/nN/layerL/headH` is c(n) at n = 2, sqrt(L) and L. `logit_scale/slope/...` and
    `logit_scale/intercept/...` are a and b of the least-squares fit a ln n + b over n = 2 ... L. n = 1 is left out: the
    weight of a single key is 1 whatever its score. Normalizers whose scores are no multiple of q.k are left out, too
    (`Normalizer.scale_by_position`).
    """
    for layer, normalizer in enumerate(decoder.normalizers()):
        scale, length = normalizer.scale_by_position(), normalizer.layer.train_length
        if scale is None:
            continue
        scale = scale.to(decoder.embedding.weight.device)  # a normalizer without parameters makes it on the CPU
        for n in sorted({min(2, length), round(math.sqrt(length)), length}):
            yield _head_metrics(f"logit_scale/n{n}/layer{layer}", scale[:, n - 1])
        if length > 2:
            log_n = torch.arange(2, length + 1, device=scale.device, dtype=torch.float64).log()
            centred_log_n = log_n - log_n.mean()
            mean = scale[:, 1:].mean(-1)
            # exactly 0 for a constant scale
            slope = (scale[:, 1:] - mean.unsqueeze(-1)) @ centred_log_n / centred_log_n.square().sum()
            yield _head_metrics(f"logit_scale/slope/layer{layer}", slope)
            yield _head_metrics(f"logit_scale/intercept/layer{layer}", mean - slope * log_n.mean())


def largest_scores(decoder: Decoder, batch: Batch, device: Device) -> Iterator[NamedValues]:
    """Yield `largest_score/layerL/headH`: the largest score (fp32, before normalization) of a query and a key that it
    sees, in a batch.

    Memory holds scores of some queries of one layer at a time (`lm.model.attention_stream`). Model and random state
    stay as they are.
    """
    maxima: dict[int, Tensor] = {}
    with eval_mode(decoder), device.autocast():
        for block in attention_blocks(decoder, batch.to(device.device)):
            # (H,)
            values = block.scores.masked_fill(~block.normalizer.visible(block.layout), -math.inf).amax((0, 2, 3))
            maxima[block.layer] = torch.maximum(maxima[block.layer], values) if block.layer in maxima else values
    for layer, values in maxima.items():
        yield _head_metrics(f"largest_score/layer{layer}", values)


def gradient_norms(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield `train/grad_norm/layerL`: the norm of the gradients of layer L's parameters. Layers without gradients are
    left out.
    """
    for layer, block in enumerate(decoder.blocks):
        if grads := [parameter.grad for parameter in block.parameters() if parameter.grad is not None]:
            yield [f"train/grad_norm/layer{layer}"], get_total_norm(grads).view(1)


def _head_metrics(prefix: str, values: Tensor) -> NamedValues:
    return [f"{prefix}/head{head}" for head in range(len(values))], values


# ---------------------------------------------------------------- steps whose loss or gradient is not finite


MAX_SKIPPED = 10  # consecutive steps that may be skipped before the run stops


def skip_or_stop(decoder: Decoder, state: RunState, policy: str, step: int, reason: str) -> None:
    """Skip the update of step `step` (1-based), whose loss or gradient is not finite, or stop the run. `policy`:
    `optim.on_nonfinite`.

    Raises Diverged: the policy is `stop`, or too many consecutive steps were skipped.
    """
    state.skipped += 1
    state.skipped_in_a_row += 1
    message = f"step {step}: {reason} ({_gradients_in_words(decoder)})"
    if policy == "stop":
        advice = (
            "lower optim.lr or raise optim.warmup_steps, in a run of another name; or skip such steps: "
            "optim.on_nonfinite=skip"
        )
        advice += "".join(f"; or its cause is code from outside: {check}" for check in PLUGINS.checks())
        raise Diverged(f"{message}; checkpoints up to the last saved are intact: {advice}", step)
    if state.skipped_in_a_row >= MAX_SKIPPED:
        raise Diverged(f"{message}, the {state.skipped_in_a_row}th step in a row; the last checkpoint is intact", step)
    for parameter in decoder.parameters():
        parameter.grad = None  # the optimizer then leaves the parameter and its moments as they are


def _gradients_in_words(decoder: Decoder) -> str:
    """Text that names the first parameter whose gradient isn't finite, and the parameter with the largest finite
    gradient norm.
    """
    norms = {name: float(p.grad.norm()) for name, p in decoder.named_parameters() if p.grad is not None}
    bad_names = [name for name, norm in norms.items() if not math.isfinite(norm)]
    finite_norms = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    others = f" and {len(bad_names) - 1} of {len(norms) - 1} others"
    bad_text = f"not finite in {bad_names[0]}{others}" if bad_names else "finite in each parameter"
    largest_name = max(finite_norms, key=finite_norms.get, default="")
    return bad_text + (
        f", largest finite norm {finite_norms[largest_name]:.3g} in {largest_name}" if largest_name else ""
    )


# ---------------------------------------------------------------- the module


@dataclass(frozen=True)
class RunContext:
    """Objects shared by all phases of a run; `measurements` are the evaluations to make, the validation first."""

    config: Config
    store: Store
    measurements: list[Measurement]
    machine: Machine
    wandb_id: str
    log: MetricLog
    progress: StepProgress


class TrainModule(L.LightningModule):
    """Trains a `Decoder` on a run's sequences of text and tasks, in one phase of the run.

    The loss of a step is the mean loss over all its targets, however the step is split into micro-batches and ranks.
    Data fingerprint, seed and step determine batches and dropout, so a checkpoint stores no position in the data and no
    random state.

    start: the decoder, run state and optimizer state from which training continues.
    stop_requested: whether this rank was asked to stop, for example by a signal.
    """

    # results of the step just made, the same on all ranks
    grad_norm: float  # norm of the whole gradient, before clipping
    # gradient norm of each layer by its name in metrics.jsonl; {} if not logged at this step
    layer_grad_norms: dict[str, float]
    stop: bool  # whether a rank was asked to stop after the step
    sequence_length: int  # tokens in each sequence of the present step
    loader: TrainLoader | None = None  # the loader of the phase; None before training has begun

    def __init__(self, run: RunContext, start: PhaseStart, stop_requested: Callable[[], bool]):
        super().__init__()
        self.config, self.store, self.decoder, self.start = run.config, run.store, start.decoder, start
        self.decoder.recomputes = run.config.trainer.activation_checkpointing
        config = run.config
        if run.machine.compiles:
            use_compile_cache()
            self.decoder.compile_blocks(
                len(train_sequences(run.store, config).length.fractions(config.trainer.max_steps))
            )
        self.accumulation = config.rank_sequences // config.micro_batch
        # loss, z-loss (nats) and targets of this rank's micro-batches so far; (3,) float64 on the device
        self.sums: Tensor | None = None
        self.stop_requested, self.sequence_length = stop_requested, config.data.seq_len

    def train_dataloader(self) -> TrainLoader:
        """The loader of this rank's micro-batches, from the step at which training starts or continues."""
        config = self.config
        self.loader = train_loader(
            train_sequences(self.store, config),
            rank=self.global_rank,
            world=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.start.step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.device.type == "cuda",
        )
        return self.loader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, with the optimizer state of `start`, which is then cleared to free memory."""
        optimizer = make_optimizer(self.decoder, self.config.optim)
        load_named_state(optimizer, self.start.optimizer_state)
        self.start.optimizer_state = {}
        return optimizer

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed dropout by (seed, micro-batch, rank), so that a checkpoint needs no random state."""
        micro_batch = self.global_step * self.accumulation + batch_idx % self.accumulation
        seed = (self.config.seed * 1_000_003 + micro_batch) * 4099 + self.global_rank
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds for devices that aren't there
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss (nats, scalar) of a micro-batch, scaled so that the step's gradient is the gradient of the step's mean
        loss over tokens.
        """
        loss, terms = self.decoder.training_loss(batch, self.config.optim.z_loss or 0.0)
        self.sequence_length = batch.tokens.size(1)
        has_ignored = bool(self.config.data.tasks)  # some tokens are no targets
        n_targets = (batch.targets != IGNORED).sum() if has_ignored else terms.new_full((), batch.targets.numel())
        sums = torch.cat((terms.double(), n_targets.double().unsqueeze(0)))
        self.sums = sums if self.sums is None else self.sums + sums
        # Lightning divides the loss by `accumulation`, DDP the gradients by the number of ranks.
        return loss * (self.accumulation * self.trainer.world_size / self.config.optim.batch_tokens)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the step's learning rates."""
        set_learning_rates(optimizer, self.config, self.start.phase, self.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by their global norm, or skip (or stop at) a step with a loss or gradient that is not finite.
        All ranks call it.

        All values that the host needs are copied from the device in one transfer, the step's only synchronization.
        """
        optim, state, log = self.config.optim, self.start.state, self.config.log
        logs_layers = "gradient_norm" in log.dynamics and log.is_due(
            self.global_step + 1, self.config.trainer.max_steps
        )
        trained_parameters = [p for p in self.decoder.parameters() if p.grad is not None]
        # of the mean over tokens, not targets
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained_parameters])
        step_values = (
            ["loss", "z_loss", "targets", "stop", "norm"],
            torch.cat((self._sums_over_ranks(), norm.double().unsqueeze(0))),
        )
        host_values = copied_to_host([step_values, *(gradient_norms(self.decoder) if logs_layers else [])])
        nll, z_loss, n_targets, stop, grad_norm = (host_values.pop(name) for name in step_values[0])
        n_targets = max(1, int(n_targets))
        # turn the gradient of the mean over the step's tokens into that of the mean over its targets
        if n_targets != optim.batch_tokens:
            factor = optim.batch_tokens / n_targets
            torch._foreach_mul_([p.grad for p in trained_parameters], factor)
            norm, grad_norm = norm * factor, grad_norm * factor
            host_values = {name: value * factor for name, value in host_values.items()}
        self.grad_norm, self.layer_grad_norms, self.stop = grad_norm, host_values, stop > 0
        if math.isfinite(grad_norm) and math.isfinite(nll):
            state.count_step(nll, z_loss, n_targets)
            torch.nn.utils.clip_grads_with_norm_(trained_parameters, optim.grad_clip or math.inf, norm)
        else:
            reason = f"the loss is {nll / n_targets:g}, the gradient's norm {grad_norm:g}"
            skip_or_stop(self.decoder, state, optim.on_nonfinite, self.global_step + 1, reason)

    def _sums_over_ranks(self) -> Tensor:
        """Sums over all ranks, (4,) float64: loss, z-loss (nats), targets, number of ranks asked to stop. Resets this
        rank's sums.
        """
        sums, self.sums = torch.cat((self.sums, self.sums.new_full((1,), float(self.stop_requested())))), None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums
