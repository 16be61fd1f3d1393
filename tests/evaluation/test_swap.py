"""Swapping the normalizer: in training, on a checkpoint, and starting from swapped weights."""

import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import lm as command
from folders import checkpoint_weights, curves_of, equal_tensors, last_checkpoint, logged_values, stored_curves

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.cli import main
from lm.config import normalizers as kinds
from lm.data.batches import Batch
from lm.data.prepare import prepare
from lm.evaluation.held_out import SwapMeasurement, swap_sequences, token_losses_and_kl
from lm.evaluation.measurement import HeldOutSequences
from lm.evaluation.swap import describe_swap, swap_run
from lm.model.cross_entropy import Head, token_kl
from lm.model.decoder import Decoder, is_normalizer_parameter
from lm.model.device import Device
from lm.model.swapped import score_factors_by_length, with_normalizer
from lm.report.comparison import run_interval
from lm.runs.checkpoints import load_checkpoint
from lm.runs.evaluations import logged_means
from lm.runs.loading import load
from lm.statistics.intervals import Interval
from lm.training.optimizers import saved_optimizer_state
from lm.training.train import train

HERE = Device(torch.device("cpu"), bf16=False)
SSMAX_BIAS = opt.SSMax(bias=True)


def decoder(tiny, normalizer: object = None, seed: int = 1) -> Decoder:
    """The tiny model with attention sharp enough to tell normalizers apart."""
    config = tiny().model
    config.normalizer = normalizer or opt.Softmax()
    model = Decoder(config, 400, 32, seed)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(8)
    return model.eval()


# ---------------------------------------------------------------- match


OLD = [
    opt.Softmax(),
    opt.Softmax(temperature=0.5),
    opt.LogN(),
    opt.SSMax(init=0.4),
    opt.LogN(base=64.0),
    opt.SSMax(init=0.3, bias=True),
]


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("new", [opt.SSMax(), SSMAX_BIAS, opt.SSMax(scale="none", bias=True), opt.SSMax(n="sample")])
def test_match_keeps_the_mean_factor_on_the_logits_of_every_pair(old: object, new: object):
    before, after = (make_normalizer(options, LayerSpec(2, 16, 32, 256)) for options in (old, new))
    with torch.no_grad():
        for parameter in before.parameters():
            parameter.add_(torch.tensor([0.0, 0.2]))  # heads that differ
    after.init_from(before)
    expected, factors = before.scale_by_position(), after.scale_by_position()
    torch.testing.assert_close(factors.mean(-1), expected.mean(-1), atol=1e-6, rtol=0)
    if new == SSMAX_BIAS:  # a line in ln n follows any other exactly
        torch.testing.assert_close(factors, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [*OLD, SSMAX_BIAS, opt.PN(), opt.LogN(clip=True), opt.SSMax(n="sample"), opt.Relu2(), opt.Sink()]
)
def test_score_factors_are_those_of_the_scores(tiny, options: object):
    model = decoder(tiny, options)
    factors = score_factors_by_length(model, [1, 16, 32])
    for layer, normalizer in enumerate(model.normalizers()):
        q, k = torch.randn(2, 1, 2, 32, normalizer.layer.head_size, generator=torch.Generator().manual_seed(0)).unbind(
            0
        )
        for place, length in enumerate((1, 16, 32)):
            with torch.no_grad():
                scores = normalizer.unmasked_scores(q[:, :, :length], k[:, :, :length], AttentionLayout.full(length))[
                    0, :, -1
                ]
            plain = (q @ k.transpose(-2, -1))[0, :, length - 1, :length] / math.sqrt(normalizer.layer.head_size)
            torch.testing.assert_close(scores, factors[place, layer].unsqueeze(-1) * plain, atol=1e-5, rtol=1e-4)


def test_layers_with_other_scores_have_no_score_factors_and_the_others_are_still_compared(tiny):
    old = decoder(tiny, kinds.LayerList([opt.Cosine(), opt.Window(4)]))
    assert score_factors_by_length(old, [16]).isnan().tolist() == [[[True, True], [False, False]]]
    lines, warning = describe_swap(old, with_normalizer(old, kinds.LayerList([opt.Cosine(), opt.SSMax(init=0.9)])), 4)
    assert lines[-1] == "factor on the scores at n = 32, layers 1: 1 -> 3.12"
    assert "3.1 times the old one at n = 32" in warning
    assert describe_swap(old, with_normalizer(old, opt.Cosine()), 4)[1] == ""


