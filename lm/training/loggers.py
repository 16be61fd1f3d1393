"""The loggers of a run are Lightning's Loggers: metrics.jsonl, wandb, and loggers that users name."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.tree import Config
from lm.errors import RunError, one_line
from lm.plain import Plain, to_plain
from lm.runs.evaluations import VAL_LOSS
from lm.runs.folder import METRICS_FILE
from lm.training.lightning_import import L
from lm.training.user_classes import make_user_objects
from lm.training.wandb_runs import finish_wandb_run, start_wandb_run, wandb_labels, wandb_mode

if TYPE_CHECKING:
    import wandb

Logger, WandbLogger = L.pytorch.loggers.Logger, L.pytorch.loggers.WandbLogger
rank_zero_only = L.pytorch.utilities.rank_zero_only

# entries of environment.json for wandb
WANDB_ENVIRONMENT_KEYS = ("data_fingerprint", "parameters", "flops_per_token", "lm", "git_commit", "git_dirty")
WANDB_ENVIRONMENT_KEYS += ("versions", "device", "precision", "compile")


class RunLogger(Logger):
    """A run logger is Lightning's Logger with lm's count of steps. A class that also inherits from another Logger
    names this class first.

    Step N is the state after N optimizer steps. When a callback calls `self.log`, Lightning gives the step as N - 1,
    and adds the epoch.
    """

    batch_tokens: int = 0  # tokens in a step

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Plain], step: int | None = None) -> None:
        """Log metrics after `step` optimizer steps. Metrics with an `epoch` come from Lightning and are converted to
        lm's count of steps.
        """
        if "epoch" in metrics:
            step = int(step or 0) + 1
            numbers = {name: value for name, value in metrics.items() if name != "epoch"}
            metrics = {"tokens": step * self.batch_tokens, **numbers}
        self.write(metrics, step)

    def write(self, metrics: Mapping[str, Plain], step: int) -> None:
        """Log metrics after `step` optimizer steps."""

    def close(self) -> None:
        """Send everything that is not sent yet, and end the log. Lightning calls `finalize` after each phase
        instead.
        """


class MetricsFile(RunLogger):
    """This logger appends metrics as JSON lines to a run's metrics.jsonl (`path`), the log that reports read."""

    name, version, save_dir = "metrics.jsonl", "", None

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.save_dir = path, str(path.parent)

    def log_hyperparams(self, *arguments: object, **options: object) -> None:
        """Do nothing: config.yaml has the hyperparameters."""

    def write(self, metrics: Mapping[str, Plain], step: int) -> None:
        """Append a line; numbers that are not finite become null. Raises RunError: writing fails."""
        line = {"step": step} | {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in metrics.items()
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise RunError(f"{self.path}: can't log step {step}: {error.strerror}; go on with resume=auto") from None


class FailsafeLogger(RunLogger):
    """A failsafe logger keeps errors of another Logger from ending the run. It is a base class that is named before
    this Logger's class. After an error the Logger gets no more metrics.
    """

    label: str  # the log's name for the user
    has_failed = False

    def attempt(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function`, unless this log has failed before."""
        if self.has_failed:
            return
        try:
            function(*arguments)
        except Exception as error:  # any error of a logger, such as for a killed process of wandb or a full disk
            self.has_failed = True
            reason = one_line(error, 120)
            print(
                f"note: {self.label} failed and gets nothing more ({reason}); metrics.jsonl has all numbers", flush=True
            )

    def write(self, metrics: Mapping[str, Plain], step: int) -> None:
        """Log those metrics that are numbers."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self.attempt(super(RunLogger, self).log_metrics, numbers, step)

    def save(self) -> None:
        """Save the log; an error ends this log, but not the run."""
        self.attempt(super().save)

    def finalize(self, status: str) -> None:
        """Tell the Logger that a phase of training has ended; an error ends this log, but not the run."""
        self.attempt(super().finalize, status)


class WandbRun(FailsafeLogger, WandbLogger):
    """This logger writes to a wandb run, which draws each metric as a function of the number of tokens."""

    label = "wandb"

    def __init__(self, run: "wandb.Run"):
        super().__init__(experiment=run)
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")
        run.define_metric(VAL_LOSS, step_metric="tokens", summary="min,last")

    def write(self, metrics: Mapping[str, Plain], step: int) -> None:
        # `step` as wandb's own, which Lightning leaves out: a resumed run then logs no step twice
        """Log metrics after `step` optimizer steps."""
        self.attempt(lambda: self.experiment.log({**metrics}, step=step))

    def close(self) -> None:
        """End the wandb run."""
        self.attempt(finish_wandb_run, self.experiment)


def make_loggers(config: Config, environment: dict[str, Plain], is_main: bool) -> list[RunLogger]:
    """Start and return the loggers of a run: those that the user names in `log.to`, and on the first process
    metrics.jsonl and wandb before them.

    Args:
        environment: the content of environment.json, whose `wandb_id` lets a resumed run continue its wandb run.

    Raises:
        ConfigError: a user's logger can't be imported or made.
        RunError: wandb can't be started.
    """
    outside = make_user_objects("log.to", config.log.logger_classes, Logger, FailsafeLogger)
    for logger in outside:
        logger.attempt(logger.log_hyperparams, to_plain(config))
    loggers: list[RunLogger] = [MetricsFile(config.run_folder / METRICS_FILE)] * is_main
    if is_main and (mode := wandb_mode(config.log, bool(config.experiment.name))) != "disabled":
        facts = to_plain(config) | {fact: environment[fact] for fact in WANDB_ENVIRONMENT_KEYS}
        # one text to group runs by, also of a list of normalizers and of phases
        facts["normalizer"] = ", then ".join(phase.normalizer.label() for phase in config.phases_or_default)
        labels = {"name": config.name, "dir": str(config.run_folder), **wandb_labels(config)}
        loggers.append(WandbRun(start_wandb_run(mode, environment["wandb_id"], config=facts, **labels)))
    loggers += outside
    for logger in loggers:
        logger.batch_tokens = config.optim.batch_tokens
    return loggers
