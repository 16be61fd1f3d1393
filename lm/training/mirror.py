"""metrics.jsonl, the log of a run, and wandb, its mirror: when that is on, what a run is there, and what it is sent."""

import json
import math
import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.training_config import LogConfig
from lm.config.tree import Config
from lm.errors import ConfigError, Problem, RunError, one_line
from lm.runs.evaluations import Evaluation
from lm.schema import Plain, to_plain

if TYPE_CHECKING:
    import wandb

WANDB_MODES = ("online", "offline", "disabled")
WANDB_SECONDS = 60.0  # to wait for wandb's server before a run is logged offline
FACTS = ("data_fingerprint", "parameters", "flops_per_token", "tokens_total")  # of environment.json, beside the configuration


class Mirror:
    """A wandb run that is sent what metrics.jsonl gets; tokens are the x axis of all of it."""

    def __init__(self, run: "wandb.Run"):
        self.run = run
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")

    def log(self, metrics: dict[str, Plain]) -> None:
        """A line of metrics.jsonl."""
        self.run.log({name: value for name, value in metrics.items() if name != "step"}, step=int(metrics["step"]))

    def evaluation(self, result: Evaluation, picture: Path) -> None:
        """The chart of each series that a report shows over an axis, such as loss by position, and the evaluation's picture, if there is
        one at `picture`."""
        import wandb

        charts: dict[str, object] = {}
        for series in result.series:
            if series.axis and series.shown:
                axis, y = series.axis, series.metric
                title = ", ".join(filter(None, (f"{y} by {axis.name}", series.what, series.setting)))
                ends, x = axis.values[1:] if axis.bins else axis.values, axis.unit or axis.name
                table = wandb.Table(columns=[x, y], data=[list(point) for point in zip(ends, series.means.tolist(), strict=True)])
                charts[f"{result.kind}/{title}"] = wandb.plot.line(table, x, y, title=title)
        if picture.is_file():
            charts[result.kind] = wandb.Image(str(picture))
        if charts:
            self.run.log(charts, step=result.step)

    def finish(self) -> None:
        """Send what is left, and end the run there."""
        self.run.finish()


def wandb_mode(log: LogConfig, in_experiment: bool = False) -> str:
    """online | offline | disabled. `auto` follows WANDB_MODE, else is online only with credentials; without them a run of an experiment,
    of which there are many and which has a report, is not logged there.

    Raises:
        ConfigError: a WANDB_MODE that is none of these; wandb itself reads it whatever `log.wandb` says.
    """
    mode = os.environ.get("WANDB_MODE")  # empty, as some containers set it, is unset
    if log.wandb == "disabled":
        return log.wandb
    if mode and mode not in WANDB_MODES:
        raise ConfigError([Problem("WANDB_MODE", mode, f"must be {' or '.join(WANDB_MODES)}", "set it in the environment, or unset it")])
    if log.wandb != "auto":
        return log.wandb
    return mode or ("online" if os.environ.get("WANDB_API_KEY") or _netrc_has_key() else "disabled" if in_experiment else "offline")


def _netrc_has_key() -> bool:
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb(mode: str, config: Config, environment: dict[str, Plain]) -> Mirror | None:
    """The wandb run in a mode of `wandb_mode`, or None if disabled. Never prompts; if online fails it says so and goes on offline.

    A resumed run goes on with the wandb run that `environment`, the content of environment.json, names.

    Raises:
        RunError: not even offline.
    """
    if mode == "disabled":
        return None
    if not os.environ.get("WANDB_MODE"):
        os.environ.pop("WANDB_MODE", None)  # wandb refuses an empty one
    import wandb

    try:
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, init_timeout=WANDB_SECONDS)
        wandb.setup(settings)  # else it says which credentials it found
        run = wandb.init(
            project=config.log.project,
            name=config.name,
            id=environment["wandb_id"],
            dir=str(config.run_folder),
            mode=mode,
            resume="allow",
            config=to_plain(config) | {name: environment[name] for name in FACTS},
            allow_val_change=True,  # a resumed run may have other labels, or more steps
            settings=settings,
            **_in_experiment(config),
        )
    except Exception as error:  # wandb raises its own kinds for no network, a bad key, a time-out
        reason = one_line(error, 120)
        if mode != "online":
            raise RunError(f"wandb: can't start {mode}: {reason}; to train without it: log.wandb=disabled") from None
        print(f"wandb: online failed ({reason}); logging offline", flush=True)
        wandb.teardown()  # the run that failed would hold its id
        return start_wandb("offline", config, environment)
    return Mirror(run)


def _in_experiment(config: Config) -> dict[str, str | list[str] | None]:
    """Group, job type and tags of a run of an experiment; none of any other run."""
    place = config.experiment
    named = {"arm": place.arm, "size": place.size, "seed": config.seed, "rate": None if place.rate is None else f"{place.rate:g}"}
    return {
        "group": "/".join(filter(None, (place.name, place.size))) or None,
        "job_type": place.stage,
        "tags": [f"{name} {value}" for name, value in named.items() if value is not None] if place.name else None,
    }


# ---------------------------------------------------------------- the log


class MetricLog:
    """Appends one JSON object a line to `metrics.jsonl` and mirrors it to wandb. Does nothing on other ranks."""

    def __init__(self, path: Path, mirror: Mirror | None, main: bool):
        self.path, self.mirror, self.main = path, mirror, main

    def write(self, metrics: dict[str, Plain]) -> None:
        """`metrics` holds `step`; numbers that are not finite become null. Raises RunError if the line can't be written."""
        if not self.main:
            return
        finite = {name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in metrics.items()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise RunError(f"{self.path}: can't log step {metrics['step']}: {error.strerror}; go on with resume=auto") from None
        if self.mirror:
            self.mirror.log(metrics)

    def evaluation(self, result: Evaluation, picture: Path) -> None:
        """Mirror what an evaluation gave beside its lines here: curves, and its picture, if there is one at `picture`."""
        if self.mirror:
            self.mirror.evaluation(result, picture)

    def close(self) -> None:
        """Finish the wandb run."""
        if self.mirror:
            self.mirror.finish()
