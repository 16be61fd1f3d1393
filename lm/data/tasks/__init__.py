"""Synthetic tasks: corpora whose rows are made, not read. Each is the options of one class and a pure function of (seed, index, length)."""
