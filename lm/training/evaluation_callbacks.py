"""These callbacks evaluate the model during training; each instance makes one kind of evaluation, such as needle
retrieval. Validation and the metrics of users' callbacks have classes of their own.
"""

import math
import time
from typing import ClassVar

from lm.errors import RunError, one_line
from lm.evaluation.held_out import SwapMeasurement
from lm.evaluation.measurement import Measurement
from lm.evaluation.metrics import CallbackMeasurement, is_reserved_metric_name
from lm.evaluation.swap import describe_swap
from lm.model.decoder import Decoder
from lm.model.device import Device, peak_memory_bytes
from lm.runs.evaluations import Evaluation, evaluation_path, logged_means, selection_loss_and_sequence_hash
from lm.runs.folder import PEAK_MEMORY_KEY
from lm.training.lightning_import import L
from lm.training.module import LanguageModel
from lm.training.phase_start import BestStep
from lm.training.run_context import RunContext
from lm.training.step_callbacks import StepCallback


class EvaluationCallback(StepCallback):
    """This callback makes one measurement when it is due, on all ranks. It writes the result to a file in evaluations/
    and a line in metrics.jsonl.

    Training time excludes measurements. If a measurement fails, the failure is logged, and training continues unless
    `eval.on_error` is stop.
    """

    # whether its result is there before the checkpoint of its step, so that a resumed run lacks none
    precedes_checkpoint: ClassVar[bool] = False

    def __init__(self, run: RunContext, measurement: Measurement):
        super().__init__(run)
        self.measurement = measurement

    def is_due(self, step: int) -> bool:
        """Return whether the measurement is made after `step`."""
        return self.measurement.eval_config.is_due(step, self.config.trainer.max_steps)

    def on_train_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Make the measurement if it is missing at the step from which training continues."""
        step = trainer.global_step
        if not step or self.precedes_checkpoint or not self.is_due(step):
            return
        path = evaluation_path(self.config.run_folder, self.measurement.kind, step)
        is_missing = trainer.is_global_zero and not path.exists()
        if trainer.strategy.reduce_boolean_decision(is_missing, all=False):
            # after a swap: the model of the phase before
            self.try_to_measure(trainer, module, module.phase_start.replaced_decoder or module.decoder)

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Make the measurement if it is due."""
        if self.is_due(step):
            self.try_to_measure(trainer, module, module.decoder)

    def try_to_measure(self, trainer: L.Trainer, module: LanguageModel, decoder: Decoder) -> Evaluation | None:
        """Measure `decoder` now, log and write the result, and return it. Return None if measuring failed. All ranks
        must call this method.
        """
        begin, step, run, measurement = time.perf_counter(), trainer.global_step, self.run, self.measurement
        device = Device(module.device, run.machine.uses_bf16, trainer.global_rank, trainer.world_size)
        tokens, result = step * self.config.optim.batch_tokens, None
        try:
            result = measurement.evaluate(decoder.to(device.device), device, step, tokens)
            if trainer.is_global_zero:
                scores = logged_means(result)  # logged before its file is written: where a file is, nothing is missing
                run.log(step, {"tokens": tokens, **scores, PEAK_MEMORY_KEY: peak_memory_bytes(device.device)})
                measurement.write(self.config.run_folder, result)
                texts = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
                run.progress.say(f"step {step}: " + (texts or measurement.kind))
        except Exception as error:  # whatever it is: an evaluation must not end a run
            if self.config.eval.on_error == "stop":
                raise
            reason = one_line(error)
            run.log(step, {"tokens": tokens, f"{measurement.kind}/failed": reason})
            run.progress.say(f"step {step}: {measurement.kind}: not {'kept' if result else 'measured'}: {reason}")
        finally:
            run.clock.exclude_since(begin)
        return result  # the same on all ranks, also where the first one measured it and failed to write it


class Validation(EvaluationCallback):
    """This callback measures the loss at the training length, every `Config.validation_every` steps and at the end."""

    precedes_checkpoint = True

    def try_to_measure(self, trainer: L.Trainer, module: LanguageModel, decoder: Decoder) -> Evaluation | None:
        """Measure the validation loss and return the result; None if measuring failed. Record this step as the best one
        if its loss on the selection text is the lowest so far (`selection_loss_and_sequence_hash`). Losses that
        were measured on other validation sequences don't count.
        """
        if result := super().try_to_measure(trainer, module, decoder):
            state, (loss, sequences_sha256) = module.phase_start.run_state, selection_loss_and_sequence_hash(result)
            # losses that can't be compared
            has_no_comparable_best = not state.best or state.best.sequences_sha256 != sequences_sha256
            if math.isfinite(loss) and (has_no_comparable_best or loss < state.best.loss):
                state.best = BestStep(result.step, loss, sequences_sha256)
        return result


class UserCallbackMetrics(EvaluationCallback):
    """At the last step, this callback records the metrics that users' callbacks gave to `self.log`, so that one of them
    can be an experiment's `primary.metric`.
    """

    precedes_checkpoint = True

    def __init__(self, run: RunContext):
        super().__init__(run, CallbackMeasurement(run.config, run.store))

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Record the metrics of users' callbacks at the last step. Raises RunError, at any step: one of these metrics
        has a name that lm itself uses.
        """
        if taken := [name for name in trainer.callback_metrics if is_reserved_metric_name(name)]:
            raise RunError(f"trainer.callbacks: self.log('{taken[0]}'): is a name of lm's own; choose another")
        super().on_step(trainer, module, step)

    def try_to_measure(self, trainer: L.Trainer, module: LanguageModel, decoder: Decoder) -> Evaluation | None:
        """Record the values that users' callbacks logged last, and return them as an evaluation. Return None if nothing
        was logged, or recording failed."""
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.measurement.logged_values = values
        return super().try_to_measure(trainer, module, decoder) if values else None


class SwapEffect(StepCallback):
    """Where a training phase begins with a swap of the normalizers, this callback compares the models before and after
    it. It prints the factors on scores of both, and measures the change of loss and predictions
    (`eval.swap_lengths`)."""

    def on_train_start(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Compare the models before and after the swap, and free the memory of the model before the swap."""
        if old_decoder := module.phase_start.replaced_decoder:
            lines, warning = describe_swap(old_decoder, module.decoder, trainer.global_step)
            for line in filter(None, [*lines, warning]):
                self.run.progress.say(line)
            if self.config.eval.swap_lengths:
                measurement = SwapMeasurement(self.config, self.run.store, old_decoder)
                EvaluationCallback(self.run, measurement).try_to_measure(trainer, module, module.decoder)
            module.phase_start.replaced_decoder = None
