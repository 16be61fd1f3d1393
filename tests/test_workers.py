"""Experiments in the jobs of a cluster, and as commands for a scheduler of one's own."""

import os
import shlex
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, lm
from fabricated import finish
from trials import written
from waiting import wait_until

from lm.errors import ConfigError, RunError
from lm.experiments import workers
from lm.experiments.opening import open_experiment, start
from lm.experiments.workers import Worker, read_options, submit
from lm.runs.folder import read_json, write_json

INSTALLED = pytest.mark.skipif(find_spec("submitit") is None, reason="without submitit")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path, tune=None)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch) -> Path:
    """A SLURM that takes every script; the last one that it took."""
    programs, script = tmp_path / "programs", tmp_path / "script"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        (programs / name).write_text(f'#!/bin/sh\ncp "$1" {script}\necho Submitted batch job 42\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.delenv("SUBMITIT_PREEMPT_SIGNAL", raising=False)
    for name in [one for one in sys.modules if one.partition(".")[0] == "submitit"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable when it is imported
    return script


@INSTALLED
def test_slurm_gets_jobs_that_are_told_of_their_end(tmp_path, scheduler):
    options = read_options("partition=gpu,timeout_min=240,gpus_per_node=1,signal_delay_s=120")
    assert submit(["trial.yaml"], 3, tmp_path / "jobs", options, "slurm") == ["42_0", "42_1", "42_2"]
    lines = scheduler.read_text().splitlines()
    wanted = ("partition=gpu", "time=240", "gpus-per-node=1", "signal=USR1@120", "array=0-2%3", "job-name=lm", "open-mode=append")
    assert {f"#SBATCH --{one}" for one in wanted} <= {*lines}
    assert "export SUBMITIT_PREEMPT_SIGNAL=USR1" in lines


@INSTALLED
def test_what_is_missing_or_wrong_is_said_in_one_line(tmp_path, scheduler, monkeypatch):
    with pytest.raises(ConfigError, match="--job-options partition: must be KEY=VALUE,KEY=VALUE"):
        read_options("partition")
    with pytest.raises(ConfigError, match=r"--job-options partitoin=gpu: .*partitoin") as error:
        submit([], 1, tmp_path / "jobs", {"partitoin": "gpu"}, "slurm")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"--submit slurm: .*srun"):
        submit([], 1, tmp_path / "jobs", {}, "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RunError, match=r"submitit, which is not installed: pip install 'submitit>=1.5'"):
        submit([], 1, tmp_path / "jobs", {}, "slurm")


@INSTALLED
def test_a_worker_lets_its_process_save_and_is_the_same_when_it_is_started_again(tmp_path, monkeypatch):
    program, saved = tmp_path / "program", tmp_path / "saved"
    program.write_text(
        f"#!/bin/sh\ntrap 'sleep 0.2; touch {saved}; exit 138' USR1\ntouch {tmp_path / 'ready'}\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(workers.sys, "executable", str(program))
    worker, again = Worker(["trial.yaml"], str(tmp_path)), []

    def requeue(number: int, frame: object) -> None:
        again.append(worker.checkpoint())
        assert saved.exists(), "it has ended"

    def announce() -> None:
        while worker._process is None or not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        threading.Thread(target=announce).start()
        with pytest.raises(RunError, match="lm compare ended with status 138"):
            worker()
    finally:
        signal.signal(signal.SIGUSR2, before)
    (delayed,) = again
    assert delayed.function.arguments == ["trial.yaml"]
    assert delayed.function.folder == str(tmp_path)


def test_commands_are_printed_of_the_runs_that_nobody_works_on(file, arguments):
    procedure = start(file, arguments[1:])
    runs = procedure.known()
    finish(runs[0], 5.0)
    printed = lm("compare", str(file), *arguments[1:], "--commands").stdout.splitlines()
    files = [shlex.split(line)[shlex.split(line).index("train") + 1] for line in printed]
    assert [Path(one).stem for one in files] == [run.config.name for run in runs[1:]]
    assert all(Path(one).exists() for one in files)


def test_ways_to_work_exclude_each_other(file):
    result = lm("compare", str(file), "--plan", "--commands")
    assert (result.returncode, result.stderr.strip()) == (2, "error: --plan and --commands exclude each other")


@INSTALLED
@pytest.mark.slow  # a minute
def test_jobs_of_this_machine_train_an_experiment(file, arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")  # set by --submit: unset again
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "runs" / "trial"
    folder.mkdir(parents=True)
    write_json(folder / "pilot.json", {"jobs": 1, "seconds": {"softmax": 5.0, "ssmax": 5.0}})
    result = lm("compare", str(file), *arguments[1:], "--submit", "local", "--workers", "2")
    assert result.stdout.splitlines()[-1].startswith("submitted: "), result.stderr
    wait_until((folder / "verdicts.json").exists, tmp_path)
    runs = open_experiment(file, arguments[1:]).known()
    assert [run.outcome.ended for run in runs] == [True] * 4
    assert [len(read_json(run.config.run_folder / "environment.json")["starts"]) for run in runs] == [1] * 4, "none is trained twice"
