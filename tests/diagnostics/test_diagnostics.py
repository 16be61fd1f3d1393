"""Statistics of attention: streamed ones equal the dense definition, and what is undefined is said."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import lm
from fabricated import make_evaluation
from folders import curves_of, last_checkpoint, metric_lines
from torch import Tensor

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config import normalizers as kinds
from lm.config.eval_config import DiagnosticsConfig, InferenceSetting, ThetaFactor
from lm.config.model_config import GAUBlock, ModelConfig
from lm.data.batches import Batch
from lm.data.prepare import prepare
from lm.diagnostics import sparsity
from lm.diagnostics.attention_rows import (
    MIN_KEYS,
    NO_WEIGHT_FRACTION,
    NOT_FINITE_FRACTION,
    AttentionMeasurement,
    MeasuredValues,
    fit_head_exponents_and_r2,
    half_octave_ranges,
    log_spaced_queries,
)
from lm.evaluation.diagnostics import diagnostic_rows, diagnostic_sequences, statistics_of
from lm.evaluation.held_out import LENGTH_AXIS
from lm.evaluation.measurement import HeldOutSequences, sampling_unit_frame
from lm.evaluation.measurement import metric_rows as evaluation_rows
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder, batch_layout
from lm.model.device import Device
from lm.model.swapped import with_inference_setting
from lm.report.evaluation_tables import EvaluationResult, print_results
from lm.runs.evaluations import Metric, join_rows
from lm.runs.loading import load as load_model
from lm.runs.loading import save_model

VOCAB, LENGTH, SIZE, ALL = 50, 80, 8, list(range(80))


def make_decoder(normalizer: Options, block: str = "attention") -> Decoder:
    """A decoder with the normalizers' parameters off their initial values."""
    shape = {"n_head": 1, "block": GAUBlock(key_size=SIZE)} if block == "gau" else {"n_head": 2}
    decoder = Decoder(
        ModelConfig(n_layer=2, n_embd=2 * SIZE, normalizer=normalizer, init_std=0.3, **shape), VOCAB, 64
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for normalizer in decoder.normalizers() for p in normalizer.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return decoder


def batch(isolated: bool = False) -> Batch:
    """One sequence; `isolated`: a document begins in its middle, which does not see what is before it."""
    tokens = torch.randint(1, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens[0, 35] = 0
    return Batch.from_sequences(tokens, end_of_text_id=0 if isolated else None)


def measured(decoder: Decoder, sample: Batch) -> MeasuredValues:
    """The statistics of one sequence."""
    heads = decoder.normalizers()[0].layer.n_head
    measures = AttentionMeasurement(statistics_of(DiagnosticsConfig()), 2, heads, ALL, LENGTH)
    return measures.split_vectors(measures.measure_statistics(decoder, sample)[None].numpy())


def naive(weights: np.ndarray, visible: np.ndarray, first: int, query: int, sums_to_one: bool) -> dict[str, float]:
    """The statistics of one row, from their definitions: weights (S,) fp64 of the keys `visible`, of which `first`
    begins the document.
    """

    def described(a: np.ndarray, keys: np.ndarray, ending: str) -> dict[str, float]:
        a, n = np.abs(a), len(a)
        ordered, p = np.sort(a)[::-1], a / a.sum()
        values = {
            "S": a.mean() / np.sqrt((a**2).mean()),
            "effective keys": a.sum() ** 2 / (a**2).sum(),
            "largest weight": a.max(),
            "keys with 95% of the weight": float(np.searchsorted(np.cumsum(ordered) / a.sum(), 0.95) + 1),
            "exact zeros": (a == 0).mean(),
            "mean distance": p @ (query - keys),
            "weight on the largest 8": ordered[:8].sum() / a.sum(),
            "weight on the nearest 16": p[query - keys < 16].sum(),
        }
        if sums_to_one:
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            values |= {"entropy": entropy, "entropy / ln n": entropy / math.log(n)}
        return {name + ending: value for name, value in values.items()}

    keys = np.flatnonzero(visible)
    a, rest = weights[keys], keys[keys != first]
    values = {
        "weight on the first token": np.abs(weights[first]) / np.abs(a).sum() if visible[first] else 0.0,
        "n": len(keys),
    }
    if not sums_to_one:
        values["sum of weights"] = a.sum()
    return (
        values
        | described(a, keys, "")
        | (described(weights[rest], rest, ", no first") if np.abs(weights[rest]).sum() else {})
    )


def moments(score_map: str, scores: np.ndarray, slope: float, is_first: np.ndarray) -> dict[str, float]:
    """The moments of scores without decay, and S of weights in closed form times S of the decay."""
    standard, rest = (scores - scores.mean()) / scores.std(), scores[~is_first]
    values = {
        "score mean": scores.mean(), "score standard deviation": scores.std(), "score skew": (standard**3).mean(),
        "score excess kurtosis": (standard**4).mean() - 3,
        "score mean, no first": rest.mean(), "score standard deviation, no first": rest.std(),
    }  # fmt: skip
    if form := sparsity.CLOSED_FORMS.get(score_map):
        decay = np.exp(-slope * np.arange(len(scores)))
        closed = form(*(torch.tensor(value, dtype=torch.float64) for value in (scores.mean(), scores.std())))
        values["S, closed form"] = float(closed) * decay.mean() / math.sqrt((decay**2).mean())
    return values


UNNORMALIZED = {  # by map of scores, or name
    "exp": np.exp, "relu": lambda z: z.clip(0), "relu2": lambda z: z.clip(0) ** 2,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "features": lambda z: z, "softpick": lambda z: np.abs(np.exp(z) - 1), "lssa": lambda z: np.log1p(np.exp(z)),
    "elastic": np.exp,
}  # fmt: skip


def agrees_with_naive(decoder: Decoder, sample: Batch) -> int:
    """Compare all rows of all layers and heads with the dense definition in fp64; how many numbers were compared."""
    values, compared, layout = measured(decoder, sample), 0, batch_layout(sample)
    positions = layout.positions.reshape(-1).tolist()
    for block in attention_blocks(decoder, sample, [0]):
        normalizer, inputs = block.normalizer, block.inputs
        q, k = inputs.q.double(), inputs.k.double()
        weights, scores = (
            tensor[0].detach().numpy()
            for tensor in (normalizer.weights(q, k, layout), normalizer.unmasked_scores(q, k, layout))
        )
        unnormalized = UNNORMALIZED.get(normalizer.score_map or normalizer.options.name)
        visible = normalizer.visible(layout).reshape(LENGTH, LENGTH).numpy()
        sums_to_one = normalizer.options.rows_sum_to_one
        for query in range(LENGTH):
            for head in range(len(weights)):
                actual = {name: array[0, block.layer, head, query] for name, array in values.by_query.items()}
                row, keys = weights[head, query], visible[query]
                if keys.sum() < MIN_KEYS or not np.abs(row).sum():
                    assert all(
                        np.isnan(value)
                        for name, value in actual.items()
                        if name not in (NOT_FINITE_FRACTION, NO_WEIGHT_FRACTION)
                    ), actual
                    continue
                expected = naive(row, keys, query - positions[query], query, sums_to_one)
                expected["ln Z"] = np.log(unnormalized(scores[head, query, keys]).sum()) if unnormalized else math.nan
                if normalizer.score_map != "features":
                    slope = -float(normalizer.log_decay(q)[head])
                    places = np.flatnonzero(keys)
                    without_decay = scores[head, query, keys] + slope * (query - places)
                    is_first = places == query - positions[query]
                    expected |= moments(normalizer.score_map, without_decay, slope, is_first)
                if "S, closed form" in expected:
                    expected["S minus closed form"] = expected["S"] - expected["S, closed form"]
                assert values.n_visible_keys_by_query[0, block.layer, query] == expected.pop("n")
                for name, value in expected.items():
                    if "entropy" in name and (row < 0).any():
                        continue
                    tolerance = {"rel": 1e-5, "abs": 1e-5, "nan_ok": name == "ln Z"}
                    if name.startswith("keys with"):
                        is_counted = keys & (np.arange(LENGTH) != query - positions[query]) if "first" in name else keys
                        a = np.sort(np.abs(row[is_counted]))[::-1]
                        is_tie = np.abs(a.cumsum() / a.sum() - 0.95).min() < 1e-5  # a sum that is .95 but for rounding
                        tolerance = {"abs": float(is_tie)}
                    assert actual[name] == pytest.approx(value, **tolerance), (name, block.layer, head, query)
                    compared += 1
    return compared


CASES = [
    ("ssmax", "attention", False),
    ("relu2", "gau", False),
    ("entmax15", "attention", True),
    ("window", "attention", False),
    ("alibi", "attention", True),
]
SLOW = [
    (name, block, isolated)
    for name in catalogue.OPTIONS_BY_NAME
    for block in ("attention", "gau")
    for isolated in (False, True)
]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "block", "isolated"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES],
)
def test_streamed_statistics_equal_the_dense_definition(name: str, block: str, isolated: bool):
    options = opt.Window(size=40) if name == "window" else kinds.NORMALIZER_OPTIONS[name]()
    assert agrees_with_naive(make_decoder(options, block), batch(isolated)) > 100


