"""`lm harness`: downstream tasks of the lm-evaluation-harness on a run, checkpoint or export, with a table and a file of results."""

import difflib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.load import merge, overrides_in
from lm.config.tree import Config
from lm.errors import ConfigError, LMError, Problem, RunError, one_line
from lm.evaluation.evaluate import open_device
from lm.evaluation.harness import HarnessLM  # says what to install if the harness is missing
from lm.evaluation.measurement import weights_sha256
from lm.report.tables import Column, Table, print_tables
from lm.runs.evaluations import evaluation_path, read_evaluation
from lm.runs.folder import CONFIG, write_json, write_sealed
from lm.runs.loading import load
from lm.runs.series import listed
from lm.schema import Plain, build, to_plain

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

KIND = "harness"  # names the file in evaluations/


def measure(
    source: Path,
    tasks: list[str],
    checkpoint: str = "last",
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    max_length: int | None = None,
    out: Path | None = None,
    overrides: list[str] | None = None,
) -> dict[str, Plain]:
    """`lm harness`: run tasks on a model, print the table, keep the results, return them.

    They are kept in `out`, or in evaluations/ of the run, where a file has all tasks that a checkpoint was measured on,
    each with its options, the last measurement of it. Those of an export are only printed if `out` is None.

    Args:
        source: run folder, checkpoint or export.
        tasks: names of tasks, groups or tags, or patterns of them.
        include_path: folder of further task files.
        num_fewshot: examples shown before each question [default: the task's own].
        limit: documents of each task at most; below 1: a fraction of them.
        overrides: `key=value` of keys that act in `lm harness`.

    Raises:
        LMError: nothing to load there, no such task, a task whose data can't be read, or options out of range.
    """
    limits = [
        ("--tasks", ",".join(tasks), bool(tasks), "names no task"),
        ("--include-path", str(include_path), include_path is None or include_path.is_dir(), "no such folder"),
        ("--num-fewshot", num_fewshot, num_fewshot is None or 0 <= num_fewshot <= 1000, "must be from 0 to 1000"),
        ("--limit", limit, limit is None or 0 < limit <= 1e9, "must be above 0 and at most 1e9"),
        ("--max-length", max_length, max_length is None or 2 <= max_length <= 10**7, "must be from 2 to 10,000,000"),
    ]
    problems = [Problem(name, value, reason) for name, value, fine, reason in limits if not fine]
    if problems:
        raise ConfigError(problems)
    limit = int(limit) if limit is not None and limit >= 1 else limit
    loaded = load(source, checkpoint)
    folder, problems = loaded.folder, []
    config = build(Config, merge(to_plain(loaded.config or Config()), overrides_in("harness", overrides or [])), "", problems)
    if problems:
        raise ConfigError(problems)
    where = open_device(config, loaded.environment)
    model = HarnessLM(loaded, max_length, where)
    kept = evaluation_path(folder, KIND, loaded.stamp["step"])
    weights, before = weights_sha256(loaded.decoder), read_evaluation(kept) if out is None and kept.is_file() else {}
    before = before if before.get("weights_sha256", weights) == weights else {}

    names, manager = _find(tasks, include_path)
    found = _evaluate(model, names, manager, num_fewshot, limit)
    options = {
        "limit": limit,
        "max_length": model.max_length,
        "precision": where.precision,
        "lm_eval": importlib.metadata.version("lm_eval"),
    }
    result = {
        "kind": KIND,
        **loaded.stamp,
        "weights_sha256": weights,
        "checkpoint": loaded.path.name,
        "tasks": {
            name: {
                "version": found["versions"].get(name),
                "num_fewshot": found["n-shot"].get(name),
                "documents": found["n-samples"][name]["effective"],
                **options,
                "requests_cut": model.cut[name],
                "requests_shortened": model.shortened[name],
                "metrics": _metrics(found["results"][name]),
                "higher_is_better": found["higher_is_better"].get(name, {}),
            }
            for name in found["n-samples"]
        },
        "groups": {
            name: {"tasks": found["group_subtasks"].get(name, []), **options, "metrics": _metrics(metrics)}
            for name, metrics in found.get("groups", {}).items()
        },
    }
    print_tasks(result, source)
    together = {**result, **{part: {**before.get(part, {}), **result[part]} for part in ("tasks", "groups")}}
    if out is not None:
        write_json(out, listed(result))
        print(out)
    elif (folder / CONFIG).is_file():
        print(write_sealed(kept, listed(together)))
    return result


def _find(tasks: list[str], include_path: Path | None) -> tuple[list[str], "TaskManager"]:
    """The names that `tasks` stand for, and the manager that knows them.

    Reading the harness's own 14,000 tasks takes a quarter of a minute, so it's left out where `include_path` has all that is named.
    """
    from lm_eval.tasks import TaskManager

    if include_path:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return tasks, manager
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    problems, names = [], []
    for task in tasks:
        matched = [task] if task in manager.all_tasks else sorted(manager.match_tasks([task]))
        names += [name for name in matched if name not in names]
        if not matched:
            close = difflib.get_close_matches(task, manager.all_tasks, 3, cutoff=0.8)
            remedy = f"did you mean {' or '.join(close)}?" if close else "`lm-eval ls tasks` lists them; yours: --include-path DIR"
            problems.append(Problem("--tasks", task, "no such task", remedy))
    if problems:
        raise ConfigError(problems)
    return names, manager


def _evaluate(model: HarnessLM, names: list[str], manager: "TaskManager", num_fewshot: int | None, limit: float | None) -> dict[str, Plain]:
    """The harness's results. Raises RunError of one line for what is wrong with a task or its data."""
    import lm_eval

    try:
        return lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, num_fewshot=num_fewshot, limit=limit, log_samples=False
        )
    except (LMError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # all that a task's file, code and data can raise
        raise RunError(f"{', '.join(names)}: the harness failed: {type(error).__name__}: {one_line(error)}") from error


def _metrics(found: dict[str, Plain]) -> dict[str, float]:
    """The numbers of the harness's `metric,filter` keys, without the filter `none`."""
    return {key.removesuffix(",none"): float(value) for key, value in found.items() if "," in key and not isinstance(value, str)}


def print_tasks(result: dict[str, Plain], source: Path) -> None:
    """A table of metrics with their standard errors, an arrow where more (or less) is better, and what was cut."""
    rows: list[tuple[str, ...]] = []
    for name, task in {**result["tasks"], **result["groups"]}.items():
        cells = name, str(task.get("num_fewshot", "")), str(task.get("documents", ""))
        for metric, value in task["metrics"].items():
            base, *kind = metric.split(",")
            if base.endswith("_stderr"):
                continue
            arrow = {True: " ↑", False: " ↓"}.get(task.get("higher_is_better", {}).get(base), "")
            error = task["metrics"].get(",".join([f"{base}_stderr", *kind]))
            rows.append((*cells, metric + arrow, f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")))
            cells = "", "", ""
    kinds = {"task": "label", "shots": "number", "documents": "number", "metric": "label", "value": "number"}
    contents = [(Column(name, kind=kind), [row[number] for row in rows]) for number, (name, kind) in enumerate(kinds.items())]
    print_tables(Table(f"{source}, step {result['step']}", "", tuple(contents)))
    for name, one in result["tasks"].items():
        if one["requests_cut"]:
            print(f"{name}: {one['requests_cut']} requests were longer than {one['max_length']} tokens and lost some on the left")
        if one["requests_shortened"]:
            print(f"{name}: {one['requests_shortened']} requests had room for fewer new tokens than they may write")
