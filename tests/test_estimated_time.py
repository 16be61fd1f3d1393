"""How long experiments take, by ended runs or by a pilot."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT
from fabricated import finish, finish_all
from jobs import compare_with
from processes import forked
from trials import written
from waiting import wait_until

from lm.errors import ConfigError, RunError
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import start
from lm.experiments.plan import _time_configurations, costs, plan_lines, run_times, total_seconds
from lm.experiments.procedure import Procedure
from lm.experiments.slots import Slots
from lm.files import write_json
from lm.machine import process_start
from lm.training.pilot import pilot
from lm.training.train import train

FILE = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2, 3],
}


def experiment(folder: Path, name: str = "trial", **changes: object) -> Procedure:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
    return Procedure(read_experiment(path, ["data.source.paths=[.]", f"runs={folder / 'runs'}"]))


def took(procedure: Procedure, seconds: float, begin: float, step: int = 0) -> None:
    """Let the finished runs of an experiment have taken so long since their start at a step, and each step 5 s."""
    for run in procedure.known_runs():
        if run.outcome.ended:
            begun = [(0, begin - 1e6)] * bool(step) + [(step, begin)]
            starts = [
                {"step": step_of_start, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))}
                for step_of_start, moment in begun
            ]
            write_json(run.config.run_folder / "environment.json", {"starts": starts})
            logged = [
                json.dumps({"step": step_of_line, "elapsed_s": 5.0 * step_of_line})
                for step_of_line in range(1, run.outcome.last_step + 1)
            ]
            (log := run.config.run_folder / "metrics.jsonl").write_text("\n".join(logged) + "\n")
            os.utime(log, (begin + seconds, begin + seconds))


def test_time_is_that_of_the_runs_that_have_ended(tmp_path):
    procedure = experiment(tmp_path, sizes={"small": {}, "large": {"trainer.max_steps": 16}})
    for run in procedure.known_runs():
        if run.size == "small" and run.arm == "softmax":
            finish(run, 5.0)
    procedure = Procedure(procedure.experiment)
    took(procedure, 60, 1e9)
    times, source = run_times(procedure, costs(procedure), Slots(2))
    assert source == "the runs that have ended"
    assert times["small", "softmax"] == pytest.approx(60)
    assert times["small", "ssmax"] == pytest.approx(60, rel=0.01), "by FLOPs"
    assert times["large", "softmax"] == pytest.approx(120, rel=0.01)
    assert total_seconds(procedure, times, Slots(2)) == pytest.approx((3 * 60 + 6 * 120) / 2, rel=0.01), (
        "three are done"
    )
    for step in (2, 7, 8):
        took(procedure, 60 - 5 * step, 1e9, step)
        seconds_of_run = run_times(procedure, costs(procedure), Slots(2))[0]["small", "softmax"]
        assert seconds_of_run == pytest.approx(60), (
            f"20 s of start and evaluations, and 5 s a step, {step} of eight of which were made before"
        )


def test_a_pilot_of_a_branch_counts_the_steps_that_are_left(tiny, monkeypatch):
    assert train(tiny("name=long")) == 0
    folder = tiny("name=long").run_folder
    monkeypatch.setattr("lm.training.pilot.train", lambda _: None)
    monkeypatch.setattr("lm.training.pilot.read_metrics", lambda _: SimpleNamespace(lines=[{"elapsed_s": 0.0}]))
    monkeypatch.setattr("lm.training.pilot.step_seconds", lambda _: 1.0)
    sources = [
        folder,
        folder / "checkpoints" / "last.ckpt",
        folder / "checkpoints" / "step-000008.ckpt",
        "elsewhere/step-000008.ckpt",
    ]
    times = [
        pilot(tiny(f"branch_from={source}", "trainer.max_steps=1008", "eval.every=1000"))["seconds"]
        for source in sources
    ]
    assert times == pytest.approx([1000] * 4, abs=1)


@pytest.mark.slow  # 10 s
def test_a_pilot_says_how_long_a_run_takes(tiny, monkeypatch):
    monkeypatch.setattr("time.perf_counter", time.process_time)  # whatever else the machine does
    config = tiny(
        "trainer.max_steps=300",
        "eval.every=100",
        "trainer.checkpoint_every=300",
        "optim.batch_tokens=2048",
        "model.n_embd=64",
    )
    train(
        replace(config, name="warm-up", trainer=replace(config.trainer, max_steps=4))
    )  # what only the first run in a process takes
    seconds = pilot(replace(config, name="pilot"))["seconds"]
    begin = time.process_time()
    assert train(config) == 0
    assert seconds == pytest.approx(time.process_time() - begin, rel=0.4)


@pytest.mark.slow  # 10 s
def test_a_pilot_times_every_arm_in_processes_and_is_kept(tmp_path, arguments, monkeypatch):
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(FILE))
    procedure = start(path, arguments[1:], 2)
    times, source = run_times(procedure, costs(procedure), Slots(2))
    assert source == "a pilot of some steps of each arm, 2 at a time"
    assert times.keys() == {("", "softmax"), ("", "ssmax")}
    assert min(times.values()) > 0
    assert [
        path.name for path in procedure.experiment.folder.iterdir() if path.name not in ("resolved.json", "pilot.json")
    ] == []
    monkeypatch.setattr("lm.experiments.plan._time_configurations", lambda *_: pytest.fail("timed again"))
    assert run_times(procedure, costs(procedure), Slots(2))[0] == times


PILOT = """
import json, pathlib, sys, time
print(json.dumps({"begun": time.time()}), flush=True)
for path in map(pathlib.Path, sys.argv[1:]):
    log = path.with_suffix("") / "metrics.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"step": step, "elapsed_s": 2.0 * step}) + chr(10) for step in range(1, 6)))
    if "slow" in path.stem:
        time.sleep(600)
    print(json.dumps({"seconds": 60.0}), flush=True)
