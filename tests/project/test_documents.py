"""What README.md and docs/*.md name exists: links and their headings, files, commands and options, keys, Python names.
Pages are short.

Configurations that a document shows are loaded. README's example is run by a slow test: python -m pytest
tests/project/test_documents.py -m slow
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import prose
import pytest
from conftest import ROOT
from typer.main import get_command

from lm.cli import app
from lm.config.load import load_config
from lm.config.reference import reference_rows
from lm.config.tree import Config
from lm.errors import ConfigError

PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")), *PAGES]
EXECUTED = ("normalizers-own.md",)  # by tests/attention/test_plugins.py, with the package that its commands name
FOLDERS = ("lm", "docs", "scripts", "tests", "configs")
CONFIGURED = ("train", "prepare", "config", "eval", "swap")  # commands that take key=value
KEYS = {re.sub(r"\[[^\]]*\]", "", path) for path, *_ in reference_rows(Config)}
BLOCKS = {".".join(path.split(".")[:depth]) for path in KEYS for depth in range(1, path.count(".") + 2)}

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def inline(text: str) -> list[str]:
    """What stands in backticks within a line."""
    return re.findall(r"`([^`\n]+)`", prose.LANGUAGE_BLOCK.sub("", text))


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", prose.LANGUAGE_BLOCK.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_links(path: Path) -> list[str]:
    """Targets of links and images that are no file, or no heading of it."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose.LANGUAGE_BLOCK.sub("", path.read_text())):
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not target.startswith("https://") and (not file.exists() or (anchor and anchor not in headings(file))):
            wrong.append(target)
    return wrong


def missing_files(text: str) -> list[str]:
    """Paths of the repository's folders that are not there."""
    paths = re.findall(rf"(?<![\w/.*-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]", text)
    return [name for name in paths if not (ROOT / name).exists()]


def commands(text: str) -> list[list[str]]:
    """`lm` commands in blocks and in backticks, as words; loop variables have their first value."""
    lines = [line for code in inline(text) for line in [code] if not code.endswith("...")]
    for block in prose.code_blocks(text, "bash"):
        for name, value in re.findall(r"for (\w+) in (\S+)", block):
            block = block.replace(f"${name}", value)
        lines += block.replace("\\\n", " ").splitlines()
    matches = [re.search(r"^\s*(?:.* -m )?(lm [a-z-].*)", line) for line in lines]
    return [shlex.split(match[1], comments=True)[1:] for match in matches if match]


def wrong_command(words: list[str]) -> str | None:
    """Why `lm WORDS` is no command; None if it is one."""
    command = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    options = {"--help"}.union(*((*parameter.opts, *parameter.secondary_opts) for parameter in command.params))
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word not in options]
    return f"no option {unknown[0]}" if unknown else None


def wrong_configuration(words: list[str], folder: Path) -> str | None:
    """Why the configuration of `lm WORDS` can't be loaded; None if it can. `folder` holds the files that the document
    writes.
    """
    if words[0] not in CONFIGURED:
        return None
    if any(word.startswith(("runs/", "models/")) and word.endswith(".yaml") for word in words):
        return None  # the configuration of a run or model that the reader has
    files = [word for word in words[1:] if word.endswith(".yaml") and words[0] in CONFIGURED[:3]]
    paths = [folder / file if (folder / file).exists() else ROOT / file for file in files] or [
        ROOT / "configs" / "ssmax.yaml"
    ]
    overrides = [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]
    normalizer = [f"model.normalizer={words[words.index('--to') + 1]}"] if "--to" in words else []
    return problem_of([*map(str, paths), *normalizer, *overrides])


def problem_of(arguments: list[str]) -> str | None:
    """What is wrong with a configuration; None if nothing is."""
    try:
        load_config(arguments)
    except ConfigError as error:
        return str(error)
    return None


def written_files(text: str, folder: Path) -> Path:
    """The folder, with the files in it that the document's blocks write, and configs/ as in the repository."""
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("models", "data"):
        (folder / name).symlink_to(ROOT / "configs" / name)
    for name, content in re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", text, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(content)
    return folder


