"""Learning rates that transfer over width and depth: the definition with explicit multipliers, coordinate checks, and
what refuses them.
"""

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from conftest import lm, thinned
from folders import differences, same
from torch import Tensor, nn
from torch.func import functional_call

from lm.attention import catalogue as opt
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options
from lm.config import training_config
from lm.config.model_config import Learned, ModelConfig, Transfer
from lm.config.training_config import AdamW, Muon, OptimConfig, Optimizer
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.huggingface.exporting import export_for_transformers
from lm.model.decoder import Decoder
from lm.model.swapped import with_normalizer
from lm.model.transfer import gradients_to_norm, scalings
from lm.runs.loading import load, save_model
from lm.training.before_training import check_before_data
from lm.training.module import TrainModule
from lm.training.optimizers import load_named_state, make_optimizer, named_state, parameter_groups
from lm.training.train import train

V, T, HEAD = 64, 32, 16
BASE = {"base_width": 32, "base_depth": 2}


def model(width: int, depth: int, transfer: bool = True, **options: object) -> Decoder:
    """A decoder with heads of 16, whose base model, if it has one, is of width 32 and depth 2."""
    shape = {"n_layer": depth, "n_head": width // HEAD, "n_embd": width}
    return Decoder(ModelConfig(**shape, transfer=Transfer(**BASE) if transfer else None, **options), V, T, seed=0)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [Batch.of(torch.randint(V, (8, T + 1), generator=generator)) for _ in range(count)]


def step(decoder: Decoder, optimizer: torch.optim.Optimizer, batch: Batch, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    optimizer.zero_grad()
    (decoder.loss(batch) / batch.targets.numel()).backward()
    optimizer.step()


# ---------------------------------------------------------------- the definition


FULL = {
    "n_kv_head": None,
    "bias": True,
    "norm": "layer",
    "position": Learned(),
    "embedding_norm": "rms",
    "normalizer": opt.SSMax(),
}
SHAPES = {
    "all kinds of parameters": FULL,
    "tied": {"tied": True, "qk_norm": True},
    "values": {"value_residual": "embedding"},
}
SHAPES["the first layer's values"] = {"value_residual": "first_layer", "output_gate": "element", "differential": True}


@pytest.mark.parametrize("shape", thinned(SHAPES, ["all kinds of parameters"]))
def test_adamw_trains_the_model_with_explicit_multipliers(shape: str):
    """CompleteP's Table 1, alpha = 1, as it stands there: logits x 1/m, blocks x 1/l, and each parameter's rate, decay
    and epsilon.
    """
    m, depth, lr, eps, decay = 3.0, 2.0, 1e-2, 1e-4, 0.3  # an epsilon that counts
    decoder = model(96, 4, **SHAPES[shape]).double()
    reference = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    factor = {name: 1 / m if name.startswith("norm.") else 1 / depth if ".out." in name else 1.0 for name in reference}
    reference = {name: (value / factor[name]).requires_grad_() for name, value in reference.items()}
    groups = []
    for name, value in reference.items():
        in_block = name.startswith(("blocks.", "value_embedding."))
        hidden = name.startswith("blocks.") and value.dim() == 2
        decayed = decay if value.dim() == 2 else 0.0
        options = {"lr": lr / m, "weight_decay": decayed * m} if hidden else {"lr": lr, "weight_decay": decayed}
        groups.append({"params": [value], "eps": eps / m / (depth if in_block else 1), **options})
    reference_optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    optimizer = make_optimizer(decoder, OptimConfig(optimizer=AdamW(eps=eps, weight_decay=decay)))
    for batch in batches(3):
        step(decoder, optimizer, batch, lr)
        reference_optimizer.zero_grad()
        weights = {name: factor[name] * value for name, value in reference.items()}
        tied = {"head.weight": weights["embedding.weight"]} if decoder.config.tied else {}
        hidden = functional_call(decoder, {**weights, **tied}, (batch.tokens,))
        logits = hidden @ {**weights, **tied}["head.weight"].t()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        norms = [
            torch.nn.utils.get_total_norm(gradients)
            for gradients in (gradients_to_norm(decoder, decoder.config), [p.grad for p in reference.values()])
        ]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        reference_optimizer.step()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter, factor[name] * reference[name], rtol=1e-5, atol=1e-7, msg=name)


def test_initial_values_have_the_base_model_s_size_times_the_factors():
    decoder, base = (
        dict(model(width, depth, value_residual="embedding").named_parameters()) for width, depth in ((512, 8), (32, 2))
    )
    m, depth = 16, 4
    for name, factor in {
        "embedding.weight": 1, "head.weight": 1, "value_embedding.1.weight": 1, "norm.weight": 1 / m,
        "blocks.1.attention_norm.weight": 1, "blocks.1.attention.qkv.weight": m**-0.5,
        "blocks.1.mlp.up.weight": m**-0.5,
        "blocks.1.attention.out.weight": m**-0.5 / depth, "blocks.1.mlp.out.weight": m**-0.5 / depth,
    }.items():  # fmt: skip
        size = [decoder_of_size[name].detach().square().mean().sqrt().item() for decoder_of_size in (decoder, base)]
        assert size[0] / size[1] == pytest.approx(factor, rel=0.1), name


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_the_base_model_starts_and_is_trained_as_without(optimizer: AdamW):
    decoders = [model(32, 2, transfer) for transfer in (True, False)]
    assert same(*(decoder.state_dict() for decoder in decoders))
    transferred, plain = (
        make_optimizer(decoder, OptimConfig(optimizer=optimizer)).param_groups for decoder in decoders
    )
    assert [{**group, "params": None} for group in transferred] == [{**group, "params": None} for group in plain]


# ---------------------------------------------------------------- coordinate checks: what a few steps change does not
# depend on the size


def change(decoder: Decoder, optimizer: AdamW, lr: float) -> tuple[float, float]:
    """Mean absolute change, over four steps, of the residual stream before the last norm, and of the logits."""
    *training, probe = batches(5)
    trained_optimizer, inputs = make_optimizer(decoder, OptimConfig(optimizer=optimizer)), []
    decoder.norm.register_forward_hook(lambda module, arguments, out: inputs.append(arguments[0].detach()))

    @torch.no_grad()
    def activations() -> tuple[Tensor, Tensor]:
        return decoder.logits(probe.tokens), inputs.pop()

    before = activations()
    for batch in training:
        step(decoder, trained_optimizer, batch, lr)
        inputs.clear()
    logits, stream = (float((a - b).abs().mean()) for a, b in zip(activations(), before, strict=True))
    return stream, logits


CASES: dict[str, tuple[dict[str, object], AdamW, float]] = {
    "adamw": ({}, AdamW(), 1e-2),
    "muon": ({}, Muon(), 1e-2),
    "muon, original": ({}, Muon(adjust_lr="original"), 2e-2),
    "tied": ({"tied": True}, AdamW(), 1e-2),
    "modern": (
        {
            "out_init": "zero",
            "qk_norm": True,
            "mlp": "relu2",
            "value_residual": "first_layer",
            "normalizer": opt.SSMax(),
        },
        AdamW(),
        1e-2,
    ),
}


@pytest.mark.parametrize("case", thinned(CASES, ["adamw", "modern"]))
def test_eight_times_the_width_changes_as_much(case: str):
    options, optimizer, lr = CASES[case]
    small, large = (change(model(width, 2, **options), optimizer, lr) for width in (32, 256))
    assert all(1 / 3 < b / a < 2 for a, b in zip(small, large, strict=True)), (small, large)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "factors"), [(AdamW(), (20, 2.5)), (Muon(), (2.5, 2.5))], ids=["adamw", "muon"])
