"""Start processes in tests. Most are forked from one that has imported what training takes, which saves seconds."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

from conftest import ROOT
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lm.cli import main

FORKSERVER = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    ["lm.cli", "lm.training.phase_start", "lm.training.fit", "lm.data.prepare", "tokenizers"]
)


def start_training(arguments: list[str], *options: str) -> subprocess.Popen:
    """Start `lm train` as a user does, in a process and a session of its own. SIGABRT makes it print its stack."""
    command = [sys.executable, "-m", "lm", "train", *arguments, *options]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)


def start_forked(output: Path, function: Callable[..., object], *arguments: object) -> multiprocessing.Process:
    """Start a process that calls `function(*arguments)` in a session of its own and prints to the file `output`."""
    process = FORKSERVER.Process(target=_run, args=(dict(os.environ), output, function, arguments))
    process.start()
    return process


def run_command(*arguments: str) -> None:
    """Run `lm ARGUMENTS` and end the process."""
    sys.argv = ["lm", *arguments]
    main()


def run_with_file_limit(limit: int, *arguments: str) -> None:
    """Run `lm ARGUMENTS` with a limit in bytes on the size of files, as on a full disk, and end the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_command(*arguments)


def run_ranks(count: int, function: Callable[..., object], *arguments: object) -> None:
    """Call `function(*arguments)` in `count` processes that torchrun starts. Raises ChildFailedError: one of them
    fails.
    """
    rendezvous = {"run_id": "test", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, count, **rendezvous, max_restarts=0, monitor_interval=0.1, start_method="forkserver")
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        elastic_launch(config, function)(*arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    environment: dict[str, str], output: Path, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Call a function in a forked process, with the given environment and output file."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with output.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(*arguments)
