"""Normalizers from outside: the example of docs/normalizers-own.md from its check to its report, and what is never
imported.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, lm
from folders import last_checkpoint
from manifests import edit_json, write_recorded_file

from lm.attention.contract import CHECKS
from lm.config.load import load_config, parse_config
from lm.errors import ConfigError, RunError
from lm.plugins import PLUGINS
from lm.runs.checkpoints import load_checkpoint, save_checkpoint
from lm.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE, MODEL_JSON, read_config

NAME = "powers.attention:Power"
NAMED = f"model.normalizer={{name: '{NAME}', power: 3.0}}"


@pytest.fixture
def powers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the documentation's package `powers`, which has not been imported; an import of its module writes
    the file `imported` in `tmp_path`.
    """
    text = (ROOT / "docs" / "normalizers-own.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    package = tmp_path / "site" / "powers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "attention.py").write_text(f"{code}\nopen({str(tmp_path / 'imported')!r}, 'a').close()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{ROOT}")
    forget("powers")
    yield package
    forget("powers")


def installed(package: Path, entry_points: str) -> None:
    """Make the package one that an installer has put there, as version 1.2 with these entry points."""
    info = package.with_name(f"{package.name}-1.2.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "top_level.txt").write_text(f"{package.name}\n")
    PLUGINS._entry_points = None


def forget(package: str) -> None:
    """As in a process that has imported nothing from outside."""
    vars(PLUGINS).update(vars(type(PLUGINS)()))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def trained(arguments: list[str], *overrides: str) -> Path:
    """A run of ten steps, after which nothing of the plugin is known."""
    run = [*arguments, "name=power", "trainer.max_steps=10", "eval.every=10", *overrides]
    result = lm("train", *run)
    assert result.returncode == 0, result.stderr
    folder = load_config(run).run_folder
    forget("powers")
    (folder.parent.parent / "imported").unlink(missing_ok=True)
    return folder


def test_the_example_of_the_docs_from_its_training_to_its_report(powers: Path, arguments: list[str], tmp_path: Path):
    result = lm("check-normalizer", NAME, "power=3")
    assert result.returncode == 0, result.stdout
    *lines, summary = result.stdout.splitlines()
    assert [line.startswith(f"{NAME} (power=3.0): kept: ") for line in lines] == [True] * len(CHECKS)
    assert summary == f"{len(CHECKS)} of {len(CHECKS)} promises are kept"

    folder = trained(arguments, NAMED)
    environment = json.loads((folder / ENVIRONMENT_FILE).read_text())
    assert re.fullmatch("source sha256 [0-9a-f]{12}", environment["versions"][NAME])
    assert environment["starts"][0]["versions"][NAME] == environment["versions"][NAME]

    for command in (
        ["eval", folder],
        ["export", folder, "-o", tmp_path / "out"],
        ["generate", folder],
        ["swap", folder, "--to", "ssmax", "-o", tmp_path / "s"],
    ):
        refusal = lm(*map(str, command))
        assert refusal.returncode == 1
        assert len(refusal.stderr.strip().splitlines()) == 1
        assert "--allow-plugin powers" in refusal.stderr
    report = lm("report", str(folder))
    assert report.returncode == 0, report.stderr
    assert f"{NAME} (power=3.0)" in (folder / "report" / "report.html").read_text()
    assert not (tmp_path / "imported").exists()

    allowed = lm("eval", str(folder), "--allow-plugin", "powers")
    assert allowed.returncode == 0, allowed.stderr
    assert (tmp_path / "imported").exists()
    export = lm("export", str(folder), "-o", str(tmp_path / "export"), "--allow-plugin", "powers")
    assert export.returncode == 0, export.stderr
    forget("powers")
    assert "--allow-plugin powers" in lm("generate", str(tmp_path / "export")).stderr
    assert lm("generate", str(tmp_path / "export"), "--allow-plugin", "powers", "--max-new-tokens", "3").returncode == 0


def test_phases_lists_of_layers_and_swaps_accept_a_plugin(powers: Path, arguments: list[str], tmp_path: Path):
    phases = (
        "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: [window, {name: 'powers.attention:Power'}]}]"
    )
    folder = trained(arguments, phases)
    assert "--allow-plugin powers" in lm("eval", str(folder)).stderr
    swapped = lm(
        "swap",
        str(folder),
        "--to",
        NAME,
        "model.normalizer.power=1.5",
        "-o",
        str(tmp_path / "swapped"),
        "--allow-plugin",
        "powers",
    )
    assert swapped.returncode == 0, swapped.stderr
    plain = yaml.safe_load((tmp_path / "swapped" / CONFIG_FILE).read_text())
    assert plain["model"]["normalizer"] == {"name": NAME, "power": 1.5}


@pytest.mark.parametrize("where", ["phases", "layers"])
def test_nothing_is_imported_because_a_file_names_it(powers: Path, arguments: list[str], tmp_path: Path, where: str):
    """Configuration, checkpoint and export of a softmax run, altered with all their checksums to name code."""
    assert lm("train", *arguments, "name=plain", "trainer.max_steps=2", "eval.every=2").returncode == 0
    folder, export = load_config([*arguments, "name=plain"]).run_folder, tmp_path / "export"
    assert lm("export", str(folder), "-o", str(export)).returncode == 0
    plain, options = yaml.safe_load((folder / CONFIG_FILE).read_text()), {"name": NAME, "power": 3.0}
    plain["model"]["normalizer"] = (
        {"name": "layers", "of": [{"name": "softmax"}, options]} if where == "layers" else options
    )
    if where == "phases":
        plain["phases"] = [{"until": 1.0, "normalizer": options}]
    text = yaml.safe_dump(plain)

    write_recorded_file(folder / CONFIG_FILE, text)
    checkpoint = load_checkpoint(last_checkpoint(folder))
    checkpoint["lm"]["config"] = text
    save_checkpoint(checkpoint, last_checkpoint(folder))

    def change(description: dict) -> None:
        description["training"]["config"] = text
        if where != "phases":
            description["spec"]["model"]["normalizer"] = plain["model"]["normalizer"]

    edit_json(export / MODEL_JSON, change)

    with pytest.raises(ConfigError, match="--allow-plugin powers"):
        parse_config(plain)
    with pytest.raises(RunError, match="--allow-plugin powers"):
        read_config(folder)
    for source in (folder, last_checkpoint(folder), export):
        refusal = lm("generate", str(source))
        assert refusal.returncode == 1
        assert len(refusal.stderr.strip().splitlines()) == 1
        assert "--allow-plugin powers" in refusal.stderr
    assert lm("report", str(folder)).returncode == 0
    assert "powers" not in sys.modules
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("powers.attention:Missing", "can't be imported: AttributeError"),
        ("nothing.here:Power", "can't be imported: ModuleNotFoundError"),
        ("powers.attention:PowerOptions", "is no normalizer"),
        ("powers.attention:torch", "is no normalizer"),
        ("powers.module:Mine", "is no normalizer: no subclass of lm.attention.normalizer.Normalizer"),
        ("softmaxx", "did you mean 'softmax'"),
    ],
)
def test_a_name_that_is_no_normalizer_is_refused_in_one_line(powers: Path, arguments: list[str], name: str, said: str):
    head = "from lm.attention.query_scale import Softmax\nfrom torch import nn\n"
    (powers / "module.py").write_text(f"{head}class Mine(nn.Module):\n    schema = Softmax\n")
    with pytest.raises(ConfigError, match=said) as error:
        load_config([*arguments, f"model.normalizer={{name: '{name}'}}"])
    assert len(str(error.value).splitlines()) == 1


