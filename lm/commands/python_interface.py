"""Defines the functions `lm.train`, `lm.evaluate`, `lm.compare` and `lm.judge`, which do in Python what the commands
`train`, `eval`, `compare` and `judge` do.

They print nothing unless `verbose` is true, and raise `lm.errors.LMError` where a command would end with an error.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from lm import ConfigArgument
from lm.commands.arguments import paths_and_overrides
from lm.config.load import load_config
from lm.config.yaml_text import yaml_override
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import evaluate_runs
from lm.experiments.compare import TrainingOptions, compare_experiments, open_experiment
from lm.experiments.definition import read_experiments
from lm.experiments.judging import DIFFERENCE_INTERVAL_KEYS
from lm.experiments.page import REPORT, VERDICTS
from lm.experiments.run_table import BetterDirection, judge_table
from lm.machine import start_child
from lm.report.frame import concatenate_blocks, evaluation_block, results, run_columns
from lm.report.html import PAGE_FILE
from lm.report.tables import csv_text
from lm.runs.folder import CONFIG_FILE
from lm.runs.record import read_run


@dataclass(frozen=True)
class ComparedExperiment:
    """Holds a judged experiment, as `compare` returns it: folder, verdicts and runs."""

    folder: Path  # the folder of its runs, verdicts and report
    # a row for each size and arm, as in verdicts.csv: rate, mean, verdict, difference and its interval, p
    verdicts: pd.DataFrame
    runs: tuple[Path, ...]  # folders of the runs of the current configuration that have begun

    @property
    def report(self) -> Path:
        """Return the path of the experiment's report, an HTML page."""
        return self.folder / REPORT / PAGE_FILE

    @cached_property
    def results(self) -> pd.DataFrame:
        """Return all measured values of the experiment's runs, as `lm.results` does."""
        return results(*self.runs)


def train(*configuration: ConfigArgument, verbose: bool = False) -> Path:
    """Train a run in a process of its own, as `lm train` does.

    Args:
        configuration: YAML files or names of presets, overrides `KEY=VALUE`, and mappings of keys to values; later
            arguments win.
        verbose: whether the process prints what `lm train` prints.

    Returns:
        The run folder, which `lm.load`, `lm.evaluate` and `lm.results` take.

    Raises:
        ConfigError: the configuration is wrong.
        RunError: training failed; the message is the message of `lm train`.
    """
    arguments = _command_arguments(configuration)
    config = load_config(arguments)
    command, stdout = [sys.executable, "-m", "lm", "train", *arguments], None if verbose else subprocess.DEVNULL
    process = start_child(command, stdout, subprocess.PIPE, text=True)
    try:
        errors = process.communicate()[1]
    except KeyboardInterrupt:  # the process ends its step and saves a checkpoint
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if verbose:
        print(errors, end="", file=sys.stderr)
    if process.returncode:
        _, has_message, message = f"\n{errors}".rpartition("\nerror: ")
        raise RunError(
            message.strip()
            if has_message
            else f"{config.run_folder}: training ended with exit status {process.returncode}"
        )
    return config.run_folder


def evaluate(*arguments: ConfigArgument, checkpoint: str | int = "last", verbose: bool = False) -> pd.DataFrame:
    """Measure trained models as `lm eval` does; evaluations that were measured before are not measured again.

    Args:
        arguments: run folders, or model folders and a configuration of the text to measure them on; then overrides as
            in `train`.
        checkpoint: `last`, `best` or a step.
        verbose: whether progress is printed.

    Returns:
        The measured values, with the columns of `lm.results`; a model folder has only the columns `run` and `folder` to
        describe it.

    Raises LMError: `lm eval` would end with this error.
    """
    folders, overrides = paths_and_overrides(_command_arguments(arguments), "no run folder given, e.g. runs/softmax")
    with _silence_unless(verbose):
        records = evaluate_runs(folders, str(checkpoint), overrides)
    return concatenate_blocks(
        evaluation_block(record.evaluation, _descriptive_columns(record.folder)) for record in records
    )


