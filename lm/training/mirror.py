"""metrics.jsonl, the log of a run, and its mirrors: wandb, trackio and TensorBoard."""

import hashlib
import json
import math
import netrc
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lm.config.training_config import MAX_TAG, LogConfig
from lm.config.tree import Config
from lm.errors import ConfigError, Problem, RunError, one_line
from lm.runs.evaluations import Evaluation
from lm.schema import Plain, to_plain
from lm.statistics.tuning import rate_text

if TYPE_CHECKING:
    import trackio
    import wandb

WANDB_MODES = ("online", "offline", "disabled")
# longest wait for wandb's process, for its server before a run is logged offline, and for unsent data at the end
WANDB_SECONDS = 60.0
DISABLE_REMEDY = "to train without it: log.wandb=disabled"
# entries of environment.json for wandb
WANDB_FACTS = ("data_fingerprint", "parameters", "flops_per_token", "tokens_total")


class Mirror:
    """A log kept by another program, such as wandb, that gets a copy of each line of metrics.jsonl."""

    name: str  # the log's name for the user
    gets_pictures: ClassVar[bool] = False  # whether it gets the pictures of evaluations, which are then drawn

    def log(self, metrics: dict[str, Plain]) -> None:
        """Send a line of metrics.jsonl."""

    def send_evaluation(self, result: Evaluation, picture: Path) -> None:
        """Send charts of an evaluation, and the file `picture` if it exists; does nothing in logs that show neither."""

    def summarize(self, values: dict[str, Plain]) -> None:
        """Send values that describe the whole run, such as its best step; does nothing in logs without a summary."""

    def finish(self) -> None:
        """Send everything that is not sent yet, and close the log."""


class RunMirror(Mirror):
    """Logs to a run of trackio, stored in the folder TRACKIO_DIR; base class for wandb, whose runs have the same
    interface.
    """

    name = "trackio"

    def __init__(self, run: "trackio.Run | wandb.Run"):
        self.run = run

    def log(self, metrics: dict[str, Plain]) -> None:
        self.run.log({name: value for name, value in metrics.items() if name != "step"}, step=int(metrics["step"]))

    def finish(self) -> None:
        self.run.finish()


class WandbMirror(RunMirror):
    """Logs to a wandb run, which draws each metric as a function of the number of tokens."""

    name = "wandb"
    gets_pictures = True

    def __init__(self, run: "wandb.Run"):
        super().__init__(run)
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")

    def send_evaluation(self, result: Evaluation, picture: Path) -> None:
        """Send an evaluation to wandb: its picture, and a chart of each series that has an axis and is shown in
        reports.
        """
        import wandb

        charts: dict[str, object] = {}
        for series in result.series:
            if series.axis and series.shown:
                axis, y = series.axis, series.metric
                title = ", ".join(filter(None, (f"{y} by {axis.name}", series.what, series.setting)))
                x_values, x = axis.values[1:] if axis.bins else axis.values, axis.unit or axis.name
                table = wandb.Table(
                    columns=[x, y], data=[list(point) for point in zip(x_values, series.means.tolist(), strict=True)]
                )
                charts[f"{result.kind}/{title}"] = wandb.plot.line(table, x, y, title=title)
        if picture.is_file():
            charts[result.kind] = wandb.Image(str(picture))
        if charts:
            self.run.log(charts, step=result.step)

    def summarize(self, values: dict[str, Plain]) -> None:
        self.run.summary.update(values)

    def finish(self) -> None:
        _finish_wandb_run(self.run)


class TensorBoardMirror(Mirror):
    """Writes TensorBoard's event files to a folder of the run folder `run`."""

    name = "tensorboard"

    def __init__(self, run: Path):
        from lightning.pytorch.loggers import TensorBoardLogger

        self.logger = TensorBoardLogger(run, self.name, "", max_queue=100)

    def log(self, metrics: dict[str, Plain]) -> None:
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and name != "step"
        }
        self.logger.log_metrics(numbers, step=int(metrics["step"]))

    def finish(self) -> None:
        self.logger.finalize("success")