"""


@pytest.fixture
def pilots(tmp_path, monkeypatch) -> list[str]:
    """The arms that are timed, by a program that says 60 s at once, and of arms called slow nothing but five steps of 2
    s.
    """
    (tmp_path / "program.py").write_text(PILOT)
    monkeypatch.setattr("lm.experiments.plan.PILOT_COMMAND", [sys.executable, str(tmp_path / "program.py")])
    monkeypatch.setattr("lm.experiments.plan.open_prepared", lambda _: None)
    pilot_configs, timed = [], _time_configurations
    monkeypatch.setattr(
        "lm.experiments.plan._time_configurations",
        lambda configs, *arguments: pilot_configs.extend(configs) or timed(configs, *arguments),
    )
    return pilot_configs


@pytest.mark.slow  # 20 s
def test_a_pilot_of_runs_on_two_devices_times_one_of_them(tmp_path, tiny):
    configs = {name: tiny("trainer.devices=2", f"optim.lr={rate}") for name, rate in (("slow", 1e-3), ("fast", 1e-2))}
    whole_runs, step_times = _time_configurations(configs, tmp_path / "pilot.json", [()], 300.0)
    assert (whole_runs.keys(), step_times) == ({"slow"}, {})


def test_only_what_time_depends_on_is_timed_again(tmp_path, pilots):
    arms = {"softmax": {}, "rate": {"optim.lr": 2e-3}}
    arms |= {
        name: {"model.normalizer": {"name": "ssmax", "init": init}} for name, init in (("ssmax", 1.5), ("init", 2.5))
    }
    for overrides, timed in (
        ([], ["softmax", "ssmax"]),
        ([], []),
        (["optim.lr=5e-3"], []),
        (["name=other", "log.every=7"], []),
        (["trainer.compile=auto"], []),
        (["trainer.compile=true"], []),
        (["trainer.max_steps=16"], ["softmax", "ssmax"]),
        (["eval.sequences=4"], ["softmax", "ssmax"]),
        (["trainer.threads=2"], ["softmax", "ssmax"]),
        (["model.dropout=0.1"], ["softmax", "ssmax"]),
        ([], []),
    ):
        path = tmp_path / "trial.yaml"
        path.write_text(yaml.safe_dump(FILE | {"arms": arms}, sort_keys=False))
        procedure = Procedure(read_experiment(path, ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}", *overrides]))
        times, source = run_times(procedure, costs(procedure), Slots(1))
        assert pilots == timed, overrides
        assert all(59 < seconds < 90 for seconds in times.values()), times
        assert source == "a pilot of some steps of each arm, 1 at a time"
        pilots.clear()
    run_times(procedure, costs(procedure), Slots(2))
    assert pilots == ["softmax", "ssmax"], "two at a time"


@pytest.mark.parametrize(("seconds", "compiled"), [(60.0, False), (3600.0, True)])
def test_a_first_start_compiles_where_the_pilot_says_that_it_pays_and_later_ones_alike(
    tmp_path, pilots, monkeypatch, capsys, arguments, seconds: float, compiled: bool
):
    (tmp_path / "program.py").write_text(PILOT.replace("60.0", str(seconds)))
    monkeypatch.setattr("shutil.which", lambda name: name)
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(FILE))
    arguments_of_start = tmp_path / "trial.yaml", [*arguments[1:], "trainer.compile=auto"]
    for _ in range(2):
        settled_experiment = start(
            *arguments_of_start, timer=lambda procedure: run_times(procedure, costs(procedure), Slots(1))[0]
        ).experiment
        assert [
            settled_experiment.config("", arm, 1, None, {"name": "any"}).trainer.compile
            for arm in settled_experiment.arms
        ] == [compiled] * 2
        (tmp_path / "program.py").unlink(missing_ok=True)
    output = capsys.readouterr().out
    assert output.count("trainer.compile of all runs: ") == 1
    assert re.search(
        rf"trainer\.compile of all runs: {str(compiled).lower()} \(auto: \d+ s a run, \d+ runs; it pays from 200 s a "
        r"run and",
        output,
    )
    assert (
        start(arguments_of_start[0], [*arguments_of_start[1], "trainer.compile=false"]).experiment.base["trainer"][
            "compile"
        ]
        is False
    )


@pytest.mark.slow
def test_a_pilot_ends_with_its_budget_and_says_what_it_skipped(tmp_path, pilots, monkeypatch):
    kinds = {f"kind{number}": {"model.n_embd": 40 + 8 * number} for number in range(30)}
    procedure = experiment(
        tmp_path, arms={"softmax": {}, "same": {"optim.schedule": "wsd"}, "slow": {"model.normalizer": "ssmax"}} | kinds
    )
    begin = time.monotonic()
    times, source = run_times(procedure, costs(procedure), Slots(1), 2.0)
    assert time.monotonic() - begin < 60
    assert pilots[:3] == ["softmax", "slow", "kind0"], "what differs most comes first"
    assert len(pilots) == 16
    skipped = "of slow the steps alone, as evaluations took too long; the other arms were not timed: by FLOPs"
    assert source == f"a pilot of some steps of 1 of 33 arms, 1 at a time; {skipped}"
    assert times["", "slow"] == 16, "2 s a step"
    assert times["", "softmax"] == pytest.approx(60, abs=30)
    assert times["", "kind29"] > times["", "kind0"]
    assert [path.name for path in procedure.experiment.folder.iterdir()] == ["pilot.json"]
    pilots.clear()
    with pytest.raises(RunError, match="no arm was timed within 0 s"):
        run_times(
            experiment(tmp_path, "other"),
            costs(procedure) | {("", "ssmax"): costs(procedure)["", "slow"]},
            Slots(1),
            0.0,
        )
    assert not pilots


WAITING = """
import os, time
from lm.machine import stop_with_parent
stop_with_parent(9)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGTERM, signal.SIGINT)), signal.SIGKILL],
)
def test_pilots_end_with_their_plan(tmp_path, number):
    (tmp_path / "program.py").write_text(WAITING)
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(FILE))
    words = ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}", "--plan"]
    process = forked(tmp_path / "said", compare_with, str(tmp_path / "program.py"), str(path), *words)
    place = tmp_path / "runs" / "trial"
    wait_until(
        lambda: any(path.read_text().strip() for path in place.glob(".*/*/output")) or not process.is_alive(), tmp_path
    )
    assert process.is_alive(), (tmp_path / "said").read_text()
    (output,) = place.glob(".*/*/output")
    child = int(output.read_text())
    os.kill(process.pid, number)
    process.join(60)
    message = (tmp_path / "said").read_text()
    assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number), message
    wait_until(lambda: not process_start(child), tmp_path)
    if number != signal.SIGKILL:
        assert not list(place.iterdir())
        assert message == f"error: stopped by {number.name} while runs were timed: nothing was trained\n"


