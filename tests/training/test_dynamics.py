"""What is logged of a model while it trains, beside loss and speed."""

import math

import pytest
import torch
from folders import differences, kill_after, metrics

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.data.batches import Batch
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import METRICS, read_metrics
from lm.training.dynamics import copied_to_host, largest_scores, logit_scales, normalizer_parameters
from lm.training.module import LanguageModel
from lm.training.train import train

CPU = Device(torch.device("cpu"), bf16=False)
EVERYTHING = "log.dynamics=[logit_scale, largest_score, gradient_norm]"
TIMES = ("tokens_per_s", "elapsed_s", "peak_memory_bytes", "mfu/causal", "mfu/palm")
SHORT = ["trainer.max_steps=4", "trainer.checkpoint_every=2", "eval.long_context.length_factor=0"]


def decoder(tiny, normalizer: str | Options) -> Decoder:
    config = tiny(*([f"model.normalizer={normalizer}"] if isinstance(normalizer, str) else []))
    if isinstance(normalizer, Options):
        config.model.normalizer = normalizer
    return Decoder(config.model, 400, config.data.seq_len, seed=1)


# ---------------------------------------------------------------- normalizers


def test_values_by_head_are_logged_by_layer_and_head_and_others_as_their_root_mean_square(tiny):
    assert copied_to_host(normalizer_parameters(decoder(tiny, "softmax"))) == {}
    model = decoder(tiny, "[ssmax, forget]")
    model.normalizers()[0].s.data[1] = 3.5
    model.normalizers()[1].w.data[:] = -2.0
    values = copied_to_host(normalizer_parameters(model))
    names = ["s/layer0/head0", "s/layer0/head1", "w/layer1/rms", "b/layer1/head0", "b/layer1/head1"]
    assert list(values) == [f"normalizer/{name}" for name in names]
    assert (values["normalizer/s/layer0/head1"], values["normalizer/w/layer1/rms"]) == (3.5, 2.0)


def test_what_layers_share_is_logged_once(tiny):
    values = copied_to_host(normalizer_parameters(decoder(tiny, "p_n")))
    assert [name for name in values if name.startswith("normalizer/p/")] == ["normalizer/p/layer0/rms"]
    assert values["normalizer/p/layer0/rms"] == 1


def test_the_last_line_has_the_parameters_of_the_last_checkpoint(tiny):
    config = tiny("model.normalizer={name: ssmax, bias: true}", "eval.long_context.length_factor=0", EVERYTHING)
    assert train(config) == 0
    line = [record for record in read_metrics(config.run_folder / METRICS)[0] if "train/loss" in record][-1]
    weights = load_checkpoint(config.run_folder / "checkpoints" / "last.ckpt")["state_dict"]
    for name, label in (("s", "slope"), ("b", "intercept")):
        for layer in range(2):
            expected = pytest.approx(weights[f"blocks.{layer}.attention.normalizer.{name}"].tolist(), abs=1e-5)
            assert [line[f"normalizer/{name}/layer{layer}/head{head}"] for head in range(2)] == expected
            assert [line[f"logit_scale/{label}/layer{layer}/head{head}"] for head in range(2)] == expected


def test_the_logit_scale_is_that_of_the_normalizer_at_three_lengths_with_its_line_in_ln_n(tiny):
    model = decoder(tiny, "[{name: ssmax, bias: true}, {name: softmax, temperature: 0.5}]")
    model.normalizers()[0].s.data[:] = torch.tensor([0.3, -0.2])
    model.normalizers()[0].b.data[:] = torch.tensor([0.5, 1.5])
    values = copied_to_host(logit_scales(model))
    assert len(values) == 2 * 2 * 5
    for head, (s, b) in enumerate(((0.3, 0.5), (-0.2, 1.5))):
        for n in (2, 6, 32):
            assert values[f"logit_scale/n{n}/layer0/head{head}"] == pytest.approx(s * math.log(n) + b, abs=1e-6)
        assert values[f"logit_scale/slope/layer0/head{head}"] == pytest.approx(s, abs=1e-6)
        assert values[f"logit_scale/intercept/layer0/head{head}"] == pytest.approx(b, abs=1e-6)
    assert {values[f"logit_scale/n{n}/layer1/head0"] for n in (2, 6, 32)} == {2.0}
    assert (values["logit_scale/slope/layer1/head1"], values["logit_scale/intercept/layer1/head1"]) == (0, 2)


@pytest.mark.parametrize("name", ["sigmoid", "cosine", "qassmax", "forget", "asentmax", "linear"])
def test_a_normalizer_whose_scores_are_no_multiple_of_the_logits_has_no_logit_scale(tiny, name: str):
    assert copied_to_host(logit_scales(decoder(tiny, name))) == {}


# ---------------------------------------------------------------- scores


