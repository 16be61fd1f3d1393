"""The experiments of the repository, configs/experiments."""

from pathlib import Path

import pytest
from conftest import ROOT

from lm.experiments.definition import read_experiment


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_is_valid_and_a_document_names_its_command(file: Path):
    experiment = read_experiment(file, [])
    assert experiment.name == file.stem
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"configs/experiments/{file.name}" in page.read_text(encoding="utf-8") for page in pages), f"no page names {file.name}"
