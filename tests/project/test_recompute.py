"""Tables and pictures of docs/ that scripts/recompute.py makes from results/."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from conftest import ROOT

from lm.statistics.verdicts import Comparison, judge_comparisons

sys.path.insert(0, str(ROOT / "scripts"))
import collect
import committed_results
import recompute
from loss_results import LossResults, TableColumn
from size_results import LossResultsBySize


@pytest.fixture
def commit(monkeypatch, tmp_path) -> Callable[..., None]:
    """What writes lines of runs as the results of an experiment, by default `made`. There are no others."""

    def write(lines: list[dict[str, object]], name: str = "made") -> None:
        (tmp_path / name).mkdir()
        pd.DataFrame(lines).to_csv(tmp_path / name / "seeds.csv", index=False)
        monkeypatch.setattr(committed_results, "RESULTS_FOLDER", tmp_path)

    return write


def test_pages_are_what_their_results_say(monkeypatch, tmp_path):
    pages = {path: content for path, content in recompute.content_by_generated_path().items() if path.suffix == ".md"}
    assert len(pages) > 5
    assert [path.name for path, content in pages.items() if not recompute.is_current(path.read_bytes(), content)] == []

    data = (committed_results.RESULTS_FOLDER / "recall-tuned" / "seeds.csv").read_text().splitlines()
    place = next(
        i for i, line in enumerate(data) if line.startswith("tau_half,0.003,final,21,mqar accuracy,as trained,16384,")
    )
    line = data[place].split(",")
    line[-2] = "0.5"
    new_lines = [*data[:place], ",".join(line), *data[place + 1 :]]
    (tmp_path / "recall-tuned").mkdir()
    (tmp_path / "recall-tuned" / "seeds.csv").write_text("\n".join(new_lines))
    monkeypatch.setattr(committed_results, "RESULTS_FOLDER", tmp_path)
    (tuned,) = (
        replace(result) for result in recompute.ALL_RESULTS if result.table_name == "recall-tuned"
    )  # nothing read yet
    page = (ROOT / "docs" / "retrieval.md").read_text()
    new_page = recompute.insert_table(page, "recall-tuned", tuned.table())
    differing = [new for new, old in zip(new_page.splitlines(), page.splitlines(), strict=True) if new != old]
    assert len(differing) == 1
    assert "temperature 1/2" in differing[0]


QUICK = ("eight-times-after", "recall-all", "recall-tuned", "overview-arms")  # a picture of each kind


@pytest.mark.usefixtures("drawn_pictures")
def test_a_picture_of_each_kind_is_what_its_results_say():
    pictures = {
        ROOT / "docs" / f"{result.table_name}.svg": result.draw_picture()
        for result in recompute.ALL_RESULTS
        if result.table_name in QUICK
    }
    assert len(pictures) == len(QUICK)
    assert [
        path.name for path, content in pictures.items() if not recompute.is_current(path.read_bytes(), content)
    ] == []


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_pictures")
def test_all_pages_and_pictures_are_what_their_results_say(monkeypatch):
    monkeypatch.setattr("sys.argv", ["recompute.py", "--check"])
    assert recompute.main() == 0


def test_losses_are_compared_in_pairs_and_hold_at_every_rate_in_settings_that_chose_none(commit):
    def run(arm: str, rate: float, losses: tuple[float, float]) -> list[dict[str, object]]:
        return [
            {
                "size": "text",
                "arm": arm,
                "rate": rate,
                "stage": "final",
                "seed": seed,
                "metric": "mean loss",
                "setting": setting,
                "x": 512,
            }
            | {"value": loss + 0.001 * seed * (arm == "arm")}
            for setting, loss in zip(("tuned", "other"), losses, strict=True)
            for seed in range(5)
        ]

    lines = (
        run("base", 0.1, (4.0, 5.0))
        + run("base", 0.2, (4.1, 4.5))
        + run("arm", 0.2, (3.9, 4.8))
        + run("arm", 0.1, (3.95, 4.8))
    )
    commit(lines)
    columns = {setting: TableColumn("", "mean loss", setting, 512) for setting in ("tuned", "other")}
    labels = {"base": "a baseline", "arm": "an arm"}
    result = LossResults("made", "", labels, (("arm", "base"),), columns, ("tuned", "other"), "tuned", 0.02, "text")
    assert result.table().splitlines()[2:] == [
        "| a baseline | 1e-1 | 4.000 (0.000) | 5.000 (0.000) |",
        "| an arm | 2e-1 | 3.902 (0.002) | 4.802 (0.002) |",
    ]
    (row,) = result.verdict_table().splitlines()[2:]
    cells = row.split(" | ")
    assert cells[2].startswith("-0.098 [")
    assert cells[2].endswith("*better by more than 0.02*")
    assert cells[3].startswith("-0.198 [")  # at its own rate, but worse than the baseline at the other one
    assert "undecided" in cells[3]


def test_the_change_with_each_doubling_pairs_sizes_of_one_experiment_and_is_welchs_between_two(commit):
    rng, losses = np.random.default_rng(1), {}
    sizes = {"small": ("made", 100), "middle": ("other", 200), "large": ("made", 400)}
    for name in ("made", "other"):
        lines = []
        for size in [size for size, (folder, _) in sizes.items() if folder == name]:
            losses[size] = {arm: rng.normal(4, 0.1, 5 if name == "made" else 8) for arm in ("base", "arm")}
            fields = {"rate": 0.1, "stage": "final", "metric": "mean loss", "setting": "tuned", "x": 512}
            fields |= {"size": size} if name == "made" else {}  # an experiment of one size has no column for it
            lines += [
                fields | {"arm": arm, "seed": seed, "value": value}
                for arm, values in losses[size].items()
                for seed, value in enumerate(values)
            ]
        commit(lines, name)
    labels = {f"{arm} {size}": f"{arm}, {size}" for size in sizes for arm in ("base", "arm")}
    result = LossResultsBySize(
        "made",
        "",
        labels,
        tuple((f"arm {size}", f"base {size}") for size in sizes),
        {"tuned": TableColumn("", "mean loss", "tuned", 512)},
        ("tuned",),
        "tuned",
        arm_labels={"base": "a baseline", "arm": "an arm"},
        sizes=sizes,
    )
    small, middle, large = (losses[size]["arm"] - losses[size]["base"] for size in sizes)
    change = (large - small) / 2  # the line's slope over two doublings, by seed; the middle has no part in it
    mean, half = change.mean(), scipy.stats.t.ppf(0.975, 4) * change.std(ddof=1) / np.sqrt(5)
    expected = f"| an arm | {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] |"
    assert result.size_trend_table().splitlines()[-1] == expected
    assert [line.split(" | ")[0] for line in result.table().splitlines()[2:]] == [f"| {x}" for x in labels.values()]
    assert result.verdicts["arm small", "base small", "tuned"].interval.mean == pytest.approx(small.mean())

    two = replace(result, sizes={"small": ("made", 100), "middle": ("other", 200)})
    interval = scipy.stats.ttest_ind(middle, small, equal_var=False).confidence_interval()
    expected = "| an arm | {:+.3f} [{:+.3f}, {:+.3f}] |".format(middle.mean() - small.mean(), *interval)
    assert two.size_trend_table().splitlines()[-1] == expected


def test_means_over_positions_weigh_each_bin_by_its_tokens_and_losses_stand_by_tokens_seen(monkeypatch, tmp_path):
    run = {"size": None, "arm": "a", "rate": 0.1, "stage": "final", "seed": 1, "state": "finished", "folder": "run"}
    run |= {"task": "", "part": "reports", "weight": 1.0}
    long = run | {"kind": "long", "quantity": "loss", "setting": "as trained", "step": 8, "tokens": 80}
    lines = [
        long | {"x": x, "until": end, "sample": n, "value": loss + n}
        for x, end, loss in ((0, 1, 9.0), (1, 4, 5.0))
        for n in (0, 2)
    ]
    validation = {"kind": "validation", "quantity": "val/loss", "setting": "", "x": math.nan, "sample": 0}
    lines += [run | validation | {"step": step, "tokens": 10 * step, "value": 8.0 / step} for step in (4, 8)]
    lines.append(lines[0] | {"arm": "b", "folder": "stopped", "state": "unfinished"})
    monkeypatch.setattr(collect.lm, "results", lambda folder, history: pd.DataFrame(lines))
    monkeypatch.setattr(collect, "RESULTS_FOLDER", tmp_path)
    frame = pd.read_csv(collect.collect(tmp_path, "made"))
    numbers = {(line.metric, line.x): (line.value, line.sequences) for line in frame.itertuples()}
    losses = {("val loss", 0): (1, 1), ("val loss by tokens", 40): (2, 1), ("val loss by tokens", 80): (1, 1)}
    assert numbers == {("loss", 0): (10, 2), ("loss", 1): (6, 2), ("mean loss", 4): (7, 2)} | losses
    lines = [line | {"seed": 2, "folder": "other"} for line in lines]
    for _ in range(2):  # a run that is added again replaces its lines
        both = pd.read_csv(collect.collect(tmp_path, "made", keep_other_runs=True))
        assert both.equals(pd.concat([frame, frame.assign(seed=2)]).sort_values(collect.KEY_COLUMNS, ignore_index=True))
    lines += [line | {"folder": "third"} for line in lines]
    with pytest.raises(SystemExit, match="other and third differ in configuration alone"):
        collect.collect(tmp_path, "made")


def test_the_readme_says_what_its_first_experiment_found():
    runs = pd.read_csv(committed_results.RESULTS_FOLDER / "first" / "seeds.csv").query(
        "metric == 'mqar accuracy' and setting == 'as trained' and x == 2048"
    )
    accuracies = {arm: lines.sort_values("seed")["value"].to_numpy() for arm, lines in runs.groupby("arm")}
    (verdict,) = judge_comparisons(
        {"cooler": Comparison(accuracies["cooler"] - accuracies["softmax"], higher_is_better=True)}, 0.3
    ).values()
    mean, low, high = verdict.interval.as_list()
    sentence = f"{verdict.statement_without_seeds}, a difference of {mean:.2f} [{low:.2f}, {high:.2f}]"
    assert sentence in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("every", [False, True])
def test_arms_that_share_no_rate_are_compared_at_their_own(every: bool):
    baseline = 4 + 0.001 * np.sin(np.arange(8))
    arm = baseline + 0.1 + 0.001 * np.cos(np.arange(8))
    comparison = committed_results.compare_at_best_rates(
        {0.1: arm}, {0.2: baseline}, higher_is_better=False, other_values_chose_rates=every
    )
    assert judge_comparisons({"arm": comparison}, 0.01)["arm"].statement_without_seeds == "worse by more than 0.01"
