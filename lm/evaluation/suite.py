"""Which measurements a configuration asks for, and the named suites of `lm eval`."""

import sys
from pathlib import Path

from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import RunError
from lm.evaluation.measurement import Measurement, Progress, weights_sha256
from lm.evaluation.needle import NeedleMeasurement
from lm.evaluation.recall import Recall
from lm.evaluation.results import finite
from lm.evaluation.text_loss import LongContext, Validation
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.folder import EVALUATIONS, read_sealed, write_sealed
from lm.schema import Plain

SUITES = ("quick", "full")
SCALINGS: list[Plain] = ["as_trained", {"name": "theta", "factor": 50.0}, "interpolation", "ntk", "yarn"]


def suite(name: str, config: Config) -> dict[str, Plain]:
    """Changes to `eval` that a suite makes, as far as the model can do what it asks for."""
    if name == "quick":
        ours = config.eval
        few = {"long_context": {"rows": min(4, ours.long_context.rows)}, "recall": {"rows": min(16, ours.recall.rows)}}
        return {"rows": min(32, ours.rows), **few, "needle": {"trials": min(10, ours.needle.trials)}}
    changes: dict[str, Plain] = {}
    if config.model.position.rotates:
        changes["long_context"] = {"settings": [{"rope": scaling} for scaling in SCALINGS]}
    if not config.data.symbolic and not config.model.position.ends:
        changes["needle"] = {"length_factors": [1, 2, 4, 8, 16], "heads_at": 4.0, "finetune": {"steps": 300}}
    return changes


def measurements(config: Config, store: Store) -> list[Measurement]:
    """All that `config.eval` asks for, the validation first.

    Raises:
        LMError: the store does not hold what one of them needs.
    """
    wanted: list[type[Measurement]] = [Validation]
    if config.long_length:
        wanted.append(LongContext)
    if config.eval.recall.length_factors and (config.data.tasks or config.eval.recall.tasks):
        wanted.append(Recall)
    if config.eval.needle.length_factors:
        wanted.append(NeedleMeasurement)
    return [one(config, store) for one in wanted]


def measured(measurement: Measurement, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
    """A measurement's result: its settings and numbers, and what was measured. Collective."""
    weights = weights_sha256(decoder)
    numbers = measurement.measure(decoder, where, progress)
    return {
        "kind": measurement.kind,
        **measurement.settings,
        **numbers,
        "precision": measurement.precision(where),
        "weights_sha256": weights,
    }


def kept_at(folder: Path, measurement: Measurement, weights: str, where: Device) -> Path:
    """Where a run folder keeps the result of a measurement of `weights` (their sha256), however often it is measured otherwise."""
    return folder / EVALUATIONS / "cache" / f"{measurement.kind}-{measurement.key(weights, where)[:16]}.json"


def kept(folder: Path, measurement: Measurement, weights: str, where: Device) -> dict[str, Plain] | None:
    """The result that a run folder keeps of a measurement; None if there is none, or one that was altered, which is told."""
    path = kept_at(folder, measurement, weights, where)
    if not path.is_file():
        return None
    try:
        return read_sealed(path)
    except RunError as error:
        print(f"note: {error}: measured again", file=sys.stderr)
        return None


def keep(folder: Path, measurement: Measurement, result: dict[str, Plain], where: Device) -> None:
    """Keep a result, unless some of its numbers are not finite (JSON has none of those)."""
    if finite(result) == result:
        path = kept_at(folder, measurement, result["weights_sha256"], where)
        path.parent.mkdir(exist_ok=True, parents=True)
        write_sealed(path, result)
