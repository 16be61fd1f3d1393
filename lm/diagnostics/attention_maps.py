"""Maps of single heads' weights on one sequence, queries by keys, small enough to look at however long the sequence is.

Of a long sequence a cell holds one weight of many: the one of largest magnitude. A mean would lose what attention is looked at for, single
keys with much weight, such as an attention sink or a needle.

Shapes: H heads, T queries, S keys, K cells of queries and as many of keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.data.batches import Batch
from lm.diagnostics.attention_rows import AttentionRows
from lm.diagnostics.concentration import effective_keys
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder


@dataclass(frozen=True, eq=False)
class Maps:
    """All heads' weights on one sequence.

    Attributes:
        size: tokens along each side of a cell; 1: every weight has a cell of its own.
        weights: (layers, H, K, K) fp32, of queries by keys; NaN where no query of a cell sees a key of it, or a weight is not finite.
        queries, keys: (layers, H, K, K) int64, the token that each weight is of; -1 where there is none.
        effective: (layers, H), mean of N_eff / n over queries, the first token left out: the smaller, the more concentrated.
    """

    size: int
    weights: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    effective: np.ndarray

    def most_concentrated(self, count: int) -> list[tuple[int, int]]:
        """(layer, head) of the heads with the smallest `effective`, at most `count` of them, in the order of layers."""
        order = np.argsort(np.nan_to_num(self.effective, nan=np.inf), axis=None, kind="stable")[:count]
        heads = self.effective.shape[1]
        return sorted((int(place) // heads, int(place) % heads) for place in order)


@torch.no_grad()
def attention_maps(decoder: Decoder, tokens: Tensor, cells: int) -> Maps:
    """The maps of a decoder on `tokens` (L,), at most `cells` along each side. Holds the weights of some queries of a layer at a time."""
    length = len(tokens)
    size = -(-length // cells)
    across = -(-length // size)
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    shape = len(decoder.normalizers()), heads, across, across
    best = torch.full(shape, -1.0)  # magnitudes
    weights, queries, keys = torch.full(shape, torch.nan), *torch.full((2, *shape), -1)
    effective = torch.full((*shape[:2], length), torch.nan)
    sequence = torch.cat((tokens, tokens[:1])).unsqueeze(0)  # the last token has nothing to predict
    for block in attention_blocks(decoder, Batch.of(sequence)):
        rows = AttentionRows.of(block)
        effective[block.layer][:, block.queries.cpu()] = (effective_keys(rows.without_first) / (rows.n - 1)).cpu()
        magnitude = rows.size.masked_fill(~rows.visible, -1.0)
        largest, at = F.pad(magnitude, (0, across * size - magnitude.size(-1)), value=-1.0).unflatten(-1, (across, size)).max(-1)
        at = at + torch.arange(0, across * size, size, device=at.device)  # (H, T, K), index of the key
        head = torch.arange(len(largest), device=at.device).unsqueeze(-1)
        for cell in (block.queries // size).unique().tolist():
            inside = (block.queries // size == cell).nonzero().squeeze(-1)
            top, place = largest[:, inside].max(1)  # (H, K)
            query, key = inside[place], at[head, inside[place], torch.arange(across, device=at.device)]
            cell_weights = rows.weights[head, query, key.clamp(max=rows.weights.size(-1) - 1)]
            here = block.layer, slice(None), cell
            larger = (top.cpu() > best[here]) | top.isnan().cpu()
            for stored, new in ((best, top), (weights, cell_weights), (queries, block.queries[query]), (keys, key)):
                stored[here] = torch.where(larger, new.cpu(), stored[here])
    return Maps(size, weights.numpy(), queries.numpy(), keys.numpy(), effective.nanmean(-1).numpy())
