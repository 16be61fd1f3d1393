"""Which measurements a configuration asks for, and the named suites of `lm eval`."""

from lm.config import Config, Learned, Rope
from lm.data.store import Store
from lm.evaluation.measurement import Measurement
from lm.evaluation.needle import NeedleMeasurement
from lm.evaluation.recall import Recall
from lm.evaluation.text import LongContext, Validation
from lm.schema import Plain

SUITES = ("quick", "full")
SCALINGS: list[Plain] = ["as_trained", {"name": "theta", "factor": 50.0}, "interpolation", "ntk", "yarn"]


def suite(name: str, config: Config) -> dict[str, Plain]:
    """Changes to `eval` that a suite makes, as far as the model can do what it asks for."""
    if name == "quick":
        return {"rows": 32, "long_context": {"rows": 4}, "recall": {"rows": 16}}
    changes: dict[str, Plain] = {}
    if isinstance(config.model.position, Rope):
        changes["long_context"] = {"settings": [{"rope": scaling} for scaling in SCALINGS]}
    if not config.data.symbolic and not isinstance(config.model.position, Learned):
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
