"""`lm eval`: measure a checkpoint of a finished or running run."""

import os
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lm.checkpoints import LAST, load_decoder, steps_saved
from lm.config import Config, merge, parse, read_overrides
from lm.data.prepare import check_rows, prepare
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.loss import Device, evaluate_long_context, evaluate_validation, long_rows, validation_rows
from lm.evaluation.results import write_evaluation
from lm.runs import CHECKPOINTS, ENVIRONMENT, read_config, read_json
from lm.schema import Plain, to_plain
from lm.training.device import resolve_device, resolve_precision

# What an evaluation may set differently from training; the rest belongs to the checkpoint.
OVERRIDABLE = ("eval", "data.root", "trainer.accelerator", "trainer.precision", "trainer.threads")


def evaluate_run(folder: Path, checkpoint: str, overrides: list[str]) -> list[dict[str, Plain]]:
    """Evaluate one checkpoint of a run, keep the results in its evaluations/, print them, return them.

    Args:
        folder: the run folder.
        checkpoint: `last`, a step number, or a path.
        overrides: `key=value` of `OVERRIDABLE` keys.

    Raises:
        LMError: not a run, no such checkpoint, other data than it was trained on.
    """
    config = _with_overrides(read_config(folder), overrides)
    path = find_checkpoint(folder, checkpoint)
    decoder, trained, facts = load_decoder(path)
    if (trained.seed, to_plain(trained.model), to_plain(trained.optim)) != (config.seed, to_plain(config.model), to_plain(config.optim)):
        raise RunError(f"{path}: is of another run than {folder} describes (model, optim or seed)")
    store = prepare(config.data, progress=True)
    if store.fingerprint != facts["data_fingerprint"]:
        raise RunError(f"{path}: was trained on tokens {facts['data_fingerprint'][:16]}, {store.path} holds {store.fingerprint[:16]}")
    check_rows(store, config)

    config.trainer.devices = config.trainer.num_nodes = 1  # however many it was trained on
    accelerator, _ = resolve_device(config)
    precision = resolve_precision(config, accelerator, read_json(folder / ENVIRONMENT))
    torch.set_num_threads(config.trainer.threads or os.cpu_count() or 1)
    where = Device(torch.device("cuda" if accelerator == "gpu" else "cpu"), precision.value == "bf16-mixed")
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


def find_checkpoint(folder: Path, which: str) -> Path:
    """`last`, a step number or a path, as a path. Raises RunError that lists what there is."""
    checkpoints = folder / CHECKPOINTS
    if which == "last":
        path = checkpoints / LAST
    elif which.isdigit():
        path = checkpoints / f"step-{int(which):06d}.ckpt"
    else:
        path = Path(which)
    if not path.is_file():
        have = ", ".join(str(int(found.stem.removeprefix("step-"))) for found in steps_saved(checkpoints)) or "none"
        raise RunError(f"{path}: no such checkpoint; steps saved in {folder}: {have}")
    return path


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


def _with_overrides(config: Config, overrides: list[str]) -> Config:
    changes = read_overrides(overrides)
    problems = []
    for override in overrides:
        key = override.split("=")[0]
        if not any(key == free or key.startswith(free + ".") for free in OVERRIDABLE):
            problems.append(Problem(key, override, "can't be changed in an evaluation", "free to change: " + ", ".join(OVERRIDABLE)))
    if problems:
        raise ConfigError(problems)
    return parse(merge(to_plain(config), changes))