def start_mirrors(mode: str, config: Config, environment: dict[str, Plain], step: int) -> list[Mirror]:
    """Start the mirrors that `log.to` names, and return them; `mode`: wandb's mode, as `wandb_mode` returns it.

    Args:
        environment: the content of environment.json, whose `wandb_id` lets a resumed run continue its wandb run.
        step: the step from which the run continues.

    Raises:
        ConfigError: a logger is not installed.
        RunError: wandb can't be started.
    """
    mirrors: list[Mirror] = []
    for name in config.log.to:
        try:
            if name == "wandb":
                facts = to_plain(config) | {fact: environment[fact] for fact in WANDB_FACTS}
                arguments = {"name": config.name, "dir": str(config.run_folder), **_experiment_labels(config)}
                run = _wandb_run(mode, config.log, environment["wandb_id"], config=facts, **arguments)
                mirrors += [WandbMirror(run)] if run else []
            elif name == "tensorboard":
                mirrors.append(TensorBoardMirror(config.run_folder))
            else:
                import trackio

                project = os.environ.get("TRACKIO_PROJECT") or project_of(config.log)
                resume = "allow" if step else "never"
                run = trackio.init(
                    project=project, name=config.name, config=to_plain(config), resume=resume, embed=False
                )
                mirrors.append(RunMirror(run))
        except ImportError as error:
            remedy = "install it (the extra `log`), or leave it out"
            raise ConfigError([Problem("log.to", name, f"is not installed ({one_line(error, 80)})", remedy)]) from None
    return mirrors


def wandb_mode(log: LogConfig, in_experiment: bool = False) -> str:
    """The mode of wandb: online, offline or disabled; disabled if `log.to` lacks wandb.

    `log.wandb: auto` means the mode in WANDB_MODE. If this is unset, it means online with credentials. Without them, it
    means disabled for runs of an experiment, as an experiment has many runs and a report of its own, and offline for
    other runs.

    Raises ConfigError: wandb is not disabled, and WANDB_MODE, which wandb itself reads, too, is set to a word that is
    no mode.
    """
    mode = os.environ.get("WANDB_MODE")  # empty, as some containers set it, is unset
    if log.wandb == "disabled" or "wandb" not in log.to:
        return "disabled"
    if mode and mode not in WANDB_MODES:
        raise ConfigError(
            [
                Problem(
                    "WANDB_MODE", mode, f"must be {' or '.join(WANDB_MODES)}", "set it in the environment, or unset it"
                )
            ]
        )
    if log.wandb != "auto":
        return log.wandb
    return mode or (
        "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_key() else "disabled" if in_experiment else "offline"
    )


def _netrc_has_key() -> bool:
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def project_of(log: LogConfig) -> str:
    """The wandb project: `log.project`, else WANDB_PROJECT, else `lm`."""
    return log.project or os.environ.get("WANDB_PROJECT") or "lm"


def _wandb_run(
    mode: str, log: LogConfig, run_id: str, *, tags: list[str], dir: str, **arguments: Plain
) -> "wandb.Run | None":
    """Start and return a wandb run in `mode` (`wandb_mode`), with the tags and notes of `log`; None if wandb is
    disabled.

    If `log.entity` is null, wandb takes the entity from WANDB_ENTITY. The user is never prompted. If mode online fails,
    a note is printed, and the run is logged offline.

    Raises RunError: the run can't be started offline either, or wandb's process doesn't start.
    """
    if mode == "disabled":
        return None
    if not os.environ.get("WANDB_MODE"):
        os.environ.pop("WANDB_MODE", None)  # wandb refuses an empty one
    import wandb

    try:
        time_limits = {"init_timeout": WANDB_SECONDS, "finish_timeout": WANDB_SECONDS, "finish_timeout_raises": True}
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, **time_limits)
        # without the settings it prints which credentials it found
        if not _ends_in_time(partial(wandb.setup, settings)):
            raise RunError(f"wandb: its process has not started within {WANDB_SECONDS:g} s; {DISABLE_REMEDY}")
        return wandb.init(
            project=project_of(log),
            entity=log.entity,
            tags=[*tags, *log.tags] or None,
            id=run_id,
            dir=dir,
            mode=mode,
            resume="allow",
            allow_val_change=True,  # a resumed run may have other labels, or more steps
            settings=settings,
            **arguments,
        )
    except RunError:
        raise
    except Exception as error:  # wandb raises errors of its own for no network, a bad key, a time-out
        reason = one_line(error, 120)
        if mode != "online":
            raise RunError(f"wandb: can't start {mode}: {reason}; {DISABLE_REMEDY}") from None
        print(
            f"wandb: online failed ({reason}); logging offline, to be sent later: wandb sync {dir}/wandb/offline-run-*",
            flush=True,
        )
        _ends_in_time(wandb.teardown)  # or the online run that failed would keep the id
        return _wandb_run("offline", log, run_id, tags=tags, dir=dir, **arguments)


def _ends_in_time(function: Callable[[], object]) -> bool:
    """Call `function` in a thread, as it may wait forever for wandb's process; return whether it ended within
    `WANDB_SECONDS`.

    Raises any exception of `function`.
    """
    errors: list[Exception] = []

    def call() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    (thread := threading.Thread(target=call, daemon=True)).start()
    thread.join(WANDB_SECONDS)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def _finish_wandb_run(run: "wandb.Run") -> None:
    """End a wandb run. Data not sent within `WANDB_SECONDS` stay on disk, and a printed note says how to send them
    later.
    """
    try:
        run.finish()
    except TimeoutError:
        advice = f"all is kept, to be sent later: wandb sync {Path(run.dir).parent}"
        print(f"wandb: the server has not taken everything within {WANDB_SECONDS:g} s; {advice}", flush=True)