def test_without_it_eight_times_the_width_changes_more(optimizer: AdamW, factors: tuple[float, float]):
    small, large = (change(model(width, 2, transfer=False), optimizer, 1e-2) for width in (32, 256))
    assert all(b / a > factor for a, b, factor in zip(small, large, factors, strict=True)), (small, large)


def test_four_times_the_depth_changes_as_much():
    for optimizer in (AdamW(), Muon()):
        small, large = (change(model(32, depth), optimizer, 1e-2) for depth in (2, 8))
        assert all(1 / 2 < b / a < 2 for a, b in zip(small, large, strict=True)), (small, large)
    small, large = (change(model(32, depth, transfer=False), AdamW(), 1e-2) for depth in (2, 8))
    assert large[0] / small[0] > 2.5


# ---------------------------------------------------------------- groups, their rates, the banner


@pytest.mark.parametrize(
    ("normalizer", "reading"),
    [
        (opt.ASEntmax(), {"w_b", "w_g"}),
        (opt.Forget(), {"w"}),
        (opt.SSMax(bias=True), set()),
        (opt.QASSMax(), set()),
        (opt.PN(), set()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_normalizer_s_matrices_of_the_layer_s_input_are_hidden_matrices(normalizer: Options, reading: set[str]):
    groups = parameter_groups(model(64, 2, normalizer=normalizer), OptimConfig())
    factors = {
        name: group["lr_factor"] for group in groups if group["name"] == "normalizer" for name, _ in group["params"]
    }
    assert factors
    assert {name.rsplit(".", 1)[1] for name, factor in factors.items() if factor == 0.5} == reading
    assert set(factors.values()) <= {1.0, 0.5}


@pytest.mark.parametrize(("adjust_lr", "hidden"), [("match_rms_adamw", 16**-0.5), ("original", 1.0)])
def test_muon_s_rates_are_scaled_by_what_its_updates_need(adjust_lr: str, hidden: float):
    """m = 16, l = 4."""
    groups = parameter_groups(model(512, 8), OptimConfig(optimizer=Muon(adjust_lr=adjust_lr)))
    rates = {name: group["lr_factor"] for group in groups for name, _ in group["params"]}
    for name, rate in {
        "embedding.weight": 1, "head.weight": 1, "norm.weight": 1 / 16, "blocks.3.attention_norm.weight": 1,
        "blocks.3.attention.qkv.weight": hidden, "blocks.3.mlp.up.weight": hidden,
        "blocks.3.attention.out.weight": hidden / 4, "blocks.3.mlp.out.weight": hidden / 4,
    }.items():  # fmt: skip
        assert rates[name] == pytest.approx(rate), name


def test_epsilon_is_scaled_but_in_matrices_of_muon_which_has_none():
    groups = {kind.name: parameter_groups(model(64, 4), OptimConfig(optimizer=kind)) for kind in (AdamW(), Muon())}
    matrices = {
        kind: {group.get("eps") for group in groups_of_kind if group["name"] == "matrices"}
        for kind, groups_of_kind in groups.items()
    }
    assert matrices == {"adamw": {1e-8 / 4, 1e-8 / 2}, "muon": {None}}
    assert {group["eps"] for group in groups["muon"] if group["name"] in ("embedding", "head")} == {1e-8 / 2}


def test_a_matrix_of_heads_is_no_matrix_of_the_layer_s_input(monkeypatch: pytest.MonkeyPatch):
    class Mixing(Normalizer):
        def initialise(self) -> None:
            self.heads = nn.Parameter(torch.eye(self.layer.n_head))
            self.input = nn.Parameter(torch.zeros(self.layer.n_head, self.layer.width))

        def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
            return scores

    monkeypatch.setattr("lm.model.transfer.make_normalizer", Mixing)
    decoder = model(64, 2)
    decoder.blocks[0].attention.normalizer = Mixing(opt.Softmax(), LayerSpec(4, 16, 64, T))
    factors = scalings(decoder, decoder.config, 1.0)
    assert [factors[f"blocks.0.attention.normalizer.{name}"].lr for name in ("heads", "input")] == [1, 1 / 2]


def test_factors_of_groups_multiply_and_the_banner_shows_the_product(tiny, capsys: pytest.CaptureFixture):
    options = [
        "model.transfer={base_width: 16, base_depth: 1}",
        "optim.groups.matrices.lr_factor=3",
        "trainer.max_steps=2",
    ]
    assert train(tiny("name=a", *options)) == 0
    out = capsys.readouterr().out
    assert "transfer    lr is that of a base model of 1/2 of the width and 1/2 of the depth" in out
    for line in (
        r"matrices (attention.qkv, mlp.up) 22,528 parameters, lr x 1.5, weight decay 0.2, eps 2.5e-09;",
        r"matrices (attention.out, mlp.out) 10,240 parameters, lr x 0.75, weight decay 0.4, eps 5e-09;",
        r"vectors (attention_norm, mlp_norm) 128 parameters, lr x 1, weight decay 0, eps 2.5e-09;",
        "vectors (norm) 32 parameters, lr x 0.5, weight decay 0\n",
    ):
        assert line in out


def test_runs_clip_by_the_norm_of_gradients_with_factors_in_the_forward_pass(tiny, monkeypatch: pytest.MonkeyPatch):
    clip, norms = TrainModule.configure_gradient_clipping, []

    def clipped(module: TrainModule, *arguments: object, **options: object) -> None:
        gradients = {name: p.grad.clone() for name, p in module.decoder.named_parameters()}
        factors = {
            name: 1 / 2 if name == "norm.weight" else 1 / 4 if name.endswith(".out.weight") else 1 for name in gradients
        }
        squares = {
            name: float((factors[name] * gradient).double().square().sum()) for name, gradient in gradients.items()
        }
        of_block = sum(square for name, square in squares.items() if name.startswith("blocks.1."))
        clip(module, *arguments, **options)
        logged = module.grad_norm, module.layer_grad_norms["train/grad_norm/layer1"]
        assert logged == pytest.approx((sum(squares.values()) ** 0.5, of_block**0.5), rel=1e-5)
        scale = 0.01 / module.grad_norm
        assert all(
            torch.allclose(p.grad, scale * gradients[name], rtol=1e-3) for name, p in module.decoder.named_parameters()
        )
        norms.append(logged)

    monkeypatch.setattr(TrainModule, "configure_gradient_clipping", clipped)
    shape = ["model.n_layer=4", "model.transfer={base_width: 16, base_depth: 1}"]
    assert (
        train(
            tiny(
                "trainer.max_steps=2",
                "optim.grad_clip=0.01",
                "log.every=1",
                "eval.long_context.length_factor=0",
                *shape,
            )
        )
        == 0
    )
    assert len(norms) == 2


# ---------------------------------------------------------------- runs, weights of others, exports, swaps


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_training_goes_on_from_the_optimizer_s_state_as_in_one_go(optimizer: AdamW):
    decoder, optim = model(64, 4), OptimConfig(optimizer=optimizer)
    first_optimizer, (first, second) = make_optimizer(decoder, optim), batches(2)
    step(decoder, first_optimizer, first, 1e-2)
    other = copy.deepcopy(decoder)
    resumed = make_optimizer(other, optim)
    load_named_state(resumed, named_state(first_optimizer))
    for trained_decoder, its_optimizer in ((decoder, first_optimizer), (other, resumed)):
        step(trained_decoder, its_optimizer, second, 1e-2)
    assert same(decoder.state_dict(), other.state_dict())


@torch.no_grad()
def test_exports_and_swaps_know_nothing_of_it(tmp_path: Path):
    decoder = model(64, 4)
    tokens = batches(1)[0].tokens
    folder = save_model(decoder, tmp_path / "model")
    assert (
        lm(
            "import", str(export_for_transformers(folder, "last", tmp_path / "hf")), "-o", str(tmp_path / "back")
        ).returncode
        == 0
    )
    for other in (
        with_normalizer(decoder, decoder.config.normalizer),
        load(folder).decoder,
        load(tmp_path / "back").decoder,
    ):
        torch.testing.assert_close(other.logits(tokens), decoder.logits(tokens), rtol=0, atol=1e-6)
    assert load(folder).decoder.config.transfer == decoder.config.transfer
    assert load(tmp_path / "back").decoder.config.transfer is None


def test_a_run_is_resumed_with_its_base_model_and_no_other(tiny):
    base, short = (
        "model.transfer={base_width: 16, base_depth: 1}",
        ["trainer.max_steps=4", "trainer.checkpoint_every=2"],
    )
    for name, optimizer in (("adamw", "adamw"), ("muon", "muon")):
        options = [base, f"optim.optimizer={optimizer}", *short]
        for run in ("straight", "resumed"):
            assert train(tiny(f"name={name}-{run}", *options)) == 0
        straight, folder = (tiny(f"name={name}-{run}").run_folder for run in ("straight", "resumed"))
        assert train(tiny(f"name={name}-resumed", *options, f"resume={folder}/checkpoints/step-000002.ckpt")) == 0
        assert not differences(straight, folder)
    for other in ([], [base.replace("16", "32")]):
        with pytest.raises(ConfigError, match=r"model\.transfer"):
            train(tiny("name=adamw-resumed", *short, *other, "resume=auto"))
    assert train(tiny("name=plain", *short)) == 0
    with pytest.raises(ConfigError, match=r"model\.transfer"):
        train(tiny("name=plain", base, *short, "resume=auto"))


def test_weights_in_other_proportions_are_refused(tiny, tmp_path: Path):
    folders = [
        save_model(Decoder(tiny(*overrides).model, 400, 32), tmp_path / overrides[0])
        for overrides in (["model.transfer.base_width=16"], ["seed=1"])
    ]
    start, plain = (f"init_from={folder}" for folder in folders)
    for options, width, depth in (([], 32, 2), (["model.transfer.base_depth=1"], 32, 1)):
        message = (
            rf"^model\.transfer = {{base_width: {width}, base_depth: {depth}}}: the weights of [^\n]* have other "
            r"proportions"
        )
        with pytest.raises(
            ConfigError, match=message + r"[^\n]*; set model\.transfer={base_width: 16, base_depth: 2}$"
        ):
            check_before_data(tiny(start, *options), None)
    with pytest.raises(ConfigError, match=r"^model\.transfer = [^\n]*; drop it$"):
        check_before_data(tiny(plain, "model.transfer.base_width=16"), None)
    assert check_before_data(tiny(start, "model.transfer={base_width: 16, base_depth: 2}"), None)[
        1
    ]  # the same, written otherwise


REFUSED = {
    "gated units": (
        ["model.block=gau", "model.n_head=1", "model.transfer.base_depth=1"],
        r"model\.transfer = .*: is of blocks of attention",
    ),
    "half a head": (
        ["model.transfer.base_width=24"],
        r"model\.transfer\.base_width = 24: gives a base model of n_head = 1\.5: width is added in heads of one size; "
        r"[^\n]* of 16$",
    ),
    "half a head of keys": (
        ["model.n_kv_head=1", "model.transfer.base_width=16"],
        r"model\.transfer\.base_width = 16: gives a base model of n_kv_head = 0\.5: [^\n]*; choose a multiple of 32",
    ),
    "half of the MLP's width": (
        ["model.n_mlp=99", "model.transfer.base_width=16"],
        r"model\.transfer\.base_width = 16: gives a base model of n_mlp = 49\.5: n_mlp is in proportion to the width; "
        r"[^\n]* of 32$",
    ),
    "no width": (["model.transfer.base_width=0"], r"model\.transfer\.base_width = 0: must be >= 1"),
    "another key": (
        ["model.transfer.width=32"],
        r"model\.transfer\.width = 32: unknown key; did you mean 'base_width'\?",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_base_model_that_there_can_not_be_is_refused(tiny, what: str):
    options, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        tiny(*options)


def test_an_optimizer_without_a_rule_is_refused(tiny, monkeypatch: pytest.MonkeyPatch):
    @dataclass
    class Momentum(Optimizer):
        name: ClassVar[str] = "momentum"

    monkeypatch.setitem(training_config.OPTIMIZERS, "momentum", Momentum)
    with pytest.raises(
        ConfigError,
        match=r"^optim\.optimizer = 'momentum': has no rule for rates that transfer .*; drop model\.transfer$",
    ):
        tiny("optim.optimizer=momentum", "model.transfer.base_depth=1")


def test_the_width_of_heads_given_apart_is_kept():
    config = replace(model(64, 2).config, n_head=2, head_size=24)
    assert not [*config.problems()]
    assert config.size_multipliers == (2, 1)
    assert math.prod(ModelConfig().size_multipliers) == 1
