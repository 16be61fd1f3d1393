"""Learning rates that transfer over width and depth (`model.transfer`), from a base model with 1/m of the width and 1/l
of the depth.

Initial values, learning rates and epsilons are scaled such that a learning rate tuned on the base model also serves
this model.

Sources: muP, Yang and Hu et al., arXiv 2203.03466, for the width; CompleteP, Dey et al., arXiv 2505.01618, Table 1 with
alpha = 1, for the depth. Both multiply outputs in the forward pass: the logits by 1/m, what a block adds to the
residual stream by 1/l. Here these factors are in weights instead: 1/m in the gain of the last norm, 1/l in the
projections into the residual stream. The factors change initial values, learning rates and gradients of these weights.
AdamW's steps are the same either way, also where gradients are clipped: their norm is computed as if the factors were
in the forward pass (`gradients_to_norm`). Only training has to know the factors, as evaluations, swaps and exports see
weights like any other. docs/recipes.md has the table and where each entry comes from.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lm.attention.catalogue import make_normalizer
from lm.attention.normalizer import Normalizer
from lm.config.model_config import ModelConfig

INTO_RESIDUAL = (
    ".out.weight",
    ".out.bias",
)  # ends of the names of the projections that a block adds to the residual stream


def gradients_to_norm(module: nn.Module, config: ModelConfig) -> list[Tensor]:
    """Tensors whose total norm is a decoder's or block's gradient norm, as if the factors 1/m and 1/l were in the
    forward pass. m and l are the model's width and depth divided by the base model's. Each tensor is a gradient, or a
    gradient's norm times 1/m or 1/l. Parameters without a gradient are left out."""
    width, depth = config.size_multipliers

    def gradient_or_norm(name: str, gradient: Tensor) -> Tensor:
        factor = (
            1 / width
            if name.startswith("norm.")
            else 1 / depth
            if name.endswith(INTO_RESIDUAL) and ".normalizer." not in name
            else 1
        )
        return gradient if factor == 1 else gradient.norm() * factor

    return [
        gradient_or_norm(name, parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    ]


@dataclass(frozen=True)
class Scaling:
    """Factors for one parameter on the learning rate, which was tuned on the base model, and on the optimizer's
    epsilon.

    The factor on the epsilon is the factor by which the parameter's gradient differs from the base model's.
    """

    lr: float = 1.0
    eps: float = 1.0


def initial_scale(config: ModelConfig, name: str) -> float:
    """The factor by which `model.transfer` changes the initial standard deviation of the decoder's parameter `name`; 1
    without it.

    With m times the base model's width and l times its depth, the factor is m^-1/2 for hidden matrices and value
    embeddings, (m l)^-1/2 for projections into the residual stream. As every model divides these projections by sqrt(2
    n_layer), too, their standard deviation is m^-1/2 / l times the base model's.
    """
    width, depth = config.size_multipliers
    if name.endswith(INTO_RESIDUAL):
        return (width * depth) ** -0.5
    return width**-0.5 if name.startswith(("blocks.", "value_embedding.")) else 1.0


def scalings(decoder: nn.Module, config: ModelConfig, width_exponent: float) -> dict[str, Scaling]:
    """The `Scaling` of each of a decoder's parameters, by name; all factors are 1 without `model.transfer`.

    width_exponent: the learning rate of hidden matrices is divided by (width / base width) to this power; 1 for AdamW.
    """
    width, depth = config.size_multipliers
    normalizers = ((path, module) for path, module in decoder.named_modules() if isinstance(module, Normalizer))
    input_matrices = {f"{path}.{name}" for path, module in normalizers for name in _input_matrices(module)}

    def scaling(name: str, rank: int) -> Scaling:
        if name.startswith("norm."):
            return Scaling(lr=1 / width)
        if not name.startswith(("blocks.", "value_embedding.")):  # embedding and its norm, learned positions, head
            return Scaling(eps=1 / width)
        if ".normalizer." in name:
            return Scaling(1 / width if name in input_matrices else 1.0, 1 / (width * depth))
        lr_factor = width**-width_exponent if rank >= 2 and name.startswith("blocks.") else 1.0
        return (
            Scaling(lr_factor / depth, 1 / width)
            if name.endswith(INTO_RESIDUAL)
            else Scaling(lr_factor, 1 / (width * depth))
        )

    return {name: scaling(name, parameter.dim()) for name, parameter in decoder.named_parameters()}


def _input_matrices(normalizer: Normalizer) -> list[str]:
    """Names of a normalizer's matrices that read the layer's input, and whose input dimension therefore grows with the
    model's width.
    """
    wider_layer = replace(normalizer.layer, width=2 * normalizer.layer.width)
    with torch.device("meta"):
        wider_parameters = dict(make_normalizer(normalizer.options, wider_layer).named_parameters())
    return [
        name
        for name, p in normalizer.named_parameters()
        if p.dim() >= 2 and wider_parameters[name].size(-1) > p.size(-1)
    ]
