"""docs/theory.md as scripts/theory.py makes it: statements by arm, and predictions scored on made-up runs."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
from test_half_length import LENGTH, made

from lm.diagnostics.half_length import median_weights
from lm.runs.series import Axis, Series

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """A function: name -> module of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def runs_of(prediction) -> list:
    """Two arms of softmax that fall where the needle's weight is .3, and one whose scale grows with n, which never falls."""
    lengths, found = tuple(LENGTH * 2**power for power in range(6)), []
    for arm, gaps, slope in (("a", (6.0, 6.5), 0.0), ("b", (5.0, 5.5), 0.0), ("c", (8.0, 9.0), 1 / math.log(LENGTH))):
        for gap in gaps:
            rows = made(gap, slope)
            accuracy = tuple(float(np.clip(0.5 + (np.median(rows.weight(at - LENGTH)) - 0.3), 0, 1)) for at in lengths)
            weights = median_weights(rows, LENGTH)
            found.append(prediction.Run(Path(arm), arm, LENGTH, (1, 0), 0.9, 1.2, 0.1, rows, weights, lengths, accuracy))
    return found


def test_predictions_are_scored_with_the_threshold_of_the_other_arms(script):
    prediction = script("theory_prediction")
    plain, fitted, baseline = prediction.scores(runs_of(prediction))
    assert {arm: round(one, 1) for arm, one in fitted.thresholds.items()} == {"a": 0.3, "b": 0.3, "c": 0.3}
    assert fitted.fell < 0.2 < min(plain.fell, baseline.fell)
    assert (plain.kept, fitted.kept) == (2, 2)
    assert plain.predictions[-1] == math.inf


def test_the_page_says_of_each_statement_what_came_out(script):
    prediction, statements, theory = (script(name) for name in ("theory_prediction", "theory_statements", "theory"))
    keys = Axis("visible keys", "tokens", "where queries see about", (32.0, 64.0, 128.0))
    series = (
        Series("diagnostics", "exponent of Z", "", "none", 64, np.array([0.7]), setting="as trained"),
        Series("diagnostics", "exponent of Z", "", "none", 64, np.array([1.0]), setting="untrained weights"),
        Series(
            "diagnostics",
            statements.OF_5,
            "",
            "none",
            64,
            np.array([1.0, 4.0, 16.0]),
            what="largest weights",
            setting="as trained",
            axis=keys,
        ),
    )
    models = [statements.Described("softmax", Path("run"), 8, 64, series)]
    found = {one.source: one for one in statements.compared(models)}
    assert (found["Su, 9019"].values["softmax"], found["Su, 9019"].outcome) == ("0.70 (1.00)", "yes")
    assert (found["Mudarisov, Alg. 1"].values["softmax"], found["Mudarisov, Alg. 1"].outcome) == ("exponent 2.000", "no")
    assert found["Mudarisov, Alg. 4"].outcome == "not measured here"
    text = theory.page_of(models, runs_of(prediction), 1, [4096], 8)
    assert "| Su, 9019 | the sum that normalizes grows more slowly than n |" in text
    assert "| weight below 1/2 |" in text
    assert "of 4 | 2 of 2 |" in text
    assert "{" not in text
