"""Training curves of tiny models, pinned: a change that must move them says so and writes them again
(scripts/curves.py).
"""

import json
from pathlib import Path

import pytest

from lm.config.load import load_config
from lm.training.train import train
from scripts.curves import PINNED_FILE, TOLERANCE, TRAINING_CASES, describe_differences, train_curves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curves")


@pytest.mark.parametrize("case", TRAINING_CASES)
def test_a_curve_is_as_it_was(case: str, folder: Path):
    actual = train_curves([case], folder, 1, lambda arguments: train(load_config(arguments)))
    assert not describe_differences(actual, {case: json.loads(PINNED_FILE.read_text())[case]}, TOLERANCE)
