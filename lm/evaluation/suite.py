"""Which measurements a configuration asks for, and the named suites of `lm eval`."""

from lm.config import Config
from lm.data.store import Store
from lm.evaluation.measurement import Measurement
from lm.evaluation.recall import Recall
from lm.evaluation.text import LongContext, Validation
from lm.schema import Plain

# Changes to `eval` that a suite makes before the user's own.
SUITES: dict[str, dict[str, Plain]] = {
    "quick": {"rows": 32, "long_context": {"rows": 4}, "recall": {"rows": 16}},
    "full": {},
}


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
    return [one(config, store) for one in wanted]
