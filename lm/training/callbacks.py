"""Callbacks around the optimizer steps: metrics, evaluation, progress, checkpoints, a profile, stopping on a signal."""

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from types import FrameType

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lm.config.load import to_yaml
from lm.data.batches import Batch, train_sequences
from lm.errors import one_line
from lm.evaluation.evaluation_kind import Measurement
from lm.evaluation.swap import SwapMeasurement, swap_lines
from lm.files import write_text
from lm.machine import STOP_SIGNALS, unblock_stop_signals
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, peak_memory_bytes
from lm.model.spec import flops_per_token
from lm.plugins import PLUGINS
from lm.report.evaluation_tables import logged_means
from lm.runs.checkpoints import link_checkpoint, save_checkpoint
from lm.runs.evaluations import Evaluation, evaluation_path, selection_loss
from lm.runs.folder import (
    BEST,
    CHECKPOINTS,
    LAST,
    METRICS,
    PEAK_MEMORY,
    PROFILE,
    log_seal,
    read_metrics,
    step_of,
    step_path,
    step_paths,
)
from lm.runs.metadata import CHECKPOINT_FORMAT
from lm.training.module import (
    L,
    NamedValues,
    RunContext,
    TrainModule,
    copied_to_host,
    largest_scores,
    logit_scales,
    normalizer_parameters,
)
from lm.training.optimizers import named_state
from lm.training.starting import Best


class Clock:
    """Measures the seconds of training, without evaluations and checkpoints."""

    def start(self, seconds: float) -> None:
        self._begin = time.perf_counter() - seconds

    def seconds(self) -> float:
        """Seconds since `start`, pauses excluded."""
        return time.perf_counter() - self._begin

    def exclude_since(self, begin: float) -> None:
        """Exclude the time since `begin`, a reading of `time.perf_counter`."""
        self._begin += time.perf_counter() - begin


# ---------------------------------------------------------------- FLOPs a second, of a device and of a run


# TFLOP/s of GPUs in bf16 (tensor cores, dense, fp32 accumulation) and in fp32, by their makers' data sheets.
# Lightning's table differs in bf16: an A40 has a fourth of its figure, an RTX 4090 half, an H200 the figure for sparse
# matrices. It also takes an L40 for an L4.
SCORE_SEQUENCES = 2  # sequences of each logged step whose largest score is looked for
GPU_TFLOPS = {
    "A10": (125, 31.2),
    "A40": (149.7, 37.4),
    "A100": (312, 19.5),
    "A100 PCIE": (312, 19.5),
    "H100": (989.4, 66.9),  # SXM
    "H100 NVL": (835.5, 60),
    "H100 PCIE": (756, 51.2),
    "H200": (989.4, 66.9),  # SXM
    "H200 NVL": (835.5, 60),
    "L4": (121, 30.3),
    "L40": (181, 90.5),
    "L40S": (362, 91.6),
    "RTX A6000": (154.8, 38.7),
    "RTX 3090": (71, 35.6),
    "RTX 4090": (165.2, 82.6),
}
MAX_MATRIX_ROWS, MEASURING_SECONDS = 1024, 0.1  # for the FLOPs of a CPU: most rows of the square matrices, time limit


def peak_flops(accelerator: str, bf16: bool) -> float | None:
    """Peak FLOPs a second of one device in bf16 or fp32; None if it is not known.

    The peak of a GPU comes from the maker's data sheet; the peak of a CPU is measured by timing matrix products with
    torch's threads.
    """
    if accelerator == "gpu":
        # as in NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-40GB
        name_words = re.split("[ -]", torch.cuda.get_device_name().upper())
        name = " ".join(word for word in name_words if not re.fullmatch(r"NVIDIA|GEFORCE|SXM\d|\d+GB|HBM\d\w*", word))
        return GPU_TFLOPS[name][0 if bf16 else 1] * 1e12 if name in GPU_TFLOPS else None
    return _matmul_flops(torch.bfloat16 if bf16 else torch.float32, torch.get_num_threads())


