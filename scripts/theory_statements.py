"""The statements of the papers, and how each is compared with the diagnostics of models on text."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from lm.attention.catalogue import Linear
from lm.attention.options import Options
from lm.diagnostics.attention_rows import NO_FIRST
from lm.runs.evaluations import Series

TRAINED, UNTRAINED = "as trained", "untrained weights"
READ, DERIVED, UNCONFIRMED = "as in the source", "derived by us", "not confirmed: our reconstruction"
QUOTED = "quoted to us, not confirmed"
OF_5 = "d~ of 5 keys"


@dataclass(frozen=True, eq=False)
class Described:
    """The diagnostics of one run on text: the experiment that it is of, its arm and normalizer, its training length."""

    experiment: str
    arm: str
    normalizer: Options
    folder: Path
    step: int
    length: int
    series: tuple[Series, ...]

    def curve(self, metric: str, what: str = "") -> Series | None:
        """A metric over its axis; None if it is not defined."""
        return next(
            (
                series
                for series in self.series
                if (series.metric, series.setting, series.what) == (metric, TRAINED, what) and series.axis
            ),
            None,
        )

    @property
    def is_exp(self) -> bool:
        """Whether weights are e^score over a sum."""
        return not math.isnan(self.number("queries beyond condensation"))

    @property
    def knows_n(self) -> bool:
        """Whether its scores are others where a query sees more keys; of weights that are e^score over a sum."""
        return math.isnan(self.number("Lemma 1: ln C2 = -ln C1"))

    def number(self, metric: str, setting: str = TRAINED) -> float:
        """A metric of all that is described; NaN if it is not defined."""
        return next(
            (
                float(series.means[0])
                for series in self.series
                if (series.metric, series.setting) == (metric, setting) and not series.axis
            ),
            math.nan,
        )

    def values(self, metric: str, what: str = "") -> np.ndarray:
        """The means of a curve; empty if it is not defined."""
        curve = self.curve(metric, what)
        return np.empty(0) if curve is None else curve.means

    def last(self, metric: str, what: str = "") -> float:
        """The last defined mean of a curve; NaN if there is none."""
        values = self.values(metric, what)
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else math.nan

    def slope(self, metric: str, what: str = "") -> float:
        """Exponent of a curve: the least-squares slope on logarithms of both axes; NaN of fewer than two points."""
        curve = self.curve(metric, what)
        if curve is None or np.isfinite(curve.means).sum() < 2:
            return math.nan
        finite = np.isfinite(curve.means)
        return float(np.polyfit(np.log(np.array(curve.axis.values)[finite]), np.log(curve.means[finite]), 1)[0])


@dataclass(frozen=True)
class Statement:
    """What a source states, and what came out.

    Attributes:
        source: paper and place.
        says: what it states.
        known: how we know that it does, and of formulas where they are from.
        measured: what is compared with it, and when it counts as holding.
        values: of each arm, as shown.
        holds: of each arm that it is about.
    """

    source: str
    says: str
    known: str
    measured: str
    values: dict[str, str] = field(default_factory=dict)
    holds: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The source, and how the statement is known where it is not as in the source."""
        return self.source if self.known == READ else f"{self.source} ({self.known})"

    @property
    def outcome(self) -> str:
        """In a word, over arms."""
        agreeing = [arm for arm, holds in self.holds.items() if holds]
        if not self.holds:
            return "for comparison"
        return "yes" if len(agreeing) == len(self.holds) else f"{', '.join(agreeing)} alone" if agreeing else "no"


Result = tuple[
    str, bool | None
]  # what is shown of a model, and whether the statement holds; None: it is not about this model
Compared = Callable[[Described], Result | None]  # None: it does not apply, or is not defined


def _number(metric: str, holds: Callable[[float], bool], digits: int = 2) -> Compared:
    """Of a number beside that of the untrained model."""

    def of(model: Described) -> Result | None:
        value, before = model.number(metric), model.number(metric, UNTRAINED)
        return None if math.isnan(value) else (f"{value:.{digits}f} ({before:.{digits}f})", holds(value))

    return of


def _largest(scaled: bool) -> Compared:
    """The exponent of the largest weight, of models whose scores grow with n (`scaled`) or don't."""

    def of(model: Described) -> Result | None:
        if not model.is_exp or model.knows_n != scaled:
            return None
        return _number("exponent of largest weight" + NO_FIRST, lambda x: (x >= -0.1) == scaled)(model)

    return of


def _bounded(model: Described) -> Result | None:
    ratios = model.values("d~ of the largest weights / its bound")
    return (f"up to {np.nanmax(ratios):.2f}", bool(np.nanmax(ratios) <= 1)) if len(ratios) else None


def _ratio(what: str, holds: Callable[[np.ndarray], bool]) -> Compared:
    """Of an expectation of d~ over that of drawn sets, at all N: least to largest."""

    def of(model: Described) -> Result | None:
        values, drawn_values = model.values("d~", what), model.values("d~", "random keys, drawn")
        ratios = values / drawn_values if len(values) else values
        ratios = ratios[np.isfinite(ratios)]
        return (f"{ratios.min():.2f} to {ratios.max():.2f}", holds(ratios)) if len(ratios) else None

    return of


