"""The package away from the clone: the wheel in an empty folder, by the commands of docs/installation.md, and the
unpacked sdist.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from tokenizers import ByteLevelBPETokenizer

import lm

pytest.importorskip("build")
pytestmark = pytest.mark.slow
SMALL = [
    "model.n_layer=1",
    "model.n_embd=32",
    "model.n_head=2",
    "optim.batch_tokens=256",
    "optim.warmup_steps=1",
    "eval.sequences=4",
]
FEW = [
    *SMALL,
    "trainer.max_steps=4",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "eval.every=4",
    "log.progress=none",
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The standard output of a command that succeeds."""
    inherited = {
        "PATH": f"{Path(command[0]).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        command, cwd=folder, env=inherited | environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the clone."""
    copy, out = tmp_path_factory.mktemp("copy") / "clone", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "dist", "data", "runs", "models", "wandb", "shared"
    )

    def ignore(folder: str, names: list[str]) -> set[str]:
        return ignored(folder, names) if Path(folder) == ROOT else {name for name in names if name == "__pycache__"}

    shutil.copytree(ROOT, copy, ignore=ignore)
    address = {"LM_REPOSITORY": "https://example.org/owner/lm/"}
    run([sys.executable, "-m", "build", "--outdir", str(out), str(copy)], copy, **os.environ, **address)
    return out


@pytest.fixture(scope="module")
def away(built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The `lm` of an environment that has the wheel, with the other packages of this one, and an empty folder."""
    folder = tmp_path_factory.mktemp("away")
    environment = tmp_path_factory.mktemp("environment") / ".venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], folder)
    (wheel,) = built.glob("*.whl")
    python = environment / "bin" / "python"
    run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        folder,
    )
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return environment / "bin" / "lm", folder


def documented() -> list[list[str]]:
    """The commands of the section of docs/installation.md on a machine without the clone."""
    section = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8").partition("**Without the clone.**")[2]
    block = re.search(r"```bash\n(.*?)```", section, re.S)[1].replace("\\\n", " ")
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def write_corpus(folder: Path) -> None:
    """nanoGPT's files of token ids, a tokenizer as GPT-2's, and another text, as the commands name them."""
    rng = np.random.default_rng(0)
    words = [rng.bytes(3).hex() for _ in range(60)]
    texts = [" ".join(rng.choice(words, 300)) for _ in range(30)]
    (folder / "gpt2").mkdir()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, 400, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "gpt2" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for name, part in (("train", texts[:24]), ("val", texts[24:])):
        ids = [token for text in part for token in (*tokenizer.encode(text).ids, end)]
        np.array(ids, "<u2").tofile(folder / f"{name}.bin")
    (folder / "other.txt").write_text(" ".join(rng.choice(words, 900)))


def test_the_documented_commands_work_without_the_clone(away: tuple[Path, Path]):
    program, folder = away
    write_corpus(folder)
    commands = documented()
    assert [words[:2] for words in commands] == [["lm", "compare"], ["lm", "train"], ["lm", "eval"]]
    outputs = {}
    for words in commands:
        extra = FEW if words[1] == "train" else ["eval.texts.sequences=4"] if words[1] == "eval" else []
        outputs[words[1]] = run([str(program), *words[1:], *extra], folder)
    assert "SSMax" in outputs["compare"] or "ssmax" in outputs["compare"]
    assert "6 layers" not in outputs["train"]
    assert "4 steps" in outputs["train"]
    assert re.search(r"other +loss", outputs["eval"]) or "other" in outputs["eval"]
    (result,) = (folder / "runs").glob("*/evaluations/texts.step-*.csv")
    assert "text/other/loss" in result.read_text()
    environment = json.loads((result.parent.parent / "environment.json").read_text())
    assert (environment["lm"], environment["git_commit"]) == (lm.__version__, None)
    lm_file = run([str(program.with_name("python")), "-c", "import lm; print(lm.__file__)"], folder)
    assert Path(lm_file.strip()).is_relative_to(program.parent.parent)  # not the clone's


def test_the_owner_sets_the_address_of_the_project(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    assert "Project-URL: Source, https://example.org/owner/lm" in lines
    assert "Project-URL: Issues, https://example.org/owner/lm/issues" in lines


def test_the_sdist_holds_what_its_tests_need_and_passes_them(built: Path, tmp_path: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for place in (
        "tests/conftest.py",
        "tests/inventory.yaml",
        "docs/config.md",
        "configs/softmax.yaml",
        "scripts/setup.sh",
        "results",
    ):
        assert (folder / place).exists(), place
    files = ["tests/config/test_presets.py", "tests/config/test_config.py", "tests/project/test_house.py"]
    run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files], folder)
