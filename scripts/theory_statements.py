"""The statements of the papers, and how each is compared with the diagnostics of models on text."""

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
        return next((one for one in self.series if (one.metric, one.setting, one.what) == (metric, TRAINED, what) and one.axis), None)

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
            (float(one.means[0]) for one in self.series if (one.metric, one.setting) == (metric, setting) and not one.axis), math.nan
        )

    def values(self, metric: str, what: str = "") -> np.ndarray:
        """The means of a curve; empty if it is not defined."""
        found = self.curve(metric, what)
        return np.empty(0) if found is None else found.means

    def last(self, metric: str, what: str = "") -> float:
        """The last defined mean of a curve; NaN if there is none."""
        values = self.values(metric, what)
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else math.nan

    def slope(self, metric: str, what: str = "") -> float:
        """Exponent of a curve: the least-squares slope on logarithms of both axes; NaN of fewer than two points."""
        found = self.curve(metric, what)
        if found is None or np.isfinite(found.means).sum() < 2:
            return math.nan
        known = np.isfinite(found.means)
        return float(np.polyfit(np.log(np.array(found.axis.values)[known]), np.log(found.means[known]), 1)[0])


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


Result = tuple[str, bool | None]  # what is shown of a model, and whether the statement holds; None: it is not about this model
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
    found = model.values("d~ of the largest weights / its bound")
    return (f"up to {np.nanmax(found):.2f}", bool(np.nanmax(found) <= 1)) if len(found) else None


def _ratio(what: str, holds: Callable[[np.ndarray], bool]) -> Compared:
    """Of an expectation of d~ over that of drawn sets, at all N: least to largest."""

    def of(model: Described) -> Result | None:
        values, drawn = model.values("d~", what), model.values("d~", "random keys, drawn")
        ratios = values / drawn if len(values) else values
        ratios = ratios[np.isfinite(ratios)]
        return (f"{ratios.min():.2f} to {ratios.max():.2f}", holds(ratios)) if len(ratios) else None

    return of


def _lemma_1(model: Described) -> Result | None:
    bound = model.number("Lemma 1: ln C2 = -ln C1")
    if math.isnan(bound):
        return None
    largest, smallest = (model.number(f"Lemma 1: ln (n x {which} weight)") for which in ("largest", "smallest"))
    return f"{smallest:.1f} to {largest:.1f}, bounds -+{bound:.1f}", -bound <= smallest <= largest <= bound


def _linear(model: Described) -> Result | None:
    found = model.slope(OF_5, "largest weights")
    return None if math.isnan(found) else (f"exponent {found:.3f}", 0.8 <= found <= 1.2)


def _critical(model: Described) -> Result | None:
    names = ("random keys, uncorrected", "random keys, corrected", "random keys, drawn")
    found = {name: [model.last("critical N / visible keys", f"{name}, level {level}") for level in ("0.01", "0.05")] for name in names}
    said = {name: "/".join("none" if math.isnan(one) else f"{one:.1%}" for one in both) for name, both in found.items()}
    text = "; ".join(f"{name.removeprefix('random keys, ')} {both}" for name, both in said.items())
    return text, any(0.02 <= one <= 0.15 for one in found["random keys, drawn"])


def _separable(model: Described) -> Result | None:
    found = model.number("N_s / N of 16 keys")
    return None if math.isnan(found) else (f"{found:.2f}", 0.70 <= found <= 0.85)


def _covered(model: Described) -> Result | None:
    measured, said = (model.values("keys that at least one head separates", what) for what in ("measured", "1 - (1 - p)^H"))
    if not len(measured) or (model.values("heads that choose a key") == 1).all():  # one head: the formula is what is measured
        return None
    apart = float(np.nanmax(np.abs(measured - said)))
    return f"{np.nanmin(measured):.2f} to {np.nanmax(measured):.2f}, formula {np.nanmin(said):.2f} to {np.nanmax(said):.2f}", apart < 0.05


def _temperature(model: Described) -> Result | None:
    found = model.curve("change of weights", "one direction, step 0.001")
    if found is None or not model.is_exp:
        return None
    at = dict(zip(found.axis.values, found.means, strict=True))
    low, high = at.get(0.01, math.nan), at.get(1.0, math.nan)
    return f"{low:.3g} at T = .01, {high:.3g} at T = 1", low / high >= 50


def _ceiling(model: Described) -> Result | None:
    found = model.curve("change of weights", "spectral norm")
    if found is None or not model.is_exp:
        return None
    product = found.means * np.array(found.axis.values)
    return f"norm x T up to {np.nanmax(product):.3f}", bool(np.nanmax(product) <= 0.25)


