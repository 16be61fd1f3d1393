"""The n of GAU's relu^2 / n when lengths change (kexue.fm 9019): trains every arm and writes docs/gau.md's table.

python scripts/gau_lengths.py [--seeds 1 2 3] [--runs runs/gau] [--jobs 2]

Each arm is trained on sequences of 256 tokens, and on a mixture of 32, 64, 128 and 256 (the same tokens in every step), then
measured on the same held-out tokens cut into sequences of 32 to 512. Finished runs are kept; a stopped one goes on.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import lm
import lm.config.load
from lm.data.batches import validation_starts, windows
from lm.data.prepare import prepare
from lm.evaluation.held_out import HeldOut, nll_by_token
from lm.model.device import Device
from lm.statistics.intervals import over_seeds

ARMS = {
    "relu^2, n = 256": "{name: relu2, n: 'fixed:256'}",
    "relu^2, n = sample": "{name: relu2, n: sample}",
    "relu^2, n = visible": "{name: relu2, n: visible}",
    "relu^2, by its sum": "{name: relu2, n: sum}",
    "softmax": "softmax",
}
TRAINED = {"256": "full", "mixed": "{name: mixed, weights: {32: 0.25, 64: 0.25, 128: 0.25, 256: 0.25}}"}
LENGTHS, LONGEST, ROWS = (32, 64, 128, 256, 512), 512, 128


def name_of(arm: str, lengths: str, seed: int) -> str:
    """The run's folder."""
    return f"{arm}-{lengths}-{seed}".replace("relu^2, ", "").replace(" = ", "-").replace(" ", "-")


def train(arm: str, lengths: str, seed: int, runs: Path) -> str:
    """Train one run in a process of its own; its error text, if any."""
    options = [
        f"name={name_of(arm, lengths, seed)}",
        f"runs={runs}",
        f"seed={seed}",
        "resume=auto",
        "trainer.threads=1",
        "log.progress=none",
    ]
    options += [f"model.normalizer={ARMS[arm]}", f"data.lengths={TRAINED[lengths]}"]
    result = subprocess.run([sys.executable, "-m", "lm", "train", "configs/gau.yaml", *options], capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def measure(run: Path) -> list[float]:
    """Loss (nats per token) on sequences of each of LENGTHS, cut from the same held-out tokens."""
    loaded = lm.load(run)
    store = prepare(loaded.config.data, progress=False)
    starts = validation_starts(store.val, LONGEST, ROWS)
    where, losses = Device(torch.device("cpu"), bf16=False), []
    for length in LENGTHS:
        cut = (starts[:, None] + length * np.arange(LONGEST // length)).ravel()
        held_out = HeldOut(windows(store.val, cut, length), store.token_bytes)
        losses.append(float(nll_by_token(loaded.decoder, held_out, where).mean(dtype=np.float64)))
    return losses


def main() -> None:
    """Train, measure, print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/gau"))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    prepare(lm.config.load.load(["configs/gau.yaml"]).data, progress=True)
    todo = [(arm, lengths, seed) for seed in arguments.seeds for lengths in TRAINED for arm in ARMS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (arm, lengths, seed), error in zip(todo, pool.map(lambda one: train(*one, arguments.runs), todo), strict=True):
            print(f"{arm}, trained on {lengths}, seed {seed}: {error.strip() or 'done'}", file=sys.stderr, flush=True)
            if error:
                sys.exit(1)
    print("| trained on | weights | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " |")
    print("|---" * (len(LENGTHS) + 2) + "|")
    for lengths in TRAINED:
        for arm in ARMS:
            losses = np.array([measure(arguments.runs / name_of(arm, lengths, seed)) for seed in arguments.seeds])
            cells = [over_seeds(column) for column in losses.T]
            print(f"| {lengths} | {arm} | " + " | ".join(f"{c.mean:.3f} ± {c.mean - c.low:.3f}" for c in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
