"""Processes of tests, forked from one that has imported what training takes: starting one costs no seconds of
imports.
"""

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

CONTEXT = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    ["lm.cli", "lm.training.starting", "lm.training.fit", "lm.data.prepare", "tokenizers"]
)


def start(arguments: list[str], *options: str) -> subprocess.Popen:
    """`lm train` as a user starts it, in a process and a session of its own; SIGABRT makes it say where it stands."""
    command = [sys.executable, "-m", "lm", "train", *arguments, *options]
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)


def forked(output: Path, function: Callable[..., object], *arguments: object) -> multiprocessing.Process:
    """`function(*arguments)` in a process and a session of its own, which prints into the file `output`."""
    process = CONTEXT.Process(target=_run, args=(dict(os.environ), output, function, arguments))
    process.start()
    return process


def command(*arguments: str) -> None:
    """`lm ARGUMENTS`; ends the process."""
    sys.argv = ["lm", *arguments]
    main()


def within(limit: int, *arguments: str) -> None:
    """`lm ARGUMENTS` where no file may grow beyond a limit in bytes, as on a full disk; ends the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    command(*arguments)


def ranks(count: int, function: Callable[..., object], *arguments: object) -> None:
    """`function(*arguments)` in so many processes that torchrun starts. Raises ChildFailedError if one of them
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
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with output.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(*arguments)
