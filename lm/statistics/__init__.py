"""Conclusions from numbers: intervals, learning rates chosen for each arm, verdicts (docs/statistics.md)."""