def _lemma_1(model: Described) -> Result | None:
    bound = model.number("Lemma 1: ln C2 = -ln C1")
    if math.isnan(bound):
        return None
    largest, smallest = (model.number(f"Lemma 1: ln (n x {extreme} weight)") for extreme in ("largest", "smallest"))
    return f"{smallest:.1f} to {largest:.1f}, bounds -+{bound:.1f}", -bound <= smallest <= largest <= bound


def _linear(model: Described) -> Result | None:
    exponent = model.slope(OF_5, "largest weights")
    return None if math.isnan(exponent) else (f"exponent {exponent:.3f}", 0.8 <= exponent <= 1.2)


def _critical(model: Described) -> Result | None:
    texts = []
    for sets in ("uncorrected", "corrected", "drawn"):
        fractions = [
            model.last("critical N / visible keys", f"random keys, {sets}, level {level}") for level in ("0.01", "0.05")
        ]
        texts.append(
            f"{sets} " + "/".join("none" if math.isnan(fraction) else f"{fraction:.1%}" for fraction in fractions)
        )
    return "; ".join(texts), any(0.02 <= fraction <= 0.15 for fraction in fractions)  # of drawn sets


def _separable(model: Described) -> Result | None:
    ratio = model.number("N_s / N of 16 keys")
    return None if math.isnan(ratio) else (f"{ratio:.2f}", 0.70 <= ratio <= 0.85)


def _covered(model: Described) -> Result | None:
    shares, formula = (
        model.values("keys that at least one head separates", label) for label in ("measured", "1 - (1 - p)^H")
    )
    if (
        not len(shares) or (model.values("heads that choose a key") == 1).all()
    ):  # one head: the formula is what is measured
        return None
    difference = float(np.nanmax(np.abs(shares - formula)))
    return (
        f"{np.nanmin(shares):.2f} to {np.nanmax(shares):.2f}, formula {np.nanmin(formula):.2f} to "
        f"{np.nanmax(formula):.2f}",
        difference < 0.05,
    )


def _temperature(model: Described) -> Result | None:
    curve = model.curve("change of weights", "one direction, step 0.001")
    if curve is None or not model.is_exp:
        return None
    changes = dict(zip(curve.axis.values, curve.means, strict=True))
    low, high = changes.get(0.01, math.nan), changes.get(1.0, math.nan)
    return f"{low:.3g} at T = .01, {high:.3g} at T = 1", low / high >= 50


def _ceiling(model: Described) -> Result | None:
    curve = model.curve("change of weights", "spectral norm")
    if curve is None or not model.is_exp:
        return None
    product = curve.means * np.array(curve.axis.values)
    return f"norm x T up to {np.nanmax(product):.3f}", bool(np.nanmax(product) <= 0.25)


def _closed_form(exp: bool) -> Compared:
    """S beside its closed form, of models whose weights are e^score (`exp`) or aren't."""

    def of(model: Described) -> Result | None:
        difference = model.number("S minus closed form" + NO_FIRST)
        if math.isnan(difference) or model.is_exp != exp:
            return None
        s, condensed_fraction = model.number("S" + NO_FIRST), model.number("queries beyond condensation")
        condensed = f"; {condensed_fraction:.0%} of queries beyond condensation" if exp else ""
        return f"S {s:.3f}, closed form {s - difference:.3f}{condensed}", abs(difference) < 0.05

    return of


def _explained(place: str, applies: Callable[[Options], bool]) -> Compared:
    """The fraction of the weights' variance that `key position` or `distance` alone explains, beside what any function
    of both does; the statement is about the normalizers that `applies` accepts."""

    def of(model: Described) -> Result | None:
        explained, before = (
            model.number(f"variance explained by {place}", setting) for setting in (TRAINED, UNTRAINED)
        )
        explained_by_both = model.number("variance explained by both, last query")
        if math.isnan(explained):
            return None
        return f"{explained:.2f} ({before:.2f}), by both {explained_by_both:.2f}", explained > 0.5 if applies(
            model.normalizer
        ) else None

    return of


def _entropy(model: Described) -> Result | None:
    curve = model.curve("entropy")
    if curve is None:
        return None
    finite = np.isfinite(curve.means)
    slope = float(np.polyfit(np.log(np.array(curve.axis.values)[finite]), curve.means[finite], 1)[0])
    return f"{slope:.2f} nats for each ln n", slope > 0.5 if model.is_exp and not model.knows_n else None


