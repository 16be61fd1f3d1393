"""Diagnostics (`lm diagnose`): statistics of attention weights of the model, of the untrained one, and with shuffled scores."""

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
from lm.diagnostics.attention_rows import HEAD, LEAST_KEYS, Measures, orders, query_indices
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.evaluation.held_out import HeldOut, by_sequence, task_sequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Series
from lm.schema import Plain, to_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer
from collections.abc import Callable, Iterator
from dataclasses import replace

from lm.config.eval_config import EvalConfig, LongContextConfig
from lm.config.load import merge, overrides_in, parse
from lm.data.prepare import check_sequences
from lm.diagnostics import concentration, limits, sparsity
from lm.diagnostics.attention_rows import (
    NO_WEIGHT,
    NOT_FINITE,
    Accumulated,
    Family,
    Statistic,
    Values,
    exponent,
    half_octaves,
    mean,
    visible_keys,
)
from lm.evaluation.evaluate import evaluate, evaluate_model, open_device, open_store, split_configurations, text_config
from lm.evaluation.evaluation_kind import weights_sha256
from lm.progress import Progress
from lm.report.evaluation_tables import Evaluated, print_results, write_table
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CHECKPOINTS, CONFIG, read_config, require_run
from lm.runs.loading import DESCRIPTION, Loaded, find_checkpoint, load
from lm.runs.series import Axis, Sample, Shown

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

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
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
    progress: Advance = lambda sequences: None,
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
    progress: Advance = lambda sequences: None,
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


Models = dict[str, Values]  # by the name of the model: the setting of its series
KIND = "diagnostics"
UNDEFINED = (Statistic(NOT_FINITE, "fraction", lambda rows: None), Statistic(NO_WEIGHT, "fraction", lambda rows: None))


def series_of(models: Models, measures: Measures, held_out: HeldOut, by_position: bool, fingerprint: str) -> list[Series]:
    """All numbers, then all curves, then all heads, each by statistic and model. The first of `models` is the model itself."""
    made = _Made(models, measures, held_out, fingerprint)
    parts = [made.numbers(), made.curves(), made.derived(), made.heads()] + ([made.heads_by_keys()] if by_position else [])
    return [one for part in parts for one in part]


