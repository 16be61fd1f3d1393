"""The family `limits`: lemmas and theorems of arXiv 2508.17821 on random cases, by plain loops and dense Jacobians."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.options import Options
from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.diagnostics import limits
from lm.diagnostics.attention_rows import AttentionMeasurement, AttentionRows, MeasuredValues
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder

VOCAB, LENGTH, HEADS, LAYERS = 40, 96, 3, 2
QUERIES = list(range(31, LENGTH, 8))


def decoder(normalizer: Options) -> Decoder:
    config = ModelConfig(n_layer=LAYERS, n_head=HEADS, n_embd=24, normalizer=normalizer, init_std=0.5)
    return Decoder(config, VOCAB, 64).eval()


def batch(index: int = 0) -> Batch:
    return Batch.from_sequences(
        torch.randint(0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    )


@torch.no_grad()
def rows_of(normalizer: Options, queries: list[int] = QUERIES) -> list[AttentionRows]:
    """Of each layer."""
    model, sample = decoder(normalizer), batch()
    return [
        AttentionRows.from_block(block, model.embedding(sample.tokens))
        for block in attention_blocks(model, sample, queries)
    ]


def measured(normalizer: Options) -> MeasuredValues:
    """Values of one sequence."""
    measures = AttentionMeasurement(limits.limit_statistics(), LAYERS, HEADS, QUERIES, LENGTH)
    model = decoder(normalizer)
    return measures.split_vectors(measures.measure_statistics(model, batch()).numpy()[None])


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
            for function in (
                limits.log_n_times_largest_weight,
                limits.log_n_times_smallest_weight,
                limits.log_n_times_weight_bound,
            )
        )
        assert bool((largest <= bound + 1e-5).all() and (smallest >= -bound - 1e-5).all())
        assert bool((largest >= -1e-5).all() and (smallest <= 1e-5).all())
        tightest = max(tightest, (largest / bound).max().item())
    assert tightest > 0.3


# Of the default options and initial values: p_n and qassmax learn to depend on the length, llama4 does from 8,192
# tokens on.
APPLIES = {"softmax", "cosine", "window", "alibi", "scale_invariant", "forget", "softcap", "p_n", "qassmax", "llama4"}


@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_lemma_1_applies_to_positive_functions_that_know_no_length(name: str):
    rows = rows_of(catalogue.OPTIONS_BY_NAME[name](), [LENGTH - 1])[0]
    assert limits.weight_bound_applies(rows) == (name in APPLIES)
    assert (limits.log_n_times_weight_bound(rows) is None) == (name not in APPLIES)


@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_the_norm_of_the_jacobian_stays_below_its_bound(name: str):
    for rows in rows_of(catalogue.OPTIONS_BY_NAME[name]()):
        bound = limits.jacobian_norm_bound(rows)
        if bound is None:
            assert rows.normalizer.score_map != "exp"
            continue
        norm = limits.jacobian_norm(rows)
        assert bool((norm <= bound * (1 + 1e-4))[rows.defined_row_mask].all())


def test_the_norm_of_the_jacobian_is_exact_of_rows_of_nearly_one_key():
    rows = rows_of(opt.Softmax(), QUERIES[-1:])[0]
    scores = torch.randn(rows.scores.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~rows.visible, 0.0)
    scores[..., 0] = 15.0
    a = scores.double().masked_fill(~rows.visible, -math.inf).softmax(-1)
    exact = torch.linalg.matrix_norm(torch.diag_embed(a) - a.unsqueeze(-1) * a.unsqueeze(-2), 2)
    norm = limits.jacobian_norm(replace(rows, scores=scores))
    assert exact.max() < 1e-3
    assert torch.allclose(norm.double(), exact, rtol=1e-5, atol=0.0)


# ---------------------------------------------------------------- Lemma 2 on dense Jacobians


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_the_spectral_norm_is_the_largest_singular_value_of_every_normalizer(name: str):
    keys = 24
    normalizer = catalogue.make_normalizer(catalogue.OPTIONS_BY_NAME[name](), LayerSpec(2, 8, 16, 64)).double()
    layout = AttentionLayout.full(keys).select(torch.arange(keys - 4, keys), keys)
    scores = torch.randn(1, 2, 4, keys, generator=seeded(), dtype=torch.float64) + 0.5

    def normalize(values: torch.Tensor) -> torch.Tensor:
        return normalizer.normalize(values, layout)

    norms = limits.spectral_norm(normalize, scores, layout.visible(), steps=100)
    # (S', 1, H, T, S)
    dense = torch.autograd.functional.jacobian(lambda values: normalize(values).sum((0, 1, 2)), scores)
    expected = torch.linalg.matrix_norm(dense.permute(1, 2, 3, 0, 4), 2)
    assert torch.allclose(norms, expected, rtol=2e-2)
    assert bool((norms <= expected * (1 + 1e-9)).all())


# ---------------------------------------------------------------- Theorems 1 and 2


def row(
    rng: np.random.Generator, keys: int, size: int, scale: float = 2.0, unit: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax weights of Gaussian scores (keys,), and Gaussian vectors (keys, size), of length 1 if `unit`."""
    x = rng.standard_normal((keys, size))
    if unit:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    a = np.exp(rng.standard_normal(keys) * scale)
    return a / a.sum(), x


def distance(a: np.ndarray, x: np.ndarray, indices: np.ndarray) -> float:
    """d~ as its definition says."""
    s = (a[indices, None] * x[indices]).sum(0)
    return sum(np.linalg.norm(a[i] * x[i] - s) for i in range(len(a)) if i not in set(indices.tolist()))


