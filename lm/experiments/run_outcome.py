"""The outcome of a run of an experiment, read from its run folder alone, and sentences on how runs differ apart from
their arms.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from lm.config.tree import Config
from lm.config.yaml_text import parse_yaml
from lm.errors import RunError
from lm.plugins import PLUGINS
from lm.runs.checkpoints import load_metadata
from lm.runs.evaluations import (
    Evaluation,
    Series,
    Units,
    chance_level,
    evaluation_files,
    load_evaluation,
    measuring_code,
)
from lm.runs.folder import (
    CHECKPOINTS,
    CONFIG,
    DIVERGED,
    ENVIRONMENT,
    METRICS,
    Log,
    check_log,
    read_environment,
    read_metrics,
    step_path,
)
from lm.runs.manifest import read_file
from lm.runs.record import RunRecord, RunStatus, divergence, loss_above_unigram, read_run, start_setting, tokens_before
from lm.schema import Plain, to_plain
from lm.statistics.intervals import is_unlearned
from lm.statistics.tokens import tokens_to_reach

SELECTION = "val/loss"  # validation loss: chooses learning rates, unless `tune.metric` is primary
_RUN_FACTS = {
    "git commit": "git_commit",
    "torch": "versions.torch",
    "device": "device",
    "precision": "precision",
    "compile": "compile",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, read from its folder: whether training reached `last_step`, and whether `metric` was
    measured there.
    """

    folder: Path
    last_step: int
    metric: str
    # kinds of evaluation that are scheduled at `last_step`, without validation
    scheduled_evaluations: tuple[str, ...] = ()
    # the options of `eval` with which evaluations of `last_step` must be made, by kind; {}: the scheduled evaluations
    # are enough
    required_options: dict[str, dict[str, Plain]] = field(default_factory=dict)
    planned: Config | None = None  # the configuration of the run that the folder must hold; None: any
    # results of `tokens_to_reach`
    _reached_tokens: dict[bool, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def log(self) -> Log:
        return read_metrics(self.folder / METRICS)

    @property
    def record(self) -> RunRecord:
        """The record of the run folder, without reading its evaluations again. Raises RunError: a file can't be
        read.
        """
        return read_run(self.folder, self.log, self._last_evaluations)

    @property
    def total_tokens(self) -> int:
        """Tokens that the run saw up to its last step (0 without evaluations), plus training tokens of the weights that
        it started from.
        """
        tokens = self.evaluations[0].tokens_seen if self.evaluations else 0
        has_environment = (self.folder / ENVIRONMENT).is_file()
        return tokens + (tokens_before(read_environment(self.folder)) if has_environment else 0)

    @cached_property
    def state(self) -> RunStatus:
        """The run is `finished` once its last checkpoint, validation loss (SELECTION), `metric` and all evaluations of
        the last step exist. A run that has diverged is `diverged`; any other run is `unfinished`."""
        if not self.folder.is_dir():
            return "unfinished"
        if self.planned:
            check_planned(self.planned, self.checkpoint)
        if self.divergence:
            return "diverged"
        is_finished = self.is_trained and self.is_complete and self.is_measured and self.values(self.metric) is not None
        return "finished" if is_finished else "unfinished"

    @cached_property
    def divergence(self) -> str:
        """The description of how the run diverged (`lm.runs.record.divergence`); empty if it didn't. Raises RunError:
        the log says that the run diverged, but its last checkpoint, which a diverged run does not write, exists."""
        if any(DIVERGED in line for line in self.log.lines) and self.checkpoint.exists():
            raise RunError(
                f"{self.folder / METRICS}: says that the run diverged, but {self.checkpoint} is there: bring it back"
            )
        return divergence(self.log.lines, self._final_loss)

    @cached_property
    def not_learned_text(self) -> str:
        """A text that says that the final loss is above the unigram cross-entropy; empty if it is not, or if either is
        unknown.
        """
        return loss_above_unigram(self._final_loss)

    @property
    def unlearned_level(self) -> str:
        """The level that the metric at the last step is not better than, in words: chance, within an interval over
        sequences, or the unigram cross-entropy. Empty if it is better, or if no level is known.
        """
        series, units = self.series(self.metric), self.values(self.metric)
        name, level = chance_level(series.about) if series else ("", math.nan)
        if not units or not name or series.about.better == "none":
            return self.not_learned_text and "the unigram cross-entropy"
        better = series.about.better
        text = f"{'the ' if better == 'lower' else ''}{name} ({level:.3g})"
        return text * is_unlearned(units.mean, level, better, units.values, units.weights, units.groups)

    @property
    def _final_loss(self) -> Series | None:
        """The validation loss at the last step; None if the run has not been trained up to this step."""
        return self.series(SELECTION) if self.is_trained else None

    @property
    def checkpoint(self) -> Path:
        return step_path(self.folder / CHECKPOINTS, self.last_step)

    @cached_property
    def is_trained(self) -> bool:
        """Whether the checkpoint of the last step exists, and the validation loss (SELECTION) was measured at this
        step.
        """
        return self.checkpoint.exists() and self.series(SELECTION) is not None

    @cached_property
    def is_complete(self) -> bool:
        """Whether each scheduled evaluation of the last step was made, or has failed without stopping the run
        (`eval.on_error` is log).
        """
        files = evaluation_files(self.folder)
        return all(
            (kind, self.last_step) in files or kind in self.failed_evaluations for kind in self.scheduled_evaluations
        )

    @cached_property
    def failed_evaluations(self) -> dict[str, str]:
        """The reasons why evaluations of the last step failed, by evaluation kind."""
        lines = (line for line in self.log.lines if line.get("step") == self.last_step)
        return {
            name.removesuffix("/failed"): str(line[name]) for line in lines for name in line if name.endswith("/failed")
        }

    @cached_property
    def is_measured(self) -> bool:
        """Whether each evaluation in `required_options` was made at the last step, with the options required of it."""
        return (
            self.required_options.items()
            <= {evaluation.kind: evaluation.asked for evaluation in self.evaluations}.items()
        )

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train or to measure."""
        return self.state != "unfinished"

    @property
    def unit_metrics(self) -> list[str]:
        """Names of the metrics that were measured by unit (such as a sequence) at the last step, not as a mean
        alone.
        """
        measured = [series for evaluation in self.evaluations for series in evaluation.series if series.points]
        return [name for series in measured for name in series.logged_means]

    def series(self, metric: str) -> Series | None:
        """The series that logs a metric at the last step; None if the metric was not measured. Raises RunError: a file
        is damaged.
        """
        return next(
            (series for evaluation in self.evaluations for series in evaluation.series if metric in series.names), None
        )

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the last step."""
        return [*self._last_evaluations.values()]

    @cached_property
    def _last_evaluations(self) -> dict[Path, Evaluation]:
        """The evaluations of the last step by file. Raises RunError: a file was altered."""
        files = [path for (_, step), path in evaluation_files(self.folder).items() if step == self.last_step]
        return self._read(files)

    def _read(self, files: list[Path]) -> dict[Path, Evaluation]:
        """Read evaluations, and check that they agree with the log. Unlike a report, a verdict takes no run whose log
        is missing, as the log says whether the run diverged."""
        evaluations = {path: load_evaluation(path) for path in files}
        if evaluations:
            check_log(self.folder, self.log.content or b"")
        self._check_logged(evaluations)
        return evaluations

    def _check_logged(self, evaluations: dict[Path, Evaluation]) -> None:
        """Check that evaluations with the options of the run have the means that training has logged, up to the
        rounding of other hardware. Raises RunError."""
        logged = {(line.get("step"), name): value for line in self.log.lines for name, value in line.items()}
        for path, evaluation in evaluations.items():
            is_of_run = not self.planned or evaluation.asked in (
                {},
                self.planned.eval.measured_options(evaluation.kind),
            )
            for series in evaluation.series if is_of_run else ():
                for name, mean in series.logged_means.items():
                    value = logged.get((evaluation.step, name))
                    tolerance = 0.02 if series.unit == "fraction" else 1e-3 * max(1.0, abs(value or 0.0))
                    if isinstance(value, int | float) and abs(mean - value) > tolerance:
                        raise RunError(
                            f"{path}: {name} is {mean:.4f}, {METRICS} says {value:.4f}: delete the file, and lm eval "
                            f"{self.folder} measures again"
                        )

    def values(self, metric: str) -> Units | None:
        """The values whose mean a metric logs at the last step, by unit (such as a sequence); None if it was not
        measured by unit.
        """
        series = self.series(metric)
        return series and series.logged_units(metric)

    def tokens_to_reach(self, level: float, better: Literal["lower", "higher"], selection: bool) -> float:
        """Tokens at which the metric first reached `level`, on the documents for reports or, with `selection`, those by
        which rates are chosen. Only evaluations on the sequences of the last evaluation count. Returns 0 if the first
        evaluation had reached `level`, and infinity if no evaluation had, or the run has not finished."""
        if self.state != "finished":
            return math.inf
        if selection not in self._reached_tokens:
            identity = self.values(self.metric).identity
            points = [
                (tokens, values.part(selection).mean) for tokens, values in self._history if values.identity == identity
            ]
            self._reached_tokens[selection] = tokens_to_reach(*zip(*points, strict=True), level, better)
        return self._reached_tokens[selection]

    @cached_property
    def _history(self) -> list[tuple[int, Units]]:
        """The evaluations of the metric up to the last step, each as the tokens seen since the start of the run or its
        branch, and the values by sequence."""
        kinds = {
            evaluation.kind
            for evaluation in self.evaluations
            for series in evaluation.series
            if self.metric in series.names
        }
        files = [
            path
            for (kind, step), path in sorted(evaluation_files(self.folder).items())
            if kind in kinds and step <= self.last_step
        ]
        evaluations, has_environment = self._read(files), (self.folder / ENVIRONMENT).is_file()
        branch = read_environment(self.folder).get("branched_from") if has_environment else None
        branch_tokens = (branch or {}).get("tokens", 0)
        points = [
            (
                evaluation.tokens_seen - branch_tokens,
                next((series for series in evaluation.series if self.metric in series.names), None),
            )
            for evaluation in evaluations.values()
        ]
        return [
            (tokens, values)
            for tokens, series in points
            if tokens and series and (values := series.logged_units(self.metric))
        ]

    def mean(self, metric: str, selection: bool) -> float:
        """The mean of a metric over the documents for reports or, with `selection`, those by which rates are chosen;
        infinite unless the run finished."""
        return self.values(metric).part(selection).mean if self.state == "finished" else math.inf


# ---------------------------------------------------------------- the planned run


def check_planned(planned: Config, checkpoint: Path) -> None:
    """Check that a folder holds the run that is planned for it: by config.yaml and by the last checkpoint, it has the
    same name, seed, arm, size, stage and rate. Raises RunError: the folder was copied, renamed or linked."""
    folder = planned.run_folder
    texts = {folder / CONFIG: read_file(folder, CONFIG) if (folder / CONFIG).is_file() else ""}
    texts[checkpoint] = load_metadata(checkpoint)["config"] if checkpoint.exists() else ""
    expected = _identity(to_plain(planned))
    for path, text in texts.items():
        found = _identity(parse_yaml(text, str(path))) if text else {}
        if differing := {name: value for name, value in found.items() if value not in (None, expected[name])}:
            words = ", ".join(f"{name} {value} (planned: {expected[name]})" for name, value in differing.items())
            raise RunError(
                f"{path}: is of another run than {planned.run_folder.name}: {words}; bring back the folder of that "
                "run, or delete this one and it is trained again"
            )


def _identity(plain: Plain) -> dict[str, Plain]:
    """What tells a run of an experiment from its other runs, in a plain configuration."""
    plain = plain if isinstance(plain, dict) else {}
    block = plain.get("experiment") if isinstance(plain.get("experiment"), dict) else {}
    own, of_experiment = ("name", "seed"), ("arm", "size", "stage", "rate")
    return {name: plain.get(name) for name in own} | {name: block.get(name) for name in of_experiment}


# ---------------------------------------------------------------- differences between runs


def run_differences(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    """Sentences on what differs between finished runs apart from their arms, such as device or code, and on facts that
    the runs do not record. `outcomes`: pairs of an arm's name and the outcome of one of its runs. Raises RunError: an
    environment.json can't be read.
    """
    facts: dict[str, list[tuple[str, Plain]]] = {}  # pairs of arm and value by what they say
    finished_runs = [(arm, run) for arm, run in outcomes if run.state == "finished"]
    dirty_count = 0
    for arm, run in finished_runs:
        if (run.folder / ENVIRONMENT).is_file():
            environment = read_environment(run.folder)
            values = {name: start_setting(environment, key) for name, key in _RUN_FACTS.items()}
            versions = [name for name in environment.get("versions", {}) if ":" in name]
            values |= {f"code of {name}": start_setting(environment, f"versions.{name}") for name in versions}
            if "weights" in (origin := environment.get("started_from") or {}):
                values[f"weights of {origin['path']}"] = origin["weights"]
            dirty_count += bool(values["git commit"]) and start_setting(environment, "git_dirty") is not False
            for name, value in values.items():
                facts.setdefault(name, []).append((arm, value))
        for evaluation in run.evaluations:
            for name, digest in evaluation.code.items():
                facts.setdefault(f"measuring code of {name}", []).append((arm, digest))
    sentences = [
        f"runs differ in {name}: {words}" for name, values in facts.items() if (words := describe_values(values))
    ]
    if dirty_count:
        subject = f"{dirty_count} of {len(finished_runs)} runs"
        sentences.append(f"{subject} are of a git tree with uncommitted changes: their code is not known")
    prefix = "measuring code of "
    measured = {name.removeprefix(prefix): values for name, values in facts.items() if name.startswith(prefix)}
    codes = {name: {digest for _, digest in values} for name, values in measured.items()}
    present = {"lm": measuring_code(), **PLUGINS.code(codes)}
    if any(len(codes[name]) == 1 and codes[name] != {digest} for name, digest in present.items() if name in codes):
        sentences.append("runs were measured by other code than today's; lm eval RUN measures them again")
    return sentences


def describe_values(values: list[tuple[str, Plain]]) -> str:
    """List differing values, each with the arms whose runs recorded it; empty if all are the same. `values`: pairs of
    arm and value.
    """
    arms: dict[str, dict[str, None]] = {}
    for arm, value in values:
        arms.setdefault("not recorded" if value is None else str(value), {})[arm] = None
    return "; ".join(f"{value[:120]} ({', '.join(names)})" for value, names in arms.items()) if len(arms) > 1 else ""
