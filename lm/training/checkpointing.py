"""When a run saves what, and what it keeps: its checkpoints."""

import time

from lm.attention.plugins import PLUGINS
from lm.config.load import to_yaml
from lm.runs.checkpoints import link_checkpoint, save_checkpoint
from lm.runs.folder import BEST, CHECKPOINTS, LAST, METRICS, step_of, step_path, steps_saved
from lm.runs.metadata import FORMAT
from lm.runs.metric_log import log_seal
from lm.training.callbacks import StepCallback
from lm.training.clock import Clock
from lm.training.lightning import L
from lm.training.module import TrainModule
from lm.training.optimizers import named_state
from lm.training.run_context import RunContext


class Checkpoints(StepCallback):
    """Saves `step-N.ckpt` every `checkpoint_every` steps, at the best validation so far, at a phase's end and where
    training ends; links `last.ckpt` and `best.ckpt` to them.

    Lightning saves none of them: its own saving goes through $TMPDIR, which leaves a truncated file when that is another file
    system and the process dies, and stores counters that a resumed run would have to correct.
    """

    def __init__(self, run: RunContext, clock: Clock):
        self.config, self.wandb_id, self.clock = run.config, run.wandb_id, clock
        self.every = self.config.checkpoint_every
        self.folder = self.config.run_folder / CHECKPOINTS
        self.saved = -1

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Save if it is time."""
        if self.is_regular(step) or step in self.config.phase_ends or is_best(module, step):
            self.save(trainer, module)

    def is_regular(self, step: int) -> bool:
        """True for the steps of which the last `keep_checkpoints` are kept."""
        return step % self.every == 0 or step == self.config.trainer.max_steps

    def on_train_end(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Save where a signal stopped training."""
        if trainer.global_step != self.saved:
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Save now (collective), and delete checkpoints beyond `keep_checkpoints`."""
        started, self.saved = time.perf_counter(), trainer.global_step
        if trainer.is_global_zero:
            path = step_path(self.folder, self.saved)
            module.start.state.note_weights(self.saved, save_checkpoint(self.content(module), path))
            link_checkpoint(LAST, path)
            if is_best(module, self.saved):
                link_checkpoint(BEST, path)
            self.prune()
        trainer.strategy.barrier()
        self.clock.paused(started)

    def content(self, module: TrainModule) -> dict[str, object]:
        """Weights, the optimizer's state by name, and metadata: enough to rebuild the model, to resume, and to refuse a mismatch."""
        start, step = module.start, module.global_step
        start.state.elapsed_s = self.clock.seconds()
        metadata = {
            "format": FORMAT,
            "config": to_yaml(self.config),
            "vocab_size": module.decoder.vocab_size,
            "data_fingerprint": module.store.fingerprint,
            "step": step,
            "tokens": step * self.config.optim.batch_tokens,
            "phase": start.phase,
            "plugins": PLUGINS.versions(self.config.normalizer_names),
            "wandb_id": self.wandb_id,
            "log": log_seal(self.config.run_folder / METRICS),
            **start.state.plain(),
        }
        optimizer = named_state(module.optimizers(use_pl_optimizer=False))
        return {"state_dict": module.decoder.state_dict(), "optimizer": optimizer, "lm": metadata}

    def prune(self) -> None:
        """Delete all but the one just saved, the last regular ones and the ends of phases; `best.ckpt` is a link of its own and stays."""
        saved = steps_saved(self.folder)
        regular = [path for path in saved if self.is_regular(step_of(path))]
        swaps = {step_path(self.folder, end) for end in self.config.phase_ends[:-1]}
        for old in {*saved} - {step_path(self.folder, self.saved), *regular[-self.config.trainer.keep_checkpoints :], *swaps}:
            old.unlink(missing_ok=True)


def is_best(module: TrainModule, step: int) -> bool:
    """True if the validation at `step` is the best so far."""
    best = module.start.state.best
    return best is not None and best.step == step
