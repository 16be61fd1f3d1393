"""Base classes of normalizers, which turn attention scores into weights.

Each class computes the same function in two ways. `define_scores` and `normalize` define the function on dense scores;
`forward` is the fastest exact computation. Shapes: B sequences, H heads of queries, K heads of keys and values, T
queries, S keys. D is the head size, E the width of the values, F a number of features, L the training length. Logits
are z = q.k / sqrt(D).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lm.attention import gpu_kernels, routes
from lm.attention.layout import AttentionLayout, attend_by_document
from lm.attention.options import Options

FUSED_SOFTMAX = "fused softmax"


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of the attention layer that a normalizer is made for."""

    n_head: int  # heads H
    head_size: int  # dimensions D of each head's queries and keys
    width: int  # width C of the layer's input
    train_length: int  # tokens in a training sequence; initial values and the option `base: train` depend on it


class Normalizer(torch.nn.Module, ABC):
    """Base class of every normalizer. Each layer has its own instance. Most parameters have one value for each head.

    Args:
        options: the normalizer's options, of the class `schema`.
        layer: a `LayerSpec`, the sizes of the layer that the normalizer is made for; kept as `self.layer`.
    """

    schema: ClassVar[type[Options]]
    kernel: ClassVar[str] = "query blocks"  # how training computes weights x values, in words
    # the package whose kernel computes `gpu_forward` on CUDA GPUs (`lm.attention.gpu_kernels`); empty: none does
    gpu_package: ClassVar[str] = ""
    # name in `SCORE_MAPS` of the function that maps scores to weights, up to a factor per query; empty if none does
    score_map: str = ""

    def __init__(self, options: Options, layer: LayerSpec):
        super().__init__()
        self.options, self.layer = options, layer
        self.initialise()

    def initialise(self) -> None:
        """Create the parameters with their initial values."""

    def new_parameter(self, value: float, *shape: int) -> torch.nn.Parameter:
        """Return a new fp32 parameter whose entries start at `value`, of shape (H,) unless another is given."""
        return torch.nn.Parameter(torch.full(shape or (self.layer.n_head,), float(value)))

    def tie_parameters(self, source: Normalizer) -> None:
        """Replace the parameters that all layers are to share by those of `source`, the model's first normalizer of
        this class. A subclass says which these are; by default none is shared.
        """

    def init_from(self, source: Normalizer) -> None:
        """Set the parameters so that weights stay as near as possible to those of `source`, which this normalizer
        replaces.

        The default keeps the initial values. A subclass sets the best values for the training length where they have a
        closed form.
        """

    def query_features(self, x: Tensor) -> Tensor | None:
        """Return features (B, H, T, F) of the queries, to be appended to q; None if there are none.

        x: the layer's input (B, T, C).
        """
        return None

    def key_features(self, x: Tensor) -> Tensor | None:
        """Return features (B, H, T, F) of the keys, to be appended to k and cached with it; None if there are none.

        x: the layer's input (B, T, C).
        """
        return None

    @property
    def reads_layer_input(self) -> bool:
        """True if scores depend on features of the layer's input, beside q and k."""
        return any(
            getattr(type(self), name) is not getattr(Normalizer, name) for name in ("query_features", "key_features")
        )

    def append_features(self, x: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Append the features of the layer's input x, and return q (B, H, T, D + F) and k (B, K, T, D + F H / K).

        Vectors and features are joined in the wider of their dtypes, since sums over all tokens would accumulate the
        rounding errors of narrower features.
        """
        query_features = self.query_features(x)
        key_features = concat_features_by_kv_head(self.key_features(x), k.size(1))
        q = q if query_features is None else torch.cat((q, query_features), -1)
        return q, k if key_features is None else torch.cat((k, key_features), -1)

    def apply_feature_map(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return features of queries (B, H, T, F) and of keys (B, H, S, F) whose products, times a decay, are the
        scores. None if scores have another form.
        """
        return None

    def log_decay(self, template: Tensor) -> Tensor:
        """Return ln of each head's factor on weights per token of distance, (H,) in the dtype of `template`.

        The logarithm is negative, or 0 for a head without decay.
        """
        return template.new_zeros(self.layer.n_head)

    @property
    def reference_length(self) -> float:
        """The formula's length m is the option `base`, or the training length if that option is `train`."""
        return float(self.layer.train_length if self.options.base == "train" else self.options.base)

    def length_constants(self) -> dict[str, float]:
        """Return {option: value} of the formula's constants that may depend on the training length, such as the length
        `base`.
        """
        return {"base": self.reference_length} if hasattr(self.options, "base") else {}

    def scale_by_position(self) -> Tensor | None:
        """Return the factor c of the scores c q.k / sqrt(D) at each position of a training sequence, (H, L) float64.
        None if scores have another form.

        By default c is 1, if the class leaves `define_scores` as it is and has no features.
        """
        if type(self).define_scores is not Normalizer.define_scores or self.reads_layer_input:
            return None
        return torch.ones(self.layer.n_head, self.layer.train_length, dtype=torch.float64)

    def row_length(self, layout: AttentionLayout) -> Tensor:
        """Return the row length n of each query, as the option `n` defines it: fp32, broadcastable to (B, H, T)."""
        return layout.n(self.options.n).unsqueeze(-2)

    def training_layout(self, device: torch.device | str = "cpu") -> AttentionLayout:
        """Return the layout of one document of the training length."""
        return AttentionLayout.full(self.layer.train_length, device)

    def weights(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        """Return dense weights (B, H, T, S) by the definition: `normalize` of the `unmasked_scores`, 0 where masked.

        Weights, sums and thresholds are in fp32, or wider if q or k is, also under autocast. In bf16 a row of
        1.5-entmax would sum to anything from 0.6 to 12.

        q: (B, H, T, D), k: (B, H, S, D), in any floating dtypes, with D + F in place of D if the normalizer has
        features.
        """
        scores = self.unmasked_scores(q, k, layout)
        with routes.without_autocast(q.device):
            return self.normalize(scores, layout)

    def unmasked_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        """Return the scores of each query and key before normalization, (B, H, T, S), in fp32, or wider if q or k is.

        Weights depend on q, k and their features through the scores alone, which include temperatures. Keys that a
        query does not see have scores, too. q, k: as in `weights`.
        """
        wide_dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
        with routes.without_autocast(q.device):
            return self.define_scores(q.to(wide_dtype), k.to(wide_dtype), layout)

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        """Compute `unmasked_scores` from q and k of one dtype, fp32 or wider, without autocast.

        Scores are q.k / sqrt(D), unless a subclass overrides this method.
        """
        return logits(q, k)

    @abstractmethod
    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Turn scores (B, H, T, S), fp32 or wider, into weights of the same shape and dtype, 0 for keys that a query
        does not see.

        A query's weights depend on its own scores alone: the Jacobian d weights / d scores is an S x S matrix for each
        query.
        """

    def visible(self, layout: AttentionLayout) -> Tensor:
        """Return the mask of the keys that each query may give weight to: (T, S) or (B, 1, T, S) bool."""
        return layout.visible()

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor | None:
        """Return ln Z, (B, H, T), where Z sums the unnormalized weights of the keys that a query sees, even if weights
        are not divided by Z.

        ln Z is NaN where Z < 0. Return None if weights have no unnormalized form, as where a threshold depends on all
        scores.
        """
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        """Return weights x values, (B, H, T, E) in the dtype of `v`, without holding T x S weights of long sequences.

        q: (B, H, T, D), k: (B, H, S, D), at least as precise as v: (B, H, S, E). By default the definition is computed
        for some queries at a time, and again in the backward pass. On a CUDA GPU `gpu_forward` is taken if it works.
        """
        if gpu_kernels.can_compute(self, q, k, v, layout):
            return self.gpu_forward(q, k, v, layout)
        return routes.attend_by_query_blocks(self, q, k, v, layout)

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        """Compute `forward` for whole sequences by a kernel of `gpu_package`. FlexAttention also takes sequences that
        hold several documents; other kernels take one document per sequence.
        """
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        """Return weights x values, like `forward`. Whole sequences that hold several documents are computed document by
        document.
        """
        if layout.documents is None or q.size(2) != k.size(2):
            return self(q, k, v, layout)
        if gpu_kernels.can_compute(self, q, k, v, layout):
            return self.gpu_forward(q, k, v, layout)
        return attend_by_document(self, q, k, v, layout)

    def fused_inputs(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor] | None:
        """Return queries and keys for which softmax(q.k / sqrt(D)) gives the weights; None if none exist.

        The results have the dtypes of q and k, or wider ones.
        """
        return None

    def decode(
        self, q: Tensor, new_k: Tensor, new_v: Tensor, layout: AttentionLayout, state: object
    ) -> tuple[Tensor, object]:
        """Compute `forward` for tokens that continue a sequence, as in generation, and return (weights x values, new
        state).

        Args:
            q: queries of the new tokens, or of the last of them only.
            new_k, new_v: keys and values of the new tokens, not yet repeated for the query heads that share them.
            layout: the layout of the queries and all keys, made by `AttentionLayout.continuation`, then by
                `queries_from` if q holds fewer tokens than new_k.
            state: the state that the previous call returned, None at first. By default it is all (keys, values); a
                subclass may keep less.
        """
        k, v = new_k, new_v
        if state is not None:
            k, v = torch.cat((state[0], k), 2), torch.cat((state[1], v), 2)
        layout = replace(layout, key_positions=layout.key_positions[..., -k.size(2) :])
        return self(q, *self.expand_kv_heads(k, v), layout), (k, v)

    def expand_kv_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copy each head of k and v (B, K, S, .) to the H / K query heads that share it. Returns keys (B, H, S, D + F)
        and values (B, H, S, E).

        A shared key holds its D dimensions, then F features for each query head that shares it
        (`concat_features_by_kv_head`).
        """
        group, size = self.layer.n_head // k.size(1), self.layer.head_size
        if group == 1:
            return k, v
        # (B, H, S, F)
        key_features = k[..., size:].unflatten(-1, (group, (k.size(-1) - size) // group)).transpose(2, 3).flatten(1, 2)
        return torch.cat((k[..., :size].repeat_interleave(group, 1), key_features), -1), v.repeat_interleave(group, 1)


class SoftmaxNormalizer(Normalizer):
    """Base of normalizers that are softmax of the scores of visible keys; subclasses override `define_scores` or
    `visible`.
    """

    score_map = "exp"

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        return scores.masked_fill(~self.visible(layout), -math.inf).softmax(-1)

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Return ln of the sum of e^score over the keys that each query sees."""
        return scores.masked_fill(~self.visible(layout), -math.inf).logsumexp(-1)


class DividedNormalizer(Normalizer):
    """Base of normalizers whose weights are f(score) divided by the sum of f over a query's keys, or times a factor.

    The factor depends on n; the option `n: sum` divides by the sum.
    """

    def unnormalized_weights(self, scores: Tensor) -> Tensor:
        """Return f(score), which `normalize` divides by the sum or multiplies by `weight_factor`; by default the
        scores.
        """
        return scores

    def weight_factor(self, layout: AttentionLayout) -> Tensor | None:
        """Return the factor of a query's weights, fp32, broadcastable to (B, H, T), by default 1 / n. None: divide
        weights by their sum.
        """
        return None if self.options.n == "sum" else 1 / self.row_length(layout)

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        unnormalized_weights = self.unnormalized_weights(scores).masked_fill(~layout.visible(), 0.0)
        return routes.divide_rows(
            unnormalized_weights, unnormalized_weights.sum(-1, keepdim=True), self.weight_factor(layout)
        )

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Return ln of the sum of f(score) over the keys that each query sees."""
        return self.unnormalized_weights(scores).masked_fill(~layout.visible(), 0.0).sum(-1).log()


def concat_features_by_kv_head(features: Tensor | None, n_kv_head: int) -> Tensor | None:
    """Concatenate the features that a key has for the H / K query heads that share it, one after the other.

    Features (B, H, T, F) become (B, K, T, F H / K); None stays None.
    """
    return None if features is None else features.unflatten(1, (n_kv_head, -1)).transpose(2, 3).flatten(3)


def logits(q: Tensor, k: Tensor) -> Tensor:
    """Return the logits z = q.k / sqrt(D), (B, H, T, S)."""
    return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
