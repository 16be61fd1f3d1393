"""Train a model as its configuration says, with Lightning's Trainer, and write a run folder."""
