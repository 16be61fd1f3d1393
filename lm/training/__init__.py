"""Training: a configuration becomes a run folder, with Lightning's Trainer."""
