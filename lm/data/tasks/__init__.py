"""Synthetic tasks, whose sequences are made, not read: pure functions of (task, seed, training or test, index, length)."""
