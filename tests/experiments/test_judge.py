"""`lm judge` and `lm.judge`: verdicts on tables of anybody's runs."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from conftest import lm as command
from prose import code_blocks

import lm
from lm.errors import ConfigError, RunError
from lm.experiments.judging import MAX_PRINTED_ROWS

sys.path.insert(0, str(ROOT / "scripts"))
import recompute

QUESTIONS = {
    "recall": (["--baseline", "softmax", "--by", "rate", "--by", "x"], "[2048]"),
    "recall-control": (["--baseline", "ssmax_fixed", "--by", "rate", "--by", "x"], "[2048, 8192]"),
    "recall-after": (["--baseline", "ssmax_fixed"], "[16384]"),
    "when-to-swap": (["--baseline", "ssmax", "--by", "rate", "--by", "x"], "[16384]"),
}


@pytest.mark.parametrize(
    "shown",
    [committed for committed in recompute.ALL_RESULTS if committed.table_name in QUESTIONS],
    ids=lambda committed: committed.name,
)
def test_committed_results_give_their_committed_verdicts(shown):
    options, lengths = QUESTIONS[shown.name]
    condition = f"setting == 'as trained' and x in {lengths}"
    question = [
        "--metric",
        f"{shown.task} accuracy",
        "--better",
        "higher",
        "--matters",
        f"{shown.matters:g}",
        "--where",
        condition,
    ]
    words = ["judge", str(ROOT / "results" / shown.name / "seeds.csv"), *options, *question, "--json"]
    lines = json.loads(command(*words).stdout)["arms"]
    line_of = {(line["size"], line["arm"]): line for line in lines if "verdict" in line}
    assert len(line_of) == len(shown.verdicts)
    for (arm, row, length), verdict in shown.verdicts.items():
        by_size = shown.compared_column == "size"
        line = line_of[f"steps-{row}" if by_size else f"rate {row}, x {length}", arm]
        assert (line["verdict"], line["reason"], line["p"]) == (
            verdict.kind,
            verdict.reason,
            verdict.p if verdict.seed_count else None,
        )
        assert line["words"] == verdict.statement_with_seeds
        assert line["difference"] == [value if np.isfinite(value) else None for value in verdict.interval.as_list()]


RUNS = pd.DataFrame(
    [
        {"arm": arm, "seed": seed, "value": 4 - 0.1 * (arm == "b") + 0.001 * seed * (arm == "b")}
        for arm in "ab"
        for seed in (1, 2, 3)
    ]
)


UNITS = pd.concat([RUNS.assign(unit=unit, value=RUNS["value"] + 0.1 * unit) for unit in range(5)])


def blank(column: str) -> pd.DataFrame:
    """Seed 2 has no entry in a column."""
    return RUNS.assign(**{column: RUNS[column].where(RUNS["seed"] != 2)})


def test_a_table_is_judged_as_an_experiment_is():
    base, other = lm.judge(RUNS).to_dict("records")
    assert (base["arm"], other["arm"], other["verdict"], other["runs"]) == ("a", "b", "better", 3)
    assert other["difference"] == pytest.approx(-0.098)
    assert lm.judge(RUNS, baseline="b")["verdict"].tolist()[1:] == ["worse"]
    assert lm.judge(RUNS, better="higher")["verdict"].tolist()[1:] == ["worse"]
    assert lm.judge(RUNS.assign(better="higher"))["verdict"].tolist()[1:] == ["worse"]
    assert lm.judge(RUNS.assign(better="none"))["verdict"].tolist()[1:] == ["better"]
    with pytest.raises(RunError, match=r"^the table: better is higher, lower; of one metric"):
        lm.judge(RUNS.assign(better="higher"), better="lower")
    assert lm.judge(RUNS, matters=0.2)["verdict"].tolist()[1:] == ["difference below margin"]


def test_a_long_table_is_printed_up_to_a_limit_and_judged_whole(tmp_path):
    rng, names, path = (
        np.random.default_rng(0),
        [f"arm{index}" for index in range(MAX_PRINTED_ROWS + 5)],
        tmp_path / "t.csv",
    )
    pd.DataFrame([{"arm": name, "seed": seed, "value": rng.normal()} for name in names for seed in range(3)]).to_csv(
        path
    )
    lines = command("judge", str(path)).stdout.splitlines()
    assert lines[-1] == "printed: the first 500 of 505 lines; lm judge --json and verdicts.json hold all"
    assert sum(bool(re.match(r" ?arm\d+\b", line)) for line in lines) == 2 * MAX_PRINTED_ROWS - 1
    assert len(json.loads(command("judge", str(path), "--json").stdout)["arms"]) == len(names)


def test_names_may_be_numbers_or_texts_of_any_column():
    numbers = RUNS.assign(
        arm=RUNS["arm"].map({"a": 0, "b": 1}), seed=RUNS["seed"].map({1: 1, 2: "x", 3: 3}), size=["s"] * 6
    )
    assert lm.judge(numbers, baseline="0", by="size")["arm"].tolist() == [0, 1]


def test_columns_may_have_any_dtype():
    expected = lm.judge(RUNS)["words"].tolist()
    categories = RUNS.assign(state=pd.Categorical([None] * 5 + ["finished"])).astype(
        {"arm": "category", "seed": "category"}
    )
    for table in (RUNS.assign(metric=3), RUNS.convert_dtypes(), categories):
        assert lm.judge(table)["words"].tolist() == expected


def test_lines_of_runs_that_chose_rates_are_not_judged():
    for column, choosing, reporting in (("stage", "tune", "final"), ("part", "selects", "reports")):
        others = RUNS.assign(rate=2e-3, value=9.0)
        table = pd.concat([RUNS.assign(rate=1e-3, **{column: reporting}), others.assign(**{column: choosing})])
        assert lm.judge(table)["difference"].tolist()[1:] == pytest.approx([-0.098])
        with pytest.raises(RunError, match="no line reports"):
            lm.judge(table[table[column] == choosing])
    own_rates = RUNS.assign(rate=RUNS["arm"].map({"a": 1e-3, "b": None}))
    assert lm.judge(own_rates)["words"].tolist() == lm.judge(RUNS)["words"].tolist()
    two_rates = pd.concat([RUNS.assign(rate=1e-3), RUNS.assign(rate=2e-3)])
    for table in (two_rates, two_rates.drop(columns="seed")):  # rates would be taken for seeds
        with pytest.raises(RunError, match="arm a has 2 rates: take one by a condition"):
            lm.judge(table, unpaired=True)
    only_tuned = RUNS[RUNS["arm"] == "b"].assign(arm="c", stage="tune")
    with pytest.raises(RunError, match="no line of c reports, only lines that choose rates"):  # a smaller family
        lm.judge(pd.concat([RUNS.assign(stage="final"), only_tuned]))


def test_runs_of_an_experiment_are_compared_with_a_baseline_that_is_named():
    """Their arms are in the order of the folders."""
    with pytest.raises(RunError, match="name the baseline"):
        lm.judge(RUNS.assign(experiment="trial"))
    assert lm.judge(RUNS.assign(experiment="trial"), baseline="b")["arm"].tolist() == ["b", "a"]


def test_units_are_averaged_and_paired_over():
    units = pd.concat([RUNS.assign(unit=unit, value=RUNS["value"] + 0.1 * unit) for unit in range(10)])
    shuffled = units.sample(frac=1, random_state=1).sort_values("arm", kind="stable")
    assert shuffled.pipe(lm.judge)["mean"].tolist() == pytest.approx([4.45, 4.352])
    columns = ["difference", "difference low", "over_seeds_and_documents", "over_seeds_and_documents low"]
    assert lm.judge(shuffled)[columns].iloc[1].tolist() == pytest.approx(lm.judge(units)[columns].iloc[1].tolist())
    for other in (
        units[(units["unit"] != 3) | (units["arm"] != "a")],
        pd.concat([units[units["arm"] == "a"], RUNS[RUNS["arm"] == "b"]]),
    ):
        with pytest.raises(RunError, match="same units"):
            lm.judge(other)


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        (RUNS.rename(columns={"seed": "run"}), {}, "has no column seed; there is arm, run, value"),
        (RUNS, {"metric": "loss"}, "has no column loss; there is arm, seed, value"),
        (pd.concat([RUNS, RUNS[["value"]]], axis=1), {}, "two columns are named value"),
        (RUNS, {"where": "x == 1"}, "name 'x' is not defined; columns: arm, seed, value"),
        (RUNS, {"where": "seed"}, "seed: doesn't say of each line whether it is judged"),
        (RUNS, {"by": "seed"}, "runs can't be judged apart by seed"),
        (RUNS, {"baseline": "c"}, "no arm c; there is a, b"),
        (RUNS[RUNS["arm"] == "a"], {}, "a verdict takes two arms; there is a"),
        (RUNS[1:], {}, "a: no seed 1; every arm needs the same seeds"),
        (pd.concat([RUNS, RUNS[:1]]), {}, "2 lines are of arm a, seed 1; drop all but one"),
        (pd.concat([RUNS.assign(x=1), RUNS.assign(x=2)]), {}, "2 lines are of arm a, seed 1; they differ in x"),
        (
            blank("value"),
            {},
            "2 lines have no value up to 1e+30, the first of arm a, seed 2; correct them, or write diverged",
        ),
        (RUNS.assign(arm=None), {}, "6 lines have no arm, the first of arm None, seed 1"),
        (pd.DataFrame(), {}, "has no column arm, seed, value; there is none"),
        (
            RUNS.assign(weight=[0, "1"] * 3),
            {},
            "3 lines have no weight from 1e-30 to 1e+30, the first of arm a, seed 1",
        ),
        *(
            (UNITS.assign(weight=weight), {}, "30 lines have no weight from 1e-30 to 1e+30")
            for weight in (1e-320, 1e200)
        ),
        (RUNS.assign(value=[1e300] + [1.0] * 5), {}, "a line has no value up to 1e+30, the first of arm a, seed 1"),
        (RUNS.assign(metric=["loss", "error"] * 3), {}, "name one of loss, error"),
        (RUNS.assign(metric="loss"), {"metric": "los"}, "no metric los; did you mean 'loss'?"),
        (RUNS.assign(better=["lower", "higher"] * 3), {}, "better is higher, lower; of one metric it is"),
        (RUNS.assign(state="bogus"), {}, "state bogus; it is finished, unfinished, diverged"),
        (UNITS.assign(group=["x"] + ["y"] * 29), {}, "not measured on the same units: a unit's weight or group"),
        (dict(arm=[1]), {}, "must be a CSV file or a pandas.DataFrame, not dict"),
    ],
)
def test_a_table_that_can_not_be_judged_is_refused_in_one_line(table, options, said):
    with pytest.raises(RunError) as error:
        lm.judge(table, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("right", "verdict"),
    [(16, "not learned"), (20, "not learned"), (100, "undecided")],  # of 128; 20 may be by chance
)
def test_runs_that_do_not_beat_chance_have_not_learned(right, verdict):
    runs = pd.DataFrame({"value": np.arange(128) < right, "sample": range(128)}).astype(float)
    table = pd.concat(runs.assign(arm=arm, seed=seed) for arm in "ab" for seed in range(3))
    assert lm.judge(table, better="higher").verdict[1] != "not learned"
    assert lm.judge(table.assign(chance=0.125), better="higher").verdict[1] == verdict
    assert "not learned: no run of either arm is better than learning" in lm.judge(RUNS.assign(chance=0.0)).words[1]


@pytest.mark.parametrize(
    ("offset", "factor", "bounds"), [(0, 1, None), (0, 1, (0, 1)), (0, 100, (0, 100)), (1, -1, (0, 1))]
)
@pytest.mark.parametrize("unpaired", [False, True])
def test_an_accuracy_in_per_cent_and_an_error_rate_get_an_accuracys_verdict(offset, factor, bounds, unpaired):
    accuracies = pd.DataFrame(
        {
            "arm": np.repeat(["a", "b"], 5),
            "seed": [*range(5)] * 2,
            "value": [1, 0.99, 1, 0.99, 1, 0.99, 1, 0.99, 1, 0.99],
        }
    )
    table = accuracies.assign(value=offset + factor * accuracies["value"])
    options = {"better": "lower" if factor < 0 else "higher", "matters": 0.25 * abs(factor), "unpaired": unpaired}
    judged = lm.judge(table, bounds=bounds, **options).iloc[1]
    assert judged["verdict"] == "undecided"
    assert "an arm may fail in some seeds and in none of 5" in judged["reason"]
    without_bounds = lm.judge(table, bounds=(-math.inf, math.inf), **options).iloc[1]
    assert without_bounds["verdict"] == "no difference above margin"
    with pytest.raises(RunError, match=r"outside of the bounds 200 and 300"):
        lm.judge(table, bounds=(200, 300), **options)


def test_the_seeds_that_a_verdict_needs_are_enough_to_see_an_arm_that_fails_in_some():
    rows = [("a", seed, 1 - seed % 2 / 100) for seed in range(5)] + [
        ("b", seed, 0.99 + seed % 2 / 100) for seed in range(5)
    ]
    table = pd.DataFrame(rows, columns=["arm", "seed", "value"])
    judged = lm.judge(table, better="higher", matters=0.25).iloc[1]
    assert judged["seeds_needed"] == 11
    assert "takes at least 11" in judged["reason"]


def test_ranges_of_positions_are_judged_by_their_mean():
    rows = [
        {"arm": arm, "seed": seed, "sample": sample, "x": x, "until": until, "value": (arm == "b") + seed / 10 + x}
        for arm in "ab" for seed in range(3) for sample in range(2) for x, until in ((0, 1), (1, 4))
    ]  # fmt: skip
    judged = lm.judge(pd.DataFrame(rows))
    assert judged["mean"].tolist() == pytest.approx([0.85, 1.85])
    assert lm.judge(pd.DataFrame(rows), where="x == 0")["mean"].tolist() == pytest.approx([0.1, 1.1])


def test_weights_count_within_a_run_only_as_parts_of_their_sum():
    expected = lm.judge(UNITS.assign(weight=UNITS["unit"] + 1.0))
    pd.testing.assert_frame_equal(lm.judge(UNITS.assign(weight=(UNITS["unit"] + 1.0) * UNITS["seed"])), expected)
    pd.testing.assert_frame_equal(lm.judge(RUNS.assign(weight=[1.0, 2.0] * 3)), lm.judge(RUNS))
    pd.testing.assert_frame_equal(lm.judge(UNITS.assign(weight=[None, 3.0] * 15)), lm.judge(UNITS))


@pytest.mark.parametrize(
    ("column", "names"),
    [("arm", ["a", "None"]), ("arm", ["a", "NA"]), ("variant", ["a", "null"]), ("variant", ["false", "true"])],
)
def test_arms_may_have_the_names_of_missing_and_of_truth_values(column, names, tmp_path):
    runs = RUNS.assign(arm=RUNS["arm"].replace(dict(zip("ab", names, strict=True)))).rename(columns={"arm": column})
    runs.to_csv(tmp_path / "runs.csv", index=False)
    arms = lm.judge(tmp_path / "runs.csv", arm=column, baseline=names[0])["arm"]
    assert arms.map(str).str.casefold().tolist() == [name.casefold() for name in names]  # pandas reads truth values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arm,seed,value, Value\na,1,4,5\n", "two columns are named"),
        ("arm,seed,value,,\na,1,4,,\n", "two columns are named nothing; rename or drop one"),
        ("arm,seed,value\na,1,4,5\nb,1,4,5\n", "lines have more fields than the header"),
        ("arm,seed,value\na,1,4\nb,1,4,5\n", "no CSV table: Error tokenizing data"),
    ],
)
def test_a_header_that_does_not_fit_its_lines_is_refused(tmp_path, text, said):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(RunError, match=rf"^{tmp_path}/runs.csv: {said}"):
        lm.judge(tmp_path / "runs.csv")


COMPRESSED = [".gz", ".xz", ".bz2", ".zip", ".zst", ".tar.gz"]


@pytest.mark.parametrize("suffix", ["", *COMPRESSED])
def test_a_compressed_table_is_read(tmp_path, suffix):
    path = tmp_path / f"runs.csv{suffix}"
    RUNS.to_csv(path, index=False)
    assert lm.judge(path)["verdict"].tolist()[1:] == ["better"]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_damaged_compressed_table_is_one_line(tmp_path, suffix):
    path = tmp_path / f"runs.csv{suffix}"
    RUNS.to_csv(path, index=False)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"\x1f\x8b\x08\x00", b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="no CSV table"):
            lm.judge(path)


@pytest.mark.parametrize(("arms", "seeds"), [(2, 15_000), (3_000, 3)])
def test_judging_takes_time_in_proportion_to_the_table(arms, seeds):
    """A hundred thousand rows took minutes; with a third or a tenth of them quadratic time shows."""
    table = pd.DataFrame({"arm": np.repeat(range(arms), seeds), "seed": np.tile(range(seeds), arms)})
    table["value"] = np.random.default_rng(1).normal(size=len(table))
    start = time.process_time()
    lm.judge(table)
    assert time.process_time() - start < 6


def test_the_command_says_which_seeds_a_mean_is_over_and_each_cause_once(tmp_path):
    third = RUNS[RUNS["arm"] == "b"].assign(arm="c")
    pd.concat([RUNS, third.assign(state=["diverged", "finished", "finished"])]).to_csv(
        tmp_path / "runs.csv", index=False
    )
    out = command("judge", str(tmp_path / "runs.csv")).stdout
    assert "common" in out
    assert "c: unstable: 1 final run diverged: c seed 1: diverged" in out
    RUNS.to_csv(tmp_path / "runs.csv", index=False)
    assert "common" not in command("judge", str(tmp_path / "runs.csv")).stdout


def test_an_empty_table_and_wrong_numbers_are_refused(tmp_path):
    (tmp_path / "empty.csv").write_text("")
    result = command("judge", str(tmp_path / "empty.csv"))
    assert (result.returncode, "empty.csv: no CSV table" in result.stderr) == (1, True)
    with pytest.raises(ConfigError, match="matters"):
        lm.judge(RUNS, matters=-1)
    with pytest.raises(ConfigError, match="target = 'low': must be a finite number"):
        lm.judge(RUNS, target="low")


BOUNDS = ("", "__MIN", "__MAX")  # of each column that wandb exports


def test_the_example_of_the_page_judges_an_export_of_wandb(tmp_path, monkeypatch):
    code = next(
        block for block in code_blocks((ROOT / "docs" / "experiments.md").read_text(), "python") if "lm.judge" in block
    )
    values = {
        f"{arm}-seed{seed} - eval/loss{bound}": [5.0, value]
        for arm, seed, value in RUNS.itertuples(index=False)
        for bound in BOUNDS
    }
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"Step": [100, 200], **values}).to_csv("wandb_export.csv", index=False)
    exec(code, names := {})
    assert names["verdicts"]["verdict"].tolist()[1:] == ["better"]
    assert Path("runs.csv").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["judge", "TABLE"],
        ["judge", "TABLE", "--baseline", "x\x1b[31m"],
        ["judge", "TABLE", "--baseline", "x\u202egnp\u2028"],
        ["train", "x\x1b[31m"],
        ["train", "softmax", "x\x1b[31m=1"],
        ["report", "x\x1b]0;title\x07"],
        ["compare", "x\x9b31m"],
    ],
    ids=lambda words: words[0],
)
def test_no_control_character_of_a_name_reaches_the_terminal(tmp_path, words):
    table = tmp_path / "runs.csv"
    RUNS.assign(arm=RUNS["arm"].replace("b", "b\x1b[2J")).to_csv(table, index=False)
    result = command(*[str(table) if word == "TABLE" else word for word in words])
    output = result.stdout + result.stderr
    assert re.search(r"\\x1b|\\x9b|\\u202e", output)
    assert all(letter.isprintable() or letter == "\n" for letter in output)


def test_a_table_is_judged_without_torch():
    code = "import sys, lm.experiments.run_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
