"""docs/theory.md: what the papers on attention normalization state, and what trained models do.

    python scripts/theory.py --text runs/quickstart-text --recall runs/quickstart-recall

Reads folders that `lm compare configs/experiments/quickstart-{text,recall}.yaml` makes; --text takes those of several experiments. Of each
arm on text the run of the lowest seed is described (`lm diagnose`, kept in its evaluations/), at the learning rate that the arm was judged
at. Writes the page, its pictures and a table of all values.
"""

import argparse
import math
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from pages import canvas, finish, logarithmic_x, rendered, saved
from scipy.stats import spearmanr
from theory_prediction import CLEAR, LEARNED, SEQUENCES, Run, Score, measured, observed, scores
from theory_statements import KEYS, OF_5, TRAINED, Described, compared, not_measured, values

from lm.diagnostics.attention_rows import NO_FIRST
from lm.errors import LMError, RunError
from lm.evaluation.diagnostics import diagnose
from lm.experiments.compare import VERDICTS
from lm.files import write_together
from lm.report.pictures import colour_and_marker
from lm.runs.folder import CONFIG, read_config, read_json

FAMILIES = "eval.diagnostics.statistics=[concentration,sparsity,limits]"
TEMPLATE = Path(__file__).parent / "theory.md.j2"
FARTHEST = 2**16  # tokens: predictions beyond are drawn there


def run_folders(root: Path) -> list[Path]:
    """All run folders below `root`, or itself, in the order of arms and seeds. Raises RunError: there are none."""
    found = [path.parent for path in root.rglob(CONFIG)]
    if not found:
        raise RunError(f"{root}: no run folders there: make them with lm compare")
    return sorted(found, key=lambda one: (one.parent, one.name.split("-seed")[0], read_config(one).seed))


def judged_rates(experiment: Path) -> dict[tuple[str | None, str | None], float | str | None]:
    """The learning rate that each arm of an experiment was judged at, by size and arm as runs name them; {} of runs that are of none, or
    that has no verdicts yet. `experiment`: its folder, or that of one of its sizes, whose verdicts lie in the folder above."""
    files = (folder / f"{VERDICTS}.json" for folder in (experiment, experiment.resolve().parent))
    verdicts = next((file for file in files if file.is_file()), None)
    return {(line["size"] or None, line["arm"]): line["rate"] for line in read_json(verdicts)["arms"]} if verdicts else {}


def first_runs(experiment: Path) -> dict[str, Path]:
    """The run of the lowest seed of each arm (and size) in a folder, at the learning rate that the arm was judged at, softmax first; by the
    label of the normalizer, with size and arm where several share it.

    Raises RunError: there are no such runs.
    """
    rates, configs = judged_rates(experiment), {folder: read_config(folder) for folder in run_folders(experiment)}
    places = {folder: config.experiment for folder, config in configs.items()}
    of_no_arm = math.nan if rates else None  # equals no rate
    judged = [folder for folder, place in places.items() if place.rate == rates.get((place.size, place.arm), of_no_arm)]
    if not judged:
        raise RunError(f"{experiment}: says of no run that its learning rate was judged: finish the experiment with lm compare")
    found: dict[tuple[str, ...], Path] = {}
    for folder in sorted(judged, key=lambda one: configs[one].seed):
        label, place = configs[folder].model.normalizer.label(), places[folder]
        found.setdefault((label, *(name for name in (place.size, place.arm) if name)), folder)
    shared = Counter(label for label, *_ in found)
    ordered = sorted(found, key=lambda arm: arm[0] != "softmax")
    return {", ".join(arm) if shared[arm[0]] > 1 else arm[0]: found[arm] for arm in ordered}


def described(arm: str, folder: Path) -> Described:
    """The diagnostics of a run on text."""
    (one,), config = diagnose([folder], overrides=[FAMILIES]), read_config(folder)
    name, normalizer = config.experiment.name or "", config.model.normalizer
    return Described(name, arm, normalizer, folder, one.evaluation.step, config.data.seq_len, one.evaluation.series)


