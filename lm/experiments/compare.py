"""`lm compare`: plan an experiment, train what it needs, judge it, and write down what came out."""

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lm.config.load import merge
from lm.config.tree import Config
from lm.data.prepare import prepare
from lm.data.store import Store
from lm.errors import RunError
from lm.experiments.definition import Experiment, read_experiment
from lm.experiments.jobs import Jobs
from lm.experiments.outcomes import SELECTION
from lm.experiments.procedure import Procedure, summary, tuning_table
from lm.files import locked_folder, write_text
from lm.model.counts import count_parameters, flops_per_token
from lm.model.decoder import Decoder
from lm.model.device import resolve_compile, resolve_device, resolve_precision
from lm.report.html import write_report
from lm.runs.folder import CONFIG, read_json, write_json
from lm.schema import Plain
from lm.statistics.verdicts import ALPHA, POWER, seeds_needed

RESOLVED, VERDICTS, TUNING, REPORT = "resolved.json", "verdicts", "tuning", "report"
_TRAINER = ("precision", "compile", "threads")
WORKING = "another process is working on this experiment; wait for it or stop it"


def compare(path: Path, overrides: list[str], plan: bool = False, jobs: int = 1, report_only: bool = False) -> None:
    """Print the plan of an experiment; then, unless `plan`, train what is missing (unless `report_only`) and judge what is there.

    Raises:
        LMError: the experiment's file is wrong, another process works on it, or runs failed.
    """
    procedure = open_experiment(path, overrides, jobs)
    experiment = procedure.experiment
    print("\n".join(_plan(procedure)), flush=True)
    if plan:
        return
    if not report_only:
        experiment.folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(experiment.folder, WORKING):
            write_json(experiment.folder / RESOLVED, _shared(experiment))
            Jobs(procedure, jobs).work()
    _conclude(procedure)


def open_experiment(path: Path, overrides: list[str], jobs: int = 1) -> Procedure:
    """An experiment with its data prepared, and precision, compilation and threads settled for all of its runs where the file leaves them
    open: as its first start has settled them, else for this machine and so many runs at a time.

    Raises:
        LMError: the file is wrong, or the data can't be prepared.
    """
    experiment = read_experiment(path, overrides)
    config = experiment.first_config
    kept = experiment.folder / RESOLVED
    if (experiment.folder / CONFIG).exists():
        raise RunError(f"{experiment.folder}: a run folder; give the experiment's file another name, or set runs=...")
    store = prepare(config.data, progress=True)
    settled = read_json(kept) if kept.exists() else _settled(config, store, jobs)
    if settled.get("data_fingerprint") != store.fingerprint or settled.keys() - {"data_fingerprint", *_TRAINER}:
        reason = "the text is not what the first runs were trained on"
        raise RunError(f"{kept}: {reason}; give the experiment's file another name, or set runs=...")
    asked = vars(config.trainer)
    left_open = {name: value for name, value in settled.items() if asked.get(name, 0) in ("auto", None)}
    return Procedure(replace(experiment, base=merge(experiment.base, {"trainer": left_open})))


