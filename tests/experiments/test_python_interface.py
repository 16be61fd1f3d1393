"""`lm.train`, `lm.evaluate`, `lm.compare` and `lm.results`, and the page that documents them."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import IN_PROCESS_SUBPROCESS, ROOT, SUBPROCESS_MODULE, InlineExecutor
from fabricated import trainer_that_calls
from folders import last_checkpoint
from prose import code_blocks
from test_experiments import SHORT, here
from trials import write_experiment
from waiting import wait_until

import lm
from lm.errors import ConfigError, LMError, RunError
from lm.experiments.compare import open_experiment
from lm.experiments.definition import read_experiment
from lm.runs.folder import read_config
from lm.training.banner import git_state

TABLE = "size,arm,key,rate,seed,val/loss,configuration\n" + "".join(
    f",{arm},optim.lr,{rate},{seed},{loss},\n"
    for arm in ("softmax", "ssmax")
    for rate, loss in ((5e-3, 5.2), (1e-2, 5.1), (2e-2, 5.3))
    for seed in (101, 102)
)


@pytest.fixture(scope="module")
def experiment(corpus: Path, store_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An experiment file whose runs are finished, and its overrides."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "rates.csv").write_text(TABLE)
    path = write_experiment(folder, tune={"table": "rates.csv"}, seeds=[1, 2, 3])
    overrides = [
        f"data.source.paths=[{corpus}]",
        f"data.root={store_root}",
        f"runs={folder / 'runs'}",
        *SHORT,
        "optim.batch_tokens=512",
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lm.experiments.trainer.ThreadPoolExecutor", InlineExecutor)
        trainer_that_calls(open_experiment(read_experiment(path, overrides)), here).train_all()
    return path, overrides


def test_the_long_table_holds_what_the_verdict_follows_from(experiment, tmp_path, capfd):
    file, overrides = experiment
    capfd.readouterr()
    compared = lm.compare(file, *overrides, train=False)
    table = compared.results
    assert capfd.readouterr() == ("", ""), "nothing is printed"
    assert set(table["state"]) == {"finished"}
    assert table["commit"].notna().all() == (git_state()[0] is not None), "the sdist knows no commit"
    final = table.query("stage == 'final' and metric == 'val/loss' and part == 'reports'")
    means = final.groupby(["arm", "seed"]).apply(lambda lines: np.average(lines["value"], weights=lines["weight"]))
    verdict = compared.verdicts.set_index("arm").loc["ssmax"]
    base, other = open_experiment(read_experiment(file, overrides)).judgement().summary_rows()
    assert [base["mean"], other["mean"]] == pytest.approx(means.groupby("arm").mean().tolist(), abs=1e-6)
    assert verdict["verdict"] == other["verdict"]
    assert compared.report.is_file()

    runs = compared.runs
    shutil.copytree(runs[0], other := runs[0].with_name(f"{runs[0].name[:-8]}00000000"))  # of another configuration
    assert lm.results(compared.folder)["folder"].nunique() == len(runs) + 1
    assert lm.compare(file, *overrides, train=False).results["folder"].nunique() == len(runs)
    shutil.rmtree(other)

    row = lm.judge(table, metric="val/loss", baseline="softmax", matters=0.05).set_index("arm").loc["ssmax"]
    assert f"exploratory: {row['verdict']}" == verdict["verdict"], "the long table does not say what was planned"
    numbers = ["mean", "difference", "difference low", "difference high", "p"]
    assert row[numbers].tolist() == pytest.approx(verdict[numbers].tolist(), rel=1e-12, nan_ok=True)

    selecting = table.query("metric == 'val/loss' and part == 'selects'")
    assert set(selecting["group"]).isdisjoint(final["group"]), "a document selects or reports"
    assert final.groupby(["sequences", "sample"])["run"].nunique().eq(6).all(), (
        "all runs are measured on the same sequences"
    )

    run = table["folder"][0]
    logged = lm.results(run, history=True).query("kind == 'log'")
    assert {"train/loss", "val/loss"} <= set(logged["metric"])
    assert logged["tokens"].is_monotonic_increasing
    assert lm.results(run)["step"].unique().tolist() == [8]

    with pytest.raises(RunError, match="no run folder"):
        lm.results(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"optim\.lrr"):
        lm.train(ROOT / "tests" / "tiny.yaml", {"optim": {"lrr": 1}})
    with pytest.raises(RunError, match="one experiment"):
        lm.compare(file, file, *overrides)
    with pytest.raises(RunError, match="jobs = 0: must be at least 1"):
        lm.compare("quickstart-recall", jobs=0)


@pytest.mark.slow
def test_the_page_of_python_runs(experiment, tmp_path, monkeypatch, training_in_process):
    """The code of docs/python.md, with a smaller run and an experiment that is finished in place of the preset."""
    file, overrides = experiment
    (page,) = code_blocks((ROOT / "docs" / "python.md").read_text(), "python")
    small = {
        '{"max_steps": 100}': '{"max_steps": 8}, "optim": {"warmup_steps": 2}, "eval": {"recall": {"sequences": 8, '
        '"length_factors": [1]}}',
        '"quickstart-recall"': "file, *overrides, train=False",
        "'accuracy'": "'val/loss'",
    }
    small |= {"'as trained'": "''", '["x", "arm"]': '"arm"'}
    for old, new in small.items():
        assert old in page
        page = page.replace(old, new)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tables = []
    exec(page, names := {"file": file, "overrides": overrides, "print": tables.append})
    assert names["run"] == Path("runs/trial")
    assert set(names["longer"]["x"].dropna()) == {64, 256}
    assert names["longer"]["arm"].unique().tolist() == ["layers (window (size=2), ssmax)"]
    assert [len(table) > 0 for table in tables] == [True] * 3
    with pytest.raises(RunError, match="runs/trial"):
        lm.train("recall", {"name": "trial"})


def test_mappings_hold_all_that_yaml_holds_and_an_error_all_of_its_lines(arguments, tmp_path, monkeypatch):
    mixed = {
        "data": {"lengths": {"name": "mixed", "weights": {16: 0.5, 32: 0.5}}},
        "trainer": {"callbacks": []},
        "runs": tmp_path / "runs",
    }
    given = [*arguments, {"name": "mixed", **mixed, "optim": {"lr": np.float64(1e-3)}}]
    folder = lm.train(*given)
    assert read_config(folder).data.lengths.weights == {16: 0.5, 32: 0.5}
    monkeypatch.setattr(SUBPROCESS_MODULE, IN_PROCESS_SUBPROCESS)
    with pytest.raises(RunError, match=r"(?s)2 problems.*optim\.lr = 0\.002.*optim\.grad_clip = 2"):
        lm.train(*given, {"resume": "auto", "optim": {"lr": 2e-3, "grad_clip": 2.0}})
    with pytest.raises(ConfigError, match=r"optim: .* is no plain value"):
        lm.train(*given, {"optim": object()})


INTERRUPTED = """
import sys, lm
try:
    lm.train(*sys.argv[1:], {"name": "long", "trainer": {"max_steps": 100000, "checkpoint_every": 100000}})
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_step_and_saves_a_checkpoint(arguments, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, *arguments, "eval.every=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "runs" / "long" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size > 0, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert (last_checkpoint(log.parent)).exists()


def test_what_is_no_path_is_refused():
    for call in (lm.results, lambda: lm.results([Path("runs")]), lambda: lm.train("recall", 5)):
        with pytest.raises(LMError, match=r"no run folder given|must be the path|must be a file"):
            call()


def test_a_notebook_completes_the_public_names():
    assert {*lm.__all__} <= {*dir(lm)}
    assert [name for name in dir(lm) if not name.startswith("__")] == sorted(lm.__all__)
