"""Experiments: arms x seeds x learning rates from one file, trained and judged by the procedure of docs/statistics.md."""
