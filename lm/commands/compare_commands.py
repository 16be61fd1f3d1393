"""Defines the commands that compare runs: `compare`, `judge`, `noise` and `report`."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Literal

import typer

from lm.errors import ConfigError

RunFolders = Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders, e.g. runs/softmax")]
ReportFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="folder to write [default: `report` in the run's folder; of several runs, beside the first]",
    ),
]
BaselineArm = Annotated[
    str | None,
    typer.Option(help="the arm that the others are compared with: its label or one of its runs [default: the first]"),
]
MetricName = Annotated[
    str, typer.Option(help="metric to judge, if the column metric has several; or the column of values")
]
RowCondition = Annotated[str, typer.Option(metavar="CONDITION", help="rows to take, e.g. x == 2048")]
ArmColumn = Annotated[str, typer.Option(metavar="COLUMN", help="the column of arms")]
SeedColumn = Annotated[str, typer.Option(metavar="COLUMN", help="the column of seeds")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
_EXIT_CODES = {"better": 0, "worse": 3, "difference below margin": 5, "no difference above margin": 5}


def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT|KEY=VALUE",
            help="YAML files of base, arms, seeds, tune, primary; and overrides of the base configuration",
        ),
    ],
    plan: Annotated[bool, typer.Option("--plan", help="print the plan, and train nothing")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="runs at a time, at most [default: all GPUs; 1 on a CPU]")
    ] = None,
    jobs_per_gpu: Annotated[int, typer.Option(min=1, help="runs at a time on each GPU")] = 1,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="judge the finished runs, and train nothing")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="try the runs that failed again")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="print a command for each run that can start now, and train nothing")
    ] = False,
    submit: Annotated[
        Literal["slurm", "local"] | None, typer.Option(help="train each run in a job of SLURM, or of this machine")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="with --submit: jobs at a time")] = 1,
    job_options: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="options of each job, e.g. partition=gpu,timeout_min=240")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="with --report-only: print verdicts.json of each experiment and nothing else")
    ] = False,
) -> None:
    """Train and compare the arms of an experiment.

    A file names arms, seeds and the learning rates to try; several files are worked on one after the other. Finished
    runs are kept and interrupted ones resumed: the same command continues. Writes verdicts and a report
    (docs/experiments.md).
    """
    from lm.experiments.compare import TrainingOptions, compare_experiments, print_commands
    from lm.experiments.definition import read_experiments
    from lm.experiments.page import VERDICTS

    modes = {"--plan": plan, "--report-only": report_only, "--commands": commands, "--submit": submit}
    if len(chosen := [name for name, is_on in modes.items() if is_on]) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other")
    needs = {
        "--workers": (workers > 1, submit),
        "--job-options": (job_options, submit),
        "--json": (as_json, report_only),
    }
    for name, (is_given, is_useful) in needs.items():
        if is_given and not is_useful:
            raise ConfigError(f"{name} goes with {'--report-only' if name == '--json' else '--submit'}")
    experiments = read_experiments(arguments)
    training_options = TrainingOptions(jobs, retry, jobs_per_gpu, submit, workers, job_options)
    if commands:
        print_commands(experiments, training_options)
    else:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            compare_experiments(experiments, training_options, plan, report_only)
        for experiment in experiments if as_json else ():
            print((experiment.folder / f"{VERDICTS}.json").read_text(encoding="utf-8"), end="")


def judge(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE", help="CSV, JSON lines, or wandb:ENTITY/PROJECT: columns arm, seed, value")
    ],
    baseline: Annotated[
        str | None, typer.Option(help="the arm that the others are compared with [default: the first]")
    ] = None,
    better: Annotated[
        Literal["lower", "higher"] | None,
        typer.Option(help="which direction is better [default: as the column better says, else lower]"),
    ] = None,
    matters: Annotated[float, typer.Option(help="smallest difference of interest, in the metric's unit")] = 0.01,
    metric: MetricName = "",
    where: RowCondition = "",
    arm: ArmColumn = "arm",
    seed: SeedColumn = "seed",
    target: Annotated[
        float | None, typer.Option(help="compare each arm with this number, such as 3.28, in place of a baseline")
    ] = None,
    unpaired: Annotated[
        bool,
        typer.Option("--unpaired", help="don't pair runs of equal seeds (Welch) [default: if arms share no seed]"),
    ] = False,
    bounds: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="lowest and highest value of the metric, e.g. 0 100 for per cent; -inf inf: none [default: 0 1 if "
            "higher is better and all values lie within]"
        ),
    ] = None,
    by: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="judge each of its values separately [default: size]")
    ] = None,
    as_json: AsJson = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="exit status by verdict, which must be the only one: 0 better, 3 worse, 4 undecided or any other, "
            "5 no difference above what matters, or one below it",
        ),
    ] = False,
) -> None:
    """Judge the runs of any trainer, given as a table.

    The table has the columns arm, seed and value, or columns that options name. It may have others, such as metric,
    size, unit and rate, the learning rate (docs/experiments.md).
    """
    from lm.experiments.judging import print_verdicts
    from lm.experiments.run_table import judge_table
    from lm.files import json_bytes

    judgement = judge_table(
        table, metric, better, matters, baseline, where, by or (), arm, seed, target, unpaired, bounds
    )
    primary, entries, verdicts = judgement.primary_metric, judgement.summary_rows(), [*judgement.verdicts.values()]
    if exit_code and len(verdicts) > 1:
        raise ConfigError(f"--exit-code takes one verdict, and there are {len(verdicts)}: choose one by --where")
    if as_json:
        print(json_bytes({"primary": vars(primary), "arms": entries}).decode(), end="")
    else:
        print_verdicts(judgement, entries, f"{primary.metric} of {table}, {primary.better} is better")
    if exit_code:
        raise typer.Exit(_EXIT_CODES.get(verdicts[0].kind, 4))


def noise(
    tables: Annotated[
        list[Path], typer.Argument(metavar="RUN...|TABLE", help="run folders, or a table as of lm judge")
    ],
    difference: Annotated[
        float | None, typer.Option(min=0, help="print how many seeds detect this difference, in the metric's unit")
    ] = None,
    metric: MetricName = "",
    where: RowCondition = "",
    arm: ArmColumn = "arm",
    seed: SeedColumn = "seed",
    as_json: AsJson = False,
) -> None:
    """Estimate which differences a number of seeds can detect.

    Prints the spread of runs that differ in their seed alone, and of differences between arms paired by seed. Prints
    the smallest difference that each number of seeds detects with probability 0.8.
    """
    from lm.experiments.judging import noise_sentences
    from lm.experiments.run_table import read_table, table_noise
    from lm.files import json_bytes
    from lm.report.frame import results

    is_table = len(tables) == 1 and not tables[0].is_dir()
    table, source = read_table(tables[0], arm) if is_table else results(*tables), ", ".join(map(str, tables))
    entry = table_noise(table, source, metric, where, arm, seed, difference)
    if as_json:
        print(json_bytes({"noise": [entry]}).decode(), end="")
    else:
        print(*noise_sentences(entry), sep="\n")


def report(runs: RunFolders, out: ReportFolder = None, baseline: BaselineArm = None) -> None:
    """Write the report of one run, or compare several.

    Writes the page report.html, its pictures as SVG, and its tables as CSV.
    """
    from lm.report.comparison import compare_runs
    from lm.report.comparison_tables import comparison_notes, comparison_tables
    from lm.report.html import write_comparison
    from lm.report.tables import print_tables
    from lm.runs.record import read_run

    comparison = compare_runs([read_run(folder) for folder in runs], baseline)
    page = write_comparison(comparison, out or (runs[0] if len(runs) == 1 else runs[0].parent) / "report")
    warnings = filter(None, [comparison.fairness_warning])
    notes = [*warnings, *comparison_notes(comparison), *comparison.divergence_notes]
    print_tables(*comparison_tables(comparison), notes=notes)
    print(f"report: {page}")
