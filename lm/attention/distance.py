"""In these normalizers weights depend on the distance to the key, as in ALiBi, windows and stick-breaking. Softmax of
capped scores is here, too.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import gpu_kernels, routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import FUSED_SOFTMAX, Normalizer, SoftmaxNormalizer, logits
from lm.attention.options import MAX_FACTOR, MAX_LENGTH, Options, key

MAX_LOOP_WINDOW = 4  # keys of the largest window that a CPU computes faster in a loop over distances


class KeyBias(SoftmaxNormalizer):
    """Base of normalizers that are softmax of logits z plus a bias c_i - c_j of query i and key j.

    c_i is the same in the whole row and cancels, so the fused kernel computes the softmax of z - c_j. In training on a
    CPU the kernel adds -c_j to the logits. Elsewhere dimensions are appended, which are -c_j in keys and 1 in queries.
    """

    kernel = FUSED_SOFTMAX
    gpu_package = gpu_kernels.FLEX  # for packed documents

    def key_bias(self, k: Tensor, layout: AttentionLayout) -> Tensor:
        """Return the bias -c of each key, up to a constant per document: fp32, broadcastable to (B, H, S).

        k: (B, H, S, D + F), whose last F dimensions are `key_features`.
        """
        raise NotImplementedError

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        bias = self.key_bias(k, layout).unsqueeze(-2)
        own_bias = bias.masked_fill(~layout.visible(), -math.inf).amax(-1, keepdim=True)  # -c grows from key to key
        return logits(q, k[..., : self.layer.head_size]) + (bias - own_bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if v.dtype == torch.float16:  # which can't hold the bias of far keys
            return super().forward(q, k, v, layout)
        bias = self.key_bias(k, layout)
        return routes.fused_softmax(q, k[..., : self.layer.head_size], v, layout, key_bias=bias)

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        scale, keys = 1 / math.sqrt(q.size(-1)), k[..., : self.layer.head_size].to(v.dtype)
        q, k = routes.append_bias(q.to(v.dtype), keys, self.key_bias(k, layout) / scale)
        return gpu_kernels.flex_softmax(q, k, v, layout, scale)


@dataclass
class ALiBi(Options):
    """Options of the normalizer `alibi`, which lowers logits in proportion to the distance."""

    name = "alibi"
    full_formula = "softmax(z - 2^(-8 h / H) t)"
    source = "Press et al. 2021, arXiv 2108.12409"
    published_findings = (
        "trained at 4k, at 64k: loss flat (3.27), needles lost (.003): arXiv 2505.17083. The formula also where H is "
        "no power of 2, for which its authors' code interleaves two series"
    )


class ALiBiNormalizer(KeyBias):
    """ALiBi (arXiv 2108.12409) is softmax of z - 2^(-8 h / H) t for logits z of keys t tokens back, in heads h = 1 ...
    H. Use it with `model.position: none`.
    """

    schema = ALiBi

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return logits(q, k) + self.log_decay(q).view(-1, 1, 1) * layout.distance().to(q.dtype)

    def key_bias(self, k: Tensor, layout: AttentionLayout) -> Tensor:
        positions = layout.key_positions.to(torch.promote_types(k.dtype, torch.float32)).unsqueeze(-2)
        return -self.log_decay(positions).unsqueeze(-1) * positions

    def log_decay(self, template: Tensor) -> Tensor:
        heads = torch.arange(1, self.layer.n_head + 1, device=template.device, dtype=template.dtype)
        return -(2.0 ** (-8 * heads / self.layer.n_head))


@dataclass
class Window(Options):
    """Options of the normalizer `window`, which is softmax over the latest keys alone."""

    name = "window"
    full_formula = "softmax(z), t < w"
    source = "Beltagy et al. 2020, arXiv 2004.05150"
    published_findings = "for local layers: `[window, window, ssmax]`"
    size: int = key(256, "keys a query sees, its own among them", ge=1, le=MAX_LENGTH)


class WindowNormalizer(SoftmaxNormalizer):
    """Softmax over a sliding window of the latest w keys; w is the option `size`.

    Each block of w queries is computed with the keys of its own block and of the block before it. On the fused kernel
    this takes O(T w) time and memory. On a CPU, windows of few keys are computed in a loop over distances.
    """

    schema = Window
    kernel = "fused softmax; on CUDA FlexAttention"
    gpu_package = gpu_kernels.FLEX

    def visible(self, layout: AttentionLayout) -> Tensor:
        return layout.visible() & (layout.distance() < self.options.size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if not layout.mask_is_triangular:
            return super().forward(q, k, v, layout)
        (b, _, t, _), w = q.shape, self.options.size
        if t <= w:
            return routes.fused_softmax(q, k, v, layout)
        if gpu_kernels.can_compute(self, q, k, v, layout):
            return self.gpu_forward(q, k, v, layout)
        if w <= MAX_LOOP_WINDOW and q.device.type == "cpu":
            return self._sum_over_distances(q, k, v)

        def cut_blocks(x: Tensor, n_preceding: int) -> Tensor:
            """Cut x (B, H, T, size) into N blocks of w tokens, and put the p = `n_preceding` blocks before a block in
            front of it. Returns (B N, H, (p + 1) w, size).
            """
            pieces = F.pad(x, (0, 0, n_preceding * w, -t % w)).unflatten(2, (-1, w))
            n_blocks = pieces.size(2) - n_preceding
            return (
                torch.cat([pieces[:, :, i : i + n_blocks] for i in range(n_preceding + 1)], 3)
                .transpose(1, 2)
                .flatten(0, 1)
            )

        query_index, key_index = torch.arange(w, device=q.device).unsqueeze(1), torch.arange(2 * w, device=q.device)
        mask = ((key_index > query_index) & (key_index <= query_index + w)).repeat(-(-t // w), 1, 1)  # (N, w, 2 w)
        mask[0] &= key_index >= w  # there is no block before the first
        output = routes.fused_softmax(
            cut_blocks(q, 0), cut_blocks(k, 1), cut_blocks(v, 1), layout, mask=mask.unsqueeze(1).repeat(b, 1, 1, 1)
        )
        return output.unflatten(0, (b, -1)).transpose(1, 2).flatten(2, 3)[:, :, :t]

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return gpu_kernels.flex_softmax(q, k, v, layout, window=self.options.size)

    def _sum_over_distances(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute `forward`, (B, H, T, E), in a loop over the distances from query to key, with scores and sums in fp32
        or wider.
        """
        t, dtype, q = q.size(2), v.dtype, q.to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.size(-1))
        scores = [
            F.pad((q[:, :, d:] * k[:, :, : t - d]).sum(-1), (d, 0), value=-math.inf) for d in range(self.options.size)
        ]
        weights = torch.stack(scores, -1).softmax(-1)
        output = weights[..., :1] * v
        for d in range(1, self.options.size):
            output[:, :, d:] += weights[:, :, d:, d, None] * v[:, :, : t - d]
        return output.to(dtype)

    def decode(
        self, q: Tensor, new_k: Tensor, new_v: Tensor, layout: AttentionLayout, state: object
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute `Normalizer.decode`; the state is (keys, values) of the latest w - 1 tokens."""
        output, (k, v) = super().decode(q, new_k, new_v, layout, state)
        start = max(0, k.size(2) - self.options.size + 1)
        return output, (k[:, :, start:], v[:, :, start:])


class MappedSoftmax(SoftmaxNormalizer):
    """Base of normalizers that are softmax of scores s(z, t), each a function of its logit z and of the distance t to
    the key.
    """

    kernel = "blocks of 64 queries, backward by hand; on CUDA FlexAttention"
    gpu_package = gpu_kernels.FLEX

    def distance_coefficients(self, distance: Tensor) -> Tensor:
        """Return the coefficients through which the scores s(z, t) depend on distances t, by default t itself.
        Distances are fp32 or wider, and at least 0.
        """
        return distance

    @abstractmethod
    def map_logits(self, z: Tensor, distance_coefficients: Tensor) -> Tensor:
        """Return the scores s(z, t) for logits z and the coefficients at t."""

    @abstractmethod
    def score_derivative(self, scores: Tensor, distance_coefficients: Tensor) -> Tensor:
        """Return the derivative ds / dz where s is `scores`."""

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return self.map_logits(logits(q, k), self.distance_coefficients(layout.distance().clamp(min=0).to(q.dtype)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if (layout.mask_is_triangular or layout.mask_is_triangle_end) and not gpu_kernels.can_compute(
            self, q, k, v, layout
        ):
            return routes.block_softmax(q, k, v, 1 / math.sqrt(q.size(-1)), self)
        return super().forward(q, k, v, layout)

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return gpu_kernels.flex_softmax(q, k, v, layout, logit_map=self)


@dataclass
class ScaleInvariant(Options):
    """Options of the normalizer `scale_invariant`, whose scores depend on the logarithm of the distance."""

    name = "scale_invariant"
    full_formula = "softmax(a_t z + m_t), a_t^2 = 1 + 2 ln(1 + t / tau), m_t = 1 - a_t^2"
    source = "arXiv 2505.17083"
    published_findings = (
        "with p-RoPE, trained at 4k, at 64k: loss 3.247 (log n 3.317, softmax 5.735), needles .969 (.939, .000), "
        "same paper"
    )
    tau: float = key(10.0, "distance, in tokens, from which on the scale grows", ge=1e-3, le=MAX_LENGTH)


class ScaleInvariantNormalizer(MappedSoftmax):
    """Softmax of a_t z + m_t for logits z of keys t tokens back (arXiv 2505.17083).

    The purpose is the same total weight for the keys of each octave of t, from t to 2 t.

    a_t = sqrt(2 (ln(t / tau + 1) - ln alpha + beta / alpha)), m_t = beta / alpha - a_t^2, alpha = beta = e^(1/2), so
    that a_0 = 1 and m_0 = 0. tau is an option. The paper adds `model.qk_norm` and p-RoPE, which is RoPE without its
    lowest frequencies.
    """

    schema = ScaleInvariant

    def distance_coefficients(self, distance: Tensor) -> Tensor:
        """Return a_t at the distances t."""
        return (2 * ((distance / self.options.tau).log1p() - 0.5 + 1.0)).sqrt()  # ln alpha = 1/2, beta / alpha = 1

    def map_logits(self, z: Tensor, distance_coefficients: Tensor) -> Tensor:
        return torch.addcmul(1 - distance_coefficients.square(), z, distance_coefficients)

    def score_derivative(self, scores: Tensor, distance_coefficients: Tensor) -> Tensor:
        return distance_coefficients


@dataclass
class Forget(Options):
    """Options of the normalizer `forget`: every token between a key and the query lowers the key's logit, by an amount
    learned from the token's layer input.
    """

    name = "forget"
    full_formula = "softmax(z + c_i - c_j), c the running sum of ln sigmoid(w.x + b), x the layer's input"
    learned_parameters = "w (width C) and b per layer and head"
    source = "arXiv 2503.02130"
    published_findings = "good extrapolation, needles near-perfect within the training length (abstract)"


class ForgetNormalizer(KeyBias):
    """Forgetting attention (arXiv 2503.02130) is softmax of each logit plus the sum of ln sigmoid(w.x + b) over the
    tokens after the key, up to the query.

    x is the layer's input at such a token; sums are in fp32. w starts at 0, b at 5 (our choice), so that a weight at
    first falls by 0.7 % with each token back.
    """

    schema = Forget

    def initialise(self) -> None:
        self.w, self.b = self.new_parameter(0.0, self.layer.n_head, self.layer.width), self.new_parameter(5.0)

    def key_features(self, x: Tensor) -> Tensor:
        """Return the feature ln sigmoid(w.x + b) of each key, (B, H, T, 1)."""
        with routes.without_autocast(x.device):
            gate = F.linear(x.to(self.w.dtype), self.w, self.b)
        return F.logsigmoid(gate).transpose(1, 2).unsqueeze(-1)

    def key_bias(self, k: Tensor, layout: AttentionLayout) -> Tensor:
        # across documents: only differences within a document are used
        return -k[..., -1].to(torch.promote_types(k.dtype, torch.float32)).cumsum(-1)


@dataclass
class SoftCap(Options):
    """Options of the normalizer `softcap`, whose scores are bounded."""

    name = "softcap"
    full_formula = "softmax(c tanh(z / c))"
    source = "Gemma 2, arXiv 2408.00118, sec. 2"
    published_findings = "c = 50 in Gemma 2"
    cap: float = key(50.0, "c, which no score exceeds", ge=1e-3, le=MAX_FACTOR)


class SoftCapNormalizer(MappedSoftmax):
    """Softmax of the capped scores c tanh(z / c) for logits z, with the option `cap` as c (Gemma 2, arXiv
    2408.00118).
    """

    schema = SoftCap

    def map_logits(self, z: Tensor, distance_coefficients: Tensor) -> Tensor:
        return self.options.cap * (z / self.options.cap).tanh()

    def score_derivative(self, scores: Tensor, distance_coefficients: Tensor) -> Tensor:
        return torch.addcmul(scores.new_ones(()), scores, scores, value=-1 / self.options.cap**2)


@dataclass
class StickBreaking(Options):
    """Options of the normalizer `stick_breaking`, in which each key takes a fraction of the weight that later keys
    leave.
    """

    name = "stick_breaking"
    full_formula = "sigmoid(z_j) prod (1 - sigmoid(z_k)), j < k < i"
    source = "arXiv 2410.17980"
    published_findings = "without positions, trained at 2,048: perplexity goes on to fall up to 16,384 (abstract)"
    sums_to_one = False


class StickBreakingNormalizer(Normalizer):
    """In stick-breaking attention (arXiv 2410.17980) each key, from the latest back, takes a fraction of the weight
    that later keys have left. The fraction is sigmoid(z) for the key's logit z.

    A query sees the keys before its own token, so a document's first query sees none and has weights 0. Use it with
    `model.position: none`.
    """

    schema = StickBreaking
    kernel = "query blocks; on CUDA fla-core's"
    gpu_package = gpu_kernels.FLA

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return gpu_kernels.stick_breaking(q, k, v)

    def visible(self, layout: AttentionLayout) -> Tensor:
        return layout.visible() & (layout.distance() > 0)

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Turn scores z into weights. ln(1 - sigmoid(z)) is summed from the latest key back, as differences of running
        sums lose digits.
        """
        visible = self.visible(layout)
        log_remainder = F.logsigmoid(-scores).masked_fill(~visible, 0.0)  # ln of the fraction that a key leaves
        later_sums = F.pad(log_remainder[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        return (F.logsigmoid(scores) + later_sums).exp().masked_fill(~visible, 0.0)
