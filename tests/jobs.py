"""Work of processes that tests fork: training runs of several ranks."""

import torch
from processes import command

from lm.config.load import load_config
from lm.training.module import LanguageModel
from lm.training.train import train


def train_each(jobs: list[list[str]]) -> None:
    """Train as each list of arguments says."""
    for arguments in jobs:
        assert train(load_config(arguments)) == 0


def train_poisoned(*arguments: str) -> None:
    """`lm train` where the loss of the third step is not finite, on rank 1 alone."""
    step = LanguageModel.training_step

    def training_step(self: LanguageModel, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = step(self, batch, batch_idx)
        if self.global_rank == 1 and self.global_step == 2:
            self.sums = self.sums * torch.tensor([float("nan"), 1.0, 1.0])
        return loss

    LanguageModel.training_step = training_step
    command("train", *arguments)