def test_softmax_becomes_affine_ssmax_without_any_change(tiny):
    old = decoder(tiny)
    new = with_normalizer(old, SSMAX_BIAS)
    for normalizer in new.normalizers():
        assert normalizer.s.tolist() == [0.0, 0.0]
        assert normalizer.b.tolist() == [1.0, 1.0]
    tokens = torch.randint(400, (2, 80), generator=torch.Generator().manual_seed(0))
    for bf16 in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            assert torch.equal(old.logits(tokens), new.logits(tokens))


def test_a_swap_to_the_same_normalizer_gives_its_parameters_their_initial_values(tiny):
    old = decoder(tiny, opt.SSMax(init="unit"))
    for normalizer in old.normalizers():
        normalizer.s.data.fill_(0.3)
    assert all(normalizer.s.eq(1).all() for normalizer in with_normalizer(old, opt.SSMax(init="unit")).normalizers())


@pytest.mark.parametrize("start", catalogue.OPTIONS_BY_NAME)
def test_a_swap_keeps_every_weight_around_the_normalizer(tiny, start: str):
    old = decoder(tiny, kinds.NORMALIZER_OPTIONS[start]())
    other_weights = {name: value for name, value in old.state_dict().items() if not is_normalizer_parameter(name)}
    for name in catalogue.OPTIONS_BY_NAME:
        new = with_normalizer(old, kinds.NORMALIZER_OPTIONS[name]())
        assert new.config.normalizer == kinds.NORMALIZER_OPTIONS[name]()
        assert equal_tensors(
            other_weights,
            {name: value for name, value in new.state_dict().items() if not is_normalizer_parameter(name)},
        )
        assert new.state_dict().keys() == Decoder(new.config, 400, 32, seed=None).state_dict().keys()


# ---------------------------------------------------------------- measuring a swap


def held_out(length: int, count: int = 3) -> HeldOutSequences:
    return HeldOutSequences(np.random.default_rng(0).integers(400, size=(count, length + 1)), np.ones(400, "f4"))


def test_kl_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    p, q, weight = (torch.randn(*shape, generator=generator) for shape in ((150, 8), (150, 8), (5000, 8)))
    head, capped = Head(8, 5000), Head(8, 5000, softcap=1.5)
    head.weight = capped.weight = torch.nn.Parameter(weight)
    logits = [x.double() @ weight.double().t() for x in (p, q)]
    log_p, log_q = logits[0].log_softmax(-1), (1.5 * torch.tanh(logits[1] / 1.5)).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    divergences = token_kl(p, head, q, capped)  # in several chunks
    torch.testing.assert_close(divergences.double(), expected, atol=1e-5, rtol=1e-4)
    assert token_kl(p, capped, p, capped).abs().max() == 0


def sharp(tiny) -> Decoder:
    """Its predictions are sure enough that the two directions of a divergence differ."""
    model = decoder(tiny)
    with torch.no_grad():
        model.head.weight.mul_(40)
    return model


def log_p(model: Decoder, batch: Batch) -> torch.Tensor:
    """ln p of each next token, (B, T, V) fp64, by the softmax of all logits."""
    with torch.no_grad():
        logits = model(batch.tokens).double() @ model.head.weight.double().t()
    return logits - logits.exp().sum(-1, keepdim=True).log()


def test_a_swap_is_logged_at_the_training_length(tiny):
    config = tiny("eval.swap_lengths=[0.5, 1, 2]")
    store = prepare(config.data)
    old, new = (Decoder(config.model, store.vocab_size, 32, seed) for seed in (1, 2))
    result = SwapMeasurement(config, store, old).evaluate(new, HERE, 0, 0)
    curves = curves_of(result)
    assert [curve.x.tolist() for curve in curves] == [[16, 32, 64]] * 4
    names = ("swap/loss_before", "swap/loss_after", "swap/kl")
    assert logged_means(result) == {name: curve.means[1] for name, curve in zip(names, curves, strict=False)}


def test_a_swap_is_measured_by_the_divergence_of_the_new_distribution_from_the_old(tiny):
    """KL(old || new), token by token, which is not KL(new || old); and the losses, each of its own model."""
    old = sharp(tiny)
    new = with_normalizer(old, opt.SSMax(init=1.0))
    sequences = held_out(32)
    batch = Batch.from_sequences(sequences.sequences)
    p, q = (log_p(model, batch) for model in (old, new))
    losses = [-x.gather(2, batch.targets.unsqueeze(-1)).squeeze(-1) for x in (p, q)]
    kl, other = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    results = token_losses_and_kl(old, new, sequences, HERE)
    for numbers, expected in zip(results, (*losses, kl), strict=True):
        np.testing.assert_allclose(numbers, expected.numpy(), rtol=1e-3, atol=1e-5)
    assert abs(float(kl.mean() - other.mean())) > 0.02 * float(kl.mean())