@lru_cache
def _matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """Highest FLOPs a second over matrix products timed on the CPU; `threads` (torch's number) is only part of the
    cache key.

    Matrices grow only while time remains, as a CPU that emulates bf16 takes seconds for one product of
    `MAX_MATRIX_ROWS` rows.
    """
    n_rows, best_flops_per_s, end = MAX_MATRIX_ROWS // 8, 0.0, time.perf_counter() + MEASURING_SECONDS
    while (begin := time.perf_counter()) < end:
        matrix = torch.ones(n_rows, n_rows, dtype=dtype)
        start = time.perf_counter()
        matrix @ matrix
        seconds = time.perf_counter() - start
        best_flops_per_s = max(best_flops_per_s, 2 * n_rows**3 / seconds)
        n_rows = min(MAX_MATRIX_ROWS, 2 * n_rows) if 8 * seconds < end - begin else n_rows
    return best_flops_per_s


def mfu(decoder: Decoder, tokens_per_s: float, peak: float | None) -> dict[str, float]:
    """Model FLOPs utilization (MFU) by metric name; {} if `peak`, the peak FLOPs a second of all devices together, is
    not known.

    `mfu/causal` counts the scores that causal attention needs; `mfu/palm` counts scores of all pairs of tokens, as PaLM
    and nanoGPT do.
    """
    if not peak:
        return {}
    counts = {"mfu/causal": flops_per_token(decoder), "mfu/palm": flops_per_token(decoder, count_masked=True)}
    return {name: round(flops * tokens_per_s / peak, 4) for name, flops in counts.items()}


# ---------------------------------------------------------------- callbacks


class StepCallback(L.Callback):
    """A callback with one hook, `on_step`, called after each optimizer step (Lightning calls its hooks for each
    micro-batch).
    """

    def __init__(self, run: RunContext, clock: Clock):
        self.config = run.config
        self.metric_log = run.log
        self.progress = run.progress
        self.machine = run.machine
        self.clock = clock

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Call `on_step` if the micro-batch ended an optimizer step."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step(trainer, module, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Act after optimizer step `step` (1-based), on every rank."""

    def device(self, trainer: L.Trainer, module: TrainModule) -> Device:
        return Device(module.device, self.machine.bf16, trainer.global_rank, trainer.world_size)


class StopOnSignal(StepCallback):
    """Ends training at any of `STOP_SIGNALS` after the current step, on all ranks, with a checkpoint.

    It is a context manager around all phases of a run, and also records, in `signal`, a signal between two phases. A
    repeated signal ends the process at once, except SIGHUP, which a closed terminal sends more than once. A second
    signal of another number does not, as a parent that ends after the first signal may send SIGTERM. A process that was
    started to ignore SIGHUP (nohup) ignores it.
    """

    def __init__(self) -> None:
        self.signal = 0  # the number of the last signal; 0: none yet
        self._old_handlers: dict[int, object] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> "StopOnSignal":
        numbers = [
            number for number in STOP_SIGNALS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        ]
        self._terminals = [output for output in (1, 2) if os.isatty(output)]
        self._old_handlers = {number: signal.signal(number, self._record_signal) for number in numbers}
        unblock_stop_signals()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        if number == signal.SIGHUP:  # writing to a closed terminal would raise an error
            null_device = os.open(os.devnull, os.O_WRONLY)
            for output in self._terminals:
                os.dup2(null_device, output)
            os.close(null_device)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        """Stop training on all ranks after the step in which any rank received a signal."""
        if module.stop:
            self.signal = self.signal or signal.SIGTERM
            trainer.should_stop = True