def _closed_form(exp: bool) -> Compared:
    """S beside its closed form, of models whose weights are e^score (`exp`) or aren't."""

    def of(model: Described) -> Result | None:
        apart = model.number("S minus closed form" + NO_FIRST)
        if math.isnan(apart) or model.is_exp != exp:
            return None
        s, beyond = model.number("S" + NO_FIRST), model.number("queries beyond condensation")
        condensed = f"; {beyond:.0%} of queries beyond condensation" if exp else ""
        return f"S {s:.3f}, closed form {s - apart:.3f}{condensed}", abs(apart) < 0.05

    return of


def _explained(place: str, about: Callable[[Options], bool]) -> Compared:
    """The fraction of the weights' variance that `key position` or `distance` alone explains, beside what any function of both does; the
    statement is about the normalizers that `about` says."""

    def of(model: Described) -> Result | None:
        alone, before = (model.number(f"variance explained by {place}", setting) for setting in (TRAINED, UNTRAINED))
        both = model.number("variance explained by both, last query")
        if math.isnan(alone):
            return None
        return f"{alone:.2f} ({before:.2f}), by both {both:.2f}", alone > 0.5 if about(model.normalizer) else None

    return of


def _entropy(model: Described) -> Result | None:
    found = model.curve("entropy")
    if found is None:
        return None
    known = np.isfinite(found.means)
    slope = float(np.polyfit(np.log(np.array(found.axis.values)[known]), found.means[known], 1)[0])
    return f"{slope:.2f} nats for each ln n", slope > 0.5 if model.is_exp and not model.knows_n else None


STATEMENTS: tuple[tuple[str, str, str, str, Compared | None], ...] = (
    (
        "SSMax (2501.19399)",
        "the largest weight of softmax goes to 0 as n grows",
        READ,
        "exponent of the largest weight in n, first token left out (untrained); below -.1 counts",
        _largest(scaled=False),
    ),
    (
        "SSMax (2501.19399)",
        "that of SSMax need not",
        READ,
        "exponent of the largest weight in n, first token left out (untrained); above -.1 counts",
        _largest(scaled=True),
    ),
    (
        "SSMax (2501.19399), section 2.1",
        "a learned scale p_n comes out as a1 ln n + a2",
        READ,
        "scripts/fit_p_n.py on runs with a learned table",
        None,
    ),
    (
        "SSMax (2501.19399), Fig. 4",
        "training loss below softmax's at every step, by about .008 nats at 162 M parameters",
        READ,
        "[results.md](results.md#asked-not-answered)",
        None,
    ),
    (
        "SSMax (2501.19399), Fig. 6",
        "retrieval far beyond the training length, where softmax fails",
        READ,
        "[retrieval.md](retrieval.md)",
        None,
    ),
    (
        "Mudarisov (2508.17821), Lemma 1",
        "C1 / n <= weight <= C2 / n if F does not depend on n",
        READ,
        "ln (n x smallest and largest weight), means; within the bounds",
        _lemma_1,
    ),
    ("Mudarisov, Theorem 1, set of the largest weights", "a bound on d~", UNCONFIRMED, "d~ over the bound, by N: below 1", _bounded),
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
    ("Mudarisov, Alg. 1", "d~ grows linearly with length at N = 5", READ, "exponent of d~ in n, .8 to 1.2 counts", _linear),
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
        "fraction of the weights' variance that key position explains (untrained); above .5 of linear attention without a decay counts",
        _explained("key position", lambda one: isinstance(one, Linear) and not one.decay),
    ),
    (
        "Su, 9889",
        "a decay can't adapt",
        QUOTED,
        "fraction of the weights' variance that distance explains (untrained); above .5 of linear attention with a decay counts",
        _explained("distance", lambda one: isinstance(one, Linear) and one.decay),
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
    models, found = list(models), []
    for source, says, known, measured, of in STATEMENTS:
        results = {one.arm: got for one in models if of and (got := of(one))}
        if results:
            values = {one.arm: results[one.arm][0] if one.arm in results else "does not apply" for one in models}
            holds = {arm: holds for arm, (_, holds) in results.items() if holds is not None}
            found.append(Statement(source, says, known, measured, values, holds))
    return found


def values(experiments: Iterable[list[Described]]) -> bytes:
    """The value of each statement by arm, as a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "arm", "run", "step", "source", "statement", "how it is known", "compared", "value", "agrees"])
    for models in experiments:
        for one in compared(models):
            said = [one.source, one.says, one.known, one.measured]
            writer.writerows([m.experiment, m.arm, m.folder.name, m.step, *said, one.values[m.arm], one.outcome] for m in models)
    return text.getvalue().encode()


def not_measured(tables: Iterable[list[Statement]]) -> list[Statement]:
    """The statements that are in none of the tables."""
    shown = {(one.source, one.says) for table in tables for one in table}
    return [Statement(source, says, known, measured) for source, says, known, measured, _ in STATEMENTS if (source, says) not in shown]
