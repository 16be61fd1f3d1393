"""Slots of made-up GPUs: each run sees the devices that it was given, and no device is given more often at a time than
was asked for.
"""

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lm, mark_others_slow
from trials import procedure_of, write_experiment

from lm.config.load import load_config
from lm.errors import ConfigError, RunError
from lm.experiments.procedure import Procedure
from lm.experiments.trainer import ExperimentTrainer, device_slots
from lm.model.device import count_gpus, visible_gpu_ids


@pytest.fixture
def gpus(monkeypatch):
    """A function: makes up a machine with so many GPUs."""

    def make(count: int, visible: str | None = None) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("initialises CUDA"))

    return make


def opened(folder: Path, *overrides: str, **changes: object) -> Procedure:
    """The untuned experiment of two arms and two seeds, or a changed one."""
    return procedure_of(folder, "trainer.accelerator=auto", *overrides, **({"tune": None} | changes))


WIDE = {
    "softmax": {},
    "wide": {"model.n_embd": 64, "trainer.devices": 2},
    "ssmax": {"model.normalizer": "ssmax"},
    "cpu": {"model.n_embd": 16, "trainer.accelerator": "cpu"},
}


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (0, None, ()),
        (0, "0,1", ()),
        (3, None, ("0", "1", "2")),
        (2, "1, 3", ("1", "3")),
        (1, "2,9", ("2",)),
        (0, "", ()),
        (2, "GPU-1f,GPU-2e", ("GPU-1f", "GPU-2e")),
    ],
)
def test_the_users_own_devices_are_handed_out_and_no_others(gpus, tmp_path, count, visible, names):
    gpus(count, visible)
    assert visible_gpu_ids() == names
    assert device_slots(opened(tmp_path).experiment, None, 1) == [(name,) for name in names] or [()]
    assert len(device_slots(opened(tmp_path).experiment, 1, 2)) == 1


def test_more_than_there_is_is_refused_before_anything_starts(gpus, tmp_path):
    gpus(2, "4,5")
    overrides = ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}", "trainer.accelerator=gpu", "trainer.devices=3"]
    result = lm("compare", str(write_experiment(tmp_path)), *overrides, "data.seq_len=16", "optim.batch_tokens=768")
    assert result.returncode == ConfigError.exit_code
    assert "trainer.devices = 3: this process sees 2 GPUs" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (2, 2), (8, 8)])
def test_more_processes_than_cores_are_refused_on_the_cpu_but_for_two(gpus, monkeypatch, cores, most):
    gpus(0)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    config = load_config([str(ROOT / "tests" / "tiny.yaml"), "data.source.paths=[.]", "trainer.accelerator=auto"])
    assert count_gpus(replace(config, trainer=replace(config.trainer, devices=most))) == 0
    words = (
        rf"trainer.devices = 99: on a CPU each device is a process, and this machine has {cores} cores?; set it to "
        rf"at most {most}$"
    )
    with pytest.raises(ConfigError, match=words):
        count_gpus(replace(config, trainer=replace(config.trainer, devices=99)))


PROGRAM = """#!{python}
import os, sys, time
def say(what):
    with open("{events}", "a") as log:
        log.write(what + " " + os.environ.get("CUDA_VISIBLE_DEVICES", "all") + chr(10))
say("begin")
time.sleep(0.2)
say("end")
sys.exit(3)
"""


@pytest.mark.parametrize("slots_per_gpu", mark_others_slow([1, 2], [2]))
def test_the_process_of_each_run_sees_its_devices_alone(gpus, tmp_path, monkeypatch, slots_per_gpu):
    gpus(3, "GPU-a,GPU-b,GPU-c")
    program, events = tmp_path / "program", tmp_path / "events"
    program.write_text(PROGRAM.format(python=sys.executable, events=events))
    program.chmod(0o755)
    procedure = opened(tmp_path, arms=WIDE, seeds=[1, 2, 3])
    slots = device_slots(procedure.experiment, None, slots_per_gpu)
    monkeypatch.setattr("lm.experiments.trainer.sys.executable", str(program))
    with pytest.raises(RunError, match="12 runs failed"):
        ExperimentTrainer(procedure, slots).train_all()
    counts, widths = Counter(), Counter()
    for line in events.read_text().split("\n")[:-1]:
        event, _, devices = line.partition(" ")
        for name in filter(None, devices.split(",")):
            counts[name] += 1 if event == "begin" else -1
        widths[len([*filter(None, devices.split(","))])] += event == "begin"
        assert max(counts.values(), default=0) <= slots_per_gpu, events.read_text()
    assert {*counts} <= {"GPU-a", "GPU-b", "GPU-c"}
    assert widths == {2: 12}, "as many as the widest run takes"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b,GPU-c"
