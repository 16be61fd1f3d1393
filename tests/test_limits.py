"""The family `limits`: the lemmas on random cases, sums against plain loops, and what is undefined."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config.eval_config import LimitsConfig
from lm.config.model_config import GAUBlock, ModelConfig
from lm.data.batches import Batch
from lm.diagnostics import lemmas
from lm.diagnostics.attention_rows import AttentionRows, MeasuredValues, Measures
from lm.diagnostics.limits import (
    DISTANCES,
    TESTED_EXPECTATIONS,
    Theorems,
    critical_count,
    few_key_counts,
    head_mean_samples,
    limit_statistics,
    many_key_counts,
    octaves,
    query_means,
    totals_and_counts,
    two_sample_tests,
)
from lm.evaluation.diagnostic_pictures import diagnostics_picture
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.runs.evaluations import Axis, Series, Shown

VOCAB, LENGTH, HEADS, LAYERS = 40, 96, 3, 2
QUERIES = list(range(31, LENGTH, 8))


def decoder(normalizer: Options, block: str = "attention") -> Decoder:
    shape = {"n_head": 1, "block": GAUBlock(key_size=8)} if block == "gau" else {"n_head": HEADS}
    return Decoder(
        ModelConfig(n_layer=LAYERS, n_embd=24, normalizer=normalizer, init_std=0.5, **shape), VOCAB, 64
    ).eval()


def batch(index: int = 0) -> Batch:
    return Batch.of(torch.randint(0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index)))


@torch.no_grad()
def rows_of(normalizer: Options, queries: list[int] = QUERIES, block: str = "attention") -> list[AttentionRows]:
    """Of each layer."""
    model, sample = decoder(normalizer, block), batch()
    return [
        AttentionRows.from_block(block, model.embedding(sample.tokens), 0)
        for block in attention_blocks(model, sample, queries, with_inputs=True)
    ]


def measured(
    normalizer: Options, sequences: int = 2, block: str = "attention", **options: object
) -> tuple[MeasuredValues, list]:
    """Values of some sequences, and what is derived of them."""
    statistics, model = (
        limit_statistics(LimitsConfig(**{"temperatures": [0.1, 10.0], "directions": 2} | options), query_stride=1),
        decoder(normalizer, block),
    )
    measures = Measures((statistics,), LAYERS, model.normalizers()[0].layer.n_head, QUERIES, LENGTH)
    vectors = np.stack([measures.vectors(model, batch(index), index)[0].numpy() for index in range(sequences)])
    values = measures.values(vectors, model.seq_len)
    return values, statistics.derive(values)


def random_rows(number: int) -> AttentionRows:
    """100 rows of softmax of several temperatures, Gaussian scores of several widths."""
    first, generator = rows_of(opt.Softmax(), [LENGTH - 1])[0], torch.Generator().manual_seed(number)
    scores = torch.randn(1, 100, LENGTH, generator=generator) * 10 ** (
        2 * torch.rand(1, 100, 1, generator=generator) - 1
    )
    visible = torch.rand(100, LENGTH, generator=generator) < torch.rand(100, 1, generator=generator)
    visible[:, 0] = True
    return replace(first, scores=scores, weights=scores.masked_fill(~visible, -math.inf).softmax(-1), visible=visible)


def test_lemma_1_holds_in_2000_random_rows():
    tightest = 0.0
    for number in range(20):
        rows = random_rows(number)
        largest, smallest, bound = (
            function(rows)
            for function in (lemmas.log_of_n_times_largest, lemmas.log_of_n_times_smallest, lemmas.log_c2)
        )
        assert bool((largest <= bound + 1e-5).all() and (smallest >= -bound - 1e-5).all())
        assert bool((largest >= -1e-5).all() and (smallest <= 1e-5).all())
        tightest = max(tightest, (largest / bound).max().item())
    assert tightest > 0.3


def test_corollary_1_holds_in_2000_random_rows():
    """ln C2 = 2 |q| max |k| / T for softmax(q.k / T), which is no less than the lemma's."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2_000, 16, generator=generator), torch.randn(50, 16, generator=generator)
    temperature = 0.1 + 8 * torch.rand(2_000, 1, generator=generator)
    a = (q @ k.T / temperature).double().softmax(-1)
    bound = 2 * q.norm(dim=-1) * k.norm(dim=-1).max() / temperature.squeeze(1)
    assert bool((50 * a.amax(-1)).log().le(bound + 1e-6).all())
    assert bool((50 * a.amin(-1)).log().ge(-bound - 1e-6).all())