def test_installed_entry_points_are_read_once(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    """Reading them takes 10 ms, and each unknown name of a list looks for them."""
    reads, read = [], metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda group: reads.append(group) or read(group=group))
    monkeypatch.setattr(PLUGINS, "_entry_points", None)
    with pytest.raises(ConfigError, match="unknown name"):
        load_config([*arguments, "model.normalizer=[unknown1, unknown2, unknown3]"])
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("full_formula = 'z'\n    p: float = 2.0", "option not made by lm.attention.options.key: p"),
        ("p: float = key(2.0, 'p')", "no dataclass of options with a full_formula"),
    ],
)
def test_options_that_lm_can_not_read_are_refused(powers: Path, arguments: list[str], written: str, said: str):
    head = "from dataclasses import dataclass\nfrom lm.attention.options import Options, key\n"
    head += "from lm.attention.normalizer import SoftmaxNormalizer\n"
    classes = f"@dataclass\nclass Odd(Options):\n    {written}\nclass Normal(SoftmaxNormalizer):\n    schema = Odd\n"
    (powers / "odd.py").write_text(head + classes)
    with pytest.raises(ConfigError, match=said):
        load_config([*arguments, "model.normalizer={name: 'powers.odd:Normal'}"])


@pytest.mark.parametrize(
    ("allowed", "taken"), [("powers", True), ("powers.attention", True), ("power", False), ("powers.other", False)]
)
def test_a_package_is_allowed_with_its_modules_and_no_other(powers: Path, allowed: str, taken: bool):
    PLUGINS.allow([allowed])
    plain = {"name": "x", "model": {"normalizer": NAME}, "data": {"source": {"name": "files", "paths": ["x"]}}}
    if taken:
        assert parse_config(plain).model.normalizer.name == NAME
    else:
        with pytest.raises(ConfigError, match="--allow-plugin powers"):
            parse_config(plain)


