"""Softmax with an attention sink: one more logit whose value is zero, so that a row of weights sums to less than 1."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import options
from lm.attention.fused import fused_softmax, softmax_route
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer


class Sink(Normalizer):
    """e^z_j / (e^b + sum e^z): softmax with a learned logit b per layer and head whose column is dropped (gpt-oss).

    On the fused kernel: a key of logit b and value 0, seen by every query, in front of the others. It equals
    softmax times sigmoid(lse - b).
    """

    options: options.Sink
    score_map = "exp"

    def initialise(self) -> None:
        self.b = nn.Parameter(torch.full((self.layer.n_head,), self.options.init))

    def sink(self, device: torch.device) -> Tensor:
        """b, (H,), on the device of the scores."""
        return self.b

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        z = scores.masked_fill(~layout.visible(), -math.inf)
        b = self.sink(z.device).to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:3], 1)
        return torch.cat((b, z), -1).softmax(-1)[..., 1:]

    def log_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """ln of the sum of e^score, without the sink's."""
        return scores.masked_fill(~layout.visible(), -math.inf).logsumexp(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        size = q.size(-1)
        # Eight more dimensions (the kernel's granularity), of which two carry b: 1 in queries, b sqrt(D) and what rounding left of it
        # in the sink.
        ones = F.pad(torch.ones_like(q[..., :2]), (0, 6))
        b = self.sink(q.device) * math.sqrt(size)
        rest = b - b.detach().to(v.dtype)
        both = torch.stack((b - rest.detach(), rest.detach()), -1).to(k)
        sink = F.pad(both.view(1, -1, 1, 2), (size, 6)).expand(k.size(0), -1, -1, -1)
        q, k = torch.cat((q, ones), -1), torch.cat((sink, F.pad(k, (0, 8))), 2)
        v = F.pad(v, (0, 0, 1, 0))
        if layout.causal:  # one more query in front keeps the triangle square
            return fused_softmax(F.pad(q, (0, 0, 1, 0)), k, v, layout, 1 / math.sqrt(size))[:, :, 1:]
        return fused_softmax(q, k, v, layout, 1 / math.sqrt(size), F.pad(layout.visible(), (1, 0), value=True))

    def kernel_description(self, device: str = "cpu") -> str:
        return f"{softmax_route(device, self.layer.train_length + 1)} with one more key, of logit b and value 0"


class Softmax1(Sink):
    """e^z_j / (1 + sum e^z), softmax off by one: a sink of logit 0 (Miller 2023)."""

    def initialise(self) -> None:
        """No parameters."""

    def sink(self, device: torch.device) -> Tensor:
        return torch.zeros(self.layer.n_head, device=device)

    def kernel_description(self, device: str = "cpu") -> str:
        return f"{softmax_route(device, self.layer.train_length + 1)} with one more key, of logit 0 and value 0"
