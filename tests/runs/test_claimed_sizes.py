"""Sizes that a checkpoint claims are compared with its weights before anything of them is made."""

import time
from pathlib import Path

import pytest
import torch
import yaml
from folders import rewrite_checkpoint

import lm
from lm.config import normalizers as kinds
from lm.config.data_config import DataConfig
from lm.config.model_config import LearnedPosition, ModelConfig
from lm.config.tree import Config
from lm.errors import RunError
from lm.machine import peak_process_bytes
from lm.model.decoder import Decoder
from lm.plain import to_plain
from lm.runs.checkpoints import CHECKPOINT_FORMAT, save_checkpoint

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32}


def claimed(tmp_path: Path, model: ModelConfig, vocab_size: int = 300, seq_len: int = 32, **changes: int) -> Path:
    """A checkpoint of a small decoder that says that it is something else."""
    weights = Decoder(model, 300, 32).state_dict()
    config = to_plain(Config(name="claimed", model=model, data=DataConfig(seq_len=seq_len)))
    config["optim"]["batch_tokens"] = seq_len
    config["model"] |= changes
    config["eval"]["long_context"] = {"length_factor": 0}
    facts = {
        "format": CHECKPOINT_FORMAT,
        "config": yaml.safe_dump(config),
        "phase": 0,
        "step": 1,
        "tokens": 32,
        "data_fingerprint": "",
        "best": None,
        "plugins": {},
    }
    save_checkpoint({"state_dict": weights, "lm": {**facts, "vocab_size": vocab_size}}, tmp_path / "claimed.ckpt")
    return tmp_path / "claimed.ckpt"


CLAIMS = {
    "vocabulary": ("softmax", {"vocab_size": 10**9}, r"size mismatch for embedding\.weight"),
    "vocabulary beyond all": ("softmax", {"vocab_size": 10**18}, r"Storage size calculation overflowed"),
    "layers": ("softmax", {"n_layer": 10**4}, r"model\.n_layer is 10000, and there are weights of another"),
    "width": ("softmax", {"n_embd": 10**6}, r"size mismatch for embedding"),
    "heads": ("ssmax", {"n_head": 10**4, "n_embd": 10**6}, r"size mismatch"),
    "mlp": ("softmax", {"n_mlp": 10**7}, r"size mismatch for blocks\.0\.mlp\.up\.weight"),
    "learned positions": ("learned", {"seq_len": 10**7}, r"size mismatch for position\.weight"),
    "a table of positions": ("p_n", {"seq_len": 10**7}, r"size mismatch for \S+normalizer\.p"),
    "a length beyond all": ("ssmax", {"seq_len": 10**12}, r"data\.seq_len = 1000000000000: must be"),
    "another normalizer": ("softmax", {"normalizer": {"name": "ssmax"}}, r"Missing key\(s\) .*normalizer\.s"),
    "a plainer normalizer": ("ssmax", {"normalizer": {"name": "softmax"}}, r"Unexpected key\(s\) .*normalizer\.s"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claimed_size_is_compared_before_anything_of_it_is_made(tmp_path: Path, claim: str):
    name, changes, words = CLAIMS[claim]
    kind = {"position": LearnedPosition()} if name == "learned" else {"normalizer": kinds.NORMALIZER_OPTIONS[name]()}
    path = claimed(tmp_path, ModelConfig(**TINY, **kind), **changes)
    before, start = peak_process_bytes(), time.perf_counter()
    with pytest.raises(RunError, match=words):
        lm.load(path)
    assert time.perf_counter() - start < 5
    assert peak_process_bytes() - before < 2**30  # what is claimed would take more


def test_a_number_that_poses_as_a_matrix_is_refused(tmp_path: Path):
    path = claimed(tmp_path, ModelConfig(**TINY), vocab_size=10**6)
    vast = torch.zeros(1).expand(10**6, 32)
    rewrite_checkpoint(
        path, lambda content: content["state_dict"].update({f"{name}.weight": vast for name in ("embedding", "head")})
    )
    with pytest.raises(RunError, match=r"embedding\.weight is not contiguous"):
        lm.load(path)
