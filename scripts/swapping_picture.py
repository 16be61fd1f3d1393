"""The picture of docs/swapping.md: python scripts/swapping_picture.py runs/swapping docs/swapping.png"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

ARMS = {
    "softmax": ("softmax, no swap", "#000000"),
    "match": ("match", "#0072B2"),
    "fit": ("fit", "#009E73"),
    "unit": ("unit: s = 1", "#D55E00"),
}


def curve(run: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def main() -> None:
    """Training loss around the swap, and validation loss."""
    runs, out = Path(sys.argv[1]), Path(sys.argv[2])
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, losses = curve(runs / "base", "train/loss")
    last = steps[-1]
    left.plot(steps, losses, color="#999999", linewidth=1, label="softmax before the swap")
    right.plot(*curve(runs / "base", "val/loss"), color="#999999", marker=".", label="softmax before the swap")
    for name, (label, colour) in ARMS.items():
        steps, losses = curve(runs / name, "train/loss")
        left.plot([last + step for step in steps], losses, color=colour, linewidth=1, label=label)
        steps, losses = curve(runs / name, "val/loss")
        if name != "softmax":
            swap = json.loads(next((runs / f"swapped-{name}" / "evaluations").glob("swap.*.json")).read_text())
            steps, losses = [0, *steps], [swap["lengths"][0]["loss_after"], *losses]
        right.plot([last + step for step in steps], losses, color=colour, marker=".", label=label)
    for axes, title in ((left, "training loss"), (right, "validation loss")):
        axes.axvline(last, color="#cccccc", linewidth=1, zorder=0)
        axes.set(xlabel="step", ylabel="nats per token", title=title)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_xlim(last - 30)
    left.set_ylim(*padded([line.get_ydata()[max(0, len(line.get_ydata()) - 130) :] for line in left.lines if len(line.get_ydata()) > 2]))
    right.set_xlim(last - 60)
    right.set_ylim(*padded([line.get_ydata()[-14:] for line in right.lines if len(line.get_ydata()) > 2]))
    right.legend(frameon=False)
    figure.savefig(out, dpi=150, metadata={"Software": None})
    print(out)


def padded(curves: list) -> tuple[float, float]:
    """Limits that hold the curves."""
    low, high = min(map(min, curves)), max(map(max, curves))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


if __name__ == "__main__":
    main()