class _Made:
    """Series of the statistics of several models on the same sequences."""

    def __init__(self, models: Models, measures: Measures, held_out: HeldOut, fingerprint: str):
        self.models, self.measures, self.held_out, self.fingerprint = models, measures, held_out, fingerprint
        self.first = next(iter(models))
        self.bins = half_octaves(models[self.first].n, models[self.first].train_length)

    def _each(self, statistics: tuple | list) -> Iterator[tuple[Statistic | Accumulated, str, Values]]:
        """Each statistic of each model, but for those that are defined nowhere."""
        for one in statistics:
            arrays = [(values.by_query | values.by_head).get(one.name) for values in self.models.values()]
            if any(array is not None and np.isfinite(array).any() for array in arrays):
                yield from ((one, setting, values) for setting, values in self.models.items())

    def numbers(self) -> Iterator[Series]:
        """Means over all queries, heads and layers, with their intervals over documents; mean exponents over heads."""
        for one, setting, values in self._each([*self.measures.per_query, *UNDEFINED]):
            by_query = values.by_query[one.name]
            count = np.isfinite(by_query).sum((1, 2, 3))
            means = np.where(count, mean(by_query, (1, 2, 3)), 0.0)
            sample = Sample(self.held_out.sha256, means[:, None], count, self.held_out.document_labels)
            samples = (sample,) if count.any() else ()
            yield self._series(one, setting, np.atleast_1d(mean(by_query)), samples=samples, logged=self._logged(one, setting))
        for one, setting, values in self._each(self.measures.accumulated):
            yield self._series(one, setting, np.atleast_1d(mean(values.by_head[one.name])), logged=self._logged(one, setting))
        for one, setting, exponents, _ in self._fits():
            yield self._series(one, setting, np.atleast_1d(mean(exponents)), _exponent_of(one), "")

    def curves(self) -> Iterator[Series]:
        """Means over heads and layers by the number of visible keys, with their intervals over documents."""
        axis = visible_keys(self.bins)
        for one, setting, values in self._each(self.measures.per_query if self.bins else []):
            by_bin = np.stack([self._within(one, values, bounds, (1, 2, 3)) for bounds in self.bins], 1)  # (N, bins)
            sample = Sample(self.held_out.sha256, by_bin, np.ones(len(by_bin)), self.held_out.document_labels)
            shown = self._shown(one) if one.shown else None
            yield self._series(one, setting, mean(by_bin, 0), axis=axis, samples=(sample,), shown=shown)

    def derived(self) -> Iterator[Series]:
        """What families make of their statistics."""
        for family in self.measures.families:
            for setting, values in self.models.items():
                for one in family.derive(values):
                    yield self._series(
                        one, setting, one.values, what=one.what, axis=one.axis, shown=self._shown(one) if one.shown else None
                    )

    def heads(self) -> Iterator[Series]:
        """Means over sequences and queries by layer and head; the exponents of growth with the number of keys, and their fits' R^2."""
        for one, setting, values in self._each([*self.measures.per_query, *self.measures.accumulated, *UNDEFINED]):
            by_head = values.by_head[one.name] if one.name in values.by_head else mean(values.by_query[one.name], (0, 3))
            yield from self._by_head(one, setting, by_head)
        for one, setting, exponents, fit in self._fits():
            yield from self._by_head(one, setting, exponents, _exponent_of(one))
            yield from self._by_head(one, setting, fit, f"R^2 of the {_exponent_of(one)}")

    def heads_by_keys(self) -> Iterator[Series]:
        """Means over sequences by layer, head and number of visible keys."""
        for one, setting, values in self._each(self.measures.per_query):
            for bounds in self.bins:
                by_head = self._within(one, values, bounds, (0, 3))
                yield from self._by_head(one, setting, by_head, where=f"{bounds[0]:,} to {bounds[1]:,} keys")

    def _fits(self) -> Iterator[tuple[Statistic, str, np.ndarray, np.ndarray]]:
        """Exponents of growth with n up to the training length and their R^2, (layers, H), of each model."""
        for one, setting, values in self._each([one for one in self.measures.per_query if one.fitted]):
            n = np.where(values.n <= values.train_length, values.n, np.nan)
            exponents, fit = exponent(values.by_query[one.name], n, one.log)
            if np.isfinite(exponents).any():
                yield one, setting, exponents, fit

    def _within(self, one: Statistic, values: Values, bounds: tuple[int, int], axes: tuple[int, ...]) -> np.ndarray:
        """Means over some axes of what queries give that see `bounds` keys."""
        n = values.n[:, :, None]
        return mean(np.where((n >= bounds[0]) & (n <= bounds[1]), values.by_query[one.name], np.nan), axes)

    def _by_head(self, one: Statistic, setting: str, by_head: np.ndarray, metric: str = "", where: str = "") -> Iterator[Series]:
        axis = Axis(HEAD, "", "of head", tuple(range(by_head.shape[1])), log=False)
        unit = "" if metric else one.unit
        for layer, means in enumerate(by_head):
            what = f"layer {layer}" + (f", {where}" if where else "")
            yield self._series(one, setting, means, metric, unit, what=what, axis=axis)

    def _series(self, one: object, setting: str, means: np.ndarray, metric: str = "", unit: str | None = None, **given: object) -> Series:
        interval = "documents" if given.get("samples") else "none"
        return Series(
            KIND, metric or one.name, one.unit if unit is None else unit, "none", self.models[setting].train_length,
            np.asarray(means, "f8"), setting=setting, control=setting != self.first, interval=interval,
            data_fingerprint=self.fingerprint, **given,
        )  # fmt: skip

    def _logged(self, one: Statistic | Accumulated, setting: str) -> tuple[str, ...]:
        return (f"{KIND}/{one.name}",) if one.shown and setting == self.first else ()

    def _shown(self, one: object) -> Shown:
        held_out = self.held_out
        count, queries = len(held_out.sequences), len(self.measures.queries)
        return Shown(
            f"Attention: {one.name}",
            "held-out sequences of diagnostics",
            f"{count:,} of {held_out.length:,} tokens, {queries} queries each",
            f"{one.name} of attention weights, mean over heads",
            method=f"Attention weights are described on {count:,} held-out sequences of {held_out.length:,} tokens, {queries} queries of "
            f"each that see {LEAST_KEYS} keys or more, evenly spread over the logarithm of their number",
        )


def _exponent_of(one: Statistic) -> str:
    return f"exponent of {one.name.removeprefix('ln ')}"


