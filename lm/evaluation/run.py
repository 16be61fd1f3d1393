"""`lm eval`: measure a checkpoint of a finished or running run."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lm.config import Config, merge, parse, read_overrides
from lm.data.prepare import check_rows, prepare
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.loss import Device, evaluate_long_context, evaluate_validation, long_rows, validation_rows
from lm.evaluation.results import write_evaluation
from lm.loading import Loaded, find_checkpoint, load
from lm.runs import ENVIRONMENT, read_config, read_json
from lm.schema import Plain, to_plain
from lm.training.device import resolve_device, resolve_precision

# What an evaluation may set differently from training; the rest belongs to the checkpoint.
OVERRIDABLE = ("eval", "data.root", "trainer.accelerator", "trainer.precision", "trainer.threads")


def evaluate_run(folder: Path, checkpoint: str, overrides: list[str]) -> list[dict[str, Plain]]:
    """Evaluate one checkpoint of a run, keep the results in its evaluations/, print them, return them.

    Args:
        folder: the run folder.
        checkpoint: `last`, `best`, a step number, or a path.
        overrides: `key=value` of `OVERRIDABLE` keys.

    Raises:
        LMError: not a run, no such checkpoint, other data than it was trained on.
    """
    config = parse(merge(to_plain(read_config(folder)), only(OVERRIDABLE, overrides, "an evaluation")))
    return evaluate(config, folder, find_checkpoint(folder, checkpoint))


def evaluate(config: Config, folder: Path, path: Path) -> list[dict[str, Plain]]:
    """Evaluate the checkpoint at `path` of the run in `folder` as `config` says; else as `evaluate_run`."""
    loaded = load(path)
    decoder, facts = loaded.decoder, loaded.facts
    if _identity(loaded.config) != _identity(config):
        raise RunError(f"{path}: is of another run than {folder} describes (model, optim or seed)")
    store = open_store(config, loaded)
    check_rows(store, config)
    where = open_device(config, read_json(folder / ENVIRONMENT))
    decoder.to(where.device)

    results = [{**evaluate_validation(decoder, validation_rows(store, config), where), "unigram_entropy": store.val.unigram_entropy}]
    if long := long_rows(store, config):
        factors = config.eval.long_context.rope_theta_factors
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"{len(long.rows)} rows of {long.length:,} tokens", total=len(long.rows) * len(factors))
            results.append(evaluate_long_context(decoder, long, where, factors, lambda n: progress.advance(task, n)))
    stamp = {
        "step": facts["step"],
        "tokens_seen": facts["tokens"],
        "data_fingerprint": store.fingerprint,
        "precision": where.precision,
        "checkpoint": path.name,
    }
    written = [write_evaluation(folder, {**result, **stamp}) for result in results]
    print_results(folder, results, facts["step"])
    for file in written:
        print(file)
    return results


def print_results(folder: Path, results: list[dict[str, Plain]], step: int) -> None:
    """A table of losses: validation, then each setting of the long rows by octave of position."""
    table = Table(title=f"{folder.name}, step {step}: loss in nats per token", title_justify="left")
    table.add_column("measured on")
    table.add_column("positions", justify="right")
    table.add_column("loss", justify="right")
    table.add_column("bits per byte", justify="right")
    for result in results:
        if result["kind"] == "validation":
            rows, length = result["rows"], result["seq_len"]
            table.add_row(f"validation, {rows} rows", f"0-{length:,}", f"{result['loss']:.4f}", f"{result['bits_per_byte']:.4f}")
            continue
        for setting in result["settings"]:
            name = f"{result['rows']} long rows, RoPE theta x{setting['rope_theta_factor']:g}"
            table.add_row(name, f"0-{result['length']:,}", f"{setting['loss']:.4f}", f"{setting['bits_per_byte']:.4f}")
            for low, high, loss in by_octave(setting["nll_by_position"], result["seq_len"]):
                table.add_row("", f"{low:,}-{high:,}", f"{loss:.4f}", "")
    Console().print(table)


def by_octave(nll: list[float], seq_len: int) -> list[tuple[int, int, float]]:
    """(from, to, mean loss) of the training length and of each doubling beyond it."""
    edges = [0, seq_len]
    while edges[-1] < len(nll):
        edges.append(min(2 * edges[-1], len(nll)))
    return [(low, high, sum(nll[low:high]) / (high - low)) for low, high in pairwise(edges)]


def _identity(config: Config) -> tuple[Plain, ...]:
    """What all checkpoints of a run share, however it was resumed."""
    return config.seed, to_plain(config.model), to_plain(replace(config.optim, on_nonfinite="stop"))


def open_store(config: Config, loaded: Loaded) -> Store:
    """The token store a model was trained on. Raises RunError if it is another one by now."""
    store = prepare(config.data, progress=True)
    if store.fingerprint != loaded.facts["data_fingerprint"]:
        trained = loaded.facts["data_fingerprint"][:16]
        raise RunError(f"{loaded.path}: was trained on tokens {trained}, {store.path} holds {store.fingerprint[:16]}")
    return store


def open_device(config: Config, trained: dict[str, Plain]) -> Device:
    """The one device to measure on, in the precision of training (`trained`: its environment.json) unless set otherwise."""
    config = replace(config, trainer=replace(config.trainer, devices=1, num_nodes=1))  # however many it was trained on
    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, trained)
    torch.set_num_threads(config.trainer.threads or os.cpu_count() or 1)
    return Device(torch.device("cuda" if accelerator == "gpu" else "cpu"), precision.value == "bf16-mixed")


def only(allowed: tuple[str, ...], overrides: list[str], what: str) -> dict[str, Plain]:
    """The overrides as nested plain data. Raises ConfigError naming each that `what` may not change."""
    changes = read_overrides(overrides)
    keys = [override.split("=")[0] for override in overrides]
    refused = [key for key in keys if not any(key == free or key.startswith(free + ".") for free in allowed)]
    if refused:
        remedy = "free to change: " + ", ".join(allowed)
        raise ConfigError([Problem(key, override_of(key, overrides), f"can't be changed in {what}", remedy) for key in refused])
    return changes


def override_of(key: str, overrides: list[str]) -> str:
    """The value that an override gives `key`."""
    return next(override.partition("=")[2] for override in overrides if override.startswith(key + "="))
