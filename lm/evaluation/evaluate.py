"""`lm eval`: measure checkpoints of finished or running runs."""

import csv
import io
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from lm.config.load import interpolated, merge, overrides_in, parse, read_yaml
from lm.config.tree import Config
from lm.data.prepare import check_rows, prepare, store_of, summary
from lm.data.store import Store
from lm.errors import ConfigError, RunError
from lm.evaluation.measurement import Row, weights_sha256
from lm.evaluation.results import finite, write_evaluation
from lm.evaluation.suite import SUITES, keep, kept, measured, measurements
from lm.evaluation.suite import suite as suite_of
from lm.files import write_text
from lm.model.device import Device, resolve_device, resolve_precision
from lm.progress import Progress
from lm.runs.consistency import check_environment, config_problems
from lm.runs.folder import CONFIG, ENVIRONMENT, read_config, write_json
from lm.runs.loading import Loaded, find_checkpoint, load
from lm.schema import Plain, to_plain


@dataclass(frozen=True)
class Evaluated:
    """One measurement of one checkpoint.

    Attributes:
        result: what its file in evaluations/ holds.
        rows: the same as a table.
        cached: it had been measured before, with these weights and settings.
    """

    folder: Path
    kind: str
    step: int
    result: dict[str, Plain]
    rows: list[Row]
    cached: bool


def evaluate_runs(
    folders: list[Path], checkpoint: str = "last", suite: str = "", overrides: list[str] | None = None, out: Path | None = None
) -> list[Evaluated]:
    """Evaluate one checkpoint of each run, keep the results in its evaluations/, print and return them.

    What was measured before, with the same weights, data, precision and settings, is not measured again.

    Args:
        folders: run folders.
        checkpoint: `last`, `best` or a step; of a single run also a path.
        suite: a name of `SUITES` or a YAML file with an `eval` block; empty: what the run's configuration says.
        overrides: `key=value` of keys that act in `lm eval`, after the suite's.
        out: a .csv or .json file for all numbers.

    Raises:
        LMError: not a run, no such checkpoint, other data than it was trained on, no such suite.
    """
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write results of this kind; name a .csv or .json file")
    own = overrides_in("eval", overrides or [])
    trained = [read_config(folder) for folder in folders]
    configs = [parse(merge(merge(to_plain(config), suite_changes(suite, config)), own)) for config in trained]
    paths = [find_checkpoint(folder, checkpoint) for folder in folders]
    try:
        found = [one for config, folder, path in zip(configs, folders, paths, strict=True) for one in evaluate(config, folder, path)]
    except KeyboardInterrupt:
        print("stopped; what was measured is kept, and the same command goes on from there", file=sys.stderr)
        raise
    print_results(found)
    if out:
        write_table(found, out)
    return found


def suite_changes(name: str, config: Config) -> dict[str, Plain]:
    """What a suite changes in a configuration. Raises ConfigError if there is none of this name."""
    if not name or name in SUITES:
        return {"eval": suite_of(name, config)} if name else {}
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--suite {name}: choose {', '.join(SUITES)} or name a YAML file with an `eval` block")
    plain = interpolated(read_yaml(path))
    if list(plain) != ["eval"]:
        raise ConfigError(f"{path}: a suite holds an `eval` block and nothing else, this one: {', '.join(plain) or 'nothing'}")
    return plain


def evaluate(config: Config, folder: Path, path: Path, kinds: list[str] | None = None) -> list[Evaluated]:
    """Evaluate the checkpoint at `path` of the run in `folder` as `config` says, or these `kinds` alone; else as `evaluate_runs`."""
    loaded = load(path)
    decoder, facts = loaded.decoder, loaded.facts
    environment = check_environment(folder / ENVIRONMENT, facts, path)
    problems = config_problems(config, loaded.config, facts, path)
    if problems:
        found = "; ".join(f"{one.path} = {one.value!r}: {one.reason}" for one in problems[:3])
        raise RunError(f"{folder / CONFIG}: is not of the run of {path}: {found}; bring back the one that belongs here")
    store = open_store(config, loaded)
    check_rows(store, config)
    where = open_device(config, environment)
    asked = [one for one in measurements(config, store) if kinds is None or one.kind in kinds]
    weights = weights_sha256(decoder)
    decoder.to(where.device)
    stamp = {"step": facts["step"], "tokens_seen": facts["tokens"], "data_fingerprint": store.fingerprint, "checkpoint": path.name}
    found = []
    for measurement in asked:
        result = kept(folder, measurement, weights, where)
        cached = result is not None
        if not cached:
            with Progress().bar(f"{folder.name}: {measurement.kind}", measurement.work) as advance:
                result = measured(measurement, decoder, where, advance)
            keep(folder, measurement, result, where)
        result |= stamp
        write_evaluation(folder, result)
        found.append(Evaluated(folder, measurement.kind, facts["step"], result, measurement.rows(result), cached))
    return found