def diagnose(sources: list[Path], checkpoint: str = "last", overrides: list[str] | None = None, out: Path | None = None) -> list[Evaluated]:
    """Diagnostics of models, printed and returned; those of run folders are kept in their evaluations/, as `lm eval` does.

    Args:
        sources: run folders, checkpoints, exports and other model folders, and configurations of the text that model folders are
            measured on; one without a training run needs them, or eval.diagnostics.text.
        checkpoint: of run folders: `last`, `best` or a step.
        overrides: `key=value` of keys that act in `lm diagnose`, such as eval.diagnostics.sequences=32.
        out: a .csv or .json file for all numbers.

    Raises:
        LMError: no model there, no text that could be read, other data than it was trained on.
    """
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write results of this kind; name a .csv or .json file")
    sources, files = split_configurations(sources)
    for source in sources or files:
        check_source(source)
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    found: list[Evaluated] = []
    for source in sources:
        folder = source if source.is_dir() else source.resolve().parent.parent
        if (folder / DESCRIPTION).is_file() and files:
            loaded = load(source)
            text = text_config(loaded, files)
            text.eval = _alone(text.eval.diagnostics)
            found += evaluate_model(parse(merge(to_plain(text), changes)), loaded, [KIND])
        elif files:
            raise RunError(f"{source}: of a run: it is measured on the text of that, not on that of {files[0]}; leave {files[0]} out")
        elif (folder / CONFIG).is_file():
            config = parse(merge(to_plain(read_config(folder)), changes))
            path = find_checkpoint(folder, checkpoint) if source.is_dir() else source
            found += evaluate(config, folder, path, [KIND])
        else:
            found.append(_of_model(load(source, checkpoint), changes))
    print_results(found, out)
    if out:
        write_table(found, out)
    return found


def check_source(source: Path) -> None:
    """Raises RunError if there is nothing at `source`, or what is no model."""
    if not source.exists():
        raise RunError(f"{source}: no such run folder, checkpoint or export")
    if source.is_dir() and not any((source / name).exists() for name in (CONFIG, DESCRIPTION, CHECKPOINTS)):
        require_run(source, CONFIG)
    if source.suffix in (".yaml", ".yml"):
        raise RunError(f"{source}: a configuration, not a model: train it (lm train {source}), and name its run folder")


def _of_model(loaded: Loaded, changes: dict[str, Plain]) -> Evaluated:
    """Of a model folder, kept nowhere: on the held-out text of the run that it is of, or on a text."""
    config = config_of(loaded, changes)
    asked, seed, fingerprint = config.eval.diagnostics, config.seed, ""
    if asked.text:
        held_out = sequences_of_text(*loaded.tokenizer_and_start(), asked, sequence_length(asked, loaded.spec.seq_len))
    elif loaded.config is None:
        remedy = "set eval.diagnostics.text=FILE, or name a configuration of text"
        raise RunError(f"{loaded.path}: has no training run behind it, whose held-out text could be read; {remedy}")
    else:
        store = open_store(config, loaded)
        check_sequences(store, config)
        held_out, fingerprint = diagnostic_sequences(store, config, asked), store.fingerprint
    where = replace(open_device(config, loaded.environment), bf16=False)
    weights, decoder = weights_sha256(loaded.decoder), loaded.decoder.to(where.device)
    with Progress().bar(f"{loaded.folder.name}: {KIND}", len(held_out.sequences) * len(asked.inference)) as advance:
        series = describe(decoder, held_out, asked, where, seed, fingerprint, advance)
    facts = loaded.stamp | {"data_fingerprint": fingerprint, "options": recorded(asked, held_out, loaded.spec.seq_len, seed)}
    evaluation = Evaluation(kind=KIND, precision=where.precision, weights_sha256=weights, series=tuple(series), **facts)
    return Evaluated(loaded.folder, evaluation, cached=False)


def config_of(loaded: Loaded, changes: dict[str, Plain]) -> Config:
    """The configuration a model was trained with, or one that fits it, with changes."""
    return parse(merge(to_plain(loaded.config or _untrained(loaded)), changes))


def _untrained(loaded: Loaded) -> Config:
    """A configuration of the model, whose keys of training mean nothing."""
    config = Config(name=loaded.folder.name, model=loaded.spec.model, eval=_alone())
    config.data.seq_len, config.optim.batch_tokens = loaded.spec.seq_len, loaded.spec.seq_len
    return config


def _alone(diagnostics: DiagnosticsConfig | None = None) -> EvalConfig:
    """Asks for nothing else, which the model may not be capable of."""
    return EvalConfig(long_context=LongContextConfig(length_factor=0), diagnostics=diagnostics)


FAMILIES: dict[str, Callable[[DiagnosticsConfig], Family]] = {
    "concentration": lambda asked: concentration.family(asked.top_k, asked.nearest),
    "sparsity": lambda asked: sparsity.family(),
    "limits": lambda asked: limits.family(asked.limits, max(1, asked.queries // asked.limits.queries)),
}


def families(asked: DiagnosticsConfig) -> tuple[Family, ...]:
    """The families that are asked for, with their options."""
    return tuple(FAMILIES[name](asked) for name in asked.statistics)
