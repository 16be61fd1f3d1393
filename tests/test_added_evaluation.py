"""A kind of evaluation is added in two files: a module that measures it, and its options in the table of `eval`.
Nothing else knows it.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

MODULE = '''
"""How far logits spread: the standard deviation of next-token logits by position."""

import numpy as np
import torch

from lm.data.batches import Batch
from lm.evaluation.held_out import validation_sequences
from lm.evaluation.evaluation_kind import Measurement
from lm.evaluation.held_out import by_sequence
from lm.runs.evaluations import Axis, Sample, Series, Shown


class Spread(Measurement):
    kind = "spread"

    @property
    def options(self):
        return {"positions": self.eval_config.positions}

    @property
    def work_units(self):
        return self.config.eval.sequences

    def measure(self, decoder, where, progress):
        held_out, positions = validation_sequences(self.store, self.config), self.eval_config.positions

        def measure(part):
            batch = Batch.of(held_out.sequences[part]).to(where.device)
            return decoder.head(decoder.hidden(batch)[:, positions]).std(-1)

        lengths = [held_out.length] * len(held_out.sequences)
        values = by_sequence([decoder], lengths, (len(positions),), where, measure, progress)
        caption = "spread of logits by position"
        shown = Shown("Spread of logits", "validation sequences", f"{len(values)} of {held_out.length} tokens", caption)
        return [
            Series(
                self.kind, "spread", "nats", "higher", held_out.length, values.mean(0),
                axis=Axis("position", "tokens", "at position",
                tuple(positions)), samples=(Sample(held_out.sha256, values, np.ones(len(values)), held_out.
                    document_labels),),
                interval="documents", logged=tuple(f"spread/{position}" for position in positions), shown=shown,
                data_fingerprint=self.store.fingerprint,
            )
        ]
'''
OPTIONS = """
@dataclass
class SpreadConfig(EvaluationConfig):
    measurement: ClassVar[str] = "lm.evaluation.spread:Spread"
    positions: list[int] = key([], "positions at which logits are looked at; []: off", ge=0)

    def wanted(self, data: DataConfig) -> bool:
        return bool(self.positions)

    def conflicts(self, data: DataConfig, model: ModelConfig) -> list[Problem]:
        late = max(self.positions) >= data.seq_len
        return [Problem("positions", self.positions, f"go beyond data.seq_len = {data.seq_len}",
            "leave those out")] if late else []


@dataclass
class EvalConfig:"""
ROW = """    spread: SpreadConfig | None = optional(SpreadConfig, "how far logits spread, by position")
"""


IN_ONE_PROCESS = """
import json, sys
from conftest import FigureCanvasBase, lm, unpainted
from pathlib import Path
FigureCanvasBase.print_figure = unpainted
results = []
for command, *arguments in json.loads(sys.argv[1]):
    if command == "delete":
        for path in arguments:
            Path(path).unlink()
    else:
        ended = lm(command, *arguments)
        results.append([ended.returncode, ended.stdout, ended.stderr])
print(json.dumps(results))
"""


@pytest.fixture
def lm(tmp_path: Path):
    """A function: `lm` with each of several lists of arguments, of a copy of the package to which the evaluation was
    added; `delete` deletes files."""
    shutil.copytree(ROOT / "lm", tmp_path / "code" / "lm")  # what is compiled with it
    (tmp_path / "code" / "lm" / "evaluation" / "spread.py").write_text(MODULE)
    table = tmp_path / "code" / "lm" / "config" / "eval_config.py"
    head, _, body = table.read_text().partition("\n@dataclass\nclass EvalConfig:")
    last = body.index("    needle: NeedleConfig")
    table.write_text(head + OPTIONS + body[:last] + ROW + body[last:])

    def run(*commands: list[str]) -> list[list]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path / "code"), str(ROOT / "tests")))}
        command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(commands)]
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path / "code", env=environment, check=True
        )
        return json.loads(result.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
def test_an_evaluation_in_two_files_is_scheduled_kept_listed_drawn_and_reported(
    lm, arguments: list[str], tmp_path: Path
):
    runs = tmp_path / "runs"
    options = [
        *arguments,
        "eval.long_context.length_factor=0",
        "data.val_fraction=0.7",
        "eval.sequences=64",
    ]  # enough documents report
    files = [f"spread.step-{step:06d}.json" for step in (4, 8)]
    override = "eval.spread={positions: [4, 16], at: [0.5, 1]}"
    *results, refusal, lacking = lm(
        *(["train", *options, f"name={name}", f"model.normalizer={name}", override] for name in ("softmax", "ssmax")),
        ["eval", str(runs / "ssmax"), "-o", str(tmp_path / "all.csv")],
        ["report", str(runs / "softmax"), str(runs / "ssmax"), "-o", str(tmp_path / "report")],
        ["eval", str(runs / "ssmax"), "eval.spread.positions=[32]"],
        ["delete", *(str(runs / "ssmax" / "evaluations" / name) for name in files)],
        ["report", str(runs / "ssmax"), "-o", str(tmp_path / "lacking")],
    )
    assert [status for status, *_ in results] == [0] * 4, results
    assert {path.name for path in (runs / "softmax" / "evaluations").glob("spread.*")} == set(files)
    logged = [line for line in map(json.loads, (runs / "ssmax" / "metrics.jsonl").open()) if "spread/16" in line]
    assert [line["step"] for line in logged] == [4, 8]

    assert "spread, ssmax, step 8 (cached)" in results[2][1]
    rows = [row for row in csv.DictReader((tmp_path / "all.csv").open()) if row["kind"] == "spread"]
    assert [(row["where"], row["metric"]) for row in rows] == [("4 tokens", "spread"), ("16 tokens", "spread")]
    assert [float(row["value"]) for row in rows] == pytest.approx([logged[1]["spread/4"], logged[1]["spread/16"]])
    assert refusal == [2, "", "error: eval.spread.positions = [32]: go beyond data.seq_len = 32; leave those out\n"]

    page = (tmp_path / "report" / "report.html").read_text()
    assert "Spread of logits" in page
    assert "Spread of logits by position" in page
    table = list(csv.DictReader((tmp_path / "report" / "table.csv").open()))
    assert any(row["quantity"] == "difference" and row["metric"].startswith("spread") for row in table)
    assert "ssmax: no spread evaluation" in lacking[1]
