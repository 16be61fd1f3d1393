"""Configurations and experiments are found by name and travel with the package."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import ROOT
from conftest import lm as command

from lm.attention.catalogue import OPTIONS_BY_NAME
from lm.commands.arguments import paths_and_overrides
from lm.config import presets
from lm.config.load import load_config
from lm.errors import ConfigError
from lm.experiments.definition import read_experiment


@pytest.mark.parametrize(
    ("argument", "kind", "file"),
    [
        ("softmax", "", "softmax.yaml"),
        ("softmax.yaml", "", "softmax.yaml"),
        ("configs/softmax.yaml", "", "softmax.yaml"),
        ("recipes/modern", "", "recipes/modern.yaml"),
        ("modern", "", "recipes/modern.yaml"),
        ("recall", "", "recall.yaml"),
        ("recall", "experiments", "experiments/recall.yaml"),
        ("configs/experiments/recall.yaml", "experiments", "experiments/recall.yaml"),
    ],
)
def test_a_preset_is_found_by_name_away_from_the_clone(tmp_path, monkeypatch, argument, kind, file):
    monkeypatch.chdir(tmp_path)
    assert presets.find(argument, kind) == presets.folder() / file
    (tmp_path / argument).mkdir(parents=True)  # such as one for what is found out about it
    assert presets.find(argument, kind) == presets.folder() / file


def test_a_file_that_is_there_comes_first_and_what_is_nowhere_is_said_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "softmax").write_text("name: mine\ndata: {source: {name: files, paths: [.]}}\n")
    assert load_config(["softmax"]).name == "mine"
    without_spaces = r"\(overrides are key=value, without spaces\)"
    with pytest.raises(
        ConfigError, match=rf"^softmaxx: no such configuration file {without_spaces}; did you mean 'softmax'\?"
    ):
        load_config(["softmaxx"])
    with pytest.raises(ConfigError, match=r"^quickstart-recall: an experiment, .* lm compare quickstart-recall"):
        load_config(["quickstart-recall"])
    with pytest.raises(
        ConfigError, match=r"^quickstart-recal: no such configuration file.*; did you mean 'quickstart-recall'\?"
    ):
        read_experiment(presets.find("quickstart-recal", "experiments"), [])


def test_a_path_with_an_equals_sign_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    (tmp_path / "lr=0.1" / "config.yaml").write_text("name: mine\n")
    assert load_config(["lr=0.1/config.yaml", "optim.lr=0.2"]).name == "mine"
    assert paths_and_overrides(["lr=0.1", "lr=0.2", "runs"]) == ([Path("lr=0.1"), Path("runs")], ["lr=0.2"])
    assert paths_and_overrides([long_value := f"data.root={'x' * 5000}"]) == ([], [long_value])


@pytest.mark.parametrize("base", ["recall", "recall.yaml", "configs/recall.yaml"])
def test_a_base_is_a_file_beside_its_heir_else_a_preset(tmp_path, monkeypatch, base):
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "mine").mkdir()
    (folder / "run.yaml").write_text(f"base: {base}\n")
    primary = "primary: {metric: recall/mqar 2048, better: higher}"
    (folder / "asked.yaml").write_text(f"base: {base}\narms: {{a: {{}}, b: {{model.normalizer: ssmax}}}}\n{primary}\n")
    assert load_config(["mine/run.yaml"]).data.seq_len == load_config(["recall"]).data.seq_len == 64
    assert read_experiment(folder / "asked.yaml", []).base_config == read_experiment(Path("recall"), []).base_config
    (neighbour := folder / base).parent.mkdir(exist_ok=True)
    neighbour.write_text(f"base: {presets.folder() / 'recall.yaml'}\ndata: {{seq_len: 128}}\n")
    assert read_experiment(folder / "asked.yaml", []).base_config["data"]["seq_len"] == 128
    (folder / "run.yaml").write_text("base: recal\n")
    with pytest.raises(ConfigError, match=r"recal: no such configuration file \(a base of run\.yaml\)"):
        load_config(["mine/run.yaml"])


def test_every_preset_is_listed_and_can_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = dict(presets.list_presets())
    assert len(listed) == len([*(ROOT / "configs").rglob("*.yaml")])
    assert all(listed.values()), "the comment at the top of each file says what it is"
    assert listed["data/slimpajama"].endswith("2 million documents (about 2 billion tokens)"), "a sentence of two lines"
    lines = command("configs", COLUMNS="").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [*listed.values()], "a pipe gets whole descriptions"
    assert command("configs", "ssmax").stdout.endswith((ROOT / "configs" / "ssmax.yaml").read_text())
    for name in listed:
        experiment = name.startswith("experiments/")
        assert presets.find(name, "experiments" if experiment else "").is_file()
    assert read_experiment(Path("recall"), []).name == "recall"


def test_the_wheel_has_every_package_and_every_preset():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        path.parent
        for top in ("lm", "configs")
        for path in (ROOT / top).rglob("*.*")
        if path.suffix in (".py", ".yaml")
    }
    names = {".".join(path.relative_to(ROOT).parts) for path in folders}
    assert set(tool["packages"]) == {f"lm.{name}" if name.startswith("configs") else name for name in names}
    carried = {path for name, patterns in tool["package-data"].items() for path in _matches(name, patterns)}
    data = {
        path for top in ("lm", "configs") for path in (ROOT / top).rglob("*.*") if path.suffix not in (".py", ".pyc")
    }
    assert carried == {path for path in data if path.is_file()}


def _matches(package: str, patterns: list[str]) -> list[Path]:
    parts = package.split(".")
    folder = ROOT.joinpath(*(parts[1:] if parts[1:2] == ["configs"] else parts))
    return [path for pattern in patterns for path in folder.glob(pattern)]


def test_normalizers_are_a_line_each_and_one_is_described():
    lines = command("normalizers").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*OPTIONS_BY_NAME]
    for name, entry in OPTIONS_BY_NAME.items():
        text = command("normalizers", name).stdout
        assert entry.full_formula in text
        assert all(f"  {spec.name}" in text for spec in fields(entry))
    assert "did you mean 'softmax'?" in command("normalizers", "softmx").stderr
