"""Results of evaluations: measured, kept in a run folder with their picture, and taken from there when they are asked for again."""

import sys
from dataclasses import replace
from pathlib import Path

from lm.errors import RunError
from lm.evaluation.measurement import Measurement, Progress, weights_sha256
from lm.files import write_together
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.evaluations import Evaluation, evaluation_path
from lm.runs.folder import EVALUATIONS, json_bytes, read_sealed, sealed, write_sealed


def measured(
    measurement: Measurement, decoder: Decoder, where: Device, step: int, tokens_seen: int, progress: Progress = lambda units: None
) -> Evaluation:
    """What a measurement gives of a decoder that was trained for so many steps and tokens. Collective."""
    weights = weights_sha256(decoder)
    series = measurement.measure(decoder, where, progress)
    return Evaluation(
        measurement.kind, step, tokens_seen, measurement.store.fingerprint, measurement.options, measurement.precision(where), weights,
        tuple(series), measurement.config.eval.asked(measurement.kind), measurement.code,
    )  # fmt: skip


def write_evaluation(run: Path, measurement: Measurement, evaluation: Evaluation) -> Path:
    """Write the result of a measurement to its file, and draw its picture if it has one; returns the file's path."""
    path, picture = evaluation_path(run, evaluation.kind, evaluation.step), measurement.picture(evaluation.series)
    pictures = {} if picture is None else {path.with_suffix(".png"): picture}
    write_together({path: json_bytes(sealed(evaluation.plain())), **pictures}, "the evaluation")
    return path


def kept_at(folder: Path, measurement: Measurement, weights: str, where: Device) -> Path:
    """Where a run folder keeps the result of a measurement of `weights` (their sha256), however often it is measured otherwise."""
    return folder / EVALUATIONS / "cache" / f"{measurement.kind}-{measurement.key(weights, where)[:16]}.json"


def kept(folder: Path, measurement: Measurement, weights: str, where: Device, step: int, tokens_seen: int) -> Evaluation | None:
    """The result that a run folder keeps of a measurement; None if there is none, or if it is damaged, which a note says."""
    path = kept_at(folder, measurement, weights, where)
    if not path.is_file():
        return None
    try:
        asked = measurement.config.eval.asked(measurement.kind)
        return replace(Evaluation.of(read_sealed(path)), step=step, tokens_seen=tokens_seen, asked=asked)
    except (RunError, KeyError, ValueError) as error:
        reason = error if isinstance(error, RunError) else f"{path}: is damaged, or of another version"
        print(f"note: {reason}: measured again", file=sys.stderr)
    return None


def keep(folder: Path, measurement: Measurement, evaluation: Evaluation, where: Device) -> None:
    """Keep a result, if it is one that lasts."""
    if measurement.lasts(evaluation.series):
        path = kept_at(folder, measurement, evaluation.weights_sha256, where)
        path.parent.mkdir(exist_ok=True, parents=True)
        write_sealed(path, evaluation.plain())
