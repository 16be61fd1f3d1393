"""Evaluation results as files of the run folder."""

import math
from pathlib import Path

from lm.evaluation.pictures import draw
from lm.runs.folder import EVALUATIONS, write_json
from lm.schema import Plain


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """evaluations/KIND.step-N.json of a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.json"


def evaluations(run: Path) -> list[Path]:
    """The evaluation files of a run folder, in no order."""
    return list((run / EVALUATIONS).glob("*.step-*.json"))


def step_of(path: Path) -> int:
    """The step an evaluation file was measured at."""
    return int(path.stem.rpartition(".step-")[2])


def write_evaluation(run: Path, result: dict[str, Plain]) -> Path:
    """Write `result`, which holds `kind` and `step`, to its file, and draw its picture if there is one; returns the file's path."""
    path = evaluation_path(run, result["kind"], result["step"])
    write_json(path, finite(result))
    draw(result, path.with_suffix(".png"))
    return path


def finite(value: Plain) -> Plain:
    """`value` with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
