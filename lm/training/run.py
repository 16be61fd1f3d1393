"""`lm train`: checks, data, model, Trainer, run folder, in this order."""

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import yaml

from lm.config import Config, parse, to_yaml
from lm.data.prepare import check_rows, prepare
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.results import evaluation_path
from lm.files import write_text
from lm.runs import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS, TOKENIZER, read_json, write_json
from lm.schema import Plain, to_plain

# A resumed run may differ from its first start in these; anything else would make it another run.
FREE_TO_CHANGE = ("name", "runs", "resume", "log", "eval", "trainer", "data.root", "data.workers")


def train(config: Config) -> int:
    """Train as configured; the process's exit status (0, or 128 + the signal that stopped the run).

    Raises:
        LMError: whatever keeps the run from going on; a new run folder is not left behind half-made.
    """
    main = is_main_process()
    folder = config.run_folder
    check_launcher(config)
    checkpoint = find_checkpoint(config)
    created = main and not folder.exists()
    if main and not checkpoint:
        claim(folder, resume=bool(config.resume))
    try:
        with hold(folder) if main else contextlib.nullcontext():
            store = prepare(config.data, progress=main)
            check_rows(store, config)
            return _fit(config, store, checkpoint, main)
    except BaseException:
        if created and not any((folder / CHECKPOINTS).glob("*.ckpt")) and not (folder / METRICS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _fit(config: Config, store: Store, checkpoint: Path | None, main: bool) -> int:
    import lightning as L
    import torch

    from lm.checkpoints import LAST, load_checkpoint, point_last
    from lm.evaluation.loss import long_rows, validation_rows
    from lm.model import Decoder, flops_per_token
    from lm.training.banner import banner, environment
    from lm.training.callbacks import AtomicCheckpointIO, Checkpoints, Evaluate, Metrics, StopOnSignal
    from lm.training.device import resolve_compile, resolve_device, resolve_precision
    from lm.training.metrics import MetricLog, cut_back, start_wandb
    from lm.training.module import TrainModule
    from lm.training.progress import Clock, ProgressLine

    quiet_lightning()
    folder = config.run_folder
    before = read_json(folder / ENVIRONMENT) if checkpoint else {}
    accelerator, device = resolve_device(config)
    if accelerator == "cpu":
        torch.set_num_threads(config.trainer.threads or max(1, (os.cpu_count() or 1) // config.trainer.devices))
        device = f"cpu ({torch.get_num_threads()} threads)"

    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len, config.seed)
    precision = resolve_precision(config, accelerator, before)
    flops = flops_per_token(decoder) * config.optim.batch_tokens * config.trainer.max_steps
    compiled = resolve_compile(config, flops, accelerator, before)
    module = TrainModule(config, store, decoder, compiled.value == "true")
    first_step = 0
    if checkpoint:
        first_step = check_resume(config, store, load_checkpoint(checkpoint), checkpoint)
        if first_step >= config.trainer.max_steps:
            return _complete(config, first_step, main)

    facts = environment(config, store, decoder, device, precision, compiled)
    facts = {**facts, "wandb_id": before.get("wandb_id", facts["wandb_id"]), "started": before.get("started", facts["started"])}
    if main:
        print(banner(config, store, decoder, device, precision, compiled), flush=True)
        write_text(folder / CONFIG, to_yaml(stored(config)))
        write_json(folder / ENVIRONMENT, facts)
        write_text(folder / TOKENIZER, (store.path / TOKENIZER).read_text(encoding="utf-8"))
        cut_back(folder, first_step)
        if checkpoint and checkpoint.name != LAST:
            point_last(checkpoint)  # the run goes back to it
    mirror = start_wandb(config.log, folder, config.name, facts["wandb_id"], to_plain(config)) if main else None
    log = MetricLog(folder / METRICS, mirror, main)
    progress = ProgressLine(config.log.progress, config.trainer.max_steps, main)
    clock, stop = Clock(), StopOnSignal()
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy="ddp" if config.world_size > 1 else "auto",
        precision="bf16-mixed" if precision.value == "bf16-mixed" else "32-true",
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=module.accumulation,
        use_distributed_sampler=False,
        callbacks=[
            stop,
            Metrics(log, config, progress, clock),
            Checkpoints(config, folder / CHECKPOINTS, clock),
            Evaluate(
                config, folder, log, progress, clock, validation_rows(store, config), long_rows(store, config), precision.value != "32"
            ),
        ],
        plugins=[AtomicCheckpointIO()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    progress.start(first_step)
    try:
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    except RuntimeError as error:
        if config.world_size > 1 and ("Connection" in str(error) or isinstance(error, torch.distributed.DistBackendError)):
            raise RunError("another process of this run has ended, see its message; go on with resume=auto") from None
        raise
    finally:
        progress.stop()
        log.close()
    stopped = stop.signal if trainer.global_step < config.trainer.max_steps else 0
    if main:
        if stopped:
            progress.note(f"stopped by a signal at step {trainer.global_step}; go on with: resume=auto")
        else:
            progress.note(f"done: {folder}")
    return 128 + stopped if stopped else 0


def _complete(config: Config, step: int, main: bool) -> int:
    """Nothing is left to train: make up for evaluations that a kill after the last step prevented."""
    from lm.evaluation.run import evaluate_run

    folder = config.run_folder
    if main:
        wanted = ["validation"] + ["long_context"] * bool(config.long_length)
        if not all(evaluation_path(folder, kind, step).exists() for kind in wanted):
            evaluate_run(folder, "last", [])
        print(f"{folder}: complete at step {step}; raise trainer.max_steps to go on")
    return 0


def is_main_process() -> bool:
    """True unless a launcher (torchrun, SLURM, Lightning) says this is another rank."""
    ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ][:1]
    return all(rank == "0" for rank in [*ranks, os.environ.get("NODE_RANK", "0"), os.environ.get("GROUP_RANK", "0")])


def check_launcher(config: Config) -> None:
    """Raises ConfigError if a launcher started another number of processes than the configuration says."""
    started = os.environ.get("WORLD_SIZE", str(config.world_size))
    if started != str(config.world_size):
        reason = f"with num_nodes = {config.trainer.num_nodes} makes {config.world_size} processes, the launcher started {started}"
        raise ConfigError([Problem("trainer.devices", config.trainer.devices, reason, "make them agree")])


def claim(folder: Path, resume: bool) -> None:
    """Make the run folder. Raises RunError if it exists (and holds more than nothing) or can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not resume:
            raise RunError(f"{folder}: the run folder exists; go on with resume=auto, or choose another name=...")
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: can't make the run folder: {error.strerror}; set runs=... to a folder you can write") from None


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder` meanwhile. Raises RunError if one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(f"{folder}: another process is training in this run folder; wait for it or stop it") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(descriptor)


def find_checkpoint(config: Config) -> Path | None:
    """The checkpoint that `resume` names; None for a new run, or for `auto` where there is none yet."""
    if not config.resume:
        return None
    path = config.run_folder / CHECKPOINTS / "last.ckpt" if config.resume == "auto" else Path(config.resume)
    if path.exists():
        if path.resolve().parent != (config.run_folder / CHECKPOINTS).resolve():
            raise RunError(f"{path}: not a checkpoint of {config.run_folder}; a run goes on in its own folder: set name and runs to it")
        return path
    if config.resume == "auto":
        return None
    raise RunError(f"{path}: no such checkpoint (resume)")


def check_resume(config: Config, store: Store, checkpoint: dict[str, dict[str, Plain]], path: Path) -> int:
    """The step the checkpoint is at. Raises ConfigError with every difference that would make it another run."""
    saved = checkpoint["lm"]
    old, new = flatten(to_plain(parse(yaml.safe_load(saved["config"])))), flatten(to_plain(stored(config)))
    problems = [
        Problem(key, new.get(key), f"the checkpoint was trained with {old.get(key)!r}", "resume it with that, or choose another name")
        for key in dict.fromkeys((*new, *old))
        if old.get(key) != new.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE_TO_CHANGE)
    ]
    if saved["data_fingerprint"] != store.fingerprint:
        problems.append(
            Problem("data", store.fingerprint[:16], f"{path} was trained on tokens with fingerprint {saved['data_fingerprint'][:16]}")
        )
    if problems:
        raise ConfigError(problems)
    return saved["step"]


def stored(config: Config) -> Config:
    """The configuration as the run folder keeps it: how the run was resumed is not part of it."""
    return dataclasses.replace(config, resume="")


def flatten(plain: Plain, path: str = "") -> dict[str, Plain]:
    """Nested blocks as {key path: value}."""
    if not isinstance(plain, dict):
        return {path: plain}
    return {key: value for name, item in plain.items() for key, value in flatten(item, f"{path}.{name}" if path else name).items()}


def quiet_lightning() -> None:
    """Lightning's tips and notes on what is chosen here; our banner says what matters."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
