"""Make run folders for tests of reports, as the trainer writes them."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from fabricated import make_evaluation, save_empty_checkpoint, validation_frame, write_evaluation
from manifests import record_files

from lm.config import load as configuration
from lm.evaluation.answers import ACCURACY, rows_by_length
from lm.evaluation.held_out import LongContext, Validation
from lm.evaluation.measurement import metric_rows, sampling_unit_frame
from lm.report.comparison import ArmComparison, Difference, compare_runs
from lm.report.comparison_pictures import drawn_runs
from lm.report.html import run_sections, write_comparison
from lm.report.pictures import Picture
from lm.runs.evaluations import load_evaluation
from lm.runs.record import read_run
from lm.statistics.intervals import Interval

SEQ_LEN = 64
ACCURACY_QUANTITY = "accuracy"


def json_value(value):
    """Return a value as the trainer writes it to JSON: null for what is not finite."""
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | np.ndarray):
        return [json_value(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value


def build_run(
    root: Path,
    name: str,
    normalizer: dict | str = "softmax",
    seed: int = 1,
    better: float = 0.0,
    rise: float = 0.5,
    tokens: str = "sequences-a",
    fingerprint: str = "data-a",
    evaluations: tuple[str, ...] = ("validation", "long_context"),
    seq_len: int = SEQ_LEN,
    steps: int = 200,
    noise: float = 0.02,
    align: bool = True,
    asked: dict[int, float] | None = None,
    **overrides,
) -> Path:
    """Write a run folder as the trainer does, and return it.

    Args:
        better: nats by which the loss is lower than 3.8.
        rise: nats by which the loss rises with each doubling of the position beyond the training length.
        tokens: name of the held-out sequences, which decides how hard each of them is.
        noise: standard deviation of the losses of sequences, in nats.
        align: whether position buckets have the edges of other runs.
        asked: accuracy of answers by sequence length; None: no questions.
        overrides: keys of the configuration.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    sequence_rng = np.random.default_rng([*tokens.encode()])  # how hard each sequence is: the same for every run
    folder = root / name
    (folder / "evaluations").mkdir(parents=True)
    content = {
        "name": "run",
        "seed": seed,
        "data": {"seq_len": seq_len},
        "model": {"normalizer": normalizer},
        "trainer": {"max_steps": steps},
    }
    tree = configuration.parse_config(configuration.merge(content, overrides))
    (folder / "config.yaml").write_text(configuration.to_yaml(tree))
    n_normalizer = 0 if normalizer == "softmax" else 48
    environment = {
        "git_commit": "0123456789abcdef", "git_dirty": False, "versions": {"torch": "2.13.0", "lm": "0.1.0"},
        "device": "cpu",
        "precision": "32", "compile": False, "command": f"lm train configs/{name}.yaml",
        "data_fingerprint": fingerprint,
        "parameters": {"total": 10_823_424 + n_normalizer, "non_embedding": 8_000_000, "normalizer": n_normalizer},
        "data": {"train_tokens": 1_900_000}, "symbolic": tree.data.symbolic,
        "starts": [
            {"step": 0, "time": "2026-01-01T00:00:00Z", "precision": "32", "compile": False, "device": "cpu",
             "git_commit": "0123456789abcdef", "git_dirty": False, "versions": {"torch": "2.13.0", "lm": "0.1.0"}},
        ],
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    final = 3.8 - better
    lines = []
    for step in range(steps // 100, steps + 1, max(1, steps // 100)):
        curve = final + 4.5 * np.exp(-step / steps * 12) + 0.9 * (1 - step / steps)
        base = {"step": step, "tokens": step * 8192}
        lines.append(
            base
            | {
                "train/loss": curve + rng.normal(0, 0.06),
                "train/grad_norm": 1.0,
                "lr": 1e-3,
                "tokens_per_s": 1e4,
                "elapsed_s": step,
            }
        )
        if step % (steps // 20) == 0:
            lines.append(base | {"val/loss": curve + 0.05, "val/bits_per_byte": curve / 2.9})
    if "validation" in evaluations:
        nll = final + sequence_rng.normal(0, 0.4, 128) + rng.normal(0, noise, 128)
        if "val/loss" in lines[-1]:
            lines[-1] |= {"val/loss": nll.mean(), "val/bits_per_byte": nll.mean() / 2.9}
        documents = np.arange(128) // 8
        units = sampling_unit_frame(tokens, documents, np.full(128, 256), fingerprint)
        frame = pd.concat(
            [validation_frame(nll, 6.31, units), metric_rows(Validation.logged_metrics[2], nll.mean() / 2.9)]
        )
        write_rows(folder, "validation", frame, seq_len, steps, fingerprint)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(json_value(line)) + "\n" for line in lines))
    if "long_context" in evaluations:
        length, count = 8 * seq_len, 24
        shift = 1.0 if align else 1.1
        edges = np.unique([0, *np.round(shift * 2 ** np.arange(0, np.log2(length), 0.25)).astype(int), length])
        edges = edges[edges <= length]
        position = np.arange(length)
        hard = sequence_rng.normal(0, 0.3, (count, 1))
        about = replace(LongContext.logged_metrics[0], name="", amount=f"{count} of {length:,} tokens")
        units, blocks = sampling_unit_frame(tokens, np.arange(count) // 2, None, fingerprint), []
        for factor in (1.0, 50.0):
            growth = rise * np.maximum(0, np.log2((position + 1) / seq_len)) / (1 if factor == 1 else 3)
            by_sequence = (
                final
                + 2.5 / np.sqrt(position + 1)
                + growth
                + 0.08 * (factor > 1)
                + hard
                + rng.normal(0, noise * 8, (count, length))
            )
            buckets = np.stack([by_sequence[:, a:b].mean(axis=1) for a, b in pairwise(edges)], axis=1)
            setting = "as trained" if factor == 1 else "theta x 50"
            blocks.append(
                metric_rows(about, buckets, units, edges[:-1].tolist(), edges[1:].tolist(), inference_setting=setting)
            )
        write_rows(folder, "long_context", pd.concat(blocks), seq_len, steps, fingerprint)
    if asked:
        write_answers(folder, asked, seq_len)
    save_empty_checkpoint(folder, steps)
    record_files(folder)
    return folder


def two_runs(root: Path) -> list[Path]:
    """Write a baseline run and a run whose loss is better by more than its interval, and return their folders."""
    return [build_run(root, "soft"), build_run(root, "scalable", "ssmax", better=0.05, rise=0.1)]


def write_answers(folder: Path, asked: dict[int, float], seq_len: int = SEQ_LEN, **task: int) -> None:
    """Write evaluations of recall, with accuracies by length, and of needles, of which fewer are found.

    asked: accuracy of recall by sequence length.

    task: further options of the recall task.
    """
    by_sequence = {length: np.clip(fraction + np.linspace(-0.1, 0.1, 16), 0, 1) for length, fraction in asked.items()}
    right = {length: np.arange(10.0) < round(9 * fraction) for length, fraction in asked.items()}
    options, right_half = json.dumps({"pairs": 8} | task), {length: row / 2 for length, row in by_sequence.items()}
    recall = [
        accuracy_rows(by_sequence, "m", 8, chance={"chance": 0.3397}, options=options, task="mqar"),
        accuracy_rows(
            right_half, "m", 8, chance={"chance, roll-out": 0.125}, rolled=True, options=options, task="mqar"
        ),
    ]
    wrong = {length: 0 * row for length, row in right.items()}
    needles = [
        accuracy_rows(right, "n", 1, task="needle"),
        accuracy_rows(wrong, "c", 1, control=True, task="needle, control without it"),
    ]
    write_rows(folder, "recall", pd.concat(recall), seq_len)
    write_rows(folder, "needle", pd.concat(needles), seq_len)


def accuracy_rows(
    right: dict[int, np.ndarray],
    sha256: str,
    weight: int,
    chance: dict | None = None,
    rolled: bool = False,
    control: bool = False,
    options: str = "",
    task: str = "",
) -> pd.DataFrame:
    """Return the rows of an accuracy by sequence length.

    Args:
        right: fraction of correct answers of each sequence, by length.
        sha256: beginning of the hashes of the sequences.
        weight: number of questions in each sequence.
        chance: name and accuracy of guessing.
        rolled: whether the inference setting is roll-out.
        control: whether the metric is a control.
        options: options of the task as JSON.
    """
    levels = tuple((chance or {}).items())
    about = replace(ACCURACY, amount="some", references=levels, control=control, options=options)
    samples = [
        (
            np.asarray(row, float)[:, None],
            sampling_unit_frame(f"{sha256}{length}", np.arange(len(row)), np.full(len(row), weight)),
        )
        for length, row in sorted(right.items())
    ]
    setting = "as trained, roll-out" if rolled else "as trained"
    return rows_by_length(about, sorted(right), samples, inference_setting=setting, task=task)


def write_rows(
    folder: Path, kind: str, frame: pd.DataFrame, seq_len: int = SEQ_LEN, step: int = 200, fingerprint: str = "data-a"
) -> None:
    """Write rows as the file of an evaluation, as the trainer does."""
    write_evaluation(folder, make_evaluation(frame, kind, step, step * 8192, seq_len, folder.name, fingerprint))


class ReportFiles(NamedTuple):
    """This tuple holds the paths of a report's files."""

    html: Path
    csv: Path

    @property
    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the report's table of all measurements."""
        return list(csv.DictReader(self.csv.open()))


def write_report(folders: list[Path], out: Path) -> ReportFiles:
    """Write the report of runs to a folder, and return its files."""
    return ReportFiles(write_comparison(compare_runs([read_run(folder) for folder in folders]), out), out / "table.csv")


def pictures(comparison: ArmComparison) -> list[Picture]:
    """Return the pictures of a comparison's page."""
    sections = run_sections(comparison.arm_labels, drawn_runs(comparison), comparison)
    return [block.content for section in sections for block in section.blocks if block.kind == "picture"]


def compare_folders(*folders: Path) -> tuple[ArmComparison, dict[tuple[str, ...], Difference]]:
    """Return the comparison of runs, and the last arm's differences by their labels."""
    comparison = compare_runs([read_run(folder) for folder in folders])
    return comparison, {difference.metric_name.task_and_setting: difference for difference in comparison.differences}


def edit_evaluation(
    folder: Path, kind: str, change: Callable[[pd.DataFrame], pd.DataFrame | None], **facts: object
) -> None:
    """Change an evaluation file of a run folder.

    change: function that changes the rows in place, or returns new ones. facts: new values of the evaluation's fields.
    """
    evaluation = load_evaluation(next(folder.glob(f"evaluations/{kind}.*.csv")))
    frame = evaluation.frame.astype({"sequences": object, "part": object, "metric": object, "setting": object})
    changed = change(frame)
    write_evaluation(folder, replace(evaluation, frame=frame if changed is None else changed, **facts))


def answer_labels(comparison: ArmComparison) -> list[tuple[str, ...]]:
    """Return task and inference setting of all answers, in the order of their files."""
    return [name.task_and_setting for name in comparison.metric_names if name.quantity == ACCURACY_QUANTITY]


def accuracy_interval(comparison: ArmComparison, arm: int, of: tuple[str, str], length: int) -> Interval:
    """Return the interval of an arm's accuracy, for a task and an inference setting, at a length."""
    (name,) = (
        name for name in comparison.metric_names if (name.quantity, *name.task_and_setting) == (ACCURACY_QUANTITY, *of)
    )
    return comparison.arm_means[name, str(length), comparison.arm_labels[arm]].interval