class Metrics(StepCallback):
    """Logs metrics every `log.every` steps, and at the first and last step.

    Each line has the mean loss since the last line, the step's gradient norm and learning rate, tokens per second, MFU,
    and peak memory. It also has the normalizers' parameters and the metrics that `log.dynamics` names.
    """

    def __init__(self, run: RunContext, clock: Clock):
        super().__init__(run, clock)
        self.peak_flops = run.machine.peak_flops and run.machine.peak_flops * run.config.world_size
        self.sequences = train_sequences(run.store, run.config) if "largest_score" in run.config.log.dynamics else None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock at the seconds of training so far, which the checkpoint holds, and measure speed from this
        step.
        """
        self.clock.start(module.start.state.elapsed_s)
        self.last_step, self.last_time = trainer.global_step, self.clock.seconds()

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        max_steps = self.config.trainer.max_steps
        if not self.config.log.is_due(step, max_steps):
            self.progress.advance(step)
            return
        state, tokens = module.start.state, self.config.optim.batch_tokens
        loss, z_loss = state.take_mean_losses()
        elapsed_s = self.clock.seconds()
        speed = (step - self.last_step) * tokens / max(elapsed_s - self.last_time, 1e-9)
        self.last_step, self.last_time = step, elapsed_s
        self.metric_log.write(
            {
                "step": step,
                "tokens": step * tokens,
                "train/loss": loss,
                **({"train/z_loss": z_loss} if self.config.optim.z_loss else {}),
                "train/grad_norm": module.grad_norm,
                "lr": self.config.optim.lr_at(step - 1, max_steps),
                "tokens_per_s": round(speed, 1),
                **mfu(module.decoder, speed, self.peak_flops),
                "elapsed_s": round(elapsed_s, 3),
                PEAK_MEMORY: peak_memory_bytes(module.device),
                **({"sequence_length": module.sequence_length} if self.config.data.lengths.allows_shorter else {}),
                **({"train/skipped": state.skipped} if self.config.optim.on_nonfinite == "skip" else {}),
                **module.layer_grad_norms,
                **(copied_to_host(self._weight_metrics(module, step)) if trainer.is_global_zero else {}),
            }
        )
        self.progress.advance(step, loss, speed)

    def _weight_metrics(self, module: TrainModule, step: int) -> Iterator[NamedValues]:
        """Yield the normalizers' parameters and, if `log.dynamics` names them, `logit_scales` and, on the step's first
        sequences, `largest_scores`."""
        yield from normalizer_parameters(module.decoder)
        if "logit_scale" in self.config.log.dynamics:
            yield from logit_scales(module.decoder)
        if self.sequences:
            batch = self.sequences.batch(step - 1, 0, min(SCORE_SEQUENCES, self.sequences.slots_per_step))
            yield from largest_scores(module.decoder, batch, Device(module.device, self.machine.bf16))


class Evaluations(StepCallback):
    """Makes the measurements that are due, on all ranks, and writes each result to a file in evaluations/ and a line in
    metrics.jsonl.

    Pictures take as long to draw as a short run takes to start. They are therefore drawn only if a logger such as wandb
    shows them, or at the last step of a run outside experiments. Training time excludes measurements and pictures. If a
    measurement fails or exceeds its time limit, the failure is logged, and training continues unless `eval.on_error` is
    stop.
    """

    def __init__(self, run: RunContext, clock: Clock, measurements: list[Measurement]):
        super().__init__(run, clock)
        self.max_steps, self.measurements = run.config.trainer.max_steps, measurements

    def due(self, step: int) -> list[Measurement]:
        return [
            measurement for measurement in self.measurements if measurement.eval_config.is_due(step, self.max_steps)
        ]

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        for measurement in self.due(step):
            self.run(trainer, module, measurement, module.decoder)

    def run(
        self, trainer: L.Trainer, module: TrainModule, measurement: Measurement, decoder: Decoder
    ) -> Evaluation | None:
        """Measure `decoder` now, log the result and cache it for `lm eval`. Returns None if measuring failed. All ranks
        must call it.
        """
        begin, step, kind = time.perf_counter(), trainer.global_step, measurement.kind
        device = self.device(trainer, module)
        tokens, result = step * self.config.optim.batch_tokens, None
        try:
            result = measurement.evaluate(decoder.to(device.device), device, step, tokens)
            module.start.state.note_weights(step, result.weights_sha256)
            if trainer.is_global_zero:
                scores = logged_means(result)  # logged before its file is written: where a file is, nothing is missing
                self.metric_log.write(
                    {"step": step, "tokens": tokens, **scores, PEAK_MEMORY: peak_memory_bytes(device.device)}
                )
                draws_picture = self.metric_log.gets_pictures or (
                    step == self.max_steps and not self.config.experiment.name
                )
                path = measurement.write(self.config.run_folder, result, draws_picture)
                measurement.cache(self.config.run_folder, result, device)
                self.metric_log.send_evaluation(result, path.with_suffix(".png"))
                self.progress.say(
                    f"step {step}: " + (", ".join(f"{name} {value:.4f}" for name, value in scores.items()) or kind)
                )
        except Exception as error:  # whatever it is: an evaluation must not end a run
            if self.config.eval.on_error == "stop":
                raise
            reason = one_line(error)
            self.metric_log.write({"step": step, "tokens": tokens, f"{kind}/failed": reason})
            self.progress.say(f"step {step}: {kind}: not {'kept' if result else 'measured'}: {reason}")
        finally:
            self.clock.exclude_since(begin)
        return result  # the same on all ranks, also where the first one measured it and failed to write it


class Validate(Evaluations):
    """Measures the loss at the training length, every `Config.validation_every` steps and at the end."""

    def run(
        self, trainer: L.Trainer, module: TrainModule, measurement: Measurement, decoder: Decoder
    ) -> Evaluation | None:
        """Measure and return the validation loss; record the step as the best if its `selection_loss` is the lowest so
        far on its sequences."""
        if result := super().run(trainer, module, measurement, decoder):
            state, (loss, sha256) = module.start.state, selection_loss(result.series[0])
            # losses that can't be compared
            has_no_comparable_best = not state.best or state.best.sequences_sha256 != sha256
            if math.isfinite(loss) and (has_no_comparable_best or loss < state.best.loss):
                state.best = Best(result.step, loss, sha256)
                self.metric_log.summarize({"best/step": result.step, "best/selection_loss": loss})
        return result


class Evaluate(Evaluations):
    """Makes all evaluations but the validation (`Validate`), at their own intervals, and measures the effect of a
    swap.
    """

    def on_train_start(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Make evaluations that are missing at the step from which training continues, and measure the effect of a swap
        at this step.
        """
        step, old_decoder, folder = trainer.global_step, module.start.replaced_decoder, self.config.run_folder
        lines = (
            [line for line in read_metrics(folder / METRICS).lines if line["step"] == step]
            if step and trainer.is_global_zero
            else []
        )
        logged_names = {name for line in lines for name in line}
        for measurement in self.due(step) if step else []:
            # the cause of a failure may be mended, except before a swap
            has_failed = old_decoder and f"{measurement.kind}/failed" in logged_names
            is_missing = not has_failed and not evaluation_path(folder, measurement.kind, step).exists()
            if trainer.strategy.reduce_boolean_decision(is_missing and trainer.is_global_zero, all=False):
                # after a swap: the model of the phase before
                self.run(trainer, module, measurement, old_decoder or module.decoder)
        if old_decoder:
            lines, warning = swap_lines(old_decoder, module.decoder, step)
            for line in filter(None, [*lines, warning]):
                self.progress.say(line)
        if old_decoder and self.config.eval.swap_lengths:
            self.run(trainer, module, SwapMeasurement(self.config, module.store, old_decoder), module.decoder)
        module.start.replaced_decoder = None


