"""docs/theory.md as scripts/theory.py makes it: statements by arm, and predictions scored on made-up runs."""

import argparse
import importlib
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_half_length import LENGTH, made

from lm.attention.catalogue import Linear, Softmax
from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.diagnostics.retrieval_length import half_length, median_weights
from lm.errors import RunError
from lm.runs.evaluations import Axis, Series

SCRIPTS = Path(__file__).parents[1] / "scripts"
ARGUMENTS = argparse.Namespace(text=[Path("runs/words"), Path("runs/more")], recall=Path("runs/pairs"), longer=[4096], sequences=8)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """A function: name -> module of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def write_config(config: Config, folder: Path) -> None:
    """A run folder that says what it is of, and no more."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))


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


def test_an_observed_length_is_interpolated_in_its_logarithm(script):
    observed_half_length = script("theory_prediction").observed_half_length
    assert observed_half_length([64, 128, 256], [1.0, 0.75, 0.25]) == pytest.approx(128 * math.sqrt(2))
    assert observed_half_length([64, 128, 256], [1.0, 0.9, 0.5]) == math.inf
    assert observed_half_length([64, 128], [0.3, 0.2]) == 64


def test_errors_are_octaves_and_of_censored_runs_what_is_known_to_be_wrong(script):
    error = script("theory_prediction").error
    assert error(512, 128, 2048) == 2
    assert error(512, math.inf, 2048) == 2
    assert error(4096, math.inf, 2048) == error(math.inf, math.inf, 2048) == 0


def test_a_threshold_is_fitted_where_it_predicts_best(script):
    fitted_threshold = script("theory_prediction").fitted_threshold
    runs = [made(gap) for gap in (6.0, 7.0, 8.0)]
    observed = [half_length(median_weights(one, LENGTH), LENGTH, 0.2) for one in runs]
    assert fitted_threshold(
        [median_weights(one, LENGTH) for one in (*runs, made(30.0))], [*observed, math.inf], LENGTH, 2048
    ) == pytest.approx(0.2, abs=0.02)


def test_predictions_are_scored_with_the_threshold_of_the_other_arms(script):
    prediction = script("theory_prediction")
    plain, fitted, baseline = prediction.scores(runs_of(prediction))
    assert {arm: round(one, 1) for arm, one in fitted.thresholds.items()} == {"a": 0.3, "b": 0.3, "c": 0.3}
    assert fitted.fell < 0.2 < min(plain.fell, baseline.fell)
    assert (plain.kept, fitted.kept) == (2, 2)
    assert plain.predictions[-1] == math.inf


def test_between_distant_lengths_of_an_evaluation_accuracy_is_measured_an_octave_apart(script):
    between = script("theory_prediction").between
    assert between([64, 2048], [1.0, 0.04]) == [128, 256, 512, 1024]
    assert between([64, 128, 256], [1.0, 0.6, 0.4]) == []
    assert between([64, 300, 2048, 9000], [1.0, 0.9, 0.3, 0.1]) == [600, 1200]
    assert between([64, 2048], [1.0, 0.5]) == between([64, 2048], [0.3, 0.2]) == []


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
    models = [statements.Described("words", "softmax", Softmax(), Path("run"), 8, 64, series)]
    found = {one.source: one for one in statements.compared(models)}
    assert (found["Su, 9019"].values["softmax"], found["Su, 9019"].outcome) == ("0.70 (1.00)", "yes")
    assert (found["Mudarisov, Alg. 1"].values["softmax"], found["Mudarisov, Alg. 1"].outcome) == ("exponent 2.000", "no")
    explained = tuple(replace(series[0], metric=f"variance explained by {place}") for place in ("key position", "distance"))
    arms = {"linear features": Linear(), "linear, decay": Linear(decay=True), "linear-like": Softmax()}
    linear = [statements.Described("more", arm, normalizer, Path("other"), 8, 64, explained) for arm, normalizer in arms.items()]
    holds = {one.says: one.holds for one in statements.compared(linear) if one.source == "Su, 9889"}
    assert holds == {
        "linear attention mostly expresses absolute position": {"linear features": True}, "a decay can't adapt": {"linear, decay": True},
    }  # fmt: skip
    text = theory.page_of([models, linear[:1]], runs_of(prediction), 1, ARGUMENTS)
    assert "| Su, 9019 | the sum that normalizes grows more slowly than n |" in text
    assert "| agrees in words | agrees in more |" in text
    assert re.search(r"grows more slowly than n \| yes \| - \|", text)
    assert ",0.70 (1.00),yes\n" in statements.values([models]).decode()
    assert "- Mudarisov, Alg. 4: N_s / N stays" in text
    assert "lm compare configs/experiments/words.yaml configs/experiments/more.yaml configs/experiments/pairs.yaml\n" in text
    assert "--text runs/words runs/more --recall runs/pairs\n" in text
    assert "| weight below 1/2 |" in text
    assert "of 4 | 2 of 2 |" in text
    assert "scored twice" not in text
    assert "{" not in text


