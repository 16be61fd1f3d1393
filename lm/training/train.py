"""`lm train` creates or reopens the run folder, locks it, prepares the data, and then fits the run."""

import contextlib
import shutil
import sys
from pathlib import Path

from lm.config.tree import Config
from lm.data.batches import train_sequences
from lm.data.prepare import check_text_lengths, prepare
from lm.errors import RunError
from lm.files import expand_home, folder_lock
from lm.model.spec import with_steps
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import (
    ALREADY_TRAINING,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    checkpoint_paths,
    owns_checkpoint,
    read_entries,
)
from lm.training.launcher import end_with_parent, this_process
from lm.training.phase_start import check_before_preparation


def train(config: Config) -> int:
    """Train as configured. Return the process's exit status: 0, or 128 + the number of the signal that stopped the run.

    Raises LMError: the run can't be trained. A new run folder is then removed, unless it holds a checkpoint or a log.
    """
    process = this_process(config)
    end_with_parent(process)
    is_main, folder, checkpoint = process.rank == 0, config.run_folder, starting_checkpoint(config)
    is_resumed = checkpoint and owns_checkpoint(folder, checkpoint)
    has_created_folder = is_main and not is_resumed and create_run_folder(folder, resume=bool(config.resume))
    with folder_lock(folder, ALREADY_TRAINING) if is_main else contextlib.nullcontext() as lock_note:
        if lock_note:
            remedy = "start no second process on this run, or set runs to a folder on another one"
            print(f"note: {lock_note}: {remedy}", file=sys.stderr)
        try:
            checkpoint_content = load_checkpoint(checkpoint) if checkpoint else None
            config, initial_model = check_before_preparation(config, checkpoint, checkpoint_content)
            data_fingerprint = checkpoint_content["lm"]["data_fingerprint"] if checkpoint_content else ""
            store = prepare(config.data, progress=is_main, preferred_fingerprint=data_fingerprint)
            config = with_steps(config, store.vocab_size)
            for index, phase in enumerate(config.phases_or_default):
                key = f"phases[{index}].seq_len" if phase.seq_len else "data.seq_len"
                check_text_lengths(store, config.with_phase_seq_len(index), key_in_error=key)
                train_sequences(store, config.with_phase_seq_len(index))  # its tasks have room
            if config.trainer.callbacks or config.log.logger_classes:
                import torchmetrics  # noqa: F401 (`self.log` needs it)
            from lm.training.fit import fit  # Lightning takes seconds; errors above don't need it

            return fit(config, store, checkpoint, checkpoint_content, initial_model, process)
        except BaseException:
            has_results = any((folder / CHECKPOINTS_FOLDER).glob("*.ckpt")) or (folder / METRICS_FILE).exists()
            if has_created_folder and not has_results:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def starting_checkpoint(config: Config) -> Path | None:
    """Return the path of the checkpoint that `resume` names, or for a new run `branch_from`; None if the run starts at
    step 0. Raises RunError: there is no such checkpoint, or it belongs to another run.
    """
    resumed_path = _resumed_checkpoint(config) if config.resume else None
    if resumed_path or not config.branch_from:
        return resumed_path
    path = expand_home(config.branch_from)
    if files := checkpoint_paths(path / CHECKPOINTS_FOLDER):
        path = files[-1]
    if not path.is_file():
        names = ", ".join(checkpoint.name for checkpoint in checkpoint_paths(path.parent))
        remedy = "name a run's folder or checkpoint; a run from weights alone takes init_from=..."
        remedy = f"the run has: {names}" if names else remedy
        raise RunError(f"{path}: no such checkpoint (branch_from); {remedy}")
    if owns_checkpoint(config.run_folder, path):
        raise RunError(f"{path}: a run can't branch from itself; choose another name=...")
    return path


def _resumed_checkpoint(config: Config) -> Path | None:
    """Return the path of the checkpoint that `resume` names; None if `auto` finds no checkpoint yet. Raises RunError as
    `starting_checkpoint` does.
    """
    folder = config.run_folder
    files = checkpoint_paths(folder / CHECKPOINTS_FOLDER)
    if config.resume != "auto":
        path = expand_home(config.resume)
        if not path.is_file():
            choices = f"one of {', '.join(file.name for file in files)} in {folder / CHECKPOINTS_FOLDER}"
            choices = choices if files else "a path; the run has no checkpoint"
            raise RunError(f"resume = {config.resume}: no checkpoint; set it to auto, or to {choices}")
        if not owns_checkpoint(folder, path):
            raise _another_run_error(path, config)
        return path
    # a kill within the first save leaves a temporary file, perhaps with its line in the manifest
    is_empty = not any((folder / CHECKPOINTS_FOLDER).glob("*"))
    if (
        is_empty
        and (folder / CONFIG_FILE).is_file()
        and any(CHECKPOINTS_FOLDER in entry["file"] for entry in read_entries(folder))
    ):
        remedy = "bring them back, choose another name=..., or delete the folder to start the run again"
        raise RunError(f"{folder}: holds a run whose checkpoints are gone; {remedy}")
    return files[-1] if files else None


def _another_run_error(checkpoint: Path, config: Config) -> RunError:
    """Return the error for a checkpoint that `resume` names and that belongs to another run."""
    return RunError(
        f"{checkpoint}: not a checkpoint of {config.run_folder}; a run goes on in its own folder: set name and runs to "
        "it; to start a new run from it: branch_from=... (with its optimizer state) or init_from=... (its weights) "
        "instead"
    )


def refuse_moved_run_folder(config: Config, command_arguments: list[str]) -> None:
    """If one of `command_arguments` is the config.yaml of a run folder, check that this folder is the one in which
    `resume=auto` goes on.

    Raises RunError: a new run would start, as the folder was renamed, or as the key `runs` is a path relative to
    another working directory.
    """
    for folder in [Path(file).parent / CHECKPOINTS_FOLDER for file in command_arguments if config.resume == "auto"]:
        if (checkpoints := checkpoint_paths(folder)) and not owns_checkpoint(config.run_folder, checkpoints[-1]):
            raise _another_run_error(checkpoints[-1], config)


def create_run_folder(folder: Path, resume: bool) -> bool:
    """Make the run folder, and return whether it was absent or empty. Raises RunError: the folder holds a run although
    `resume` is false, or something else than a run, or can't be made.

    resume: whether the folder may already hold a run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not any(folder.iterdir())
        if not is_new and not resume:
            raise RunError(f"{folder}: the run folder exists; go on with resume=auto, or choose another name=...")
        if not is_new and not (folder / CHECKPOINTS_FOLDER).is_dir():
            raise RunError(f"{folder}: holds something else than a run; choose another name=...")
        (folder / CHECKPOINTS_FOLDER).mkdir(exist_ok=True)
        return is_new
    except OSError as error:
        reason = f"can't make the run folder: {error.strerror}"
        raise RunError(f"{folder}: {reason}; set runs=... to a folder you can write") from None
