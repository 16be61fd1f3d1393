"""What happens around the optimizer steps: metrics, evaluation, progress, stopping on a signal."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO

from lm.checkpoints import point_last, save_checkpoint, steps_saved
from lm.config import Config
from lm.evaluation.loss import Device, HeldOut, evaluate_long_context, evaluate_validation
from lm.evaluation.results import write_evaluation
from lm.schema import Plain
from lm.training.metrics import MetricLog
from lm.training.module import TrainModule
from lm.training.progress import Clock, ProgressLine


class StepCallback(L.Callback):
    """A callback with one hook, `on_step`, called after each optimizer step (Lightning's are per micro-batch)."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        """Pass on the micro-batch that ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step(trainer, module, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Optimizer step `step` (1-based) is done, on every rank."""


class StopOnSignal(StepCallback):
    """SIGINT, SIGTERM and SIGUSR1 end training after the current step, on all ranks, with a checkpoint.

    `signal` says which came. A second one ends the process at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.signal: int = 0
        self._before: dict[int, object] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take the handlers over from Lightning, whose own would act inside the signal."""
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """All ranks agree to stop if one was told to."""
        if trainer.strategy.reduce_boolean_decision(bool(self.signal), all=False):
            self.signal = self.signal or signal.SIGTERM
            trainer.should_stop = True

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Give the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


class Metrics(StepCallback):
    """Logs loss, gradient norm, learning rate and speed every `log.every` steps, and at the first and last."""

    def __init__(self, record: MetricLog, config: Config, progress: ProgressLine, clock: Clock):
        self.record, self.config, self.progress, self.clock = record, config, progress, clock
        self.last_step, self.last_time = 0, 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Speed counts from here."""
        self.clock.start()
        self.last_step, self.last_time = trainer.global_step, 0.0

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Reduce, log, and show the step."""
        max_steps = self.config.trainer.max_steps
        if step % self.config.log.every and step not in (1, max_steps):
            module.step_nll = None
            self.progress.advance(step)
            return
        loss = module.take_step_loss()
        now = self.clock.seconds()
        speed = (step - self.last_step) * module.step_tokens / max(now - self.last_time, 1e-9)
        self.last_step, self.last_time = step, now
        self.record.write(
            {
                "step": step,
                "tokens": step * module.step_tokens,
                "train/loss": loss,
                "train/grad_norm": module.grad_norm,
                "lr": module.last_lr,
                "tokens_per_s": round(speed, 1),
                "elapsed_s": round(now, 3),
            }
        )
        self.progress.advance(step, loss, speed)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's saving through `lm.checkpoints`: its own goes through $TMPDIR, which leaves a truncated file
    when that is another file system and the process dies, and it swallows some errors."""

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Write `checkpoint` whole or not at all."""
        save_checkpoint(checkpoint, Path(path))


class Checkpoints(StepCallback):
    """Saves `step-N.ckpt` every `checkpoint_every` steps and where training ends, and points `last.ckpt` at it."""

    def __init__(self, config: Config, folder: Path, clock: Clock):
        self.every = config.trainer.checkpoint_every or max(1, config.trainer.max_steps // 10)
        self.max_steps, self.keep = config.trainer.max_steps, config.trainer.keep_checkpoints
        self.folder, self.clock = folder, clock
        self.saved = -1

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Save if it is time."""
        if step % self.every == 0 or step == self.max_steps:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Save where a signal stopped training."""
        if trainer.global_step != self.saved:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save now (collective), and drop what is over `keep_checkpoints`."""
        started = time.perf_counter()
        path = self.folder / f"step-{trainer.global_step:06d}.ckpt"
        trainer.save_checkpoint(path)
        self.saved = trainer.global_step
        if trainer.is_global_zero:
            point_last(path)
            by_age = sorted(steps_saved(self.folder), key=lambda saved: saved.stat().st_mtime_ns)
            for old in by_age[: -self.keep]:  # not by step: a run may have gone back to an earlier one
                old.unlink(missing_ok=True)
        self.clock.paused(started)


class Evaluate(StepCallback):
    """Validation every `eval.every` steps and at the end; long-context loss at its own interval and at the end."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        record: MetricLog,
        progress: ProgressLine,
        clock: Clock,
        validation: HeldOut,
        long_context: HeldOut | None,
        bf16: bool,
    ):
        self.config, self.folder, self.record, self.progress, self.clock = config, folder, record, progress, clock
        self.validation, self.long_context, self.bf16 = validation, long_context, bf16
        self.every = config.eval.every or max(1, config.trainer.max_steps // 20)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Run what is due."""
        last = step == self.config.trainer.max_steps
        started = time.perf_counter()
        if last or step % self.every == 0:
            self._run(trainer, module, step, self.validate)
        long_every = self.config.eval.long_context.every
        if self.long_context and (last or (long_every and step % long_every == 0)):
            self._run(trainer, module, step, self.evaluate_long)
        self.clock.paused(started)

    def validate(self, module: TrainModule, where: Device) -> dict[str, Plain]:
        """Loss at the training length."""
        result = evaluate_validation(module.decoder, self.validation, where)
        return {**result, "unigram_entropy": module.store.val.unigram_entropy}

    def evaluate_long(self, module: TrainModule, where: Device) -> dict[str, Plain]:
        """Loss by position beyond it."""
        assert self.long_context is not None
        return evaluate_long_context(module.decoder, self.long_context, where, self.config.eval.long_context.rope_theta_factors)

    def _run(self, trainer: L.Trainer, module: TrainModule, step: int, measure: Callable[[TrainModule, Device], dict[str, Plain]]) -> None:
        where = Device(module.device, self.bf16, trainer.global_rank, trainer.world_size)
        result = measure(module, where)
        if not trainer.is_global_zero:
            return
        tokens = step * module.step_tokens
        stamp = {"step": step, "tokens_seen": tokens, "data_fingerprint": module.store.fingerprint, "precision": where.precision}
        write_evaluation(self.folder, {**result, **stamp})
        if result["kind"] == "validation":
            scores = {"val/loss": result["loss"], "val/bits_per_byte": result["bits_per_byte"]}
            self.progress.note(f"step {step}: validation loss {result['loss']:.4f}, {result['bits_per_byte']:.4f} bits per byte")
        else:
            scores = {f"long/loss_theta_x{s['rope_theta_factor']:g}": s["loss"] for s in result["settings"]}
        self.record.write({"step": step, "tokens": tokens, **scores})
