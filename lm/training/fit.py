"""The training loop records the start of a new or resumed run, and then trains each phase with Lightning's Trainer."""

import logging
import os
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import Diverged, RunError, one_line
from lm.evaluation.evaluate import evaluate_model, open_device
from lm.evaluation.measurement import Measurement
from lm.evaluation.metrics import create_measurements
from lm.files import UNFINISHED_MARK, json_bytes
from lm.machine import block_stop_signals, keep_freed_memory, threads_per_process
from lm.model.device import Machine, resolve_compile, resolve_device, resolve_precision
from lm.model.spec import flops_per_token
from lm.plain import Plain
from lm.progress import StepProgress
from lm.runs.checkpoints import load_checkpoint
from lm.runs.evaluations import evaluation_files, evaluation_path, logged_means
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DIVERGED_KEY,
    ENVIRONMENT_FILE,
    EVALUATIONS_FOLDER,
    METRICS_FILE,
    TOKENIZER_FILE,
    checkpoint_path,
    checkpoint_paths,
    checkpoint_step,
    truncate_manifest,
    truncate_metrics,
    write_files,
)
from lm.runs.loading import LoadedModel, load
from lm.runs.record import read_run
from lm.training.banner import banner, environment_facts
from lm.training.evaluation_callbacks import EvaluationCallback, SwapEffect, UserCallbackMetrics, Validation
from lm.training.launcher import Process
from lm.training.lightning_import import L, MisconfigurationException, SIGTERMException
from lm.training.loggers import MetricsFile, make_loggers
from lm.training.module import LanguageModel, StepData
from lm.training.phase_start import PhaseStart, resume_or_branch, start_from_checkpoint, start_new_run
from lm.training.run_context import RunContext, SignalRestoringDDP
from lm.training.step_callbacks import AtomicCheckpointIO, Checkpoints, LogMetrics, ProgressBar, StopOnSignal
from lm.training.user_classes import make_user_objects


def fit(
    config: Config,
    store: Store,
    checkpoint: Path | None,
    checkpoint_content: dict[str, object] | None,
    initial_model: LoadedModel | None,
    process: Process,
) -> int:
    """Train from step 0, or from a checkpoint of this run or of the run that it branches from. Return the exit status.

    Args:
        checkpoint: the path of this checkpoint; None: training starts at step 0.
        checkpoint_content: the content of `checkpoint`.
        initial_model: the model that `init_from` names, for a new run.

    `lm.training.phase_start.check_before_preparation` has checked that weights in `checkpoint_content` or
    `initial_model` fit the configured model.

    Raises LMError: the run can't start or continue; most checks come before anything is written.
    """
    quiet_lightning()
    is_main = process.rank == 0  # the process that writes files
    all_measurements = create_measurements(config, store)
    accelerator, device = resolve_device(config)
    torch.set_num_threads(config.trainer.threads or threads_per_process(config.trainer.devices))
    if accelerator == "cpu":
        # or Lightning would set another number of threads, in the processes that it starts, too
        if config.world_size > 1:
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        keep_freed_memory()
        device = f"cpu ({torch.get_num_threads()} threads)"

    if checkpoint:
        start, earlier_facts, notes = resume_or_branch(config, store, checkpoint_content, checkpoint)
    else:
        start, earlier_facts, notes = start_new_run(config, store, initial_model)
    if start.step >= config.trainer.max_steps:
        if later_paths := [
            path
            for path in checkpoint_paths(config.run_folder / CHECKPOINTS_FOLDER)
            if checkpoint_step(path) > start.step
        ]:
            reason = f"leaves no step up to trainer.max_steps, and the run has {later_paths[-1].name}"
            remedy = f"raise trainer.max_steps, or start a new run: branch_from={checkpoint} name=..."
            raise RunError(f"{checkpoint}: {reason}; {remedy}")
        if is_main:
            _evaluate_missing(config, all_measurements, checkpoint, earlier_facts)
        return 0
    precision = resolve_precision(config, accelerator, earlier_facts)
    flops = flops_per_token(start.decoder) * config.optim.batch_tokens * config.trainer.max_steps
    compiled = resolve_compile(config, flops, accelerator, earlier_facts)

    machine = Machine(accelerator, device, precision, compiled, process.launcher)
    facts = environment_facts(config, store, start, machine, earlier_facts)
    callbacks = make_user_objects("trainer.callbacks", config.trainer.callbacks, L.Callback)
    if is_main:
        print(banner(config, store, start, machine), *notes, sep="\n", flush=True)
    loggers = make_loggers(config, facts, is_main)  # one that can't start leaves the run as it was
    if is_main:
        folder = config.run_folder
        for path in reversed(checkpoint_paths(folder / CHECKPOINTS_FOLDER)):
            if checkpoint_step(path) > start.step:
                path.unlink()  # the newest first, as `resume=auto` goes on from the newest
        truncate_results(folder, start.step)
        files = {CONFIG_FILE: to_yaml(replace(config, resume="")).encode()}  # `resume` is not part of the run
        files |= {ENVIRONMENT_FILE: json_bytes(facts), TOKENIZER_FILE: (store.path / TOKENIZER_FILE).read_bytes()}
        write_files(folder, files, start.step)
    progress = StepProgress(config.log.progress if is_main else "none", config.trainer.max_steps)
    progress.start(start.step)
    run = RunContext(config, store, all_measurements, machine, loggers, progress, callbacks)
    try:
        status = train_phases(run, start, checkpoint)
        _leave_process_group(config)
        # if a child fails, Lightning kills the first process, which may still write
        return 0 if process.is_child else status
    except Diverged as error:
        run.log(error.step, {DIVERGED_KEY: str(error)})
        _leave_process_group(config)
        if process.is_child:  # the first process reports it
            return 0
        raise
    except RuntimeError as error:
        if config.world_size > 1 and (
            "Connection" in str(error) or isinstance(error, torch.distributed.DistBackendError)
        ):
            raise RunError("another process of this run has ended, see its message; go on with resume=auto") from None
        raise
    finally:
        progress.stop()
        for logger in loggers:
            logger.close()