def test_an_installed_package_gives_a_bare_name(powers: Path, arguments: list[str]):
    installed(powers, f"[lm.normalizers]\npower = {NAME}\n")
    with pytest.raises(ConfigError, match="unknown name; did you mean 'power'"):
        load_config([*arguments, "model.normalizer=powerr"])
    config = load_config([*arguments, "model.normalizer={name: power, power: 1.5}"])
    assert config.model.normalizer.name == NAME
    assert config.model.normalizer.label() == f"{NAME} (power=1.5)"
    forget("powers")
    with pytest.raises(ConfigError, match="--allow-plugin powers"):
        parse_config({"name": "x", "model": {"normalizer": "power"}})


def test_plugin_code_that_has_changed_since_training_is_noticed(powers: Path, arguments: list[str]):
    folder = trained(arguments, NAMED)
    first_result = lm("eval", str(folder), "--allow-plugin", "powers")
    assert "(cached)" in first_result.stdout
    assert "note" not in first_result.stderr
    code = powers / "attention.py"
    code.write_text(code.read_text().replace("scores + self.b", "scores - self.b"))
    forget("powers")
    resumed = lm("train", *arguments, "name=power", "eval.every=10", NAMED, "trainer.max_steps=12", "resume=auto")
    assert resumed.returncode == 2
    assert re.search(
        r"its code is source sha256 \w+, .*step-\d+\.ckpt was trained with source sha256 \w+; bring that code back",
        resumed.stderr,
    )
    second_result = lm("eval", str(folder), "--allow-plugin", "powers")
    assert "(cached)" not in second_result.stdout, "numbers of the code before"
    assert re.search(
        rf"note: .*: {NAME} was source sha256 \w+ when this was saved, it is source sha256 \w+ now",
        second_result.stderr,
    )


def test_an_abstract_class_is_refused_before_anything_is_written(powers: Path, arguments: list[str]):
    code = powers / "attention.py"
    code.write_text(code.read_text().replace("def normalize(", "def normalise("))
    result = lm("train", *arguments, "name=power", NAMED)
    assert result.returncode == 2
    assert "is not whole: it has no normalize; see docs/normalizers-own.md" in result.stderr


