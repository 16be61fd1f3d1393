"""A run folder has files that training leaves and later commands read. This module names them, checks them by the
manifest before they are used, and reads the configuration and metrics.jsonl.

The manifest of a run folder or model folder, manifest.jsonl, lists the sha256 of each file that lm has written there.
Each line is {"file", "sha256", "step", "weights"}. A line is added before its file gets its name, so that a reader
never meets a file without its line. A kill between the two leaves a line without a file, which does no harm.

A file is valid if any of its lines has its sha256. A kill while a file is replaced therefore leaves the old file valid.
Several processes, such as training and `lm eval`, may add lines at a time: each addition is one write.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.config.load import parse_config
from lm.config.tree import Config
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, RunError, one_line, suggestion_or_all_names
from lm.files import file_sha256, read_json, replace_file, write_text
from lm.plain import Plain

CONFIG_FILE, ENVIRONMENT_FILE = "config.yaml", "environment.json"
METRICS_FILE, TOKENIZER_FILE = "metrics.jsonl", "tokenizer.json"
MANIFEST_FILE = "manifest.jsonl"
CHECKPOINTS_FOLDER, EVALUATIONS_FOLDER = "checkpoints", "evaluations"
SWAPPED_FOLDER = "swapped"  # folder in an experiment's folder, with the swapped weights that runs start from
# file in an experiment's folder, with the settings that its first start fixed for all runs
EXPERIMENT_SETTINGS_FILE = "resolved.json"
# the reason why a locked folder is refused
ALREADY_TRAINING = "another process is training in this run folder; wait for it or stop it"
MODEL_JSON = "lm.json"  # file in a model folder, which describes the model
FORMAT_WITHOUT_MANIFEST = 5  # `format` in the lm.json of lm 0.11, which wrote model folders without a manifest


# ---------------------------------------------------------------- the manifest


Entry = dict[str, Plain]  # a line of the manifest


def manifest_entry(name: str, sha256: str, step: int, weights_sha256: str | None = None) -> Entry:
    """Return the manifest's line for the file `name`, a path within the folder.

    Args:
        step: training steps up to which the file holds results.
        weights_sha256: sha256 of the weights that the file holds, or on which it holds a measurement.
    """
    return {"file": name, "sha256": sha256, "step": step, "weights": weights_sha256}


def add_entries(folder: Path, *entries: Entry) -> None:
    """Add lines to the manifest of `folder`, synced to disk. Raises RunError: the manifest can't be written."""
    text = "".join("\n" + json.dumps(line) for line in entries)  # a line that a power cut leaves unfinished stays alone
    try:
        with (folder / MANIFEST_FILE).open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{folder / MANIFEST_FILE}: can't be written: {error.strerror}") from None


def write_files(folder: Path, contents: Mapping[str, bytes], step: int = 0, weights_sha256: str | None = None) -> None:
    """Write files {name: content} of `folder` and their manifest lines. No file is replaced before all are written.
    Raises RunError as `replace_file` does.
    """
    with ExitStack() as stack:
        for name, content in contents.items():
            file = stack.enter_context(replace_file(folder / name))
            file.write(content)
            file.flush()  # a full disk shows here, while every file is still as it was
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        add_entries(folder, *(manifest_entry(name, sha256, step, weights_sha256) for name, sha256 in hashes.items()))


def check_file(folder: Path, name: str, sha256: str | None = None, advice: str = "bring it back") -> None:
    """Check that the file `name` of `folder` is as lm wrote it: the manifest has its sha256.

    sha256: the hash of the file's content, if it has been read already.

    Raises RunError, whose message ends in `advice`: the file is missing, was altered, or is of another folder.
    """
    try:
        sha256 = sha256 or file_sha256(folder / name)
    except OSError as error:
        raise RunError(f"{folder / name}: can't be read: {error.strerror}; {advice}") from None
    # whole entries are compared as text, as `add_entries` wrote them: folders may have thousands
    if json.dumps({"file": name, "sha256": sha256})[:-1] + "," not in _required_manifest_text(folder):
        reason = f"was altered, or is of another folder (its sha256 is not in {MANIFEST_FILE})"
        raise RunError(f"{folder / name}: {reason}; {advice}")


