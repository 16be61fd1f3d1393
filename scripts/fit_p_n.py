"""The experiment that SSMax was derived from (arXiv 2501.19399, sec. 2.1, Fig. 2): what a learned factor p_n on the
logits is of n.

python scripts/fit_p_n.py runs/p_n [FOLDER]     # a run with model.normalizer=p_n; writes p_n.csv, p_n.json and p_n.png
                                                (docs/ssmax.md)
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pages import canvas, finish, saved
from scipy.optimize import minimize_scalar

import lm
from lm.errors import ConfigError, LMError
from lm.files import write_together

FIRST = 2  # the weight of a single key is 1 whatever p_1, which is never trained
MAX_POWER = 4.0


@dataclass(frozen=True, eq=False)
class Fit:
    """A least-squares fit of p_n over n = 2 ... training length, each n alike.

    Attributes:
        formula: in which `parameters` are named.
        values: of the fit, at each of those n.
        r2: fraction of the variance of p_n that it explains; NaN if p_n has none.
        rms: root mean square of the residuals, as a fraction of the standard deviation of p_n.
    """

    formula: str
    parameters: dict[str, float]
    values: np.ndarray
    r2: float
    rms: float


def fits(p: np.ndarray) -> dict[str, Fit]:
    """A constant, a line in ln n, and a power of n, of p_n (training length,) from n = 1 on.

    The power is written (n^k - 1) / k, which is ln n at k = 0 and a line in n at k = 1: k says which of them p_n is
    nearest to. All three stay as good if p_n is multiplied, or something is added to it.
    """
    n, p = np.arange(FIRST, len(p) + 1, dtype=float), p[FIRST - 1 :].astype(float)

    def power(k: float) -> np.ndarray:
        return np.log(n) if abs(k) < 1e-9 else np.expm1(k * np.log(n)) / k

    def error(k: float) -> float:
        return float(np.square(p - _line(power(k), p)[2]).sum())

    k = float(minimize_scalar(error, bounds=(-MAX_POWER, MAX_POWER), method="bounded", options={"xatol": 1e-7}).x)
    log, of_power = _line(np.log(n), p), _line(power(k), p)
    return {
        "constant": _fit("b", {"b": p.mean()}, np.full_like(p, p.mean()), p),
        "logarithm": _fit("a ln n + b", {"a": log[0], "b": log[1]}, log[2], p),
        "power": _fit("a (n^k - 1) / k + b", {"a": of_power[0], "b": of_power[1], "k": k}, of_power[2], p),
    }


def _line(x: np.ndarray, p: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Slope, intercept and values of the least-squares line of p on x."""
    centred = x - x.mean()
    slope = float(centred @ p / (centred @ centred))
    return slope, float(p.mean() - slope * x.mean()), p.mean() + slope * centred


def _fit(formula: str, parameters: dict[str, float], values: np.ndarray, p: np.ndarray) -> Fit:
    error, variance = np.square(p - values).mean(), p.var()
    explained = 1 - error / variance if variance > 1e-20 * np.square(p).mean() else np.nan
    return Fit(
        formula,
        {name: float(value) for name, value in parameters.items()},
        values,
        float(explained),
        float(np.sqrt(1 - explained)),
    )


def by_head(s: np.ndarray, b: np.ndarray, line: Fit) -> list[dict[str, float]]:
    """The factor s p_n + b of each layer and head as SSMax with a bias would have it, slope x ln n + intercept; s, b:
    (layers, heads).

    These are determined, which a and b of p_n alone are not: a factor of p_n can stand in s, and a term in b.
    """
    a, offset = line.parameters["a"], line.parameters["b"]
    return [
        {"layer": layer, "head": head, "s": float(s[place]), "b": float(b[place]), "slope": float(s[place] * a),
         "intercept": float(s[place] * offset + b[place])}
        for place in np.ndindex(s.shape)
        for layer, head in [place]
    ]  # fmt: skip


def table(p: np.ndarray, fits_by_name: dict[str, Fit]) -> str:
    """CSV: n, p_n and the value of each fit, which has none at n = 1."""
    values = {name: np.pad(fit.values, (FIRST - 1, 0), constant_values=np.nan) for name, fit in fits_by_name.items()}
    frame = pd.DataFrame({"n": np.arange(1, len(p) + 1), "p_n": p} | values)
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.8g")


