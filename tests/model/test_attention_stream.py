"""The stream of attention: every layer's scores and weights are the dense definition's, and never T x T of them are
held.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import mark_others_slow
from torch import Tensor

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config import normalizers as kinds
from lm.config.model_config import GAUBlock, ModelConfig
from lm.data.batches import Batch
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder, batch_layout
from scripts.tensor_memory import TensorMemory

VOCAB, LENGTH, SIZE = 50, 37, 8


def make_decoder(normalizer: Options, block: str = "attention", n_layer: int = 2) -> Decoder:
    """A decoder with the normalizers' parameters off their initial values."""
    shape = {"n_head": 1, "block": GAUBlock(key_size=SIZE)} if block == "gau" else {"n_head": 2}
    shape |= {"n_kv_head": 1} if block == "grouped queries" else {}
    decoder = Decoder(
        ModelConfig(n_layer=n_layer, n_embd=2 * SIZE, normalizer=normalizer, init_std=0.3, **shape), VOCAB, 32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for normalizer in decoder.normalizers() for p in normalizer.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return decoder


def batch(length: int = LENGTH, documents: bool = False) -> Batch:
    """Two sequences; of `documents` one begins in the middle of each."""
    tokens = torch.randint(1, VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(1))
    tokens[0, 11] = tokens[1, 20] = 0
    return Batch.from_sequences(tokens, end_of_text_id=0 if documents else None)


def dense(decoder: Decoder, sample: Batch) -> list[tuple[Tensor, Tensor]]:
    """Scores and weights of each layer, (B, H, T, T), of the heads that a layer's attention gets; documents one by
    one.
    """
    layers = []
    for block in attention_blocks(decoder, sample, [0]):
        inputs, normalizer = block.inputs, decoder.normalizers()[block.layer]
        q, k = inputs.q.double(), inputs.k.double()
        layers.append(
            (normalizer.unmasked_scores(q, k, batch_layout(sample)), normalizer.weights(q, k, batch_layout(sample)))
        )
    return layers


@torch.no_grad()
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "isolated documents"])
@pytest.mark.parametrize("block", mark_others_slow(["attention", "grouped queries", "gau"], ["grouped queries", "gau"]))
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_streamed_weights_are_the_dense_definition_and_reproduce_the_layers_output(
    name: str, block: str, documents: bool
):
    decoder, sample = make_decoder(kinds.NORMALIZER_OPTIONS[name](), block), batch(documents=documents)
    expected, coverage = dense(decoder, sample), torch.zeros(2, LENGTH)
    for chunk in attention_blocks(decoder, sample, dtype=torch.float64, block_size=10):
        keys = chunk.weights.size(-1)
        scores, weights = (x[:, :, chunk.queries, :keys] for x in expected[chunk.layer])
        visible = chunk.layout.visible().expand_as(scores)
        torch.testing.assert_close(chunk.scores[visible], scores[visible], rtol=0, atol=1e-9)
        torch.testing.assert_close(chunk.weights, weights, rtol=0, atol=1e-9)
        assert chunk.weights.dtype == torch.float64
        assert torch.equal(chunk.layout.positions, batch_layout(sample).positions[..., chunk.queries])
        coverage[chunk.layer, chunk.queries] += 1
    assert (coverage == 1).all()
    gives_what_the_layers_give(decoder, sample)


def gives_what_the_layers_give(decoder: Decoder, sample: Batch) -> None:
    """Weights of the stream times values are what the model computes, by its fast routes."""
    outputs: list[list[Tensor]] = [[] for _ in decoder.blocks]
    for chunk in attention_blocks(decoder, sample, dtype=torch.float64, block_size=10):
        outputs[chunk.layer].append(chunk.weights @ chunk.inputs.v[:, :, : chunk.weights.size(-1)].double())
    for parts, attended in zip(outputs, given_to_the_projection(decoder, sample), strict=True):
        torch.testing.assert_close(
            torch.cat(parts, 2).transpose(1, 2).flatten(2).float(), attended, rtol=1e-3, atol=1e-4
        )


def given_to_the_projection(decoder: Decoder, sample: Batch) -> list[Tensor]:
    """Heads' outputs (B, T, H E) of each layer as the model computes them, by its fast routes."""
    outputs: list[Tensor] = []
    attentions = [getattr(block, "attention", None) or block.gau for block in decoder.blocks]
    attends = [attention.attend for attention in attentions]
    for attention, attend in zip(attentions, attends, strict=True):
        attention.attend = lambda *arguments, attend=attend: outputs.append(attend(*arguments)) or outputs[-1]
    decoder.hidden_states(sample)
    for attention in attentions:
        del attention.attend
    return outputs


@torch.no_grad()
def test_selected_queries_equal_the_same_queries_of_the_whole_and_layers_differ_as_listed():
    decoder = make_decoder(kinds.LayerList([opt.Window(size=5), opt.SSMax()]), n_layer=3)
    layers = [
        torch.cat([F.pad(chunk.weights, (0, LENGTH - chunk.weights.size(-1))) for chunk in blocks], 2)
        for blocks in by_layer(decoder)
    ]
    for chunk in attention_blocks(decoder, batch(), [-1, 4]):
        assert chunk.queries.tolist() == [LENGTH - 1, 4]
        torch.testing.assert_close(chunk.weights, layers[chunk.layer][:, :, [LENGTH - 1, 4]])
    windowed = [(layer_weights > 0).sum(-1).max().item() == 5 for layer_weights in layers]
    assert windowed == [True, False, True]


def by_layer(decoder: Decoder) -> list[list]:
    layers: dict[int, list] = {}
    for chunk in attention_blocks(decoder, batch(), block_size=9):
        layers.setdefault(chunk.layer, []).append(chunk)
    return list(layers.values())


def test_n_sample_follows_the_given_length():
    decoder = make_decoder(opt.SSMax(n="sample"))
    with torch.no_grad():
        short, long = (next(iter(attention_blocks(decoder, batch(), [-1], length))) for length in (LENGTH, 1000))
    torch.testing.assert_close(long.scores, short.scores * math.log(1000) / math.log(LENGTH))


@torch.no_grad()
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_no_tensor_grows_with_the_square_of_the_length(name: str, monkeypatch: pytest.MonkeyPatch):
    length = 1024
    for module in ("attention.routes", "model.attention_stream"):
        monkeypatch.setattr(f"lm.{module}.MAX_BLOCK_WEIGHTS", 2**16)
    monkeypatch.setattr("lm.attention.elementwise_sums.TILE_SIZE", 64)
    decoder, tokens = make_decoder(kinds.NORMALIZER_OPTIONS[name]()), batch(length).tokens[:1]
    with TensorMemory() as memory:
        for _ in attention_blocks(decoder, Batch(tokens, tokens, None)):
            pass
    assert memory.peak_bytes < 4 * 2 * length * length  # the weights of both heads
