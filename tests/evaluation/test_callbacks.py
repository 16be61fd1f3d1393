"""Evaluations as callbacks of a Trainer of one's own: docs/evaluation.md's example, with nanoGPT-like code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from conftest import ROOT

from lm.data.prepare import prepare
from lm.evaluation.held_out import nll_by_token
from lm.evaluation.measurement import HeldOutSequences
from lm.model.blocks import DecodingCache
from lm.model.decoder import Decoder, LogitsModel
from lm.model.device import Device

MINE = """
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend

tokenizer = Tokenizer.from_file("tokenizer.json")
V, C, H = tokenizer.get_vocab_size(), 32, 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)])
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norms[1](x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(V, C), nn.Sequential(Block(), Block()), nn.Linear(C, V)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

ids = torch.tensor(tokenizer.encode(open("held-out.txt").read()).ids)
batches = torch.utils.data.DataLoader(ids[: 16 * 65].view(16, 65), batch_size=4)
"""


@pytest.mark.slow
def test_the_example_of_a_trainer_of_one_s_own(tiny, tmp_path: Path):
    store = prepare(tiny().data)
    code = re.search(r"## In a Trainer.*?```python\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(), re.DOTALL)[1]
    (tmp_path / "example.py").write_text(code)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "tokenizer.json").write_text((store.path / "tokenizer.json").read_text())
    document = store.tokenizer().decode(store.val.document(0)[1:].tolist())
    (tmp_path / "held-out.txt").write_text(document)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "example.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    logged = pandas.read_csv(tmp_path / "logs" / "metrics.csv")
    assert logged["step"].tolist() == [3, 7]  # as Lightning counts
    assert logged["long/loss as trained"].between(3, 8).all()
    assert (
        logged[["needle/exact 128 as trained", "needle/control 128 as trained"]]
        .isin([0, 0.25, 0.5, 0.75, 1])
        .all(axis=None)
    )


def test_logits_of_any_module_give_the_losses_and_the_decoding_of_its_decoder(tiny):
    config, cpu = tiny(), Device(torch.device("cpu"), bf16=False)
    store = prepare(config.data)
    decoder = Decoder(config.model_in_phase(0), store.vocab_size, config.data.seq_len).eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return decoder.head(decoder(tokens))

    model, held_out = LogitsModel(Logits()), HeldOutSequences.from_store(store, np.arange(4) * 64, 64)
    expected = nll_by_token(decoder, held_out, cpu)
    np.testing.assert_allclose(nll_by_token(model, held_out, cpu), expected, rtol=1e-4, atol=1e-5)
    tokens, cache = torch.from_numpy(held_out.sequences[:, :12]), DecodingCache(12)
    with torch.no_grad():
        expected = decoder.head(decoder(tokens))
        torch.testing.assert_close(model(tokens[:, :7], cache=cache, output_start=6), expected[:, 6:7])
        for _ in range(2):
            torch.testing.assert_close(model(tokens[:, 7:], cache=cache.fork()), expected[:, 7:])
