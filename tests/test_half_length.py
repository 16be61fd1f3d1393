"""The length at which a needle is lost, predicted from made-up scores."""

import math

import numpy as np
import pytest
from conftest import lm

from lm.config.eval_config import DiagnosticsConfig
from lm.config.task_config import MQAR
from lm.data.tasks import example
from lm.diagnostics.retrieval_length import Retrieval, RetrievingHead, half_length, median_weights, retrieving_head
from lm.evaluation.diagnostics import retrieval_series
from lm.model.decoder import Decoder
from lm.training.train import train

LENGTH = 64


def predicted(found: Retrieval, threshold: float) -> float:
    """Its 50 % length."""
    return half_length(median_weights(found, LENGTH), LENGTH, threshold)


def made(gap: float, slope: float = 0.0, spread: float = 0.0, questions: int = 5, needle: float = 0.0) -> Retrieval:
    """A needle `gap` above filler of Gaussian scores; the query sees 64 keys."""
    drawn = np.random.default_rng(0).standard_normal((questions, LENGTH - 1))
    n = np.full(questions, float(LENGTH))
    return Retrieval(
        np.full(questions, needle + gap), needle + spread * drawn, np.ones((questions, LENGTH - 1), bool), n, np.full(questions, slope)
    )


@pytest.mark.parametrize("gap", [6.0, 8.0, 11.0])
@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_softmax_loses_the_needle_where_filler_outweighs_it(gap: float, threshold: float):
    others = math.exp(gap) * (1 - threshold) / threshold  # keys of filler that leave the needle this weight
    assert predicted(made(gap), threshold) == pytest.approx(others + 1, rel=2e-3)
    assert made(gap).margin == pytest.approx(gap)


def test_the_spread_of_filler_counts_as_the_mean_of_its_exponentials():
    one = made(9.0, spread=1.5)
    mean = np.exp(one.others).mean(1)
    assert one.margin == pytest.approx(9.0 - np.log(mean))
    assert np.median(one.weight(predicted(one, 0.3) - LENGTH)) == pytest.approx(0.3, rel=1e-2)


def test_a_scale_that_grows_with_ln_n_never_loses_a_needle_that_is_far_enough_above():
    slope = 1 / math.log(LENGTH)
    for gap, kept in ((1.1 * math.log(LENGTH), True), (0.9 * math.log(LENGTH), False)):  # s z* = 1 is the SSMax paper's threshold
        found = predicted(made(gap, slope), 0.4)
        assert math.isinf(found) == kept
    assert made(8.0, slope).weight(960.0) == pytest.approx(1 / (1 + 1023 * math.exp(-8 * math.log(1024) / math.log(64))), rel=1e-9)


def test_the_weight_grown_is_that_of_more_keys_of_the_same_scores():
    one = made(5.0, slope=0.24, spread=0.7)
    more, scale = 3 * (LENGTH - 1), 1 + 0.24 * math.log((LENGTH + 3 * (LENGTH - 1)) / LENGTH)
    odds = np.exp(scale * (one.others - one.needle[:, None]))
    assert one.weight(more) == pytest.approx(1 / (1 + 4 * odds.sum(1)))


def test_keys_that_are_not_visible_count_for_nothing():
    one = made(5.0)
    others = np.pad(one.others, ((0, 0), (0, 7)), constant_values=-np.inf)
    padded = Retrieval(one.needle, others, np.pad(one.is_filler, ((0, 0), (0, 7))), one.n, one.slope)
    assert padded.weight(100.0) == pytest.approx(one.weight(100.0))


TASK, LAYERS = MQAR(pairs=4, queries=4), "{n_layer: 2, n_head: 2, n_embd: 32, init_std: 0.1, normalizer: [{name: window, size: 2}, ssmax]}"


def symbols(tiny, position: str = "none", task: str = "{name: mqar, pairs: 4, queries: 4}"):
    """A configuration of recall of pairs, and an untrained model of it."""
    config = tiny(f"data.tasks=[{{task: {task}}}]", "eval.long_context.length_factor=0", f"model={LAYERS}", f"model.position={position}")
    return config, Decoder(config.model, config.data.tasks[0].task.vocab_size + 1, 32).eval()


def test_the_weight_at_twice_the_length_is_predicted_from_the_training_length(tiny):
    config, decoder = symbols(tiny)
    (curve,) = retrieval_series(decoder, config, DiagnosticsConfig())
    assert (curve.metric, curve.axis.values[:3], len(curve.means)) == ("predicted weight on the key asked for", (32, 64, 128), 17)
    longer = retrieving_head(decoder, [example(TASK, 0, index, 64, "test") for index in range(64)])
    assert curve.what == f"layer {longer.layer}, head {longer.head}" == f"layer 1, head {longer.head}"
    assert curve.means[1] == pytest.approx(np.median(longer.scores.weight(0)), rel=0.15)
    assert longer.scores.weight(0).mean() == pytest.approx(longer.weight)


def test_the_length_at_which_retrieval_fails_is_printed_where_the_prediction_was_tested(tiny, tmp_path, monkeypatch):
    config, decoder = symbols(tiny)
    head = RetrievingHead(1, 0, 0.9, np.ones(5), np.zeros(5), made(6.0))
    monkeypatch.setattr("lm.evaluation.diagnostics.retrieving_head", lambda decoder, examples: head)
    fails, _ = retrieval_series(decoder, config, DiagnosticsConfig())
    assert (fails.metric, fails.unit) == ("predicted 50% length of retrieval", "tokens")
    assert fails.means[0] == half_length(median_weights(made(6.0), 32), 32)
    train(config)
    out = tmp_path / "numbers.csv"
    done = lm("diagnose", str(config.run_folder), "eval.diagnostics.sequences=2", "-o", str(out))
    assert (done.returncode, "predicted 50% length of retrieval" in done.stdout) == (0, True), done.stderr
    assert "predicted weight on the key asked for" in out.read_text()
    for other in ({"position": "rope"}, {"task": "{name: mqar, pairs: 4, queries: 4, joined: true}"}, {"task": "copy"}):
        assert retrieval_series(decoder, symbols(tiny, **other)[0], DiagnosticsConfig()) == []
