"""Held-out loss by position, and `lm eval`."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, lm
from folders import curves_of, measure_curves, stored_curves
from texts import split_tokens

from lm.attention import catalogue
from lm.config import normalizers as kinds
from lm.config.eval_config import InferenceSetting, ThetaFactor
from lm.config.model_config import ModelConfig
from lm.data.prepare import prepare
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import evaluate_runs
from lm.evaluation.held_out import (
    LongContext,
    bits_per_byte,
    bucket_edges,
    long_sequences,
    measure_sequences,
    nll_by_token,
    swap_sequences,
    validation_sequences,
)
from lm.evaluation.measurement import HeldOutSequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import with_inference_setting
from lm.runs.evaluations import load_evaluation
from lm.runs.loading import load
from lm.training.train import train

CPU = Device(torch.device("cpu"), bf16=False)


def made(name: str = "softmax", count: int = 5, length: int = 128) -> tuple[Decoder, HeldOutSequences]:
    decoder = Decoder(
        ModelConfig(n_layer=2, n_head=2, n_embd=32, normalizer=kinds.NORMALIZER_OPTIONS[name](), dropout=0.5), 60, 16
    )
    tokens = np.random.default_rng(0).integers(60, size=(count, length + 1))
    return decoder, HeldOutSequences(tokens, np.full(60, 4.0, np.float32))


@pytest.mark.parametrize(("count", "length"), [(5, 128), (1, 640)])
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_loss_by_token_equals_the_full_computation(name: str, count: int, length: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.evaluation.held_out.MAX_BATCH_TOKENS", 300)
    monkeypatch.setattr("lm.model.blocks.MAX_MLP_TOKENS", 100)
    monkeypatch.setattr("lm.attention.routes.MAX_BLOCK_WEIGHTS", 2 * 640 * 200)
    monkeypatch.setattr("lm.attention.elementwise_sums.TILE_SIZE", 200)
    decoder, held_out = made(name, count, length)
    copy = with_inference_setting(decoder, InferenceSetting(ThetaFactor()))
    nll = nll_by_token(copy, held_out, CPU)
    assert copy.training
    copy.eval()
    tokens = torch.from_numpy(held_out.sequences)
    logits = decoder.head(copy(tokens[:, :-1]))
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(nll.shape)
    assert np.allclose(nll, expected.detach(), atol=1e-5)


def test_what_fails_leaves_no_trace():
    decoder, state = made()[0], torch.get_rng_state()

    def fails(indices: list[int]) -> torch.Tensor:
        torch.rand(3)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure_sequences([decoder], [128] * 3, (), CPU, fails)
    assert decoder.training
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_split_the_sequences_even_if_there_are_fewer_than_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.evaluation.held_out.all_reduce_sum", lambda device, local: local())
    decoder, held_out = made()
    parts = [nll_by_token(decoder, held_out, Device(torch.device("cpu"), False, rank, 7)) for rank in range(7)]
    assert np.allclose(sum(parts), nll_by_token(decoder, held_out, CPU), atol=1e-5)


def test_the_bytes_are_those_of_the_tokens_that_are_predicted_and_count():
    """Not of the tokens that are read, whose bytes differ; nor of predictions that do not count."""
    rng = np.random.default_rng(1)
    sequences, token_bytes = rng.integers(60, size=(3, 9)), rng.integers(1, 20, size=60).astype(np.float32)
    sequences[:, 0], token_bytes[sequences[0, 0]] = sequences[0, 0], 500.0
    counts = rng.random((3, 8)) < 0.5
    nll = np.where(counts, rng.random((3, 8)), 0.0)
    for answers in (None, counts):
        predictions = [(i, t) for i in range(3) for t in range(8) if answers is None or answers[i, t]]
        bits = sum(nll[i, t] for i, t in predictions) / math.log(2)
        n_bytes = sum(token_bytes[sequences[i, t + 1]] for i, t in predictions)
        held_out = HeldOutSequences(sequences, token_bytes, answer_mask=answers)
        assert bits_per_byte(nll, held_out) == pytest.approx(bits / n_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("seq_len", "length"), [(256, 2048), (32, 128), (100, 800), (2, 16), (96, 96), (64, 100), (64, 16), (100, 7)]
)
def test_buckets_tile_the_row_with_edges_at_every_doubling_of_the_training_length(seq_len: int, length: int):
    edges = bucket_edges(seq_len, length)
    assert edges[0] == 0
    assert edges[-1] == length
    assert (np.diff(edges) > 0).all()
    assert {seq_len * 2**i for i in range(20) if seq_len * 2**i <= length} <= set(edges.tolist())


def test_a_bin_is_the_mean_loss_of_its_positions_under_each_setting(tiny):
    config = tiny()
    store = prepare(config.data)
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len)
    measurement = LongContext(config, store)
    first, second = (curve for curve in measure_curves(measurement, decoder, CPU) if curve.bins)
    nll = nll_by_token(decoder.eval(), measurement.held_out[0], CPU)
    assert first.overall_mean == pytest.approx(nll.mean(), abs=1e-5)
    ends = zip(first.x.astype(int), first.until.astype(int), strict=True)
    assert first.means == pytest.approx([nll[:, start:stop].mean() for start, stop in ends], abs=1e-5)
    assert not np.array_equal(first.means, second.means)


def test_sequences_may_be_shorter_than_those_of_training(tiny):
    config = tiny("eval.long_context={length_factor: 0.5, sequences: 3}", "eval.swap_lengths=[0.04, 0.25, 1]")
    store = prepare(config.data)
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len)
    measurement = LongContext(config, store)
    assert measurement.held_out[0].sequences.shape == (3, config.data.seq_len // 2 + 1)
    assert [curve.until[-1] for curve in measure_curves(measurement, decoder, CPU) if curve.bins] == [
        16,
        16,
    ]
    assert [group.length for group in swap_sequences(store, config)] == [1, 8, 32]
    hundred = tiny(
        "data.seq_len=100", "optim.batch_tokens=800", "eval.long_context.length_factor=0.29", "eval.swap_lengths=[0.29]"
    )
    long_length = long_sequences(store, hundred).sequences.shape[1] - 1
    assert {long_length, *(group.length for group in swap_sequences(store, hundred))} == {29}, (
        "0.29 x 100 is 28.999999999999996"
    )


def test_held_out_sequences_are_the_same_for_every_arm_and_lie_in_held_out_documents(tiny):
    softmax, ssmax = tiny("name=a"), tiny("name=b", "model.normalizer=ssmax", "seed=2")
    store = prepare(softmax.data)
    assert validation_sequences(store, softmax).sha256 == validation_sequences(store, ssmax).sha256
    assert long_sequences(store, softmax).sha256 == long_sequences(store, ssmax).sha256
    held_out = {tuple(row) for row in np.lib.stride_tricks.sliding_window_view(split_tokens(store.val), 129).tolist()}
    assert all(tuple(row) in held_out for row in long_sequences(store, softmax).sequences.tolist())


def test_lm_eval_gives_the_callbacks_numbers_and_takes_overrides(tiny):
    config = tiny("name=evaluated")
    train(config)
    folder = config.run_folder
    curve = stored_curves(folder, "long_context", 8)[0]
    validation, long = (curves_of(result.evaluation)[0] for result in evaluate_runs([folder], "8"))
    assert long.points[0].sha256 == curve.points[0].sha256
    assert long.means == pytest.approx(curve.means, abs=1e-4)
    assert validation.overall_mean > 0
    changes = [
        "eval.long_context.length_factor=8",
        "eval.long_context.inference=[{rope: {name: theta, factor: 2}}, {rope: yarn}]",
    ]
    longer = [curve for curve in curves_of(evaluate_runs([folder], "4", overrides=changes)[1].evaluation) if curve.bins]
    assert [(curve.until[-1], curve.setting) for curve in longer] == [(256, "theta x 2"), (256, "yarn")]
    assert (folder / "evaluations" / "long_context.step-000004.csv").exists()
    before = (folder / "config.yaml").read_text()
    assert "length_factor: 4.0" in before


def test_what_was_measured_before_is_not_measured_again(tiny):
    config = tiny("name=cached")
    train(config)
    quick = ["eval.sequences=3", "eval.long_context.sequences=2"]
    runs = [
        evaluate_runs([config.run_folder], overrides=overrides)
        for overrides in (quick, quick, [], [*quick, "trainer.precision=bf16-mixed"])
    ]
    assert [result.is_cached for run in runs for result in run] == [False, False, True, True, *[False] * 4]
    assert runs[0][0].evaluation.file_content() == runs[1][0].evaluation.file_content()
    assert runs[0][0].evaluation.frame["sample"].count() == 3
    assert load_evaluation(config.run_folder / "evaluations" / "validation.step-000008.csv").precision == "bf16-mixed"


def test_several_runs_are_measured_side_by_side_and_written_as_a_table(tiny, tmp_path):
    folders = []
    for name in ("softmax", "ssmax"):
        config = tiny(f"name={name}", f"model.normalizer={name}")
        train(config)
        folders.append(str(config.run_folder))
    for kind in ("csv", "json"):
        result = lm("eval", *folders, "eval.long_context.length_factor=0", "-o", str(tmp_path / f"all.{kind}"))
        assert result.returncode == 0, result.stderr
        assert "validation" in result.stdout
    lines = list(csv.DictReader((tmp_path / "all.csv").open()))
    records = json.loads((tmp_path / "all.json").read_text())
    assert [line["run"] for line in lines] == np.repeat(folders, 3).tolist()
    assert [float(line["value"]) for line in lines] == [line["value"] for line in records]
    assert "name a .csv or .json file" in lm("eval", *folders, "-o", str(tmp_path / "all.txt")).stderr
    assert "no run folder given" in lm("eval", "eval.sequences=3").stderr


def test_a_failing_evaluation_is_logged_and_training_goes_on_unless_asked(tiny, monkeypatch):
    config = tiny("name=fails")

    def broken(*_: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(LongContext, "measure", broken)
    assert train(config) == 0
    assert "no such thing" in (config.run_folder / "metrics.jsonl").read_text()
    assert not (config.run_folder / "evaluations" / "long_context.step-000008.csv").exists()
    with pytest.raises(ValueError, match="no such thing"):
        train(tiny("name=stops", "eval.on_error=stop"))


PHASES = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: log_n}]"


def test_an_option_that_one_phase_has_is_a_setting_of_that_phase(tiny):
    inference = "eval.long_context.inference=[{}, {normalizer: {clip: true}}]"
    config = tiny("name=clip", inference, "eval.long_context.at=[0.5, 1.0]", PHASES, "eval.swap_lengths=[1, 0.25]")
    assert train(config) == 0
    settings = [{curve.setting for curve in stored_curves(config.run_folder, "long_context", step)} for step in (4, 8)]
    assert settings == [{"as trained"}, {"as trained", "as trained, clip=true"}]
    lines = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").open()]
    (before,) = (line["swap/loss_before"] for line in lines if "swap/loss_before" in line)
    assert before == pytest.approx(
        next(line["val/loss"] for line in lines if line["step"] == 4 and "val/loss" in line), abs=1e-5
    )


def test_lm_eval_refuses_what_would_measure_another_model(tiny, tmp_path):
    config = tiny("name=strict")
    train(config)
    with pytest.raises(ConfigError, match=r"model\.n_head"):
        evaluate_runs([config.run_folder], overrides=["model.n_head=4"])
    with pytest.raises(RunError, match=r"strict: no checkpoint 5; there is: 4, 8, last$"):
        load(config.run_folder, 5)
    with pytest.raises(RunError, match="not a run folder"):
        evaluate_runs([tmp_path])
    result = lm("eval", str(config.run_folder), "eval.sequences=0")
    assert (result.returncode, result.stderr) == (2, "error: eval.sequences = 0: must be >= 1 and <= 1000000\n")


def test_a_run_is_evaluated_on_the_store_it_was_trained_on_whatever_became_of_its_sources(
    tiny, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "texts")
    config = tiny("name=moved", "data.source.paths=[texts]", "data.root=stores")
    train(config)
    (tmp_path / "texts" / "00.txt").write_text("something else")
    first = evaluate_runs([config.run_folder], overrides=["eval.sequences=5"])
    shutil.rmtree(tmp_path / "texts")
    second = evaluate_runs([config.run_folder], overrides=["eval.sequences=6"])
    assert [result.evaluation.data_fingerprint for result in second] == [
        result.evaluation.data_fingerprint for result in first
    ]
    shutil.rmtree(tmp_path / "stores")
    with pytest.raises(
        RunError, match=rf"no store in {tmp_path}/stores, and none can be made .*: set data\.root to where"
    ):
        evaluate_runs([config.run_folder])
    shutil.copytree(corpus, tmp_path / "texts")
    (tmp_path / "texts" / "00.txt").write_text("something else")
    with pytest.raises(
        RunError, match=r"set data\.root to where the store is, start where .*, or bring the sources back"
    ):
        evaluate_runs([config.run_folder])


def test_sequences_know_the_documents_they_begin_in(tiny):
    config = tiny("eval.sequences=20", "eval.long_context.sequences=20")
    store = prepare(config.data)
    for held_out in (validation_sequences(store, config), long_sequences(store, config)):
        assert len(set(held_out.document_labels.tolist())) > 1
        for row, number in zip(held_out.sequences, held_out.document_labels, strict=True):
            document, begin = split_tokens(store.val).tolist(), row[:4].tolist()
            document = document[store.val.offsets[number] : store.val.offsets[number + 1] + 3]
            assert begin in [document[start : start + 4] for start in range(len(document) - 3)]


@pytest.mark.slow
def test_a_row_of_131072_tokens_takes_less_than_a_gigabyte():
    """A model of one narrow layer, in less than a minute; T x T weights in bf16 alone would be 32 GiB."""
    shape = ["--n-layer", "1", "--n-head", "1", "--n-embd", "64", "--seq-len", "131072"]
    result = subprocess.run(
        [sys.executable, "scripts/bench.py", "long", *shape], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(re.search(r"peak memory \+([\d]+) MiB", result.stdout)[1].replace(",", "")) < 1024
