"""wandb: when it is on, and what a run sends there, read from the file that it keeps offline. Nothing here needs a
network.
"""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from conftest import lm
from folders import WandbRecorder
from trials import write_experiment
from wandb.proto.wandb_internal_pb2 import Record

from lm.config.training_config import LogConfig
from lm.config.tree import Config
from lm.errors import RunError
from lm.files import read_json
from lm.runs.folder import ENVIRONMENT_FILE, PEAK_MEMORY_KEY, read_metrics
from lm.training.train import train
from lm.training.wandb_runs import send_report, wandb_mode

BLOCK, HEADER = 32768, 7  # bytes of a block of the file, and of a header in it: checksum, length, type


def records(folder: Path) -> list[Record]:
    """What a run that was started once has sent to wandb, from its file in the run folder (LevelDB's log format)."""
    wandb.teardown()  # the file may not be whole before
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content, offset, entries, part = path.read_bytes(), HEADER, [], b""
    while offset + HEADER <= len(content):
        _, size, kind = struct.unpack_from("<IHB", content, offset)
        if BLOCK - offset % BLOCK < HEADER or not kind:
            offset += BLOCK - offset % BLOCK
            continue
        part += content[offset + HEADER : offset + HEADER + size]
        offset += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            entries.append(Record.FromString(part))
            part = b""
    return entries


def history(entries: list[Record]) -> list[dict[str, object]]:
    """The lines that were logged."""
    lines = [entry.history for entry in entries if entry.HasField("history")]
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in line.item} for line in lines
    ]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> WandbRecorder:
    """What is sent to wandb, which is not started."""
    server = WandbRecorder()
    monkeypatch.setattr("wandb.init", server.init)
    monkeypatch.setattr("wandb.setup", lambda settings: None)
    return server


