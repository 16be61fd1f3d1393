"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lm.config.training_config import MUON_RATES, Muon
from lm.model.device import has_native_bf16

MATRICES = "matrices"  # the group of parameters that Muon updates
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Keller Jordan's for the Newton-Schulz iteration
EPS = 1e-7  # least norm that a matrix is divided by
BATCH_ELEMENTS = 2**24  # entries of matrices that are orthogonalised at a time, the last matrix's beyond it included: a bound on memory


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the group `matrices`, each projection of a fused matrix apart, `torch.optim.AdamW` for the other groups.

    Updates are those of `torch.optim.Muon` on each projection, in tests/test_muon.py equal bit by bit on a CPU where products are in bf16.
    That one makes a product at a time, and threads wait for each other at each; here projections of one shape are orthogonalised together,
    in batches that bound the memory which a step takes for itself (12 to 22 bytes x `BATCH_ELEMENTS`, or x the entries of the largest
    matrix). The state of a matrix is one `momentum_buffer` of its shape, in fp32; that of other parameters is AdamW's.

    Args:
        groups: torch's groups of named parameters, each with its `name`.
        options: those of Muon, with AdamW's among them.
        projections: rows of each fused matrix that are one projection, as `lm.model.decoder.projections`.
        fused: whether AdamW runs as one kernel over all parameters.
    """

    def __init__(
        self, groups: list[dict[str, object]], options: Muon, projections: Mapping[str, Mapping[str, slice]], fused: bool | None = None
    ):
        self.options, self.projections = options, projections
        of_adamw = {"betas": (options.beta1, options.beta2), "eps": options.eps, "fused": fused}
        self.adamw = torch.optim.AdamW([torch.empty(0)], **of_adamw)  # its groups and state are lent to it at each step
        super().__init__(groups, self.adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient. Returns the loss, if `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["name"] == MATRICES:
                self._update_matrices(group)
        self.adamw.state, self.adamw.param_groups = self.state, [group for group in self.param_groups if group["name"] != MATRICES]
        self.adamw.step()
        return loss

    def _update_matrices(self, group: dict[str, object]) -> None:
        """A step of Muon on the projections of the group's matrices. Their rows are looked up anew each time: weights may have moved."""
        momentum, batch, elements = self.options.momentum, [], 0
        for name, matrix in zip(group["param_names"], group["params"], strict=True):
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
            mean = (matrix.grad.lerp(mean, momentum) if self.options.nesterov else mean).bfloat16()
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            for rows in self.projections.get(name, {"all": slice(None)}).values():
                batch.append((matrix[rows], mean[rows]))
            elements += mean.numel()
            if elements >= BATCH_ELEMENTS:
                self._update_batch(batch, group["lr"])
                batch, elements = [], 0
        self._update_batch(batch, group["lr"])

    def _update_batch(self, batch: list[tuple[Tensor, Tensor]], lr: float) -> None:
        """Update projections by the means of their gradients, those of one shape together."""
        of_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for projection, mean in batch:
            of_shape.setdefault(mean.shape, []).append((projection, mean))
        for shape, some in of_shape.items():
            rate = lr * MUON_RATES[self.options.adjust_lr].relative(*shape)
            means = torch.stack([mean for _, mean in some])
            products = torch.bfloat16 if has_native_bf16("gpu" if means.is_cuda else "cpu") else torch.float32
            updates = orthogonalised(means, self.options.ns_steps, products)
            for (projection, _), update in zip(some, updates, strict=True):
                projection.sub_(update, alpha=rate)


def orthogonalised(matrices: Tensor, steps: int, products: torch.dtype = torch.bfloat16) -> Tensor:
    """About the nearest orthogonal matrix of each: its singular values are brought to between 0.7 and 1.2, but for those near 0.

    Args:
        matrices: (N, rows, columns), bfloat16.
        steps: how often the Newton-Schulz iteration of degree 5 is applied, https://kellerjordan.github.io/posts/muon.
        products: the dtype of what is multiplied, and of the result. All numbers are bfloat16's whatever it is: fp32, much faster where
            bf16 is emulated, sums products in another order.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().to(products)

    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = (matrices.mT if tall else matrices).to(products)
    x = rounded(x / rounded(x.norm(dim=(1, 2), keepdim=True)).clamp(min=EPS))
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        x = rounded(torch.baddbmm(x, rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x.mT if tall else x
