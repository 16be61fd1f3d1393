"""Evaluations of trained models on fixed held-out sequences; their results are kept as JSON in the run folder."""