def draw(p: np.ndarray, fits_by_name: dict[str, Fit], heads: list[dict[str, float]]) -> bytes:
    """A PNG file: p_n with its fits, what they leave, and the factor of each head with its line in ln n."""
    n = np.arange(FIRST, len(p) + 1)
    styles = {"constant": ("#555555", ":"), "logarithm": ("#0072B2", "-"), "power": ("#009E73", "--")}
    with canvas(1, 3, (13, 3.8)) as (figure, (left_axes, middle, right)):
        left_axes.plot(n, p[FIRST - 1 :], ".", markersize=3, color="#D55E00", label="learned p_n / its mean")
        for name, fit in fits_by_name.items():
            colour, dashes = styles[name]
            text = f"{fit.formula}: R$^2$ = {fit.r2:.4f}" + (
                f", k = {fit.parameters['k']:.2f}" if name == "power" else ""
            )
            left_axes.plot(n, fit.values, color=colour, linestyle=dashes, label=text)
            if name != "constant":
                middle.plot(n, p[FIRST - 1 :] - fit.values, ".", markersize=3, color=colour, label=fit.formula)
        middle.axhline(0, color="#555555", linewidth=0.8)
        for head in heads:
            colour = f"C{head['layer'] % 10}"
            right.plot(n, head["s"] * p[FIRST - 1 :] + head["b"], ".", markersize=1.5, alpha=0.5, color=colour)
            label = f"layer {head['layer']}" if head["head"] == 0 else None
            right.plot(n, head["slope"] * np.log(n) + head["intercept"], color=colour, linewidth=0.9, label=label)
        titles = "p_n and its fits", "p_n minus the fit", "factor s p_n + b on the logits, by head"
        for axes, title in zip((left_axes, middle, right), titles, strict=True):
            axes.set_title(title, loc="left")
            finish(axes, 8, xlabel="n, keys that a query sees", xscale="log")
        return saved(figure, "png")


def main(arguments: list[str]) -> None:
    """Fit, print, write. Raises LMError: no run with a table p_n, or the files can't be written."""
    if len(arguments) not in (1, 2):
        raise ConfigError("give a run, and a folder to write to: python scripts/fit_p_n.py runs/p_n [FOLDER]")
    run, out = Path(arguments[0]), Path(arguments[-1])
    normalizers = lm.load(run).decoder.normalizers()
    if any(normalizer.options.name != "p_n" for normalizer in normalizers):
        raise ConfigError(f"{run}: model.normalizer is not p_n in every layer; train configs/p_n.yaml")
    p = normalizers[0].p.detach().double().numpy()
    s, b = (
        np.array([getattr(normalizer, name).detach().double().tolist() for normalizer in normalizers])
        for name in ("s", "b")
    )
    mean = p.mean()  # what divides p multiplies s
    fits_by_name = fits(p / mean)
    heads = by_head(s * mean, b, fits_by_name["logarithm"])
    summary = {
        "run": str(run),
        "train_length": len(p),
        "fits": {
            name: {key: value for key, value in asdict(fit).items() if key != "values"}
            for name, fit in fits_by_name.items()
        },
        "heads": heads,
    }
    contents = {
        out / "p_n.csv": table(p / mean, fits_by_name).encode(),
        out / "p_n.json": (json.dumps(summary, indent=1).replace("NaN", "null") + "\n").encode(),
        out / "p_n.png": draw(p / mean, fits_by_name, heads),
    }
    write_together(contents, "the fit")
    for fit in fits_by_name.values():
        values = ", ".join(f"{name} = {value:.4f}" for name, value in fit.parameters.items())
        print(
            f"p_n / mean = {fit.formula}: {values}; R^2 = {fit.r2:.4f}, residuals {fit.rms:.3f} standard deviations of "
            "p_n"
        )
    slopes = np.array([head["slope"] for head in heads])
    print(
        f"factor on the logits, {len(heads)} heads: slope in ln n {slopes.mean():.4f} on average, {slopes.min():.4f} "
        f"to {slopes.max():.4f}"
    )
    print(*contents, sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LMError as error:
        sys.exit(str(error))
