"""A folder that an earlier version left: this version goes on with its runs, and finds its plan unchanged."""

import json
from pathlib import Path

import pytest
import yaml
from fabricated import FINGERPRINT, finish_all_runs
from manifests import write_recorded_file
from trials import TWO_ARM_EXPERIMENT

from lm.config.load import load_config, to_yaml
from lm.experiments.compare import open_experiment
from lm.experiments.definition import config_hash, read_experiment
from lm.runs.folder import CONFIG_FILE, EXPERIMENT_SETTINGS_FILE

# What version 0.11.0 recorded of `ARMS`, whose base is tests/tiny.yaml: the folders of its runs, and its plan.
EARLIER = json.loads((Path(__file__).parent / "earlier_folder.json").read_text(encoding="utf-8"))
ARMS = {
    "softmax": {"model.normalizer": "softmax"},
    "ssmax": {"model.normalizer": {"name": "ssmax", "bias": True}},
    "more": {"from": "softmax", "trainer.max_steps": 12},
    "swapped": {"from": "ssmax", "swap": {"to": "log_n"}, "model.normalizer.n": "fixed:64"},
    "as-it-is": {"from": "softmax", "swap": {"to": "ssmax", "init": "unit"}, "train": False},
    "cooled": {"from": "ssmax", "step": 8, "trainer.max_steps": 16},
}


def test_runs_of_an_earlier_version_are_gone_on_with_and_its_plan_is_unchanged(tmp_path):
    path = tmp_path / "trial.yaml"
    changes = {"arms": ARMS, "sizes": {"a": {}}, "tune": {"grid": [1e-2, 2e-2], "seeds": [101, 102]}}
    path.write_text(yaml.safe_dump(TWO_ARM_EXPERIMENT | changes, sort_keys=False))
    overrides = ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}"]
    settings = {
        "data_fingerprint": FINGERPRINT,
        "precision": 32,
        "compile": False,
        "threads": 1,
        "overrides": overrides,
    }
    write_recorded_file(tmp_path / "runs" / "trial" / EXPERIMENT_SETTINGS_FILE, settings | {"planned": EARLIER["plan"]})
    procedure = open_experiment(read_experiment(path, overrides))
    finish_all_runs(
        procedure,
        lambda run: 5 + abs(run.rate - (2e-2 if run.arm in ("softmax", "more") else 1e-2)) + run.seed / 1e4,
    )
    runs = procedure.known_runs()
    assert sorted(f"{run.stage} {run.config.name}" for run in runs) == sorted(EARLIER["runs"])
    for run in runs:
        (run.config.run_folder / CONFIG_FILE).write_text(to_yaml(run.config))
    reopened = open_experiment(read_experiment(path, overrides))
    assert (reopened.plan_notes, {*reopened.exploratory_arms}) == ([], set())


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        (
            [
                "recall",
                "data.tasks=[{task: mqar}]",
                "eval.recall.tasks=[mqar, {name: mqar, pairs: 4, queries: 4}]",
            ],
            "9f57f79c",
        ),
        (["sotu", "recipes/modern"], "c4a4fc18"),
        (["sotu", "model.position={name: rope, scaling: {name: yarn, factor: 4, original: 64}}"], "40d72aae"),
        (["sotu", "eval.diagnostics={at: [1.0]}"], "4d7dad43"),
    ],
)
def test_keys_that_leave_change_no_hash(arguments: list[str], digest: str):
    assert config_hash(load_config([*arguments, "name=x"])) == digest, "as 0.11.0 gave it"
