"""The picture of docs/swapping.md: python scripts/swapping_picture.py runs/swapping docs/swapping.png"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from lm.evaluation.numbers import logged
from lm.runs.evaluations import Evaluation

ARMS = {  # label, colour, line width, dashes: arms may coincide
    "softmax": ("softmax, no swap", "#000000", 4.0, "-"),
    "match": ("match", "#56B4E9", 2.5, "-"),
    "fit": ("fit", "#D55E00", 1.5, "--"),
    "unit": ("unit: s = 1", "#009E73", 1.5, "-"),
}


def curve(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def main() -> None:
    """Validation loss around the swap, and how far each arm is from the softmax that was not swapped."""
    runs, out = Path(sys.argv[1]), Path(sys.argv[2])
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, before = curve(runs / "base", "val/loss")
    last = steps[-1]
    left.plot(steps, before, color="#999999", marker=".", label="softmax before the swap")
    _, softmax = curve(runs / "softmax", "val/loss")
    for name, (label, colour, width, dashes) in ARMS.items():
        style = {"color": colour, "linewidth": width, "linestyle": dashes, "label": label}
        steps, losses = curve(runs / name, "val/loss")
        start = before[-1]
        if name != "softmax":
            kept = json.loads(next((runs / f"swapped-{name}" / "evaluations").glob("swap.*.json")).read_text())
            start = logged(Evaluation.of(kept))["swap/loss_after"]
        steps = [last, *(last + step for step in steps)]
        left.plot(steps, [start, *losses], **style)
        right.plot(steps, [a - b for a, b in zip([start, *losses], [before[-1], *softmax], strict=True)], **style)
    left.set(title="validation loss", ylabel="nats per token", xlim=(last / 2, None), ylim=(None, before[len(before) // 2]))
    right.set(title="minus that of softmax without a swap", ylabel="nats per token")
    for axes in (left, right):
        axes.axvline(last, color="#cccccc", linewidth=1, zorder=0)
        axes.set_xlabel("step (the swap: grey line)")
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.savefig(out, dpi=150, metadata={"Software": None})
    print(out)


if __name__ == "__main__":
    main()
