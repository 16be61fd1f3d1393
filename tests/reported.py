"""Run folders as the trainer writes them, made up for the tests of reports."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fabricated import save
from manifests import record

from lm.config import load as configuration
from lm.report.comparison import Difference, RunComparison, SeriesName, compare_runs
from lm.report.html import PICTURE, write_comparison
from lm.runs.evaluations import (
    Axis,
    Evaluation,
    Sample,
    Series,
    Shown,
    measuring_code,
    validation_series,
)
from lm.runs.manifest import write_files
from lm.runs.record import read_run
from lm.statistics.intervals import Interval

SEQ_LEN = 64
ANSWERS = "accuracy"


def plain(value):
    """As the trainer writes numbers: null for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | np.ndarray):
        return [plain(item) for item in value]
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
    """A run folder as the trainer writes it: `better` lowers the loss, `rise` is the loss per doubling beyond the
    training length.
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
    tree = configuration.parse(configuration.merge(content, overrides))
    (folder / "config.yaml").write_text(configuration.to_yaml(tree))
    n_normalizer = 0 if normalizer == "softmax" else 48
    environment = {
        "git_commit": "0123456789abcdef", "git_dirty": False, "versions": {"torch": "2.13.0", "lm": "0.1.0"},
        "device": "cpu",
        "precision": "32", "compile": False, "command": f"lm train configs/{name}.yaml",
        "data_fingerprint": fingerprint,
        "parameters": {"total": 10_823_424 + n_normalizer, "non_embedding": 8_000_000, "normalizer": n_normalizer},
        "tokens_total": steps * 8192, "unigram_cross_entropy": {"train": 6.3, "val": 6.31},
        "data": {"train_tokens": 1_900_000, "documents": 200},
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
        sample = Sample(tokens, nll[:, None], np.full(128, 256), documents)
        write_series(
            folder,
            "validation",
            validation_series(nll.mean(), nll.mean() / 2.9, 6.31, seq_len, sample, fingerprint),
            steps,
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(plain(line)) + "\n" for line in lines))
    if "long_context" in evaluations:
        length, count = 8 * seq_len, 24
        shift = 1.0 if align else 1.1
        edges = np.unique([0, *np.round(shift * 2 ** np.arange(0, np.log2(length), 0.25)).astype(int), length])
        edges = edges[edges <= length]
        position = np.arange(length)
        hard = sequence_rng.normal(0, 0.3, (count, 1))
        labels = Shown(
            "Long sequences, by position",
            "long-context sequences",
            f"{count} of {length:,} tokens",
            "loss by position, mean over sequences",
        )
        series = []
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
            axis = Axis("position in the sequence", "tokens", "at positions", tuple(edges.tolist()), bins=True)
            series.append(
                Series(
                    "long_context", "loss", "nats per token", "lower", seq_len, buckets.mean(0), axis=axis,
                    interval="documents",
                    samples=(Sample(tokens, buckets, np.ones(count), np.arange(count) // 2),),
                    curve=by_sequence.mean(0), shown=labels,
                    setting="as trained" if factor == 1 else "theta x 50", data_fingerprint=fingerprint,
                )
            )  # fmt: skip
        write_series(folder, "long_context", series, steps, fingerprint=fingerprint)
    if asked:
        write_answers(folder, asked, seq_len)
    save(folder, steps)
    record(folder)
    return folder


def two_runs(root: Path) -> list[Path]:
    """A baseline, and a run that is better by what an interval can tell."""
    return [build_run(root, "soft"), build_run(root, "scalable", "ssmax", better=0.05, rise=0.1)]


def write_answers(folder: Path, asked: dict[int, float], seq_len: int = SEQ_LEN, **task: int) -> None:
    """Recall of `asked`, the accuracy by length, and needles, of which a tenth fewer are found."""
    by_sequence = {length: np.clip(fraction + np.linspace(-0.1, 0.1, 16), 0, 1) for length, fraction in asked.items()}
    right = {length: np.arange(10.0) < round(9 * fraction) for length, fraction in asked.items()}
    mqar = {"kind": "recall", "what": "mqar", "options": {"pairs": 8} | task, "seq_len": seq_len, "weight": 8}
    needle = {"kind": "needle", "seq_len": seq_len, "weight": 1}
    recall = [
        answers(by_sequence, "m", chance={"chance": 0.3397}, **mqar),
        answers(
            {length: row / 2 for length, row in by_sequence.items()},
            "m",
            chance={"chance, roll-out": 0.125},
            rolled=True,
            **mqar,
        ),
    ]
    needles = [
        answers(right, "n", what="needle", **needle),
        answers(
            {length: 0 * row for length, row in right.items()},
            "c",
            what="needle, control without it",
            control=True,
            **needle,
        ),
    ]
    write_series(folder, "recall", recall)
    write_series(folder, "needle", needles)


def answers(
    right: dict[int, np.ndarray],
    sha256: str,
    weight: int,
    chance: dict | None = None,
    rolled: bool = False,
    **fields: object,
) -> Series:
    """Fractions right by length, each of so many questions; `sha256`: the beginning of those of the sequences."""
    values = {length: np.asarray(row, float) for length, row in sorted(right.items())}
    samples = [
        Sample(f"{sha256}{length}", row[:, None], np.full(len(row), weight), np.arange(len(row)))
        for length, row in values.items()
    ]
    levels = "chance, picking among the answers shown and not yet given"
    return Series(
        metric=ANSWERS, unit="fraction", better="higher", means=np.array([row.mean() for row in values.values()]),
        samples=tuple(samples),
        axis=Axis("sequence length", "tokens", "in sequences of", tuple(values)), references=chance or {},
        interval="wilson",
        setting="as trained, roll-out" if rolled else "as trained",
        shown=Shown("Accuracy by sequence length", "sequences with questions", "some", "answers by length",
            levels=levels), **fields,
    )  # fmt: skip


def write_series(folder: Path, kind: str, series: list[Series], step: int = 200, fingerprint: str = "data-a") -> None:
    """An evaluation as the trainer writes it."""
    facts = {
        "tokens_seen": step * 8192,
        "data_fingerprint": fingerprint,
        "options": {},
        "precision": "32",
        "weights_sha256": folder.name,
    }
    facts["code"] = {"lm": measuring_code()}
    write_evaluation(folder, kind, step, Evaluation(kind=kind, step=step, series=tuple(series), **facts).plain())


def write_evaluation(folder: Path, kind: str, step: int, content: dict) -> None:
    """A file of evaluations."""
    write_files(folder, {f"evaluations/{kind}.step-{step:06d}.json": json.dumps(plain(content)).encode()}, step)


class ReportFiles(NamedTuple):
    """The files of a report."""

    html: Path
    png: Path
    svg: Path
    numbers: Path  # of the picture
    markdown: Path
    csv: Path
    latex: Path


def write_report(folders: list[Path], out: Path) -> ReportFiles:
    """The report of runs, in a folder."""
    page = write_comparison(compare_runs([read_run(folder) for folder in folders]), out)
    return ReportFiles(
        page, *(out / name for name in (PICTURE, "overview.svg", "overview.csv", "table.md", "table.csv", "table.tex"))
    )


def compared(*folders: Path) -> tuple[RunComparison, dict[tuple[str, ...], Difference]]:
    """The comparison, and the last arm's differences by what they are of."""
    comparison = compare_runs([read_run(folder) for folder in folders])
    return comparison, {difference.name.labels: difference for difference in comparison.differences}


def edit(folder: Path, kind: str, change: Callable[[dict], None]) -> None:
    path = next(folder.glob(f"evaluations/{kind}.*"))
    content = json.loads(path.read_text())
    change(content)
    path.unlink()
    write_evaluation(folder, kind, content["step"], content)


def first_sample(content: dict, number: int = 0) -> dict:
    """Of an evaluation's first series: the first sample, or another."""
    return content["series"][0]["samples"][number]


def asked(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Task and inference setting of all answers, in the order of their files."""
    return [name.labels for name in comparison.sections[-1].names if name.metric == ANSWERS]


def fraction_right(comparison: RunComparison, arm: int, of: tuple[str, str], length: int) -> Interval:
    """Of an arm's answers, with its interval."""
    return comparison.sections[-1].interval(comparison.arms[arm], SeriesName(ANSWERS, *of), str(length))