# Of the default options and initial values: p_n and qassmax learn to depend on the length, llama4 does from 8,192
# tokens on.
APPLIES = {"softmax", "cosine", "window", "alibi", "scale_invariant", "forget", "softcap", "p_n", "qassmax", "llama4"}


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_lemma_1_applies_to_positive_functions_that_know_no_length(name: str):
    rows = rows_of(catalogue.ENTRIES[name](), [LENGTH - 1])[0]
    assert lemmas.lemma_1_applies(rows) == (name in APPLIES)
    assert (lemmas.log_c2(rows) is None) == (name not in APPLIES)


@pytest.mark.parametrize(
    ("options", "applies"),
    [
        (opt.Cosine(log_n=True), False),
        (opt.Softmax(temperature=0.5), True),
        (opt.SSMax(n="fixed:64"), True),
        (opt.SSMax(), False),
    ],
)
def test_options_decide_whether_lemma_1_applies(options: Options, applies: bool):
    assert lemmas.lemma_1_applies(rows_of(options, [LENGTH - 1])[0]) == applies


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_the_norm_of_the_jacobian_stays_below_its_bound(name: str):
    for rows in rows_of(catalogue.ENTRIES[name]()):
        bound = lemmas.jacobian_ceiling(rows)
        if bound is None:
            assert not rows.normalizer.score_map
            continue
        norm = lemmas.jacobian_norm(rows)
        assert bool((norm <= bound * (1 + 1e-4))[rows.is_defined].all())


def test_the_norm_of_the_jacobian_is_exact_of_rows_of_nearly_one_key():
    rows = rows_of(opt.Softmax(), QUERIES[-1:])[0]
    scores = torch.randn(rows.scores.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~rows.visible, 0.0)
    scores[..., 0] = 15.0
    a = scores.double().masked_fill(~rows.visible, -math.inf).softmax(-1)
    exact = torch.linalg.matrix_norm(torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2), 2)
    norm = lemmas.jacobian_norm(replace(rows, scores=scores))
    assert exact.max() < 1e-3
    assert torch.allclose(norm.double(), exact, rtol=1e-5, atol=0.0)


def test_elementwise_attention_reaches_its_bound():
    rows = rows_of(opt.Relu2())[0]
    norm = lemmas.jacobian_norm(rows)
    expected = 2 * rows.scores.masked_fill(~rows.visible, 0.0).relu().amax(-1) / rows.n
    assert torch.allclose(lemmas.jacobian_ceiling(rows), expected, rtol=1e-4)
    assert torch.allclose(norm, expected, rtol=0.05)


CASES = [
    (opt.Softmax(), "attention", {}), (opt.Softmax(), "attention", {"vectors": "value", "unit": False}),
    (opt.Sink(), "attention", {"vectors": "input", "first_token": False}), (opt.Relu2(), "gau", {"vectors": "value"}),
]  # fmt: skip
SLOW = [(entry(), block, {}) for entry in catalogue.ENTRIES.values() for block in ("attention", "gau")]


