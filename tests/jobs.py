"""Work of processes that tests fork: training runs of several ranks."""

from lm.config.load import load_config
from lm.training.train import train


def train_each(jobs: list[list[str]]) -> None:
    """Train as each list of arguments says."""
    for arguments in jobs:
        assert train(load_config(arguments)) == 0
