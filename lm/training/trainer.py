"""The training loop: Lightning's Trainer, made and run for each phase of a run."""

from pathlib import Path

from lm.errors import RunError, one_line
from lm.machine import block_stop_signals
from lm.runs.checkpoints import load_checkpoint
from lm.runs.evaluations import VALIDATION, evaluation_path, load_evaluation
from lm.runs.folder import CHECKPOINTS, METRICS, read_metrics, step_path
from lm.runs.record import divergence
from lm.training.checkpointing import AtomicCheckpointIO, Checkpoints
from lm.training.evaluation_callbacks import EVALUATION_CALLBACKS, CallbackMetrics, SwapEffect, Validation
from lm.training.lightning_import import L, MisconfigurationException, SIGTERMException
from lm.training.module import LanguageModel, StepData
from lm.training.run_context import RunContext
from lm.training.starting import PhaseStart, start_from_checkpoint
from lm.training.step_callbacks import Metrics, ProgressBar, StopOnSignal


def train_phases(run: RunContext, start: PhaseStart, checkpoint: Path | None) -> int:
    """Train the remaining phases, each from the checkpoint at the end of the preceding phase. Returns the process's
    exit status.
    """
    config, folder = run.config, run.config.run_folder
    with run.stop:
        while True:
            try:
                trainer, data = make_trainer(run, start), StepData(run, start.phase)
            except MisconfigurationException as error:  # a second progress bar, or one that saves checkpoints
                raise RunError(f"trainer.callbacks: Lightning refuses them: {one_line(error)}") from None
            block_stop_signals()  # in processes that Lightning starts now, too: it would end them as they import
            try:
                trainer.fit(LanguageModel(run, start), data, ckpt_path=checkpoint)
            except SIGTERMException:
                pass  # `Checkpoints` has saved the step
            except Exception as error:
                if data.loader and isinstance(error, RuntimeError | OSError | EOFError):
                    data.loader.check_workers()
                raise
            finally:
                if data.loader:
                    data.loader.end_workers()
            step = trainer.global_step
            if step >= config.trainer.max_steps:
                how = final_divergence(folder, step) if trainer.is_global_zero else ""
                run.progress.say(f"done: {folder}" + (f", diverged: {how}" if how else ""))
                return 0
            if trainer.should_stop and not run.stop.signal:
                advice = f"leave it out, or set trainer.max_steps={step}; resume=auto goes on"
                raise RunError(f"trainer.callbacks: one of them stopped the run at step {step}: {advice}")
            if trainer.should_stop:  # the same on all ranks, as is the step
                run.progress.say(f"stopped by a signal at step {step}; go on with: resume=auto")
                return 128 + run.stop.signal
            checkpoint = step_path(folder / CHECKPOINTS, step)
            start = start_from_checkpoint(config, load_checkpoint(checkpoint))
            run.progress.say(f"phase {start.phase + 1} from step {step:,}: {config.plan[start.phase].label}")


def make_trainer(run: RunContext, start: PhaseStart) -> L.Trainer:
    """Lightning's Trainer for one phase. Its callbacks are called in the order listed here."""
    config = run.config.in_phase(start.phase)
    return L.Trainer(
        accelerator=run.machine.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy="ddp" if config.world_size > 1 else "auto",
        precision="bf16-mixed" if run.machine.bf16 else "32-true",
        max_steps=config.phase_ends[start.phase],
        max_epochs=-1,
        accumulate_grad_batches=config.rank_sequences // config.micro_batch,
        log_every_n_steps=config.log.every,  # of what callbacks from outside give to `self.log`
        use_distributed_sampler=False,  # `StepData` gives each rank its own sequences
        plugins=[launcher_plugin(run.machine.launcher), AtomicCheckpointIO(start.content)],
        logger=run.loggers,
        callbacks=[
            StopOnSignal(run),
            Metrics(run),  # starts the clock, which the callbacks below pause
            ProgressBar(run),
            # before Checkpoints, which saves their state of the step
            *run.callbacks,
            *[CallbackMetrics(run)] * bool(run.callbacks),
            Validation(run, run.measurements[0]),  # before Checkpoints, which saves the best
            Checkpoints(run),
            # last, as they take long: a kill meanwhile loses no step
            *(EVALUATION_CALLBACKS[measurement.kind](run, measurement) for measurement in run.measurements[1:]),
            SwapEffect(run),
        ],
        default_root_dir=config.run_folder,
        enable_checkpointing=False,  # Lightning's ModelCheckpoint; `Checkpoints` takes its place
        enable_model_summary=False,  # the banner says more
    )


def launcher_plugin(launcher: str) -> L.fabric.plugins.ClusterEnvironment:
    """Return Lightning's class that finds the other processes, by their launcher; without it Lightning would guess."""
    environments = L.fabric.plugins.environments
    if launcher == "srun":
        return environments.SLURMEnvironment(auto_requeue=False)  # else Lightning would answer SIGUSR1
    return environments.TorchElasticEnvironment() if launcher == "torchrun" else environments.LightningEnvironment()


def final_divergence(folder: Path, step: int) -> str:
    """How a run that has ended at `step` diverged (`lm.runs.record.divergence`); empty if it didn't."""
    path = evaluation_path(folder, VALIDATION, step)
    validation = load_evaluation(path) if path.exists() else None
    return divergence(read_metrics(folder / METRICS).lines, validation)
