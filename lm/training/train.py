"""`lm train`: checks, data, then a model and a Trainer for each phase; all is kept in the run folder."""

import contextlib
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.data.prepare import check_rows, prepare
from lm.data.store import Store
from lm.errors import RunError
from lm.evaluation.results import evaluation_path
from lm.files import write_text
from lm.progress import StepProgress
from lm.runs.consistency import check_environment
from lm.runs.folder import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, TOKENIZER, write_json
from lm.schema import to_plain
from lm.training.launcher import process_rank
from lm.training.starting import check_resume, check_train_only, claim, find_checkpoint, hold, start_from, stored

if TYPE_CHECKING:
    import lightning as L

    from lm.evaluation.measurement import Measurement
    from lm.training.module import TrainModule


def train(config: Config) -> int:
    """Train as configured; the process's exit status (0, or 128 + the signal that stopped the run).

    Raises:
        LMError: whatever keeps the run from going on; a new run folder is not left behind half-made.
    """
    main = process_rank(config) == 0
    folder = config.run_folder
    checkpoint = find_checkpoint(config)
    from lm.evaluation.suite import measurements

    created = main and not folder.exists()
    if main and not checkpoint:
        claim(folder, resume=bool(config.resume))
    try:
        with hold(folder) if main else contextlib.nullcontext():
            store = prepare(config.data, progress=main)
            check_rows(store, config)
            return _fit(config, store, measurements(config, store), checkpoint, main)
    except BaseException:
        if created and not any((folder / CHECKPOINTS).glob("*.ckpt")) and not (folder / METRICS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _fit(config: Config, store: Store, asked: list["Measurement"], checkpoint: Path | None, main: bool) -> int:
    import torch

    from lm.model.counts import flops_per_token
    from lm.model.decoder import Decoder
    from lm.model.device import resolve_compile, resolve_device, resolve_precision
    from lm.runs.checkpoints import BEST, LAST, load_checkpoint, point, step_path, verify
    from lm.runs.loading import TOKENIZER_SHA256
    from lm.training import callbacks
    from lm.training.banner import banner, environment
    from lm.training.clock import Clock
    from lm.training.metrics import MetricLog, cut_back, start_wandb, wandb_mode
    from lm.training.module import TrainModule

    quiet_lightning()
    folder, max_steps = config.run_folder, config.trainer.max_steps
    accelerator, device = resolve_device(config)
    mode = wandb_mode(config.log)
    if accelerator == "cpu":
        torch.set_num_threads(config.trainer.threads or max(1, (os.cpu_count() or 1) // config.trainer.devices))
        device = f"cpu ({torch.get_num_threads()} threads)"

    first_step, notes, best, before = 0, [], None, {}
    if checkpoint:
        saved = load_checkpoint(checkpoint)
        first_step, notes = check_resume(config, store, saved, checkpoint)
        before = check_environment(folder / ENVIRONMENT, saved["lm"], checkpoint)
        best = saved["lm"]["best"]
        if first_step >= max_steps:
            return _complete(config, asked, checkpoint, first_step, main)
    phase, start = config.phase_at(first_step), before.get("started_from")
    decoder = Decoder(config.model_in(phase), store.vocab_size, config.data.seq_len, config.seed)
    if config.train_only:
        check_train_only(config, decoder)
    if config.init_from and not checkpoint:
        start, notes = start_from(config, store, decoder)
    precision = resolve_precision(config, accelerator, before)
    flops = flops_per_token(decoder) * config.optim.batch_tokens * max_steps
    compiled = resolve_compile(config, flops, accelerator, before)

    facts = {**environment(config, store, decoder, device, precision, compiled, first_step, before), "started_from": start}
    facts[TOKENIZER_SHA256] = store.manifest["files"][TOKENIZER]["sha256"]
    if main:
        print(banner(config, phase, store, decoder, accelerator, device, precision, compiled), *notes, sep="\n", flush=True)
        write_text(folder / CONFIG, to_yaml(stored(config)))
        write_json(folder / ENVIRONMENT, facts)
        write_text(folder / TOKENIZER, (store.path / TOKENIZER).read_text(encoding="utf-8"))
        if checkpoint and checkpoint.name != LAST:
            point(LAST, checkpoint)  # the run goes back to it: from now on, even if killed in the next line
        for note in cut_back(folder, first_step):
            print(note, flush=True)
        if best and step_path(folder / CHECKPOINTS, best["step"]).exists():
            point(BEST, step_path(folder / CHECKPOINTS, best["step"]))
    mirror = start_wandb(mode, config.log.project, folder, config.name, facts["wandb_id"], to_plain(config)) if main else None
    log = MetricLog(folder / METRICS, mirror, main)
    progress, clock = StepProgress(config.log.progress if main else "none", max_steps), Clock()
    evaluation = config, asked, folder, log, progress, clock, precision.value != "32"
    step = first_step
    progress.start(first_step)
    try:
        with callbacks.StopOnSignal() as stop:
            told_to_stop = False
            while step < max_steps and not told_to_stop:
                if step > first_step:  # a phase has ended: the next one begins with its checkpoint
                    phase, checkpoint = phase + 1, step_path(folder / CHECKPOINTS, step)
                    verify(checkpoint)  # Lightning reads it as it is; the one that a run is resumed from has been verified
                    decoder = Decoder(config.model_in(phase), store.vocab_size, config.data.seq_len, seed=None)
                module = TrainModule(config, phase, store, decoder, compiled.value == "true", facts["wandb_id"], stop.told)
                hooks = [
                    stop,
                    callbacks.Metrics(log, config, progress, clock),
                    callbacks.Validate(*evaluation),
                    callbacks.Checkpoints(config, folder / CHECKPOINTS, clock),
                    callbacks.Evaluate(*evaluation),
                    callbacks.Swap(*evaluation),
                ]
                trainer = make_trainer(config, phase, accelerator, precision.value, module, hooks)
                trainer.fit(module, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
                step, told_to_stop = trainer.global_step, trainer.should_stop  # both are the same on all ranks
    except RuntimeError as error:
        if config.world_size > 1 and ("Connection" in str(error) or isinstance(error, torch.distributed.DistBackendError)):
            raise RunError("another process of this run has ended, see its message; go on with resume=auto") from None
        raise
    finally:
        progress.stop()
        log.close()
    if step < max_steps:
        progress.say(f"stopped by a signal at step {step}; go on with: resume=auto")
        return 128 + stop.signal
    progress.say(f"done: {folder}")
    return 0


def make_trainer(
    config: Config, phase: int, accelerator: str, precision: str, module: "TrainModule", callbacks: list["L.Callback"]
) -> "L.Trainer":
    """Lightning's Trainer for one phase: saving, logging and progress are the callbacks' alone."""
    import lightning as L

    from lm.training.callbacks import AtomicCheckpointIO

    return L.Trainer(
        accelerator=accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy="ddp" if config.world_size > 1 else "auto",
        precision="bf16-mixed" if precision == "bf16-mixed" else "32-true",
        max_steps=config.phase_ends[phase],
        max_epochs=-1,
        accumulate_grad_batches=module.accumulation,
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=config.run_folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _complete(config: Config, asked: list["Measurement"], checkpoint: Path, step: int, main: bool) -> int:
    """Nothing is left to train: make up for evaluations that a kill after the last step prevented."""
    from lm.evaluation.evaluate import evaluate, print_results

    folder = config.run_folder
    if main:
        due = [one.kind for one in asked if one.schedule.is_due(step, step)]
        lost = [kind for kind in due if not evaluation_path(folder, kind, step).exists()]
        if lost:
            print_results(evaluate(config, folder, checkpoint, lost))
        print(f"{folder}: complete at step {step}; raise trainer.max_steps to go on")
    return 0


def quiet_lightning() -> None:
    """Lightning's tips and notes on what is chosen here; our banner says what matters."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
