"""Generated texts are what they are made of: tests/inventory.yaml (commands and keys) and pages of docs/."""

import importlib

import pytest
from conftest import ROOT


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch):
    """The module of scripts/."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("generate")


def test_generated_texts_are_current(generate):
    texts = generate.texts_from_code()
    differing = [str(path.relative_to(ROOT)) for path, text in texts.items() if path.read_bytes() != text]
    assert differing == [], "run: python scripts/generate.py"
