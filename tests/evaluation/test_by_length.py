"""Loss by sequence length: the same held-out tokens, cut into sequences of several lengths."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from folders import measure_curves

from lm.attention.layout import AttentionLayout
from lm.data.prepare import prepare
from lm.errors import ConfigError
from lm.evaluation.held_out import LossByLength
from lm.model.decoder import Decoder
from lm.model.device import Device

CPU = Device(torch.device("cpu"), bf16=False)
LENGTHS = "eval.by_length.lengths=[64, 16, 32]"


@pytest.mark.parametrize("documents", ["pack", "isolate"])
def test_each_length_is_the_mean_loss_of_the_same_tokens_after_a_context_cut_there(
    tiny, documents: str, tmp_path: Path
):
    for number in range(60):  # documents shorter than a stretch
        (tmp_path / f"{number}.txt").write_text(" ".join(f"word{number + k}" for k in range(20)))
    text = f"data={{source: {{paths: [{tmp_path}]}}, tokenizer: {{vocab_size: 270}}}}"
    config = tiny(LENGTHS, "eval.by_length.sequences=5", "model.normalizer=ssmax", f"data.documents={documents}", text)
    store = prepare(config.data)
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len, seed=1).eval()
    measurement = LossByLength(config, store)
    (curve,) = measure_curves(measurement, decoder, CPU)
    tokens = measurement.held_out[-1].sequences.astype(np.int64)  # (stretches, 65)
    assert (tokens[:, 1:-1] == store.end_of_text_id).any()
    for column, length in enumerate((16, 32, 64)):
        losses = []
        for begin in range(0, 64, length):
            parts = torch.from_numpy(tokens[:, begin : begin + length + 1])
            for sequence in parts:
                ends = [
                    place
                    for place in range(1, length)
                    if documents == "isolate" and sequence[place] == store.end_of_text_id
                ]
                pieces = zip([0, *ends], [*ends, length], strict=True)
                with torch.no_grad():
                    logits = [
                        decoder.head(decoder(sequence[None, low:high], AttentionLayout.full(high - low)))[0]
                        for low, high in pieces
                    ]
                losses.append(F.cross_entropy(torch.cat(logits), sequence[1:], reduction="none"))
        expected = torch.stack(losses).view(64 // length, 5, length).transpose(0, 1).reshape(5, -1).mean(1)
        assert curve.points[column].values == pytest.approx(expected.numpy(), abs=1e-5)
    assert curve.means == pytest.approx([units.values.mean() for units in curve.points])
    assert curve.x.tolist() == [16, 32, 64]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("lengths: [24, 64]", "eval.by_length.lengths = 24: does not divide the longest, 64"),
        ("lengths: [32, 32]", "must be different lengths"),
        ("lengths: [0]", "must be >= 2"),
        ("length: [32]", "eval.by_length.length = [32]: unknown key; did you mean 'lengths'"),
        ("lengths: [1000000]", "needs 1,000,001 held-out tokens, and there are"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused(tiny, change: str, reason: str):
    def measured() -> LossByLength:
        config = tiny(f"eval.by_length={{{change}, sequences: 1}}")
        return LossByLength(config, prepare(config.data))

    with pytest.raises(ConfigError) as error:
        measured()
    assert reason in str(error.value)
