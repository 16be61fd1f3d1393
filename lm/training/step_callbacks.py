"""Callbacks around the optimizer steps: a signal that stops the run, metrics, the progress bar."""

import signal

import torch
from torch import Tensor

from lm.model.decoder import Decoder
from lm.model.device import peak_memory_bytes
from lm.runs.folder import PEAK_MEMORY
from lm.training.lightning_import import L
from lm.training.module import LanguageModel
from lm.training.run_context import RunContext


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

    Each line has the mean loss since the last line, the step's gradient norm and learning rate, tokens per second, peak
    memory, and the normalizers' parameters.
    """

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock at the seconds of training so far, which the checkpoint holds, and measure speed from this
        step.
        """
        self.run.clock.start(module.start.state.elapsed_s)
        self.last_step, self.last_time = trainer.global_step, self.run.clock.seconds()

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
                "elapsed_s": round(elapsed_s, 3),
                PEAK_MEMORY: peak_memory_bytes(module.device),
                "sequence_length": module.sequence_length,
                **(normalizer_parameters(module.decoder) if trainer.is_global_zero else {}),
            }
        )
        module.logged = loss, speed


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
