"""The LightningModule: loss and gradient of one optimizer step, whose sequences are a pure function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.data.batches import IGNORED, Batch, train_loader, train_sequences
from lm.model.device import use_compile_cache
from lm.model.transfer import gradients_to_norm
from lm.training.dynamics import gradient_norms, transferred
from lm.training.lightning import L
from lm.training.nonfinite import skip_or_stop
from lm.training.optimizers import load_named_state, make_optimizer, set_rates
from lm.training.run_context import RunContext
from lm.training.starting import PhaseStart


@dataclass(frozen=True)
class Step:
    """An optimizer step, the same on all ranks: loss and z-loss (nats per target), gradient norm before clipping, whether a rank was
    asked to stop after it, and the gradient norms of layers by their names in metrics.jsonl, if they are logged."""

    loss: float
    z_loss: float
    grad_norm: float
    stop: bool
    layers: dict[str, float]


class TrainModule(L.LightningModule):
    """Trains a `Decoder` on the sequences of a token store.

    The loss of a step is the sum of all its targets' losses over their number, however the step is split
    into micro-batches and ranks. The only data state is the step: batches and dropout follow from
    (data fingerprint, seed, step), so a checkpoint needs no position and no random state.

    Args:
        start: decoder, state and optimizer to go on from.
        stop_requested: whether this process was asked to stop.

    Attributes:
        last: the step just made.
        sequence_length: tokens in each of its sequences.
    """

    last: Step

    def __init__(self, run: RunContext, start: PhaseStart, stop_requested: Callable[[], bool]):
        super().__init__()
        self.config, self.store, self.decoder, self.start = run.config, run.store, start.decoder, start
        self.decoder.recomputes = run.config.trainer.activation_checkpointing
        config = run.config
        if run.machine.compiles:
            use_compile_cache()
            self.decoder.compile_blocks(len(train_sequences(run.store, config).length.fractions(config.trainer.max_steps)))
        self.accumulation = config.rank_sequences // config.micro_batch
        self.has_ignored = bool(config.data.tasks)  # some tokens are no targets
        self.sums: Tensor | None = None  # loss, z-loss (nats) and targets of this rank's micro-batches so far; (3,) float64 on the device
        self.stop_requested, self.sequence_length = stop_requested, config.data.seq_len

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        """Micro-batches from the phase's first step on."""
        config = self.config
        return train_loader(
            train_sequences(self.store, config),
            rank=self.global_rank,
            world=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.start.step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.device.type == "cuda",
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, with the state from which training continues."""
        optimizer = make_optimizer(self.decoder, self.config.optim)
        load_named_state(optimizer, self.start.optimizer)
        self.start.optimizer = {}
        return optimizer

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed dropout by (seed, micro-batch, rank), so that a checkpoint needs no random state."""
        micro_batch = self.global_step * self.accumulation + batch_idx % self.accumulation
        torch.manual_seed((self.config.seed * 1_000_003 + micro_batch) * 4099 + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss (nats, scalar) of a micro-batch, scaled so that the step's gradient is that of the mean over its tokens."""
        (loss, terms), self.sequence_length = self.decoder.training_loss(batch, self.config.optim.z_loss or 0.0), batch.tokens.size(1)
        targets = (batch.targets != IGNORED).sum() if self.has_ignored else terms.new_full((), batch.targets.numel())
        sums = torch.cat((terms.double(), targets.double().unsqueeze(0)))
        self.sums = sums if self.sums is None else self.sums + sums
        # Lightning divides by `accumulation`, DDP by the number of ranks.
        return loss * (self.accumulation * self.trainer.world_size / self.config.optim.batch_tokens)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the step's learning rates."""
        set_rates(optimizer, self.config, self.start.phase, self.global_step)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the global norm; a loss or gradient that is not finite is the same on all ranks. Collective.

        All that the host needs to know comes from the device in one transfer, the step's only synchronization.
        """
        optim, state, log = self.config.optim, self.start.state, self.config.log
        logged = "gradient_norm" in log.dynamics and log.is_due(self.global_step + 1, self.config.trainer.max_steps)
        trained = [p for p in self.decoder.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients_to_norm(self.decoder, self.decoder.config))  # of the mean over tokens, not targets
        step = ["loss", "z_loss", "targets", "stop", "norm"], torch.cat((self._all_reduced(), norm.double().unsqueeze(0)))
        layers = transferred([step, *(gradient_norms(self.decoder) if logged else [])])
        nll, z_loss, targets, stop, grad_norm = (layers.pop(name) for name in step[0])
        targets = max(1, int(targets))
        if targets != optim.batch_tokens:  # turn the gradient of the mean over the step's tokens into that of the mean over its targets
            factor = optim.batch_tokens / targets
            torch._foreach_mul_([p.grad for p in trained], factor)
            norm, grad_norm = norm * factor, grad_norm * factor
            layers = {name: value * factor for name, value in layers.items()}
        self.last = Step(nll / targets, z_loss / targets, grad_norm, stop > 0, layers)
        if math.isfinite(grad_norm) and math.isfinite(nll):
            state.count_step(nll, targets)
            torch.nn.utils.clip_grads_with_norm_(trained, optim.grad_clip or math.inf, norm)
        else:
            found = f"the loss is {self.last.loss:g}, the gradient's norm {grad_norm:g}"
            skip_or_stop(self.decoder, state, optim.on_nonfinite, self.global_step + 1, found)

    def _all_reduced(self) -> Tensor:
        """Sums over all ranks, (4,) float64: loss, z-loss (nats), targets, and ranks asked to stop. Resets this rank's sums."""
        sums, self.sums = torch.cat((self.sums, self.sums.new_full((1,), float(self.stop_requested())))), None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums
