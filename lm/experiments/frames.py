"""An experiment as pandas data frames, for notebooks: its runs, what tuning found, the verdicts, and what was logged while training."""

from dataclasses import fields

import pandas as pd

from lm.experiments.outcomes import SELECTION
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import summary
from lm.experiments.tuning_tables import Tried
from lm.runs.folder import METRICS, PEAK_MEMORY, peak_memory, read_metrics, training_seconds

_PLACE = ("size", "arm", "stage", "rate", "seed")


def runs(procedure: Procedure) -> pd.DataFrame:
    """One line a run that the experiment needs, as far as is known.

    Columns: its place (size, arm, stage, rate, seed), `state`, tokens and seconds of training so far, the peak of memory, `selection`
    (SELECTION on the selection text), the primary metric on the report text by its name, `folder`. Measured ones are missing until the run
    is finished.
    """
    metric = procedure.experiment.primary.metric
    columns = [*_PLACE, "state", "tokens", "seconds", PEAK_MEMORY, "selection", metric, "folder"]
    return pd.DataFrame([_run(one, metric) for one in procedure.known()], columns=columns)


def _run(run: Run, metric: str) -> dict[str, object]:
    finished = run.outcome.state == "finished"
    lines, log = _logged(run), run.config.run_folder / METRICS
    return _place(run) | {
        "state": run.outcome.state,
        "tokens": lines[-1]["tokens"] if lines else 0,
        "seconds": training_seconds(log) or 0.0,
        PEAK_MEMORY: peak_memory(log),
        "selection": run.outcome.mean(SELECTION, selection=True) if finished else None,
        metric: run.outcome.mean(metric, selection=False) if finished else None,
        "folder": str(run.config.run_folder),
    }


def tuning(procedure: Procedure) -> pd.DataFrame:
    """One line a tuning run, or a line of the tuning table: size, arm, the tuned key, rate, seed, `selection` and `primary` (SELECTION and
    the primary metric on the selection text; infinite if the run diverged, missing if it has not ended), and what was tuned."""
    tried = [vars(one) for size in procedure.experiment.sizes for one in procedure.tried(size)]
    return pd.DataFrame(tried, columns=[spec.name for spec in fields(Tried)])


def verdicts(procedure: Procedure) -> pd.DataFrame:
    """One line a size and arm, as in verdicts.json; of an interval NAME there are the columns NAME, NAME_low and NAME_high."""
    return pd.DataFrame([dict(column for name, value in line.items() for column in _columns(name, value)) for line in summary(procedure)])


def _columns(name: str, value: object) -> list[tuple[str, object]]:
    """A value as a column, an interval as three."""
    if isinstance(value, list) and len(value) == 3:
        return list(zip((name, f"{name}_low", f"{name}_high"), value, strict=True))
    return [(name, value)]


def curves(procedure: Procedure) -> pd.DataFrame:
    """One line a run and logged step: the run's place, and what metrics.jsonl holds of the step, by its names there."""
    found = []
    for run in procedure.known():
        steps: dict[int, dict[str, object]] = {}
        for line in _logged(run):
            steps.setdefault(line["step"], {}).update(line)
        found += [_place(run) | steps[step] for step in sorted(steps)]
    return pd.DataFrame(found, columns=None if found else [*_PLACE, "step", "tokens"])


def _logged(run: Run) -> list[dict[str, object]]:
    """The lines of a run's metrics.jsonl that say how many tokens were seen; the one that tells of its divergence does not."""
    return [line for line in read_metrics(run.config.run_folder / METRICS)[0] if "tokens" in line]


def _place(run: Run) -> dict[str, object]:
    return {name: getattr(run, name) for name in _PLACE}
