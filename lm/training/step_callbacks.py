"""Callbacks around the optimizer steps: a signal that stops the run, metrics, the progress bar."""

import signal
from collections.abc import Iterator

from lm.data.batches import TrainSequences, train_sequences
from lm.model.device import Device, peak_memory_bytes
from lm.runs.folder import PEAK_MEMORY
from lm.training.dynamics import NamedValues, copied_to_host, largest_scores, logit_scales, normalizer_parameters
from lm.training.flops import mfu
from lm.training.lightning_import import L
from lm.training.module import LanguageModel
from lm.training.run_context import RunContext

SCORE_SEQUENCES = 2  # sequences of each logged step whose largest score is looked for


class StepCallback(L.Callback):
    """A callback with one hook, `on_step`, called after each optimizer step (Lightning calls its hooks for each
    micro-batch).
    """

    def __init__(self, run: RunContext):
        self.run, self.config = run, run.config

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Call `on_step` if the micro-batch ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step(trainer, module, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Act after optimizer step `step` (1-based), on every rank."""


class StopOnSignal(StepCallback):
    """Ends training at a signal (`StopRequest`) after the current step, on all ranks, with a checkpoint."""

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Stop training on all ranks after the step in which any rank received a signal."""
        if module.stop:
            self.run.stop.signal = self.run.stop.signal or signal.SIGTERM
            trainer.should_stop = True


class Metrics(StepCallback):
    """Logs metrics every `log.every` steps, and at the first and last step.

    Each line has the mean loss since the last line, the step's gradient norm and learning rate, tokens per second, MFU,
    and peak memory. It also has the normalizers' parameters and the metrics that `log.dynamics` names.
    """

    def __init__(self, run: RunContext):
        super().__init__(run)
        self.peak_flops = run.machine.peak_flops and run.machine.peak_flops * run.config.world_size
        self.has_lengths = run.config.data.lengths.allows_shorter or any(phase.seq_len for phase in run.config.phases)
        self.sequences: TrainSequences | None = None  # of the phase, if its largest scores are logged

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock at the seconds of training so far, which the checkpoint holds, and measure speed from this
        step.
        """
        self.run.clock.start(module.start.state.elapsed_s)
        self.last_step, self.last_time = trainer.global_step, self.run.clock.seconds()
        if "largest_score" in self.config.log.dynamics:
            self.sequences = train_sequences(self.run.store, module.config)

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        max_steps = self.config.trainer.max_steps
        if not self.config.log.is_due(step, max_steps):
            return
        state, tokens = module.start.state, self.config.optim.batch_tokens
        loss, z_loss = state.take_mean_losses()
        elapsed_s = self.run.clock.seconds()
        speed = (step - self.last_step) * tokens / max(elapsed_s - self.last_time, 1e-9)
        self.last_step, self.last_time = step, elapsed_s
        self.run.log(
            {
                "step": step,
                "tokens": step * tokens,
                "train/loss": loss,
                **({"train/z_loss": z_loss} if self.config.optim.z_loss else {}),
                "train/grad_norm": module.grad_norm,
                "lr": self.config.lr_at(step - 1),
                "tokens_per_s": round(speed, 1),
                **mfu(module.decoder, module.config.data.seq_len, speed, self.peak_flops),
                "elapsed_s": round(elapsed_s, 3),
                PEAK_MEMORY: peak_memory_bytes(module.device),
                **({"sequence_length": module.sequence_length} if self.has_lengths else {}),
                **({"train/skipped": state.skipped} if self.config.optim.on_nonfinite == "skip" else {}),
                **module.layer_grad_norms,
                **(copied_to_host(self._weight_metrics(module, step)) if trainer.is_global_zero else {}),
            }
        )
        module.logged = loss, speed

    def _weight_metrics(self, module: LanguageModel, step: int) -> Iterator[NamedValues]:
        """Yield the normalizers' parameters and, if `log.dynamics` names them, `logit_scales` and, on the step's first
        sequences, `largest_scores`."""
        yield from normalizer_parameters(module.decoder)
        if "logit_scale" in self.config.log.dynamics:
            yield from logit_scales(module.decoder)
        if self.sequences:
            batch = self.sequences.batch(step - 1, 0, min(SCORE_SEQUENCES, self.sequences.slots_per_step))
            yield from largest_scores(module.decoder, batch, Device(module.device, self.run.machine.bf16))


class ProgressBar(StepCallback, L.pytorch.callbacks.ProgressBar):
    """Shows the steps done, with the loss and speed that `Metrics` logged last."""

    def __init__(self, run: RunContext):
        super().__init__(run)
        L.pytorch.callbacks.ProgressBar.__init__(self)

    def disable(self) -> None:
        """Do nothing: on other processes than the first, `RunContext.progress` shows nothing."""

    def print(self, *values: object, **options: object) -> None:
        """Print a line above the bar; Lightning's `trainer.print` calls it."""
        self.run.progress.say(" ".join(map(str, values)))

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Show that the step is done."""
        self.run.progress.advance(step, *module.logged)
        module.logged = ()
