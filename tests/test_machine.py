"""What a process may use of its machine, and what it has used."""

import subprocess
import sys

import pytest
from conftest import ROOT

from lm.machine import threads_each, usable_cores


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 4})
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert usable_cores() == 3
    for given, cores in (("2", 2), ("8", 3), ("", 3), ("0", 1)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
        assert usable_cores() == cores


@pytest.mark.parametrize(
    ("given", "processes", "threads"), [("", 1, 6), ("", 4, 1), ("4", 1, 4), ("4", 2, 3), ("1", 1, 1), ("4,2", 1, 4), ("0", 1, 1)]
)
def test_threads_are_a_share_of_the_cores_and_no_more_than_the_user_says(given: str, processes: int, threads: int, monkeypatch):
    monkeypatch.setattr("lm.machine.usable_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_each(processes) == threads


def test_the_peak_of_memory_is_the_process_s_own():
    """In a process that has not yet had more, and that a larger one forks."""
    held = bytearray(b"x" * 2**27)
    code = "from lm.machine import peak_process_bytes as peak; print(peak()); held = b'x' * 2**26; print(peak())"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, preexec_fn=int)
    del held
    before, after = map(int, child.stdout.split())
    assert 2**22 < before < 2**26, "not that of the process that forked it"
    assert 0.9 * 2**26 < after - before < 1.5 * 2**26
