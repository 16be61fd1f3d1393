"""Run folders as the trainer writes them, made up for the tests of reports."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm.config import load as configuration
from lm.evaluation.statistics import Interval
from lm.report.comparison import Comparison, compare
from lm.report.differences import Difference
from lm.report.sections import Line
from lm.runs.record import read_run

SEQ_LEN = 64
ANSWERS = "answers right"


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
    tokens: str = "rows-a",
    fingerprint: str = "data-a",
    evaluations: tuple[str, ...] = ("validation", "long_context"),
    seq_len: int = SEQ_LEN,
    steps: int = 200,
    noise: float = 0.02,
    align: bool = True,
    asked: dict[int, float] | None = None,
    **overrides,
) -> Path:
    """A run folder as the trainer writes it: `better` lowers the loss, `rise` is the loss per doubling beyond the training length."""
    rng = np.random.default_rng([seed, *name.encode()])
    rows_rng = np.random.default_rng([*tokens.encode()])  # how hard each row is: the same for every run on these rows
    folder = root / name
    (folder / "evaluations").mkdir(parents=True)
    merged = {
        "name": "run",
        "seed": seed,
        "data": {"seq_len": seq_len},
        "model": {"normalizer": normalizer},
        "trainer": {"max_steps": steps},
    }
    tree = configuration.parse(configuration.merge(merged, overrides))
    (folder / "config.yaml").write_text(configuration.to_yaml(tree))
    own = 0 if normalizer == "softmax" else 48
    environment = {
        "git_commit": "0123456789abcdef", "git_dirty": False, "versions": {"torch": "2.13.0", "lm": "0.1.0"}, "device": "cpu",
        "precision": "32", "compile": False, "command": f"lm train configs/{name}.yaml", "data_fingerprint": fingerprint,
        "parameters": {"total": 10_823_424 + own, "non_embedding": 8_000_000, "normalizer": own},
        "tokens_total": steps * 8192, "unigram_entropy": {"train": 6.3, "val": 6.31}, "data": {"train_tokens": 1_900_000, "documents": 200},
        "starts": [{"step": 0, "time": "2026-01-01T00:00:00Z", "precision": "32", "compile": False, "device": "cpu"}],
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    final = 3.8 - better
    lines = []
    for step in range(steps // 100, steps + 1, max(1, steps // 100)):
        curve = final + 4.5 * np.exp(-step / steps * 12) + 0.9 * (1 - step / steps)
        base = {"step": step, "tokens": step * 8192}
        lines.append(
            base | {"train/loss": curve + rng.normal(0, 0.06), "train/grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1e4, "elapsed_s": step}
        )
        if step % (steps // 20) == 0:
            lines.append(base | {"val/loss": curve + 0.05, "val/bits_per_byte": curve / 2.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(plain(line)) + "\n" for line in lines))
    common = {"step": steps, "tokens_seen": steps * 8192, "data_fingerprint": fingerprint, "rows_sha256": tokens, "seq_len": seq_len}
    if "validation" in evaluations:
        nll = final + rows_rng.normal(0, 0.4, 128) + rng.normal(0, noise, 128)
        write_evaluation(
            folder, "validation", steps, common | {"kind": "validation", "rows": 128, "loss": nll.mean(), "bits_per_byte": nll.mean() / 2.9,
            "unigram_entropy": 6.31, "nll_by_row": nll, "targets_by_row": [256] * 128, "document_by_row": [row // 8 for row in range(128)]},
        )  # fmt: skip
    if "long_context" in evaluations:
        length, rows = 8 * seq_len, 24
        shift = 1.0 if align else 1.1
        edges = np.unique([0, *np.round(shift * 2 ** np.arange(0, np.log2(length), 0.25)).astype(int), length])
        edges = edges[edges <= length]
        position = np.arange(length)
        hard = rows_rng.normal(0, 0.3, (rows, 1))
        settings = []
        for factor in (1.0, 50.0):
            beyond = rise * np.maximum(0, np.log2((position + 1) / seq_len)) / (1 if factor == 1 else 3)
            by_row = final + 2.5 / np.sqrt(position + 1) + beyond + 0.08 * (factor > 1) + hard + rng.normal(0, noise * 8, (rows, length))
            buckets = np.stack([by_row[:, a:b].mean(axis=1) for a, b in pairwise(edges)], axis=1)
            label = "as trained" if factor == 1 else "theta x 50"
            settings.append({"label": label, "loss": by_row.mean(), "bits_per_byte": by_row.mean() / 2.9,
                             "nll_by_position": by_row.mean(axis=0), "nll_by_row": buckets})  # fmt: skip
        write_evaluation(
            folder, "long_context", steps,
            common | {"kind": "long_context", "length": length, "rows": rows, "document_by_row": [row // 2 for row in range(rows)],
                      "bucket_edges": edges.tolist(), "settings": settings},
        )  # fmt: skip
    if asked:
        write_answers(folder, common, asked)
    return folder


def write_answers(folder: Path, common: dict, asked: dict[int, float], **task: int) -> None:
    """Recall of `asked`, the share of answers right by length, and needles, of which a tenth fewer are found."""
    cells, needles = [], []
    for length, share in asked.items():
        by_row = np.clip(share + np.linspace(-0.1, 0.1, 16), 0, 1)
        cells.append({"label": "as trained", "task": {"name": "mqar", "pairs": 8} | task, "length": length,
                      "rows_sha256": f"m{length}", "chance": 0.3397, "by_row": by_row, "questions_by_row": [8] * 16,
                      "rollout_chance": 0.125, "rollout_by_row": by_row / 2})  # fmt: skip
        for depth in (0.0, 1.0, None):
            right = 0 if depth is None else round(9 * share)
            needles.append({"label": "as trained", "length": length, "depth": depth, "absent": depth is None, "trials_sha256": f"n{length}",
                            "chance": None,
                            "by_trial": [1] * right + [0] * (10 - right)})  # fmt: skip
    write_evaluation(folder, "recall", common["step"], common | {"kind": "recall", "cells": cells})
    settings = {"needles": 1, "distractors": 0, "finetune": {"steps": 0}}
    write_evaluation(folder, "needle", common["step"], common | {"kind": "needle", "cells": needles} | settings)


def write_evaluation(folder: Path, kind: str, step: int, content: dict) -> None:
    (folder / "evaluations" / f"{kind}.step-{step:06d}.json").write_text(json.dumps(plain(content)))


def compared(*folders: Path) -> tuple[Comparison, dict[tuple[str, ...], Difference]]:
    """The comparison, and the last arm's differences by what they are of."""
    comparison = compare([read_run(folder) for folder in folders])
    return comparison, {difference.line.of: difference for difference in comparison.differences}


def edit(folder: Path, kind: str, change: Callable[[dict], None]) -> None:
    path = next(folder.glob(f"evaluations/{kind}.*"))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def asked(comparison: Comparison) -> list[tuple[str, ...]]:
    """Task and inference setting of all answers, in the order of their files."""
    return [line.of for line in comparison.sections[-1].lines if line.metric == ANSWERS]


def fraction_right(comparison: Comparison, arm: int, of: tuple[str, str], length: int) -> Interval:
    """Of an arm's answers, with its interval."""
    return comparison.sections[-1].interval(comparison.arms[arm], Line(ANSWERS, *of), str(length))
