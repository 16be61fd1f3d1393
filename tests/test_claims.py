"""Claims on runs: one holder at a time, whatever the processes and machines; and experiments that several processes work on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from lm.experiments import claims as module
from lm.experiments.claims import STALE_SECONDS, Claims


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "claims"


def left_behind(folder: Path, name: str, **changes: object) -> Path:
    """A claim whose holder did not release it, with some of what it says changed."""
    claim = Claims(folder).take(name)
    claim.path.write_text(json.dumps(claim.content | changes))
    return claim.path


def test_a_claim_is_held_by_one_until_it_is_released(folder):
    first, second = Claims(folder), Claims(folder)
    claim = first.take("1m/softmax-seed1")
    assert claim
    assert second.take("1m/softmax-seed1") is None
    assert second.holders(["1m/softmax-seed1"]) == {"1m/softmax-seed1": f"process {os.getpid()} on {os.uname().nodename}"}
    assert second.take("1m/softmax-seed10"), "another name, though it begins alike"
    first.release(claim)
    assert second.holders(["1m/softmax-seed1"]) == {}
    assert second.take("1m/softmax-seed1")
    assert first.take("1m/softmax-seed1") is None


def test_the_claim_of_a_process_of_this_machine_that_is_dead_is_stale_at_once(folder):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left_behind(folder, "run", pid=ended.pid)
    assert Claims(folder).take("run")
    left_behind(folder, "again", born="another time")  # the number is in use again, by another process
    assert Claims(folder).take("again")


def test_a_claim_that_does_not_say_when_its_process_was_born_goes_by_its_number(folder):
    left_behind(folder, "run", born="")
    assert Claims(folder).take("run") is None, "this process lives"
    left_behind(folder, "again", born="", pid=2**22 + 1)
    assert Claims(folder).take("again")


def test_a_claim_is_held_while_the_process_that_trains_for_it_lives(folder):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim = Claims(folder).take("run")
    claim.trained_by(child.pid)
    claim.path.write_text(json.dumps(claim.content | {"pid": 2**22 + 1}))  # who started it is dead
    assert Claims(folder).take("run") is None
    child.communicate()
    assert Claims(folder).take("run")


def test_a_claim_of_another_machine_is_stale_when_its_heart_has_stopped(folder):
    path = left_behind(folder, "run", host="elsewhere", pid=1)
    assert Claims(folder).take("run") is None
    assert Claims(folder).holders(["run"]) == {"run": "process 1 on elsewhere"}
    os.utime(path, (0, time.time() - STALE_SECONDS + 60))
    assert Claims(folder).take("run") is None
    os.utime(path, (0, time.time() - STALE_SECONDS - 60))
    assert Claims(folder).take("run")
    path = left_behind(folder, "later", host="elsewhere", pid=1)
    os.utime(path, (0, time.time() + STALE_SECONDS + 60))
    assert Claims(folder).take("later"), "no heartbeat has a date in the future"


def test_a_claim_that_is_just_being_written_is_held(folder):
    path = left_behind(folder, "run")
    path.write_text("")
    assert Claims(folder).take("run") is None


def test_of_two_that_find_a_stale_claim_one_takes_it(folder, monkeypatch):
    left_behind(folder, "run", pid=2**22 + 1)
    first, second = Claims(folder), Claims(folder)
    found = second._last("run")
    taken = first.take("run")
    monkeypatch.setattr(second, "_last", lambda name: found)  # it looked before the first created its own
    assert taken
    assert second.take("run") is None


def test_a_holder_whose_claim_was_taken_over_hears_of_it(folder, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    lost = []
    claims = Claims(folder)
    claim = claims.take("run", lambda: lost.append("run"))
    before = claim.path.stat().st_mtime
    assert comes_true(lambda: claim.path.stat().st_mtime > before), "its heart beats"
    assert not claim.lost
    (folder / "run.2").write_text("{}")
    assert comes_true(lambda: claim.lost)
    assert lost == ["run"]


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does, within a minute."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


WORKER = """
import fcntl, json, sys, time
fcntl.flock = lambda *arguments: None  # a file system without locks
sys.path.insert(0, "tests")
from pathlib import Path
from fabricated import finish
from lm.experiments import jobs
from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure
from lm.experiments.slots import Slots
from lm.experiments.summary import summary
file, seconds = Path(sys.argv[1]), float(sys.argv[2])
jobs.POLL_SECONDS = 0.05
procedure = Procedure(read_experiment(file, [f"runs={file.parent / 'runs'}", "data.source.paths=[.]"]))
def launch(run):
    with (file.parent / "launched").open("a") as log:
        print(run.config.name, file=log, flush=True)
    time.sleep(seconds)
    finish(run, 5 + abs(run.rate - 0.02) + 0.001 * run.seed)
    return 0
jobs.Jobs(procedure, Slots(2), launch).work()
print(json.dumps(summary(procedure)))
"""


def test_processes_without_file_locks_share_an_experiment_and_a_killed_one_s_runs_are_taken_over(tmp_path):
    file, launched = tmp_path / "trial.yaml", tmp_path / "launched"
    arms = {name: {"model.normalizer": name} for name in ("softmax", "ssmax", "log_n")}
    tune, base = {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]}, str(ROOT / "tests" / "tiny.yaml")
    file.write_text(json.dumps({"base": base, "arms": arms, "seeds": [1, 2, 3], "tune": tune}))

    def worker(seconds: float) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", WORKER, str(file), str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT)

    killed = worker(1000)
    assert comes_true(lambda: launched.exists() and len(launched.read_text().split()) == 2)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    lost = launched.read_text().split()
    launched.unlink()
    both = [worker(0.02), worker(0.02)]
    said = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    runs = launched.read_text().split()
    assert len(runs) == len(set(runs)), "none is trained twice"
    assert len(runs) == 3 * (3 * 2 + 3), "and none is lost"
    assert set(lost) < set(runs)
    judged = [json.loads(text.splitlines()[-1]) for text in said]
    assert judged[0] == judged[1]
    assert [line["runs"] for line in judged[0]] == [3, 3, 3]
