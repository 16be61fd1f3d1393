"""Write experiment files for tests: softmax and SSMax on the tiny configuration."""

from pathlib import Path

import yaml
from conftest import ROOT

from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure

TWO_ARM_EXPERIMENT = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2],
    "primary": {"metric": "val/loss", "better": "lower", "matters": 0.05},
}
TUNED_EXPERIMENT = {**TWO_ARM_EXPERIMENT, "tune": {"grid": [1e-2, 2e-2], "seeds": [101, 102]}}


def procedure_of(folder: Path, *overrides: str, **changes: object) -> Procedure:
    """Write an experiment file with `write_experiment`, and return the procedure of the experiment.

    Its runs lie in the folder `runs`. It needs no text.
    """
    given = ["data.source.paths=[.]", f"runs={folder / 'runs'}", *overrides]
    return Procedure(read_experiment(write_experiment(folder, **changes), given))


def write_experiment(folder: Path, **changes: object) -> Path:
    """Write the file of `TUNED_EXPERIMENT` with some keys changed, and return its path; None takes a key out."""
    path = folder / "trial.yaml"
    path.write_text(
        yaml.safe_dump(
            {key: value for key, value in (TUNED_EXPERIMENT | changes).items() if value is not None}, sort_keys=False
        )
    )
    return path