@pytest.mark.slow  # 10 s
def test_an_arm_that_would_be_refused_is_found_before_any_is_trained(tmp_path, arguments):
    arms = {"softmax": {}, "ssmax": {"model.normalizer": "softmax", "optim.groups.normalizer.lr_factor": 10}}
    procedure = start(written(tmp_path, arms=arms, tune=None), arguments[1:], 2)
    with pytest.raises(
        ConfigError, match=r"^ssmax: optim\.groups\.normalizer = .*: no trained parameter is in this group; drop it$"
    ):
        run_times(procedure, costs(procedure), Slots(2))


def test_an_arm_that_is_not_trained_has_no_tuning_runs(tmp_path):
    arms = {
        "softmax": {"model.normalizer": "softmax"},
        "as-it-is": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
    }
    procedure = experiment(tmp_path, arms=arms, tune={"grid": [1e-3, 2e-3, 4e-3], "seeds": [101, 102]})
    lines = "\n".join(plan_lines(procedure, costs(procedure), "unknown"))
    assert "\n12 runs (3 of them are measured without training), " in lines
    times = {("", "softmax"): 60.0, ("", "as-it-is"): 10.0}
    assert total_seconds(procedure, times, Slots(1)) == 9 * 60 + 3 * 10
    assert len(finish_all(procedure, lambda run: 5 + abs(run.rate - 2e-3)).known_runs()) == 12
