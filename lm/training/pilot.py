"""Estimate the time of runs from a few real steps of each: `python -m lm.training.pilot RUN.yaml ...` prints one JSON
object a line.

The first object has `begun`, the time at which timing begins (POSIX seconds). Then each run has an object with
`seconds`, the estimate for the whole run with its evaluations, without the start of its process.
"""

import contextlib
import importlib
import io
import json
import signal
import sys
import time
from dataclasses import replace

from lm.config.load import load_config
from lm.config.tree import Config
from lm.errors import ConfigError, LMError, RunError
from lm.machine import stop_with_parent
from lm.runs.folder import METRICS, read_metrics, step_seconds
from lm.runs.metadata import load_metadata
from lm.training.before_training import check_before_data
from lm.training.launcher import this_process
from lm.training.train import starting_checkpoint, train

STEPS = 10  # optimizer steps that are made of each run, at most


def pilot(config: Config) -> dict[str, float]:
    """Train at most `STEPS` steps in a run's folder, with the run's evaluations, and return {`seconds`: estimate for
    the whole run}. Steps are not compiled, as compiling would take most of the time."""
    first_step = load_metadata(starting_checkpoint(config))["step"] if config.first_step is None else config.first_step
    run_steps = config.trainer.max_steps - first_step
    steps = min(STEPS, run_steps)
    pilot_config = replace(
        config,
        resume="",
        init_from="",  # may not be there yet
        branch_from="",
        model=config.model_in(0),
        phases=[],
        trainer=replace(config.trainer, max_steps=steps, compile=False),
        eval=replace(config.eval, every=steps),
        log=replace(config.log, every=1, wandb="disabled", progress="none"),
    )
    begin = time.perf_counter()
    train(pilot_config)
    duration = time.perf_counter() - begin
    elapsed_times = [
        line["elapsed_s"] for line in read_metrics(pilot_config.run_folder / METRICS).lines if "elapsed_s" in line
    ]
    step_s = step_seconds(pilot_config.run_folder / METRICS)
    steps_per_validation = (
        config.eval.sequences * config.data.seq_len / config.optim.batch_tokens / 3
    )  # a step has a backward pass, too
    validation_s = step_s * steps_per_validation * (-(-run_steps // config.validation_every) - 1)
    return {"seconds": duration - elapsed_times[-1] + step_s * run_steps + validation_s}


def print_estimates(paths: list[str]) -> None:
    """Estimate and print the seconds of the run in each file. Raises ConfigError for an invalid run before any run is
    timed.
    """
    importlib.import_module("lm.training.fit")  # imported now, as its seconds belong to the start of a run's process
    configs = [load_config([path]) for path in paths]
    is_child = this_process(
        configs[0]
    ).is_child  # a further process of a run on several devices, whose first process prints
    if not is_child:
        print(json.dumps({"begun": time.time()}), flush=True)
    for config in configs:
        if not (config.init_from or config.branch_from):  # its weights may not be there yet
            check_before_data(config, None)
    for config in configs:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                estimate = pilot(config)
        except ConfigError as error:  # the error is of the shortened run, not of the run itself
            raise RunError(str(error)) from None
        if not is_child:
            print(json.dumps(estimate), flush=True)


if __name__ == "__main__":
    stop_with_parent(signal.SIGKILL)  # with SIGTERM training would finish its step and evaluations first
    try:
        print_estimates(sys.argv[1:])
    except LMError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
