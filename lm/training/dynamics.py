"""What is logged of a model while it trains, beside loss and speed: the parameters of its normalizers."""

import torch
from torch import Tensor, nn

from lm.model.decoder import Decoder


def normalizer_parameters(decoder: Decoder) -> dict[str, float]:
    """Values of the normalizers' parameters by name in metrics.jsonl.

    `normalizer/NAME/layerL/headH` of a parameter with one value a head; `normalizer/NAME/layerL/rms`, the root mean square, of any other.
    Parameters that layers share are those of the first. One transfer from the device.
    """
    shown: dict[nn.Parameter, tuple[list[str], Tensor]] = {}
    for layer, normalizer in enumerate(decoder.normalizers()):
        for name, parameter in normalizer.named_parameters():
            where, values = f"normalizer/{name}/layer{layer}", parameter.detach().float()
            if values.shape == (normalizer.layer.n_head,):
                new = [f"{where}/head{head}" for head in range(len(values))], values
            else:
                new = [f"{where}/rms"], values.square().mean().sqrt().view(1)
            shown.setdefault(parameter, new)
    names = [name for some, _ in shown.values() for name in some]
    return dict(zip(names, torch.cat([values for _, values in shown.values()]).tolist(), strict=True)) if shown else {}
