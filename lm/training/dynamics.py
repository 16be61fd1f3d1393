"""What is logged of a model while it trains, beside loss and speed: of its normalizers, and what `log.dynamics` names.

Metrics are named `WHAT/layerL/headH`, or `WHAT/layerL` of what has no heads; layers and heads count from 0. Values stay on the device
until `transferred` brings all of them to the host at once.
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
from lm.model.transfer import gradients_to_norm

Named = tuple[list[str], Tensor]  # names of metrics and their values, (names,)


def transferred(found: Iterable[Named]) -> dict[str, float]:
    """Values by name, in one transfer from the device."""
    found = list(found)
    names = [name for some, _ in found for name in some]
    return dict(zip(names, torch.cat([values.double() for _, values in found]).tolist(), strict=True)) if names else {}


def normalizer_parameters(decoder: Decoder) -> Iterator[Named]:
    """Values of the normalizers' parameters: `normalizer/NAME/layerL/headH` of a parameter with one value a head,
    `normalizer/NAME/layerL/rms`, the root mean square, of any other. Parameters that layers share are those of the first."""
    shown: set[nn.Parameter] = set()
    for layer, normalizer in enumerate(decoder.normalizers()):
        for name, parameter in normalizer.named_parameters():
            if parameter in shown:
                continue
            shown.add(parameter)
            where, values = f"normalizer/{name}/layer{layer}", parameter.detach().float()
            if values.shape == (normalizer.layer.n_head,):
                yield _by_head(where, values)
            else:
                yield [f"{where}/rms"], values.square().mean().sqrt().view(1)


def logit_scales(decoder: Decoder) -> Iterator[Named]:
    """c(n), the factor on q.k / sqrt(D) that a query which sees n keys has in a sequence of the training length L.

    `logit_scale/nN/layerL/headH` at n = 2, sqrt(L) and L; `logit_scale/slope/...` and `logit_scale/intercept/...`, a and b of the
    least-squares fit a ln n + b over n = 2 ... L. The weight of a single key is 1 whatever its score, which leaves out n = 1.
    Nothing of normalizers whose scores are no multiple of q.k (`Normalizer.scale_by_position`).
    """
    for layer, normalizer in enumerate(decoder.normalizers()):
        scale, length = normalizer.scale_by_position(), normalizer.layer.train_length
        if scale is None:
            continue
        scale = scale.to(decoder.embedding.weight.device)  # of a normalizer without parameters it is elsewhere
        for n in sorted({min(2, length), round(math.sqrt(length)), length}):
            yield _by_head(f"logit_scale/n{n}/layer{layer}", scale[:, n - 1])
        if length > 2:
            log_n = torch.arange(2, length + 1, device=scale.device, dtype=torch.float64).log()
            centred = log_n - log_n.mean()
            mean = scale[:, 1:].mean(-1)
            slope = (scale[:, 1:] - mean.unsqueeze(-1)) @ centred / centred.square().sum()  # 0 of a constant, to the bit
            yield _by_head(f"logit_scale/slope/layer{layer}", slope)
            yield _by_head(f"logit_scale/intercept/layer{layer}", mean - slope * log_n.mean())


def largest_scores(decoder: Decoder, batch: Batch, where: Device) -> Iterator[Named]:
    """`largest_score/layerL/headH`: the largest score before normalization (fp32) of any query and key that it sees, in a batch.

    Scores of some queries of a layer are held at a time (`lm.model.attention_stream`). The model and the random state stay as they are.
    """
    largest: dict[int, Tensor] = {}
    with eval_mode(decoder), where.autocast():
        for block in attention_blocks(decoder, batch.to(where.device)):
            found = block.scores.masked_fill(~block.normalizer.visible(block.layout), -math.inf).amax((0, 2, 3))  # (H,)
            largest[block.layer] = torch.maximum(largest[block.layer], found) if block.layer in largest else found
    for layer, values in largest.items():
        yield _by_head(f"largest_score/layer{layer}", values)


def gradient_norms(decoder: Decoder) -> Iterator[Named]:
    """`train/grad_norm/layerL`: the norm of the gradient of a block's parameters as it is now (`lm.model.transfer.gradients_to_norm`);
    nothing of a block without gradients."""
    for layer, block in enumerate(decoder.blocks):
        if grads := gradients_to_norm(block, decoder.config):
            yield [f"train/grad_norm/layer{layer}"], get_total_norm(grads).view(1)


def _by_head(where: str, values: Tensor) -> Named:
    return [f"{where}/head{head}" for head in range(len(values))], values
