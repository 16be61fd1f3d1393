"""lm: what an attention normalizer does to a language model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.11.0"

if TYPE_CHECKING:
    import pandas as pd

    from lm.commands.python_face import Compared
    from lm.runs.loading import Loaded

Given = str | os.PathLike | Mapping[str, object]  # a file or preset, an override `KEY=VALUE`, or keys with their values


def load(path: str | os.PathLike, checkpoint: str | int = "last") -> "Loaded":
    """A trained model with its tokenizer and configuration: see `lm.runs.loading.load`."""
    from lm.runs.loading import load

    return load(path, checkpoint)


def train(*configuration: Given, verbose: bool = False) -> Path:
    """Train a run in a process of its own, and return its run folder: see `lm.commands.python_face.train`."""
    from lm.commands.python_face import train

    return train(*configuration, verbose=verbose)


def evaluate(*given: Given, checkpoint: str | int = "last", suite: str = "", verbose: bool = False) -> "pd.DataFrame":
    """Measure trained models, as a data frame: see `lm.commands.python_face.evaluate`."""
    from lm.commands.python_face import evaluate

    return evaluate(*given, checkpoint=checkpoint, suite=suite, verbose=verbose)


def compare(*given: Given, jobs: int | None = None, train: bool = True, verbose: bool = False) -> "Compared":
    """Train and judge an experiment: see `lm.commands.python_face.compare`."""
    from lm.commands.python_face import compare

    return compare(*given, jobs=jobs, train=train, verbose=verbose)


def judge(
    table: "str | os.PathLike | pd.DataFrame",
    metric: str = "",
    better: str = "lower",
    matters: float = 0.01,
    baseline: str | None = None,
    where: str = "",
    by: Sequence[str] = (),
) -> "pd.DataFrame":
    """Judge anybody's runs from a table: see `lm.commands.python_face.judge`."""
    from lm.commands.python_face import judge

    return judge(table, metric, better, matters, baseline, where, by)


def results(*folders: str | os.PathLike, history: bool = False) -> "pd.DataFrame":
    """Everything that runs have measured, one line a number: see `lm.report.frame.results`."""
    from lm.report.frame import results

    return results(*folders, history=history)
