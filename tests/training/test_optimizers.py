"""Optimizers: learning rates, groups of parameters, state by name, and a new optimizer in one row."""

import pytest
import torch

from lm.config.training_config import ConstantRate, CosineRate, OptimConfig, WSDRate
from lm.model.decoder import Decoder, projection_rows
from lm.training.optimizers import PARAMETER_GROUP_NAMES, make_optimizer, parameter_groups, set_learning_rates


def decoder(tiny, *options: str) -> Decoder:
    return Decoder(tiny(*options).model, 400, 32)


def test_learning_rate_follows_the_schedule():
    optim = OptimConfig(lr=1.0, warmup_steps=10, schedule=CosineRate(final_fraction=0.1))
    assert [optim.lr_at(step, 110) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1, 1, 0.55, 0.1])
    optim.schedule = ConstantRate()
    assert [optim.lr_at(step, 110) for step in (4, 10, 109)] == pytest.approx([0.5, 1, 1])
    optim.schedule = WSDRate(decay_fraction=0.5, final_fraction=0.0)
    assert [optim.lr_at(step, 100) for step in (10, 50, 75, 100)] == pytest.approx([1, 1, 0.5, 0])


def test_weight_decay_is_on_matrices_only(tiny):
    options = ["model.normalizer={name: qassmax}", "model.bias=true", "model.norm=layer", "model.position=learned"]
    model = decoder(tiny, *options, "eval.long_context.length_factor=0")
    groups = parameter_groups(model, tiny("optim.optimizer.weight_decay=0.3").optim)
    assert {group["name"]: group["weight_decay"] for group in groups} == dict(
        zip(PARAMETER_GROUP_NAMES, (0.3, 0.3, 0.3, 0.0, 0.0), strict=True)
    )
    names = {group["name"]: [name for name, _ in group["params"]] for group in groups}
    assert names["embedding"] == ["embedding.weight", "position.weight"]
    assert names["head"] == ["head.weight"]
    assert {p.dim() for group in groups if group["weight_decay"] for _, p in group["params"]} == {2}
    assert {p.dim() for _, p in groups[PARAMETER_GROUP_NAMES.index("vectors")]["params"]} == {1}
    assert all(".normalizer." in name for name in names["normalizer"])
    assert {name for group in names.values() for name in group} == {name for name, _ in model.named_parameters()}
    assert sum(map(len, names.values())) == len(list(model.parameters()))


def test_a_tied_head_is_the_embedding(tiny):
    names = [group["name"] for group in parameter_groups(decoder(tiny, "model.tied=true"), OptimConfig())]
    assert names == ["matrices", "embedding", "vectors"]


def test_groups_have_their_own_rate_and_decay(tiny):
    phases = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax, warmup_steps: 4}]"
    config = tiny(
        phases,
        "optim.groups={embedding: {lr_factor: 0.5, weight_decay: 0}, vectors: {weight_decay: 0.2}}",
        "optim.warmup_steps=0",
    )
    optimizer = make_optimizer(decoder(tiny, "model.normalizer=ssmax"), config.optim)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0, 0.1, 0.2, 0]
    set_learning_rates(optimizer, config, 1, 4)
    rate = config.optim.lr_at(4, 8)
    warm = rate / 4  # a quarter of the new normalizer's own warm-up
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate / 2, rate, rate, warm]


@pytest.mark.parametrize("options", [[], ["model.n_kv_head=1"]])
def test_slices_are_of_the_projections_they_are_named_for(tiny, options: list[str]):
    model, projected = decoder(tiny, *options), {}
    attention, x = model.blocks[0].attention, torch.randn(1, 3, model.config.n_embd)
    attention.attend = lambda x, q, k, v, context: projected.update(q=q, k=k, v=v) or x
    attention(x, None)
    parts = projection_rows(model)["blocks.0.attention.qkv.weight"]
    assert parts.keys() == projected.keys()
    for part, rows in parts.items():
        assert torch.allclose(projected[part].transpose(1, 2).flatten(2), x @ attention.qkv.weight[rows].T, atol=1e-6)
