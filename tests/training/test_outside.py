"""Callbacks and loggers from outside, which `trainer.callbacks` and `log.to` name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from folders import last_checkpoint
from trials import write_experiment

from lm.config.load import load_config
from lm.errors import ConfigError
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import read_metrics

STRANGER = """
import json
import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

class Spread(L.Callback):
    def __init__(self, scale=1.0):
        self.scale, self.steps = scale, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        spread = module.decoder.embedding.weight.std()
        self.log("stranger/spread", self.scale * spread)
        trainer.logger.log_metrics({"stranger/steps": self.steps}, trainer.global_step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class Notebook(Logger):
    name, version = "notebook", "1"

    def __init__(self, path):
        self.path = path

    def log_hyperparams(self, params):
        self.note(["configuration", params["seed"]])

    @rank_zero_only
    def log_metrics(self, metrics, step):
        if step == 3:
            raise OSError("no paper")
        self.note([step, metrics])

    def note(self, line):
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)

class Hoarder(Spread):
    def state_dict(self):
        return {"steps": slice(self.steps)}

class Stopper(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = True

class Namesake(L.Callback):
    def __init__(self, metric):
        self.metric = metric

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.log(self.metric, 1.0)

class NoCallback:
    pass
"""


@pytest.fixture
def run(tmp_path: Path):
    """A function that runs `lm` in a process of its own, in which the module `stranger` can be imported."""
    (tmp_path / "stranger.py").write_text(STRANGER)

    def run(*words: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        command = [sys.executable, "-m", "lm", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_a_stranger_s_callback_logs_and_keeps_its_state_and_a_logger_that_fails_ends_no_run(
    run, arguments: list[str], tmp_path: Path
):
    options = [
        "trainer.callbacks=[{name: stranger:Spread, scale: 2}]",
        f"log.to=[{{name: stranger:Notebook, path: {tmp_path / 'notes'}}}]",
        "log.every=1",
        "eval.long_context.length_factor=0",
        "name=strange",
    ]
    for steps in (2, 4):
        result = run("train", *arguments, *options, f"trainer.max_steps={steps}", "resume=auto")
        assert result.returncode == 0, result.stderr
    assert "note: stranger:Notebook failed and gets nothing more (no paper); metrics.jsonl has" in result.stdout
    folder = tmp_path / "runs" / "strange"
    lines = read_metrics(folder)
    spreads = {(line["step"], line["tokens"]): line["stranger/spread"] for line in lines if "stranger/spread" in line}
    assert [*spreads] == [(step, 256 * step) for step in (1, 2, 3, 4)]
    assert [line["stranger/steps"] for line in lines if "stranger/steps" in line] == [1, 2, 3, 4]  # also after a resume
    checkpoint = load_checkpoint(last_checkpoint(folder))
    spread = 2 * float(checkpoint["state_dict"]["embedding.weight"].std())
    assert spreads[4, 1024] == pytest.approx(spread, rel=1e-6)
    assert (folder / "evaluations" / "callbacks.step-000004.csv").exists()
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes[0] == ["configuration", 1]
    noted = {step: metrics for step, metrics in notes[1:] if step != "configuration" and "stranger/spread" in metrics}
    assert {step: (metrics["tokens"], metrics["stranger/spread"]) for step, metrics in noted.items()} == {
        step: (tokens, value) for (step, tokens), value in spreads.items() if step < 3
    }
    result = run("report", str(folder))
    assert result.returncode == 0, result.stderr
    assert "stranger/spread" in (folder / "report" / "report.html").read_text()


REFUSED = {
    "trainer.callbacks=[stranger:Missing]": "'stranger:Missing': can't be imported and made: AttributeError",
    "trainer.callbacks=[stranger:NoCallback]": "is no Callback of lightning.pytorch; name a Callback",
    "trainer.callbacks=[{name: stranger:Spread, speed: 1}]": "can't be imported and made: TypeError",
    "log.to=[stranger:Spread]": "log.to[0] = 'stranger:Spread': can't be imported and made: TypeError: is no Logger",
    "trainer.callbacks=[stranger:Stopper]": "trainer.callbacks: one of them stopped the run at step 1",
    "trainer.callbacks=[lightning.pytorch.callbacks:ModelCheckpoint]": "trainer.callbacks: Lightning refuses them",
    "trainer.callbacks=[{name: stranger:Namesake, metric: step}]": "self.log('step'): is a name of lm's own",
    "trainer.callbacks=[{name: stranger:Namesake, metric: val/loss}]": "self.log('val/loss'): is a name of lm's own",
    "trainer.callbacks=[stranger:Hoarder]": "a callback's state is no numbers, texts, tensors",
}


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.slow
def test_a_class_that_can_t_be_used_is_one_line(run, arguments: list[str], tmp_path: Path, option: str):
    result = run("train", *arguments, option, "name=refused", "eval.long_context.length_factor=0")
    assert result.returncode in (1, 2)
    assert REFUSED[option] in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert (
        any(name in option for name in ("Hoarder", "Stopper", "Namesake"))
        or not (tmp_path / "runs" / "refused").exists()
    )


@pytest.mark.parametrize("option", ["trainer.callbacks=[stranger]", "log.to=[{path: here}]", "log.to=[paper]"])
def test_an_entry_that_names_no_class_is_refused(option: str):
    with pytest.raises(ConfigError, match=r"names no class.*write package\.module:Class"):
        load_config(["name=x", option])


@pytest.mark.slow
def test_a_stranger_s_metric_decides_an_experiment(run, arguments: list[str], tmp_path: Path):
    primary = {"metric": "stranger/spread", "better": "lower", "matters": 0.5}
    file = write_experiment(tmp_path, tune=None, seeds=[1, 2], primary=primary)
    options = ["trainer.max_steps=2", "optim.warmup_steps=1", "eval.long_context.length_factor=0"]
    result = run("compare", str(file), *arguments[1:], *options, "trainer.callbacks=[stranger:Spread]")
    assert result.returncode == 0, result.stderr + result.stdout
    verdicts = json.loads((tmp_path / "runs" / "trial" / "verdicts.json").read_text())
    assert "stranger/spread" in json.dumps(verdicts)
    assert verdicts["arms"][1]["words"]
