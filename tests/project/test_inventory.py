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
    differing = [str(path.relative_to(ROOT)) for path, text in generate.texts().items() if path.read_bytes() != text]
    assert differing == [], "run: python scripts/generate.py"


def test_what_differs_is_named_and_written(generate, monkeypatch, tmp_path, capsys):
    made = tmp_path / "page.md"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "texts", lambda: {made: b"new"})
    monkeypatch.setattr(generate, "RATCHET", tmp_path / "sizes.json")
    monkeypatch.setattr(generate, "house_sizes", lambda: {"all of lm": 2, "scripts": 1, "tests": 1})
    generate.RATCHET.write_text('{"all of lm": 2, "scripts": 1, "tests": 3}')
    for arguments, status, said, content in (
        (["--check"], 1, "page.md: differs from what it is made of\n", None),
        ([], 0, "page.md: written\nsizes.json: written\n", b"new"),
        (["--check"], 0, "", b"new"),
        ([], 0, "", b"new"),
    ):
        monkeypatch.setattr("sys.argv", ["generate.py", "--no-results", *arguments])
        assert (generate.main(), capsys.readouterr().out) == (status, said)
        assert (made.read_bytes() if made.exists() else None) == content
