"""Measure what a training step of each arm of an experiment costs, in time and memory.

python scripts/bench_arms.py FILE [--rounds 15] [--threads 1]

Steps are those of a run, with its model, micro-batches, clipping and optimizer, in fp32, over random tokens. The arms'
steps are interleaved. The baseline is timed twice; the second time shows the noise. results/NAME/costs.csv gets the
seconds of every step, and the bytes of all tensors at its peak.
"""

import argparse
import random
from pathlib import Path

import pandas as pd
import torch
from bench import StepFunction, print_ratios, time_interleaved
from committed_results import RESULTS_FOLDER
from loss_results import SECOND_BASELINE_TIMING
from tensor_memory import TensorMemory

from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.prepare import expected_vocab_size
from lm.experiments.definition import read_experiment
from lm.model.decoder import Decoder
from lm.training.optimizers import make_optimizer


def training_step(config: Config, vocab_size: int) -> StepFunction:
    """Return a function that makes one training step of a new decoder on random tokens."""
    decoder, length = Decoder(config.model, vocab_size, config.data.seq_len), config.data.seq_len
    sequences = torch.randint(vocab_size, (config.optim.batch_tokens // length, length + 1)).split(config.micro_batch)
    optimizer = make_optimizer(decoder, config.optim)

    def step() -> None:
        for part in sequences:
            (decoder.summed_loss(Batch.from_sequences(part)) / config.optim.batch_tokens).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), config.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_step_bytes(config: Config, vocab_size: int) -> int:
    """Return the bytes of all tensors at the peak of the second of two training steps."""
    with TensorMemory() as memory:
        step = training_step(config, vocab_size)
        step()
        step()
    return memory.peak_bytes


def main() -> None:
    """Time the arms of an experiment, print ratios to the baseline, and write costs.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    random.seed(0)
    experiment = read_experiment(arguments.file, [])
    configs = {arm.name: experiment.example_config(next(iter(experiment.sizes)), arm) for arm in experiment.arms}
    baseline, config = next(iter(configs.items()))
    vocab_size = expected_vocab_size(config.data)
    seconds = time_interleaved(
        {
            arm: training_step(arm_config, vocab_size)
            for arm, arm_config in (configs | {SECOND_BASELINE_TIMING: config}).items()
        },
        arguments.rounds,
    )
    print_ratios(seconds, baseline, config.optim.batch_tokens)
    lines = [
        (arm, "seconds", number, f"{value:.6f}")
        for arm, values in seconds.items()
        for number, value in enumerate(values)
    ]
    lines += [(arm, "bytes", 0, peak_step_bytes(config, vocab_size)) for arm, config in configs.items()]
    path = RESULTS_FOLDER / experiment.name / "costs.csv"
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(lines, columns=["arm", "metric", "round", "value"]).to_csv(path, index=False, lineterminator="\n")
    print(path)


if __name__ == "__main__":
    main()
