"""Define functions that forked processes of tests call, such as training runs on several ranks."""

from lm.config.load import load_config
from lm.training.train import train


def train_each(jobs: list[list[str]]) -> None:
    """Train once for each list of arguments."""
    for arguments in jobs:
        assert train(load_config(arguments)) == 0
