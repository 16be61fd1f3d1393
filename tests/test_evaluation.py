"""Held-out loss by position, and `lm eval`."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import lm

from lm.attention import table
from lm.config import ModelConfig
from lm.data.prepare import prepare
from lm.errors import ConfigError, RunError
from lm.evaluation.loss import Device, HeldOut, bits_per_byte, bucket_edges, evaluate_long_context, long_rows, nll_by_token, validation_rows
from lm.evaluation.results import finite
from lm.evaluation.run import by_octave, evaluate_run
from lm.loading import find_checkpoint, load
from lm.model import Decoder
from lm.training.run import train

CPU = Device(torch.device("cpu"), bf16=False)


def made(name: str = "softmax") -> tuple[Decoder, HeldOut]:
    decoder = Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32, normalizer=table.OPTIONS[name](), dropout=0.5), 60, 16)
    rows = np.random.default_rng(0).integers(60, size=(5, 129))
    return decoder, HeldOut(rows, np.full(60, 4.0, np.float32), "")


@pytest.mark.parametrize("name", table.ENTRIES)
def test_loss_by_token_equals_the_full_computation(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.evaluation.loss.EVAL_TOKENS", 300)
    decoder, held_out = made(name)
    found = nll_by_token(decoder, held_out, CPU, theta_factor=50.0)
    assert decoder.training
    decoder.eval()
    rows = torch.from_numpy(held_out.rows)
    logits = decoder.head(decoder(rows[:, :-1], 50.0))
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(5, 128)
    assert np.allclose(found, expected.detach(), atol=1e-5)


def test_ranks_share_the_rows_even_if_there_are_fewer_rows_than_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.evaluation.loss.sum_over_ranks", lambda values, where: values)
    decoder, held_out = made()
    parts = [nll_by_token(decoder, held_out, Device(torch.device("cpu"), False, rank, 7)) for rank in range(7)]
    assert np.allclose(sum(parts), nll_by_token(decoder, held_out, CPU), atol=1e-5)


def test_bits_per_byte_is_total_bits_over_total_bytes():
    _, held_out = made()
    nll = np.full((5, 128), math.log(2) * 3)
    assert bits_per_byte(nll, held_out) == pytest.approx(3 / 4)


@pytest.mark.parametrize(("seq_len", "length"), [(256, 2048), (32, 128), (100, 800), (2, 16), (96, 96), (64, 100)])
def test_buckets_tile_the_row_with_edges_at_every_doubling_of_the_training_length(seq_len: int, length: int):
    edges = bucket_edges(seq_len, length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert (np.diff(edges) > 0).all()
    assert {seq_len * 2**i for i in range(20) if seq_len * 2**i <= length} <= set(edges.tolist())


def test_positions_rows_and_buckets_agree():
    decoder, held_out = made()
    result = evaluate_long_context(decoder, held_out, CPU, [1.0, 50.0])
    for setting in result["settings"]:
        widths = np.diff(result["bucket_edges"])
        assert np.mean(setting["nll_by_position"]) == pytest.approx(setting["loss"], abs=1e-4)
        assert (np.mean(setting["nll_by_row"], axis=0) @ widths / widths.sum()) == pytest.approx(setting["loss"], abs=1e-4)
    first, second = result["settings"]
    assert first["nll_by_position"] != second["nll_by_position"]


def test_octaves_of_position():
    assert by_octave([1.0] * 16 + [2.0] * 16 + [3.0] * 8, 16) == [(0, 16, 1.0), (16, 32, 2.0), (32, 40, 3.0)]


def test_numbers_that_are_not_finite_are_null_in_json():
    assert finite({"a": [1.0, math.nan, {"b": math.inf}]}) == {"a": [1.0, None, {"b": None}]}


def test_held_out_rows_are_the_same_for_every_arm_and_lie_in_held_out_documents(tiny):
    softmax, ssmax = tiny("name=a"), tiny("name=b", "model.normalizer=ssmax", "seed=2")
    store = prepare(softmax.data)
    assert validation_rows(store, softmax).sha256 == validation_rows(store, ssmax).sha256
    assert long_rows(store, softmax).sha256 == long_rows(store, ssmax).sha256
    held_out = {tuple(row) for row in np.lib.stride_tricks.sliding_window_view(store.val.tokens, 129).tolist()}
    assert all(tuple(row) in held_out for row in long_rows(store, softmax).rows.tolist())
    assert long_rows(store, tiny("name=c", "eval.long_context.length_factor=0")) is None


def test_lm_eval_gives_the_callbacks_numbers_and_takes_overrides(tiny):
    config = tiny("name=evaluated")
    train(config)
    folder = config.run_folder
    during = json.loads((folder / "evaluations" / "long_context.step-000008.json").read_text())
    validation, long = evaluate_run(folder, "8", [])
    assert long["rows_sha256"] == during["rows_sha256"]
    assert long["settings"][0]["nll_by_position"] == pytest.approx(during["settings"][0]["nll_by_position"], abs=1e-4)
    assert validation["loss"] > 0
    _, longer = evaluate_run(folder, "4", ["eval.long_context.length_factor=8", "eval.long_context.rope_theta_factors=[2]"])
    assert (longer["length"], [s["rope_theta_factor"] for s in longer["settings"]]) == (256, [2.0])
    assert (folder / "evaluations" / "long_context.step-000004.json").exists()
    before = (folder / "config.yaml").read_text()
    assert "length_factor: 4.0" in before


def test_lm_eval_refuses_what_would_measure_another_model(tiny, tmp_path):
    config = tiny("name=strict")
    train(config)
    with pytest.raises(ConfigError, match=r"model\.n_head"):
        evaluate_run(config.run_folder, "last", ["model.n_head=4"])
    with pytest.raises(RunError, match=r"steps saved in .*: 4, 8"):
        find_checkpoint(config.run_folder, "5")
    with pytest.raises(RunError, match="not a run folder"):
        evaluate_run(tmp_path, "last", [])
    result = lm("eval", str(config.run_folder), "eval.rows=0")
    assert (result.returncode, result.stderr) == (2, "error: eval.rows = 0: must be >= 1\n")


def test_a_checkpoint_gives_its_model_back(tiny):
    config = tiny("name=back", "model.normalizer={name: ssmax, bias: true}")
    train(config)
    loaded = load(config.run_folder)
    decoder, trained, facts = loaded.decoder, loaded.config, loaded.facts
    assert trained == config
    assert (facts["step"], facts["tokens"]) == (8, 8 * 256)
    assert not decoder.training
    assert {"s", "b"} == {name for name, _ in decoder.blocks[0].attention.normalizer.named_parameters()}
