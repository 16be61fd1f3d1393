"""How many runs a plan counts, and how long they take, by ended runs."""

import os
import time

from fabricated import finish_all_runs, finish_run
from manifests import write_recorded_file
from trials import procedure_of

from lm.experiments import compare
from lm.experiments.compare import finished_run_seconds, plan_lines
from lm.experiments.procedure import Procedure


def test_time_is_that_of_the_runs_that_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "expected_vocab_size", lambda data: 256)
    procedure = procedure_of(
        tmp_path, tune=None, seeds=[1, 2, 3], sizes={"small": {}, "large": {"trainer.max_steps": 16}}
    )
    assert "time: known once the first run has ended" in plan_lines(procedure, [(), ()])
    runs = [run for run in procedure.known_runs() if (run.size, run.arm) == ("small", "softmax")]
    for number, run in enumerate(runs):
        finish_run(run, 5.0)
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1e9))
        starts = [{"step": step, "time": moment} for step in ((0, 4) if number == 2 else (0,))]
        write_recorded_file(run.config.run_folder / "environment.json", {"starts": starts})
        log, seconds = run.config.run_folder / "metrics.jsonl", 60 if number < 2 else 1e6
        log.touch()
        os.utime(log, (1e9 + seconds, 1e9 + seconds))
    procedure = Procedure(procedure.experiment)
    assert [finished_run_seconds(run) for run in procedure.known_runs() if run.arm == "softmax"][:3] == [60, 60, 0], (
        "two starts"
    )
    # (6 x 60 s + 6 x 120 s - 3 x 60 s) / 2
    words = "time: about 8 min for what is left, by the FLOPs of the runs that have ended"
    assert words in plan_lines(procedure, [(), ()])


def test_an_arm_that_is_not_trained_has_no_tuning_runs(tmp_path):
    arms = {
        "softmax": {"model.normalizer": "softmax"},
        "as-it-is": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
    }
    procedure = procedure_of(
        tmp_path, seeds=[1, 2, 3], arms=arms, tune={"grid": [1e-3, 2e-3, 4e-3], "seeds": [101, 102]}
    )
    lines = "\n".join(plan_lines(procedure, [()]))
    assert "\n12 runs, " in lines
    assert procedure.count_runs_by_arm("") == {"softmax": 9, "as-it-is": 3}
    assert len(finish_all_runs(procedure, lambda run: 5 + abs(run.rate - 2e-3)).known_runs()) == 12
