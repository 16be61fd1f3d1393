"""A file or folder that is for another command: one line says what it is, and which command takes it."""

from pathlib import Path

import pytest
from conftest import ROOT, lm

EXPERIMENT = str(ROOT / "configs" / "experiments" / "ssmax.yaml")
CONFIGURATION = str(ROOT / "configs" / "softmax.yaml")


def error_of(*arguments: str, status: int) -> str:
    """The one line of a command that is refused."""
    result = lm(*arguments)
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("file", [EXPERIMENT, EXPERIMENT.replace("ssmax", "modern")], ids=["base: FILE", "base: {...}"])
@pytest.mark.parametrize("command", ["train", "config", "prepare"])
def test_commands_on_one_configuration_refuse_an_experiment(command: str, file: str):
    line = error_of(command, file, "seed=2", status=2)
    said = "an experiment, not the configuration of one run; it is for lm compare"
    assert line == f"error: {file}: {said} {file} [--plan]"


def test_compare_refuses_the_configuration_of_one_run():
    line = error_of("compare", CONFIGURATION, "--plan", status=2)
    assert f"{CONFIGURATION}: no experiment: it has no `arms`; " in line
    assert line.endswith(f"train it with lm train {CONFIGURATION}, or name it as an experiment's base")


@pytest.mark.parametrize("command", ["report", "eval", "export", "generate"])
def test_commands_on_runs_refuse_the_folder_of_an_experiment(tmp_path: Path, command: str):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "resolved.json").touch()
    line = error_of(command, str(folder), *(["-o", str(tmp_path / "out")] if command == "export" else []), status=1)
    assert f"{folder}: the folder of an experiment, not of a run; name runs below it" in line
    assert line.endswith("lm compare mine.yaml --report-only")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["config", CONFIGURATION, "name=7"], 2, "name = 7: must be text; quote it in the YAML"),
        (
            ["config", CONFIGURATION, "trainer.micro_batch=7"],
            2,
            "does not divide the 16 sequences of a process in a step; give a divisor",
        ),
        (["compare", "nothing-of-the-kind"], 2, "no such configuration file"),
        (["judge", "nowhere.csv"], 1, "nowhere.csv: no such file; a table with columns arm, seed and value is needed"),
        (["report", str(ROOT / "lm" / "modell")], 1, "no such run folder; did you mean 'model'?"),
        (["eval", str(ROOT / "lm" / "modell")], 1, "no such run folder; did you mean 'model'?"),
        (["report", CONFIGURATION], 1, "softmax.yaml: no such run folder; lm train makes one, runs/NAME"),
        (["report", "nowhere/run"], 1, "nowhere/run: no such run folder; lm train makes one, runs/NAME"),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_a_remedy(arguments: list[str], status: int, words: str):
    assert words in error_of(*arguments, status=status)
