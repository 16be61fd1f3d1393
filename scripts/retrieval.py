"""Recall beyond the training length, by normalizer: trains every arm, writes docs/retrieval.md's tables and their picture.

python scripts/retrieval.py [--seeds 1 2 3] [--runs runs/retrieval] [--jobs 2]

Each arm learns associative recall on sequences of 64 symbols (configs/retrieval.yaml) and is then queried on sequences of up to 32 times
that length, with the same number of pairs and more filler. Finished runs are kept; a stopped one goes on.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import lm.config.load
from lm.data.prepare import prepare
from lm.runs.evaluations import Evaluation, evaluation_path
from lm.runs.folder import read_json
from lm.runs.series import Series
from lm.statistics.intervals import interval_of, over_seeds

CONFIG = "configs/retrieval.yaml"
GAU = ["model.block={name: gau, expansion: 2, key_size: 64}", "model.n_layer=4", "model.n_head=1"]
ARMS = {
    "softmax": ["model.normalizer=softmax"],
    "SSMax": ["model.normalizer=ssmax"],
    "log n": ["model.normalizer=log_n"],
    "GAU, relu^2, n = 64": [*GAU, "model.normalizer={name: relu2, n: 'fixed:64'}"],
    "GAU, relu^2, n = sample": [*GAU, "model.normalizer={name: relu2, n: sample}"],
}
FACTORS = (1, 2, 4, 8, 16, 32)  # as in eval.recall of the configuration
INFERENCE = {
    "as trained": "correct answers to earlier questions given",
    "as trained, roll-out": "with the model's own answers to earlier questions",
}


def folder_of(arm: str, seed: int, runs: Path) -> Path:
    """The run's folder."""
    return runs / f"{arm}-{seed}".lower().replace(",", "").replace("^", "").replace(" = ", "-").replace(" ", "-")


def train(arm: str, seed: int, runs: Path) -> str:
    """Train one run in a process of its own; its error text, if any."""
    folder = folder_of(arm, seed, runs)
    options = [f"name={folder.name}", f"runs={runs}", f"seed={seed}", "resume=auto", "trainer.threads=1", "log.progress=none", *ARMS[arm]]
    result = subprocess.run([sys.executable, "-m", "lm", "train", CONFIG, *options], capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def measured(run: Path) -> dict[str, Series]:
    """The run's recall at each of FACTORS in each of INFERENCE, as it was measured when training ended."""
    content = read_json(evaluation_path(run, "recall", lm.config.load.load([CONFIG]).trainer.max_steps))
    return {one.setting: one for one in Evaluation.of(content).series if one.metric == "accuracy"}


def draw(found: dict[str, dict[str, np.ndarray]], chances: dict[str, float], path: Path) -> None:
    """Accuracy by length, a panel for each inference setting: a line for each arm, the mean over seeds, and each seed as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(12, 4), layout="constrained", sharey=True)
    for axes, (key, accuracies) in zip(panels, found.items(), strict=True):
        for number, (arm, values) in enumerate(accuracies.items()):  # (seeds, lengths)
            style = {"marker": "os^Dv"[number % 5], "linestyle": ("-", "--")[number % 2]}  # lines that lie on each other stay apart
            axes.plot(FACTORS, values.mean(0), color=f"C{number}", label=arm if key == "as trained" else None, **style)
            axes.plot(FACTORS, values.T, ".", color=f"C{number}", alpha=0.5)
        axes.axhline(chances[key], color="0.4", linestyle=":")
        axes.annotate(
            f"chance, {chances[key]:.1%}", (0, chances[key]), (4, 3), axes.get_yaxis_transform(), textcoords="offset points", color="0.4"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(FACTORS, [f"{factor}x" for factor in FACTORS])
        axes.set(title=INFERENCE[key], xlabel="length of the sequence, in training lengths of 64", ylim=(0, 1.02))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy")
    figure.legend(frameon=False, loc="outside right center")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, measure, print the tables in Markdown, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/retrieval"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("docs/retrieval.png"))
    arguments = parser.parse_args()
    prepare(lm.config.load.load([CONFIG]).data)
    todo = [(arm, seed) for seed in arguments.seeds for arm in ARMS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (arm, seed), error in zip(todo, pool.map(lambda one: train(*one, arguments.runs), todo), strict=True):
            print(f"{arm}, seed {seed}: {error.strip() or 'done'}", file=sys.stderr, flush=True)
            if error:
                sys.exit(1)
    runs = {arm: [measured(folder_of(arm, seed, arguments.runs)) for seed in arguments.seeds] for arm in ARMS}
    every = [run[key] for arm in runs.values() for run in arm for key in INFERENCE]
    chances = {key: next(iter(run.references.values())) for key, run in runs["softmax"][0].items()}
    found = {key: {arm: np.array([run[key].means for run in runs[arm]]) for arm in ARMS} for key in INFERENCE}
    for key, name in INFERENCE.items():
        print(f"\n{name} (chance: {chances[key]:.1%}):\n\n| weights | {' | '.join(f'{factor}x' for factor in FACTORS)} |")
        print("|---" * (len(FACTORS) + 1) + "|")
        for arm, values in found[key].items():
            intervals = [over_seeds(column) for column in 100 * values.T]
            print(f"| {arm} | " + " | ".join(f"{one.mean:.1f} ± {one.mean - one.low:.1f}" for one in intervals) + " |", flush=True)
    intervals = np.array([interval_of(one, column).listed() for one in every for column in range(len(one.means))])  # (cells, 3)
    widest, questions = np.abs(intervals[:, 1:] - intervals[:, :1]).max(), int(every[0].samples[0].weights.sum())
    print(f"\nWilson intervals of single cells ({questions:,} questions): ± {100 * widest:.1f} at most", file=sys.stderr)
    draw(found, chances, arguments.picture)


if __name__ == "__main__":
    main()
