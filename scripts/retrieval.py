"""Recall beyond the training length, by normalizer: trains every arm, writes docs/retrieval.md's tables and their picture.

python scripts/retrieval.py [--seeds 1 2 3] [--runs runs/retrieval] [--jobs 2]

Each arm learns associative recall on rows of 64 symbols (configs/retrieval.yaml) and is then asked on rows of up to 32 times
that length, with the same number of pairs and more filler. Finished runs are kept; a stopped one goes on.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import lm.configure
from lm.data.prepare import prepare
from lm.evaluation.results import evaluation_path
from lm.evaluation.statistics import over_seeds
from lm.runs import read_json

CONFIG = "configs/retrieval.yaml"
ATTENTION = {"softmax": ["model.normalizer=softmax"], "SSMax": ["model.normalizer=ssmax"], "log n": ["model.normalizer=log_n"]}
GAU = ["model.block={name: gau, expansion: 2, key_size: 64}", "model.n_layer=4", "model.n_head=1"]
GATED = {
    "GAU, relu^2, n = 64": [*GAU, "model.normalizer={name: relu2, n: 'fixed:64'}"],
    "GAU, relu^2, n = sample": [*GAU, "model.normalizer={name: relu2, n: sample}"],
}
# What a pair is: the changes to the configuration, and the arms that learn it.
PAIRS = {
    "one symbol": ([], ATTENTION | GATED),
    "two symbols": (
        ["data.tasks=[{task: {name: mqar, keys: 16, values: 64, filler: 16}}]", "model.position={name: rope, fraction: 0.5}"],
        ATTENTION,
    ),
}
FACTORS = (1, 2, 4, 8, 16, 32)  # as in eval.recall of the configuration


def folder_of(pairs: str, arm: str, seed: int, runs: Path) -> Path:
    """The run's folder."""
    return runs / f"{pairs.split()[0]}-{arm}-{seed}".lower().replace(",", "").replace("^", "").replace(" = ", "-").replace(" ", "-")


def train(pairs: str, arm: str, seed: int, runs: Path) -> str:
    """Train one run in a process of its own, which measures its recall at the end; its error text, if any."""
    folder, (changes, arms) = folder_of(pairs, arm, seed, runs), PAIRS[pairs]
    options = [f"name={folder.name}", f"runs={runs}", f"seed={seed}", "resume=auto", "trainer.threads=1", "log.progress=none"]
    command = [sys.executable, "-m", "lm", "train", CONFIG, *options, *changes, *arms[arm]]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def measured(run: Path) -> list[dict[str, object]]:
    """The run's recall at each of FACTORS."""
    return read_json(evaluation_path(run, "recall", lm.configure.load([CONFIG]).trainer.max_steps))["cells"]


def shares_of(pairs: str, seeds: list[int], runs: Path) -> dict[str, np.ndarray]:
    """Share of right answers of each arm: (seeds, lengths)."""
    return {
        arm: np.array([[cell["answer"][0] for cell in measured(folder_of(pairs, arm, seed, runs))] for seed in seeds])
        for arm in PAIRS[pairs][1]
    }


def table(shares: dict[str, np.ndarray]) -> str:
    """In Markdown: per cent, mean over seeds and half its 95 % interval."""
    lines = ["| weights | " + " | ".join(f"{factor}x" for factor in FACTORS) + " |", "|---" * (len(FACTORS) + 1) + "|"]
    for arm, values in shares.items():
        intervals = [over_seeds(column) for column in 100 * values.T]
        lines.append(f"| {arm} | " + " | ".join(f"{one.mean:.1f} ± {one.mean - one.low:.1f}" for one in intervals) + " |")
    return "\n".join(lines)


def draw(found: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Accuracy by length, a line an arm: the mean over seeds, and each seed as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(11, 4), sharey=True, layout="constrained")
    for axes, (pairs, shares) in zip(panels, found.items(), strict=True):
        for number, (arm, values) in enumerate(shares.items()):
            style = {"marker": "os^Dv"[number % 5], "linestyle": ("-", "--")[number % 2]}  # lines that lie on each other stay apart
            axes.plot(FACTORS, values.mean(0), color=f"C{number}", label=arm, **style)
            axes.plot(FACTORS, values.T, ".", color=f"C{number}", alpha=0.5)
        axes.axhline(1 / 8, color="0.6", linestyle=":", label="any of the 8 values")
        axes.set_xscale("log", base=2)
        axes.set_xticks(FACTORS, [f"{factor}x" for factor in FACTORS])
        axes.set(xlabel="length of the row, in training lengths of 64", ylim=(0, 1.02), title=f"a pair is {pairs}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("answers right")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right center")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, measure, print the tables in Markdown, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/retrieval"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("docs/retrieval.png"))
    arguments = parser.parse_args()
    for changes, _ in PAIRS.values():
        prepare(lm.configure.load([CONFIG, *changes]).data)
    todo = [(pairs, arm, seed) for seed in arguments.seeds for pairs, (_, arms) in PAIRS.items() for arm in arms]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (pairs, arm, seed), error in zip(todo, pool.map(lambda one: train(*one, arguments.runs), todo), strict=True):
            print(f"{pairs}, {arm}, seed {seed}: {error.strip() or 'done'}", file=sys.stderr, flush=True)
            if error:
                sys.exit(1)
    found = {pairs: shares_of(pairs, arguments.seeds, arguments.runs) for pairs in PAIRS}
    for pairs, shares in found.items():
        print(f"\nA pair is {pairs}:\n\n{table(shares)}")
    draw(found, arguments.picture)


if __name__ == "__main__":
    main()
