"""Muon: orthogonal updates of each projection, torch's routine, AdamW for the rest, and what it refuses."""

import pytest
import torch
from folders import last_checkpoint
from torch import Tensor, nn

from lm.config.training_config import Muon, OptimConfig
from lm.config.tree import Config
from lm.model.decoder import Decoder, parameter_group, projection_rows
from lm.runs.checkpoints import load_checkpoint
from lm.training.optimizers import MUON_BATCH_ELEMENTS, make_optimizer, orthogonal_approximation, saved_optimizer_state
from lm.training.train import train

MODELS = {
    "attention": [],
    "grouped queries, gelu": ["model.n_kv_head=1", "model.mlp=gelu"],
    "gau": ["model.block=gau", "model.n_head=1", "model.normalizer=relu2"],
}


def made(config: Config, optim: OptimConfig) -> tuple[Decoder, torch.optim.Optimizer]:
    decoder = Decoder(config.model, 400, 32)
    return decoder, make_optimizer(decoder, optim)


def give_gradients(decoder: Decoder, seed: int) -> None:
    """A gradient drawn anew for each parameter, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def parts(decoder: Decoder) -> dict[str, Tensor]:
    """The projections in a decoder's matrices, by name."""
    fused = projection_rows(decoder)
    return {
        f"{name} {part}": parameter.detach()[rows]
        for name, parameter in decoder.named_parameters()
        if parameter_group(name, parameter) == "matrices"
        for part, rows in fused.get(name, {"": slice(None)}).items()
    }


@pytest.fixture(params=["bf16 products", "fp32 products"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether bf16 counts as native, whatever this machine has."""
    native = request.param == "bf16 products"
    monkeypatch.setattr("lm.training.optimizers.describe_bf16_hardware", lambda accelerator: "yes" if native else "")
    return native


OPTIONS = {"default": Muon(), "other": Muon(momentum=0.8)}


@pytest.mark.parametrize("elements", [MUON_BATCH_ELEMENTS, 1])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_each_projection_gets_the_update_of_torch_s_muon_alone(
    tiny, monkeypatch: pytest.MonkeyPatch, model: str, kind: str, elements: int
):
    monkeypatch.setattr("lm.training.optimizers.MUON_BATCH_ELEMENTS", elements)
    monkeypatch.setattr("lm.training.optimizers.describe_bf16_hardware", lambda accelerator: "as in torch's")
    options = OPTIONS[kind]
    decoder, optimizer = made(tiny(*MODELS[model]), OptimConfig(optimizer=options))
    parts_alone = {name: nn.Parameter(part.clone()) for name, part in parts(decoder).items()}
    reference = torch.optim.Muon(
        parts_alone.values(),
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn="match_rms_adamw",
    )
    fused = projection_rows(decoder)
    for step in range(3):
        give_gradients(decoder, step)
        for name, parameter in decoder.named_parameters():
            for part, rows in fused.get(name, {"": slice(None)}).items():
                if f"{name} {part}" in parts_alone:
                    parts_alone[f"{name} {part}"].grad = parameter.grad[rows].clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(part, parts_alone[name]) for name, part in parts(decoder).items())


@pytest.mark.parametrize("shape", [(4, 64, 64), (4, 192, 64), (4, 64, 192)])
def test_products_in_fp32_round_as_those_in_bf16(shape: tuple[int, int, int]):
    """So that the mathematics of a run does not depend on what its machine computes in."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = matrices.double() / matrices.double().norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        gram = exact @ exact.mT
        exact = 3.4445 * exact + (-4.7750 * gram + 2.0315 * gram @ gram) @ exact
    updates = [orthogonal_approximation(matrices, products) for products in (torch.bfloat16, torch.float32)]
    assert [update.dtype for update in updates] == [torch.bfloat16, torch.float32]
    assert torch.equal(updates[1].bfloat16().float(), updates[1])
    errors = [float((update - exact).norm() / exact.norm()) for update in updates]
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert errors[0] > 1e-3, "bfloat16's"
    assert (updates[0] - updates[1]).norm() / exact.norm() < errors[0]


def test_all_other_parameters_get_exactly_adamw_s_update(tiny):
    settings = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.3}
    config = tiny("model.normalizer=qassmax", "eval.long_context.length_factor=0")
    groups = tiny("optim.groups={vectors: {weight_decay: 0.2}}").optim.groups
    kinds = [
        OptimConfig(optimizer=kind, groups=groups)
        for kind in (Muon(**settings), tiny("optim.optimizer=adamw").optim.optimizer)
    ]
    vars(kinds[1].optimizer).update(settings)
    decoders = []
    for optim in kinds:
        decoder, optimizer = made(config, optim)
        for step in range(3):
            give_gradients(decoder, step)
            optimizer.step()
        decoders.append(decoder)
    optimized, reference = (dict(decoder.named_parameters()) for decoder in decoders)
    for name, parameter in optimized.items():
        assert torch.equal(parameter, reference[name]) == (parameter_group(name, parameter) != "matrices"), name


def test_a_run_keeps_its_state_in_fp32(tiny):
    config = tiny(
        "name=a",
        "optim.optimizer={name: muon, momentum: 0.9}",
        "optim.groups.head.lr_factor=0.5",
        "trainer.precision=bf16-mixed",
    )
    assert train(config) == 0
    states = saved_optimizer_state(load_checkpoint(last_checkpoint(config.run_folder)))
    assert states["blocks.0.attention.qkv.weight"].keys() == {"momentum_buffer"}
    assert states["embedding.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for state in states.values() for value in state.values()} == {torch.float32}
