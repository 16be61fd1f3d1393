"""What a training step of each arm of an experiment takes: python scripts/bench_arms.py FILE [--rounds 20]

Steps are a run's own, with its model, batch and optimizer, over random tokens: forward, backward, update. The arms' steps are interleaved,
and the baseline's are timed twice: the second side shows the noise. results/NAME/costs.csv gets the seconds of every step, and the bytes
of all tensors at its peak, which are counted without numbers, as the banner of a run does.
"""

import argparse
import random
from pathlib import Path

import pandas as pd
import torch
from bench import interleaved, print_ratios, train_step
from committed_results import RESULTS

from lm.config.tree import Config
from lm.data.batches import Batch
from lm.experiments.experiment_file import read_experiment
from lm.model.decoder import Decoder
from lm.training.memory import estimated_memory
from lm.training.optimizers import make_optimizer


def step_of(config: Config):
    """A training step of a fresh decoder, in fp32."""
    vocab_size, tokens = config.data.tokenizer.vocab_size, config.optim.batch_tokens
    decoder = Decoder(config.model, vocab_size, config.data.seq_len)
    sequences = torch.randint(vocab_size, (tokens // config.data.seq_len, config.data.seq_len + 1))
    optimizer = make_optimizer(decoder, config.optim)
    return train_step(decoder, lambda sequences: decoder.loss(Batch.of(sequences)) / tokens, sequences, False, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    experiment = read_experiment(asked.file, [])
    configs = {arm.name: experiment.config_of(next(iter(experiment.sizes)), arm) for arm in experiment.arms}
    baseline, config = next(iter(configs.items()))
    seconds = interleaved({arm: step_of(config) for arm, config in (configs | {f"{baseline} again": config}).items()}, asked.rounds)
    print_ratios(seconds, baseline, config.optim.batch_tokens)
    lines = [(arm, "seconds", number, f"{value:.6f}") for arm, values in seconds.items() for number, value in enumerate(values)]
    vocab_size = config.data.tokenizer.vocab_size
    lines += [(arm, "bytes", 0, estimated_memory(config, 0, vocab_size, False, "cpu")) for arm, config in configs.items()]
    path = RESULTS / experiment.name / "costs.csv"
    pd.DataFrame(lines, columns=["arm", "metric", "round", "value"]).to_csv(path, index=False, lineterminator="\n")
    print(path)


if __name__ == "__main__":
    main()
