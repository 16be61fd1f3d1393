"""These callbacks act after optimizer steps: they stop the run at a signal, log metrics, show progress, and save
checkpoints.
"""

import signal
import time
from pathlib import Path

import torch
from torch import Tensor

from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.model.device import peak_memory_bytes
from lm.runs.checkpoints import load_checkpoint, save_checkpoint
from lm.runs.folder import CHECKPOINTS_FOLDER, PEAK_MEMORY_KEY, checkpoint_path, checkpoint_paths, checkpoint_step
from lm.training.lightning_import import L, SIGTERMException
from lm.training.module import LanguageModel
from lm.training.phase_start import BestStep
from lm.training.run_context import RunContext


class StepCallback(L.Callback):
    """A step callback acts after each optimizer step, in its hook `on_step`. Lightning calls its own hooks for each
    micro-batch.
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
    """This callback ends training at a signal (`StopRequest`) after the current step, on all ranks, with a
    checkpoint.
    """

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Stop training on all ranks after the step in which any rank received a signal."""
        if module.stop_requested:
            self.run.stop_request.signal = self.run.stop_request.signal or signal.SIGTERM
            trainer.should_stop = True


class LogMetrics(StepCallback):
    """This callback logs metrics every `log.every` steps, and at the first and last step.

    Each line has the mean loss since the last line, the step's gradient norm and learning rate, and tokens per second.
    The line also has peak memory and the normalizers' parameters.
    """

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock at the seconds of training so far, which the checkpoint holds, and measure speed from this
        step.
        """
        self.run.clock.start(module.phase_start.run_state.elapsed_s)
        self.last_step, self.last_time = trainer.global_step, self.run.clock.seconds()

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Log a line if one is due after `step`."""
        max_steps = self.config.trainer.max_steps
        if not self.config.log.is_due(step, max_steps):
            return
        state, tokens = module.phase_start.run_state, self.config.optim.batch_tokens
        loss = state.take_mean_loss()
        elapsed_s = self.run.clock.seconds()
        speed = (step - self.last_step) * tokens / max(elapsed_s - self.last_time, 1e-9)
        self.last_step, self.last_time = step, elapsed_s
        self.run.log(
            step,
            {
                "tokens": step * tokens,
                "train/loss": loss,
                "train/grad_norm": module.grad_norm,
                "lr": self.config.lr_at(step - 1),
                "tokens_per_s": round(speed, 1),
                "elapsed_s": round(elapsed_s, 3),
                PEAK_MEMORY_KEY: peak_memory_bytes(module.device),
                "sequence_length": module.sequence_length,
                **(normalizer_parameters(module.decoder) if trainer.is_global_zero else {}),
            },
        )
        module.last_loss_and_speed = loss, speed


def normalizer_parameters(decoder: Decoder) -> dict[str, float]:
    """Return `normalizer/NAME/layerL/headH` for each normalizer's parameter with one value a head. For any other
    parameter return its root mean square, `normalizer/NAME/layerL/rms`.

    Layers and heads count from 0. A parameter shared by layers is named after the first of these layers.
    """
    values_by_name: dict[str, Tensor] = {}
    logged_parameters: set[Tensor] = set()
    for layer, normalizer in enumerate(decoder.normalizers()):
        for name, parameter in normalizer.named_parameters():
            if parameter in logged_parameters:
                continue
            logged_parameters.add(parameter)
            prefix, values = f"normalizer/{name}/layer{layer}", parameter.detach().float()
            # a submodule's bias may have this shape by chance
            if "." not in name and values.shape == (normalizer.layer.n_head,):
                values_by_name |= {f"{prefix}/head{head}": value for head, value in enumerate(values)}
            else:
                values_by_name[f"{prefix}/rms"] = values.square().mean().sqrt()
    # one transfer from the device
    host_values = torch.stack([*values_by_name.values()]).tolist() if values_by_name else []
    return dict(zip(values_by_name, host_values, strict=True))


