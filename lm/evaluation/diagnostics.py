"""Diagnostics: statistics of attention weights (`lm.diagnostics`), of the model, of the untrained one, and with shuffled scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lm.config.eval_config import DiagnosticsConfig
from lm.config.tree import Config
from lm.data.batches import long_starts, validation_starts
from lm.data.store import Store
from lm.data.tokenizer import encoding_of
from lm.diagnostics.families import families
from lm.diagnostics.measures import Measures, orders
from lm.diagnostics.rows import LEAST_KEYS, query_indices
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.diagnostic_series import Models, series_of
from lm.evaluation.held_out import HeldOut, task_sequences
from lm.evaluation.measurement import Measurement, Progress
from lm.evaluation.sequences import by_sequence
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Series
from lm.schema import Plain, to_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LENGTH = "eval.diagnostics.length_factor"
SHUFFLED, UNTRAINED = "shuffled scores", "untrained weights"


def diagnostic_sequences(store: Store, config: Config, asked: DiagnosticsConfig) -> HeldOut:
    """Up to `asked.sequences` held-out sequences: validation windows at the training length, else each within one document; or of a text.

    Raises:
        ConfigError: no document is long enough, or no query of such a sequence would see `LEAST_KEYS` keys.
        RunError: the text can't be read, or is too short.
    """
    length = sequence_length(asked, config.data.seq_len)
    if asked.text:
        return sequences_of_text(store.tokenizer(), store.end_of_text, asked, length)
    if config.data.symbolic:
        held_out = task_sequences(store, config)
        chosen = np.arange(min(asked.sequences, len(held_out.sequences))) * len(held_out.sequences) // asked.sequences
        return HeldOut(held_out.sequences[chosen], held_out.token_bytes)
    if asked.length_factor == 1:
        starts, isolate = validation_starts(store.val, length, asked.sequences), config.data.documents == "isolate"
    else:
        starts, isolate = long_starts(store.val, length, asked.sequences), False
    if not len(starts):
        reason = f"needs held-out documents of {length + 1:,} tokens, the longest has {store.val.longest:,}"
        raise ConfigError([Problem(_LENGTH, asked.length_factor, reason, "set it lower")])
    return HeldOut.take(store, starts, length, isolate)


def sequence_length(asked: DiagnosticsConfig, seq_len: int) -> int:
    """Tokens in a sequence, of a model that was trained on `seq_len`. Raises ConfigError if no query would see `LEAST_KEYS` keys."""
    length = round(asked.length_factor * seq_len)
    if length < LEAST_KEYS:
        reason = f"makes sequences of {length} tokens, in which no query sees the {LEAST_KEYS} keys that statistics need"
        raise ConfigError([Problem(_LENGTH, asked.length_factor, reason, "set it higher")])
    return length


def sequences_of_text(tokenizer: "Tokenizer", end_of_text: int, asked: DiagnosticsConfig, length: int) -> HeldOut:
    """Up to `asked.sequences` windows of the text file `asked.text`, side by side, spread evenly over it.

    Raises:
        RunError: it is not to be read, not UTF-8, or has too few tokens.
    """
    try:
        text = Path(asked.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"eval.diagnostics.text = {asked.text}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
    tokens = np.array([end_of_text, *encoding_of(tokenizer, text).ids])
    fitting = (len(tokens) - 1) // length
    if not fitting:
        reason = f"has {len(tokens):,} tokens, a sequence {length + 1:,}"
        raise RunError(f"eval.diagnostics.text = {asked.text}: {reason}; give more text, or lower {_LENGTH}")
    count = min(asked.sequences, fitting)
    starts = np.arange(count) * fitting // count * length
    sequences = tokens[starts[:, None] + np.arange(length + 1)]
    return HeldOut(sequences, np.zeros(tokenizer.get_vocab_size(), np.float32))


class Diagnostics(Measurement):
    """Statistics of attention weights by layer, head and number of visible keys, of three models.

    Beside the model, under each inference setting: the untrained model of the same configuration and seed, and the model with the scores
    of each query shuffled among the keys that it sees. What holds of those, too, says nothing about training. In fp32.
    """

    kind = "diagnostics"

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = diagnostic_sequences(store, config, self.asked)

    @property
    def options(self) -> dict[str, Plain]:
        return recorded(self.asked, self.held_out, self.config.data.seq_len, self.config.seed)

    @property
    def work(self) -> int:
        return len(self.held_out.sequences) * len(self.asked.inference)

    def precision(self, where: Device) -> str:
        return "32"

    def lasts(self, series: Sequence[Series]) -> bool:
        return True  # what is not finite is not defined there

    def picture(self, series: Sequence[Series]) -> bytes | None:
        from lm.evaluation.diagnostic_pictures import draw  # imports matplotlib

        return draw(series)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
        return describe(decoder, self.held_out, self.asked, where, self.config.seed, self.store.fingerprint, progress)


def recorded(asked: DiagnosticsConfig, held_out: HeldOut, seq_len: int, seed: int) -> dict[str, Plain]:
    """All that decides the numbers beside the model, as a result keeps it: what was asked for, and what was measured."""
    options = {name: value for name, value in to_plain(asked).items() if name not in ("every", "at", "max_seconds")}
    measured = {"sequences": len(held_out.sequences), "sequences_asked": asked.sequences, "sequences_sha256": held_out.sha256}
    measured |= {"length": held_out.length, "query_indices": query_indices(held_out.length, asked.queries), "least_keys": LEAST_KEYS}
    return {"seq_len": seq_len, **options, **measured, "untrained_seed": seed}


def describe(
    decoder: Decoder,
    held_out: HeldOut,
    asked: DiagnosticsConfig,
    where: Device,
    seed: int = 1,
    fingerprint: str = "",
    progress: Progress = lambda sequences: None,
) -> list[Series]:
    """The diagnostics of a decoder on its device, as series. Collective.

    Args:
        seed: of the initial weights of the untrained model.
        fingerprint: of the data that the sequences come from.
        progress: called with the number of sequences done.
    """
    untrained = Decoder(decoder.config, decoder.vocab_size, decoder.seq_len, seed=seed).to(where.device)
    models: Models = {}
    for setting in asked.inference:
        words = "" if setting.label == "as trained" else f", {setting.label}"
        pair = [for_inference(one, setting) for one in (decoder, untrained)]
        measures, found = statistics_of(*pair, held_out, asked, where, progress)
        values = [measures.values(found[:, number], decoder.seq_len) for number in range(3)]
        models |= dict(zip((setting.label, UNTRAINED + words, SHUFFLED + words), values, strict=True))
    return series_of(models, measures, held_out, asked.by_position, fingerprint)


def statistics_of(
    decoder: Decoder,
    untrained: Decoder,
    held_out: HeldOut,
    asked: DiagnosticsConfig,
    where: Device,
    progress: Progress = lambda sequences: None,
) -> tuple[Measures, np.ndarray]:
    """What is measured, and of each sequence the vectors of the model, of the untrained one and of shuffled scores: (N, 3, numbers) fp32.

    Sequences are split over the ranks of `where`; every rank returns all. Collective.
    """
    queries = query_indices(held_out.length, asked.queries)
    heads = max(one.layer.n_head for one in decoder.normalizers())
    measures = Measures(families(asked), len(decoder.normalizers()), heads, queries, held_out.length)

    def measure(part: list[int]) -> Tensor:
        with torch.autocast(where.device.type, enabled=False):
            return torch.stack([of_one(index) for index in part])

    def of_one(index: int) -> Tensor:
        batch = held_out.batch([index]).to(where.device)
        where.check_time()
        model, shuffled = measures.of(decoder, batch, index, orders(index, len(queries), held_out.length))
        return torch.stack([model, *measures.of(untrained, batch, index), shuffled])

    count = len(held_out.sequences)
    shape = 3, measures.numbers
    return measures, by_sequence([decoder, untrained], [held_out.length] * count, shape, where, measure, progress)