STATEMENTS: tuple[tuple[str, str, str, str, Compared], ...] = (
    (
        "SSMax (2501.19399)",
        "the largest weight of softmax goes to 0 as n grows",
        READ,
        "exponent of the largest weight in n, first token left out (untrained); below -.1 counts",
        _largest(scaled=False),
    ),
    (
        "SSMax (2501.19399)",
        "the largest weight of SSMax need not go to 0",
        READ,
        "exponent of the largest weight in n, first token left out (untrained); above -.1 counts",
        _largest(scaled=True),
    ),
    (
        "Mudarisov (2508.17821), Lemma 1",
        "C1 / n <= weight <= C2 / n if F does not depend on n",
        READ,
        "ln (n x smallest and largest weight), means; within the bounds",
        _lemma_1,
    ),
    (
        "Mudarisov, Theorem 1, set of the largest weights",
        "a bound on d~",
        UNCONFIRMED,
        "d~ over the bound, by N: below 1",
        _bounded,
    ),
    (
        "Mudarisov, Theorem 1, random sets",
        "the expectation of d~, with the factor alpha + N / (L - 1)",
        QUOTED,
        "formula over drawn sets, by N; within 20 % (median)",
        _ratio("random keys, uncorrected", lambda x: bool(abs(np.median(x) - 1) < 0.2)),
    ),
    (
        "Mudarisov, Theorem 1, random sets",
        "corrected: (1 + c) alpha x - c mean, c = N / (L - 1), a lower bound",
        DERIVED,
        "formula over drawn sets, by N; at most 1.02, for chance",
        _ratio("random keys, corrected", lambda x: bool((x <= 1.02).all())),
    ),
    (
        "Mudarisov, Alg. 1",
        "d~ grows linearly with length at N = 5",
        READ,
        "exponent of d~ in n, .8 to 1.2 counts",
        _linear,
    ),
    (
        "Mudarisov, Alg. 3",
        "critical N is about 6 % of the length",
        READ + "; level .01 and .05 in different places",
        "critical N / n at the longest n, at .01/.05, by expectation; .02 to .15 of drawn sets counts",
        _critical,
    ),
    ("Mudarisov, Alg. 4", "N_s / N stays at .70 to .85 from N = 16 on (80 %)", READ, "N_s / N at N = 16", _separable),
    (
        "Mudarisov, on several heads",
        "H heads separate 1 - (1 - p)^H of the keys",
        READ,
        "by at least one head of a layer, over N; within .05",
        _covered,
    ),
    (
        "Mudarisov, Cor. 3",
        "norm of softmax's Jacobian <= 1 / (4 T)",
        READ + "; wrong as a spectral norm, whose supremum is 1 / (2 T)",
        "largest mean norm of a head x T, over T; at most 1/4; a mean above it refutes the bound",
        _ceiling,
    ),
    (
        "Mudarisov, Alg. 5",
        "finite differences follow 1 / T at T < .1, two orders lower at T >= 1",
        READ,
        "one direction, step .001; 50 times counts",
        _temperature,
    ),
    (
        "Su, kexue.fm 9889",
        "S = exp(-gamma^2 / 2) of e^score with Gaussian scores",
        READ,
        "first token left out: S beside the form at the measured gamma; within .05",
        _closed_form(exp=True),
    ),
    (
        "Su, 9889",
        "S of relu^2 of Gaussian scores, and of products of independent non-negative features",
        READ,
        "first token left out: S beside the form at the measured mean and spread; within .05",
        _closed_form(exp=False),
    ),
    (
        "Su, 9889",
        "linear attention mostly expresses absolute position",
        QUOTED,
        "fraction of the weights' variance that key position explains (untrained); above .5 of linear attention "
        "without a decay counts",
        _explained("key position", lambda normalizer: isinstance(normalizer, Linear) and not normalizer.decay),
    ),
    (
        "Su, 9889",
        "a decay can't adapt",
        QUOTED,
        "fraction of the weights' variance that distance explains (untrained); above .5 of linear attention with a "
        "decay counts",
        _explained("distance", lambda normalizer: isinstance(normalizer, Linear) and normalizer.decay),
    ),
    ("Su, 8823", "softmax's entropy grows with ln n", READ, "slope of H on ln n; above .5 counts", _entropy),
    (
        "Su, 9019",
        "the sum that normalizes grows more slowly than n",
        READ,
        "exponent of Z in n (untrained): below 1",
        _number("exponent of Z", lambda x: x < 1),
    ),
)

KEYS = [(source, says) for source, says, *_ in STATEMENTS]


def compared(models: Iterable[Described]) -> list[Statement]:
    """The statements that apply to some of the models, with what came out."""
    models, statements = list(models), []
    for source, says, known, measured, compare in STATEMENTS:
        results = {model.arm: outcome for model in models if (outcome := compare(model))}
        if results:
            values = {
                model.arm: results[model.arm][0] if model.arm in results else "does not apply" for model in models
            }
            holds = {arm: holds for arm, (_, holds) in results.items() if holds is not None}
            statements.append(Statement(source, says, known, measured, values, holds))
    return statements


def values(experiments: Iterable[list[Described]]) -> bytes:
    """The value of each statement by arm, as a CSV file."""
    columns = [
        "experiment",
        "arm",
        "run",
        "step",
        "source",
        "statement",
        "how it is known",
        "compared",
        "value",
        "agrees",
    ]
    rows = [
        (m.experiment, m.arm, m.folder.name, m.step, s.source, s.says, s.known, s.measured, s.values[m.arm], s.outcome)
        for models in experiments
        for s in compared(models)
        for m in models
    ]
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n").encode()