@torch.no_grad()
def test_rows_without_weight_or_with_scores_that_are_not_finite_are_counted_and_describe_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    decoder = make_decoder(opt.Relu2())
    scores = type(decoder.normalizers()[0]).define_scores

    def odd(self, q: Tensor, k: Tensor, layout) -> Tensor:
        result = scores(self, q, k, layout)
        # the last query of the first head has no weight, of the second a score that is no number
        result[:, 0, -1] = -1.0
        result[:, 1, -1, 3] = math.nan
        return result

    monkeypatch.setattr(type(decoder.normalizers()[0]), "define_scores", odd)
    values = measured(decoder, batch())
    for name, array in values.by_query.items():
        last = array[0, :, :, -1].tolist()
        if name in (NOT_FINITE_FRACTION, NO_WEIGHT_FRACTION):
            assert last == [[name == NO_WEIGHT_FRACTION, name == NOT_FINITE_FRACTION]] * 2
        else:
            assert np.isnan(last).all(), name
    assert values.n_visible_keys_by_query[0, 0, -1] == LENGTH


def test_an_exponent_is_that_of_a_power_law_and_needs_two_octaves():
    n = np.geomspace(32, 512, 20)[None, None]
    values = np.stack([3 * n[0] ** 0.7, 5 / n[0]], 1)[None]  # (1, 1, 2, 20)
    exponents, fit = fit_head_exponents_and_r2(values, n)
    assert exponents.tolist() == [pytest.approx([0.7, -1.0])]
    assert fit.tolist() == [pytest.approx([1.0, 1.0])]
    assert np.allclose(fit_head_exponents_and_r2(np.log(values), n, is_log=True)[0], exponents)
    assert np.isnan(fit_head_exponents_and_r2(values[..., :9], n[..., :9])[0]).all()
    values[0, 0, 0, :5] = math.nan, 0.0, -1.0, math.inf, math.nan
    assert fit_head_exponents_and_r2(values, n)[0].tolist() == [pytest.approx([0.7, -1.0])]


