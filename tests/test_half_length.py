"""The length at which a needle is lost, predicted from made-up scores."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import lm

from lm.attention.catalogue import OPTIONS
from lm.config.eval_config import DiagnosticsConfig
from lm.config.inference_config import InferenceSetting
from lm.config.task_config import MQAR
from lm.data.tasks import example
from lm.diagnostics.retrieval_length import Retrieval, RetrievingHead, half_length, median_weights, retrieving_head
from lm.evaluation.diagnostics import retrieval_series
from lm.model.decoder import Decoder
from lm.training.train import train

LENGTH = 64


def predicted(retrieval: Retrieval, threshold: float) -> float:
    """Its 50 % length."""
    return half_length(median_weights(retrieval, LENGTH), LENGTH, threshold)


def made(gap: float, slope: float = 0.0, spread: float = 0.0, questions: int = 5, needle: float = 0.0) -> Retrieval:
    """A needle `gap` above filler of Gaussian scores; the query sees 64 keys."""
    noise = np.random.default_rng(0).standard_normal((questions, LENGTH - 1))
    n = np.full(questions, float(LENGTH))
    return Retrieval(
        np.full(questions, needle + gap),
        needle + spread * noise,
        np.ones((questions, LENGTH - 1), bool),
        n,
        np.full(questions, slope),
    )


@pytest.mark.parametrize("gap", [6.0, 8.0, 11.0])
@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_softmax_loses_the_needle_where_filler_outweighs_it(gap: float, threshold: float):
    n_filler = math.exp(gap) * (1 - threshold) / threshold  # keys of filler that leave the needle this weight
    assert predicted(made(gap), threshold) == pytest.approx(n_filler + 1, rel=2e-3)
    assert made(gap).margin == pytest.approx(gap)


def test_the_spread_of_filler_counts_as_the_mean_of_its_exponentials():
    retrieval = made(9.0, spread=1.5)
    mean = np.exp(retrieval.other_scores).mean(1)
    assert retrieval.margin == pytest.approx(9.0 - np.log(mean))
    assert np.median(retrieval.weight(predicted(retrieval, 0.3) - LENGTH)) == pytest.approx(0.3, rel=1e-2)


def test_a_scale_that_grows_with_ln_n_never_loses_a_needle_that_is_far_enough_above():
    slope = 1 / math.log(LENGTH)
    for gap, is_endless in (
        (1.1 * math.log(LENGTH), True),
        (0.9 * math.log(LENGTH), False),
    ):  # s z* = 1 is the SSMax paper's threshold
        length = predicted(made(gap, slope), 0.4)
        assert math.isinf(length) == is_endless
    assert made(8.0, slope).weight(960.0) == pytest.approx(
        1 / (1 + 1023 * math.exp(-8 * math.log(1024) / math.log(64))), rel=1e-9
    )


def test_the_weight_grown_is_that_of_more_keys_of_the_same_scores():
    retrieval = made(5.0, slope=0.24, spread=0.7)
    n_more, scale = 3 * (LENGTH - 1), 1 + 0.24 * math.log((LENGTH + 3 * (LENGTH - 1)) / LENGTH)
    odds = np.exp(scale * (retrieval.other_scores - retrieval.needle[:, None]))
    assert retrieval.weight(n_more) == pytest.approx(1 / (1 + 4 * odds.sum(1)))


@pytest.mark.parametrize(
    "slope", [0.0, -1 / math.log(4.0), -2.0]
)  # at four times the length a scale of 1, of 0, and below
def test_keys_that_are_not_visible_count_for_nothing(slope: float):
    retrieval = made(5.0, slope, spread=0.7)
    filler = np.pad(retrieval.other_scores, ((0, 0), (0, 7)), constant_values=-np.inf)
    padded = Retrieval(
        retrieval.needle, filler, np.pad(retrieval.is_filler, ((0, 0), (0, 7))), retrieval.n, retrieval.slope
    )
    assert padded.weight(3.0 * LENGTH) == pytest.approx(retrieval.weight(3.0 * LENGTH))


TASK, FILLER = MQAR(pairs=4, queries=4), range(128, 160)
LAYERS = "{n_layer: 2, n_head: 2, n_embd: 32, init_std: 0.1, normalizer: [{name: window, size: 2}, ssmax]}"


def symbols(tiny, position: str = "none", task: str = "{name: mqar, pairs: 4, queries: 4}"):
    """A configuration of recall of pairs, and an untrained model of it."""
    few = "eval={long_context: {length_factor: 0}, recall: {length_factors: [1], sequences: 8}}"
    config = tiny(f"data.tasks=[{{task: {task}}}]", few, f"model={LAYERS}", f"model.position={position}")
    return config, Decoder(config.model, config.data.tasks[0].task.vocab_size + 1, 32).eval()


def test_the_weight_at_twice_the_length_is_predicted_from_the_training_length(tiny):
    config, decoder = symbols(tiny)
    (curve,) = retrieval_series(decoder, config, DiagnosticsConfig())
    assert (curve.metric, curve.axis.values[:3], len(curve.means)) == (
        "predicted weight on the key asked for",
        (32, 64, 128),
        17,
    )
    longer = retrieving_head(decoder, [example(TASK, 0, index, 64, "test") for index in range(64)], FILLER)
    assert curve.what == f"layer {longer.layer}, head {longer.head}" == f"layer 1, head {longer.head}"
    assert curve.means[1] == pytest.approx(np.median(longer.scores.weight(0)), rel=0.15)
    assert longer.scores.weight(0).mean() == pytest.approx(longer.weight)


def test_the_prediction_is_of_the_model_under_each_inference_setting(tiny):
    config, decoder = symbols(tiny)
    settings = [InferenceSetting(), InferenceSetting(normalizer={"n": "fixed:1000"})]
    as_trained, changed = retrieval_series(decoder, config, DiagnosticsConfig(inference=settings))
    assert as_trained.means != pytest.approx(changed.means, rel=1e-3)


def test_a_window_that_holds_the_training_sequences_is_not_predicted_to_see_longer_ones(tiny):
    config, decoder = symbols(tiny)
    windows = OPTIONS["layers"]([OPTIONS["window"](size=size) for size in (2, 256)])
    windowed = Decoder(replace(config.model, normalizer=windows), decoder.vocab_size, 32).eval()
    sequence = example(TASK, 0, 0, 32, "test")
    assert retrieving_head(windowed, [sequence], FILLER) is None
    assert not retrieving_head(windowed, [sequence], FILLER, any_map=True).formula_holds


def test_keys_of_pairs_that_are_not_asked_for_are_no_filler(tiny):
    task = MQAR(pairs=4, queries=1)
    sequence = example(task, 0, 0, 32, "test")
    head = retrieving_head(symbols(tiny)[1], [sequence], FILLER)
    is_filler = (sequence.tokens >= FILLER.start)[:-1]
    assert (~is_filler).sum() == 2 * task.pairs + 1
    assert (head.scores.is_filler[0] == is_filler & np.insert(is_filler[:-1], 0, False)).all()


def test_the_length_at_which_retrieval_fails_is_printed_where_the_prediction_was_tested(tiny, tmp_path, monkeypatch):
    config, decoder = symbols(tiny)
    head = RetrievingHead(1, 0, 0.9, np.ones(5), np.zeros(5), made(6.0))
    monkeypatch.setattr("lm.evaluation.diagnostics.retrieving_head", lambda *arguments: head)
    curve, _ = retrieval_series(decoder, config, DiagnosticsConfig())
    assert (curve.metric, curve.unit) == ("predicted 50% length of retrieval", "tokens")
    assert curve.means[0] == half_length(median_weights(made(6.0), 32), 32)
    train(config)
    out = tmp_path / "numbers.csv"
    result = lm("diagnose", str(config.run_folder), "eval.diagnostics.sequences=2", "-o", str(out))
    assert (result.returncode, "predicted 50% length of retrieval" in result.stdout) == (0, True), result.stderr
    assert "predicted weight on the key asked for" in out.read_text()
    for other in ({"position": "rope"}, {"task": "{name: mqar, pairs: 4, queries: 4, joined: true}"}, {"task": "copy"}):
        assert retrieval_series(decoder, symbols(tiny, **other)[0], DiagnosticsConfig()) == []


@pytest.mark.parametrize("normalizer", ["sink", "softmax1", "forget", "scale_invariant", "alibi"])
def test_nothing_is_predicted_of_sinks_and_of_scores_that_fall_with_distance(tiny, normalizer: str):
    config, _ = symbols(tiny)
    config.model.normalizer = OPTIONS[normalizer]()
    assert retrieval_series(Decoder(config.model, TASK.vocab_size + 1, 32).eval(), config, DiagnosticsConfig()) == []
