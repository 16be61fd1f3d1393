"""When checkpoints of a run are saved and deleted, and how their files are written and read."""

import time
from pathlib import Path

import torch

from lm.errors import RunError
from lm.runs.checkpoints import load_checkpoint, save_checkpoint
from lm.runs.folder import CHECKPOINTS, step_of, step_path, step_paths
from lm.training.lightning_import import L, SIGTERMException
from lm.training.module import LanguageModel
from lm.training.run_context import RunContext
from lm.training.starting import Best
from lm.training.step_callbacks import StepCallback


class AtomicCheckpointIO(L.fabric.plugins.CheckpointIO):
    """Writes a checkpoint to a temporary file beside its place, syncs it and renames it, and reads it verified.

    Lightning's own plug-in writes through $TMPDIR, so that a process that dies may leave a truncated file.

    content: the verified content of the checkpoint from which training continues; its file is not read again, as it may
    be replaced meanwhile. None: `load_checkpoint` reads the file.
    """

    def __init__(self, content: dict[str, object] | None = None):
        self.content = content
        self.failure: RunError | None = None  # of the last save: a callback's state can't be read back, or no space

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint. Keeps an error in `failure`, as other ranks would wait for a rank that raises it here."""
        self.failure = None
        try:
            for name, state in checkpoint["callbacks"].items():
                if not _is_plain(state):
                    reason = "keeps a state of other values than numbers, texts, tensors, and lists and maps of them"
                    raise RunError(f"{name} (trainer.callbacks): {reason}, which no checkpoint may hold")
            save_checkpoint(checkpoint, Path(path))
        except RunError as error:
            self.failure = error

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Return the content of a checkpoint, plain data and tensors on the CPU."""
        content, self.content = self.content, None
        return content or load_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def _is_plain(state: object) -> bool:
    if isinstance(state, dict):
        return all(_is_plain(key) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return type(state) in (bool, int, float, str, type(None), torch.Tensor)


class Checkpoints(StepCallback):
    """Saves `step-N.ckpt` every `checkpoint_every` steps, at each best validation so far, and when a phase or training
    ends.

    It is no subclass of Lightning's Checkpoint, which Lightning would call last: it comes before evaluations that take
    long, so that a kill meanwhile loses no step.
    """

    def __init__(self, run: RunContext):
        super().__init__(run)
        self.folder = self.config.run_folder / CHECKPOINTS
        self.saved_step = -1

    def on_step(self, trainer: L.Trainer, module: LanguageModel, step: int) -> None:
        """Save a checkpoint if one is due."""
        if self.is_regular(step) or step in self.config.phase_ends or module.start.state.is_best(step):
            self.save(trainer, module)

    def is_regular(self, step: int) -> bool:
        """Whether `step` is a multiple of `checkpoint_every` or the last step; the last `keep_checkpoints` regular
        checkpoints are kept.
        """
        return step % self.config.checkpoint_every == 0 or step == self.config.trainer.max_steps

    def on_train_end(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Save a checkpoint of the last step, if this step has none yet, for example because a signal stopped
        training.
        """
        if trainer.global_step != self.saved_step:
            self.save(trainer, module)

    def on_exception(self, trainer: L.Trainer, module: LanguageModel, exception: BaseException) -> None:
        """Save a checkpoint if SIGTERM came just before `StepData` took its handler back from Lightning."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, module)

    def save(self, trainer: L.Trainer, module: LanguageModel) -> None:
        """Save a checkpoint of the present step, and delete old checkpoints (`prune`). All ranks must call it. Raises
        RunError on all of them if saving fails.
        """
        begin, self.saved_step = time.perf_counter(), trainer.global_step
        trainer.save_checkpoint(step_path(self.folder, self.saved_step))
        failure = trainer.strategy.checkpoint_io.failure
        if trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
            raise failure or RunError("failed on another process")
        if trainer.is_global_zero:
            self.prune(module.start.state.best)
        self.run.clock.exclude_since(begin)

    def prune(self, best: Best | None) -> None:
        """Delete each `step-N.ckpt` but the newest, the best, the last regular ones (`is_regular`), and those of phase
        ends.
        """
        steps = [step_of(path) for path in step_paths(self.folder)]
        regular_steps = [step for step in steps if self.is_regular(step)][-self.config.trainer.keep_checkpoints :]
        kept_steps = {self.saved_step, best and best.step, *regular_steps, *self.config.phase_ends[:-1]}
        for step in {*steps} - kept_steps:
            step_path(self.folder, step).unlink(missing_ok=True)
