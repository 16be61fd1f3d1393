"""Read, compare and damage run folders of tests."""

import json
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from lm.evaluation.measurement import Measurement
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.checkpoints import load_checkpoint, save_checkpoint
from lm.runs.evaluations import (
    CURVE_COLUMNS,
    Axis,
    Evaluation,
    Metric,
    evaluation_path,
    evaluation_rows,
    load_evaluation,
    means_over_bins,
    point_means,
)
from lm.runs.folder import checkpoint_paths, checkpoint_step
from lm.runs.loading import load
from lm.training.module import LanguageModel
from lm.training.optimizers import saved_optimizer_state

EVERY_STEP_OPTIONS = [
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=20",
    "eval.every=2",
    "eval.long_context.length_factor=0",
]


class WandbRecorder:
    """This replacement of a wandb run records the arguments of its starts, its axes, and its lines with their steps."""

    def __init__(self):
        self.starts: list[dict[str, object]] = []
        self.axes: list[str] = []
        self.lines: list[tuple[int, dict[str, object]]] = []
        self.summary: dict[str, object] = {}

    @property
    def steps(self) -> list[int]:
        """Return the steps of the lines."""
        return [step for step, _ in self.lines]

    def init(self, **arguments: object) -> "WandbRecorder":
        self.starts.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str = "", summary: str = "") -> None:
        self.axes.append(f"{name} {step_metric}".strip())

    def log(self, values: dict[str, object], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None: ...


def swap_override(name: str) -> str:
    """Return the override of `phases` that swaps to the normalizer `name` after step 4 of 8."""
    first = "ssmax" if name == "softmax" else "softmax"
    return f"phases=[{{until: 0.5, normalizer: {first}}}, {{until: 1, normalizer: {name}, warmup_steps: 3}}]"


class PointUnits(NamedTuple):
    """This tuple holds the values, weights and groups of a curve's units at one point."""

    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    sha256: str
    rows: pd.DataFrame


@dataclass(frozen=True, eq=False)
class Curve:
    """A curve holds what an evaluation measured of one metric, task and inference setting, point by point."""

    about: Metric
    kind: str
    task: str
    setting: str
    names: tuple[str, ...]  # in metrics.jsonl, at each point
    x: np.ndarray
    until: np.ndarray
    means: np.ndarray
    points: list[PointUnits]  # []: only the means are known
    overall_mean: float | None
    logged_means: dict[str, float]

    @property
    def metric(self) -> str:
        return self.about.quantity

    @property
    def unit(self) -> str:
        return self.about.unit

    @property
    def axis(self) -> Axis | None:
        return self.about.axis

    @property
    def bins(self) -> bool:
        return not np.isnan(self.until[0])

    @property
    def references(self) -> dict[str, float]:
        return dict(self.about.references)


def curves_of(evaluation: Evaluation) -> tuple[Curve, ...]:
    """Return the curves that an evaluation holds."""
    curves = []
    for (about, task, setting), rows in evaluation_rows([evaluation]).groupby(
        CURVE_COLUMNS[1:], sort=False, observed=True
    ):
        means, overall = point_means(rows), means_over_bins(rows)
        logged = dict(zip(overall["metric"], overall["value"], strict=True)) if rows["logged"].any() else {}
        points = [
            PointUnits(
                *(units[name].to_numpy() for name in ("value", "weight", "group")), units["sequences"].iloc[0], units
            )
            for _, units in rows.groupby(["x", "until"], sort=False, dropna=False)
            if units["sample"].notna().all()
        ]
        arrays = (means[name].to_numpy() for name in ("x", "until", "value"))
        mean = overall["value"].iloc[0] if rows["axis_kind"].iloc[0] != "points" else None
        curves.append(Curve(about, evaluation.kind, task, setting, (*means["metric"],), *arrays, points, mean, logged))
    return tuple(curves)


def stored_curves(folder: Path, kind: str, step: int) -> tuple[Curve, ...]:
    """Return the curves of the evaluation that a run folder holds at a step."""
    return curves_of(load_evaluation(evaluation_path(folder, kind, step)))


def measure_curves(measurement: Measurement, decoder: Decoder, device: Device) -> tuple[Curve, ...]:
    """Measure a decoder, and return the curves."""
    return curves_of(measurement.evaluate(decoder, device, 0, 0))


def file_contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of every file below a folder, by path."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metric_lines(folder: Path) -> list[dict]:
    """Return the lines of a run folder's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged_values(folder: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """Return (step, value) of a metric in a run folder's metrics.jsonl."""
    return [(line["step"], line[name]) for line in metric_lines(folder) if name in line]


def training_losses(folder: Path) -> list[float]:
    """Return the training losses in a run folder's metrics.jsonl."""
    return [loss for _, loss in logged_values(folder)]


def last_checkpoint(folder: Path) -> Path:
    """Return the path of a run folder's newest checkpoint."""
    return checkpoint_paths(folder / "checkpoints")[-1]


def best_checkpoint(folder: Path) -> Path:
    """Return the path of a run folder's checkpoint with the best validation loss."""
    return load(folder, "best").path


def checkpoint_weights(folder: Path, name: str = "") -> dict[str, torch.Tensor]:
    """Return the state dict of the checkpoint `name` of a run folder, by default the newest."""
    path = folder / "checkpoints" / name if name else last_checkpoint(folder)
    return load_checkpoint(path)["state_dict"]


def equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts have the same names and bit-equal tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def delete_checkpoints_after(folder: Path, step: int) -> None:
    """Delete a run folder's checkpoints after `step`, as if it had been killed; metrics and evaluations go beyond that
    step.
    """
    checkpoints = folder / "checkpoints"
    for path in checkpoint_paths(checkpoints):
        if checkpoint_step(path) > step:
            path.unlink()


def rewrite_checkpoint(path: Path, change: Callable[[dict], object]) -> None:
    """Change the content of a checkpoint, and write it as a valid checkpoint."""
    content = load_checkpoint(path)
    change(content)
    save_checkpoint(content, path)  # not in place: what was loaded is a map of the file


def rewrite_archive(
    path: Path, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED
) -> None:
    """Change the members of a checkpoint's zip archive, and write it with valid CRCs.

    change: function that changes {member name without the archive's own, such as `data/0`: bytes}.
    """
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        content = {member.filename.partition("/")[2]: archive.read(member) for member in archive.infolist()}
    change(content)
    with zipfile.ZipFile(path.with_name("changed"), "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(f"{root}/{name}", data)
    os.replace(path.with_name("changed"), path)


def run_differences(a: Path, b: Path) -> list[str]:
    """Return the names of what differs, bit for bit, between two runs: losses, weights, optimizer state and facts."""
    names = [
        name
        for name in ("train/loss", "val/loss", "swap/loss_after", "train/grad_norm", "lr")
        if logged_values(a, name) != logged_values(b, name)
    ]
    first, second = (load_checkpoint(last_checkpoint(folder)) for folder in (a, b))
    if not equal_tensors(first["state_dict"], second["state_dict"]):
        names.append("weights")
    states = [saved_optimizer_state(checkpoint) for checkpoint in (first, second)]
    if states[0].keys() != states[1].keys() or not all(
        equal_tensors(states[0][name], states[1][name]) for name in states[0]
    ):
        names.append("optimizer state")
    facts = ("step", "phase", "best", "nll_since_line", "targets_since_line")
    if [first["lm"][key] for key in facts] != [second["lm"][key] for key in facts]:
        names.append("facts")
    return names


def inject_nan(monkeypatch: pytest.MonkeyPatch, steps: set[int], what: str) -> None:
    """Make the loss or the gradient of the given steps (1-based) NaN."""
    training_step = LanguageModel.training_step

    def poisoned(self: LanguageModel, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = training_step(self, batch, batch_idx)
        if self.global_step + 1 not in steps:
            return loss
        if what == "loss":
            self.loss_sums = self.loss_sums * torch.tensor([float("nan"), 1.0])
            return loss
        return loss * float("nan")

    monkeypatch.setattr(LanguageModel, "training_step", poisoned)


def is_group_alive(group: int) -> bool:
    """Return whether a process of the group is still alive after two seconds; a dead one that nobody waited
    for is not.
    """
    deadline = time.monotonic() + 2
    while any(map(is_in_group(group), Path("/proc").glob("[0-9]*/stat"))):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def is_in_group(group: int) -> Callable[[Path], bool]:
    """Return a function that says whether a /proc/N/stat belongs to a process of the group that isn't dead."""

    def check(stat: Path) -> bool:
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            return False
        return int(pgrp) == group and state != "Z"

    return check
