"""The control of recall: the accuracy of every run, verdicts at two lengths as one family, and a picture with a panel for each arm.

python scripts/recall_control.py [--runs]

All from results/recall-control/seeds.csv; with --runs that file is made first, from the run folders.
"""

import argparse
import csv
import itertools
import math
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from pages import STYLE, svg

from lm.statistics.verdicts import Comparison, Verdict, verdicts

ROOT = Path(__file__).resolve().parent.parent
FILE, SEEDS, PICTURE = (
    ROOT / name for name in ("configs/experiments/recall-control.yaml", "results/recall-control/seeds.csv", "docs/recall-control.svg")
)
BASELINE, DECIDING, MATTERS = "ssmax_fixed", (2048, 8192), 0.1
LABELS = {
    "softmax": "softmax",
    "tau_half": "softmax, temperature 1/2",
    "tau_quarter": "softmax, temperature 1/4",
    "ssmax_fixed": "SSMax, n fixed at 64",
    "ssmax": "SSMax",
    "log_n": "log n",
}
Accuracies = dict[tuple[str, str, int], dict[int, float]]  # by arm, rate and length, of each seed


def collect() -> None:
    """Write the accuracy of every run and length. Raises LMError: a run is not there."""
    from lm.experiments.opening import open_experiment

    procedure = open_experiment(FILE, [])
    SEEDS.parent.mkdir(parents=True, exist_ok=True)
    with SEEDS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "rate", "seed", "metric", "setting", "x", "value", "sequences"])
        for run in procedure.known():
            for metric in sorted(
                (name for name in run.outcome.names if name.startswith("recall/mqar ")), key=lambda name: int(name.split()[-1])
            ):
                values = run.outcome.values(metric)
                accuracy = f"{values.mean:.6g}"
                writer.writerow(
                    [
                        run.arm,
                        run.size.removeprefix("lr-"),
                        run.seed,
                        *metric.split()[:1],
                        "teacher-forced",
                        metric.split()[-1],
                        accuracy,
                        len(values.values),
                    ]
                )


def read() -> Accuracies:
    """The accuracies of the committed file."""
    found: Accuracies = {}
    with SEEDS.open() as file:
        for line in csv.DictReader(file):
            found.setdefault((line["arm"], line["rate"], int(line["x"])), {})[int(line["seed"])] = float(line["value"])
    return found


def judged(accuracies: Accuracies) -> dict[tuple[str, str, int], Verdict]:
    """The verdict on each arm against the baseline, at both rates and both lengths, as one family."""
    comparisons = {}
    for (arm, rate, length), values in accuracies.items():
        if arm != BASELINE and length in DECIDING:
            base = accuracies[BASELINE, rate, length]
            comparisons[arm, rate, length] = Comparison([values[seed] - base[seed] for seed in sorted(values)])
    return verdicts(comparisons, MATTERS, "higher")


def table(accuracies: Accuracies) -> None:
    """Print the table of docs/retrieval.md."""
    found = judged(accuracies)
    rates, lengths = (sorted({key[at] for key in accuracies}) for at in (1, 2))
    print(
        "| learning rate | layer 2 | "
        + " | ".join(f"{length:,}" for length in lengths)
        + " | "
        + " | ".join(f"minus SSMax, n fixed, at {length:,}" for length in DECIDING)
        + " |"
    )
    print("|---|---|" + "---|" * (len(lengths) + len(DECIDING)))
    for rate, arm in itertools.product(rates, LABELS):
        cells = []
        for length in lengths:
            values = 100 * np.array(list(accuracies[arm, rate, length].values()))
            cells.append(f"{values.mean():.1f}" + (f" [{values.min():.0f}, {values.max():.0f}]" if np.ptp(values) > 2 else ""))
        for length in DECIDING:
            verdict = found.get((arm, rate, length))
            if verdict is None:
                cells.append("")
                continue
            mean, low, high = (100 * value for value in verdict.interval.listed())
            cells.append(
                f"{mean:+.1f} " + (f"[{low:+.1f}, {high:+.1f}] " if math.isfinite(low) and low < high else "") + f"*{verdict.kind}*"
            )
        print(f"| {rate} | {LABELS[arm]} | " + " | ".join(cells) + " |")


def picture(accuracies: Accuracies) -> None:
    """Draw accuracy by length: a row for each rate, a panel for each arm, so that no arm lies on another."""
    plt.rcParams.update(STYLE | {"font.size": 9})
    rates, lengths = (sorted({key[at] for key in accuracies}) for at in (1, 2))
    figure, panels = plt.subplots(len(rates), len(LABELS), figsize=(13, 4.6), sharex=True, sharey=True, layout="constrained")
    guessing = 100 * sum(1 / k for k in range(1, 9)) / 8
    for row, rate in zip(panels, rates, strict=True):
        for axes, (number, arm) in zip(row, enumerate(LABELS), strict=True):
            values = 100 * np.array([list(accuracies[arm, rate, length].values()) for length in lengths])
            axes.axhline(guessing, color="0.6", linewidth=1, linestyle=":")
            axes.plot(lengths, values, color=f"C{number}", linewidth=0.8, alpha=0.6)
            axes.plot(lengths, values.mean(1), color=f"C{number}", linewidth=2.4)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=60)
            axes.minorticks_off()
            axes.set_ylim(-3, 103)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(f"learning rate {rate}\naccuracy, %")
        row[0].annotate("guess among\nvalues shown", (lengths[0], guessing + 2), fontsize=7, color="0.4")
    for axes, label in zip(panels[0], LABELS.values(), strict=True):
        axes.set_title(label, fontsize=9)
    figure.supxlabel("sequence length (trained on 64)", fontsize=9)
    PICTURE.write_bytes(svg(figure))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", action="store_true")
    if parser.parse_args().runs:
        collect()
    table(read())
    picture(read())
