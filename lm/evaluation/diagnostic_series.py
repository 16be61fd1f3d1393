"""The series of diagnostics: each statistic as one number, by the number of visible keys, and by layer and head."""

from collections.abc import Iterator

import numpy as np

from lm.diagnostics.measures import NO_WEIGHT, NOT_FINITE, Measures, exponent, half_octaves, mean, visible_keys
from lm.diagnostics.rows import LEAST_KEYS, Accumulated, Statistic, Values
from lm.evaluation.held_out import HeldOut
from lm.runs.series import Axis, Sample, Series, Shown

Models = dict[str, Values]  # by the name of the model: the setting of its series
KIND = "diagnostics"
HEAD = "head"  # name of an axis
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
