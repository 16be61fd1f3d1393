"""What numbers say and what they do not: intervals, learning rates chosen for each arm, verdicts (docs/statistics.md)."""
