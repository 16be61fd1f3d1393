"""docs/pretrained.md: each block of code is executed, on stand-ins of the trainers, and gives lm's loss and
gradients.
"""

import importlib.util
import os
import re
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_import import LLAMA_SIZES, V, save
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import lm.functional as L
from lm.attention import catalogue as opt
from lm.config.model_config import LearnedPosition, ModelConfig
from lm.data.batches import Batch
from lm.huggingface.attention_functions import NORMALIZER_ATTRIBUTE
from lm.model.decoder import Decoder

PAGE = (ROOT / "docs" / "pretrained.md").read_text().split("## In other trainers")[1]
LENGTHS = [11, 1, 20]


def block(heading: str) -> str:
    """The code under a heading of the page."""
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", PAGE, re.S).group(1)


def executed(heading: str, **names: object) -> dict[str, object]:
    namespace = {"L": L, "nn": nn, **names}
    exec(block(heading), namespace)
    return namespace


# A file of the interface of nanoGPT's model.py, as far as the lines of the page touch it; another by LM_NANOGPT=PATH.
STAND_IN = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, 2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        parts = {"wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd)}
        self.transformer = nn.ModuleDict(parts | {"h": nn.ModuleList(Block(config) for _ in range(config.n_layer))})
        self.transformer["ln_f"] = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
OURS = {  # names of a part of lm's decoder, by those of nanoGPT's
    "transformer.wte": "embedding",
    "transformer.wpe": "position",
    "transformer.ln_f": "norm",
    "transformer.h": "blocks",
    "ln_1": "attention_norm",
    "attn": "attention",
    "c_attn": "qkv",
    "attention.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "c_fc": "up",
    "mlp.c_proj": "mlp.out",
    "attention.ssmax": "attention.normalizer",
}


def renamed(name: str) -> str:
    for old, new in OURS.items():
        name = re.sub(rf"(^|\.){re.escape(old)}(\.|$)", rf"\g<1>{new}\g<2>", name)
    return name


def test_nanogpt_with_two_lines_has_our_loss_and_gradients(tmp_path: Path):
    file = Path(os.environ.get("LM_NANOGPT", tmp_path / "model.py"))
    if "LM_NANOGPT" not in os.environ:
        file.write_text(STAND_IN)
    first, second = block("nanoGPT").splitlines()
    text = "import lm.functional as L\n" + file.read_text()
    text, inserted = re.subn(r"( +)self\.n_embd = config\.n_embd\n", rf"\g<0>\g<1>{first}\n", text)
    text, replaced = re.subn(r"y = torch\.nn\.functional\.scaled_dot_product_attention\(.*\)", second, text)
    assert (inserted, replaced) == (1, 1)
    changed_file = tmp_path / "changed.py"
    changed_file.write_text(text)
    spec = importlib.util.spec_from_file_location("changed", changed_file)
    sys.modules["changed"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(
        module.GPTConfig(block_size=32, vocab_size=V, n_layer=2, n_head=4, n_embd=32, dropout=0.0, bias=True)
    )
    shape = ModelConfig(
        2,
        n_head=4,
        n_embd=32,
        mlp="gelu",
        norm="layer",
        bias=True,
        tied=True,
        position=LearnedPosition(),
        normalizer=opt.SSMax(),
    )
    decoder = Decoder(shape, V, 32)
    decoder.load_state_dict(
        {renamed(name): value for name, value in model.state_dict().items() if name != "lm_head.weight"}, strict=False
    )
    tokens = torch.randint(V, (2, 33), generator=torch.Generator().manual_seed(1))
    _, loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
    expected = decoder.summed_loss(Batch.from_sequences(tokens)) / 64
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss.backward()
    expected.backward()
    grads = {renamed(name): parameter.grad for name, parameter in model.named_parameters()}
    parameters = dict(decoder.named_parameters())
    assert grads.keys() == parameters.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, parameters[name].grad, rtol=1e-3, atol=1e-6)


def dense(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Plain softmax of documents in one sequence, all (H, T, D): what a varlen kernel computes."""
    parts = zip(*(x.split(starts.diff().tolist(), 1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 1)


class VarlenInnerAttention(nn.Module):
    """The interface of torchtitan's."""

    def __init__(self, config: None):
        super().__init__()

    def forward(
        self, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, *, attention_metadata: tuple, scale: float | None = None
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q_THK, k_THK, v_THV))
        return dense(q, k, v, attention_metadata.cu_seq_q).transpose(0, 1)


class FlashAttention2Backend(nn.Module):
    """The interface of OLMo-core's."""

    def __init__(self, *, head_dim: int, n_heads: int):
        super().__init__()
        self.head_dim, self.n_heads = head_dim, n_heads

    def forward(
        self, qkv: tuple[Tensor, ...], cu_doc_lens: Tensor | None = None, max_doc_len: int | None = None
    ) -> Tensor:
        q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in qkv)
        return dense(q, k, v, cu_doc_lens).transpose(0, 1).unflatten(0, qkv[0].shape[:2])


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **members: object) -> None:
    """A module that code of the page imports from."""
    for end in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[module]).update(members)


@pytest.mark.parametrize("trainer", ["torchtitan", "OLMo-core"])
def test_kernels_of_trainers_get_scaled_queries(trainer: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (torch.randn(1, 4, 32, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    if trainer == "torchtitan":
        stand_in(monkeypatch, "torchtitan.models.common.attention", VarlenInnerAttention=VarlenInnerAttention)
        module = executed(trainer)["SSMax"](None)
        metadata = namedtuple("Metadata", "cu_seq_q")(starts)
        out = module(*(x[0].transpose(0, 1) for x in (q, k, v)), attention_metadata=metadata, scale=None).transpose(
            0, 1
        )[None]
    else:
        stand_in(monkeypatch, "olmo_core.nn.attention.backend", FlashAttention2Backend=FlashAttention2Backend)
        module = executed(trainer)["SSMax"](head_dim=16, n_heads=4)
        out = module(tuple(x.transpose(1, 2) for x in (q, k, v)), cu_doc_lens=starts, max_doc_len=20).transpose(1, 2)
    expected = L.attention(module.ssmax, q, k, v, cu_seqlens=starts)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    leaves, grad = [q, k, v, module.ssmax.s], torch.randn_like(out)
    for actual, reference in zip(*(torch.autograd.grad(x, leaves, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-4)


def test_three_lines_put_ssmax_into_a_model_of_transformers_and_a_plugin_into_axolotls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Their loss and gradients are compared with lm's in tests/huggingface/test_inside_transformers.py."""
    save(tmp_path / "plain", "llama", {**LLAMA_SIZES, "attention_dropout": 0.0})
    model = executed("Models of transformers", FOLDER=tmp_path / "plain")["model"]
    stand_in(monkeypatch, "axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    plugin = executed("axolotl")["SSMax"]()
    plugin.pre_model_load({})
    built = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    tokens = torch.randint(V, (2, 30))
    softmax = built(tokens).logits
    plugin.post_model_build({}, built)
    assert torch.equal(built(tokens).logits, model(tokens).logits)
    assert not torch.allclose(model(tokens).logits, softmax)
    assert sum(NORMALIZER_ATTRIBUTE in name for name, _ in built.named_parameters()) == LLAMA_SIZES["num_hidden_layers"]
