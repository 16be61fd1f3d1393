"""The LightningModule: one optimizer step on rows that are a pure function of the step."""

import math
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor

from lm.attention.plugins import provenance
from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.data.batches import IGNORED, Batch, train_loader, train_rows
from lm.data.store import Store
from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.model.swapped import swapped
from lm.runs.checkpoints import FORMAT, bare_weights, is_saved
from lm.runs.folder import CHECKPOINTS
from lm.training.optimizers import State, after_swap, freeze, load_named_state, make_optimizer, named_state, set_rates


class TrainModule(L.LightningModule):
    """Trains a `Decoder` on the rows of a token store.

    The loss of a step is the sum of all its targets' losses over their number, however the step is split
    into micro-batches and ranks. The only data state is the step: batches and dropout follow from
    (data fingerprint, seed, step), so a checkpoint needs no position and no random state.
    """

    MOST_SKIPPED = 10  # steps in a row whose update may be left out before the run stops after all

    def __init__(
        self,
        config: Config,
        phase: int,
        store: Store,
        decoder: Decoder,
        compiled: bool,
        wandb_id: str = "",
        told_to_stop: Callable[[], bool] = lambda: False,
    ):
        super().__init__()
        self.config, self.phase, self.store, self.decoder = config, phase, store, decoder
        freeze(decoder, config.train_only)
        self.optimizer_state: State = {}  # to go on from
        # A plain attribute: a compiled module would rename every parameter in the checkpoint.
        self.loss_sum = torch.compile(decoder.loss, dynamic=False) if compiled else decoder.loss  # a graph for each row length
        if compiled:
            lengths = len(train_rows(store, config).shares(config.trainer.max_steps))
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 2 * lengths)
        self.accumulation = config.rank_rows // config.micro_batch
        self.has_ignored = bool(config.data.tasks)  # tokens that are no target
        self.sums: Tensor | None = None  # of this rank's micro-batches so far: loss (nats), targets; (2,) float64 on the device
        self.told_to_stop, self.stop = told_to_stop, False  # this process was; all have agreed to, after the step just made
        self.step_loss = self.grad_norm = self.last_lr = math.nan
        self.nll_since_line, self.targets_since_line = 0.0, 0  # over all ranks
        self.best: dict[str, float] | None = None  # `step` and validation `loss` of the lowest so far
        self.skipped = self.skipped_in_a_row = 0
        self.before_swap: list[Decoder] = []  # the model a phase's swap began with; in a list, or it would be part of this module
        self.wandb_id, self.elapsed_s, self.row_length = wandb_id, 0.0, config.data.seq_len

    @property
    def step_tokens(self) -> int:
        """Predicted tokens of one optimizer step, over all ranks."""
        return self.config.optim.batch_tokens

    def train_dataloader(self):
        """Micro-batches from the current step on (Lightning asks after a checkpoint is restored)."""
        config = self.config
        return train_loader(
            train_rows(self.store, config),
            rank=self.global_rank,
            world=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.global_step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.device.type == "cuda",
        )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """The random stream (dropout's) is a function of (seed, micro-batch, rank): a checkpoint holds no random state."""
        torch.manual_seed((self.config.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss (nats, scalar) of a micro-batch, scaled so that the step's gradient is that of the mean over its tokens."""
        nll, self.row_length = self.loss_sum(batch), batch.tokens.size(1)
        targets = (batch.targets != IGNORED).sum() if self.has_ignored else nll.new_full((), batch.targets.numel())
        sums = torch.stack((nll.detach().double(), targets.double()))
        self.sums = sums if self.sums is None else self.sums + sums
        # Lightning divides by `accumulation`, DDP by the number of ranks.
        return nll * (self.accumulation * self.trainer.world_size / self.step_tokens)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rates."""
        self.last_lr = set_rates(optimizer, self.config, self.phase, self.global_step)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip by the global norm; a loss or gradient that is not finite is the same on all ranks. Collective.

        All that the host must know of the step comes from the device in one transfer, the step's only wait for it.
        """
        trained = [p for p in self.decoder.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])  # of the mean over tokens, not targets
        nll, targets, stop = self._over_ranks()
        nll, targets, stop, self.grad_norm = torch.stack((nll, targets, stop, norm.double())).tolist()
        self.stop, targets = stop > 0, max(1, int(targets))
        if targets != self.step_tokens:  # turn the gradient of the mean over the step's tokens into that of the mean over its targets
            factor = self.step_tokens / targets
            torch._foreach_mul_([p.grad for p in trained], factor)
            norm, self.grad_norm = norm * factor, self.grad_norm * factor
        self.step_loss = nll / targets
        if not (math.isfinite(self.grad_norm) and math.isfinite(nll)):
            self._refuse_update(trained)
            return
        self.skipped_in_a_row = 0
        self.nll_since_line += nll
        self.targets_since_line += targets
        torch.nn.utils.clip_grads_with_norm_(trained, self.config.optim.grad_clip or math.inf, norm)

    def _over_ranks(self) -> Tensor:
        """Loss, targets, and how many ranks were told to stop: (3,) float64, sums over all ranks; starts the next step's."""
        sums, self.sums = torch.cat((self.sums, self.sums.new_full((1,), float(self.told_to_stop())))), None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def _refuse_update(self, trained: list[Tensor]) -> None:
        """Leave this step's update out (`on_nonfinite: skip`), or raise RunError."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        where = f"step {self.global_step + 1}: the loss is {self.step_loss:g}, the gradient's norm {self.grad_norm:g}"
        if self.config.optim.on_nonfinite == "stop":
            advice = (
                "lower optim.lr or raise optim.warmup_steps, in a run of another name; or leave such steps out: optim.on_nonfinite=skip"
            )
            raise RunError(f"{where} ({self._norms()}); checkpoints up to the last saved are intact: {advice}")
        if self.skipped_in_a_row >= self.MOST_SKIPPED:
            raise RunError(f"{where} ({self._norms()}), the {self.skipped_in_a_row}th step in a row; the last checkpoint is intact")
        for parameter in trained:
            parameter.grad = None  # the optimizer then leaves the parameter and its moments as they are

    def _norms(self) -> str:
        """The first parameter whose gradient isn't finite, and the layer with the largest gradient that is."""
        norms = {name: float(p.grad.norm()) for name, p in self.decoder.named_parameters() if p.grad is not None}
        bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
        finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
        first = f"not finite in {bad[0]} and {len(bad) - 1} of {len(norms)} others" if bad else "finite in each parameter"
        largest = max(finite, key=finite.get, default="")
        return first + (f", largest finite norm {finite[largest]:.3g} in {largest}" if largest else "")

    def take_loss(self) -> float:
        """Mean loss (nats per target) of the steps since this was last asked, over all ranks; NaN if all their updates were left out."""
        mean = self.nll_since_line / self.targets_since_line if self.targets_since_line else math.nan
        self.nll_since_line, self.targets_since_line = 0.0, 0
        return mean

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer with the state of the checkpoint that training goes on from; `on_before_optimizer_step` sets its learning rates."""
        optimizer = make_optimizer(self.decoder, self.config.optim)
        load_named_state(optimizer, self.optimizer_state)
        self.optimizer_state = {}
        return optimizer

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Go on from a checkpoint: of this phase as it is, of the one before with the normalizers swapped."""
        facts = checkpoint["lm"]
        self.skipped, self.skipped_in_a_row = facts["skipped"], facts["skipped_in_a_row"]
        best = facts["best"]  # a run that goes back may find the weights gone; then the next validation is the best
        self.best = best if best and is_saved(self.config.run_folder / CHECKPOINTS, best["step"]) else None
        self.elapsed_s = facts["elapsed_s"]
        self.nll_since_line, self.targets_since_line = facts["nll_since_line"], facts["targets_since_line"]
        self.optimizer_state, checkpoint["optimizer_states"] = checkpoint["optimizer"], []
        if facts["phase"] != self.phase:
            self._swap(checkpoint)
        # Count Lightning's micro-batches anew: the resumed run may split a step otherwise (micro_batch, devices).
        done = checkpoint["global_step"] * self.accumulation
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts.update(ready=done, started=done, processed=done, completed=done - (counts["ready"] - counts["completed"]))

    def _swap(self, checkpoint: dict[str, object]) -> None:
        """Turn the checkpoint of the phase before, as it was at its end, into one of this phase."""
        before = Decoder(self.config.model_in(checkpoint["lm"]["phase"]), self.decoder.vocab_size, self.decoder.seq_len, seed=None)
        before.load_state_dict(bare_weights(checkpoint))
        self.optimizer_state = after_swap(self.optimizer_state)
        self.before_swap = [before]
        weights = swapped(before, self.decoder.config.normalizer).state_dict()
        checkpoint["state_dict"] = {f"decoder.{name}": value for name, value in weights.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Plain data beside Lightning's own: enough to rebuild the model and to refuse the wrong one; the optimizer's state by name."""
        del checkpoint["optimizer_states"]
        checkpoint["optimizer"] = named_state(self.optimizers(use_pl_optimizer=False))
        checkpoint["lm"] = {
            "format": FORMAT,
            "config": to_yaml(self.config),
            "vocab_size": self.decoder.vocab_size,
            "data_fingerprint": self.store.fingerprint,
            "step": self.global_step,
            "tokens": self.global_step * self.step_tokens,
            "phase": self.phase,
            "plugins": provenance(self.config.normalizer_names),
            "best": self.best,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "nll_since_line": self.nll_since_line,
            "targets_since_line": self.targets_since_line,
            "elapsed_s": self.elapsed_s,
            "wandb_id": self.wandb_id,
        }
