"""Moments, closed forms and what positions explain, measured of decoders: streamed ones equal a dense computation."""

import numpy as np
import pytest
import torch

from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config.eval_config import DiagnosticsConfig
from lm.config.model_config import GAUBlock, ModelConfig
from lm.data.batches import Batch
from lm.diagnostics import sparsity
from lm.diagnostics.attention_rows import AttentionMeasurement, AttentionRows, MeasuredValues
from lm.evaluation.diagnostics import statistics_of
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder

VOCAB, LENGTH, LAYERS, HEADS, SIZE = 50, 96, 2, 2, 8
QUERIES = list(range(40, LENGTH, 5))


def make_decoder(normalizer: Options, block: str = "attention", std: float = 0.3) -> Decoder:
    shape = {"n_head": 1, "block": GAUBlock(key_size=SIZE)} if block == "gau" else {"n_head": HEADS}
    return Decoder(
        ModelConfig(n_layer=LAYERS, n_embd=2 * SIZE, normalizer=normalizer, init_std=std, **shape), VOCAB, 64
    ).eval()


def batch() -> Batch:
    return Batch.from_sequences(torch.randint(1, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0)))


def measured(decoder: Decoder) -> MeasuredValues:
    heads = decoder.normalizers()[0].layer.n_head
    measures = AttentionMeasurement(
        statistics_of(DiagnosticsConfig(statistics=["sparsity"])), LAYERS, heads, QUERIES, LENGTH
    )
    return measures.split_vectors(measures.measure_statistics(decoder, batch())[None].numpy())


@torch.no_grad()
def test_non_negative_features_have_the_closed_form_of_independent_components():
    decoder = make_decoder(opt.Linear(features="relu", decay=True), std=1.0)
    values, (block, *_) = measured(decoder), attention_blocks(decoder, batch(), [QUERIES[3]])
    q, k = block.normalizer.apply_feature_map(block.inputs.q, block.inputs.k)
    for head in range(HEADS):
        query, keys = q[0, head, QUERIES[3]].double(), k[0, head, : QUERIES[3] + 1].double()
        decay = torch.arange(len(keys)).double().mul(block.normalizer.log_decay(keys)[head]).exp()
        expected = (
            sparsity.independent_features_sparsity(query, keys.mean(), keys.std(correction=0))
            * decay.mean()
            / decay.square().mean().sqrt()
        )
        assert values.by_query["S, closed form"][0, 0, head, 3] == pytest.approx(expected.item(), rel=1e-4)


@torch.no_grad()
def test_positions_explain_the_variance_of_queries_in_the_second_half():
    (block, *_) = attention_blocks(make_decoder(opt.Softmax()), batch(), list(range(LENGTH)))
    rows = AttentionRows.from_block(block)
    late, last = (rows.select(rows.query_indices >= first) for first in (LENGTH // 2, LENGTH - 1))
    for source, counted in {"key position": late, "distance": late, "both, last query": last}.items():
        sums = sparsity.VARIANCE_SOURCES[source]
        torch.testing.assert_close(sums(rows, LENGTH), sums(counted, LENGTH))
        assert sums(counted, LENGTH).any()
    values, is_counted = sparsity.standardised_weights_and_mask(late.weights, late.visible)
    places = {
        "key position": late.layout.key_positions.expand(len(late.query_indices), -1),
        "distance": late.query_indices[:, None] - late.layout.key_positions,
    }
    for source, groups in places.items():
        for group, head in ((0, 0), (3, 1), (LENGTH // 2, HEADS - 1)):
            chosen = (groups == group) & is_counted[head]
            totals = sparsity.VARIANCE_SOURCES[source](rows, LENGTH)[head, [group, LENGTH + group]]
            assert totals.tolist() == pytest.approx([values[head][chosen].sum().item(), chosen.sum().item()], abs=1e-5)


@torch.no_grad()
def test_equal_scores_condensed_scores_and_dead_rows_are_told_apart():
    flat, sharp = (
        measured(make_decoder(opt.SSMax(init=init), std=std)).by_query for init, std in ((1e-30, 0.02), (500.0, 1.0))
    )
    assert (flat["queries beyond condensation"] == 0).all()
    np.testing.assert_allclose(flat["S, closed form"], 1, atol=1e-6)
    assert (sharp["queries beyond condensation"] == 1).all()
    assert (sharp["S, closed form"] < 1e-6).all()
    assert (sharp["S minus closed form"] > 0.05).all()
    assert not any(np.isinf(array).any() for array in (*flat.values(), *sharp.values()))
    assert "queries beyond condensation" in measured(make_decoder(opt.Relu2(), "gau")).by_query
