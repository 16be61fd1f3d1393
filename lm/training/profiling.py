"""A window of optimizer steps recorded by torch's profiler (`trainer.profile`)."""

import time

from torch.profiler import ProfilerActivity, profile

from lm.data.batches import Batch
from lm.files import write_text
from lm.runs.folder import PROFILE
from lm.training.callbacks import StepCallback
from lm.training.clock import Clock
from lm.training.lightning import L
from lm.training.module import TrainModule
from lm.training.run_context import RunContext

ROWS = 40  # operations in the table


class ProfileSteps(StepCallback):
    """Records the steps of `trainer.profile` on the first process, or as many of them as are made.

    In the run's folder profile/: steps-FIRST-LAST.json.gz, a trace for chrome://tracing or ui.perfetto.dev, and as .txt the operations that
    took most time.
    """

    def __init__(self, run: RunContext, clock: Clock):
        self.run, self.clock, self.window, self.profiler = run, clock, run.config.trainer.profile, None
        self.first = self.last = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Say so if training goes on after a window of which nothing was recorded."""
        over = self.window and trainer.is_global_zero and trainer.global_step >= self.window.last
        if over and not (self.run.config.run_folder / PROFILE).exists():
            self.run.progress.say(f"trainer.profile: steps {self.window.first} to {self.window.last} were made before: none is recorded")

    def on_train_batch_start(self, trainer: L.Trainer, module: TrainModule, batch: Batch, batch_idx: int) -> None:
        """Start with the first step of the window that is made here."""
        step = trainer.global_step + 1
        if self.profiler or not self.window or not self.window.first <= step <= self.window.last or not trainer.is_global_zero:
            return
        on_gpu = self.run.machine.accelerator == "gpu"
        self.profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, profile_memory=True)
        self.first, begin = step, time.perf_counter()
        self.profiler.start()  # which loads libraries first
        self.clock.paused(begin)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """End after the last one."""
        self.last = step
        if self.profiler and step >= self.window.last:
            self._write()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Keep what was recorded until a stop, or the end of a phase."""
        if self.profiler and self.last >= self.first:
            self._write()

    def _write(self) -> None:
        begin = time.perf_counter()
        self.profiler.stop()
        folder = self.run.config.run_folder / PROFILE
        folder.mkdir(exist_ok=True)
        path = folder / f"steps-{self.first}-{self.last}.txt"
        self.profiler.export_chrome_trace(str(path.with_suffix(".json.gz")))
        order = "self_cuda_time_total" if self.run.machine.accelerator == "gpu" else "self_cpu_time_total"
        write_text(path, self.profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60))
        self.profiler = None
        self.clock.paused(begin)
        self.run.progress.say(f"profile of steps {self.first} to {self.last}: {path}")