# ---------------------------------------------------------------- checkpoints


class Checkpoints(StepCallback):
    """Saves `step-N.ckpt` every `checkpoint_every` steps, at each best validation so far, and when a phase or training
    ends. The newest and the best file also get the names `last.ckpt` and `best.ckpt`.

    Lightning's own checkpoints are not used. Lightning writes through $TMPDIR, so that a process that dies may leave a
    truncated file, and it stores counters that a resumed run would have to correct.
    """

    def __init__(self, run: RunContext, clock: Clock):
        super().__init__(run, clock)
        self.wandb_id, self.checkpoint_interval = run.wandb_id, self.config.checkpoint_every
        # as in config.yaml; made once: it takes longer than saving a small model
        self.yaml = to_yaml(replace(self.config, resume=""))
        self.folder = self.config.run_folder / CHECKPOINTS
        self.saved_step = -1

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        if self.is_regular(step) or step in self.config.phase_ends or module.start.state.is_best(step):
            self.save(trainer, module)

    def is_regular(self, step: int) -> bool:
        """Whether `step` is a multiple of `checkpoint_every` or the last step; the last `keep_checkpoints` regular
        checkpoints are kept.
        """
        return step % self.checkpoint_interval == 0 or step == self.config.trainer.max_steps

    def on_train_end(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Save a checkpoint of the last step, if this step has none yet, for example because a signal stopped
        training.
        """
        if trainer.global_step != self.saved_step:
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: TrainModule) -> None:
        """Save a checkpoint of the present step, and delete old checkpoints (`prune`). All ranks must call it."""
        begin, self.saved_step = time.perf_counter(), trainer.global_step

        def write() -> Tensor:
            if trainer.is_global_zero:
                path, state = step_path(self.folder, self.saved_step), module.start.state
                state.note_weights(self.saved_step, save_checkpoint(self.content(module), path))
                link_checkpoint(LAST, path)
                if state.is_best(self.saved_step):
                    link_checkpoint(BEST, path)
                self.prune()
            return torch.zeros(1)

        # where the first rank can't save, the others raise an error, too
        all_reduce_sum(self.device(trainer, module), write)
        self.clock.exclude_since(begin)

    def content(self, module: TrainModule) -> dict[str, object]:
        """The content of a checkpoint: weights, optimizer state by parameter name, and metadata to rebuild the model,
        resume and verify.
        """
        start, step = module.start, module.global_step
        start.state.elapsed_s = self.clock.seconds()
        metadata = {
            "format": CHECKPOINT_FORMAT,
            "config": self.yaml,
            "vocab_size": module.decoder.vocab_size,
            "data_fingerprint": module.store.fingerprint,
            "step": step,
            "tokens": step * self.config.optim.batch_tokens,
            "phase": start.phase,
            "plugins": PLUGINS.versions(self.config.plugin_names_by_key.values()),
            "wandb_id": self.wandb_id,
            "log": log_seal(self.config.run_folder / METRICS),
            **asdict(start.state),
        }
        optimizer = named_state(module.optimizers(use_pl_optimizer=False))
        return {"state_dict": module.decoder.state_dict(), "optimizer": optimizer, "lm": metadata}

    def prune(self) -> None:
        """Delete each `step-N.ckpt` but the newest, the last regular ones (`is_regular`), and those of phase ends;
        `best.ckpt` stays.
        """
        paths = step_paths(self.folder)
        regular_paths = [path for path in paths if self.is_regular(step_of(path))]
        swaps = {step_path(self.folder, end) for end in self.config.phase_ends[:-1]}
        for path in {*paths} - {
            step_path(self.folder, self.saved_step),
            *regular_paths[-self.config.trainer.keep_checkpoints :],
            *swaps,
        }:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- torch's profiler


PROFILE_ROWS = 40  # rows of the table of operations


class ProfileSteps(StepCallback):
    """Profiles the range of steps `trainer.profile` on the first process, or a part of it if training starts or ends
    within the range.

    Writes to profile/ in the run folder: steps-FIRST-LAST.json.gz, a trace for chrome://tracing or ui.perfetto.dev, and
    steps-FIRST-LAST.txt, a table of the operations that took most time.
    """

    def __init__(self, run: RunContext, clock: Clock):
        super().__init__(run, clock)
        self.window, self.profiler, self.first_step = run.config.trainer.profile, None, 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print a note if all steps to profile were trained before this start, and no profile exists."""
        window_passed = self.window and trainer.is_global_zero and trainer.global_step >= self.window.last
        if window_passed and not (self.config.run_folder / PROFILE).exists():
            self.progress.say(
                f"trainer.profile: steps {self.window.first} to {self.window.last} were made before: none is recorded"
            )

    def on_train_batch_start(self, trainer: L.Trainer, module: TrainModule, batch: Batch, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if (
            self.profiler
            or not self.window
            or not self.window.first <= step <= self.window.last
            or not trainer.is_global_zero
        ):
            return
        on_gpu = self.machine.accelerator == "gpu"
        self.profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, profile_memory=True
        )
        self.first_step, begin = step, time.perf_counter()
        self.profiler.start()  # loads libraries first
        self.clock.exclude_since(begin)

    def on_step(self, trainer: L.Trainer, module: TrainModule, step: int) -> None:
        if self.profiler and step >= self.window.last:
            self._write_profile(step)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the profile of the steps so far if training stops, or a phase ends, within the range."""
        if self.profiler and trainer.global_step >= self.first_step:
            self._write_profile(trainer.global_step)

    def _write_profile(self, last_step: int) -> None:
        begin = time.perf_counter()
        self.profiler.stop()
        folder = self.config.run_folder / PROFILE
        folder.mkdir(exist_ok=True)
        path = folder / f"steps-{self.first_step}-{last_step}.txt"
        self.profiler.export_chrome_trace(str(path.with_suffix(".json.gz")))
        sort_key = "self_cuda_time_total" if self.machine.accelerator == "gpu" else "self_cpu_time_total"
        write_text(
            path, self.profiler.key_averages().table(sort_by=sort_key, row_limit=PROFILE_ROWS, max_name_column_width=60)
        )
        self.profiler = None
        self.clock.exclude_since(begin)
        self.progress.say(f"profile of steps {self.first_step} to {last_step}: {path}")
