"""Numbers at the training length as predictions of the length at which recall fails, on made-up results."""

import importlib
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_half_length import FILLER, TASK, symbols

from lm.config.load import to_yaml
from lm.data.tasks import example
from lm.diagnostics.retrieval_length import retrieving_head
from lm.errors import RunError

SCRIPTS = Path(__file__).parents[1] / "scripts"
NUMBERS = {
    "margin": 5.0,
    "weight on the needle": 0.9,
    "N_eff": 1.2,
    "S": 0.1,
    "entropy": 0.3,
    "formula holds": 1.0,
    "longest": 4096.0,
}


@pytest.fixture
def predictors(monkeypatch: pytest.MonkeyPatch):
    """The module of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("predictors")


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch):
    """The module of scripts/ that takes numbers from runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("retrieving_heads")


def made(arms: dict[str, list[tuple[float, float]]], **numbers: float) -> pd.DataFrame:
    """Runs by arm, each (margin, length at which it falls); the formula says 64 e^(margin - 5)."""
    lines = [
        NUMBERS
        | {"line": "recall", "arm": arm, "rate": 0.003, "seed": seed, "margin": margin, "half-length": length}
        | {"predicted half-length": 64 * math.exp(margin - 5)}
        | numbers
        for arm, runs in arms.items()
        for seed, (margin, length) in enumerate(runs)
    ]
    return pd.DataFrame(lines)


def exactly(margin: float) -> tuple[float, float]:
    return margin, 64 * math.exp(margin - 5)


def test_what_is_exact_has_no_error_and_every_pair_in_order(predictors):
    runs = made({"a": [exactly(6), exactly(7)], "b": [exactly(6.5), exactly(7.5)], "c": [exactly(8), (12.0, math.inf)]})
    formula, margin, *_ = predictions = predictors.predictions(runs)
    assert [number.name for number in predictions[1:6]] == list(predictors.LINES)
    for number in (formula, margin):  # a line in the margin, fitted on the other arms, is the formula here
        assert number.errors(runs).tolist() == pytest.approx([0, 0, 0], abs=1e-9)
        assert number.in_order(runs) == 1
    constant = next(
        number for number in predictions if number.name == "N_eff"
    )  # the same for every run: half of the pairs
    assert constant.in_order(runs) == 0.5


def test_an_arm_is_predicted_from_the_others_alone(predictors):
    runs = made({"a": [(6.0, 100.0)], "b": [(6.0, 400.0)], "c": [(6.0, 400.0), (6.0, 1600.0)]})
    by_name = {number.name: number for number in predictors.predictions(runs)}
    assert by_name[predictors.OTHERS].lengths.tolist() == pytest.approx(
        [400 * math.sqrt(2), 200 * math.sqrt(2), 200, 200]
    )
    seeds = by_name[predictors.SEEDS]
    assert np.isnan(seeds.lengths[:2]).all()
    assert seeds.lengths[2:].tolist() == pytest.approx([1600, 400])
    assert seeds.errors(runs).to_dict() == pytest.approx({"c": 2.0})


def test_a_run_whose_number_is_infinite_is_left_out_of_that_numbers_line(predictors):
    runs = made({"a": [(6.0, 200.0), (7.0, 200.0)], "b": [(6.0, 400.0)], "c": [(6.0, 800.0)]})
    runs["N_eff"] = [math.inf, 2.0, 3.0, 4.0]
    lengths = next(number for number in predictors.predictions(runs) if number.name == "N_eff").lengths
    assert np.isnan(lengths[0])
    assert np.isfinite(lengths[1:]).all()


def test_predictions_far_away_count_as_the_farthest(predictors):
    runs = made({"a": [(50.0, 1024.0)], "b": [(-50.0, 1024.0)]})
    assert predictors.predictions(runs)[0].errors(runs).to_dict() == pytest.approx({"a": 10.0, "b": 4.0})


def test_runs_that_have_not_learned_are_left_out(predictors, tmp_path, monkeypatch):
    monkeypatch.setattr(predictors, "EXPERIMENTS", ("pairs",))
    (tmp_path / "pairs").mkdir()
    lines = [
        dict(arm="a", rate=0.003, stage="final", seed=seed, metric=metric, setting=setting, x=x, value=value)
        for seed, accuracy in ((1, 0.95), (2, 0.5))
        for metric, setting, x, value in (
            ("mqar accuracy", "as trained", 64, accuracy),
            ("mqar accuracy", "as trained", 512, 0.1),
            ("half-length", "head", 64, math.inf if seed == 1 else 64),
        )
    ]
    pd.DataFrame(lines).to_csv(tmp_path / "pairs" / "seeds.csv", index=False)
    runs = predictors.learned(tmp_path)
    assert runs.seed.tolist() == [1]
    assert predictors.fell(runs).empty


@pytest.mark.parametrize("normalizer", ["relu2", "stick_breaking"])  # the second leaves out the query itself
def test_a_head_without_exponentials_is_described_by_shares(tiny, normalizer: str):
    examples = [example(TASK, 0, index, 32, "test") for index in range(4)]
    model = symbols(tiny)[1]
    assert retrieving_head(model, examples, FILLER).formula_holds
    options = ("eval.long_context.length_factor=0", "data.seq_len=32")
    other = tiny(
        "name=other", *options, f"model={{n_layer: 1, n_head: 2, n_embd: 32, position: none, normalizer: {normalizer}}}"
    )
    decoder = type(model)(other.model, TASK.vocab_size + 1, 32).eval()
    assert retrieving_head(decoder, examples, FILLER) is None
    head = retrieving_head(decoder, examples, FILLER, any_map=True)
    assert not head.formula_holds
    weight = head.scores.weight(0)  # of its share in the row
    assert weight.mean() == pytest.approx(head.weight)
    assert (head.scores.slope == 0).all()
    assert (head.effective_keys <= 32).all()
    assert (head.entropy <= math.log(32)).all()


def test_an_observed_length_is_interpolated_in_its_logarithm(heads):
    observed = heads.observed_half_length
    assert observed([64, 128, 256], [1.0, 0.75, 0.25]) == pytest.approx(128 * math.sqrt(2))
    assert observed([64, 128, 256], [1.0, 0.9, 0.5]) == math.inf
    assert observed([64, 128], [0.3, 0.2]) == 64


def test_between_distant_lengths_of_an_evaluation_accuracy_is_measured_an_octave_apart(heads):
    assert heads.between([64, 2048], [1.0, 0.04]) == [128, 256, 512, 1024]
    assert heads.between([64, 128, 256], [1.0, 0.6, 0.4]) == []
    assert heads.between([64, 300, 2048, 9000], [1.0, 0.9, 0.3, 0.1]) == [600, 1200]
    assert heads.between([64, 2048], [1.0, 0.5]) == heads.between([64, 2048], [0.3, 0.2]) == []


def test_a_run_on_text_is_refused(heads, tiny, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(tiny()))
    with pytest.raises(RunError, match="was trained on text, not on a recall task"):
        heads.numbers(tmp_path)
