"""Experiments as data frames, and the example of them in docs/experiments.md."""

import math
from pathlib import Path

import pytest
from conftest import ROOT
from test_documents import blocks
from test_experiments import here, inline, overrides, written  # noqa: F401

from lm.experiments.frames import curves, runs, tuning, verdicts
from lm.experiments.jobs import Jobs
from lm.experiments.opening import open_experiment
from lm.experiments.slots import Slots
from lm.experiments.summary import summary

TABLE = "size,arm,key,rate,seed,val/loss,configuration\n" + "".join(
    f",{arm},optim.lr,{rate},{seed},{loss},\n"
    for arm in ("softmax", "ssmax")
    for rate, loss in ((5e-3, 5.2), (1e-2, 5.1), (2e-2, "diverged"))
    for seed in (101, 102)
)


@pytest.fixture
def file(tmp_path: Path, overrides: list[str]) -> Path:  # noqa: F811
    """An experiment file that holds all it needs but its table."""
    (tmp_path / "rates.csv").write_text(TABLE)
    return written(tmp_path, tune={"table": "rates.csv"}, seeds=[1, 2])


def test_frames_hold_runs_tuning_verdicts_and_curves(file, overrides, monkeypatch):  # noqa: F811
    procedure = open_experiment(file, overrides)
    before = runs(procedure)
    assert list(before["state"]) == ["unfinished"] * 4
    assert before["val/loss"].isna().all()
    assert curves(procedure).empty
    Jobs(procedure, Slots(1), here).work()

    found = runs(procedure)
    assert set(map(tuple, found[["arm", "stage", "rate", "seed", "state"]].values)) == {
        (arm, "final", 1e-2, seed, "finished") for arm in ("softmax", "ssmax") for seed in (1, 2)
    }
    assert (found["tokens"] == 40 * 512).all()
    judged, (base, other) = verdicts(procedure), summary(procedure)
    assert found.groupby("arm")["val/loss"].mean().to_dict() == pytest.approx({"softmax": base["mean"], "ssmax": other["mean"]})
    line = judged.set_index("arm").loc["ssmax"]
    assert [line["difference"], line["difference_low"], line["difference_high"]] == other["difference"]
    assert line["verdict"] == other["verdict"]

    rates = tuning(procedure)
    assert rates.query("rate == 0.01")["selection"].tolist() == [5.1] * 4
    assert all(map(math.isinf, rates.query("rate == 0.02")["selection"]))

    logged = curves(procedure)
    assert len(logged.query("arm == 'ssmax' and seed == 2 and step == 40")) == 1, "one line a step, whatever was logged of it"
    last = logged.query("step == 40").set_index(["arm", "seed"])
    assert last["val/loss"].notna().all()
    assert last["train/loss"].notna().all()
    assert last["normalizer/s/layer0/head0"].notna().to_dict() == {
        (arm, seed): arm == "ssmax" for arm in ("softmax", "ssmax") for seed in (1, 2)
    }

    (example,) = [block for block in blocks((ROOT / "docs" / "experiments.md").read_text(), "python") if "frames" in block]
    shown = []
    asked = 'open_experiment(Path("configs/experiments/ssmax.yaml"), [])'
    assert asked in example
    exec(example.replace(asked, "procedure"), {"procedure": procedure, "print": lambda value: shown.append(str(value))})
    assert "incomplete" in shown[0]
