"""docs/theory.md as scripts/theory.py makes it: statements by arm."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lm.attention.catalogue import Linear, Softmax
from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.errors import RunError
from lm.runs.evaluations import Axis, Series

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """A function: name -> module of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def write_config(config: Config, folder: Path) -> None:
    """A run folder that says what it is of, and no more."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))


def test_the_page_says_of_each_statement_what_came_out(script):
    statements, theory = script("theory_statements"), script("theory")
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
    by_source = {statement.source: statement for statement in statements.compared(models)}
    assert (by_source["Su, 9019"].values["softmax"], by_source["Su, 9019"].outcome) == ("0.70 (1.00)", "yes")
    assert (by_source["Mudarisov, Alg. 1"].values["softmax"], by_source["Mudarisov, Alg. 1"].outcome) == (
        "exponent 2.000",
        "no",
    )
    explained = tuple(
        replace(series[0], metric=f"variance explained by {place}") for place in ("key position", "distance")
    )
    arms = {"linear features": Linear(), "linear, decay": Linear(decay=True), "linear-like": Softmax()}
    linear = [
        statements.Described("more", arm, normalizer, Path("other"), 8, 64, explained)
        for arm, normalizer in arms.items()
    ]
    outcomes = {
        statement.says: statement.holds for statement in statements.compared(linear) if statement.source == "Su, 9889"
    }
    assert outcomes == {
        "linear attention mostly expresses absolute position": {"linear features": True},
        "a decay can't adapt": {"linear, decay": True},
    }  # fmt: skip
    text = theory.page_of([models, linear[:1]], [Path("runs/words"), Path("runs/more")])
    assert "| Su, 9019 | the sum that normalizes grows more slowly than n |" in text
    assert "| agrees in words | agrees in more |" in text
    assert re.search(r"grows more slowly than n \| yes \| - \|", text)
    assert ",0.70 (1.00),yes\n" in statements.values([models]).decode()
    assert "Mudarisov, Alg. 4" not in text  # applies to none of these models
    assert "lm compare configs/experiments/words.yaml configs/experiments/more.yaml\n" in text
    assert "--text runs/words runs/more\n" in text
    assert "{" not in text


def test_of_each_normalizer_on_text_the_run_of_the_lowest_seed_is_described(script, tiny, tmp_path):
    theory = script("theory")
    for name, normalizer, seed in (("ssmax-2", "ssmax", 2), ("ssmax-3", "ssmax", 3), ("softmax-1", "softmax", 1)):
        write_config(tiny(f"model.normalizer={normalizer}", f"seed={seed}"), tmp_path / name)
    assert list(theory.first_runs(tmp_path).items()) == [
        ("softmax", tmp_path / "softmax-1"),
        ("ssmax", tmp_path / "ssmax-2"),
    ]


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


def test_the_command_writes_the_page_and_its_picture(script, tmp_path, monkeypatch):
    statements, theory = script("theory_statements"), script("theory")
    monkeypatch.setattr(theory, "first_runs", lambda experiment: {"softmax": experiment / "run"})
    monkeypatch.setattr(
        theory, "described", lambda arm, folder: statements.Described("words", arm, Softmax(), folder, 8, 64, ())
    )
    theory.main(["--text", "runs/words", "runs/more", "--out", str(tmp_path / "theory.md")])
    assert {path.name for path in tmp_path.iterdir()} == {"theory.md", "theory-statements.csv", "theory-statements.svg"}
    assert "scripts/theory.py --text runs/words runs/more\n" in (tmp_path / "theory.md").read_text()


def test_a_folder_without_runs_is_named(script, tmp_path):
    with pytest.raises(RunError, match="no run folders there"):
        script("theory").main(["--text", str(tmp_path)])