def test_queries_are_spread_over_octaves_and_ranges_of_keys_end_at_the_training_length():
    assert log_spaced_queries(1024, 6) == [31, 63, 127, 255, 511, 1023]
    assert log_spaced_queries(MIN_KEYS, 64) == [31]
    assert log_spaced_queries(MIN_KEYS - 1, 64) == []
    n = np.array([32.0, 90, 91, 128, 129, 256, math.nan])
    assert half_octave_ranges(n, 128) == [(32, 32), (65, 91), (92, 128), (129, 181), (182, 256)]


@torch.no_grad()
def test_a_description_is_of_the_model_and_the_untrained_one_under_each_setting():
    """Over sequences of which one has fewer queries that see enough keys, and beyond the training length."""
    train_length, length = 128, 256
    decoder = Decoder(
        ModelConfig(n_layer=2, n_head=3, n_embd=24, normalizer=opt.LogN(), init_std=0.3), VOCAB, train_length, seed=1
    ).eval()
    tokens = np.random.default_rng(0).integers(1, VOCAB, (3, length + 1))
    tokens[2, 100] = 0
    held_out = HeldOutSequences(tokens, np.ones(VOCAB, np.float32), np.array([0, 0, 1]), end_of_text_id=0)
    settings = [InferenceSetting(), InferenceSetting(ThetaFactor(factor=1e4), normalizer={"n": "fixed:2"})]
    config = DiagnosticsConfig(sequences=3, queries=16, statistics=["concentration"], inference=settings)
    blocks = diagnostic_rows(decoder, held_out, config, Device(torch.device("cpu"), bf16=False), 7, "")
    curves = curves_of(make_evaluation(join_rows(blocks), seq_len=train_length))
    measures = AttentionMeasurement(statistics_of(config), 2, 3, log_spaced_queries(length, 16), length)
    untrained = Decoder(decoder.config, VOCAB, train_length, seed=7)
    name = "effective keys"
    for setting, words in zip(settings, ("", f", {settings[1].label}"), strict=True):
        model, other = (with_inference_setting(each, setting).eval() for each in (decoder, untrained))
        expected = {setting.label: model, f"untrained weights{words}": other}
        for label, each in expected.items():
            vectors = [measures.measure_statistics(each, held_out.batch([index])) for index in range(3)]
            values = measures.split_vectors(torch.stack(vectors).numpy())
            by_query = values.by_query[name]
            number, by_keys, *by_layer = (curve for curve in curves if (curve.metric, curve.setting) == (name, label))
            assert number.means[0] == pytest.approx(np.nanmean(by_query), rel=1e-5)
            (sample,) = number.points
            assert np.average(sample.values, weights=sample.weights) == pytest.approx(number.means[0], rel=1e-5)
            key_counts = values.n_visible_keys_by_query
            n = np.broadcast_to(key_counts[:, :, None], by_query.shape)
            for column, (low, high) in enumerate(half_octave_ranges(key_counts, train_length)):
                means = [by_query[index][(n[index] >= low) & (n[index] <= high)] for index in range(3)]
                assert by_keys.means[column] == pytest.approx(
                    np.mean([part.mean() for part in means if len(part)]), rel=1e-5
                )
            exponents = fit_head_exponents_and_r2(by_query, np.where(key_counts <= train_length, key_counts, np.nan))[0]
            slopes = [
                curve
                for curve in curves
                if (curve.metric, curve.setting) == (f"exponent of {name}", label) and curve.axis
            ]
            for layer in range(2):
                assert by_layer[layer].means == pytest.approx(np.nanmean(by_query[:, layer], (0, 2)), rel=1e-5)
                assert slopes[layer].means == pytest.approx(exponents[layer], rel=1e-4)


