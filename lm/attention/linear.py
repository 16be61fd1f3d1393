"""In linear attention weights are products of features of query and key, so that a sequence of T tokens costs O(T)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import DividedNormalizer
from lm.attention.options import Options, key
from lm.errors import Problem

# most tokens of a chunk: weights are computed within a chunk, a state stands for earlier tokens
MAX_CHUNK_TOKENS = 64
# most tokens whose chunks are computed at once: many small products would leave a GPU idle
MAX_SEGMENT_TOKENS = 128 * MAX_CHUNK_TOKENS


@dataclass
class Linear(Options):
    """Options of the normalizer `linear`, whose weights are products of features."""

    name = "linear"
    full_formula = "phi(q / D^(1/4)).phi(k / D^(1/4)) (g^t) / sum, or / n"
    source = "Katharopoulos et al. 2020, arXiv 2006.16236; Sun et al. 2023, arXiv 2307.08621"
    published_findings = (
        "can't concentrate: S >= .80 (1: all weights equal) with identity features and Gaussian keys (Su, kexue.fm "
        "9889)"
    )
    n_accepts_sum = True
    sums_to_one = False
    features: Literal["elu", "relu", "identity"] = key(
        "elu", "phi: elu + 1, relu, or the identity (weights may then be negative)"
    )
    decay: bool = key(False, "weights fade by 1 - 2^(-5 - h) a token for heads h = 0, 1 ... (RetNet's rates)")
    n: str = key("sum", "divide each row by its `sum`, or by n: `visible`, `sample` or `fixed:N`")

    @property
    def scales_with_q(self) -> bool:
        """True if a factor on q is the same factor on the weights, as with the identity as feature map."""
        return self.features == "identity"

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.features == "identity" and self.n == "sum":
            problems.append(Problem("n", self.n, "weights of either sign may sum to 0", "set it to visible"))
        return problems


class LinearNormalizer(DividedNormalizer):
    """Weights phi(q / D^(1/4)).phi(k / D^(1/4)) g^t of keys t tokens back, divided by their sum or by n.

    phi is a feature map, g a head's decay (arXiv 2006.16236; the decay is that of arXiv 2307.08621). Dividing q and k
    by D^(1/4) is our choice.
    """

    schema = Linear
    kernel = "chunks, O(T)"

    @property
    def score_map(self) -> Literal["identity", "features"]:
        """Name in `SCORE_MAPS` of the identity, as weights are the scores times a factor per query. The identity has
        two names there: `features` if features, and so weights, are never negative, and else `identity`.
        """
        return "identity" if self.options.features == "identity" else "features"

    def apply_feature_map(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features phi(q / D^(1/4)) and phi(k / D^(1/4)), of the shapes of `q` and `k`."""
        maps = {
            "identity": lambda x: x,
            "elu": lambda x: F.elu(x).add_(1),
            "relu": lambda x: x.relu(),
        }
        phi, root = maps[self.options.features], q.size(-1) ** 0.25
        return phi(q / root), phi(k / root)

    def log_decay(self, template: Tensor) -> Tensor:
        """Return ln g of each head, (H,) in the dtype and on the device of `template`. g is the head's factor on
        weights per token of distance; ln g is 0 without the option `decay`.
        """
        heads = torch.arange(self.layer.n_head, device=template.device, dtype=template.dtype)
        return (-(2.0 ** (-5 - heads))).log1p() if self.options.decay else super().log_decay(template)

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        """Return the products of query and key features, times g^t for keys t tokens back, (B, H, T, S). `normalize`
        then divides these scores; `log_decay` is ln g.
        """
        q, k = self.apply_feature_map(q, k)
        decay = (self.log_decay(q).view(-1, 1, 1) * layout.distance().to(q.dtype).clamp(min=0)).exp()
        return q @ k.transpose(-2, -1) * decay

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return self.decode(q, k, v, layout, None)[0] if layout.mask_is_triangular else super().forward(q, k, v, layout)

    def decode(
        self, q: Tensor, new_k: Tensor, new_v: Tensor, layout: AttentionLayout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute `Normalizer.decode`. The state is always one matrix per query head, head size x width of the values.
        With `n: sum` it has one more column.
        """
        k, v = self.expand_kv_heads(new_k, new_v)
        wide_dtype = torch.promote_types(v.dtype, torch.float32)
        q, k = self.apply_feature_map(q.to(wide_dtype), k.to(wide_dtype))
        factor, width, dtype, n_queries = self.weight_factor(layout), v.size(-1), v.dtype, q.size(2)
        if n_queries < k.size(2):
            q = F.pad(q, (0, 0, k.size(2) - n_queries, 0))
        v = v.to(wide_dtype)
        if factor is None:
            v = F.pad(v, (0, 1), value=1.0)  # the output for one more value, 1, is the sum of a query's weights
        if state is None:
            state = q.new_zeros(*q.shape[:2], q.size(-1), v.size(-1))
        outputs = []
        with routes.without_autocast(q.device):  # autocast would round the state, a sum over all tokens
            for tensors in zip(*(x.split(MAX_SEGMENT_TOKENS, 2) for x in (q, k, v)), strict=True):
                output, state = self._attend_in_chunks(*tensors, state)
                outputs.append(output)
        output = (torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0])[:, :, -n_queries:]
        return routes.divide_rows(output[..., :width], output[..., width:], factor).to(dtype), state

    def _attend_in_chunks(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum_{j <= i} g^(i-j) q_i.k_j v_j for each query i of a segment, and the new state. q and k are
        features, g is the head's decay. The segment is cut into N chunks of C tokens.

        A state sums g^(e-j) k_j v_j^T over the tokens j up to the last one, e. `state` covers the tokens before the
        segment.
        """
        n_chunks = -(-q.size(2) // MAX_CHUNK_TOKENS)
        size = -(-q.size(2) // n_chunks)
        n_padding = n_chunks * size - q.size(2)  # zeros put before the first token
        if n_padding:
            q, k, v = (F.pad(x, (0, 0, n_padding, 0)) for x in (q, k, v))
        q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))  # (B, H, N, C, D or E)
        log_g = self.log_decay(q)
        scores = (q @ k.transpose(-2, -1)).mul_(_decay_matrix(log_g, size).unsqueeze(1))
        if self.options.decay:
            index = torch.arange(size, device=q.device, dtype=q.dtype)
            q_decay, k_decay = ((log_g.view(-1, 1, 1, 1) * x.unsqueeze(1)).exp() for x in (index + 1, index.flip(0)))
            q, k = q * q_decay, k * k_decay
            state = state * (-n_padding * log_g).exp().view(-1, 1, 1)
        sums = torch.cat((state.unsqueeze(2), k.transpose(-2, -1) @ v), 2)  # (B, H, N + 1, D, E)
        # the state before each chunk and after the last: sums of all that precedes, as one product
        states = (_decay_matrix(size * log_g, n_chunks + 1) @ sums.flatten(3)).unflatten(3, sums.shape[3:])
        output = scores @ v + q @ states[:, :, :-1]
        # a view would keep the states of all chunks in memory
        return output.flatten(2, 3)[:, :, n_padding:], states[:, :, -1].clone()


def _decay_matrix(log_g: Tensor, size: int) -> Tensor:
    """Return the lower triangular matrix of g^(i - j), (H, size, size), for the g of each head."""
    index = torch.arange(size, device=log_g.device, dtype=log_g.dtype)
    return (log_g.view(-1, 1, 1) * (index.unsqueeze(1) - index).clamp(min=0)).exp().tril()
