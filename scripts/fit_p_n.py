"""The fit p_n ~ a1 ln n + a2 of a run with `model.normalizer=p_n` (arXiv 2501.19399, sec. 2.1), with a picture.

python scripts/fit_p_n.py runs/p_n p_n.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import lm


def main() -> None:
    """Fit by least squares over n = 2 ... training length, print, draw.

    p_n is known up to scale and offset only, so that R^2 and a2 / a1 of the table divided by its mean are what can be compared.
    """
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    p = lm.load(run).decoder.normalizers()[0].p.detach().double().numpy()
    p = p / p.mean()
    n = np.arange(1, len(p) + 1)
    design = np.stack([np.log(n), np.ones(len(n))], 1)[1:]
    (a1, a2), *_ = np.linalg.lstsq(design, p[1:], rcond=None)
    residual = p[1:] - design @ (a1, a2)
    r2 = 1 - residual.var() / p[1:].var()
    print(f"p_n / mean ~ {a1:.4f} ln n + {a2:.4f}, a2 / a1 = {a2 / a1:.3f}, R^2 = {r2:.4f} over n = 2 ... {len(p)}")
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(n, p, ".", markersize=3, color="#D55E00", label="learned p_n / mean")
    axes.plot(n, a1 * np.log(n) + a2, color="#0072B2", label=f"{a1:.3f} ln n + {a2:.3f}, $R^2$ = {r2:.3f}")
    axes.set(xlabel="n", xscale="log")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