# ---------------------------------------------------------------- commands

ASKED = "eval.diagnostics={sequences: 3, queries: 8}"


def strict(path: Path) -> dict:
    """JSON without NaN and infinities."""
    return json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{path}: {text}"))


def test_no_sequence_of_a_task_is_read_twice(tiny):
    few = (
        "data.tasks=[{task: {name: mqar, pairs: 2, queries: 2}}]",
        "eval={long_context: {length_factor: 0}, recall: {length_factors: []}}",
    )
    config = tiny(*few, "eval.sequences=8", "eval.diagnostics={sequences: 16, queries: 4}")
    store = prepare(config.data)
    assert len(np.unique(diagnostic_sequences(store, config, config.eval.diagnostics).sequences, axis=0)) == 8


def test_runs_checkpoints_exports_and_models_without_training_are_described(arguments: list[str], tmp_path: Path):
    run, out = tmp_path / "runs" / "relu", tmp_path / "numbers.json"
    options = ["name=relu", "model.normalizer=relu", "data.seq_len=64", "eval.long_context.length_factor=0", ASKED]
    assert lm("train", *arguments, *options).returncode == 0
    assert [path.name for path in (run / "evaluations").glob("diagnostics.*")] == ["diagnostics.step-000008.csv"]
    (logged,) = [line for line in metric_lines(run) if "diagnostics/effective keys" in line]
    assert logged["step"] == 8

    result = lm("diagnose", str(run), "-o", str(out))
    assert result.returncode == 0, result.stderr
    assert "diagnostics, relu, step 8 (cached)" in result.stdout
    rows = strict(out)
    value = {row["quantity"]: row["value"] for row in rows if row["setting"] == "as trained" and not row["where"]}
    assert value["effective keys"] == pytest.approx(logged["diagnostics/effective keys"])
    assert {row["setting"] for row in rows} == {"as trained", "untrained weights"}
    assert {"exact zeros, no first", "sum of weights", "ln Z"} <= value.keys()
    assert "entropy" not in value, "the weights do not sum to one"

    exported = tmp_path / "exported"
    assert lm("export", str(run), "-o", str(exported)).returncode == 0
    for source in (exported, last_checkpoint(run)):
        result = lm("diagnose", str(source), ASKED, "-o", str(out))
        assert result.returncode == 0, result.stderr
        values_again = {
            row["quantity"]: row["value"] for row in strict(out) if row["setting"] == "as trained" and not row["where"]
        }
        assert values_again == pytest.approx(value, nan_ok=True)

    bare = save_model(load_model(run).decoder, tmp_path / "bare", run / "tokenizer.json")
    assert "name a configuration of text" in lm("diagnose", str(bare)).stderr
    result = lm("diagnose", str(bare), str(run / "config.yaml"), "eval.diagnostics.queries=4", "-o", str(out))
    assert result.returncode == 0, result.stderr
    assert {row["step"] for row in strict(out)} == {0}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("eval.diagnostics.length_factor=0.9", "makes sequences of 29 tokens, in which no query sees the 32 keys"),
        ("eval.diagnostics.length_factor=4000", "needs held-out documents of 128,001 tokens, the longest has "),
        ("eval.diagnostics.statistics=[]", "must be given"),
        ("eval.sequences=3", "can't be changed in lm diagnose"),
    ],
)
def test_what_can_not_be_described_is_said_in_one_line(override: str, said: str, arguments: list[str], tmp_path: Path):
    run = tmp_path / "runs" / "short"
    assert (
        lm("train", *arguments, "name=short", "trainer.max_steps=2", "eval.long_context.length_factor=0").returncode
        == 0
    )
    result = lm("diagnose", str(run), override)
    assert result.returncode in (1, 2)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list((run / "evaluations").glob("diagnostics.*"))


def test_a_mean_of_too_few_documents_says_why_it_has_no_interval(capsys: pytest.CaptureFixture[str]):
    documents, values = ([0, 1, 2], [0, 1, 1], [0, 1, 2]), ([0.5, 1.0, 1.5], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    about = Metric("", "nats", "lower", "", "change of loss", "documents", True, LENGTH_AXIS)
    points = zip((64, 128, 256), values, documents, strict=True)
    blocks = [
        evaluation_rows(about, np.array([row]).T, sampling_unit_frame("", np.array(groups)), [length])
        for length, row, groups in points
    ]
    print_results([EvaluationResult(Path("runs/one"), make_evaluation(pd.concat(blocks), "swap"), is_cached=False)])
    output = capsys.readouterr().out
    assert "64 tokens " in output
    assert re.search(r"64 tokens +1\.0000 \[-0\.2421, 2\.2421\]", output)
    for length in (128, 256):
        assert re.search(rf"{length} tokens +1\.0000 \(no interval: all agree, or are of fewer than 3", output)
