"""`lm compare --minutes`: which final seeds are dropped so that experiments end in time, decided once and written down."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lm.errors import RunError
from lm.experiments.experiment import MINUTES, Experiment
from lm.experiments.procedure import Procedure
from lm.experiments.slots import Slots
from lm.experiments.timing import Times
from lm.runs.folder import read_json, write_json


def total_seconds(procedure: Procedure, times: Times, n_seeds: int, slots: Slots) -> float:
    """How long what is left takes with so many final seeds, in these slots."""
    experiment = procedure.experiment
    known = procedure.known()
    counts = {size: procedure.n_runs(size, n_seeds) for size in experiment.sizes}
    times = {place: seconds * slots.taken(*place) for place, seconds in times.items()}
    planned = sum(seconds * counts[size][arm] for (size, arm), seconds in times.items())
    kept = {*experiment.seeds[:n_seeds]}
    done = sum(times[one.size, one.arm] for one in known if one.outcome.ended and (one.stage == "tune" or one.seed in kept))
    return max(0.0, planned - done) / slots.jobs


def seeds_that_fit(procedures: Sequence[Procedure], times: Sequence[Times], minutes: float, slots: Sequence[Slots]) -> list[int]:
    """How many final seeds of each experiment fit into `minutes` for all: dropped from the end, of the one that has most left; at least
    one stays."""
    counts = [len(one.experiment.seeds) for one in procedures]

    def seconds(number: int, n_seeds: int) -> float:
        return total_seconds(procedures[number], times[number], n_seeds, slots[number])

    while sum(seconds(*each) for each in enumerate(counts)) > 60 * minutes and max(counts) > 1:
        most = max(range(len(counts)), key=lambda number: (counts[number], seconds(number, counts[number])))
        counts[most] -= 1
    return counts


def limited(experiment: Experiment, n_seeds: int, minutes: float, estimated: float, late: bool) -> Experiment:
    """The experiment with its first `n_seeds` final seeds, and a note on those that are dropped; `estimated`: seconds without that;
    `late`: final runs have ended already."""
    dropped = experiment.seeds[n_seeds:]
    if not dropped:
        return experiment
    why = f"all experiments were estimated at {estimated / 60:.0f} minutes, {minutes:g} were given"
    note = f"final seeds {', '.join(map(str, dropped))} of every arm were dropped: {why} (--minutes)"
    return replace(experiment, seeds=experiment.seeds[:n_seeds], dropped=dropped, dropped_note=note, dropped_late=late)


def write_limit(experiment: Experiment, minutes: float) -> None:
    """Keep what was decided, for later calls of the same command."""
    kept = {"minutes": minutes, "dropped": list(experiment.dropped), "note": experiment.dropped_note, "late": experiment.dropped_late}
    write_json(experiment.folder / MINUTES, kept)


def forget_limit(experiment: Experiment) -> None:
    """Let all planned seeds count again."""
    (experiment.folder / MINUTES).unlink(missing_ok=True)


def limit_of(experiment: Experiment) -> float | None:
    """The minutes for which seeds were dropped, or were found to fit; None: no limit was given."""
    path = experiment.folder / MINUTES
    return float(read_json(path)["minutes"]) if path.exists() else None


def with_all_seeds(experiment: Experiment) -> Experiment:
    """The experiment with the seeds that were dropped."""
    return replace(experiment, seeds=experiment.seeds + experiment.dropped, dropped=(), dropped_note="", dropped_late=False)


def with_limit(experiment: Experiment) -> Experiment:
    """The experiment without the seeds that an earlier `--minutes` dropped. Raises RunError: the file that says so is damaged."""
    path: Path = experiment.folder / MINUTES
    if not path.exists():
        return experiment
    content = read_json(path)
    try:
        dropped = tuple(int(seed) for seed in content["dropped"])
        note, late, _ = str(content["note"]), bool(content.get("late")), float(content["minutes"])
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: does not say which seeds were dropped; delete it, and give --minutes again") from None
    kept = tuple(seed for seed in experiment.seeds if seed not in dropped)
    if not kept or not dropped:
        return experiment
    return replace(experiment, seeds=kept, dropped=dropped, dropped_note=note, dropped_late=late)
