"""Writes metrics.jsonl, the log of the run, and mirrors it to wandb."""

import json
import math
import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.training_config import LogConfig
from lm.errors import ConfigError, Problem, RunError, one_line
from lm.schema import Plain

if TYPE_CHECKING:
    import wandb

WANDB_MODES = ("online", "offline", "disabled")
WANDB_SECONDS = 60.0  # to wait for wandb's server before a run is logged offline


class MetricLog:
    """Appends one JSON object a line to `metrics.jsonl` and mirrors it to wandb. Does nothing on other ranks."""

    def __init__(self, path: Path, mirror: "wandb.Run | None", main: bool):
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
            self.mirror.log({name: value for name, value in metrics.items() if name != "step"}, step=int(metrics["step"]))

    def picture(self, name: str, path: Path, step: int) -> None:
        """Mirror a picture, if there is one at `path`."""
        if self.mirror and path.is_file():
            import wandb

            self.mirror.log({name: wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        """Finish the wandb run."""
        if self.mirror:
            self.mirror.finish()


def wandb_mode(log: LogConfig) -> str:
    """online | offline | disabled. `auto` follows WANDB_MODE, else is online only with credentials.

    Raises:
        ConfigError: a WANDB_MODE that is none of these; wandb itself reads it whatever `log.wandb` says.
    """
    asked = os.environ.get("WANDB_MODE")  # empty, as some containers set it, is unset
    if log.wandb == "disabled":
        return log.wandb
    if asked and asked not in WANDB_MODES:
        raise ConfigError([Problem("WANDB_MODE", asked, f"must be {' or '.join(WANDB_MODES)}", "set it in the environment, or unset it")])
    if log.wandb != "auto":
        return log.wandb
    return asked or ("online" if os.environ.get("WANDB_API_KEY") or _netrc_has_key() else "offline")


def _netrc_has_key() -> bool:
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb(mode: str, project: str, folder: Path, name: str, run_id: str, config: dict[str, Plain]) -> "wandb.Run | None":
    """The wandb run in a mode of `wandb_mode`, or None if disabled. Never prompts; if online fails it says so and goes on offline.

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
        return wandb.init(
            project=project, name=name, id=run_id, dir=str(folder), mode=mode, resume="allow", config=config, settings=settings
        )
    except Exception as error:  # wandb raises its own kinds for no network, a bad key, a time-out
        reason = one_line(error, 120)
        if mode != "online":
            raise RunError(f"wandb: can't start {mode}: {reason}; to train without it: log.wandb=disabled") from None
        print(f"wandb: online failed ({reason}); logging offline", flush=True)
        wandb.teardown()  # the run that failed would hold its id
        return start_wandb("offline", project, folder, name, run_id, config)