@torch.no_grad()
def by_hand(model: Decoder, batch: Batch) -> dict[str, float]:
    """The largest score of each head, one query after the other."""
    largest_by_head = {}
    for block in attention_blocks(model, batch):
        visible = block.normalizer.visible(block.layout).expand(block.scores.shape)
        for head in range(block.scores.size(1)):
            scores, masks = (tensor[:, head].flatten(0, 1) for tensor in (block.scores, visible))
            largest = max(row[mask].max().item() for row, mask in zip(scores, masks, strict=True) if mask.any())
            name = f"largest_score/layer{block.layer}/head{head}"
            largest_by_head[name] = max(largest, largest_by_head.get(name, -math.inf))
    return largest_by_head


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_the_largest_score_is_over_all_pairs_that_are_seen_however_many_are_held(
    tiny, name: str, monkeypatch: pytest.MonkeyPatch
):
    model = decoder(tiny, catalogue.ENTRIES[name]()).train()
    sequences = torch.randint(0, 400, (2, 33), generator=torch.Generator().manual_seed(0))
    sequences[:, [0, 11, 20]] = 0
    for batch in (Batch.of(sequences), Batch.of(sequences, end_of_text=0)):
        expected = by_hand(model, batch)
        for limit in (2**24, 2 * 2 * 32 * 5):  # five queries at a time
            monkeypatch.setattr("lm.model.attention_stream.BLOCK_WEIGHTS", limit)
            assert copied_to_host(largest_scores(model, batch, CPU)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert model.training


def test_scores_are_fp32_under_autocast(tiny):
    model = decoder(tiny, opt.Softmax()).double().float()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(30)
    batch = Batch.of(torch.randint(0, 400, (1, 33), generator=torch.Generator().manual_seed(0)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = by_hand(model, batch)
    values = copied_to_host(largest_scores(model, batch, Device(torch.device("cpu"), bf16=True)))
    assert values == pytest.approx(expected, rel=1e-6)
    assert any(torch.tensor(value).bfloat16().item() != value for value in values.values())


# ---------------------------------------------------------------- gradients


TASK = [
    "data.tasks=[{weight: 1, task: {name: mqar, keys: 16, values: 16, pairs: 4, queries: 4, varied: true}}]",
    "data.seq_len=64",
]


@pytest.mark.parametrize(
    "options", [["trainer.micro_batch=2"], [*TASK, "eval.recall.length_factors=[]"]], ids=["accumulated", "few targets"]
)
def test_the_logged_norms_are_of_the_whole_gradient_before_clipping(
    tiny, monkeypatch: pytest.MonkeyPatch, options: list[str]
):
    clip, modules, norms_of_steps = torch.nn.utils.clip_grads_with_norm_, [], []

    def clipped(parameters, *arguments):
        blocks = modules[-1].decoder.blocks
        norms_of_steps.append(
            [math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters())) for block in blocks]
        )
        clip(parameters, *arguments)

    def started(self, *arguments):
        modules.append(self)
        begin(self, *arguments)

    begin = LanguageModel.on_train_batch_start
    monkeypatch.setattr(LanguageModel, "on_train_batch_start", started)
    monkeypatch.setattr("torch.nn.utils.clip_grads_with_norm_", clipped)
    config = tiny("name=norms", "optim.grad_clip=0.01", *SHORT, *options)
    assert train(config) == 0
    lines = [line for line in metrics(config.run_folder) if "train/loss" in line]
    logged = [[line[f"train/grad_norm/layer{layer}"] for layer in range(2)] for line in lines]
    assert logged == [pytest.approx(norms, rel=1e-5) for norms in norms_of_steps]
    assert len(logged) == 4
    assert all(0.1 < max(norms) < line["train/grad_norm"] for norms, line in zip(logged, lines, strict=True))


# ---------------------------------------------------------------- runs


@pytest.fixture
def options() -> list[str]:
    return [
        *SHORT,
        "model.dropout=0.2",
        "trainer.micro_batch=2",
        "model.normalizer={name: ssmax, bias: true}",
        "trainer.precision=bf16-mixed",
    ]


def test_what_is_logged_changes_nothing_that_is_trained_and_resumes_exactly(tiny, options: list[str]):
    plain, logging = tiny("name=without", "log.dynamics=[]", *options), tiny("name=with", EVERYTHING, *options)
    assert train(plain) == train(logging) == 0
    assert differences(plain.run_folder, logging.run_folder) == ["train/grad_norm/layer1"]

    def logged() -> list[dict[str, float]]:
        return [
            {name: value for name, value in line.items() if name not in TIMES} for line in metrics(logging.run_folder)
        ]

    before = logged()
    assert sum(name.startswith("largest_score/") for name in before[0]) == 4
    kill_after(logging.run_folder, 2)
    assert train(tiny("name=with", EVERYTHING, *options, "resume=auto")) == 0
    assert logged() == before
    assert differences(plain.run_folder, logging.run_folder) == ["train/grad_norm/layer1"]