def read_file(folder: Path, name: str, advice: str = "bring it back") -> bytes:
    """Return the content of the file `name` of `folder`, checked by the manifest (`check_file`)."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise RunError(f"{folder / name}: can't be read: {error.strerror}; {advice}") from None
    check_file(folder, name, hashlib.sha256(content).hexdigest(), advice)
    return content


def read_entries(folder: Path, name: str = "") -> list[Entry]:
    """Return the readable lines of the manifest of `folder`, of all files or of the file `name`. Raises RunError: there
    is no manifest.
    """
    start = json.dumps({"file": name})[:-1] if name else ""
    lines = map(parse_line, (line for line in _required_manifest_text(folder).splitlines() if line.startswith(start)))
    return [line for line in lines if line and {"file", "sha256", "weights"} <= line.keys()]


def truncate_manifest(folder: Path, step: int) -> None:
    """Delete the lines of files with results of steps after `step`, which a resumed run writes anew. At step 0 delete
    all lines.
    """
    if (folder / MANIFEST_FILE).is_file():
        kept_lines = [line for line in read_entries(folder) if step and line["step"] <= step]
        write_text(folder / MANIFEST_FILE, "".join("\n" + json.dumps(line) for line in kept_lines))


def parse_line(text: str | bytes) -> dict[str, Plain] | None:
    """Return a line of a manifest or log as a dict; None if `text` is no JSON object with an integer `step`."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _required_manifest_text(folder: Path) -> str:
    """Return the text of the manifest of `folder`. Raises RunError: there is none."""
    try:
        return (folder / MANIFEST_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise RunError(
            f"{folder}: has no {MANIFEST_FILE}: it is of lm 0.11 or earlier, and lm 0.11 reads it, or the file was "
            "lost: bring it back"
        ) from None


# ---------------------------------------------------------------- configuration, environment, checkpoints


def require_run(folder: Path, *files: str) -> None:
    """Check that `folder` is a run folder with `files`. Raises RunError otherwise; the message says what `folder` is
    instead, and what to do.
    """
    if (folder / "config.json").is_file():
        reason = "a model in transformers' format; run lm import on it, or name what it was exported from"
    elif not folder.is_dir():
        siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        suggestion = suggestion_or_all_names(folder.name, siblings)
        reason = f"no such run folder; {suggestion if 'did' in suggestion else 'lm train makes one, runs/NAME'}"
    elif (folder / EXPERIMENT_SETTINGS_FILE).is_file():
        advice = f"name runs below it, or judge all of them: lm compare {folder.resolve().name}.yaml --report-only"
        reason = f"the folder of an experiment, not of a run; {advice}"
    elif absent_names := [name for name in files if not (folder / name).exists()]:
        reason = f"not a run folder: it has no {' and no '.join(absent_names)}"
    else:
        return
    raise RunError(f"{folder}: {reason}")


def read_config(folder: Path) -> Config:
    """Return the configuration in a run's config.yaml. Raises RunError: `folder` is no run folder, or the file was
    altered.
    """
    require_run(folder, CONFIG_FILE)
    content = read_file(folder, CONFIG_FILE)
    try:
        return parse_config(parse_yaml(content, CONFIG_FILE))
    except ConfigError as error:  # such as code of a normalizer that is not installed
        raise RunError(f"{folder / CONFIG_FILE}: not readable: {one_line(error)}") from None


def read_environment(folder: Path) -> dict[str, Plain]:
    """Return the content of a run's environment.json. Raises RunError: it is missing, or was altered."""
    return json.loads(read_file(folder, ENVIRONMENT_FILE))


def read_model_json(folder: Path) -> dict[str, Plain]:
    """Return the content of a model folder's lm.json. Raises RunError: it is missing, or was altered.

    An export of lm 0.11 has no manifest, so that a change of its lm.json is not noticed.
    """
    content = read_json(folder / MODEL_JSON)
    if content.get("format") != FORMAT_WITHOUT_MANIFEST:
        check_file(folder, MODEL_JSON, advice="export it again")
    return content


def checkpoint_path(checkpoints_folder: Path, step: int) -> Path:
    """Return the path of `step-N.ckpt` in a folder of checkpoints."""
    return checkpoints_folder / f"step-{step:06d}.ckpt"


def checkpoint_step(path: Path) -> int:
    """Return the step N of a path `step-N.ckpt`."""
    return int(path.stem.removeprefix("step-"))


def owns_checkpoint(run: Path, checkpoint: Path) -> bool:
    """Return whether `checkpoint` lies in checkpoints/ of the run folder `run`, and so belongs to this run."""
    return checkpoint.resolve().parent == (run / CHECKPOINTS_FOLDER).resolve()


def checkpoint_paths(checkpoints_folder: Path) -> list[Path]:
    """Return the `step-N.ckpt` files of a folder of checkpoints, in ascending order of step."""
    return sorted(
        (path for path in checkpoints_folder.glob("step-*.ckpt") if path.stem.removeprefix("step-").isdecimal()),
        key=checkpoint_step,
    )


# ---------------------------------------------------------------- metrics.jsonl


# log key of the peak on rank 0 so far: bytes of tensors on the GPU, of the whole process on the CPU
PEAK_MEMORY_KEY = "peak_memory_bytes"
# key of the last log line of a run that stopped at values that are not finite; the value says why
DIVERGED_KEY = "diverged"


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve holds the values of a metric, such as the training loss, at all logged steps, by the number of tokens
    seen. Values that are not finite are NaN.
    """

    tokens: np.ndarray  # (points,) tokens seen so far
    values: np.ndarray  # (points,) in the unit of the metric, such as nats per token


def read_metrics(run: Path) -> list[dict[str, Plain]]:
    """Return the lines of a run's metrics.jsonl; an empty list if there is no file. Text that is no JSON object is
    ignored, such as a last line that a kill cut short.
    """
    path = run / METRICS_FILE
    return [*filter(None, map(parse_line, path.read_bytes().split(b"\n")))] if path.is_file() else []


def truncate_metrics(run: Path, step: int) -> None:
    """Delete the lines of metrics.jsonl that a run resumed at `step` writes anew. These are the lines of later steps,
    and the line of `step` on the effect of swapping the normalizer between two phases of training."""
    if (run / METRICS_FILE).exists():
        lines = [line for line in read_metrics(run) if line["step"] <= step - ("swap/kl" in line)]
        write_text(run / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))


def log_manifest_entry(run: Path, step: int) -> Entry:
    """Return the manifest's entry for a run's metrics.jsonl as the file is now. `bytes` in the entry is the present
    size of the file, as later lines are appended to it (`check_log`).

    The log is first synced to disk, so that a power cut can't lose lines that a checkpoint counts.
    """
    content = b""
    if (path := run / METRICS_FILE).is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            content = file.read()
    return manifest_entry(METRICS_FILE, hashlib.sha256(content).hexdigest(), step) | {"bytes": len(content)}


def check_log(run: Path, step: float = math.inf) -> None:
    """Check that a run's log begins as it was when the last checkpoint up to `step` was saved. Raises RunError: the log
    was altered, or is gone.
    """
    lines = [line for line in read_entries(run, METRICS_FILE) if line["step"] <= step]
    path = run / METRICS_FILE
    content = path.read_bytes() if path.is_file() else b""  # after the manifest, as a run under way adds to both
    if lines and hashlib.sha256(content[: (saved := lines[-1]).get("bytes", 0)]).hexdigest() != saved["sha256"]:
        checkpoint = checkpoint_path(run / CHECKPOINTS_FOLDER, saved["step"])
        reason = f"{'was altered' if path.is_file() else 'is gone'} since {checkpoint.name} was saved"
        remedy = "bring it back, or go on in a new run"
        raise RunError(f"{path}: {reason}; {remedy}: branch_from={checkpoint} name=...")


def highest_logged(lines: list[dict[str, Plain]], name: str) -> float | None:
    """Return the highest value logged as `name`; None if it was not logged. Examples of names are `elapsed_s`, the
    seconds in training steps over all starts, and `PEAK_MEMORY_KEY`, in bytes.
    """
    return max((line[name] for line in lines if line.get(name)), default=None)


def logged_curve(lines: list[dict[str, Plain]], name: str) -> Curve:
    """Return the curve of the metric logged as `name`. If a resumed run logged a step twice, the later line counts."""
    line_by_step = {line["step"]: line for line in lines if name in line}
    points = [line_by_step[step] for step in sorted(line_by_step)]
    return Curve(*(np.array([line.get(key) for line in points], dtype=float) for key in ("tokens", name)))