def send_report(log: LogConfig, name: str, folder: Path, verdicts: list[dict[str, Plain]], report: Path) -> None:
    """Send an experiment's verdicts and report to wandb, unless wandb is disabled, as the run `NAME report` of the
    experiment's group.

    The run's id is a hash of the experiment's name and folder, so that a report sent again goes to the same run.
    `verdicts`: the rows of verdicts.csv.

    Raises:
        ConfigError: an unknown WANDB_MODE.
        RunError: wandb can't be started, or fails.
    """
    run_id = hashlib.sha256(f"{name} {folder.resolve()}".encode()).hexdigest()[:12]
    mode = wandb_mode(log, in_experiment=True)
    run = _wandb_run(
        mode, log, run_id, name=f"{name} report", dir=str(folder), group=name, job_type="report", tags=["report"]
    )
    if run is None:
        return
    import wandb

    columns = list(dict.fromkeys(key for verdict in verdicts for key in verdict))
    cells = [[None if (cell := verdict.get(key)) is None else str(cell) for key in columns] for verdict in verdicts]
    verdict_rows = [verdict for verdict in verdicts if "verdict" in verdict]  # all but the baseline
    summary = {
        " ".join(filter(None, ("verdict", verdict["size"], verdict["arm"]))): verdict["words"]
        for verdict in verdict_rows
    }
    try:
        run.log({"report": wandb.Html(str(report), inject=False), "verdicts": wandb.Table(columns=columns, data=cells)})
        run.summary.update(summary)
        _finish_wandb_run(run)
    except Exception as error:  # any error of wandb, such as for a process of wandb that was killed
        raise RunError(f"wandb: the report was not sent: {one_line(error, 120)}; it is {report}") from None


def _experiment_labels(config: Config) -> dict[str, str | list[str] | None]:
    """The wandb group, job type and tags of a run of an experiment; None or empty for any other run."""
    run = config.experiment
    labels = {
        "arm": run.arm,
        "size": run.size,
        "seed": config.seed,
        "rate": None if run.rate is None else rate_text(run.rate),
    }
    return {
        "group": "/".join(filter(None, (run.name, run.size))) or None,
        "job_type": run.stage,
        "tags": [f"{name} {value}"[:MAX_TAG] for name, value in labels.items() if value is not None]
        if run.name
        else [],
    }


# ---------------------------------------------------------------- the log


class MetricLog:
    """Appends metrics as JSON lines to metrics.jsonl (`path`) and sends them to the mirrors, on rank 0 (`is_main`)
    alone.
    """

    def __init__(self, path: Path, mirrors: Sequence[Mirror], is_main: bool):
        self.path, self.mirrors, self.is_main = path, [*mirrors], is_main

    @property
    def gets_pictures(self) -> bool:
        return any(mirror.gets_pictures for mirror in self.mirrors)

    def write(self, metrics: dict[str, Plain]) -> None:
        """Append `metrics`, with a `step`, as a line; numbers that are not finite become null. Raises RunError if
        writing fails.
        """
        if not self.is_main:
            return
        finite_metrics = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in metrics.items()
        }
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite_metrics) + "\n")
        except OSError as error:
            raise RunError(
                f"{self.path}: can't log step {metrics['step']}: {error.strerror}; go on with resume=auto"
            ) from None
        self._send(lambda mirror: mirror.log(metrics))

    def send_evaluation(self, result: Evaluation, picture: Path) -> None:
        """Send charts of an evaluation to all mirrors, and the file `picture` if it exists."""
        self._send(lambda mirror: mirror.send_evaluation(result, picture))

    def summarize(self, values: dict[str, Plain]) -> None:
        self._send(lambda mirror: mirror.summarize(values))

    def close(self) -> None:
        self._send(lambda mirror: mirror.finish())

    def _send(self, send: Callable[[Mirror], None]) -> None:
        """Call `send` on each mirror. A mirror that fails is removed and a note printed, so that it doesn't end the
        run.
        """
        for mirror in [*self.mirrors]:
            try:
                send(mirror)
            except Exception as error:  # any error of a logger, such as for a killed process of wandb or a full disk
                self.mirrors.remove(mirror)
                print(
                    f"note: {mirror.name} failed and gets nothing more ({one_line(error, 120)}); {self.path} has all "
                    "numbers",
                    flush=True,
                )
