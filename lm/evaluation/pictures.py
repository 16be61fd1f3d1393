"""Pictures of evaluations, beside their files in evaluations/."""

from pathlib import Path

import numpy as np

from lm.config.task_config import task_names
from lm.schema import Plain


def draw(result: dict[str, Plain], path: Path) -> bool:
    """Draw a result to a PNG file, if there is a picture of its kind; True if there is."""
    drawing = {"needle": _needle, "recall": _recall}.get(result["kind"])
    if drawing is None or not result["cells"]:
        return False
    import matplotlib

    matplotlib.use("Agg")
    figure = drawing(result)
    figure.savefig(path, dpi=110)
    matplotlib.pyplot.close(figure)
    return True


def _needle(result: dict[str, Plain]) -> object:
    """Share of exact answers by context length and depth, one map a way to use the model; then its heads, highest first."""
    import matplotlib.pyplot as plt

    labels = list(dict.fromkeys(cell["label"] for cell in result["cells"]))
    lengths = list(dict.fromkeys(cell["length"] for cell in result["cells"]))
    depths = [*dict.fromkeys(cell["depth"] for cell in result["cells"] if not cell["absent"]), None]
    heads = {one["label"]: one for one in result["heads"]}
    steps, trials = result["finetune"]["steps"], result["trials"]
    taught = f", after {steps} steps of fine-tuning" if steps else ", without fine-tuning"
    width = 2.2 + 0.75 * len(lengths)
    size = ((width + (4.2 if heads else 0)), (1.2 + 0.45 * len(depths)) * len(labels) + 0.4)
    figure, grid = plt.subplots(
        len(labels), 2 if heads else 1, figsize=size, squeeze=False, layout="constrained",
        width_ratios=[width, 4.2] if heads else [1],
    )  # fmt: skip
    for row, label in enumerate(labels):
        shares = {(cell["depth"], cell["length"]): cell["exact"][0] for cell in result["cells"] if cell["label"] == label}
        values = np.array([[shares.get((depth, length), np.nan) for length in lengths] for depth in depths])
        axes = grid[row][0]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (y, x), value in np.ndenumerate(values):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black", fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), ["no needle" if depth is None else f"{depth:.0%}" for depth in depths])
        axes.axhline(len(depths) - 1.5, color="white", linewidth=2)
        axes.set(xlabel="context, tokens", ylabel="depth", title=f"numbers written exactly, RoPE {label}{taught}\n{trials} trials a cell")
        figure.colorbar(image, ax=axes)
        if label in heads:
            _heads(grid[row][1], heads[label])
    return figure


def _heads(axes: object, one: dict[str, Plain]) -> None:
    names = [f"{layer}.{head}" for layer, head, _ in one["top"]]
    axes.bar(range(len(names)), [value for *_, value in one["top"]], color="0.4")
    axes.axhline(one["chance"]["number"], color="C3", linewidth=1, label="uniform attention")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set(xlabel="layer.head", ylabel="attention on the number", title=f"heads, {one['length']:,} tokens, depth {one['depth']:.0%}")
    axes.legend(frameon=False, fontsize=8)


def _recall(result: dict[str, Plain]) -> object:
    """Answers right by length, a line a task and way, with Wilson intervals; dashed in a roll-out; dotted what chance gives of each."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    lines: dict[str, list[dict[str, Plain]]] = {}
    for task, cell in zip(task_names([cell["task"] for cell in result["cells"]]), result["cells"], strict=True):
        lines.setdefault(f"{task}, {cell['label']}", []).append(cell)
    for name, cells in lines.items():
        x, shares = [cell["length"] for cell in cells], np.array([cell["answer"] for cell in cells])
        line = axes.errorbar(x, shares[:, 0], yerr=np.abs(shares[:, 1:].T - shares[:, 0]), marker="o", capsize=3, label=name)[0]
        axes.plot(x, [cell["rollout"][0] for cell in cells], color=line.get_color(), linestyle="--", marker=".", label=f"{name}, roll-out")
    lengths = sorted({cell["length"] for cell in result["cells"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(
        xlabel="length of the row, tokens",
        ylabel="answers right [95% over questions, 1 seed]",
        ylim=(-0.02, 1.02),
        title="recall by length",
    )
    axes.axvline(result["seq_len"], color="0.6", linewidth=1, label="training length")
    for key, name, dots in (("chance", "chance", ":"), ("rollout_chance", "chance in a roll-out", "-.")):
        for chance in {cell[key] for cell in result["cells"]} - {None}:
            axes.axhline(chance, color="0.6", linestyle=dots, label=f"{name}, {chance:.1%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