def _settled(config: Config, store: Store, jobs: int) -> dict[str, Plain]:
    accelerator, _ = resolve_device(config)
    flops = _flops(config, store.vocab_size) * config.optim.batch_tokens * config.trainer.max_steps
    precision, compiled = resolve_precision(config, accelerator, {}), resolve_compile(config, flops, accelerator, {})
    return {
        "data_fingerprint": store.fingerprint,
        "precision": 32 if precision.value == "32" else precision.value,
        "compile": compiled.value == "true",
        "threads": config.trainer.threads or max(1, (os.cpu_count() or 1) // jobs),
    }


def _shared(experiment: Experiment) -> dict[str, Plain]:
    """What all runs have in common, as `resolved.json` keeps it."""
    config = experiment.first_config
    return {"data_fingerprint": prepare(config.data).fingerprint} | {name: getattr(config.trainer, name) for name in _TRAINER}


def _flops(config: Config, vocab_size: int) -> int:
    """Training FLOPs a token."""
    return flops_per_token(_on_meta(config, vocab_size))


def _on_meta(config: Config, vocab_size: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)


def _plan(procedure: Procedure) -> Iterator[str]:
    """Lines: runs, tokens, FLOPs, and how many seeds a difference of interest takes."""
    experiment = procedure.experiment
    vocab_size = prepare(experiment.first_config.data).vocab_size
    tune, primary = experiment.tune, experiment.primary
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    stages = len(tune.grid) * len(tune.seeds), len(experiment.seeds)
    total_tokens = total_flops = 0
    for size in experiment.sizes:
        for arm in experiment.arms:
            config = experiment.config(size, arm, experiment.seeds[0], tune.grid[0] if tune.grid else None, {"name": "any"})
            decoder, tokens = _on_meta(config, vocab_size), config.optim.batch_tokens * config.trainer.max_steps
            total_tokens += sum(stages) * tokens
            total_flops += sum(stages) * tokens * flops_per_token(decoder)
            parameters = count_parameters(decoder)["total"]
            yield f"  {' '.join(filter(None, (size, arm.name)))}: {parameters / 1e6:.2f} M parameters, {tokens / 1e6:.2f} M tokens a run"
    tuned = f"tuning {tune.key} over {', '.join(f'{rate:g}' for rate in tune.grid)} with seeds {', '.join(map(str, tune.seeds))}"
    yield f"{tuned if tune.grid else 'no tuning'}; final seeds {', '.join(map(str, experiment.seeds))}"
    arms, known = len(experiment.arms) * len(experiment.sizes), procedure.known()
    more = "; the grid may grow twice" if tune.grid else ""
    yield f"{arms * sum(stages)} runs, {total_tokens / 1e6:.1f} M tokens, {total_flops:.2e} FLOPs{more}"
    yield f"done: {sum(one.outcome.ended for one in known)} of the {len(known)} runs known so far"
    family = ALPHA / max(1, (len(experiment.arms) - 1) * len(experiment.sizes))
    needed = [
        f"{seeds_needed(each, primary.matters, family)} at {each:g}" for each in (primary.matters / 2, primary.matters, 2 * primary.matters)
    ]
    yield (
        f"primary metric {primary.metric}, {primary.better} is better; seeds to find a difference of {primary.matters:g} with probability "
        f"{POWER:g}, by the standard deviation of differences between single runs: {', '.join(needed)}"
    )
    yield "shared by all runs: " + ", ".join(f"{name} {value}" for name, value in _shared(experiment).items())


def _conclude(procedure: Procedure) -> None:
    """Print the verdicts; write them, what tuning found, and the report of the final runs into the experiment's folder.

    Raises:
        RunError: nothing has been trained yet.
    """
    experiment = procedure.experiment
    if not any(one.outcome.ended for one in procedure.known()):
        raise RunError(f"{experiment.folder}: no run has ended yet; leave --report-only out to train")
    lines = summary(procedure)
    write_json(experiment.folder / f"{VERDICTS}.json", {"primary": vars(experiment.primary), "arms": lines})
    write_text(experiment.folder / f"{VERDICTS}.csv", _csv(lines))
    if rates := tuning_table(procedure):
        write_text(experiment.folder / f"{TUNING}.csv", _csv(rates))
        _print(f"tuning: mean {SELECTION} on the selection text", rates)
    _print(f"{experiment.primary.metric} on the report text, each arm at its own {experiment.tune.key}", list(map(_shown, lines)))
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    for size in experiment.sizes:
        final = [one for one in procedure.final(size, procedure.rates(size) or {}) if one.outcome.state == "finished"]
        final.sort(key=lambda one: one.arm != experiment.arms[0].name)
        if final:
            report = write_report([one.config.run_folder for one in final], experiment.folder / REPORT / size)
            print(f"report, on all held-out text: {report.html}")


def _shown(line: dict[str, Plain]) -> dict[str, Plain]:
    """A line of the summary as it is printed: the difference with its unadjusted interval."""
    shown = {name: line[name] for name in ("size", "arm", "rate") if line[name] not in (None, "")}
    shown |= {"runs": f"{line['runs']} of {line['of']}", "mean": line["mean"]}
    if line.get("difference"):
        mean, low, high = (f"{value:+.4f}" if value is not None else "not finite" for value in line["difference"])
        shown["difference (95 % over seeds, unadjusted)"] = f"{mean} [{low}, {high}]"
    return shown | {"verdict": line["verdict"], "because": line["reason"]} if "verdict" in line else shown


def _csv(lines: list[dict[str, Plain]]) -> str:
    file = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


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