def test_of_a_task_only_answers_count_at_every_length(tiny):
    options = (
        "data.tasks=[{task: {name: mqar, pairs: 2, queries: 2}}]",
        "eval.swap_lengths=[0.125, 0.5, 1, 2]",
        "eval.sequences=4",
    )
    config = tiny(
        *options,
        "eval.long_context={length_factor: 0, sequences: 5}",
        "eval.recall={length_factors: [1], sequences: 8}",
    )
    sequences = swap_sequences(prepare(config.data), config)
    assert [(part.length, len(part.sequences)) for part in sequences] == [(16, 5), (32, 4), (64, 5)], (
        "no room in 4 tokens"
    )
    assert all((part.answer_mask.sum(1) == 2).all() for part in sequences)


# ---------------------------------------------------------------- lm swap


@pytest.fixture(scope="module")
def trained(tiny_below, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softmax run of 40 steps, which no test changes."""
    options = ["name=trained", "trainer.max_steps=40", "trainer.checkpoint_every=20", "eval.sequences=64"]
    config = tiny_below(tmp_path_factory.mktemp("trained"), *options)
    train(config)
    return config.run_folder


def swap(
    source: Path, out: Path, target: str = "ssmax", init: str | None = None, *overrides: str, checkpoint: str = "last"
) -> tuple[Interval, float]:
    """The change of the loss at the training length, and the KL divergence there."""
    swapped = swap_run(source, checkpoint, target, init, out, list(overrides)).evaluation
    curves = {curve.metric: curve for curve in curves_of(swapped)}
    change = curves["change of loss"]
    return run_interval(change.points[0].rows, change.means[0]), curves["KL divergence"].means[0]


def test_lm_swap_makes_a_run_folder_of_its_own_and_leaves_the_source_alone(trained: Path, tmp_path: Path):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    out = tmp_path / "out"
    result = command("swap", str(trained), "--to", "ssmax", "-o", str(out))
    assert result.returncode == 0, result.stderr
    assert "softmax -> ssmax, step 40" in result.stdout
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    curves = stored_curves(out, "swap", 40)
    means = {result.metric: result.means for result in curves}
    assert all(result.x.tolist() == [32, 64, 128] for result in curves)
    model = load(out)
    assert (model.config.name, model.config.model.normalizer, model.metadata["step"]) == ("out", opt.SSMax(), 40)
    validation = stored_curves(trained, "validation", 40)[0].overall_mean
    assert means["loss before"][0] == pytest.approx(validation, abs=1e-5)
    assert means["change of loss"] == pytest.approx(means["loss after"] - means["loss before"], abs=1e-5)
    evaluated = command("eval", str(out))
    assert evaluated.returncode == 0, evaluated.stderr
    after = stored_curves(out, "validation", 40)[0].overall_mean
    assert after == pytest.approx(means["loss after"][0], abs=1e-5)
    assert command("report", str(trained), str(out), "-o", str(tmp_path / "report")).returncode == 0
    table = (tmp_path / "report/table.csv").read_text()
    assert "softmax -> ssmax after training (init match)" in table.partition("Change of loss")[2]
    refusal = command("swap", str(trained), "--to", "ssmax", "-o", str(out))
    assert (refusal.returncode, refusal.stderr) == (1, f"error: {out}: exists already; choose another\n")
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("options", "s", "at_16", "at_32"),
    [
        (["--init", "match"], "0.392", "1.09", "1.36"),
        (["--init", "unit"], "1", "2.77", "3.47"),
        (["model.normalizer.bias=true"], "0", "1", "1"),
    ],
)
def test_a_swap_prints_its_factors_and_warns_where_they_are_far_from_the_old(
    trained: Path, tmp_path: Path, options: list[str], s: str, at_16: str, at_32: str
):
    result = command("swap", str(trained), "--to", "ssmax", "-o", str(tmp_path / "out"), *options)
    lines = result.stdout.splitlines()
    assert f"s = {s}" in lines
    assert f"factor on the scores at n = 16: 1 -> {at_16}" in lines
    assert f"factor on the scores at n = 32: 1 -> {at_32}" in lines
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == ("unit" in options)
    if warnings:
        assert "is 2.8 times the old one at n = 16, 3.5 times the old one at n = 32: " in warnings[0]


def test_the_closing_hint_works_with_the_configuration_of_the_source(trained: Path, tmp_path: Path):
    out, option = tmp_path / "out", "model.normalizer.bias=true"
    hint = command("swap", str(trained), "--to", "ssmax", "-o", str(out), option).stdout.splitlines()[-1]
    words = shlex.split(hint.partition("or lm ")[2].replace("CONFIG", str(trained / "config.yaml")))
    result = command(*words[:-1], "name=further", f"runs={tmp_path}", "trainer.max_steps=1")
    assert result.returncode == 0, result.stderr
    assert load(tmp_path / "further").config.model.normalizer.label() == load(out).config.model.normalizer.label()


def test_a_swap_in_training_prints_what_lm_swap_prints(tiny, capsys: pytest.CaptureFixture):
    phases = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: {name: ssmax, init: unit}}]"
    train(tiny("name=said", phases, "log.progress=lines", "eval.swap_lengths=[]"))
    lines = capsys.readouterr().err.splitlines()
    first = lines.index("softmax -> ssmax (init=unit), step 4")
    assert lines[first + 1 : first + 4] == [
        "s = 1",
        *(f"factor on the scores at n = {n}: 1 -> {factor}" for n, factor in ((16, 2.77), (32, 3.47))),
    ]
    assert lines[first + 4].startswith("warning: the factor on the scores is 2.8 times the old one at n = 16")


def test_an_earlier_checkpoint_and_an_export_can_be_swapped_and_swapped_back(trained: Path, tmp_path: Path):
    swap(trained, tmp_path / "early", checkpoint="20")
    assert load(tmp_path / "early").metadata["step"] == 20
    assert command("export", str(trained), "-o", str(tmp_path / "exported")).returncode == 0
    swap(tmp_path / "exported", tmp_path / "there")
    swap(last_checkpoint(tmp_path / "there"), tmp_path / "back", "softmax")
    assert equal_tensors(checkpoint_weights(trained), checkpoint_weights(tmp_path / "back"))


def test_a_swap_that_makes_no_sense_is_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["lm", "swap", str(trained), "-o", str(tmp_path / "out"), *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code in (1, 2)
        errors = capsys.readouterr().err
        assert errors.count("error") == 1
        assert not (tmp_path / "out").exists()
        return errors

    assert "did you mean 'ssmax'?" in refused("--to", "ssmx")
    assert "model.normalizer = 'log_n': the new normalizer is --to ssmax" in refused(
        "--to", "ssmax", "model.normalizer=log_n"
    )
    assert "model.normalizer.init" in refused("--to", "log_n", "--init", "unit")
    assert "model.normalizer.init = 'much': must be match | unit or a number" in refused(
        "--to", "ssmax", "--init", "much"
    )
    assert "model.n_head = '4': can't be changed in lm swap" in refused("--to", "ssmax", "model.n_head=4")
    path = str(last_checkpoint(trained))
    assert f"no checkpoint {path}; there is: " in refused("--to", "ssmax", "--checkpoint", path)


# ---------------------------------------------------------------- phases and init_from


def test_a_phase_changes_the_normalizer_and_nothing_else(tiny):
    phases = (
        "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: {name: ssmax, bias: true}, warmup_steps: 4}]"
    )
    options = ["trainer.checkpoint_every=1", "trainer.keep_checkpoints=9"]
    train(tiny("name=swapped", phases, *options))
    train(tiny("name=plain", *options))
    swapped_run, plain = tiny("name=swapped").run_folder, tiny("name=plain").run_folder
    losses, expected = (dict(logged_values(folder)) for folder in (swapped_run, plain))
    assert all(losses[step] == expected[step] for step in range(1, 6))  # the swap itself changes nothing: s = 0, b = 1
    assert logged_values(swapped_run, "lr") == logged_values(plain, "lr")
    boundary = load_checkpoint(swapped_run / "checkpoints" / "step-000004.ckpt")
    assert (boundary["lm"]["phase"], len(checkpoint_weights(swapped_run, "step-000004.ckpt"))) == (
        0,
        len(checkpoint_weights(plain)),
    )
    state = saved_optimizer_state(load_checkpoint(swapped_run / "checkpoints" / "step-000005.ckpt"))
    steps = {int(moments["step"]) for moments in state.values()}
    assert steps == {1, 5}  # new parameters start afresh, the others go on
    means = {result.metric: result.means for result in stored_curves(swapped_run, "swap", 4)}
    assert means["KL divergence"].tolist() == [0.0] * 3