def _leave_process_group(config: Config) -> None:
    """End the threads by which the processes of this run exchange tensors, if there are several processes. A thread
    that still released a tensor while Python ends would abort the process, with another exit status.
    """
    if config.world_size > 1:
        torch.distributed.destroy_process_group()


def train_phases(run: RunContext, start: PhaseStart, checkpoint: Path | None) -> int:
    """Train the remaining phases, each from the checkpoint at the end of the preceding phase. Return the process's exit
    status.
    """
    config, folder = run.config, run.config.run_folder
    with run.stop_request:
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
                    data.loader.kill_workers()
            step = trainer.global_step
            if step >= config.trainer.max_steps:
                divergence_text = read_run(folder).divergence_reason if trainer.is_global_zero else ""
                run.progress.say(f"done: {folder}" + (f", diverged: {divergence_text}" if divergence_text else ""))
                return 0
            if trainer.should_stop and not run.stop_request.signal:
                advice = f"leave it out, or set trainer.max_steps={step}; resume=auto goes on"
                raise RunError(f"trainer.callbacks: one of them stopped the run at step {step}: {advice}")
            if trainer.should_stop:  # the same on all ranks, as is the step
                run.progress.say(f"stopped by a signal at step {step}; go on with: resume=auto")
                return 128 + run.stop_request.signal
            checkpoint = checkpoint_path(folder / CHECKPOINTS_FOLDER, step)
            start = start_from_checkpoint(config, load_checkpoint(checkpoint))
            run.progress.say(
                f"phase {start.phase + 1} from step {step:,}: {config.phases_or_default[start.phase].label}"
            )


