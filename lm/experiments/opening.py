"""Opening an experiment, and what its first start settles for all of its runs: the text, precision, compilation, threads and seeds."""

from dataclasses import MISSING, replace
from pathlib import Path

from lm.config.load import merge
from lm.config.training_config import TrainerConfig
from lm.config.tree import Config
from lm.data.prepare import prepare, vocabulary
from lm.errors import Problem, RunError
from lm.experiments.definition import read_experiment
from lm.experiments.minutes import with_limit
from lm.experiments.procedure import Procedure
from lm.files import write_new
from lm.machine import threads_each
from lm.runs.folder import CONFIG, RESOLVED, json_bytes, read_json
from lm.schema import Plain, build, convert

SHARED = ("precision", "compile", "threads")  # keys of `trainer` that all runs of an experiment share


def open_experiment(path: Path, overrides: list[str], jobs: int = 1) -> Procedure:
    """An experiment as it stands: nothing is prepared, trained or written.

    Final seeds that an earlier `--minutes` dropped are left out. Where the file leaves precision, compilation and threads open, they are
    as the first start has settled them; before it, as they would be settled on this machine for so many runs at a time.

    Raises:
        LMError: the file is wrong, or the experiment's folder is something else.
    """
    experiment = with_limit(read_experiment(path, overrides))
    if (experiment.folder / CONFIG).exists():
        raise RunError(f"{experiment.folder}: a run folder; give the experiment's file another name, or set runs=...")
    kept = experiment.folder / RESOLVED
    settled = read_json(kept) if kept.exists() else _on_this_machine(experiment.first_config, jobs)
    if wrong := _wrong(settled):
        raise RunError(f"{kept}: {wrong}; bring it back, or delete it, and the next start writes it anew")
    asked = experiment.base.get("trainer", {})  # sizes and arms may say otherwise, each for itself
    left_open = {name: settled[name] for name in SHARED if asked.get(name) in ("auto", None)}
    planned = tuple(settled["seeds"]) if "seeds" in settled else None
    return Procedure(replace(experiment, base=merge(experiment.base, {"trainer": left_open}), planned=planned))


def start(path: Path, overrides: list[str], jobs: int = 1) -> Procedure:
    """An experiment that can be worked on: with its text prepared, and settled what all runs share. Of several processes that start it
    at the same time, one settles.

    Raises:
        LMError: as `open_experiment`; the text can't be prepared, or is another than that of the first runs.
    """
    store = prepare(read_experiment(path, overrides).first_config.data, progress=True)
    experiment = open_experiment(path, overrides, jobs).experiment
    trainer, kept = experiment.first_config.trainer, experiment.folder / RESOLVED
    settled = {"data_fingerprint": store.fingerprint} | {name: getattr(trainer, name) for name in SHARED}
    write_new(kept, json_bytes(settled | {"seeds": [*experiment.seeds, *experiment.dropped]}))
    if read_json(kept).get("data_fingerprint") != store.fingerprint:
        reason = "the text is not what the first runs were trained on"
        raise RunError(f"{kept}: {reason}; give the experiment's file another name, or set runs=...")
    return open_experiment(path, overrides, jobs)


def _wrong(settled: dict[str, Plain]) -> str:
    """What is wrong with what a first start has settled, in words; empty if nothing is."""
    if missing := {*SHARED} - settled.keys():
        return f"has no {', '.join(sorted(missing))}"
    problems = [Problem(name, settled[name], "is not settled") for name in SHARED if settled[name] in ("auto", None)]
    build(TrainerConfig, {name: settled[name] for name in SHARED}, "", problems)
    if "seeds" in settled and convert(list[int], settled["seeds"]) is MISSING:
        problems.append(Problem("seeds", settled["seeds"], "must be a list of seeds"))
    return str(problems[0]) if problems else ""


def _on_this_machine(config: Config, jobs: int) -> dict[str, Plain]:
    """Precision, compilation and threads of runs on this machine, `jobs` at a time."""
    from lm.experiments.costs import cost  # torch takes seconds to import
    from lm.model.device import resolve_compile, resolve_device, resolve_precision

    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, {})
    compiled = resolve_compile(config, cost(config, vocabulary(config.data) or 1).flops, accelerator, {})
    return {
        "precision": 32 if precision.value == "32" else precision.value,
        "compile": compiled.value == "true",
        "threads": config.trainer.threads or threads_each(jobs),
    }
