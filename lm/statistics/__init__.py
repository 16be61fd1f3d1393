"""Statistics of measured metrics: intervals, the choice of each arm's learning rate, verdicts (docs/statistics.md)."""
