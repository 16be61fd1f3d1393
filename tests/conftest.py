"""Define the fixtures of all tests: a tiny corpus, and a configuration with which a training run takes a second."""

import base64
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Container, Iterable
from concurrent.futures import Executor, Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backend_bases import FigureCanvasBase
from reported import two_runs
from texts import TEXTS, files_config, write_texts

from lm.cli import main
from lm.config.data_config import DataConfig
from lm.config.load import load_config
from lm.config.tree import Config
from lm.experiments.procedure import Run
from lm.experiments.trainer import ChildProcesses, Devices

ROOT = Path(__file__).parent.parent
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell's background job ignores it, and so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda descriptor: None  # no test cuts the power: waiting for the disk would be a tenth of all time
gc.disable()  # until all is imported, which no collection frees


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, and cache the git state that each run asks for.

    Each collection would go through half a million objects. Asking git takes longer than all steps of a tiny run.
    """
    gc.freeze()
    gc.enable()
    if banner := sys.modules.get("lm.training.banner"):
        banner.git_state = cache(banner.git_state)


def mark_others_slow(cases: Iterable[object], quick: Container[object]) -> list[object]:
    """Return the parameters of a test, with those not in `quick` marked as slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with twelve documents of made-up sentences, a few hundred kilobytes, the same every time."""
    import random

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghiklmnoprstuvw", k=rng.randint(2, 7))) for _ in range(300)]
    weights = [1 / (rank + 2) for rank in range(300)]
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        sentences = [" ".join(rng.choices(words, weights, k=rng.randint(4, 12))) + "." for _ in range(400)]
        (folder / f"{number:02d}.txt").write_text(" ".join(sentences))
    return folder


@pytest.fixture(scope="session")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the corpus's token store, which all tests share."""
    return tmp_path_factory.mktemp("stores")


@pytest.fixture
def arguments(corpus: Path, store_root: Path, tmp_path: Path) -> list[str]:
    """Return the command-line arguments that load the configuration of `tiny`."""
    return [
        str(ROOT / "tests" / "tiny.yaml"),
        f"data.source.paths=[{corpus}]",
        f"data.root={store_root}",
        f"runs={tmp_path / 'runs'}",
    ]


@pytest.fixture
def tiny(arguments: list[str]):
    """Return a function that loads the tiny configuration with overrides `key=value`."""

    def make(*overrides: str) -> Config:
        return load_config([*arguments, *overrides])

    return make


@pytest.fixture(scope="session")
def tiny_below(corpus: Path, store_root: Path):
    """Return a function that loads the tiny configuration of runs in a given folder, for runs that several
    tests share.
    """

    def make(runs: Path, *overrides: str) -> Config:
        return load_config(
            [
                str(ROOT / "tests" / "tiny.yaml"),
                f"data.source.paths=[{corpus}]",
                f"data.root={store_root}",
                f"runs={runs}",
                *overrides,
            ]
        )

    return make


