"""The LightningModule computes loss, gradient and update of each optimizer step, and the content of checkpoints. The
LightningDataModule gives each step its batch.
"""

import math
from dataclasses import asdict

import torch
from torch import Tensor

from lm.data.batches import NO_TARGET, Batch, TrainLoader, train_loader, train_sequences
from lm.errors import Diverged
from lm.machine import unblock_stop_signals
from lm.model.decoder import is_normalizer_parameter
from lm.model.device import use_compile_cache
from lm.plugins import PLUGINS
from lm.runs.checkpoints import CHECKPOINT_FORMAT
from lm.training.lightning_import import L
from lm.training.optimizers import OPTIMIZER_STATES_KEY, make_optimizer, set_learning_rates
from lm.training.phase_start import PhaseStart
from lm.training.run_context import RunContext

# Lightning's counters of optimizer steps in a checkpoint, by their keys
STEP_COUNTS_KEY, LOGGED_STEPS_KEY = "epoch_loop.automatic_optimization.optim_progress", "epoch_loop.state_dict"


class LanguageModel(L.LightningModule):
    """This LightningModule trains a `Decoder` on a run's sequences of text and tasks, in one phase of the run.

    The loss of a step is the mean loss over all its targets, however the step is split into micro-batches and ranks.
    Data fingerprint, seed and step determine batches and dropout, so a checkpoint stores no position in the data and no
    random state.

    start: the decoder and run state from which training continues.
    """

    # results of the step just made, the same on all ranks
    grad_norm: float  # norm of the whole gradient, before clipping
    stop_requested: bool  # whether a rank was asked to stop after the step
    sequence_length: int  # tokens in each sequence of the present step
    last_loss_and_speed: tuple[float, float] | tuple[()] = ()  # loss and tokens a second, if the step just logged them

    def __init__(self, run: RunContext, start: PhaseStart):
        super().__init__()
        self.run, self.decoder, self.phase_start = run, start.decoder, start
        self.config = config = run.config.with_phase_seq_len(start.phase)
        self.decoder.recomputes_activations = config.trainer.activation_checkpointing
        if run.machine.compiles:
            use_compile_cache()
            self.decoder.compile_blocks(len(config.data.lengths.weights) or 1)
        self.micro_batches_per_step = config.sequences_per_rank // config.micro_batch
        # loss, z-loss (nats) and targets of this rank's micro-batches so far; (3,) float64 on the device
        self.loss_sums: Tensor | None = None

    def configure_callbacks(self) -> list[L.Callback]:
        """Return no callbacks. Unblock stop signals, which this process blocked while Lightning started other
        processes.

        Lightning calls no earlier hook after starting the processes, and the hook after this one may wait long for
        them.
        """
        unblock_stop_signals()
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; Lightning then loads its state from the checkpoint."""
        return make_optimizer(self.decoder, self.config.optim)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed dropout by seed, micro-batch and rank, so that a checkpoint needs no random state."""
        micro_batch = self.global_step * self.micro_batches_per_step + batch_idx % self.micro_batches_per_step
        seed = (self.config.seed * 1_000_003 + micro_batch) * 4099 + self.global_rank
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes milliseconds for devices that aren't there
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss (nats, scalar) of a micro-batch. It is scaled so that the gradient accumulated in a step is
        the gradient of the step's mean loss over tokens.
        """
        loss = self.decoder.summed_loss(batch)
        self.sequence_length = batch.tokens.size(1)
        has_ignored = bool(self.config.data.tasks)  # some tokens are no targets
        n_targets = (batch.targets != NO_TARGET).sum() if has_ignored else loss.new_full((), batch.targets.numel())
        sums = torch.stack((loss.detach().double(), n_targets.double()))
        self.loss_sums = sums if self.loss_sums is None else self.loss_sums + sums
        # Lightning divides the loss by `micro_batches_per_step`, DDP the gradients by the number of ranks.
        return loss * (self.micro_batches_per_step * self.trainer.world_size / self.config.optim.batch_tokens)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the step's learning rates."""
        set_learning_rates(optimizer, self.config, self.phase_start.phase, self.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by their global norm. All ranks call this hook.

        All values that the host needs are copied from the device in one transfer, the step's only synchronization.

        Raises Diverged: the loss or the gradient is not finite.
        """
        optim, state = self.config.optim, self.phase_start.run_state
        trained_parameters = [p for p in self.decoder.parameters() if p.grad is not None]
        # of the mean over tokens, not targets
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained_parameters])
        step_values = torch.cat((self._sums_over_ranks(), norm.double().unsqueeze(0)))
        nll, n_targets, stop, grad_norm = step_values.tolist()
        n_targets = max(1, int(n_targets))
        # turn the gradient of the mean over the step's tokens into that of the mean over its targets
        if n_targets != optim.batch_tokens:
            factor = optim.batch_tokens / n_targets
            torch._foreach_mul_([p.grad for p in trained_parameters], factor)
            norm, grad_norm = norm * factor, grad_norm * factor
        self.grad_norm, self.stop_requested = grad_norm, stop > 0
        if not (math.isfinite(grad_norm) and math.isfinite(nll)):
            step, gradients = self.global_step + 1, {name: p.grad for name, p in self.decoder.named_parameters()}
            bad_names = (name for name, grad in gradients.items() if grad is not None and not grad.isfinite().all())
            message = f"step {step}: the loss is {nll / n_targets:g}, the gradient's norm {grad_norm:g}"
            message += f" (first gradient that is not finite: {next(bad_names, 'none')})"
            message += "; checkpoints up to the last saved are intact"
            advice = "lower optim.lr or raise optim.warmup_steps, in a run of another name"
            raise Diverged(f"{message}: {advice}", step)
        state.nll_since_line += nll
        state.targets_since_line += n_targets
        torch.nn.utils.clip_grads_with_norm_(trained_parameters, optim.grad_clip or math.inf, norm)

    def _sums_over_ranks(self) -> Tensor:
        """Return sums over all ranks, (3,) float64: loss (nats), targets, number of ranks that received a stop
        signal. Reset this rank's sums.
        """
        is_stopped = self.loss_sums.new_full((1,), float(bool(self.run.stop_request.signal)))
        sums = torch.cat((self.loss_sums, is_stopped))
        self.loss_sums = None
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    # ------------------------------------------------------------ checkpoints

    def state_dict(self, *arguments: object, **options: object) -> dict[str, Tensor]:
        """Return the decoder's weights, which a checkpoint holds by their names in the decoder."""
        return self.decoder.state_dict(*arguments, **options)

    def load_state_dict(self, weights: dict[str, Tensor], strict: bool = True, assign: bool = False) -> object:
        """Load the decoder's weights."""
        return self.decoder.load_state_dict(weights, strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Add the metadata by which the model is rebuilt, and training resumed and verified."""
        # Lightning's counters of optimizer steps suffice: a resumed run may have other micro-batches and ranks.
        step_counts = checkpoint["loops"]["fit_loop"][STEP_COUNTS_KEY]
        counts = {STEP_COUNTS_KEY: step_counts, LOGGED_STEPS_KEY: {"_batches_that_stepped": self.global_step}}
        checkpoint["loops"] = {"fit_loop": counts}
        run, state = self.run, self.phase_start.run_state
        state.elapsed_s = run.clock.seconds()
        checkpoint["lm"] = {
            "format": CHECKPOINT_FORMAT,
            "config": run.config_yaml,
            "vocab_size": self.decoder.vocab_size,
            "data_fingerprint": run.store.fingerprint,
            "step": self.global_step,
            "tokens": self.global_step * self.config.optim.batch_tokens,
            "phase": self.phase_start.phase,
            "plugins": PLUGINS.source_ids(self.config.normalizer_names),
            **asdict(state),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """If a swap begins this phase, put the swapped weights into `checkpoint`, and drop the optimizer state of the
        old normalizers.
        """
        old = self.phase_start.replaced_decoder
        if old and old.config.normalizer != self.decoder.config.normalizer:
            checkpoint["state_dict"] = self.state_dict()
            (optimizer,) = checkpoint[OPTIMIZER_STATES_KEY]
            kept = {name: entry for name, entry in optimizer["state"].items() if not is_normalizer_parameter(name)}
            checkpoint[OPTIMIZER_STATES_KEY] = [{**optimizer, "state": kept}]


class StepData(L.LightningDataModule):
    """This LightningDataModule gives this rank's micro-batches of each step, a function of data fingerprint, seed and
    step.
    """

    def __init__(self, run: RunContext, phase: int):
        super().__init__()
        self.run, self.config = run, run.config.with_phase_seq_len(phase)
        self.loader: TrainLoader | None = None  # None before training has begun

    def train_dataloader(self) -> TrainLoader:
        """Return the loader of training batches. It begins at the first step to train, which Lightning has restored if
        the run is resumed.
        """
        # Lightning has just set a handler of SIGTERM, by which a run ends without a checkpoint and with status 0.
        self.run.stop_request.listen()
        config = self.config
        self.loader = train_loader(
            train_sequences(self.run.store, config),
            rank=self.trainer.global_rank,
            world_size=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.trainer.global_step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )
        return self.loader
