"""From a configuration to a run folder, with Lightning's Trainer."""
