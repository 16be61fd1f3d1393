"""Metrics of a model in training: values of the normalizers' parameters, and the metrics that `log.dynamics` names.

Metrics are named `METRIC/layerL/headH`, or `METRIC/layerL` if they have one value a layer; layers and heads count from
0. Values stay on the device until `copied_to_host` copies all of them to the host at once.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lm.data.batches import Batch
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.device import Device, eval_mode

NamedValues = tuple[list[str], Tensor]  # names of metrics, and their values (names,)


def copied_to_host(metrics: Iterable[NamedValues]) -> dict[str, float]:
    """All metrics as floats by name, copied from the device to the host in one transfer."""
    metrics = list(metrics)
    names = [name for group, _ in metrics for name in group]
    return (
        dict(zip(names, torch.cat([values.double() for _, values in metrics]).tolist(), strict=True)) if names else {}
    )


def normalizer_parameters(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield `normalizer/NAME/layerL/headH` for each normalizer's parameter with one value a head. For any other
    parameter yield its root mean square, `normalizer/NAME/layerL/rms`. A parameter shared by layers is named after the
    first of these layers.
    """
    logged_parameters: set[nn.Parameter] = set()
    for layer, normalizer in enumerate(decoder.normalizers()):
        for name, parameter in normalizer.named_parameters():
            if parameter in logged_parameters:
                continue
            logged_parameters.add(parameter)
            prefix, values = f"normalizer/{name}/layer{layer}", parameter.detach().float()
            # a submodule's bias may have this shape by chance
            if "." not in name and values.shape == (normalizer.layer.n_head,):
                yield _head_metrics(prefix, values)
            else:
                yield [f"{prefix}/rms"], values.square().mean().sqrt().view(1)


def logit_scales(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield c(n), the factor on q.k / sqrt(D) for a query that sees n keys in a sequence of the training length L; D is
    the head size.

    `logit_scale/nN/layerL/headH` is c(n) at n = 2, sqrt(L) and L. `logit_scale/slope/...` and
    `logit_scale/intercept/...` are a and b of the least-squares fit a ln n + b over n = 2 ... L. n = 1 is left out: the
    weight of a single key is 1 whatever its score. Normalizers whose scores are no multiple of q.k are left out, too
    (`Normalizer.scale_by_position`).
    """
    for layer, normalizer in enumerate(decoder.normalizers()):
        scale, length = normalizer.scale_by_position(), normalizer.layer.train_length
        if scale is None:
            continue
        scale = scale.to(decoder.embedding.weight.device)  # a normalizer without parameters makes it on the CPU
        for n in sorted({min(2, length), round(math.sqrt(length)), length}):
            yield _head_metrics(f"logit_scale/n{n}/layer{layer}", scale[:, n - 1])
        if length > 2:
            log_n = torch.arange(2, length + 1, device=scale.device, dtype=torch.float64).log()
            centred_log_n = log_n - log_n.mean()
            mean = scale[:, 1:].mean(-1)
            # exactly 0 for a constant scale
            slope = (scale[:, 1:] - mean.unsqueeze(-1)) @ centred_log_n / centred_log_n.square().sum()
            yield _head_metrics(f"logit_scale/slope/layer{layer}", slope)
            yield _head_metrics(f"logit_scale/intercept/layer{layer}", mean - slope * log_n.mean())


def largest_scores(decoder: Decoder, batch: Batch, device: Device) -> Iterator[NamedValues]:
    """Yield `largest_score/layerL/headH`: the largest score (fp32, before normalization) of a query and a key that it
    sees, in a batch.

    Memory holds scores of some queries of one layer at a time (`lm.model.attention_stream`). Model and random state
    stay as they are.
    """
    maxima: dict[int, Tensor] = {}
    with eval_mode(decoder), device.autocast():
        for block in attention_blocks(decoder, batch.to(device.device)):
            # (H,)
            values = block.scores.masked_fill(~block.normalizer.visible(block.layout), -math.inf).amax((0, 2, 3))
            maxima[block.layer] = torch.maximum(maxima[block.layer], values) if block.layer in maxima else values
    for layer, values in maxima.items():
        yield _head_metrics(f"largest_score/layer{layer}", values)


def gradient_norms(decoder: Decoder) -> Iterator[NamedValues]:
    """Yield `train/grad_norm/layerL`: the norm of the gradients of layer L's parameters. Layers without gradients are
    left out.
    """
    for layer, block in enumerate(decoder.blocks):
        if grads := [parameter.grad for parameter in block.parameters() if parameter.grad is not None]:
            yield [f"train/grad_norm/layer{layer}"], get_total_norm(grads).view(1)


def _head_metrics(prefix: str, values: Tensor) -> NamedValues:
    return [f"{prefix}/head{head}" for head in range(len(values))], values