def compare(
    *arguments: ConfigArgument, jobs: int | None = None, train: bool = True, verbose: bool = False
) -> ComparedExperiment:
    """Train the missing runs of an experiment, judge it as `lm compare` does, and return the verdicts; a second call
    continues.

    Args:
        arguments: the experiment's file or its name among the presets, and overrides of the base configuration as in
            `train`.
        jobs: largest number of runs at a time; by default one on each GPU, or one on a CPU.
        train: whether to train runs; False: judge the runs that are there.
        verbose: whether plan, progress and verdicts are printed.

    Raises LMError: `lm compare` would end with this error.
    """
    experiments = read_experiments(_command_arguments(arguments))
    if len(experiments) > 1:
        raise RunError(f"{experiments[1].file}: lm.compare works on one experiment: call it for each")
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs = {jobs!r}: must be at least 1")
    with _silence_unless(verbose):
        compare_experiments(experiments, TrainingOptions(jobs), report_only=not train)
    procedure = open_experiment(experiments[0])
    folder = procedure.experiment.folder
    runs = dict.fromkeys(run.config.run_folder for run in procedure.known_runs() if run.has_begun)
    return ComparedExperiment(folder, _verdict_frame(folder / f"{VERDICTS}.csv"), tuple(runs))


def judge(
    table: str | os.PathLike | pd.DataFrame,
    metric: str = "",
    better: BetterDirection | None = None,
    matters: float = 0.01,
    baseline: str | None = None,
    where: str = "",
    by: str | Sequence[str] = (),
    arm: str = "arm",
    seed: str = "seed",
    target: float | None = None,
    unpaired: bool = False,
    bounds: tuple[float, float] | None = None,
) -> pd.DataFrame:
    """Judge the runs of any trainer, as `lm judge` does.

    Args:
        table: a file (CSV, JSON lines), `wandb:ENTITY/PROJECT`, or a frame with one value in each row: columns arm,
            seed and value, and any others of `lm.results`.
        metric: the metric to judge, if the column `metric` has several; or the name of the column that has the values.
        better: `lower` or `higher`; None: as the table's column `better` says, else `lower`.
        matters: smallest difference of interest, in the metric's unit.
        baseline: the arm that other arms are compared with; None: the first arm.
        where: a condition on columns, as in `pandas.DataFrame.query`.
        by: columns that split the runs into separately judged groups, such as model sizes; all groups form one family
            of tests. By default `size`, if the table has it.
        arm, seed: the names of the columns of arms and seeds. Without a column of seeds, each row is a run; this needs
            `unpaired` or `target`.
        target: a number that each arm is compared with, in place of a baseline.
        unpaired: compare runs as unpaired (Welch), even those of equal seeds. If no two arms share a seed, runs always
            are unpaired.
        bounds: the lowest and the highest value that the metric can have, such as (0, 100) for per cent or an error
            rate's (0, 1). None: (0, 1) if higher is better and all values lie within 0 and 1. Infinite ones: the metric
            has no bounds.

    Returns:
        A row for each arm in each group of `by`, with the columns of `ComparedExperiment.verdicts`; its column `size`
            holds the group's values of the columns `by` as text.

    Raises LMError: an argument is wrong, or the table lacks a column, an arm, a seed or a number, or has a run twice.
    """
    columns = (by,) if isinstance(by, str) else by
    judgement = judge_table(
        table, metric, better, matters, baseline, where, columns, arm, seed, target, unpaired, bounds
    )
    return _verdict_frame(io.StringIO(csv_text(judgement.summary_rows(), intervals=DIFFERENCE_INTERVAL_KEYS)))


def _verdict_frame(csv_file: Path | io.StringIO) -> pd.DataFrame:
    """Read a CSV of verdicts into a frame. Only empty cells become missing values, since an arm may be named None."""
    return pd.read_csv(csv_file, keep_default_na=False, na_values=[""])


def _descriptive_columns(folder: Path) -> dict[str, object]:
    """Return {column: value} of the columns of `lm.results` that describe a run, for this folder. A model folder has
    only `run` and `folder`.
    """
    if (folder / CONFIG_FILE).is_file():
        return run_columns(read_run(folder))
    return {"run": folder.resolve().name, "folder": str(folder)}


def _command_arguments(values: Sequence[ConfigArgument]) -> list[str]:
    """Convert files, overrides and mappings to command-line arguments. Each key of a mapping becomes an override."""
    texts = []
    for value in values:
        if isinstance(value, Mapping):
            texts += [yaml_override(name, item) for name, item in value.items()]
        elif isinstance(value, str | os.PathLike):
            texts.append(os.fspath(value))
        else:
            raise ConfigError(
                f"{value!r}: must be a file, an override KEY=VALUE or a mapping, not {type(value).__name__}"
            )
    return texts


def _silence_unless(verbose: bool) -> contextlib.AbstractContextManager:
    """Return a context that discards everything printed within it, unless `verbose`."""
    context = contextlib.ExitStack()
    for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr) if not verbose else ():
        context.enter_context(redirect(io.StringIO()))
    return context