def of_row(function, a: np.ndarray, x: np.ndarray, count: int) -> list[float]:
    """Each quantity of a single row."""
    mask = torch.ones(1, len(a), dtype=torch.bool)
    return [value.item() for value in function(torch.tensor(a)[None, None], mask, torch.tensor(x), count)]


@pytest.mark.parametrize("count", [1, 3, 8, 49])
def test_the_largest_weights_as_in_plain_loops(count: int):
    a, x = row(np.random.default_rng(0), 50, 8, unit=False)
    best, far_keys = np.argsort(-a)[:count], np.argsort(-a)[count:]
    far = np.linalg.norm(a[:, None] * x - (a[best, None] * x[best]).sum(0), axis=1)
    longest = np.linalg.norm(x[best], axis=1).max()
    gap = np.linalg.norm(x[far_keys][:, None] - x[best], axis=-1).max()
    bound = (1 - a[best].sum()) * gap + ((50 - count + 1) * a[best].sum() - 1) * longest
    expected = [distance(a, x, best), bound, (far[best] <= far[far_keys].min()).mean()]
    assert of_row(limits.measure_top_keys, a, x, count) == pytest.approx(expected, rel=1e-6)


def test_the_bound_on_the_distance_of_the_largest_weights_holds_in_2000_cases():
    """Also for weights that do not sum to one."""
    rng = np.random.default_rng(1)
    tightest = 0.0
    for _ in range(100):  # each with twenty rows of weights
        keys, size = int(rng.integers(4, 120)), int(rng.integers(2, 48))
        _, x = row(rng, keys, size, unit=rng.random() < 0.5)
        scores = torch.tensor(rng.standard_normal((1, 20, keys)) * rng.uniform(0.1, 6))
        weights = scores.softmax(-1) * rng.choice([0.01, 1.0, 30.0])
        visible = torch.ones(20, keys, dtype=torch.bool)
        x = torch.tensor(x * rng.uniform(0.1, 3))
        result = limits.measure_top_keys(weights, visible, x, int(rng.integers(1, keys)))
        ratio = (result.other_keys_distance_to_sum / result.other_keys_distance_bound).max().item()
        assert ratio <= 1 + 1e-9
        tightest = max(tightest, ratio)
    assert tightest > 0.9  # the bound is no formality


@pytest.mark.parametrize("count", [1, 7, 29])
def test_expectations_as_the_closed_forms_say(count: int):
    a, x = row(np.random.default_rng(4), 30, 6, unit=False)
    y, c, fraction, upper = a[:, None] * x, count / 29, (30 - count) / 30, 0.0
    lower = fraction * np.linalg.norm((1 + c) * y - c * y.sum(0), axis=1).sum()
    for i in range(30):
        rest = np.delete(y, i, 0)
        spread = count * (29 - count) / (29 * 28) * ((rest**2).sum() - (rest.sum(0) ** 2).sum() / 29)
        upper += fraction * np.sqrt((((1 + c) * y[i] - c * y.sum(0)) ** 2).sum() + spread)
    assert of_row(limits.bound_random_keys, a, x, count) == pytest.approx([lower, upper], rel=1e-9)


def test_more_keys_than_a_query_sees_are_no_number():
    a, x = row(np.random.default_rng(6), 8, 4)
    results = [of_row(limits.measure_top_keys, a, x, count) for count in (7, 8, 9, 20)]
    assert [math.isnan(distance) for distance, _, _ in results] == [False, False, True, True]
    assert results[1][0] == 0  # nothing is left out
    assert [math.isnan(separable) for _, _, separable in results] == [False, True, True, True], "no other key is nearer"
    assert [math.isnan(of_row(limits.bound_random_keys, a, x, count)[0]) for count in (8, 9)] == [False, True]
    assert math.isnan(of_row(limits.measure_top_keys, -a, x, 2)[1]), "the bound is of weights that are not negative"


@pytest.mark.parametrize("name", ["softmax", "sink", "relu2", "window"])
def test_the_family_measures_the_tokens_embeddings(name: str):
    options = catalogue.OPTIONS_BY_NAME[name]()
    values = measured(options).by_query
    for rows in rows_of(options):
        x = rows.token_embeddings[0] / rows.token_embeddings[0].norm(dim=-1, keepdim=True)
        for head, query in product(range(HEADS), range(len(QUERIES))):
            keys = rows.visible[query].nonzero().flatten()
            a = rows.weights[head, query, keys].double().numpy()
            for count in limits.TOP_KEY_COUNTS if a.any() else ():
                best = np.argsort(-np.abs(a), kind="stable")[:count]
                expected = distance(a, x[keys].double().detach().numpy(), best) if count <= len(keys) else math.nan
                value = values[f"d~ of the {count} largest weights"][0, rows.layer, head, query]
                assert value == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_what_is_measured_does_not_depend_on_how_many_queries_fit_in_memory(monkeypatch: pytest.MonkeyPatch):
    expected = measured(opt.Softmax()).by_query
    monkeypatch.setattr("lm.model.attention_stream.MAX_BLOCK_WEIGHTS", 5 * 3 * LENGTH)  # five queries at a time
    for name, values in measured(opt.Softmax()).by_query.items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-5, nan_ok=True), name
    norms = expected["norm of the Jacobian"]
    assert (np.isfinite(norms[..., ::-1]) == (np.arange(len(QUERIES)) % limits.QUERY_STRIDE == 0)).all()
