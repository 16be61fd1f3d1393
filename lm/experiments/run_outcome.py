"""This module reads the outcome of an experiment's run from its run folder, and says in what runs differ besides the
arm."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, RunError
from lm.plain import Plain
from lm.runs.evaluations import (
    Evaluation,
    Metric,
    chance_level,
    evaluation_files,
    load_evaluation,
    unit_rows,
    weighted_mean,
)
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DIVERGED_KEY,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    check_file,
    check_log,
    checkpoint_path,
    read_environment,
    read_file,
    read_metrics,
)
from lm.runs.record import (
    RunRecord,
    RunStatus,
    divergence_reason,
    loss_above_unigram_text,
    read_run,
    recorded_setting,
    tokens_before_run,
)
from lm.statistics.intervals import is_unlearned

SELECTION_METRIC = "val/loss"  # validation loss: chooses learning rates, unless `tune.metric` is primary
OptionsByKind = dict[str, dict[str, Plain]]  # options of `eval`, by kind of evaluation
_ENVIRONMENT_KEYS = {
    "git commit": "git_commit",
    "torch": "versions.torch",
    "device": "device",
    "precision": "precision",
    "compile": "compile",
}


class NoDocuments(RunError):
    """Raised if no held-out document is left to choose learning rates on, or none to report results on."""


def units_of_part(units: pd.DataFrame, part: Literal["selects", "reports"]) -> pd.DataFrame:
    """Return the units of held-out documents that choose learning rates (`selects`), or of those that are reported
    (`reports`). Units that don't come from held-out text are all returned. A sequence belongs to the document in
    which it begins.

    Raises NoDocuments: no unit is left.
    """
    kept = units[units["part"].isin(["", part])]
    if units.empty or len(kept):
        return kept
    purpose = "choose learning rates" if part == "selects" else "report"
    raise NoDocuments(
        f"none of {units['group'].nunique()} held-out documents is left to {purpose} on: hold out more text"
    )


class DueEvaluations(NamedTuple):
    """Holds the evaluations that are due at the last step of a run, by its schedule or by the experiment's block
    `evaluate`. The fields are arguments of `Outcome`."""

    scheduled_evaluations: list[str]  # kinds of evaluation that are scheduled then, without validation
    required_evaluations: OptionsByKind  # the options that `evaluate` asks for
    run_eval_options: OptionsByKind  # the options in the run's configuration


@dataclass(frozen=True)
class Outcome:
    """Reads from a run's folder whether training reached `last_step`, and whether the primary metric was measured at
    this step."""

    folder: Path
    last_step: int
    primary_metric_name: str
    # kinds of evaluation that are scheduled at `last_step`, without validation
    scheduled_evaluations: Collection[str] = ()
    # the options of `eval` with which evaluations of `last_step` must be made, by kind; {}: the scheduled evaluations
    # are enough
    required_evaluations: OptionsByKind = field(default_factory=dict)
    # the options of `eval` of the run, by kind of evaluation; {}: any
    run_eval_options: OptionsByKind = field(default_factory=dict)

    @cached_property
    def log_lines(self) -> list[dict[str, Plain]]:
        """Return the lines of metrics.jsonl."""
        return read_metrics(self.folder)

    @property
    def record(self) -> RunRecord:
        """Return the record of the run folder, without reading its evaluations again. Raises RunError: a file can't be
        read."""
        return read_run(self.folder, self._last_evaluations_by_file)

    @property
    def total_tokens(self) -> int:
        """Return the tokens that the run saw, plus the training tokens of the weights that it started from. Tokens of
        the run are read from an evaluation of its last step; without one they are 0."""
        tokens = self.last_evaluations[0].tokens_seen if self.last_evaluations else 0
        if (self.folder / ENVIRONMENT_FILE).is_file():
            tokens += tokens_before_run(read_environment(self.folder))
        return tokens

    @cached_property
    def state(self) -> RunStatus:
        """Return `diverged` if the run has diverged, `finished` if all that is planned exists, else `unfinished`.
        Planned are the last checkpoint, the validation loss, the primary metric, and all evaluations of the last step.

        Raises RunError: the folder's name differs from the run's name in its config.yaml, as after a copy; or a file
        was altered.
        """
        if not self.folder.is_dir():
            return "unfinished"
        path, planned = self.folder / CONFIG_FILE, self.folder.name
        name = parse_yaml(read_file(self.folder, CONFIG_FILE), CONFIG_FILE)["name"] if path.is_file() else planned
        if name != planned:
            remedy = "bring back the folder of that run, or delete this one and it is trained again"
            raise RunError(f"{path}: is of another run than {planned}: its name is {name}; {remedy}")
        if self.divergence:
            return "diverged"
        is_finished = (
            self.is_trained
            and self.has_all_evaluations
            and self.has_required_evaluations
            and len(self.metric_values(self.primary_metric_name))
        )
        return "finished" if is_finished else "unfinished"

    @cached_property
    def divergence(self) -> str:
        """Return the description of how the run diverged (`lm.runs.record.divergence_reason`); empty if the run didn't
        diverge. Raises RunError: the log says that the run diverged, but its last checkpoint, which a diverged run does
        not write, exists."""
        if any(DIVERGED_KEY in line for line in self.log_lines) and self.checkpoint.exists():
            raise RunError(
                f"{self.folder / METRICS_FILE}: says that the run diverged, but {self.checkpoint} exists: bring it back"
            )
        return divergence_reason(self.log_lines, self._validation)

    @cached_property
    def loss_above_unigram_text(self) -> str:
        """Return a text that says that the final loss is above the unigram cross-entropy; empty if the loss is not
        above it, or if one of the two is unknown."""
        return loss_above_unigram_text(self._validation)

    @property
    def unbeaten_level_text(self) -> str:
        """Return, in words, the reference level that the metric at the last step is not better than (`is_unlearned`):
        chance or the unigram cross-entropy. Empty if the metric is better, or if no level is known."""
        units = self.metric_values(self.primary_metric_name)
        about = units["about"].iloc[0] if len(units) else Metric()
        name, level = chance_level(about)
        if not name or about.better == "none":
            return self.loss_above_unigram_text and "the unigram cross-entropy"
        text = f"{'the ' if about.better == 'lower' else ''}{name} ({level:.3g})"
        columns = (units[column].to_numpy() for column in ("value", "weight", "group"))
        return text * is_unlearned(weighted_mean(units), level, about.better, *columns)

    @property
    def _validation(self) -> Evaluation | None:
        """Return the validation at the last step; None if the run has not been trained up to this step."""
        return self.evaluation_of(SELECTION_METRIC) if self.is_trained else None

    @property
    def checkpoint(self) -> Path:
        """Return the path of the last step's checkpoint."""
        return checkpoint_path(self.folder / CHECKPOINTS_FOLDER, self.last_step)

    @cached_property
    def is_trained(self) -> bool:
        """Return whether the checkpoint of the last step exists, and the validation loss (`SELECTION_METRIC`) was
        measured at this step. Raises RunError: the checkpoint was altered, or is of another run."""
        if not self.checkpoint.exists() or not self.evaluation_of(SELECTION_METRIC):
            return False
        check_file(self.folder, f"{CHECKPOINTS_FOLDER}/{self.checkpoint.name}")
        return True

    @cached_property
    def has_all_evaluations(self) -> bool:
        """Return whether each scheduled evaluation of the last step was made, or has failed without stopping the run
        (`eval.on_error` is log)."""
        files = evaluation_files(self.folder)
        return all(
            (kind, self.last_step) in files or kind in self.failed_evaluations for kind in self.scheduled_evaluations
        )

    @cached_property
    def failed_evaluations(self) -> dict[str, str]:
        """Return the reasons why evaluations of the last step failed, by evaluation kind."""
        lines = (line for line in self.log_lines if line.get("step") == self.last_step)
        return {
            name.removesuffix("/failed"): str(line[name]) for line in lines for name in line if name.endswith("/failed")
        }

    @cached_property
    def has_required_evaluations(self) -> bool:
        """Return whether each evaluation in `required_evaluations` was made at the last step, with the options that are
        required. If `required_evaluations` is empty, return True unless the primary metric was measured with options
        that differ from the run's.
        """
        if not self.required_evaluations:
            measurement = self.evaluation_of(self.primary_metric_name)
            return measurement is None or self._has_run_eval_options(measurement)
        asked = {evaluation.kind: evaluation.asked for evaluation in self.last_evaluations}
        return self.required_evaluations.items() <= asked.items()

    def _has_run_eval_options(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation was made with the options of the run."""
        return not self.run_eval_options or evaluation.asked in ({}, self.run_eval_options.get(evaluation.kind, {}))

    @property
    def has_ended(self) -> bool:
        """Return whether nothing is left to train or to measure."""
        return self.state != "unfinished"

    def evaluation_of(self, metric: str) -> Evaluation | None:
        """Return the evaluation of the last step that measured a metric; None without one. Raises RunError: a file is
        damaged."""
        return next(
            (evaluation for evaluation in self.last_evaluations if (evaluation.frame["metric"] == metric).any()), None
        )

    def metric_values(self, metric: str) -> pd.DataFrame:
        """Return a frame of the values of a metric at the last step, with one row for each unit (sequence or question).
        There are no rows if the metric was not measured for each unit."""
        evaluation = self.evaluation_of(metric)
        return unit_rows(evaluation.frame, metric) if evaluation else pd.DataFrame()

    @property
    def last_evaluations(self) -> list[Evaluation]:
        """Return the evaluations of the last step."""
        return [*self._last_evaluations_by_file.values()]

    @cached_property
    def _last_evaluations_by_file(self) -> dict[Path, Evaluation]:
        """Return the evaluations of the last step by file. Raises RunError: a file was altered or contradicts the log,
        or the log is missing, which says whether the run diverged."""
        files = [path for (_, step), path in evaluation_files(self.folder).items() if step == self.last_step]
        evaluations = {path: load_evaluation(path) for path in files}
        if evaluations:
            check_log(self.folder)
        for path, evaluation in evaluations.items():
            if self._has_run_eval_options(evaluation):
                self._check_against_log(path, evaluation)
        return evaluations

    def _check_against_log(self, path: Path, evaluation: Evaluation) -> None:
        """Check that an evaluation's means of metrics equal those that training logged at its step, up to the rounding
        of other hardware. Raises RunError: a mean differs.
        """
        logged = {name: value for line in self.log_lines if line.get("step") == evaluation.step
                  for name, value in line.items() if isinstance(value, int | float)}  # fmt: skip
        frame = evaluation.frame
        for name in {*frame["metric"]} & logged.keys():
            rows, value = frame[frame["metric"] == name], logged[name]
            widths = (rows["until"] - rows["x"]).fillna(1.0)
            mean = weighted_mean(rows.assign(weight=rows["weight"] * widths))
            tolerance = 0.02 if rows["about"].iloc[0].unit == "fraction" else 1e-3 * max(1.0, abs(value))
            if abs(mean - value) > tolerance:
                raise RunError(
                    f"{path}: {name} is {mean:.4f}, {METRICS_FILE} says {value:.4f}: delete the file, and lm eval "
                    f"{self.folder} measures again"
                )

    def data_identity(self, metric: str) -> tuple[str, ...]:
        """Return the fingerprint of the data and the hash of the sequences of a measurement at the last step."""
        evaluation = self.evaluation_of(metric)
        return evaluation.data_fingerprint, *unit_rows(evaluation.frame, metric)["sequences"].head(1)

    def mean(self, metric: str, for_selection: bool) -> float:
        """Return the mean of a metric over the documents for reports or, with `for_selection`, over the documents by
        which rates are chosen; infinite unless the run finished.
        """
        if self.state != "finished":
            return math.inf
        return weighted_mean(units_of_part(self.metric_values(metric), "selects" if for_selection else "reports"))


# ---------------------------------------------------------------- tuning runs in a table


def read_tuning_table(path: Path, metric: str) -> pd.DataFrame:
    """Read the tuning runs that a tuning table lists, as `Procedure.tuning_runs` gives them.

    metric: the column of the primary metric, which may be missing.

    Raises ConfigError: the file does not exist, or is no tuning table.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        for name in {SELECTION_METRIC, metric}:
            texts = table[name] if name in table or name == SELECTION_METRIC else pd.Series("", table.index)
            table[name] = texts.replace({DIVERGED_KEY: "inf", "": "nan"}).map(
                float
            )  # exact, unlike pandas' own reading
        table["rate"], table["seed"] = table["rate"].map(float), table["seed"].map(int)
        return table[[*dict.fromkeys(("size", "arm", "key", "rate", "seed", SELECTION_METRIC, metric))]]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (tune.table)") from None
    except (KeyError, ValueError, TypeError):
        columns = f"size, arm, key, rate, seed and {SELECTION_METRIC}, which is a number or `{DIVERGED_KEY}`"
        raise ConfigError(
            f"{path}: is no tuning table: it needs columns {columns}, as in tuning.csv, which `lm compare` writes"
        ) from None


# ---------------------------------------------------------------- differences between runs


def describe_run_differences(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    """Return sentences on what differs between finished runs besides the arm, such as device or code, and on facts that
    the runs do not record. `outcomes`: pairs of an arm's name and the outcome of one of its runs. Raises RunError: an
    environment.json can't be read."""
    facts: dict[str, list[tuple[str, Plain]]] = {}  # pairs of arm and value by what they say
    finished_runs = [(arm, run) for arm, run in outcomes if run.state == "finished"]
    dirty_count = 0
    for arm, run in finished_runs:
        if (run.folder / ENVIRONMENT_FILE).is_file():
            environment = read_environment(run.folder)
            values = {name: recorded_setting(environment, key) for name, key in _ENVIRONMENT_KEYS.items()}
            versions = [name for name in environment.get("versions", {}) if ":" in name]
            values |= {f"code of {name}": recorded_setting(environment, f"versions.{name}") for name in versions}
            if "weights" in (origin := environment.get("started_from") or {}):
                values[f"weights of {origin['path']}"] = origin["weights"]
            dirty_count += bool(values["git commit"]) and recorded_setting(environment, "git_dirty") is not False
            for name, value in values.items():
                facts.setdefault(name, []).append((arm, value))
        for evaluation in run.last_evaluations:
            for name, digest in evaluation.code.items():
                facts.setdefault(f"measuring code of {name}", []).append((arm, digest))
    sentences = [
        f"runs differ in {name}: {words}" for name, values in facts.items() if (words := describe_values_by_arm(values))
    ]
    if dirty_count:
        subject = f"{dirty_count} of {len(finished_runs)} runs"
        sentences.append(f"{subject} are of a git tree with uncommitted changes: their code is not known")
    return sentences


def describe_values_by_arm(values: list[tuple[str, Plain]]) -> str:
    """List differing values, each with the arms whose runs recorded it; empty if all are the same. `values`: pairs of
    arm and value.
    """
    arms: dict[str, dict[str, None]] = {}
    for arm, value in values:
        arms.setdefault("not recorded" if value is None else str(value), {})[arm] = None
    return "; ".join(f"{value[:120]} ({', '.join(names)})" for value, names in arms.items()) if len(arms) > 1 else ""
