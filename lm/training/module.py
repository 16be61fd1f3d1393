"""The LightningModule: one optimizer step on rows that are a pure function of the step."""

import math

import lightning as L
import torch
from torch import Tensor

from lm.config import Config, to_yaml
from lm.data.batches import TrainRows, train_loader
from lm.data.store import Store
from lm.errors import RunError
from lm.model import Decoder
from lm.training.optim import lr_factor, make_optimizer


class TrainModule(L.LightningModule):
    """Trains a `Decoder` on the rows of a token store.

    The loss of a step is the sum of all its tokens' losses over their number, however the step is split
    into micro-batches and ranks. The only data state is the step: batches and dropout follow from
    (data fingerprint, seed, step), so a checkpoint needs no position and no random state.
    """

    def __init__(self, config: Config, store: Store, decoder: Decoder, compiled: bool):
        super().__init__()
        self.config, self.store, self.decoder = config, store, decoder
        # A plain attribute: a compiled module would rename every parameter in the checkpoint.
        self.loss_sum = torch.compile(decoder.loss) if compiled else decoder.loss
        self.accumulation = config.rank_rows // config.micro_batch
        self.step_nll: Tensor | None = None
        self.grad_norm = self.last_lr = math.nan

    @property
    def step_tokens(self) -> int:
        """Predicted tokens of one optimizer step, over all ranks."""
        return self.config.optim.batch_tokens

    def train_dataloader(self):
        """Micro-batches from the current step on (Lightning asks after a checkpoint is restored)."""
        config = self.config
        return train_loader(
            TrainRows(self.store, config.data.seq_len, config.optim.batch_tokens // config.data.seq_len, config.seed),
            rank=self.global_rank,
            world=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.global_step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.device.type == "cuda",
        )

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Dropout's stream is a function of (seed, micro-batch, rank)."""
        if self.config.model.dropout:
            torch.manual_seed((self.config.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss (nats, scalar) of a micro-batch (rows, seq_len + 1), scaled so that the step's gradient is that of the mean."""
        nll = self.loss_sum(batch)
        self.step_nll = nll.detach() if self.step_nll is None else self.step_nll + nll.detach()
        # Lightning divides by `accumulation`, DDP by the number of ranks.
        return nll * (self.accumulation * self.trainer.world_size / self.step_tokens)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the global norm, and stop at a norm that is not finite (equal on all ranks)."""
        self.last_lr = optimizer.param_groups[0]["lr"]
        limit = self.config.optim.grad_clip or math.inf
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), limit))
        if not math.isfinite(self.grad_norm):
            raise RunError(
                f"step {self.global_step + 1}: the gradient is {self.grad_norm} (first in {self._first_nonfinite()}); "
                f"checkpoints up to the last saved are intact: lower optim.lr or raise optim.warmup_steps, in a run of another name"
            )

    def _first_nonfinite(self) -> str:
        for name, parameter in self.decoder.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                return name
        return "their sum"

    def take_step_loss(self) -> float:
        """Mean loss (nats per token) of the step just made, over all ranks; starts the next sum. Collective."""
        assert self.step_nll is not None
        nll, self.step_nll = self.step_nll, None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(nll)
        return float(nll) / self.step_tokens

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW and its schedule, stepped once an optimizer step."""
        optim, max_steps = self.config.optim, self.config.trainer.max_steps
        optimizer = make_optimizer(self.decoder, optim)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, optim, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Count Lightning's micro-batches anew: the resumed run may split a step otherwise (micro_batch, devices)."""
        done = checkpoint["global_step"] * self.accumulation
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts.update(ready=done, started=done, processed=done, completed=done - (counts["ready"] - counts["completed"]))

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Plain data beside Lightning's own: enough to rebuild the model and to refuse the wrong one."""
        checkpoint["lm"] = {
            "config": to_yaml(self.config),
            "vocab_size": self.decoder.vocab_size,
            "data_fingerprint": self.store.fingerprint,
            "step": self.global_step,
            "tokens": self.global_step * self.step_tokens,
        }