class ProgressBar(StepCallback):
    """This callback shows the number of steps done, with the loss and speed that `LogMetrics` logged last."""

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Show that the step is done."""
        self.run.progress.advance(step, *module.last_loss_and_speed)
        module.last_loss_and_speed = ()


# ---------------------------------------------------------------- checkpoints


class AtomicCheckpointIO(L.fabric.plugins.CheckpointIO):
    """This plug-in of Lightning writes a checkpoint to a temporary file in the same folder, syncs the file and renames
    it. Checkpoints are verified when they are read.

    Lightning's own plug-in writes through $TMPDIR, so that a process that dies may leave a truncated file.

    checkpoint_content: the verified content of the checkpoint from which training continues; its file is not read
    again, as the file may be replaced meanwhile. None: `load_checkpoint` reads the file.
    """

    def __init__(self, checkpoint_content: dict[str, object] | None = None):
        self.checkpoint_content = checkpoint_content
        self.failure: RunError | None = None  # of the last save: a callback's state can't be read back, or no space

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint. An error is stored in `failure` and not raised, as the other ranks would wait for a rank
        that raised an error here.
        """
        self.failure = None
        try:
            save_checkpoint(checkpoint, Path(path))
        except RunError as error:
            self.failure = error

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Return the content of a checkpoint, plain data and tensors on the CPU."""
        content, self.checkpoint_content = self.checkpoint_content, None
        return content or load_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint's file."""
        Path(path).unlink(missing_ok=True)


class Checkpoints(StepCallback):
    """This callback saves `step-N.ckpt` every `checkpoint_every` steps, at each best validation so far, and when a
    phase or training ends.

    The class does not inherit from Lightning's Checkpoint, which Lightning would call last. Checkpoints are saved
    before long evaluations, so that a kill during an evaluation loses no step.
    """

    def __init__(self, run: RunContext):
        super().__init__(run)
        self.folder = self.config.run_folder / CHECKPOINTS_FOLDER
        self.saved_step = -1

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Save a checkpoint if one is due."""
        best = module.phase_start.run_state.best
        if self.is_regular_step(step) or step in self.config.phase_ends or (best and best.step == step):
            self.save(trainer, module)

    def is_regular_step(self, step: int) -> bool:
        """Return whether `step` is a multiple of `checkpoint_every` or the last step. The last `keep_checkpoints`
        regular checkpoints are kept.
        """
        return step % self.config.checkpoint_every == 0 or step == self.config.trainer.max_steps

    def on_train_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Save a checkpoint of the last step unless it has been saved; it hasn't if a signal stopped training."""
        if trainer.global_step != self.saved_step:
            self.save(trainer, module)

    def on_exception(self, trainer: L.Trainer, module: LanguageModel, exception: BaseException) -> None:
        """Save a checkpoint if SIGTERM came in the moment when Lightning's own handler was set, which raises
        SIGTERMException. `StopRequest.listen` soon puts the run's own handler back.
        """
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, module)

    def save(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Save a checkpoint of the present step, and delete old checkpoints (`prune`). All ranks must call this method.
        Raises RunError on all of them: saving fails.
        """
        begin, self.saved_step = time.perf_counter(), trainer.global_step
        trainer.save_checkpoint(checkpoint_path(self.folder, self.saved_step))
        failure = trainer.strategy.checkpoint_io.failure
        if trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
            raise failure or RunError("failed on another process")
        if trainer.is_global_zero:
            self.prune(module.phase_start.run_state.best)
        self.run.clock.exclude_since(begin)

    def prune(self, best_step: BestStep | None) -> None:
        """Delete all checkpoints `step-N.ckpt` except the newest, the best, the last regular ones (`is_regular_step`),
        and checkpoints at the ends of phases.
        """
        steps = [checkpoint_step(path) for path in checkpoint_paths(self.folder)]
        regular_steps = [step for step in steps if self.is_regular_step(step)][-self.config.trainer.keep_checkpoints :]
        kept_steps = {self.saved_step, best_step and best_step.step, *regular_steps, *self.config.phase_ends[:-1]}
        for step in {*steps} - kept_steps:
            checkpoint_path(self.folder, step).unlink(missing_ok=True)