def make_trainer(run: RunContext, start: PhaseStart) -> L.Trainer:
    """Return Lightning's Trainer for one phase. Its callbacks are called in the order listed here."""
    config = run.config.with_phase_seq_len(start.phase)
    return L.Trainer(
        accelerator=run.machine.accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=SignalRestoringDDP(run.stop_request) if config.world_size > 1 else "auto",
        precision="bf16-mixed" if run.machine.uses_bf16 else "32-true",
        max_steps=config.phase_ends[start.phase],
        max_epochs=-1,
        accumulate_grad_batches=config.sequences_per_rank // config.micro_batch,
        log_every_n_steps=config.log.every,  # of what callbacks from outside give to `self.log`
        use_distributed_sampler=False,  # `StepData` gives each rank its own sequences
        plugins=[launcher_plugin(run.machine.launcher), AtomicCheckpointIO(start.checkpoint_content)],
        logger=run.loggers,
        callbacks=[
            StopOnSignal(run),
            LogMetrics(run),  # starts the clock, which the callbacks below pause
            ProgressBar(run),
            # before Checkpoints, which saves their state of the step
            *run.user_callbacks,
            *[UserCallbackMetrics(run)] * bool(run.user_callbacks),
            Validation(run, run.measurements[0]),  # before Checkpoints, which saves the best
            Checkpoints(run),
            # last, as they take long: a kill meanwhile loses no step
            *(EvaluationCallback(run, measurement) for measurement in run.measurements[1:]),
            SwapEffect(run),
        ],
        default_root_dir=config.run_folder,
        enable_checkpointing=False,  # Lightning's ModelCheckpoint; `Checkpoints` takes its place
        enable_progress_bar=False,  # Lightning's counts micro-batches; `ProgressBar` takes its place
        enable_model_summary=False,  # the banner says more
    )


def launcher_plugin(launcher: str) -> L.fabric.plugins.ClusterEnvironment:
    """Return the Lightning plugin that reads this process's rank and the number of processes from the environment
    variables of `launcher`. Without a plugin Lightning would guess the launcher.
    """
    environments = L.fabric.plugins.environments
    if launcher == "srun":
        return environments.SLURMEnvironment(auto_requeue=False)  # else Lightning would answer SIGUSR1
    return environments.TorchElasticEnvironment() if launcher == "torchrun" else environments.LightningEnvironment()


def truncate_results(run: Path, step: int) -> None:
    """Delete from a run folder the results that a run resumed at `step` makes anew. These are log lines and evaluations
    of later steps, and the evaluation of a swap of normalizers at `step` itself. Also delete temporary files of a
    killed process.
    """
    for (kind, evaluated_step), path in evaluation_files(run).items():
        if evaluated_step > step or (kind, evaluated_step) == ("swap", step):
            path.unlink()
    truncate_manifest(run, step)  # a kill before it leaves lines without files, one after it a log that is too long
    truncate_metrics(run, step)
    pattern = f".*-{UNFINISHED_MARK}-*"
    for leftover in [
        *run.glob(pattern),
        *(run / CHECKPOINTS_FOLDER).glob(pattern),
        *(run / EVALUATIONS_FOLDER).rglob(pattern),
    ]:
        leftover.unlink(missing_ok=True)  # no process writes it: this one has locked the folder


def _evaluate_missing(
    config: Config, all_measurements: list[Measurement], checkpoint: Path, facts: dict[str, Plain]
) -> None:
    """Make the evaluations that a complete run lacks because it was killed after its last step, and log them in
    metrics.jsonl.

    checkpoint: the run's last checkpoint. facts: the content of the run's environment.json, such as the precision of
    its training.
    """
    folder, step = config.run_folder, config.trainer.max_steps
    due_measurements = [measurement for measurement in all_measurements if measurement.eval_config.is_due(step, step)]
    if missing := [each for each in due_measurements if not evaluation_path(folder, each.kind, step).exists()]:
        truncate_metrics(folder, step)  # a line that the kill cut short
        for result in evaluate_model(folder, load(checkpoint), missing, open_device(config, facts)):
            means = {"tokens": result.evaluation.tokens_seen, **logged_means(result.evaluation)}
            MetricsFile(folder / METRICS_FILE).write(means, step)
    divergence_text = read_run(folder).divergence_reason
    advice = f"raise trainer.max_steps to go on, or evaluate it with other options: lm eval {folder} KEY=VALUE"
    print(f"{folder}: complete at step {step}{divergence_text and f', diverged: {divergence_text}'}; {advice}")


def quiet_lightning() -> None:
    """Silence Lightning's tips and notes; the banner says what matters."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
