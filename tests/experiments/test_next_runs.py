"""Which runs come next is a function of the experiment and of the outcomes of its runs; no folder is read."""

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from trials import TUNED_EXPERIMENT, write_experiment

from lm.config.tree import Config
from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure, next_runs

ARMS = {
    "softmax": {"model.normalizer": "softmax"},
    "ssmax": {"model.normalizer": "ssmax"},
    "wild": {"optim.grad_clip": 9.0},
    "more": {"from": "softmax", "trainer.max_steps": 12},
    "as-it-is": {"from": "ssmax", "swap": {"to": "log_n"}, "train": False},
    "after": {"from": "wild", "trainer.max_steps": 12},
}


class MadeUp(SimpleNamespace):
    """An outcome in place of `lm.experiments.run_outcome.Outcome`: a loss, infinite if the run diverged."""

    @property
    def has_ended(self) -> bool:
        return self.state != "unfinished"

    def mean(self, metric: str, for_selection: bool) -> float:
        return self.loss

    def data_identity(self, metric: str) -> str:
        return "sequences"


def loss_of(config: Config) -> float:
    """A bowl over rates with noise by name; SSMax is best at another rate, and `wild` diverges with one final seed."""
    if config.experiment.arm in ("wild", "after") and config.seed == 2:
        return math.inf
    best = 8e-2 if config.experiment.arm == "ssmax" else 2e-2
    return 5 + abs(math.log2(config.optim.lr / best)) + random.Random(config.name).random() / 100


def ends_in_order(file: Path, overrides: list[str], order: random.Random) -> list[str]:
    """End the runs of an experiment a few at a time, in any order in which they may start; return the known ones."""
    losses: dict[Path, float] = {}

    def read(folder: Path, last_step: int, metric: str, scheduled: tuple, required: dict, config: Config) -> MadeUp:
        loss = losses.get(folder)
        state = "unfinished" if loss is None else "finished" if math.isfinite(loss) else "diverged"
        return MadeUp(folder=folder, last_step=last_step, state=state, loss=loss, last_evaluations=())

    experiment = read_experiment(file, overrides)
    procedure = Procedure(experiment, read)
    known: list[str] = []
    while runs := next_runs(procedure.known_runs()):
        again = next_runs(Procedure(experiment, read).known_runs())
        assert [run.config.name for run in runs] == [run.config.name for run in again], "outcomes alone decide"
        for run in order.sample(runs, order.randint(1, len(runs))):
            assert run.config.run_folder not in losses
            assert run.source_run is None or run.source_run.config.run_folder in losses
            losses[run.config.run_folder] = loss_of(run.config)
        names = [run.config.name for run in procedure.known_runs()]
        assert {*known} <= {*names}, "a run that was needed stays so"
        known = names
    assert all(run.outcome.has_ended for run in procedure.known_runs())
    return known


@pytest.mark.parametrize("changes", [{}, {"tune": None}], ids=["tuned", "untuned"])
def test_the_same_runs_are_needed_in_whatever_order_they_end(tmp_path, changes):
    file, overrides = (
        write_experiment(tmp_path, **TUNED_EXPERIMENT | {"arms": ARMS} | changes),
        ["data.source.paths=[.]", f"runs={tmp_path}/runs"],
    )
    known = ends_in_order(file, overrides, random.Random(0))
    assert len(known) == len(set(known)) >= len(ARMS) * 2
    for seed in range(1, 4):
        assert sorted(ends_in_order(file, overrides, random.Random(seed))) == sorted(known)
    assert not (tmp_path / "runs").exists()
