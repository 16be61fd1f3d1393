"""`lm compare`: plan experiments, train what they need, judge them, and write down what came out."""

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lm.errors import RunError
from lm.experiments.failures import read_failure
from lm.experiments.jobs import Jobs, RunsFailed
from lm.experiments.opening import open_experiment, start
from lm.experiments.outcomes import SELECTION
from lm.experiments.page import write_page
from lm.experiments.plan import plan
from lm.experiments.procedure import Procedure, summary, tuning_means, tuning_table
from lm.experiments.tuning_tables import csv_text
from lm.files import write_text
from lm.runs.folder import write_json
from lm.schema import Plain

VERDICTS, TUNING, REPORT = "verdicts", "tuning", "report"


def compare(
    files: list[Path], overrides: list[str], plan_only: bool = False, jobs: int = 1, report_only: bool = False, retry: bool = False
) -> None:
    """Print the plans of experiments; then, unless `plan_only`, train what is missing (unless `report_only`) and judge what is there, one
    experiment after the other. `retry`: also what has failed before.

    Raises:
        LMError: an experiment's file is wrong, or runs failed.
    """
    failures = []
    for path in files:
        procedure = open_experiment(path, overrides, jobs)
        print("\n".join(plan(procedure)), flush=True)
        if plan_only:
            continue
        if not report_only:
            procedure = start(path, overrides, jobs)
            work = Jobs(procedure, jobs)
            if retry:
                work.retry()
            try:
                work.work()
            except RunsFailed as error:
                failures.append(str(error))
        _conclude(procedure)
    if failures:
        raise RunsFailed("; ".join(failures))


def _conclude(procedure: Procedure) -> None:
    """Print the verdicts; write them, what tuning found, and the report into the experiment's folder.

    Raises:
        RunError: nothing has been trained yet.
    """
    experiment = procedure.experiment
    if not any(one.outcome.ended for one in procedure.known()):
        failed = [failure for run in procedure.known() if (failure := read_failure(experiment.folder, run))]
        reason, remedy = "no run has ended yet", "leave --report-only out to train"
        if failed:
            reason, remedy = f"no run has a result; {len(failed)} failed, the first with {failed[0]}", "--retry tries again"
        raise RunError(f"{experiment.folder}: {reason}; {remedy}")
    lines = summary(procedure)
    write_json(experiment.folder / f"{VERDICTS}.json", {"primary": vars(experiment.primary), "notes": procedure.notes(), "arms": lines})
    write_text(experiment.folder / f"{VERDICTS}.csv", csv_text(lines))
    if rates := tuning_table(procedure):
        write_text(experiment.folder / f"{TUNING}.csv", csv_text(rates))
        _print(f"tuning: mean {SELECTION} on the selection text", tuning_means(procedure))
    _print(f"{experiment.primary.metric} on the report text, each arm at its own {experiment.tune.key}", list(map(_shown, lines)))
    for note in procedure.notes():
        print(note)
    for run in procedure.known():
        if failure := read_failure(experiment.folder, run):
            print(f"failed: {run.stage}: {run.label}: {failure} ({failure.log}); --retry tries again")
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    print(f"report: {write_page([procedure], experiment.folder / REPORT)}")


def _shown(line: dict[str, Plain]) -> dict[str, Plain]:
    """A line of the summary as it is printed: the difference with its unadjusted interval."""
    shown = {name: line[name] for name in ("size", "arm", "rate") if line[name] not in (None, "")}
    shown |= {"runs": f"{line['runs']} of {line['of']}", "mean": line["mean"]}
    if "learned" in line:
        _, low, high = (math.nan if value is None else value for value in line["fraction_learned"])
        shown["learned (95 %)"] = f"{line['learned']} of {line['ended']} [{low:.2f}, {high:.2f}]"
    if line.get("difference"):
        mean, low, high = (f"{value:+.4f}" if value is not None else "not finite" for value in line["difference"])
        shown["difference (95 % over seeds, unadjusted)"] = f"{mean} [{low}, {high}]"
    if line.get("over_seeds_and_documents"):
        _, low, high = line["over_seeds_and_documents"]
        shown["(over seeds and documents)"] = f"[{low:+.4f}, {high:+.4f}]"
    return shown | {"verdict": line["verdict"], "because": line["reason"]} if "verdict" in line else shown


def _print(title: str, lines: list[dict[str, Plain]]) -> None:
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for line in lines for name in line))
    for name in names:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*(_cell(line.get(name)) for name in names))
    Console().print(table)


def _cell(value: Plain) -> str:
    """A learning rate in few digits, a loss in four decimals."""
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 0.1 else f"{value:.4f}"
    return "" if value is None else str(value)
