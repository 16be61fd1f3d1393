"""The verdicts of docs/*-verdicts.csv, which earlier versions gave, under the rules of docs/statistics.md.

python scripts/rejudge.py

Those files hold no seeds, but means, 95 % Student t intervals that were not adjusted, and p adjusted after Holm. Of arms at one rate the
interval gives the standard error, and so the new interval. Of arms at several rates it covers all of them and can't be made longer exactly:
there the word follows from bounds of p, or from the old interval, within which the new one cannot be.
"""

import csv
import math
from pathlib import Path

from scipy.stats import t

from lm.statistics.intervals import ALPHA

ROOT = Path(__file__).resolve().parent.parent
MARGINS = {"recipes-long": 0.02, "retrieval-one-symbol": 0.1}  # others: 0.01
HIGHER = {"retrieval-one-symbol"}
BY_SIZE = {"modern"}  # the sizes were judged one at a time


def rejudged(name: str, line: dict[str, str], adjusted: list[float], family: int) -> tuple[str, str]:
    """The new interval, or p, and the new word.

    Args:
        name: of the experiment.
        line: of its file.
        adjusted: p of the comparisons that were judged together, after Holm, ascending.
        family: how many comparisons the experiment has.
    """
    mean, low, high = (float(line[column]) for column in ("difference", "difference low", "difference high"))
    seeds, p, margin = int(line["runs"]), float(line["p"]), MARGINS.get(name, 0.01)
    better = "better" if (mean > 0) == (name in HIGHER) else "worse"
    rates = sum(bool(value) for column, value in line.items() if column.startswith("means_by_rate"))
    if rates < 2 and math.isclose(mean - low, high - mean, rel_tol=1e-6):
        half = (high - mean) * t.ppf(1 - ALPHA / 2 / family, seeds - 1) / t.ppf(1 - ALPHA / 2, seeds - 1)
        low, high = mean - half, mean + half
        within, without_0 = low > -margin and high < margin, low > 0 or high < 0
        word = ("difference below margin" if within else better) if without_0 else "no difference above margin" if within else "undecided"
        return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]", word
    # Holm multiplies the p of a rank by the number of ranks from it on, and lets none be below one of a lower rank: of equal ones the first
    # is exact.
    ranks = adjusted.index(p), len(adjusted) - 1 - adjusted[::-1].index(p)
    least, most = (min(1.0, family * p / (len(adjusted) - rank)) for rank in ranks)
    word = better if most <= ALPHA else "undecided" if least > ALPHA or low < 0 < high else "open"
    return f"{mean:+.4f}, p = {least:.2g}" + (f" to {most:.2g}" if most > least else ""), word


def main() -> None:
    """Print a table, one line a comparison."""
    print("| experiment | arm | margin | difference, not adjusted | earlier | difference, all intervals together | now |")
    print("|---|---|---:|---|---|---|---|")
    for path in sorted((ROOT / "docs").glob("*-verdicts.csv")):
        name = path.stem.removesuffix("-verdicts")
        judged = [line for line in csv.DictReader(path.open()) if line["verdict"]]
        for line in judged:
            together = [float(other["p"]) for other in judged if name not in BY_SIZE or other["size"] == line["size"]]
            now, word = rejudged(name, line, sorted(together), len(judged))
            mean, low, high = (float(line[column]) for column in ("difference", "difference low", "difference high"))
            arm = " ".join(filter(None, (line["size"], line["arm"])))
            before = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}] | {line['verdict']}"
            print(f"| {name} | {arm} | {MARGINS.get(name, 0.01):g} | {before} | {now} | {word} |")


if __name__ == "__main__":
    main()
