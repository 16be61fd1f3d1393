"""This module decides whether and where runs of wandb are started, labels them, and sends an experiment's report as one
of them.
"""

import hashlib
import netrc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.training_config import LogConfig
from lm.config.tree import Config
from lm.errors import RunError, one_line
from lm.plain import Plain

if TYPE_CHECKING:
    import wandb

# longest wait for wandb's server before a run is logged offline, and for unsent data at the end
WANDB_TIMEOUT_S = 60.0


def wandb_mode(log: LogConfig, in_experiment: bool = False) -> str:
    """Return the mode of wandb: online, offline or disabled. It is disabled if `log.to` lacks wandb.

    `log.wandb: auto` means the mode in WANDB_MODE. If WANDB_MODE is unset, `auto` means online if there are
    credentials, else offline. For runs of an experiment it then means disabled in place of offline, as an experiment
    has many runs and a report of its own.
    """
    if "wandb" not in log.to:
        return "disabled"
    # an empty variable, as some containers set it, is unset
    if mode := log.wandb if log.wandb != "auto" else os.environ.get("WANDB_MODE"):
        return mode
    has_key = os.environ.get("WANDB_API_KEY") or _netrc_has_key()
    return "online" if has_key else "disabled" if in_experiment else "offline"


def _netrc_has_key() -> bool:
    """Return whether the user's netrc file has a key for wandb's server."""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start_wandb_run(mode: str, run_id: str, *, tags: list[str], dir: str, **arguments: Plain) -> "wandb.Run":
    """Start and return a wandb run in `mode`, online or offline, with `tags` and the tags in WANDB_TAGS.

    wandb takes the entity from WANDB_ENTITY. The user is never prompted. If mode online fails, a note is printed, and
    the run is logged offline.

    Raises RunError: the run can't be started offline either.
    """
    if not os.environ.get("WANDB_MODE"):
        os.environ.pop("WANDB_MODE", None)  # wandb refuses an empty one
    import wandb

    try:
        time_limits = {
            "init_timeout": WANDB_TIMEOUT_S,
            "finish_timeout": WANDB_TIMEOUT_S,
            "finish_timeout_raises": True,
        }
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, **time_limits)
        wandb.setup(settings)  # without the settings it prints which credentials it found
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "lm",
            tags=[*tags, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))] or None,
            id=run_id,
            dir=dir,
            mode=mode,
            resume="allow",
            allow_val_change=True,  # a resumed run may have other labels, or more steps
            settings=settings,
            **arguments,
        )
    except Exception as error:  # wandb raises errors of its own for no network, a bad key, a time-out
        reason = one_line(error, 120)
        if mode != "online":
            raise RunError(f"wandb: can't start {mode}: {reason}; to train without it: log.wandb=disabled") from None
        print(
            f"wandb: online failed ({reason}); logging offline, to be sent later: wandb sync {dir}/wandb/offline-run-*",
            flush=True,
        )
        wandb.teardown()  # or the online run that failed would keep the id
        return start_wandb_run("offline", run_id, tags=tags, dir=dir, **arguments)


def finish_wandb_run(run: "wandb.Run") -> None:
    """End a wandb run. Data not sent within `WANDB_TIMEOUT_S` stay on disk, and a printed note says how to send them
    later.
    """
    try:
        run.finish()
    except TimeoutError:
        advice = f"all is kept, to be sent later: wandb sync {Path(run.dir).parent}"
        print(f"wandb: the server has not taken everything within {WANDB_TIMEOUT_S:g} s; {advice}", flush=True)


def send_report(
    log: LogConfig,
    name: str,
    folder: Path,
    facts: dict[str, Plain],
    verdicts: list[dict[str, Plain]],
    runs: list[dict[str, Plain]],
    report: Path,
) -> None:
    """Send an experiment's verdicts and report to wandb, unless wandb is disabled, as the run `NAME report` of the
    experiment's group.

    The run's id is a hash of the experiment's name and folder, so that a report sent again goes to the same run.

    Args:
        facts: the configuration of the run `NAME report`, such as question and margin.
        verdicts: the rows of verdicts.csv; differences and the ends of their intervals are numbers in the summary.
        runs: a row for each run of the experiment, whose `wandb_id` becomes a link where wandb is online.

    Raises:
        RunError: wandb can't be started, or fails.
    """
    run_id = hashlib.sha256(f"{name} {folder.resolve()}".encode()).hexdigest()[:12]
    if (mode := wandb_mode(log, in_experiment=True)) == "disabled":
        return
    labels = {"name": f"{name} report", "group": name, "job_type": "report", "tags": ["report"]}
    run = start_wandb_run(mode, run_id, dir=str(folder), config=facts, **labels)
    import wandb

    def table(rows: list[dict[str, Plain]]) -> wandb.Table:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[None if (cell := row.get(key)) is None else str(cell) for key in columns] for row in rows]
        return wandb.Table(columns=columns, data=cells)

    summary: dict[str, Plain] = {}
    for verdict in (verdict for verdict in verdicts if "verdict" in verdict):  # all but the baseline
        arm = " ".join(filter(None, (verdict["size"], verdict["arm"])))
        summary[f"verdict {arm}"] = verdict["words"]
        for end, value in zip(("", " low", " high"), verdict["difference"] or (), strict=False):
            summary |= {} if value is None else {f"difference {arm}{end}": value}
    try:
        base_url = (run.url or "").rpartition("/")[0]
        linked = [row | {"wandb": f"{base_url}/{row['wandb_id']}"} if base_url else row for row in runs]
        # files beside the page are not sent
        page = re.sub(r'<a href="(?!#|https?:)[^"]*"[^>]*>.*?</a>', "", report.read_text(encoding="utf-8"))
        run.log({"report": wandb.Html(page, inject=False), "verdicts": table(verdicts), "runs": table(linked)})
        run.summary.update(summary)
        finish_wandb_run(run)
    except Exception as error:  # any error of wandb, such as for a process of wandb that was killed
        raise RunError(f"wandb: the report was not sent: {one_line(error, 120)}; it is {report}") from None


def wandb_labels(config: Config) -> dict[str, str | list[str] | None]:
    """Return the wandb group, job type and tags of a run of an experiment; they are None or empty for any other run."""
    run = config.experiment
    if not run.name:
        return {"group": None, "job_type": None, "tags": []}
    rate = None if run.rate is None else f"{run.rate:g}"
    labels = {"arm": run.arm, "size": run.size, "seed": config.seed, "rate": rate}
    return {
        "group": "/".join(filter(None, (run.name, run.size))),
        "job_type": run.stage,
        "tags": [f"{name} {value}"[:64] for name, value in labels.items() if value is not None],
    }
