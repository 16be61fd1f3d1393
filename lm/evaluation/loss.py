"""Held-out loss by position: validation at the training length, and rows far beyond it."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.config import Config
from lm.data.batches import Batch, long_starts, validation_starts, windows
from lm.data.store import Store
from lm.loss import token_nll
from lm.model import Decoder
from lm.schema import Plain

EVAL_TOKENS = 16384  # tokens in one forward pass


@dataclass(frozen=True)
class Device:
    """Where a model runs: torch device, bf16 autocast or not, and this process among its peers."""

    device: torch.device
    bf16: bool
    rank: int = 0
    world: int = 1

    @property
    def precision(self) -> str:
        """As recorded in results."""
        return "bf16-mixed" if self.bf16 else "32"

    def autocast(self) -> torch.autocast:
        """The precision's context."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


@dataclass(frozen=True)
class HeldOut:
    """Pinned held-out rows: (R, length + 1) token ids, and the bytes each token stands for.

    Attributes:
        end_of_text: the token that begins a document, where documents in a row don't see each other; else None.
    """

    rows: np.ndarray
    token_bytes: np.ndarray
    sha256: str
    end_of_text: int | None = None

    @property
    def length(self) -> int:
        """Predicted tokens in a row."""
        return self.rows.shape[1] - 1

    @classmethod
    def take(cls, store: Store, starts: np.ndarray, length: int, isolate: bool = False) -> "HeldOut":
        """The rows of `length` + 1 tokens that begin at `starts` of the held-out split; `isolate`: their documents."""
        rows = windows(store.val, starts, length)
        digest = hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
        return cls(rows, store.token_bytes, digest, store.end_of_text if isolate else None)


def validation_rows(store: Store, config: Config) -> HeldOut:
    """Up to `eval.rows` rows of the training length, spread evenly over the held-out text."""
    starts = validation_starts(store.val, config.data.seq_len, config.eval.rows)
    return HeldOut.take(store, starts, config.data.seq_len, config.data.documents == "isolate")


def long_rows(store: Store, config: Config) -> HeldOut | None:
    """Up to `eval.long_context.rows` long rows, each within one held-out document; None if it is off."""
    if not config.long_length:
        return None
    starts = long_starts(store.val, config.long_length, config.eval.long_context.rows)
    return HeldOut.take(store, starts, config.long_length)


@torch.no_grad()
def by_token(
    models: list[Decoder],
    held_out: HeldOut,
    where: Device,
    measure: Callable[[Batch], Tensor],
    numbers: int = 1,
    on_rows: Callable[[int], None] | None = None,
) -> np.ndarray:
    """What `measure` gives for every predicted token: (numbers, R, length) fp32.

    Rows are split over the ranks of `where`; every rank returns all. Leaves the models' modes as they were.

    Args:
        models: those that `measure` runs; in evaluation mode meanwhile.
        measure: a batch of rows on the device -> (numbers, B, length).
        on_rows: hears how many rows are done.
    """
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    result = torch.zeros(numbers, held_out.rows.shape[0], held_out.length)
    batch = max(1, EVAL_TOKENS // held_out.length)
    mine = torch.arange(held_out.rows.shape[0])[where.rank :: where.world]
    for index in mine.split(batch) if len(mine) else ():
        rows = Batch.of(held_out.rows[index.numpy()], end_of_text=held_out.end_of_text)
        result[:, index] = measure(rows.to(where.device)).cpu()
        if on_rows:
            on_rows(len(index))
    for model, training in zip(models, modes, strict=True):
        model.train(training)
    return sum_over_ranks(result, where).numpy()


def nll_by_token(
    decoder: Decoder, held_out: HeldOut, where: Device, theta_factor: float = 1.0, on_rows: Callable[[int], None] | None = None
) -> np.ndarray:
    """-log p of every predicted token, (R, length) fp32, nats; as `by_token`.

    Never holds T x T weights nor T x V logits.
    """

    def measure(batch: Batch) -> Tensor:
        with where.autocast():
            hidden = decoder.hidden(batch, theta_factor)
        return token_nll(hidden.flatten(0, 1), decoder.head.weight, batch.targets.flatten()).view(1, *batch.targets.shape)

    return by_token([decoder], held_out, where, measure, on_rows=on_rows)[0]


def sum_over_ranks(values: Tensor, where: Device) -> Tensor:
    """The sum of every rank's `values`, on the CPU. Collective."""
    if where.world == 1:
        return values
    shared = values.to(where.device)
    torch.distributed.all_reduce(shared)
    return shared.cpu()


def bits_per_byte(nll: np.ndarray, held_out: HeldOut) -> float:
    """Total bits of the predicted tokens over the UTF-8 bytes they stand for."""
    n_bytes = held_out.token_bytes[held_out.rows[:, 1:]].sum(dtype=np.float64)
    return float(nll.sum(dtype=np.float64) / math.log(2) / n_bytes)


def evaluate_validation(decoder: Decoder, held_out: HeldOut, where: Device) -> dict[str, Plain]:
    """Validation loss: nats per token, bits per byte, and each row's mean for paired comparison."""
    nll = nll_by_token(decoder, held_out, where)
    return {
        "kind": "validation",
        "seq_len": held_out.length,
        "rows": len(nll),
        "rows_sha256": held_out.sha256,
        "loss": float(nll.mean(dtype=np.float64)),
        "bits_per_byte": bits_per_byte(nll, held_out),
        "nll_by_row": [round(float(x), 6) for x in nll.mean(1, dtype=np.float64)],
    }


def evaluate_long_context(
    decoder: Decoder, held_out: HeldOut, where: Device, theta_factors: list[float], on_rows: Callable[[int], None] | None = None
) -> dict[str, Plain]:
    """Loss by position of long rows, once for each multiplier of RoPE's theta (arXiv 2501.19399, Fig. 5)."""
    edges = bucket_edges(decoder.seq_len, held_out.length)
    settings = []
    for factor in theta_factors:
        nll = nll_by_token(decoder, held_out, where, factor, on_rows)
        by_bucket = np.add.reduceat(nll.astype(np.float64), edges[:-1], axis=1) / np.diff(edges)
        settings.append(
            {
                "rope_theta_factor": factor,
                "loss": float(nll.mean(dtype=np.float64)),
                "bits_per_byte": bits_per_byte(nll, held_out),
                "nll_by_position": [round(float(x), 5) for x in nll.mean(0, dtype=np.float64)],
                "nll_by_row": [[round(float(x), 5) for x in row] for row in by_bucket],
            }
        )
    return {
        "kind": "long_context",
        "seq_len": decoder.seq_len,
        "length": held_out.length,
        "rows": held_out.rows.shape[0],
        "rows_sha256": held_out.sha256,
        "bucket_edges": edges.tolist(),
        "settings": settings,
    }


def bucket_edges(seq_len: int, length: int) -> np.ndarray:
    """Edges 0 = e_0 < ... < e_K = length of position buckets, four an octave, with edges at seq_len x 2^i."""
    quarters = np.arange(-4 * math.ceil(math.log2(seq_len)), 4 * math.ceil(math.log2(length / seq_len)) + 1)
    edges = np.unique(np.rint(seq_len * 2.0 ** (quarters / 4)).astype(int))
    return np.concatenate(([0], edges[(edges > 0) & (edges < length)], [length]))
