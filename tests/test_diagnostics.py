"""Statistics of attention: streamed ones equal the dense definition, and what is undefined is said."""

import math

import numpy as np
import pytest
import torch

from lm.attention import catalogue
from lm.attention import options as opt
from lm.attention.options import Options
from lm.config.eval_config import DiagnosticsConfig
from lm.config.model_config import GAUBlock, ModelConfig
from lm.data.batches import Batch
from lm.diagnostics.families import families
from lm.diagnostics.measured import NO_WEIGHT, NOT_FINITE, Measures, orders
from lm.diagnostics.rows import LEAST_KEYS
from lm.diagnostics.statistic import Values
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder, batch_layout

VOCAB, LENGTH, SIZE, ALL = 50, 80, 8, list(range(80))


def make_decoder(normalizer: Options, block: str = "attention") -> Decoder:
    """A decoder with the normalizers' parameters off their initial values."""
    shape = {"n_head": 1, "block": GAUBlock(key_size=SIZE)} if block == "gau" else {"n_head": 2}
    decoder = Decoder(ModelConfig(n_layer=2, n_embd=2 * SIZE, normalizer=normalizer, init_std=0.3, **shape), VOCAB, 64).eval()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for normalizer in decoder.normalizers() for p in normalizer.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=drawn))
    return decoder


def batch(isolated: bool = False) -> Batch:
    """One sequence; `isolated`: a document begins in its middle, which does not see what is before it."""
    tokens = torch.randint(1, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens[0, 35] = 0
    return Batch.of(tokens, end_of_text=0 if isolated else None)


def measured(decoder: Decoder, given: Batch, queries: list[int] = ALL, shuffle: bool = False) -> Values:
    """What concentration's statistics are of one sequence; `shuffle`: of its shuffled scores."""
    heads = decoder.normalizers()[0].layer.n_head
    measures = Measures(families(DiagnosticsConfig()), 2, heads, queries, LENGTH)
    vectors = measures.of(decoder, given, orders(0, len(queries), LENGTH) if shuffle else None)
    return measures.values(vectors[-1][None].numpy(), decoder.seq_len)


def naive(weights: np.ndarray, seen: np.ndarray, first: int, query: int, sums_to_one: bool) -> dict[str, float]:
    """The statistics of one row, from their definitions: weights (S,) fp64 of the keys `seen`, of which `first` begins the document."""

    def described(a: np.ndarray, keys: np.ndarray, ending: str) -> dict[str, float]:
        a, n = np.abs(a), len(a)
        ordered, p = np.sort(a)[::-1], a / a.sum()
        found = {
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
            found |= {"entropy": entropy, "entropy / ln n": entropy / math.log(n)}
        return {name + ending: value for name, value in found.items()}

    keys = np.flatnonzero(seen)
    a, others = weights[keys], keys[keys != first]
    found = {"weight on the first token": np.abs(weights[first]) / np.abs(a).sum() if seen[first] else 0.0, "n": len(keys)}
    if not sums_to_one:
        found["sum of weights"] = a.sum()
    return found | described(a, keys, "") | (described(weights[others], others, ", no first") if np.abs(weights[others]).sum() else {})


def agrees_with_naive(decoder: Decoder, given: Batch) -> int:
    """Compare all rows of all layers and heads with the dense definition in fp64; how many numbers were compared."""
    values, compared, layout = measured(decoder, given), 0, batch_layout(given)
    positions = layout.positions.reshape(-1).tolist()
    for block in attention_blocks(decoder, given, [0], inputs=True):
        normalizer, inputs = block.normalizer, block.inputs
        weights = normalizer.weights(inputs.q.double(), inputs.k.double(), layout)[0].detach().numpy()
        visible = normalizer.visible(layout).reshape(LENGTH, LENGTH).numpy()
        one = normalizer.options.sums_to_one or getattr(normalizer.options, "n", "") == "sum"
        for query in range(LENGTH):
            for head in range(len(weights)):
                found = {name: array[0, block.layer, head, query] for name, array in values.by_query.items()}
                row, seen = weights[head, query], visible[query]
                if seen.sum() < LEAST_KEYS or not np.abs(row).sum():
                    assert all(np.isnan(value) for name, value in found.items() if name not in (NOT_FINITE, NO_WEIGHT)), found
                    continue
                expected = naive(row, seen, query - positions[query], query, one)
                assert values.n[0, block.layer, query] == expected.pop("n")
                for name, value in expected.items():
                    if "entropy" in name and (row < 0).any():
                        continue
                    tolerance = {"rel": 1e-5, "abs": 1e-5}
                    if name.startswith("keys with"):  # a sum that is .95 but for rounding
                        tolerance = {"abs": 1}
                    assert found[name] == pytest.approx(value, **tolerance), (name, block.layer, head, query)
                    compared += 1
    return compared


CASES = [("ssmax", "attention", False), ("relu2", "gau", False), ("entmax15", "attention", True), ("window", "attention", False)]
SLOW = [(name, block, isolated) for name in catalogue.ENTRIES for block in ("attention", "gau") for isolated in (False, True)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "block", "isolated"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES]
)
def test_streamed_statistics_equal_the_dense_definition(name: str, block: str, isolated: bool):
    options = opt.Window(size=40) if name == "window" else catalogue.OPTIONS[name]()
    assert agrees_with_naive(make_decoder(options, block), batch(isolated)) > 100