def test_predictions_are_scored_at_the_lengths_that_all_runs_have_and_again_with_the_longer_ones(script):
    prediction, statements, theory = (script(name) for name in ("theory_prediction", "theory_statements", "theory"))
    runs = [run.up_to(run.lengths[-1] // 4) if run.arm == "c" else run for run in runs_of(prediction)]
    text = theory.page_of([[statements.Described("words", "softmax", Softmax(), Path("run"), 8, 64, ())]], runs, 0, ARGUMENTS)
    first, second = (
        [line for line in text.splitlines() if line.startswith(f"| up to {longest:,} |")] for longest in (LENGTH * 8, LENGTH * 32)
    )
    assert (len(first), len(second)) == (3, 3)
    assert "The 4 runs between" in text
    assert "scored twice" in text


def test_of_each_normalizer_on_text_the_run_of_the_lowest_seed_is_described(script, tiny, tmp_path):
    theory = script("theory")
    for name, normalizer, seed in (("ssmax-2", "ssmax", 2), ("ssmax-3", "ssmax", 3), ("softmax-1", "softmax", 1)):
        write_config(tiny(f"model.normalizer={normalizer}", f"seed={seed}"), tmp_path / name)
    assert list(theory.first_runs(tmp_path).items()) == [("softmax", tmp_path / "softmax-1"), ("ssmax", tmp_path / "ssmax-2")]


def test_it_is_one_at_the_learning_rate_that_its_arm_was_judged_at(script, tiny, tmp_path):
    theory = script("theory")
    for rate, seed in ((2e-3, 1), (4e-3, 1), (4e-3, 2), (2e-3, 101)):
        place = f"experiment={{name: words, arm: plain, rate: {rate}}}"
        write_config(tiny(f"seed={seed}", f"optim.lr={rate}", place), tmp_path / f"{rate}-{seed}")
    with pytest.raises(RunError, match="finish the experiment with lm compare"):
        theory.first_runs(tmp_path)
    write_config(tiny("model.normalizer=ssmax"), tmp_path / "of no arm")
    (tmp_path / "verdicts.json").write_text('{"arms": [{"size": "", "arm": "plain", "rate": 0.004}]}')
    assert theory.first_runs(tmp_path) == {"softmax": tmp_path / "0.004-1"}


def test_arms_of_one_normalizer_are_described_each(script, tiny, tmp_path):
    for arm, normalizer in (("narrow", "ssmax"), ("wide", "ssmax"), ("plain", "softmax")):
        write_config(tiny(f"model.normalizer={normalizer}", f"experiment={{name: words, arm: {arm}}}"), tmp_path / arm)
    expected = {"softmax": tmp_path / "plain", "ssmax, narrow": tmp_path / "narrow", "ssmax, wide": tmp_path / "wide"}
    assert script("theory").first_runs(tmp_path) == expected


def test_the_folder_of_a_size_has_its_verdicts_in_that_of_the_experiment(script, tiny, tmp_path):
    (tmp_path / "full").mkdir()
    for rate in (2e-3, 4e-3):
        place = f"experiment={{name: words, size: full, arm: plain, rate: {rate}}}"
        write_config(tiny(f"optim.lr={rate}", place), tmp_path / "full" / str(rate))
    rates = '{"size": "full", "arm": "plain", "rate": 0.004}, {"size": "mixed", "arm": "plain", "rate": 0.002}'
    (tmp_path / "verdicts.json").write_text(f'{{"arms": [{rates}]}}')
    assert script("theory").first_runs(tmp_path / "full") == {"softmax": tmp_path / "full" / "0.004"}


def test_the_command_writes_the_page_and_its_pictures(script, tmp_path, monkeypatch):
    prediction, statements, theory = (script(name) for name in ("theory_prediction", "theory_statements", "theory"))
    runs = {run.folder / str(number): run for number, run in enumerate(runs_of(prediction))}
    monkeypatch.setattr(theory, "first_runs", lambda experiment: {"softmax": experiment / "run"})
    monkeypatch.setattr(theory, "run_folders", lambda root: [*runs])
    monkeypatch.setattr(theory, "described", lambda arm, folder: statements.Described("words", arm, Softmax(), folder, 8, 64, ()))
    monkeypatch.setattr(theory, "measured", lambda folder: runs[folder].up_to(0))
    monkeypatch.setattr(theory, "observed", lambda run, longer, sequences: next(one for one in runs.values() if one.found is run.found))
    theory.main(["--text", "runs/words", "runs/more", "--recall", "runs/pairs", "--out", str(tmp_path / "theory.md")])
    assert {path.name for path in tmp_path.iterdir()} == {
        "theory.md",
        "theory-statements.csv",
        "theory-statements.svg",
        "theory-prediction.svg",
    }
    assert "scripts/theory.py --text runs/words runs/more --recall runs/pairs\n" in (tmp_path / "theory.md").read_text()


def test_runs_that_the_command_can_not_use_are_named(script, tiny, tmp_path):
    theory = script("theory")
    with pytest.raises(RunError, match="no run folders there"):
        theory.main(["--text", str(tmp_path), "--recall", str(tmp_path)])
    write_config(tiny(), tmp_path / "run")
    with pytest.raises(RunError, match="was trained on text, not on a recall task"):
        theory.main(["--text", str(tmp_path), "--recall", str(tmp_path)])