def print_results(found: list[Evaluated]) -> None:
    """Tables of all numbers, by kind of evaluation; runs measured on other data are not comparable, which their fingerprints say."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    several = len({one.folder for one in found}) > 1
    for kind in dict.fromkeys(one.kind for one in found):
        same = [one for one in found if one.kind == kind]
        title = kind if several else f"{kind}, {same[0].folder.name}, step {same[0].step}"
        title += " (cached)" if all(one.cached for one in same) else ""
        for metrics in together(row for one in same for row in one.rows):
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for name in ("run, step", "used", "where")[not several :]:
                table.add_column(name)
            over = {row.metric: row.over for one in same for row in one.rows if row.over}
            for metric in metrics:
                table.add_column(f"{metric} [95% over {over[metric]}]" if metric in over else metric, justify="right")
            for one in same:
                lines: dict[tuple[str, str], dict[str, str]] = {}
                for row in one.rows:
                    if row.metric in metrics:
                        interval = "" if row.low is None else f" [{_digits(row.low)}, {_digits(row.high)}]"
                        lines.setdefault((row.setting, row.where), {})[row.metric] = _digits(row.value) + interval
                for number, (of, values) in enumerate(lines.items()):
                    name = [f"{one.folder.name}, {one.step}" if number == 0 else ""] if several else []
                    table.add_row(*name, *of, *(values.get(metric, "") for metric in metrics))
            console.print(table)


def together(rows: Iterable[Row]) -> list[list[str]]:
    """The metrics that belong in one table: those that are given of the same place."""
    by_place: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_place.setdefault((row.setting, row.where), []).append(row.metric)
    groups: list[list[str]] = []
    for metrics in by_place.values():
        group = next((group for group in groups if set(group) & set(metrics)), None)
        if group is None:
            groups.append(group := [])
        group += [metric for metric in dict.fromkeys(metrics) if metric not in group]
    return groups


def _digits(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "not finite"


def write_table(found: list[Evaluated], path: Path) -> None:
    """All numbers as CSV or JSON, one row or object a number, whole or not at all."""
    lines = [{"run": str(one.folder), "step": one.step, "kind": one.kind, **vars(row)} for one in found for row in one.rows]
    if path.suffix == ".json":
        write_json(path, finite(lines))
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    write_text(path, text.getvalue())


def open_store(config: Config, loaded: Loaded) -> Store:
    """The token store a model was trained on: that of its fingerprint, else prepared again. Raises RunError if that gives other tokens."""
    wanted = loaded.facts["data_fingerprint"]
    if store := store_of(config.data, wanted):
        print(summary(store), flush=True)
        return store
    store = prepare(config.data, progress=True)
    if store.fingerprint != wanted:
        raise RunError(
            f"{loaded.path}: was trained on tokens {wanted[:16]}, of which there is no store in {config.data.root}; its sources now give "
            f"{store.fingerprint[:16]} ({store.path}): set data.root to where the store is, or bring the sources back"
        )
    return store


def open_device(config: Config, trained: dict[str, Plain]) -> Device:
    """The one device to measure on, in the precision of training (`trained`: its environment.json) unless set otherwise."""
    config = replace(config, trainer=replace(config.trainer, devices=1, num_nodes=1))  # however many it was trained on
    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, trained)
    torch.set_num_threads(config.trainer.threads or os.cpu_count() or 1)
    return Device(torch.device("cuda" if accelerator == "gpu" else "cpu"), precision.value == "bf16-mixed")