@pytest.mark.parametrize(
    ("options", "block", "asked"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_sums_are_those_of_plain_loops(options: Options, block: str, asked: dict[str, object]):
    values, _ = measured(options, 1, block, **asked)
    counts, numbers = many_key_counts(LENGTH), few_key_counts(LENGTH)
    distances = query_means(values.sums["distances"][0])
    separable = query_means(values.sums["separability"][0])
    first = 0 if asked.get("first_token", True) else 1
    for rows in rows_of(options, block=block):
        for (octave, (low, high)), head in product(enumerate(octaves(LENGTH)), range(len(rows.weights))):
            top, ratios = [], []  # ratios: without distances that fp32 can't tell apart, and with them
            for query in range(len(QUERIES)):
                keys = rows.visible.expand(len(rows.weights), len(QUERIES), -1)[head, query].nonzero().flatten()
                keys = keys[keys >= first]
                a = rows.weights[head, query, keys].double()
                if not low <= len(keys) <= high or not a.any():
                    continue
                x = {"embedding": rows.embedding[0], "input": rows.inputs.x[0], "value": rows.inputs.v[0, head]}
                x = x[asked.get("vectors", "embedding")][keys].double()
                x = x / x.norm(dim=-1, keepdim=True) if asked.get("unit", True) else x
                order = a.abs().argsort(descending=True, stable=True)
                for count in (5, 8):
                    s = (a[order[:count], None] * x[order[:count]]).sum(0)
                    far = (a[:, None] * x - s).norm(dim=-1)
                    nearest, rest = far[order[:count]], far[order[count:]]
                    if count == 5:
                        top.append(rest.sum().item())
                    else:
                        ratios.append(
                            [(nearest <= rest.min() * factor).double().mean().item() for factor in (1 - 1e-6, 1 + 1e-6)]
                        )
            if top:
                assert distances[octave, 0, counts.index(5), rows.layer, head] == pytest.approx(np.mean(top), rel=1e-4)
                least, most = np.mean(ratios, axis=0)
                assert least - 1e-6 <= separable[octave, 0, numbers.index(8), rows.layer, head] <= most + 1e-6


def test_what_is_measured_does_not_depend_on_how_many_queries_fit_in_memory(monkeypatch: pytest.MonkeyPatch):
    model, statistics = (
        decoder(opt.Softmax()),
        limit_statistics(LimitsConfig(temperatures=[0.1], directions=2), query_stride=3),
    )
    measures = Measures((statistics,), LAYERS, model.normalizers()[0].layer.n_head, QUERIES, LENGTH)
    expected = measures.vectors(model, batch())[0]
    monkeypatch.setattr("lm.model.attention_stream.BLOCK_WEIGHTS", 5 * 3 * LENGTH)  # five queries at a time
    places = np.cumsum([math.prod(shape) for shape in measures.shapes])
    random = slice(*places[:2])  # distances of keys drawn at random, other ones in each block
    actual = measures.vectors(model, batch())[0]
    expected[random], actual[random] = 0.0, 0.0
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_a_key_is_separable_by_at_least_as_many_heads_together():
    _, derived = measured(opt.Softmax())
    curves = {(curve.name, curve.label): curve.values for curve in derived}
    shares = curves["keys that at least one head separates", "measured"]
    assert bool((shares >= curves["N_s / N", "N_s / N"] - 1e-6).all())
    assert bool(((curves["heads that choose a key", ""] >= 1) & (curves["heads that choose a key", ""] <= HEADS)).all())


def test_what_is_derived_follows_from_the_sums():
    values, derived = measured(opt.Softmax(), sample_size=LAYERS * HEADS)
    curves, counts = {(curve.name, curve.label): curve for curve in derived}, many_key_counts(LENGTH)
    p = query_means(values.sums["separability"].sum(0))[-1][0].mean(-1)  # (N, layers)
    assert curves["keys that at least one head separates", "1 - (1 - p)^H"].values == pytest.approx(
        (1 - (1 - p) ** HEADS).mean(-1)
    )
    total, rows = totals_and_counts(values.sums["distances"].sum(0))  # (octaves, quantities, N, layers, H)
    with np.errstate(invalid="ignore"):
        by_head = (total / rows).reshape(*total.shape[:3], -1)
    for number, label in enumerate(DISTANCES):
        assert curves["d~ of 5 keys", label].values[-1] == curves["d~", label].values[counts.index(5)]
        for octave, (low, high) in enumerate(octaves(LENGTH) if number in TESTED_EXPECTATIONS else ()):
            statistic, p = two_sample_tests(by_head[octave, 0].T, by_head[octave, number].T)
            n = values.n[(values.n >= low) & (values.n <= high)].mean()
            for level in (0.01, 0.05):
                fractions = curves["critical N / visible keys", f"{label}, level {level:g}"].values
                assert fractions[octave] == pytest.approx(critical_count(p, counts, level) / n, nan_ok=True)
        if number in TESTED_EXPECTATIONS:  # in the last octave
            assert curves["D of the largest weights", f"to {label}, {LAYERS * HEADS} values"].values == pytest.approx(
                statistic
            )


def test_samples_deal_the_sequences_into_as_many_groups_as_the_size_takes():
    sums, rows = np.arange(8.0).reshape(4, 2, 1), np.array([1.0, 2.0, 3.0, 4.0])[:, None, None] * np.ones((4, 2, 1))
    expected = [(0 + 4) / 4, (1 + 5) / 4, (2 + 6) / 6, (3 + 7) / 6]
    assert head_mean_samples(sums, rows, 4).ravel() == pytest.approx(expected)
    assert head_mean_samples(sums, rows, 2).ravel() == pytest.approx([12 / 10, 16 / 10])


@pytest.mark.parametrize(
    ("p", "expected"), [((0.001, 0.04, 0.2, 0.03), 3), ((0.5, 0.001), 1), ((0.01, 0.02), math.nan)]
)
def test_the_critical_number_is_the_first_at_which_no_difference_is_shown(p: tuple[float, ...], expected: float):
    assert critical_count(np.array(p), range(1, len(p) + 1), 0.05) == pytest.approx(expected, nan_ok=True)


def test_the_model_itself_has_a_temperature_of_the_root_of_the_head_size():
    values, derived = measured(opt.Softmax(), temperatures=[math.sqrt(8), 1.0])
    (norm,) = (curve.values for curve in derived if curve.label == "spectral norm")
    of_scores = values.by_query["norm of the Jacobian"][..., -1].mean(0).max()  # with respect to logits / sqrt(8)
    assert norm[0] * math.sqrt(8) == pytest.approx(of_scores, rel=1e-2)


@torch.no_grad()
def test_the_jacobian_without_the_first_token_is_that_of_the_other_keys_with_its_score_as_it_is():
    rows = rows_of(opt.Softmax(), [LENGTH - 1])[0]
    scores = rows.scores.clone()
    scores[..., 0] = scores.amax(-1) + 2.0  # a sink
    rows = replace(rows, scores=scores, weights=scores.softmax(-1))
    for first_token in (True, False):
        config = LimitsConfig(first_token=first_token, temperatures=[math.sqrt(8)], steps=[1e-3], directions=64)
        one_direction, largest, norm = Theorems(config).differences(rows, LENGTH)[:, 0, 0, :, 0].T * math.sqrt(8)
        a = rows.weights[:, 0].double()  # (H, S)
        jacobian = (torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2))[:, 1 - first_token :, 1 - first_token :]
        assert torch.allclose(norm, torch.linalg.matrix_norm(jacobian, 2), rtol=1e-3)
        assert ((one_direction <= largest) & (largest <= norm * 1.01)).all()


def test_what_is_derived_has_a_value_for_each_point_of_its_axis():
    _, derived = measured(opt.Softmax(), sample_size=6)
    assert len({(curve.name, curve.label) for curve in derived}) == len(derived)
    for curve in derived:
        assert curve.values.shape == ((len(curve.axis.values),) if curve.axis else (1,)), curve.name
    assert {"d~", "critical N / visible keys", "N_s / N", "change of weights"} <= {curve.name for curve in derived}


def test_finite_differences_of_softmax_stay_below_their_ceiling():
    _, derived = measured(opt.Softmax())
    changes = {curve.label: curve.values for curve in derived if curve.name == "change of weights"}
    for step in (0.001, 0.1, 10.0):
        for temperature, value in zip((0.1, 10.0), changes[f"largest of all directions, step {step:g}"], strict=True):
            assert 0 < value <= min(1 / (2 * temperature), math.sqrt(2) / step)
    assert bool((changes["one direction, step 0.001"] <= changes["largest of all directions, step 0.001"]).all())
    assert bool((changes["largest of all directions, step 0.001"] <= changes["spectral norm"] * 1.02).all())


@pytest.mark.parametrize("name", ["relu2", "softpick", "linear"])
def test_rows_without_weight_and_with_negative_weights_give_numbers_or_nan(name: str):
    options = opt.Linear(features="identity", n="visible") if name == "linear" else catalogue.ENTRIES[name]()
    values, derived = measured(options)
    for curve in derived:
        assert not np.isinf(curve.values).any(), curve.name
    assert np.isfinite(values.sums["distances"]).all()


@torch.no_grad()
def test_scores_that_are_not_finite_leave_the_others_alone():
    model, statistics = (
        decoder(opt.Softmax()),
        limit_statistics(LimitsConfig(temperatures=[1.0], directions=1), query_stride=1),
    )
    measures = Measures((statistics,), LAYERS, HEADS, QUERIES, LENGTH)
    before = measures.values(measures.vectors(model, batch())[0].numpy()[None], 64)
    model.blocks[1].attention.qkv.weight[0] = math.nan  # of the last layer's first head
    after = measures.values(measures.vectors(model, batch())[0].numpy()[None], 64)
    for name, sums in after.sums.items():
        assert np.isfinite(sums).all()
        assert np.array_equal(sums[:, 0], before.sums[name][:, 0])
        assert not np.array_equal(sums[:, 1], before.sums[name][:, 1])
    assert np.isnan(after.by_query["norm of the Jacobian"][:, 1, 0]).all()
    assert np.isfinite(after.by_query["norm of the Jacobian"][:, 1, 1:]).all()


def test_lines_of_one_name_are_drawn_in_a_panel_for_each_model():
    axis, labels = Axis("keys N", "", "for N =", (1.0, 2.0)), Shown("Attention: d~", "sequences", "2 of 8 tokens")
    curves = [
        Series(
            "diagnostics",
            "d~",
            "",
            "none",
            8,
            np.array([1.0, np.nan]),
            what=label,
            setting=setting,
            axis=axis,
            shown=labels,
        )
        for setting in ("as trained", "untrained weights")
        for label in ("largest weights", "random keys, drawn")
    ]
    assert diagnostics_picture(curves).png.startswith(b"\x89PNG")
    assert diagnostics_picture([curve for curve in curves if curve.shown is None]) is None
    assert (
        diagnostics_picture([replace(curve, means=np.full(2, np.nan)) for curve in curves]) is None
    )  # none of its lines is defined