def unknown_keys(text: str) -> list[str]:
    """Keys in backticks that are no keys of the configuration."""
    tops = {key.partition(".")[0] for key in KEYS if "." in key}
    matches = [re.match(r"[a-z_]+(?:\[[\w.]*\])?(?:\.[a-z_0-9]+(?:\[[\w.]*\])?)+", code) for code in inline(text)]
    keys = [
        re.sub(r"\[[\w.]*\]", "", match[0]).replace("phases.normalizer.", "model.normalizer.")
        for match in matches
        if match
    ]
    files = (".safetensors", ".json", ".yaml", ".py", ".md")
    return [key for key in keys if key.partition(".")[0] in tops and not key.endswith(files) and key not in BLOCKS]


@documents
def test_links_lead_to_files_and_headings(path: Path):
    assert missing_links(path) == []


@pytest.mark.parametrize("path", [*DOCUMENTS[:2], ROOT / "CHANGELOG.md", *prose.PAGES], ids=lambda path: path.name)
def test_sentences_are_short(path: Path):
    longest = 30 if path.name == "CHANGELOG.md" else prose.MAX_SENTENCE_WORDS
    assert prose.long_sentences(path.read_text(encoding="utf-8"), longest) == []


def test_readme_and_pages_are_short():
    readme = DOCUMENTS[0].read_text()
    assert prose.word_count(readme) <= prose.README_WORDS
    assert len(readme.splitlines()) <= prose.README_LINES
    assert sum(prose.word_count(prose.prose_of_page(path.read_text())) for path in prose.PAGES) <= prose.MAX_PROSE_WORDS
    assert len(PAGES) <= prose.MAX_PAGES


@documents
def test_files_of_the_repository_exist(path: Path):
    assert missing_files(path.read_text()) == []


@documents
def test_commands_have_their_options(path: Path):
    problems = {shlex.join(words): wrong_command(words) for words in commands(path.read_text())}
    assert {words: wrong for words, wrong in problems.items() if wrong} == {}


@documents
def test_keys_in_backticks_exist(path: Path):
    assert unknown_keys(path.read_text()) == []


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name not in (*prose.GENERATED, *EXECUTED)], ids=lambda path: path.name
)
def test_configurations_can_be_loaded(path: Path, tmp_path: Path):
    text = path.read_text()
    folder = written_files(text, tmp_path)
    problems = {shlex.join(words): wrong_configuration(words, folder) for words in commands(text)}
    for number, block in enumerate(prose.code_blocks(text, "yaml")):
        if set(re.findall(r"^(\w+):", block, re.MULTILINE)) <= BLOCKS | {"base"}:
            (folder / f"{number}.yaml").write_text(block)
            base = [] if "base:" in block else [str(ROOT / "configs" / "softmax.yaml")]
            problems[block] = problem_of([*base, str(folder / f"{number}.yaml")])
    assert {label: wrong for label, wrong in problems.items() if wrong} == {}


def tour() -> list[tuple[str, str]]:
    """Cells of the notebook, each its kind and its text."""
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def test_the_tour_runs_and_ends_in_the_verdict_of_the_committed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, training_in_process: None
):
    """In a folder of its own, with few steps and test sequences, in this process; the notebook is committed with the
    outputs and pictures of a whole run.
    """
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert "".join(outputs[-1]["text"]).endswith("better by more than 0.3 (5 seeds)\n")
    code = "\n".join(source for kind, source in tour() if kind == "code")
    for old, new in {
        "STEPS = 600": "STEPS = 4",
        '{"length_factors": [1, 8, 32]}': '{"length_factors": [1, 8, 32], "sequences": 2}',
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "results").symlink_to(ROOT / "results")
    (folder := tmp_path / "docs").mkdir()
    monkeypatch.chdir(folder)
    with matplotlib.rc_context():  # the tour sets the size of its own figures
        exec(code, {})
    output = capsys.readouterr().out
    assert "of its weight is on" in output
    assert output.endswith("better by more than 0.3 (5 seeds)\n")


@pytest.mark.slow
def test_the_readme_s_example_runs(tmp_path: Path):
    """Word for word, but in a folder of its own: the experiment ends in a verdict over five seeds."""
    (example,) = [block for block in prose.code_blocks((ROOT / "README.md").read_text(), "bash") if "cat > " in block]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": commands_path, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    assert shutil.which("lm", path=commands_path)
    subprocess.run(["bash", "-ec", example], check=True, cwd=tmp_path, env=environment, timeout=1800)
    softmax, cooler = json.loads((tmp_path / "runs" / "cooler" / "verdicts.json").read_text())["arms"]
    assert (softmax["runs"], cooler["runs"]) == (5, 5)
    assert cooler["verdict"] == "better"


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