def test_wandb_is_online_only_with_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert (wandb_mode(LogConfig()), wandb_mode(LogConfig(), in_experiment=True)) == ("offline", "disabled")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert (wandb_mode(LogConfig()), wandb_mode(LogConfig(), in_experiment=True)) == ("online", "online")
    assert wandb_mode(LogConfig(wandb="disabled")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(LogConfig()) == "offline"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert wandb_mode(LogConfig()) == "online"
    assert wandb_mode(LogConfig(to=[])) == "disabled"


def test_an_empty_wandb_mode_is_none_and_an_unknown_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny, server: WandbRecorder
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/nowhere")
    monkeypatch.setenv("WANDB_MODE", "")
    assert wandb_mode(LogConfig()) == "offline"
    assert train(tiny("name=empty", "log.wandb=offline", "trainer.max_steps=4")) == 0
    assert server.starts[0]["mode"] == "offline"
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(RunError, match=r"^wandb: can't start sometimes: .*; to train without it: log\.wandb=disabled$"):
        train(tiny("name=unknown", "log.wandb=auto"))
    assert not tiny("name=unknown").run_folder.exists()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of wandb, and no server; wandb is given up after a second."""
    monkeypatch.setattr("lm.training.wandb_runs.WANDB_TIMEOUT_S", 1.0)
    for name, value in {"WANDB_MODE": "", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("no_network")
@pytest.mark.slow
def test_a_wandb_key_without_a_network_is_logged_offline(tiny, capsys: pytest.CaptureFixture):
    config = tiny("name=alone", "log.wandb=auto", "trainer.max_steps=4")
    assert train(config) == 0
    assert list(config.run_folder.glob("wandb/offline-run-*/run-*.wandb"))
    output = capsys.readouterr()
    assert output.out.count("wandb: online failed (") == output.out.count("wandb:") == 1
    assert f"logging offline, to be sent later: wandb sync {config.run_folder}/wandb/offline-run-*\n" in output.out
    assert "wandb:" not in output.err


def tensorboard(folder: Path) -> str:
    """`log.to` with Lightning's logger for TensorBoard, which writes to `folder`."""
    pytest.importorskip("tensorboard")
    return f"log.to=[{{name: lightning.pytorch.loggers:TensorBoardLogger, save_dir: {folder}}}]"


@pytest.mark.parametrize("moment", ["log_metrics", "finalize"])
def test_a_log_that_fails_elsewhere_ends_no_run(
    tiny, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def fail(*_: object) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr("lightning.pytorch.loggers.TensorBoardLogger." + moment, fail)
    config = tiny("name=failing", tensorboard(tmp_path), "trainer.max_steps=4")
    assert train(config) == 0
    note = "TensorBoardLogger failed and gets nothing more (Connection lost); metrics.jsonl has all numbers\n"
    assert capsys.readouterr().out.count(note) == 1
    assert (config.run_folder / "checkpoints" / "step-000004.ckpt").exists()


@pytest.fixture
def placed(tiny, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of an experiment that is logged offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    place = "experiment={name: trial, arm: scalable, size: small, stage: final, rate: 0.002}"
    return tiny(
        "name=mirrored",
        "log.wandb=offline",
        place,
        "seed=3",
        "model.normalizer=ssmax",
        "eval.long_context.length_factor=2",
    )


def test_a_run_says_where_it_belongs_and_sends_what_is_logged_over_tokens(placed: Config):
    assert train(placed) == 0
    entries = records(placed.run_folder)
    run = next(entry.run for entry in entries if entry.HasField("run"))
    environment = read_json(placed.run_folder / ENVIRONMENT_FILE)
    assert (run.run_group, run.job_type, run.run_id) == ("trial/small", "final", environment["wandb_id"])
    assert sorted(run.tags) == ["arm scalable", "rate 0.002", "seed 3", "size small"]
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in run.config.update}
    assert config["experiment"] == {
        "name": "trial",
        "arm": "scalable",
        "size": "small",
        "stage": "final",
        "rate": 0.002,
    }
    assert config["seed"] == 3
    for name in ("data_fingerprint", "parameters", "git_commit", "versions", "device", "precision", "compile"):
        assert config[name] == environment[name]
    assert config["normalizer"] == "ssmax"

    axes = {
        entry.metric.name or entry.metric.glob_name: entry.metric.step_metric
        for entry in entries
        if entry.HasField("metric")
    }
    assert axes["*"] == axes["val/loss"] == "tokens"
    loss = next(entry.metric for entry in entries if entry.metric.name == "val/loss")
    assert (loss.summary.min, loss.summary.last) == (True, True)
    lines = read_metrics(placed.run_folder)
    logged = {(line["_step"], name): value for line in history(entries) for name, value in line.items()}
    assert all("tokens" in line for line in history(entries))
    for line in lines:
        sent_values = {name: logged[line["step"], name] for name in line if name != "step"}
        # an evaluation's, which may be more, takes its place at the same step
        assert line.pop(PEAK_MEMORY_KEY) <= sent_values.pop(PEAK_MEMORY_KEY)
        assert line == {"step": line["step"]} | sent_values
    names = {name for _, name in logged}
    assert {"normalizer/s/layer0/head0", "normalizer/s/layer1/head1", "val/loss"} <= names


def test_project_and_entity_are_those_of_the_environment(placed: Config, server: WandbRecorder, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    short_config = replace(
        placed, trainer=replace(placed.trainer, max_steps=2), optim=replace(placed.optim, warmup_steps=1)
    )
    monkeypatch.setenv("WANDB_TAGS", "pilot,first try")
    assert train(replace(short_config, name="a")) == 0
    monkeypatch.delenv("WANDB_PROJECT")
    assert train(replace(short_config, name="c")) == 0
    assert [start["project"] for start in server.starts] == ["theirs", "lm"]
    assert not any("entity" in start for start in server.starts), "wandb reads WANDB_ENTITY"
    assert server.starts[0]["tags"][-2:] == ["pilot", "first try"]


@pytest.mark.usefixtures("runs_in_process")
def test_an_experiment_that_ends_sends_its_verdicts_and_its_report(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write_experiment(tmp_path, tune=None, seeds=[1, 2])
    overrides = ["trainer.max_steps=2", "optim.warmup_steps=1", "eval.long_context.length_factor=0"]
    result = lm("compare", str(file), *arguments[1:], *overrides)  # wandb is off
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs" / "trial"
    assert not (folder / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_TAGS", "mine")
    report = lm("compare", str(file), *arguments[1:], *overrides, "log.wandb=offline", "--report-only", "--json")
    assert json.loads(report.stdout) == json.loads((folder / "verdicts.json").read_text())
    assert not (folder / "wandb").exists()  # it was judged before
    assert lm("compare", str(file), *arguments[1:], *overrides, "log.wandb=offline").returncode == 0
    entries = records(folder)
    run = next(entry.run for entry in entries if entry.HasField("run"))
    assert (run.display_name, run.run_group, run.job_type, sorted(run.tags)) == (
        "trial report",
        "trial",
        "report",
        ["mine", "report"],
    )
    names = {name.partition(".")[0] for line in history(entries) for name in line}
    assert {"report", "verdicts", "runs"} <= names
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["question"].startswith("Does ssmax change val/loss by more than 0.05")
    assert (config["margin"], config["seeds"]) == (0.05, [1, 2])
    summary = {
        item.key or ".".join(item.nested_key): item.value_json
        for entry in entries
        if entry.HasField("summary")
        for item in entry.summary.update
    }
    baseline, line = json.loads((folder / "verdicts.json").read_text())["arms"]
    assert (baseline["arm"], json.loads(summary["verdict ssmax"])) == ("softmax", line["words"])
    assert "verdict softmax" not in summary  # it is what the others are compared with
    ends = [json.loads(summary[f"difference ssmax{end}"]) for end in ("", " low", " high")]
    assert ends == pytest.approx(line["difference"])
    (page,) = (path for path in folder.rglob("*.html") if "wandb" in path.parts)
    links = re.compile('href="([^#"]+)')
    assert links.findall((folder / "report" / "report.html").read_text()), "files beside the page"
    assert not links.findall(page.read_text())
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/runs_*.table.json")
    runs = json.loads(table.read_text())
    assert (runs["columns"], len(runs["data"])) == (["stage", "run", "state", "wandb_id"], 4)


def test_the_runs_of_an_experiment_are_links_where_wandb_is_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: dict[str, object] = {}
    run = SimpleNamespace(url="https://wandb.ai/me/lm/runs/abc", log=sent.update, summary={}, finish=lambda: None)
    monkeypatch.setattr("lm.training.wandb_runs.start_wandb_run", lambda *_, **__: run)
    (page := tmp_path / "report.html").write_text("<p>report</p>")
    send_report(
        LogConfig(wandb="offline"), "trial", tmp_path, {}, [], [{"run": "softmax seed 1", "wandb_id": "0a1b"}], page
    )
    assert sent["runs"].data == [["softmax seed 1", "0a1b", "https://wandb.ai/me/lm/runs/0a1b"]]


def test_a_resumed_run_goes_on_with_its_wandb_run(placed: Config, server: WandbRecorder):
    half = placed.trainer.max_steps // 2
    assert train(replace(placed, trainer=replace(placed.trainer, max_steps=half))) == 0
    assert set(server.steps) == set(range(1, half + 1))
    server.lines.clear()
    assert train(replace(placed, resume="auto")) == 0
    assert set(server.steps) == set(range(half + 1, placed.trainer.max_steps + 1))
    first, second = server.starts
    assert (first["id"], second["resume"]) == (second["id"], "allow")
