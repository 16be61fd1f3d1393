"""Runs of experiments in processes of their own: started, stopped, killed, and gone on with."""

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT
from fabricated import finish_run, trainer_that_calls
from folders import checkpoint_weights, equal_tensors, last_checkpoint, metric_lines
from trials import write_experiment
from waiting import wait_until

from lm.errors import RunError
from lm.experiments.definition import read_experiment
from lm.experiments.procedure import Procedure, forget_failures, read_failure
from lm.experiments.trainer import ExperimentTrainer, TrainingStopped
from lm.files import read_json
from lm.machine import process_start_time
from lm.runs.folder import read_metrics
from lm.training.train import train


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experiment(tmp_path, tune=None)


@pytest.fixture
def overrides(arguments: list[str]) -> list[str]:
    """Runs of seconds, with a checkpoint often."""
    return [
        *arguments[1:],
        "trainer.max_steps=60",
        "trainer.checkpoint_every=5",
        "eval.every=60",
        "optim.batch_tokens=512",
    ]


def with_one_run_left(file: Path, overrides: list[str]) -> Procedure:
    """An experiment all runs of which but the first are finished."""
    procedure = Procedure(read_experiment(file, overrides))
    for run in procedure.known_runs()[1:]:
        finish_run(run, 5.0)
    return procedure


@pytest.mark.parametrize("status", [-signal.SIGTERM, -signal.SIGSEGV, 128 + signal.SIGTERM, 128 + signal.SIGUSR2])
def test_a_run_that_a_signal_ended_has_not_failed_however_often(file, overrides, status):
    procedure = with_one_run_left(file, overrides)
    for _ in range(3):
        with pytest.raises(RunError, match=r"the same command goes on"):
            trainer_that_calls(procedure, lambda _: int(status)).train_all()
    with pytest.raises(RunError, match=r"--retry tries others again"):
        trainer_that_calls(procedure, lambda _: 1).train_all()
    assert read_failure(procedure.known_runs()[0]).reason == "no output"
    forget_failures(procedure)
    trainer_that_calls(procedure, lambda run: finish_run(run, 5.0) or 0).train_all()
    assert not list((procedure.experiment.folder / "logs").glob("*.failed.json"))


@pytest.mark.slow  # 10 s
def test_a_stopped_experiment_saves_its_runs(file, overrides):
    procedure = with_one_run_left(file, [*overrides, "trainer.max_steps=3000", "trainer.checkpoint_every=500"])
    folder = procedure.known_runs()[0].config.run_folder

    def stop() -> None:
        wait_until(lambda: logged_steps(folder) >= 3, folder.parent)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(
        TrainingStopped, match=r"stopped by SIGTERM: runs that saved and ended: 1; the same command goes on"
    ) as error:
        ExperimentTrainer(procedure, [()]).train_all()
    stopper.join()
    assert error.value.exit_code == 128 + signal.SIGTERM
    assert (last_checkpoint(folder)).exists()


WORK = """
import sys
from pathlib import Path
from lm.experiments.compare import start_experiment
from lm.experiments.definition import read_experiment
from lm.experiments.trainer import ExperimentTrainer
ExperimentTrainer(start_experiment(read_experiment(Path(sys.argv[1]), sys.argv[2:]), 2), [(), ()]).train_all()
"""


def at_work(folder: Path) -> dict[Path, int]:
    """The processes that train now, by run folder, as their command lines say."""
    processes = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            file = Path(words[words.index("train") + 1]) if "train" in words else process
            if file.parent == folder / "logs" and process_start_time(int(process.name)):
                processes[folder / file.stem] = int(process.name)
    return processes


def logged_steps(folder: Path) -> int:
    """The last step in a run's log."""
    return next((line["step"] for line in reversed(read_metrics(folder))), 0)


@pytest.mark.slow  # 2 min
def test_killed_at_random_the_same_work_ends_with_the_same_numbers(file, overrides, tmp_path):
    rng, kills, first_starts = random.Random(0), {"experiment": 0, "run": 0}, {}
    undisturbed = Procedure(read_experiment(file, [*overrides, f"runs={tmp_path / 'undisturbed'}"]))
    for run in undisturbed.known_runs():
        assert train(run.config) == 0
    own_overrides = [*overrides, f"runs={tmp_path / 'killed'}"]
    killed = Procedure(read_experiment(file, own_overrides))
    folder = killed.experiment.folder

    def work() -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", WORK, str(file), *own_overrides], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    def moment(process: subprocess.Popen) -> tuple[Path, int] | None:
        """A run and its process at a random moment from its start to its end; None if the work has ended before it."""
        while process.poll() is None:
            wait_until(lambda: at_work(folder) or process.poll() is not None, tmp_path)
            run, child = rng.choice(sorted(at_work(folder).items()) or [(None, 0)])
            step = rng.randint(0, 60)  # 0: while it starts; 60: while it measures and saves
            if run:
                wait_until(
                    lambda run=run, child=child, step=step: (
                        logged_steps(run) >= step or at_work(folder).get(run) != child
                    ),
                    tmp_path,
                )
                if at_work(folder).get(run) == child:
                    return run, child
        return None

    def starts() -> dict[Path, list[int]]:
        """The steps at which each run has been started."""
        files = {run: run / "environment.json" for run in (run.config.run_folder for run in killed.known_runs())}
        return {
            run: [start["step"] for start in read_json(path)["starts"]] for run, path in files.items() if path.exists()
        }

    for _ in range(3):
        process = work()
        for _ in range(2):
            if place := moment(process):
                os.kill(place[1], signal.SIGKILL)
                kills["run"] += 1
        if moment(process):
            process.kill()
            kills["experiment"] += 1
        process.wait()
        ended_folders = [
            run.config.run_folder for run in Procedure(killed.experiment).known_runs() if run.outcome.has_ended
        ]
        first_starts |= {
            run: steps for run, steps in starts().items() if run in ended_folders and run not in first_starts
        }
    process = work()
    wait_until(lambda: process.poll() is not None, tmp_path)
    assert process.returncode == 0
    assert sum(kills.values()) >= 6, kills
    assert min(kills.values()) >= 2, kills
    at_the_end = starts()
    assert all(at_the_end[run] == steps for run, steps in first_starts.items()), "what has ended is not started again"
    assert all(steps == sorted(steps) for steps in at_the_end.values()), "each start goes on"
    assert [run.outcome.state for run in Procedure(killed.experiment).known_runs()] == ["finished"] * 4
    for killed_run, undisturbed_run in zip(
        Procedure(killed.experiment).known_runs(), undisturbed.known_runs(), strict=True
    ):
        assert metrics_but_times(killed_run.config.run_folder) == metrics_but_times(undisturbed_run.config.run_folder)
        assert equal_tensors(
            checkpoint_weights(killed_run.config.run_folder), checkpoint_weights(undisturbed_run.config.run_folder)
        )
    assert (
        Procedure(killed.experiment).judgement().summary_rows()
        == Procedure(undisturbed.experiment).judgement().summary_rows()
    )


def metrics_but_times(folder: Path) -> list[dict]:
    """A run's log without what the machine decides; a measurement that a kill made the run repeat stands there once."""
    machine_names = ("tokens_per_s", "elapsed_s", "peak_memory_bytes")
    lines = [
        {name: value for name, value in line.items() if name not in machine_names} for line in metric_lines(folder)
    ]
    return [line for number, line in enumerate(lines) if line not in lines[:number]]