def statements_picture(models: list[Described]) -> bytes:
    """Curves behind the statements, by arm; those with several lines of an arm of the first one."""
    with canvas(2, 3, (10, 7)) as (figure, grid):
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
        for axes, metric in zip(grid[0, :2], ("largest weight" + NO_FIRST, "entropy"), strict=True):
            curves = {index: curve for index, model in enumerate(models) if (curve := model.curve(metric)) is not None}
            for index, curve in curves.items():
                axes.plot(curve.axis.values, curve.means, label=models[index].arm, **colour_and_marker(index))
            for curve in list(curves.values())[:1]:
                logarithmic_x(axes, curve.axis.values)
                axes.set(title=metric, xlabel="visible keys n", ylabel=curve.unit)
        grid[0, 0].set_yscale("log")
        grid[0, 0].yaxis.set_minor_formatter(lambda value, place: f"{value:g}")
        for axes, metric in zip(grid.flat[2:], (OF_5, "N_s / N", "D of the largest weights", "change of weights"), strict=True):
            lines = [one for one in models[0].series if (one.metric, one.setting) == (metric, TRAINED) and one.axis]
            for index, one in enumerate(lines):
                axes.plot(one.axis.values, one.means, label=one.what, markersize=3, **colour_and_marker(index))
            for one in lines[:1]:
                logarithmic_x(axes, one.axis.values)
                axes.set(title=f"{metric}, {models[0].arm}", xlabel=one.axis.name, ylabel=one.unit)
        grid[1, 2].set_yscale("log")
        for axes in grid.flat:
            finish(axes, place="lower left" if axes is grid[1, 2] else "best")
        return saved(figure)


def prediction_picture(runs: list[Run], forms: list[Score]) -> bytes:
    """Predicted and observed 50 % lengths, a panel for each form."""
    with canvas(1, len(forms), (3.3 * len(forms), 4.4), sharex=True, sharey=True) as (figure, row):
        arms = list(dict.fromkeys(run.arm for run in runs))
        for axes, form in zip(row, forms, strict=True):
            for run, predicted in zip(runs, form.predictions, strict=True):
                censored, style = math.isinf(run.observed), colour_and_marker(arms.index(run.arm))
                x = run.lengths[-1] if censored else run.observed
                fill = {"markerfacecolor": "none"} if censored else {}
                axes.plot(x, min(predicted, FARTHEST), linestyle="", markersize=6, **fill, **style)
            limits = runs[0].length, FARTHEST
            axes.plot(limits, limits, color="0.6", linewidth=1)
            finish(axes, title=form.name, xlabel="observed, tokens (hollow: not within)", xscale="log", yscale="log")
            axes.set_title(textwrap.fill(form.name, 26), fontsize=9)
        row[0].set_ylabel("50 % length predicted, tokens")
        for index, arm in enumerate(arms):
            row[0].plot([], [], linestyle="", label=arm, **colour_and_marker(index))
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        return saved(figure)


def row(part: list[Run], runs: list[Run], forms: list[Score]) -> dict[str, object]:
    """The line of one arm in the table of predictions."""
    plain, fitted = ([predicted for run, predicted in zip(runs, form.predictions, strict=True) if run in part] for form in forms[:2])
    fell = [run.observed for run in part if math.isfinite(run.observed)]
    seen = f"{min(fell):,.0f} to {max(fell):,.0f}" if fell else f"not up to {max(run.lengths[-1] for run in part):,}"
    return {
        "arm": part[0].arm,
        "runs": len(part),
        **{name: np.mean([getattr(run, name) for run in part]) for name in ("at_length", "effective", "s")},
        "margin": np.mean([np.median(run.found.margin) for run in part]),
        "slope": np.mean([run.found.slope.mean() for run in part]),
        "fell": len(fell),
        "observed": seen,
        "predicted": float(np.median(plain)),
        "fitted": float(np.median(fitted)),
        "threshold": forms[1].thresholds[part[0].arm],
    }


