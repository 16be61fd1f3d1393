"""Loss on held-out text: validation at the training length, and rows far beyond it by position."""

from itertools import pairwise

import numpy as np

from lm.config.eval_config import Schedule
from lm.config.task_config import task_names
from lm.data.store import entropy
from lm.evaluation.held_out import bits_per_byte, bucket_edges, long_rows, nll_by_token, validation_rows
from lm.evaluation.measurement import Measurement, Progress, Row
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.schema import Plain, to_plain


class Validation(Measurement):
    """Loss at the training length: nats per token, bits per byte, and each row's mean for paired comparison."""

    kind = "validation"
    version = 3

    def __init__(self, config, store):
        super().__init__(config, store)
        self.held_out = validation_rows(store, config)

    @property
    def schedule(self) -> Schedule:
        return Schedule(every=self.config.eval.every or max(1, self.config.trainer.max_steps // 20), at=[1.0])

    @property
    def settings(self) -> dict[str, Plain]:
        return {"seq_len": self.held_out.length, "rows_sha256": self.held_out.sha256, "documents": self.config.data.documents}

    @property
    def work(self) -> int:
        return len(self.held_out.rows)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        nll = nll_by_token(decoder, self.held_out, where, progress=progress)
        return {
            "rows": len(nll),
            "loss": float(nll.mean(dtype=np.float64, where=self.held_out.counts)),
            "bits_per_byte": None if self.config.data.symbolic else bits_per_byte(nll, self.held_out),
            "nll_by_row": rounded(nll.mean(1, dtype=np.float64, where=self.held_out.counts)),
            "targets_by_row": self.held_out.counts.sum(1).tolist(),
            "document_by_row": self.held_out.document_by_row.tolist(),
            "unigram_entropy": self._unigram_entropy(),
            "sources": self._by_source(nll),
        }

    def _unigram_entropy(self) -> float:
        """Of the tokens to predict, nats per token: of all held-out text, or of the answers in these rows."""
        if not self.config.data.symbolic:
            return self.store.val.unigram_entropy
        return entropy(np.bincount(self.held_out.rows[:, 1:][self.held_out.counts]))

    def _by_source(self, nll: np.ndarray) -> list[dict[str, Plain]]:
        """Rows and loss of each source of a mixture, or of each task over symbols; empty for one alone."""
        data, held_out = self.config.data, self.held_out
        labels = task_names([to_plain(share.task) for share in data.tasks]) if data.symbolic else [p.label for p in self.store.val.parts]
        of = [(label, held_out.sources == number) for number, label in enumerate(labels)] if len(labels) > 1 else []
        return [
            {"source": label, "rows": int(mine.sum()), "loss": float(nll[mine].mean(dtype=np.float64, where=held_out.counts[mine]))}
            for label, mine in of
            if mine.any()
        ]

    def rows(self, result: dict[str, Plain]) -> list[Row]:
        where = f"0-{result['seq_len']:,}"
        found = [Row("", where, "loss", result["loss"])]
        found += [] if result["bits_per_byte"] is None else [Row("", where, "bits per byte", result["bits_per_byte"])]
        return found + [Row("", f"{where}, {one['source']}", "loss", one["loss"]) for one in result["sources"]]

    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        by_source = {f"val/loss {one['source']}": one["loss"] for one in result["sources"]}
        bits = {} if result["bits_per_byte"] is None else {"val/bits_per_byte": result["bits_per_byte"]}
        return {"val/loss": result["loss"], **bits, **by_source}

    def text(self, result: dict[str, Plain]) -> str:
        bits = "" if result["bits_per_byte"] is None else f", {result['bits_per_byte']:.4f} bits per byte"
        return f"validation loss {result['loss']:.4f}{bits}"


class LongContext(Measurement):
    """Loss by position of rows beyond the training length, once for each way to use the model (arXiv 2501.19399, Fig. 5)."""

    kind = "long_context"
    version = 2

    def __init__(self, config, store):
        super().__init__(config, store)
        self.held_out = long_rows(store, config)
        self.ways = config.eval.long_context.settings

    @property
    def schedule(self) -> Schedule:
        return self.config.eval.long_context

    @property
    def settings(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "length": self.held_out.length,
            "rows_sha256": self.held_out.sha256,
            "ways": [to_plain(way) for way in self.ways],
        }

    @property
    def work(self) -> int:
        return len(self.held_out.rows) * len(self.ways)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        edges, found = bucket_edges(decoder.seq_len, self.held_out.length), []
        for way in self.ways:
            nll = nll_by_token(for_inference(decoder, way), self.held_out, where, progress)
            by_bucket = np.add.reduceat(nll.astype(np.float64), edges[:-1], axis=1) / np.diff(edges)
            found.append(
                {
                    "label": way.label,
                    **to_plain(way),
                    "loss": float(nll.mean(dtype=np.float64)),
                    "bits_per_byte": bits_per_byte(nll, self.held_out),
                    "nll_by_position": rounded(nll.mean(0, dtype=np.float64)),
                    "nll_by_row": [rounded(row) for row in by_bucket],
                }
            )
        documents = self.held_out.document_by_row.tolist()
        return {"rows": len(self.held_out.rows), "document_by_row": documents, "bucket_edges": edges.tolist(), "settings": found}

    def rows(self, result: dict[str, Plain]) -> list[Row]:
        found = []
        for one in result["settings"]:
            label, whole = one["label"], f"0-{result['length']:,}"
            found.append(Row(label, whole, "bits per byte", one["bits_per_byte"]))
            found.append(Row(label, whole, "loss", one["loss"]))
            for low, high, loss in by_octave(one["nll_by_position"], result["seq_len"]):
                found.append(Row(label, f"{low:,}-{high:,}", "loss", loss))
        return found

    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        return {f"long/loss {one['label']}": one["loss"] for one in result["settings"]}

    def text(self, result: dict[str, Plain]) -> str:
        losses = ", ".join(f"{one['loss']:.4f} ({one['label']})" for one in result["settings"])
        return f"loss of rows of {result['length']:,} tokens {losses}"


def rounded(values: np.ndarray) -> list[float]:
    """As JSON keeps them: to 1e-6."""
    return [round(float(x), 6) for x in values]


def by_octave(nll: list[float], seq_len: int) -> list[tuple[int, int, float]]:
    """(from, to, mean loss) of the training length and of each doubling beyond it."""
    edges = [0, seq_len]
    while edges[-1] < len(nll):
        edges.append(min(2 * edges[-1], len(nll)))
    return [(low, high, sum(nll[low:high]) / (high - low)) for low, high in pairwise(edges)]
