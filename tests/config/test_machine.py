"""What a process may use of its machine, and what it has used."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from folders import is_group_alive

import lm
from lm.machine import start_child, threads_per_process, usable_cores


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 4})
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert usable_cores() == 3
    for variable, cores in (("2", 2), ("8", 3), ("", 3), ("0", 1)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", variable)
        assert usable_cores() == cores


@pytest.mark.parametrize(
    ("given", "processes", "threads"),
    [("", 1, 6), ("", 4, 1), ("4", 1, 4), ("4", 2, 3), ("1", 1, 1), ("4,2", 1, 4), ("0", 1, 1)],
)
def test_threads_are_a_share_of_the_cores_and_no_more_than_the_user_says(
    given: str, processes: int, threads: int, monkeypatch
):
    monkeypatch.setattr("lm.machine.usable_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_per_process(processes) == threads


CHILD = """
import time
from lm.machine import stop_with_parent
stop_with_parent()
print("started", flush=True)
time.sleep(60)
"""
PARENT = """
import os, signal, subprocess, sys
from lm.machine import start_child
child = start_child([sys.executable, "-c", sys.argv[1]], subprocess.PIPE, None)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a child of its parent's end")
def test_a_child_is_stopped_when_its_parent_is_killed_before_or_after_it_begins():
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE)
    child = int(process.communicate()[0])
    assert process.returncode == -signal.SIGKILL
    assert not is_group_alive(child)
    orphan = subprocess.run(
        [sys.executable, "-m", "lm", "normalizers"], env={**os.environ, "LM_PARENT": "1"}, cwd=ROOT, check=False
    )
    assert orphan.returncode == 128 + signal.SIGTERM
    print_environment = (
        "from lm.machine import stop_with_parent; stop_with_parent(); import os; print('LM_PARENT' in os.environ)"
    )
    command = [sys.executable, "-c", print_environment]
    assert start_child(command, subprocess.PIPE, None).communicate()[0] == b"False\n"


INHERITED = """
import signal, subprocess, sys
from lm.machine import block_stop_signals
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
child = "import signal; from lm.machine import unblock_stop_signals; masks = [signal.pthread_sigmask(0, [])]; "
child += "unblock_stop_signals(); masks.append(signal.pthread_sigmask(0, [])); print(*map(len, masks), *masks[1])"
block_stop_signals()
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_process_unblocks_the_signals_that_were_blocked_for_its_start_alone():
    result = subprocess.run([sys.executable, "-c", INHERITED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["5", "1", str(int(signal.SIGHUP))]


def test_a_child_finds_the_package_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    """From the folder that holds a clone `lm`, a child imports the package, not the folder."""
    (tmp_path / "lm").mkdir()
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import lm.machine; print(lm.__version__)"]
    assert start_child(command, subprocess.PIPE, None, text=True).communicate()[0] == f"{lm.__version__}\n"
