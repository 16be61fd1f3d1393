"""docs/theory.md: what the papers on attention normalization state, and what trained models do.

    python scripts/theory.py --text runs/quickstart-text

Reads folders that `lm compare configs/experiments/quickstart-text.yaml` makes, or those of several experiments. Of each
arm the run of the lowest seed is described (`lm diagnose`, kept in its evaluations/), at the learning rate that the arm
was judged at. Writes the page, its picture and a table of all values.
"""

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from pages import canvas, finish, logarithmic_x, rendered, saved
from theory_statements import KEYS, OF_5, TRAINED, Described, compared, values

from lm.diagnostics.attention_rows import NO_FIRST
from lm.errors import LMError, RunError
from lm.evaluation.diagnostics import diagnose
from lm.experiments.compare import VERDICTS
from lm.files import read_json, write_together
from lm.report.pictures import colour_and_marker
from lm.runs.folder import CONFIG, read_config

FAMILIES = "eval.diagnostics.statistics=[concentration,sparsity,limits]"
TEMPLATE = Path(__file__).parent / "theory.md.j2"


def run_folders(root: Path) -> list[Path]:
    """All run folders below `root`, or itself, in the order of arms and seeds. Raises RunError: there are none."""
    folders = [path.parent for path in root.rglob(CONFIG)]
    if not folders:
        raise RunError(f"{root}: no run folders there: make them with lm compare")
    return sorted(folders, key=lambda folder: (folder.parent, folder.name.split("-seed")[0], read_config(folder).seed))


def judged_rates(experiment: Path) -> dict[tuple[str | None, str | None], float | str | None]:
    """The learning rate that each arm of an experiment was judged at, by size and arm as runs name them; {} of runs
    that are of none, or that has no verdicts yet. `experiment`: its folder, or that of one of its sizes, whose verdicts
    lie in the folder above.
    """
    files = (folder / f"{VERDICTS}.json" for folder in (experiment, experiment.resolve().parent))
    verdicts = next((file for file in files if file.is_file()), None)
    return (
        {(line["size"] or None, line["arm"]): line["rate"] for line in read_json(verdicts)["arms"]} if verdicts else {}
    )


def first_runs(experiment: Path) -> dict[str, Path]:
    """The run of the lowest seed of each arm (and size) in a folder, at the learning rate that the arm was judged at,
    softmax first; by the label of the normalizer, with size and arm where several share it.

    Raises RunError: there are no such runs.
    """
    rates, configs = judged_rates(experiment), {folder: read_config(folder) for folder in run_folders(experiment)}
    places = {folder: config.experiment for folder, config in configs.items()}
    of_no_arm = math.nan if rates else None  # equals no rate
    judged_folders = [
        folder for folder, place in places.items() if place.rate == rates.get((place.size, place.arm), of_no_arm)
    ]
    if not judged_folders:
        raise RunError(
            f"{experiment}: says of no run that its learning rate was judged: finish the experiment with lm compare"
        )
    folders: dict[tuple[str, ...], Path] = {}
    for folder in sorted(judged_folders, key=lambda folder: configs[folder].seed):
        label, place = configs[folder].model.normalizer.label(), places[folder]
        folders.setdefault((label, *(name for name in (place.size, place.arm) if name)), folder)
    shared = Counter(label for label, *_ in folders)
    arms = sorted(folders, key=lambda arm: arm[0] != "softmax")
    return {", ".join(arm) if shared[arm[0]] > 1 else arm[0]: folders[arm] for arm in arms}


def described(arm: str, folder: Path) -> Described:
    """The diagnostics of a run on text."""
    (result,), config = diagnose([folder], overrides=[FAMILIES]), read_config(folder)
    name, normalizer = config.experiment.name or "", config.model.normalizer
    return Described(
        name, arm, normalizer, folder, result.evaluation.step, config.data.seq_len, result.evaluation.series
    )


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
        for axes, metric in zip(
            grid.flat[2:], (OF_5, "N_s / N", "D of the largest weights", "change of weights"), strict=True
        ):
            lines = [
                curve for curve in models[0].series if (curve.metric, curve.setting) == (metric, TRAINED) and curve.axis
            ]
            for index, series in enumerate(lines):
                axes.plot(series.axis.values, series.means, label=series.what, markersize=3, **colour_and_marker(index))
            for series in lines[:1]:
                logarithmic_x(axes, series.axis.values)
                axes.set(title=f"{metric}, {models[0].arm}", xlabel=series.axis.name, ylabel=series.unit)
        grid[1, 2].set_yscale("log")
        for axes in grid.flat:
            finish(axes, place="lower left" if axes is grid[1, 2] else "best")
        return saved(figure)


def page_of(experiments: list[list[Described]], text: list[Path]) -> str:
    """The text of docs/theory.md, from the models of each experiment and their folders."""
    tables = [compared(models) for models in experiments]
    made_in = [{(statement.source, statement.says): statement for statement in table} for table in tables]
    statements = {(statement.source, statement.says): statement for table in tables for statement in table}
    return rendered(
        TEMPLATE,
        experiments=experiments,
        statements=[
            (statements[key], [table[key].outcome if key in table else "-" for table in made_in])
            for key in KEYS
            if key in statements
        ],
        names=[models[0].experiment for models in experiments],
        text=text,
    )


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, nargs="+", help="folders of experiments on text")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/theory.md"), help="page to write; pictures and values lie beside it"
    )
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    start = time.perf_counter()
    on_text = [first_runs(experiment) for experiment in arguments.text]
    experiments = [[described(arm, folder) for arm, folder in arms.items()] for arms in on_text]
    files = {"theory-statements.csv": values(experiments), "theory-statements.svg": statements_picture(experiments[0])}
    text = page_of(experiments, arguments.text)
    write_together(
        {arguments.out: text.encode(), **{arguments.out.parent / name: content for name, content in files.items()}}
    )
    print(f"{arguments.out}, {', '.join(files)}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LMError as error:
        sys.exit(str(error))