def remarks(runs: list[Run], forms: list[Score]) -> list[str]:
    """What the predictions say beyond their errors."""
    fell = [(run.observed, predicted) for run, predicted in zip(runs, forms[0].predictions, strict=True) if math.isfinite(run.observed)]
    if len(fell) < 3:
        return [f"{len(fell)} runs fell below one half: too few to say more."]
    observed, predicted = np.log2(np.array(fell)).T
    order, within, others = spearmanr(observed, predicted), [], []
    for arm in dict.fromkeys(run.arm for run in runs):
        pairs = [pair for pair, run in zip(fell, (run for run in runs if math.isfinite(run.observed)), strict=True) if run.arm == arm]
        if len(pairs) > 2:
            one = spearmanr(*zip(*pairs, strict=True))
            within.append(f"{one.statistic:.2f} (p = {one.pvalue:.2g}) of {arm}")
            lengths, formula = np.log2(np.array(pairs)).T
            seeds = (lengths.sum() - lengths) / (len(pairs) - 1)  # the mean of an arm's other seeds, for each
            errors = [np.abs(guess - lengths).mean() for guess in (seeds, formula)]
            others.append("{:.2f} octaves against the formula's {:.2f} of {}".format(*errors, arm))
    offset = float(np.mean(predicted - observed))
    return [
        f"Of the {len(fell)} runs that fell, the formula without a constant says {abs(offset):.2f} octaves too "
        f"{'long' if offset > 0 else 'short'} on average; {int((predicted < observed).sum())} predictions are too short.",
        f"It orders them with a rank correlation of {order.statistic:.2f} (p = {order.pvalue:.2g}) over runs of all arms. "
        f"Within an arm: {'; '.join(within) or 'fewer than 3 runs'}.",
        "A stronger baseline is the mean of an arm's other seeds, in the logarithm. It is off by: "
        f"{'; '.join(others) or 'not known of fewer than 3 runs'}.",
    ]


def page_of(experiments: list[list[Described]], runs: list[Run], unlearned: int, arguments: argparse.Namespace) -> str:
    """The text of docs/theory.md.

    Args:
        experiments: the models of each experiment on text.
        runs: those that have learned the task.
        unlearned: how many others there are.
        arguments: of the command.
    """
    evaluated = min(run.lengths[-1] for run in runs)
    first, second = [run.up_to(evaluated) for run in runs], runs
    looks = {f"up to {max(run.lengths[-1] for run in part):,}": (part, scores(part)) for part in (first, second)}
    forms, tables = scores(second), [compared(models) for models in experiments]
    made_in = [{(one.source, one.says): one for one in table} for table in tables]
    statements = {(one.source, one.says): one for table in tables for one in table}
    arms = {arm: [run for run in runs if run.arm == arm] for arm in dict.fromkeys(run.arm for run in runs)}
    return rendered(
        TEMPLATE,
        experiments=experiments,
        statements=[
            (statements[key], [table[key].outcome if key in table else "-" for table in made_in]) for key in KEYS if key in statements
        ],
        not_measured=not_measured(tables),
        runs=runs,
        unlearned=unlearned,
        forms=forms,
        table=[row(part, runs, forms) for part in arms.values()],
        looks=[
            (name, part, form, sum(math.isfinite(run.observed) for run in part)) for name, (part, made) in looks.items() for form in made
        ],
        remarks=remarks(runs, forms),
        evaluated=evaluated,
        further=sum(run.lengths[-1] > evaluated for run in runs),
        learned=LEARNED,
        clear=CLEAR,
        measured_on=SEQUENCES,
        longer=arguments.longer,
        sequences=arguments.sequences,
        names=[models[0].experiment for models in experiments],
        text=arguments.text,
        recall=arguments.recall,
    )


def main(given: list[str]) -> None:
    """Predict, look, describe, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, nargs="+", help="folders of experiments on text")
    parser.add_argument("--recall", type=Path, required=True, help="folder of runs of a recall experiment")
    parser.add_argument("--longer", type=int, nargs="*", default=[4096, 8192], help="lengths beyond the recall evaluation's, tokens")
    parser.add_argument("--sequences", type=int, default=8, help="test sequences at those lengths")
    parser.add_argument("--out", type=Path, default=Path("docs/theory.md"), help="page to write; pictures and values lie beside it")
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    started = time.perf_counter()
    on_text = [first_runs(experiment) for experiment in arguments.text]
    every = [measured(folder) for folder in run_folders(arguments.recall)]
    every = [observed(run, tuple(arguments.longer), arguments.sequences) for run in every]
    runs = [run for run in every if run.accuracy[0] >= LEARNED]
    if not runs:
        raise RunError(f"{arguments.recall}: none of {len(every)} runs has an accuracy of {LEARNED} at the training length: train longer")
    experiments = [[described(arm, folder) for arm, folder in arms.items()] for arms in on_text]
    beside = {
        "theory-statements.csv": values(experiments),
        "theory-statements.svg": statements_picture(experiments[0]),
        "theory-prediction.svg": prediction_picture(runs, scores(runs)),
    }
    text = page_of(experiments, runs, len(every) - len(runs), arguments)
    write_together({arguments.out: text.encode(), **{arguments.out.parent / name: content for name, content in beside.items()}})
    print(f"{arguments.out}, {', '.join(beside)}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LMError as error:
        sys.exit(str(error))
