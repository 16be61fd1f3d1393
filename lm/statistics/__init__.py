"""This package computes statistics of measured metrics: intervals, the choice of each arm's learning rate, and verdicts
(docs/statistics.md)."""