class InlineExecutor(Executor):
    """This executor calls each function at once, as training may only be done in a process's main thread."""

    def __init__(self, jobs: int):
        self.jobs = jobs

    def submit(self, function, /, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def runs_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the `lm` commands of an experiment's runs in this process, which need not import torch again."""

    def execute(self: ChildProcesses, run: Run, command: list[str], devices: Devices | None) -> int:
        output = run.log_file()
        output.parent.mkdir(parents=True, exist_ok=True)
        result = lm(*command)
        output.write_text(result.stdout + result.stderr)
        return result.returncode

    monkeypatch.setattr("lm.experiments.trainer.ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr(ChildProcesses, "_execute", execute)


@pytest.fixture
def text_data(tmp_path: Path) -> DataConfig:
    """Return a data configuration of a few dozen short documents in files, with odd ones among them."""
    return files_config(write_texts(tmp_path / "texts", TEXTS), tmp_path)


@pytest.fixture
def report_runs(tmp_path: Path) -> list[Path]:
    """Return two run folders for a report, the second run better than the first."""
    return two_runs(tmp_path)


@pytest.fixture
def corpus_file(corpus: Path, store_root: Path, tmp_path: Path) -> Path:
    """Return a configuration file of the corpus, for models without a training run."""
    file = tmp_path / "corpus.yaml"
    file.write_text(
        f"base: {ROOT / 'tests' / 'tiny.yaml'}\ndata: {{root: {store_root}, source: {{name: files, paths: "
        f"[{corpus}]}}}}\n"
    )
    return file


@pytest.fixture(scope="session")
def large_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 400 kB, with 20 documents of 40 different words."""
    rng = np.random.default_rng(0)
    words = [rng.bytes(4).hex() for _ in range(40)]
    return write_texts(tmp_path_factory.mktemp("large"), [" ".join(rng.choice(words, 2_250)) for _ in range(20)])


def lm(*arguments: str, process: bool = False, **environment: str) -> subprocess.CompletedProcess:
    """Run `lm ARGUMENTS` in this process, which saves the start-up time, and return its result.

    process: whether a new process runs the command. Any `environment` variable implies it.
    """
    if process or environment:
        command, env = [sys.executable, "-m", "lm", *arguments], {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT, timeout=300)
    out, err, status = io.StringIO(), io.StringIO(), 0
    before = sys.argv
    sys.argv = ["lm", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code or 0
    except Exception:  # as the interpreter would show it
        traceback.print_exc(file=err)
        status = 1
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(["lm", *arguments], status, out.getvalue(), err.getvalue())


class InProcessPopen:
    """This replacement of `subprocess.Popen` calls the given `lm` command in this process."""

    def __init__(self, command: list[str], **_: object):
        self.result = lm(*command[3:])  # after python -m lm
        self.returncode: int | None = None

    def communicate(self) -> tuple[str, str]:
        self.returncode = self.result.returncode
        return self.result.stdout, self.result.stderr


SUBPROCESS_MODULE = "lm.commands.python_interface.subprocess"
IN_PROCESS_SUBPROCESS = SimpleNamespace(Popen=InProcessPopen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)


@pytest.fixture
def training_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `lm.train` train in this process."""
    monkeypatch.setattr(SUBPROCESS_MODULE, IN_PROCESS_SUBPROCESS)


PRINT_FIGURE = "matplotlib.backend_bases.FigureCanvasBase.print_figure"
ONE_PIXEL_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def write_empty_picture(
    canvas: FigureCanvasBase, file: str | Path | io.StringIO | io.BytesIO, **options: object
) -> None:
    """Write an empty SVG or a PNG of one pixel in place of a figure, as drawing takes longer than all else in
    a test.
    """
    if isinstance(file, str | Path):
        Path(file).write_bytes(ONE_PIXEL_PNG)
    else:
        file.write("<svg ></svg>" if isinstance(file, io.StringIO) else ONE_PIXEL_PNG)


@pytest.fixture(autouse=True)
def skip_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures only in tests that use the fixture `drawn_pictures`."""
    if "drawn_pictures" not in request.fixturenames:
        monkeypatch.setattr(FigureCanvasBase, "print_figure", write_empty_picture)


@pytest.fixture
def drawn_pictures() -> None:
    """Mark a test that looks at a picture, so that `skip_drawing` lets it be drawn."""


def pytest_terminal_summary(terminalreporter) -> None:
    """Print a table of resumed runs, from tests that record a property `bitwise`: [normalizer, scenario, result]."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    cells = [value for report in reports for name, value in report.user_properties if name == "bitwise"]
    if not cells:
        return
    scenarios = list(dict.fromkeys(cell[1] for cell in cells))
    terminalreporter.section("resumed runs, compared bit for bit with runs in one go")
    for number, scenario in enumerate(scenarios, 1):
        terminalreporter.write_line(f"({number}) {scenario}")
    terminalreporter.write_line(
        f"{'':<16}" + "".join(f"({number})".ljust(7) for number in range(1, len(scenarios) + 1))
    )
    for normalizer in dict.fromkeys(cell[0] for cell in cells):
        row = {cell[1]: cell[2] for cell in cells if cell[0] == normalizer}
        terminalreporter.write_line(
            f"{normalizer:<16}" + "".join(f"{row.get(scenario, '-'):<7}" for scenario in scenarios)
        )