LEAKS = {
    "no mask": (".masked_fill(~layout.visible(), 0.0)", ""),
    "a mask after the sum": (
        "a = (",
        "a = scores.relu()\n        return divide_rows(a * layout.visible(), a.sum(-1, keepdim=True), None)\n"
        "        a = (",
    ),
    "a mask within chunks of 31 tokens alone": (
        "~layout.visible()",
        "~(layout.visible() | (torch.arange(scores.size(-1)) // 31 > torch.arange(scores.size(-2))[:, None] // 31))",
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_normalizer_that_sees_later_tokens_is_refused_before_a_run(
    leak: str, powers: Path, arguments: list[str], tmp_path: Path
):
    line = f"'{NAME}': gives a token weights that depend on later tokens, as if it forgot the mask; mask by "
    line += f"layout.visible(); lm check-normalizer {NAME} tests it\n"
    arguments = [*arguments, "data.seq_len=64"]
    plain = trained(arguments, "model.normalizer=softmax")
    code = powers / "attention.py"
    assert LEAKS[leak][0] in code.read_text()
    code.write_text(code.read_text().replace(*LEAKS[leak]))
    mixed = f"model.normalizer={{name: layers, of: [softmax, {{name: '{NAME}'}}]}}"
    for command in (
        ["train", *arguments, "name=leaks", NAMED],
        ["train", *arguments, "name=leaks", mixed],
        ["swap", str(plain), "--to", NAME, "-o", str(tmp_path / "swapped")],
    ):
        result = lm(*command)
        assert (result.returncode, result.stderr) == (2, f"error: model.normalizer = {line}")
    assert not (tmp_path / "swapped").exists()
    assert not (plain.parent / "leaks").exists()


@pytest.mark.parametrize(
    ("breaks", "function"), [("def normalize(self", "Power.normalize"), ("def initialise(self", "Power.initialise")]
)
def test_a_failure_inside_a_plugin_names_its_function_and_line(
    powers: Path, arguments: list[str], breaks: str, function: str
):
    code = powers / "attention.py"
    forward = "    def forward(self, q, k, v, layout):\n        return super().forward(q, k, v, layout)\n\n"
    text = code.read_text().replace("    def normalize(", f"{forward}    def normalize(")
    text = re.sub(rf"({re.escape(breaks)}.*:\n)", r"\1        raise ValueError('no\\nluck')\n", text)
    code.write_text(text)
    line = text[: text.index("raise ValueError")].count("\n") + 1
    result = lm("train", *arguments, "name=power", NAMED)
    remedy = f"check it with lm check-normalizer {NAME}"
    expected = f"error: normalizer {NAME} failed in {function} ({code}:{line}): ValueError: no luck; {remedy}\n"
    assert (result.returncode, result.stderr[-len(expected) :]) == (1, expected)
    assert "Traceback" not in result.stderr


def test_code_is_identified_by_all_files_of_its_package_as_they_were_imported(powers: Path, arguments: list[str]):
    def imported() -> dict[str, str]:
        forget("powers")
        load_config([*arguments, NAMED])
        return PLUGINS.package_digests(["softmax", NAME])

    before = imported()
    assert (list(before), imported()) == ([NAME], before)
    (powers / "helpers.py").write_text("ONE = 1\n")
    assert PLUGINS.package_digests([NAME]) == before, "an edit while a run trains is not what runs"
    assert imported() != before


def test_the_check_of_a_normalizer_says_that_its_weights_are_not_finite(powers: Path):
    code = powers / "attention.py"
    code.write_text(code.read_text().replace("scores + self.b", "scores * torch.inf + self.b"))
    checked = lm("check-normalizer", NAME)
    assert (checked.returncode, checked.stdout.count("\n")) == (1, 2)
    assert checked.stdout.endswith("\n0 of 1 promises are kept, 1 broken\n")
    assert "gives numbers that are not finite; a row without weight" in checked.stdout
