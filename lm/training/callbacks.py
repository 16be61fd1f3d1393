"""What happens around the optimizer steps: metrics, evaluation, progress, stopping on a signal."""

import math
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from lm.data.batches import train_sequences
from lm.errors import RunError, one_line
from lm.evaluation.continuity import Swap
from lm.evaluation.measurement import Measurement
from lm.evaluation.results import keep, measured, write_evaluation
from lm.model.decoder import Decoder
from lm.model.device import Device, OutOfTime, peak_memory_bytes
from lm.results.evaluation_tables import logged
from lm.runs.evaluations import Evaluation, evaluation_path
from lm.runs.metric_log import PEAK_MEMORY
from lm.runs.validation import selection_loss
from lm.training.clock import Clock
from lm.training.dynamics import Named, largest_scores, logit_scales, normalizer_parameters, transferred
from lm.training.lightning import L
from lm.training.module import TrainModule
from lm.training.run_context import RunContext
from lm.training.state import Best
from lm.training.utilization import mfu


class StepCallback(L.Callback):
    """A callback with one hook, `on_step`, called after each optimizer step (Lightning's are per micro-batch)."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        """Pass on the micro-batch that ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step(trainer, module, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Optimizer step `step` (1-based) is done, on every rank."""


class StopOnSignal(StepCallback):
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP end training after the current step, on all ranks, with a checkpoint.

    A context manager around the phases of a run: between two of them a signal is recorded, too, in
    `signal`. A second one ends the process at once, except SIGHUP, which a closed terminal sends more than once. Started to
    ignore SIGHUP (nohup), the process does.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal: int = 0
        self._before: dict[int, object] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> "StopOnSignal":
        hears = [number for number in self.SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
        self._terminals = [output for output in (1, 2) if os.isatty(output)]
        self._before = {number: signal.signal(number, self._note) for number in hears}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        if number == signal.SIGHUP:  # what is written to a closed terminal would be an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in self._terminals:
                os.dup2(nowhere, output)
            os.close(nowhere)

    def requested(self) -> bool:
        """True if this process has received a signal."""
        return bool(self.signal)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take the handlers back from Lightning, whose own would act inside the signal."""
        for number in self._before:
            if number != self.signal:
                signal.signal(number, self._note)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Stop on all ranks after the step in which one of them received a signal."""
        if module.last.stop:
            self.signal = self.signal or signal.SIGTERM
            trainer.should_stop = True


class Metrics(StepCallback):
    """Logs every `log.every` steps, and at the first and last: the mean loss since the last line; the step's gradient norm and learning
    rate; tokens per second, MFU; the peak of memory, as after evaluations; the normalizers' parameters, and what `log.dynamics` names."""

    def __init__(self, run: RunContext, clock: Clock):
        self.record, self.config, self.progress, self.clock = run.log, run.config, run.progress, clock
        self.bf16, self.last_step, self.last_time = run.machine.bf16, 0, 0.0
        self.peak_flops = run.machine.peak_flops and run.machine.peak_flops * run.config.world_size
        self.sequences = train_sequences(run.store, run.config) if "largest_score" in run.config.log.dynamics else None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Speed is measured from here; training time continues from that of the checkpoint."""
        self.clock.start(module.start.state.elapsed_s)
        self.last_step, self.last_time = trainer.global_step, self.clock.seconds()

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Reduce, log, and show the step."""
        max_steps = self.config.trainer.max_steps
        if not self.config.log.is_due(step, max_steps):
            self.progress.advance(step)
            return
        state, tokens = module.start.state, self.config.optim.batch_tokens
        loss = state.take_mean_loss()
        now = self.clock.seconds()
        speed = (step - self.last_step) * tokens / max(now - self.last_time, 1e-9)
        self.last_step, self.last_time = step, now
        self.record.write(
            {
                "step": step,
                "tokens": step * tokens,
                "train/loss": loss,
                **({"train/z_loss": module.last.z_loss} if self.config.optim.z_loss else {}),
                "train/grad_norm": module.last.grad_norm,
                "lr": self.config.optim.lr_at(step - 1, max_steps),
                "tokens_per_s": round(speed, 1),
                **mfu(module.decoder, speed, self.peak_flops),
                "elapsed_s": round(now, 3),
                PEAK_MEMORY: peak_memory_bytes(module.device),
                **({"sequence_length": module.sequence_length} if self.config.data.lengths.shorter else {}),
                **({"train/skipped": state.skipped} if self.config.optim.on_nonfinite == "skip" else {}),
                **module.last.layers,
                **(transferred(self._of_the_model(module, step)) if trainer.is_global_zero else {}),
            }
        )
        self.progress.advance(step, loss, speed)

    def _of_the_model(self, module: TrainModule, step: int) -> Iterator[Named]:
        """What is logged of the weights after the step, the largest scores on the first of its sequences."""
        yield from normalizer_parameters(module.decoder)
        if "logit_scale" in self.config.log.dynamics:
            yield from logit_scales(module.decoder)
        if self.sequences:
            batch = self.sequences.batch(step - 1, 0, min(self.config.log.score_sequences, self.sequences.batch_slots))
            yield from largest_scores(module.decoder, batch, Device(module.device, self.bf16))


class Evaluations(StepCallback):
    """Measures what is due, on all ranks, and keeps it: a file in evaluations/, a line in metrics.jsonl.

    Training time excludes it. A measurement that fails, or exceeds its time limit, is logged, and training continues unless
    `eval.on_error` is stop.
    """

    def __init__(self, run: RunContext, clock: Clock):
        self.config, self.record, self.progress, self.clock = run.config, run.log, run.progress, clock
        self.bf16, self.max_steps = run.machine.bf16, run.config.trainer.max_steps
        self.validation, *self.others = run.measurements

    def run(self, trainer: L.Trainer, module: TrainModule, measurement: Measurement, decoder: Decoder) -> Evaluation | None:
        """Measure `decoder` now, and keep the result for `lm eval`, too; None if that failed. Collective."""
        started, step, kind, max_seconds = time.perf_counter(), trainer.global_step, measurement.kind, measurement.asked.max_seconds
        where = Device(module.device, self.bf16, trainer.global_rank, trainer.world_size).with_time_limit(max_seconds)
        tokens, result = step * self.config.optim.batch_tokens, None
        try:
            result = measured(measurement, decoder.to(where.device), where, step, tokens)
            module.start.state.note_weights(step, result.weights_sha256)
            if trainer.is_global_zero:
                scores = logged(result)  # before the file, which says that nothing of it is missing
                self.record.write({"step": step, "tokens": tokens, **scores, PEAK_MEMORY: peak_memory_bytes(where.device)})
                path = write_evaluation(self.config.run_folder, measurement, result)
                keep(self.config.run_folder, measurement, result, where)
                self.record.evaluation(result, path.with_suffix(".png"))
                self.progress.say(f"step {step}: " + (", ".join(f"{name} {value:.4f}" for name, value in scores.items()) or kind))
        except Exception as error:  # whatever it is: an evaluation must not end a run
            if self.config.eval.on_error == "stop":
                if isinstance(error, OutOfTime):
                    raise RunError(f"eval.{kind}.max_seconds = {max_seconds:g}: step {step}: it took longer (eval.on_error=stop)") from None
                raise
            reason = one_line(error)
            self.record.write({"step": step, "tokens": tokens, f"{kind}/failed": reason})
            self.progress.say(f"step {step}: {kind}: not {'kept' if result else 'measured'}: {reason}")
        finally:
            self.clock.paused(started)
        return result  # the same on all ranks: where only writing it failed, on the first, there is one


class Validate(Evaluations):
    """Loss at the training length, every `eval.every` steps and at the end."""

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Measure if it is time, and remember the best, by the documents that select: the others report."""
        if not self.validation.asked.is_due(step, self.max_steps):
            return
        result = self.run(trainer, module, self.validation, module.decoder)
        if result is None:
            return
        state, (loss, sha256) = module.start.state, selection_loss(result.series[0])
        other_sequences = not state.best or state.best.sequences_sha256 != sha256  # losses that can't be compared
        if math.isfinite(loss) and (other_sequences or loss < state.best.loss):
            state.best = Best(step, loss, sha256)


class Evaluate(Evaluations):
    """All other measurements, at their own intervals, and what a swap did."""

    def due(self, step: int) -> list[Measurement]:
        """What is to be measured at a step."""
        return [one for one in self.others if one.asked.is_due(step, self.max_steps)]

    def on_train_start(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Measure what is missing at the step that training continues from, and a swap that has just been made, as `lm swap` does."""
        step, before = trainer.global_step, module.start.before
        for measurement in self.due(step) if step else []:
            missing = not evaluation_path(self.config.run_folder, measurement.kind, step).exists()
            if trainer.strategy.reduce_boolean_decision(missing and trainer.is_global_zero, all=False):
                self.run(trainer, module, measurement, before or module.decoder)  # at a phase's start: as the one before ended
        if before and self.config.eval.swap_lengths:
            self.run(trainer, module, Swap(self.config, module.store, before), module.decoder)
        module.start.before = None

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Measure what is due."""
        for measurement in self.due(step):
            self.run(trainer, module, measurement, module.decoder)
