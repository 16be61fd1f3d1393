"""The LightningDataModule that gives each optimizer step its batch."""

from lm.data.batches import TrainLoader, train_loader, train_sequences
from lm.training.lightning_import import L
from lm.training.run_context import RunContext


class StepData(L.LightningDataModule):
    """Gives this rank's micro-batches of each step, a function of data fingerprint, seed and step."""

    def __init__(self, run: RunContext, phase: int):
        super().__init__()
        self.run, self.config = run, run.config.in_phase(phase)
        self.loader: TrainLoader | None = None  # None before training has begun

    def train_dataloader(self) -> TrainLoader:
        """The loader from the step on at which training starts or continues, which Lightning has restored."""
        # Lightning has just set a handler of SIGTERM, by which a run ends without a checkpoint and with status 0.
        self.run.stop.listen()
        config = self.config
        self.loader = train_loader(
            train_sequences(self.run.store, config),
            rank=self.trainer.global_rank,
            world=config.world_size,
            micro_batch=config.micro_batch,
            first_step=self.trainer.global_step,
            max_steps=config.trainer.max_steps,
            workers=config.data.workers,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )
        return self.loader
