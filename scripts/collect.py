"""Collect the results of every run of an experiment in results/NAME/seeds.csv.

python scripts/collect.py FOLDER NAME [--add]

A line is a run's mean of one metric at one inference setting and length, on the held-out documents that choose no
learning rate. Final runs, which are trained after rates are chosen, also have losses by position and by training
tokens. `--add` keeps the lines of other runs, such as seeds that another machine has trained.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from committed_results import KEPT_DIAGNOSTICS, RESULTS_FOLDER

import lm

KEY_COLUMNS = ["arm", "rate", "stage", "seed", "metric", "setting", "x"]


def collect(folder: Path, name: str, keep_other_runs: bool = False) -> Path:
    """Write results/NAME/seeds.csv from the runs below `folder`, and return its path.

    keep_other_runs: whether lines of other runs in the file are kept. Raises LMError: there are no runs.
    """
    lines = lm.results(folder, history=True)
    for run_folder, state in lines[lines.state != "finished"].groupby("folder").state.first().items():
        print(f"note: {run_folder}: {state}, left out", file=sys.stderr)
    lines = lines.query("state == 'finished' and part == 'reports'")
    lines = lines.assign(metric=lines.quantity.replace("val/loss", "val loss"))  # as the committed tables name it
    is_described = lines.metric.isin(KEPT_DIAGNOSTICS) & (lines.setting == "as trained") & lines.x.isna()
    lines = lines[(lines.kind != "diagnostics") | is_described].fillna({"x": 0, "stage": "final"})
    curves = lines[(lines.metric == "val loss") & (lines.stage == "final")]
    curves = curves.assign(metric="val loss by tokens", x=curves.tokens)
    lines = lines[lines.step == lines.groupby(["folder", "kind"]).step.transform("max")]
    lines["metric"] = (lines.task + " " + lines.metric).str.strip()
    keys = KEY_COLUMNS if lines["size"].isna().all() else ["size", *KEY_COLUMNS]
    folders = lines.groupby(keys[: keys.index("metric")])["folder"].unique()
    for run_folders in folders[folders.map(len) > 1]:
        raise SystemExit(
            f"error: {run_folders[0]} and {run_folders[1]} differ in configuration alone: move one elsewhere"
        )
    bins = lines[lines.until.notna()]
    ends = bins.groupby(["folder", "metric", "setting"]).until.transform("max")
    means = bins.assign(metric="mean " + bins.metric, weight=bins.weight * (bins.until - bins.x), x=ends)
    # by position, around a swap as means alone
    selected = lines[lines.until.isna() | ((lines.stage == "final") & (lines.kind != "swap"))]
    lines = pd.concat([selected, means, curves]).assign(weighted=lambda lines: lines.weight * lines.value)
    sums = lines.groupby(keys, as_index=False).agg(
        weighted=("weighted", "sum"), weight=("weight", "sum"), sequences=("sample", "nunique")
    )
    sums["value"] = sums.weighted / sums.weight
    sums["value"], sums["x"] = sums.value.map("{:.6g}".format), sums.x.astype(int)
    path = RESULTS_FOLDER / name / "seeds.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep_other_runs and path.exists():
        run, lines = keys[: keys.index("metric")], pd.read_csv(path, dtype={"value": str})
        if ("size" in keys) != ("size" in lines):
            raise SystemExit(
                f"error: {path}: {'has no sizes' if 'size' in keys else 'has sizes'}, other than the runs below "
                f"{folder}"
            )
        others = ~pd.MultiIndex.from_frame(lines[run]).isin(pd.MultiIndex.from_frame(sums[run]))
        sums = pd.concat([lines[others], sums])
    sums.sort_values(keys)[[*keys, "value", "sequences"]].to_csv(path, index=False, lineterminator="\n")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--add", action="store_true")
    arguments = parser.parse_args()
    print(collect(arguments.folder, arguments.name, arguments.add))
