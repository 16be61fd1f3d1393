"""Wait for other processes as long as they make progress, however busy the machine is."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

IDLE_SECONDS = 600.0  # without a change below a folder, after which nothing is waited for any more


def wait_until(condition: Callable[[], bool], folder: Path) -> None:
    """Wait until a condition holds. The test fails if nothing changes below `folder` for `IDLE_SECONDS`."""
    before, changed_at = None, time.monotonic()
    while not condition():
        state = _state(folder)
        if state != before:
            before, changed_at = state, time.monotonic()
        elif time.monotonic() - changed_at > IDLE_SECONDS:
            pytest.fail(f"nothing has happened in {folder} for {IDLE_SECONDS:.0f} s")
        time.sleep(0.05)


def _state(folder: Path) -> dict[str, tuple[float, int]]:
    """Return the modification time and size of every file below a folder."""
    states = {}
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        states[str(path)] = status.st_mtime, status.st_size
    return states
