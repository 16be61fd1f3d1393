"""Evaluations measure trained models on fixed held-out sequences, and keep the results in the run folder."""
