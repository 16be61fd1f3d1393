"""Verdicts on runs of other programs: designs (paired, unpaired, one arm against a number), layouts and noise."""

import http.server
import json
import math
import threading

import numpy as np
import pandas as pd
import pytest
from conftest import lm as command
from scipy import stats

import lm
from lm.errors import LMError, RunError
from lm.experiments.run_table import judge_table
from lm.statistics.verdicts import smallest_difference

DESIGNS = {
    "paired": {},
    "paired, higher is better": {"better": "higher"},
    "unpaired": {"unpaired": True},
    "against a number": {"target": 3.28},
}


def table_of(values: dict[str, np.ndarray]) -> pd.DataFrame:
    """A row for each run; the seeds of an arm are numbered from 0."""
    return pd.DataFrame(
        [(arm, seed, value) for arm, array in values.items() for seed, value in enumerate(array)],
        columns=["arm", "seed", "value"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_intervals_and_p_are_scipys(design):
    """Of 200 random tables."""
    for trial in range(200):
        rng = np.random.default_rng(trial)
        is_equal = design.startswith("paired")
        counts = [int(rng.integers(3, 12))] * 2 if is_equal else rng.integers(3, 12, 2)
        base, arm = (rng.normal(3.28 + rng.normal() / 100, rng.uniform(0.001, 0.05), count) for count in counts)
        runs, options = {"base": base, "arm": arm}, DESIGNS[design]
        (verdict,) = judge_table(
            table_of(runs if design != "against a number" else {"arm": arm}),
            **{"better": None, "unpaired": False, "target": None, "bounds": None} | options,
            **{"metric": "", "matters": 0.01, "baseline": None, "condition": "", "split_columns": ()},
            arm_column="arm",
            seed_column="seed",
        ).verdicts.values()
        if design == "against a number":
            expected = stats.ttest_1samp(arm, 3.28)
            interval = np.array(expected.confidence_interval(0.95)) - 3.28
        elif design == "unpaired":
            expected = stats.ttest_ind(arm, base, equal_var=False)
            interval = expected.confidence_interval(0.95)
        else:
            expected = stats.ttest_1samp(arm - base, 0)
            interval = expected.confidence_interval(0.95)
        assert verdict.p == pytest.approx(expected.pvalue, abs=1e-9)
        assert verdict.interval.as_list()[1:] == pytest.approx([*interval], abs=1e-9)


LAYOUTS = {  # file, text, options, verdict, words, exit status
    "final losses": (
        "losses.json", "[3.2785, 3.2777, 3.2793, 3.2769, 3.2790, 3.2781]", ["--target", "3.28"],
        "runs: a difference below 0.01 (6 seeds)", 5,
    ),
    "final losses, one a line": (
        "losses.txt", "3.2785\n3.2777\n3.2793\n3.2769\n", ["--target", "3.28", "--matters", "0.0001"],
        "runs: better by more than 0.0001 (4 seeds)", 0,
    ),
    "two lists": (
        "lists.json",
        json.dumps({"old": [3.27 + k / 1000 for k in range(10)], "new": [3.28 + k / 1000 for k in range(10)]}),
        ["--unpaired", "--matters", "0.001"],
        "new: worse by more than 0.001 (10 and 10 seeds, unpaired): the interval leaves out 0 and every difference "
        "below 0.001 (p = 7.5e-07 by Welch's t test, if seeds scatter alike to both sides)", 3,
    ),
    "seeds in a wide table": (
        "seeds.csv",
        "variant,seed,step 2750,val_bpb\n"
        + "".join(f"{arm},{seed},1,{0.9 + seed * 0.001 + shift * (seed % 2)}\n" for arm, shift in (("a", 0), ("b", 0.1))
                  for seed in range(20)),
        ["--arm", "variant", "--metric", "val_bpb", "--matters", "0.04"],
        "b: worse, perhaps by less than 0.04 (20 seeds)", 3,
    ),
    "an agent's loop": (
        "loop.jsonl",
        "".join(
            json.dumps({"id": run, "config": {"decay": [0.5, 0.7][run % 2], "seed": run // 2}, "tags": ["x"],
                        "summary": {"val/bpb": 1 + run % 3 * 0.01}}) + "\n"
            for run in range(6)
        ),
        ["--arm", "config.decay", "--seed", "config.seed", "--metric", "summary.val/bpb", "--better", "higher"],
        "0.7: undecided: the interval is too wide (3 seeds)", 4,
    ),
    "tabs": (
        "results.tsv", "arm\tseed\tval_bpb\n" + "".join(f"{arm}\t{seed}\t{seed % 3}\n" for arm, seed in
                                                          zip("aaabbb", range(6), strict=True)),
        ["--metric", "val_bpb"], "b: undecided: the interval is too wide (3 and 3 seeds, unpaired)", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_that_people_publish_are_judged(layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, text, options, words, status = LAYOUTS[layout]
    (tmp_path / name).write_text(text)
    result = command("judge", name, *options, "--exit-code")
    assert (words in result.stdout, result.returncode) == (True, status), result.stdout + result.stderr


def test_arms_have_seeds_of_their_own_unless_they_are_paired():
    values = {"a": np.array([1.0, 1.1, 1.2]), "b": np.array([1.3, 1.5, 1.1, 1.3, 1.2]), "c": np.array([2.0, 2.1, 2.3])}
    table = table_of(values)
    with pytest.raises(RunError, match="a: no seed 3, 4; every arm needs the same seeds, or --unpaired"):
        lm.judge(table)
    judged = lm.judge(table, unpaired=True)
    assert judged["runs"].tolist() == judged["of"].tolist() == [3, 5, 3]
    assert judged["mean"].tolist() == pytest.approx([array.mean() for array in values.values()])
    against = lm.judge(table, target=1.15)
    assert against["arm"].tolist() == ["a", "b", "c"]
    assert against["verdict"].tolist() == ["undecided", "undecided", "worse"]
    for state, expected in (("diverged", "unstable"), ("unfinished", "incomplete")):
        states = table.assign(state=["finished"] * 7 + [state] + ["finished"] * 3)
        for options in ({"unpaired": True}, {"target": 1.15}):
            judged = lm.judge(states, **options).set_index("arm")
            assert judged["verdict"]["b"] == expected
            assert judged["verdict"]["c"] not in ("unstable", "incomplete")


def test_unpaired_arms_that_scatter_not_at_all_are_told_apart_by_permutations():
    equal = table_of({"a": np.ones(3), "b": np.full(3, 2.0)})
    assert "p = 0.1 by the permutation test" in lm.judge(equal, unpaired=True)["reason"][1]
    equal = table_of({"a": np.ones(5), "b": np.full(5, 2.0)})
    assert lm.judge(equal, unpaired=True)["p"][1] == pytest.approx(2 / math.comb(10, 5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "nan"], "target = nan: must be a finite number"),
        (["--target", "3", "--unpaired"], "stands in place of a baseline; leave baseline and unpaired out"),
        (["--target", "3", "--baseline", "a"], "stands in place of a baseline; leave baseline and unpaired out"),
        (["--target", "3", "--exit-code"], "--exit-code takes one verdict, and there are 2: choose one by --where"),
        (["--arm", "kind", "--unpaired"], "has no column kind; there is arm, value"),
        (
            [],
            "has no column seed; there is arm, value; name the column of seeds, or judge runs without seeds --unpaired",
        ),
    ],
)
def test_questions_without_an_answer_are_refused(options, said, tmp_path):
    (tmp_path / "runs.csv").write_text("arm,value\na,1\na,2\nb,1\nb,2\n")
    result = command("judge", str(tmp_path / "runs.csv"), *options)
    assert said in result.stderr
    assert result.returncode in (1, 2)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"arm": 1', "line 1"),
        ("[[1]]", ""),
        ("[" * 100_000, ""),
        ('{"a": {}}\n\n3x', "line 3"),
    ],
)
def test_damaged_json_is_refused_in_one_line(text, where, tmp_path):
    (tmp_path / "runs.jsonl").write_text(text)
    with pytest.raises(LMError, match=f"no JSON table: {where}") as error:
        lm.judge(tmp_path / "runs.jsonl", target=1.0)
    assert "\n" not in str(error.value)


def test_noise_is_the_spread_of_single_runs_and_of_pairs(tmp_path):
    rng = np.random.default_rng(1)
    seeds, arms = rng.normal(size=8), rng.normal(size=(2, 8)) / 10
    values = {"a": 3 + seeds + arms[0], "b": 4 + seeds + arms[1]}
    table_of(values).to_csv(tmp_path / "runs.csv", index=False)
    single = math.sqrt(np.mean([array.var(ddof=1) for array in values.values()]))
    paired = np.std(values["a"] - values["b"], ddof=1)
    out = command("noise", str(tmp_path / "runs.csv"), "--difference", "0.3").stdout
    assert f"single runs scatter by {single:.3g} (" in out
    assert f"differences paired by seed scatter by {paired:.3g} (" in out
    assert (
        f"5 seeds find a difference of {smallest_difference(5, paired):.3g} paired by seed, "
        f"{smallest_difference(5, math.sqrt(2) * single, 2):.3g} unpaired" in out
    )
    assert "a difference of 0.3 takes these seeds of each arm: " in out
    (entry,) = json.loads(command("noise", str(tmp_path / "runs.csv"), "--json").stdout)["noise"]
    assert (entry["runs"], entry["single_runs"][0]) == (16, pytest.approx(single))
    low, high = np.sqrt(7 / stats.chi2.ppf([0.975, 0.025], 7))
    assert entry["paired_differences"] == pytest.approx([paired, paired * low, paired * high])
    assert entry["smallest_difference"]["5"]["paired by seed"] == pytest.approx(smallest_difference(5, paired))
    equal = table_of({"a": np.array([1.1, 1.2, 1.3]), "b": np.array([1.0, 1.1, 1.2])})  # differ by rounding alone
    equal.to_csv(tmp_path / "equal.csv", index=False)
    out = command("noise", str(tmp_path / "equal.csv")).stdout
    assert "differences paired by seed scatter by 0 (all are equal)\n3 seeds find a difference of 0.307 unpaired" in out
    (tmp_path / "one.json").write_text("[3.27, 3.28, 3.26]")
    assert "no arms share two seeds to pair runs by" in command("noise", str(tmp_path / "one.json")).stdout
    (tmp_path / "one.json").write_text("[3.27]")
    assert "no arm has two finished runs" in command("noise", str(tmp_path / "one.json")).stderr


class Wandb(http.server.BaseHTTPRequestHandler):
    """Answers the queries of `wandb.Api().runs("me/project")` with pages of runs: two normalizers, three seeds."""

    states = ["finished"] * 6

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        variables = request.get("variables") or {}
        first = int(variables.get("cursor") or -1) + 1
        runs = [
            {
                "id": f"id{k}", "name": f"run{k}", "displayName": f"run {k}", "state": state, "tags": [],
                "user": {"name": "me", "username": "me"}, "systemMetrics": "{}", "readOnly": False,
                "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "historyLineCount": 1,
                "config": json.dumps({"norm": {"value": "ab"[k % 2]}, "optim": {"value": {"seed": k // 2, "b": [1]}}}),
                "summaryMetrics": json.dumps({"val/loss": 3 + (k % 2) / 10 + k * k / 1000, "_step": 9}),
            }
            for k, state in enumerate(self.states)
        ]  # fmt: skip
        page = {"endCursor": str(first + 3), "hasNextPage": first + 4 < len(runs)}
        edges = [{"node": run, "cursor": str(k)} for k, run in enumerate(runs[first : first + 4], first)]
        project = {"internalId": "1", "runCount": len(runs), "readOnly": False}
        project |= {"runs": {"edges": edges, "pageInfo": page}}
        viewer = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        is_known = variables.get("project") in (None, "project")
        content = json.dumps({"data": {"viewer": viewer, "project": project if is_known else None}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def wandb_environment():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wandb) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        yield {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_ERROR_REPORTING": "false"}
        server.shutdown()


@pytest.mark.slow
def test_the_runs_of_a_project_of_wandb_are_judged(wandb_environment, monkeypatch):
    question = ["--arm", "config.norm", "--seed", "config.optim.seed", "--metric", "summary.val/loss"]
    result = command("judge", "wandb:me/project", *question, "--exit-code", **wandb_environment)
    assert "b: worse by more than 0.01 (3 seeds)" in result.stdout, result.stderr
    assert result.returncode == 3
    monkeypatch.setattr(Wandb, "states", ["finished"] * 5 + ["crashed"])
    result = command("judge", "wandb:me/project", *question, "--exit-code", **wandb_environment)
    assert ("2 of 3 seeds have ended" in result.stdout, result.returncode) == (True, 4)
    result = command("judge", "wandb:me/other", *question, **wandb_environment)
    assert result.stderr.splitlines()[-1].startswith("error: wandb:me/other: ")
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
