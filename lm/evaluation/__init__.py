"""Evaluations of trained models: measured on pinned held-out tokens, kept as JSON in the run folder."""
