"""The series of a validation, for what measures it and for what reads its means from a log alone."""

import numpy as np

from lm.runs.series import Sample, Series, Shown, selects

KIND, LOSS = "validation", "val loss"
UNIGRAM = "unigram cross-entropy"  # the level to compare the loss with


def validation_series(
    loss: float,
    bits_per_byte: float | None,
    unigram_cross_entropy: float | None,
    seq_len: int,
    sample: Sample | None = None,
    data_fingerprint: str = "",
) -> list[Series]:
    """Loss (nats per token) and, of text, bits per byte on held-out sequences of the training length.

    Args:
        bits_per_byte: None: symbols, which are no bytes.
        unigram_cross_entropy: loss by token frequencies of the training text, nats per token; None: not known.
        sample: loss by sequence, (sequences, 1); None: means alone are known.
    """
    token = "token" if bits_per_byte is not None else "token of the answers"
    units = 0 if sample is None else len(sample.values)
    amount, method = f"{units:,} of {seq_len:,} tokens", f"Validation loss is the mean negative log-likelihood in nats per {token}"
    method += f" over {units:,} held-out sequences of the training length"
    shown = Shown("Validation at the training length", "validation sequences", amount if units else "", method=method if units else "")
    common = {"kind": KIND, "better": "lower", "seq_len": seq_len, "shown": shown}
    found = [
        Series(
            metric=LOSS, unit="nats per token", means=np.array([loss], float), logged=("val/loss",),
            references={} if unigram_cross_entropy is None else {UNIGRAM: unigram_cross_entropy},
            samples=() if sample is None else (sample,), interval="none" if sample is None else "documents",
            data_fingerprint=data_fingerprint, **common,
        )
    ]  # fmt: skip
    if bits_per_byte is not None:
        found.append(
            Series(metric="bits per byte", unit="", means=np.array([bits_per_byte], float), logged=("val/bits_per_byte",), **common)
        )
    return found


def selecting(data: str, documents: np.ndarray) -> np.ndarray:
    """Which validation sequences, (sequences,) bool, choose the best checkpoint: those that `selects`; all where none or each does."""
    chosen = selects(data, documents)
    return chosen if chosen.any() else ~chosen


def selection_loss(series: Series) -> tuple[float, str]:
    """The validation loss on the sequences that choose the best checkpoint, nats per token, and the hash of these."""
    (sample,) = series.samples
    part = sample.part(selecting(series.data_fingerprint, sample.groups))
    return float(np.average(part.values[:, 0], weights=part.weights)), part.sha256
