"""One `lm compare` at a time works on an experiment; in the jobs of a cluster, or as commands for a scheduler of one's
own.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, lm
from fabricated import finish_run
from trials import write_experiment
from waiting import wait_until

from lm.errors import ConfigError, RunError
from lm.experiments import trainer
from lm.experiments.compare import experiment_lock, open_experiment, start_experiment
from lm.experiments.definition import read_experiment
from lm.experiments.trainer import Cluster, TrainingJob
from lm.files import read_json, write_json

INSTALLED = pytest.mark.skipif(find_spec("submitit") is None, reason="without submitit")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experiment(tmp_path, tune=None)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch) -> Path:
    """A SLURM that takes every script; the last one that it took."""
    programs, script = tmp_path / "programs", tmp_path / "script"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        (programs / name).write_text(f'#!/bin/sh\ncp "$1" {script}\necho Submitted batch job 42\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return script


@INSTALLED
def test_slurm_gets_jobs_that_are_told_of_their_end(tmp_path, scheduler):
    options = "partition=gpu,timeout_min=240,gpus_per_node=1,signal_delay_s=120"
    assert Cluster(tmp_path, options, "slurm").submit(Path.cwd).job_id == "42"
    lines = scheduler.read_text().splitlines()
    directives = ("partition=gpu", "time=240", "gpus-per-node=1", "signal=USR2@120", "job-name=lm", "open-mode=append")
    assert {f"#SBATCH --{directive}" for directive in directives} <= {*lines}


@INSTALLED
def test_what_is_missing_or_wrong_is_said_in_one_line(tmp_path, scheduler, monkeypatch):
    with pytest.raises(ConfigError, match="--job-options partition: must be KEY=VALUE,KEY=VALUE"):
        Cluster(tmp_path, "partition", "slurm")
    with pytest.raises(ConfigError, match=r"--job-options partitoin=gpu: .*partitoin") as error:
        Cluster(tmp_path, "partitoin=gpu", "slurm")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match=r"--submit slurm: .*srun"):
        Cluster(tmp_path, "", "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(RunError, match=r"submitit, which is not installed: pip install 'submitit>=1.5.4'"):
        Cluster(tmp_path, "", "slurm")


@INSTALLED
def test_a_job_lets_its_run_save_and_is_the_same_when_it_is_started_again(file, arguments, tmp_path, monkeypatch):
    program, marker = tmp_path / "program", tmp_path / "saved"
    program.write_text(
        f"#!/bin/sh\ntrap 'sleep 0.2; touch {marker}; exit 143' TERM\ntouch {tmp_path / 'ready'}\nwhile :; do sleep "
        "0.05; done\n"
    )
    program.chmod(0o755)
    procedure = start_experiment(read_experiment(file, arguments[1:]))
    monkeypatch.setattr(trainer.sys, "executable", str(program))
    monkeypatch.setattr("submitit.JobEnvironment", lambda: SimpleNamespace(job_id="7", global_rank=0))
    run = procedure.known_runs()[0]
    write_json(run.log_file("job.json"), {"engine": "slurm", "id": "7", "born": ""})
    job, resubmitted = TrainingJob(run), []

    def requeue(number: int, frame: object) -> None:
        resubmitted.append(job.checkpoint())
        assert marker.exists(), "it has ended"

    def announce() -> None:
        wait_until((tmp_path / "ready").exists, tmp_path)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        threading.Thread(target=announce).start()
        assert job()[0] == 143
    finally:
        signal.signal(signal.SIGUSR2, before)
    (delayed,) = resubmitted
    assert delayed.function.run == job.run


def test_runs_that_jobs_train_are_left_to_them(file, arguments):
    procedure = start_experiment(read_experiment(file, arguments[1:]))
    path = procedure.known_runs()[1].log_file("job.json")
    write_json(path, {"engine": "slurm", "id": "42", "born": ""})
    remedy = "add --submit slurm to wait for it, or delete this file once the job is gone"
    for options in ([], ["--commands"]):
        result = lm("compare", str(file), *arguments[1:], *options)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (
            1,
            f"error: {path}: job 42 of slurm trains this run; {remedy}",
        )
    finish_run(procedure.known_runs()[1], 5.0)
    assert len(lm("compare", str(file), *arguments[1:], "--commands").stdout.splitlines()) == 3
    assert not path.exists(), "its run has ended"


def test_a_second_compare_is_told_who_works_on_the_experiment(file, arguments):
    folder = start_experiment(read_experiment(file, arguments[1:])).experiment.folder
    with experiment_lock(folder):
        result = lm("compare", str(file), *arguments[1:])
        message = "another lm compare works on it; --report-only and --plan show how far it is"
        assert (result.returncode, result.stderr) == (1, f"error: {folder}: {message}\n")
        assert "no run of this file" in lm("compare", str(file), *arguments[1:], "--report-only").stderr
        assert lm("compare", str(file), *arguments[1:], "--plan").returncode == 0
        assert len(lm("compare", str(file), *arguments[1:], "--commands").stdout.splitlines()) == 4
    with experiment_lock(folder):
        pass


def test_what_fails_before_anything_is_trained_leaves_no_lock_and_no_folder(file, arguments, tmp_path):
    result = lm("compare", str(file), *arguments[1:], "data.source.paths=[/nowhere]")
    assert result.returncode
    assert not (tmp_path / "runs" / "trial").exists()


def test_commands_are_printed_of_the_runs_that_nobody_works_on(file, arguments):
    procedure = start_experiment(read_experiment(file, arguments[1:]))
    runs = procedure.known_runs()
    finish_run(runs[0], 5.0)
    lines = lm("compare", str(file), *arguments[1:], "--commands").stdout.splitlines()
    files = [shlex.split(line)[shlex.split(line).index("train") + 1] for line in lines]
    assert [Path(path).stem for path in files] == [run.config.name for run in runs[1:]]
    assert all(Path(path).exists() for path in files)


def test_ways_to_work_exclude_each_other(file):
    result = lm("compare", str(file), "--plan", "--commands")
    assert (result.returncode, result.stderr.strip()) == (2, "error: --plan and --commands exclude each other")
    for option, value, mode in (("--workers", ["4"], "--submit"), ("--json", [], "--report-only")):
        result = lm("compare", str(file), option, *value)
        assert (result.returncode, result.stderr.strip()) == (2, f"error: {option} goes with {mode}")


@INSTALLED
@pytest.mark.slow  # 2 min
def test_a_killed_compare_finds_its_jobs_again_and_none_is_trained_twice(file, arguments, tmp_path):
    folder = tmp_path / "runs" / "trial"
    command = [sys.executable, "-m", "lm", "compare", str(file), *arguments[1:], "--submit", "local", "--workers", "2"]
    first = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: len(list((folder / "logs").glob("*.job.json"))) == 2, tmp_path)
    first.kill()
    first.wait()
    second = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: "final: " in (second.stdout.readline() or "final: "), tmp_path)  # it waits for its jobs
    second.terminate()
    assert second.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM)
    third = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert third.returncode == 0, third.stderr
    assert (folder / "verdicts.json").exists()
    runs = open_experiment(read_experiment(file, arguments[1:])).known_runs()
    assert [run.outcome.has_ended for run in runs] == [True] * 4
    assert [len(read_json(run.config.run_folder / "environment.json")["starts"]) for run in runs] == [1] * 4, (
        "none is trained twice"
    )


SBATCH = """
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
nodes, tasks = (int(re.search(rf"#SBATCH --{name}=(\\d+)", text)[1]) for name in ("nodes", "ntasks-per-node"))
folder = os.path.dirname(sys.argv[0])
job = 10_000 + int.from_bytes(os.urandom(2), "big") % 9_000
counts = {"JOB_ID": job, "NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": nodes * tasks, "NTASKS_PER_NODE": tasks}
counts["JOB_NODELIST"] = "127.0.0.1"
environment = os.environ | {f"SLURM_{name}": str(count) for name, count in counts.items()}
subprocess.Popen(["bash", "-c", text], env=environment, stdout=open(f"{folder}/{job}", "w"), stderr=subprocess.STDOUT)
print("Submitted batch job", job)
"""
SRUN = """
import os, subprocess, sys
command = sys.argv[sys.argv.index("-u") - 1 :]
nodes, tasks = (int(os.environ[f"SLURM_{name}"]) for name in ("NNODES", "NTASKS_PER_NODE"))
processes = []
for rank in range(nodes * tasks):
    ids = {"PROCID": rank, "NODEID": rank // tasks, "LOCALID": rank % tasks, "STEP_NUM_TASKS": nodes * tasks}
    environment = os.environ | {f"SLURM_{name}": str(number) for name, number in ids.items()}
    processes.append(subprocess.Popen(command, env=environment))
for process in processes:
    process.wait()
"""


@INSTALLED
@pytest.mark.slow  # 1 min
def test_a_run_on_several_nodes_is_one_job_of_a_task_for_each_device(file, arguments, tmp_path, scheduler):
    """Programs in place of SLURM's start a process for each task, as on two machines."""
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (scheduler.parent / "programs" / name).write_text(f"#!{sys.executable}{text}")
    arms = {"softmax": {}, "swapped": {"from": "softmax", "swap": {"to": "ssmax"}}}
    changes = {"arms": arms, "seeds": [1], "evaluate": {"eval.sequences": 8}}
    command = ["compare", str(write_experiment(tmp_path, tune=None, **changes)), *arguments[1:], "trainer.num_nodes=2"]
    result = lm(*command, "--submit", "slurm", process=True)
    assert result.returncode == 0, result.stderr
    softmax, swapped = open_experiment(read_experiment(file, [*arguments[1:], "trainer.num_nodes=2"])).known_runs()
    for run in (softmax, swapped):
        assert run.outcome.state == "finished"
        (begun,) = read_json(run.config.run_folder / "environment.json")["starts"]
        assert begun["world_size"] == 2, begun
