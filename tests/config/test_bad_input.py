"""Bad input at the command line: one line that names it, a non-zero status, nothing half-written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, lm
from typer.main import get_command

from lm.cli import app


def refused(tmp_path: Path, result: subprocess.CompletedProcess, *words: str, status: int = 1) -> None:
    assert result.returncode == status, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert result.stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in errors[0]
    assert not list((tmp_path / "runs").glob("*"))
    assert not [
        path for path in (tmp_path / "stores").glob("*") if path.is_dir() and not (path / "manifest.json").exists()
    ]


@pytest.fixture
def train(corpus: Path, tmp_path: Path):
    """A function: run `lm train` on files with overrides, with its own store folder."""

    def run(paths: object) -> subprocess.CompletedProcess:
        return lm(
            "train",
            str(ROOT / "tests" / "tiny.yaml"),
            f"data.source.paths=[{paths}]",
            f"data.root={tmp_path / 'stores'}",
            f"runs={tmp_path / 'runs'}",
        )

    return run


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_a_text_file_that_is_not_utf8_is_named(train, tmp_path: Path):
    refused(tmp_path, train(paths=written(tmp_path, "latin.txt", b"caf\xe9 " * 100)), "latin.txt", "UTF-8")


def test_a_mistake_on_the_command_line_says_where_the_usage_is():
    for arguments in (["train"], ["trian"], ["train", "--fast", "x"], ["report"]):
        result = lm(*arguments)
        assert result.returncode == 2
        assert re.fullmatch(r"error: .*; see lm( train| report)? --help\n", result.stderr)
        assert arguments != ["trian"] or "'trian'. Did you mean 'train'?; see" in result.stderr
        assert "Traceback" not in result.stderr


# ---------------------------------------------------------------- where output goes


def printed_to(output: int, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of `lm ARGUMENTS` with an open file as its stdout, which is closed here."""
    command, env = [sys.executable, "-m", "lm", *arguments], {**os.environ, **environment}
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=env, cwd=ROOT)
    os.close(output)
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    "command", [["config", "name=x"], ["normalizers"]], ids=["less than a buffer", "more than a buffer"]
)
def test_output_that_nobody_reads_ends_quietly_with_status_1(command: list[str]):
    reader, writer = os.pipe()
    os.close(reader)
    assert printed_to(writer, *command) == (1, "")


def test_output_to_a_full_disk_is_an_error_of_one_line():
    assert printed_to(os.open("/dev/full", os.O_WRONLY), "config", "name=x") == (1, "error: No space left on device\n")


def test_a_prompt_is_utf_8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch):
    prompts = []
    monkeypatch.setattr(
        "lm.evaluation.generation.generate_text", lambda source, checkpoint, prompt, *rest: prompts.append(prompt) or []
    )
    assert lm("generate", "run", "--prompt", "caf\udcc3\udca9 \udcff").returncode == 0
    assert prompts == ["café \ufffd"]


@pytest.mark.parametrize("command", ["report", "eval", "generate", "export", "config"])
def test_a_loop_of_links_is_an_error_of_one_line(command: str, tmp_path: Path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    options = ["--out", str(tmp_path / "out")] if command == "export" else []
    refused(tmp_path, lm(*command.split(), str(loop), *options), "loop", status=2 if command == "config" else 1)


@pytest.mark.parametrize(
    "option", ["compare --anew", "eval --needle", "eval --tasks=copa", "generate --top-p=1", "noise --by=arm"]
)
def test_an_option_that_left_is_named_with_the_page_of_what_left(option: str):
    advice = "; earlier versions had it, see CHANGELOG.md; see lm "
    assert re.fullmatch(f"error: no such option: .*{advice}.*\n", lm(*option.split(), "runs/mine").stderr)


def test_an_option_without_its_value_is_one_line():
    result = lm("eval", "runs/mine", "--checkpoint")
    assert result.returncode == 2
    assert re.fullmatch("error: .*--checkpoint.*; see lm eval --help\n", result.stderr)


@pytest.mark.parametrize("command", [*([name] for name in get_command(app).commands), []], ids=" ".join)
def test_a_wrong_command_line_is_one_line(command: list[str]):
    for wrong in (["--nothing-like-this"], ["--name", "q"]):
        result = lm(*command, *wrong)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"error: no such option: {wrong[0]}")
        assert " ".join(["lm", *command, "--help"]) in line
