"""Evaluations of a run folder: one JSON file for each kind and step, and the series in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lm.attention.plugins import sources_sha256
from lm.config.data_config import DataConfig
from lm.config.eval_config import EvalConfig
from lm.errors import RunError, one_line
from lm.runs.folder import CHECKPOINTS, EVALUATIONS, read_json, step_path, unsealed
from lm.runs.series import Series, typed
from lm.schema import Plain, build

ROOMS = ("attention", "config", "data", "diagnostics", "evaluation", "model", "runs", "statistics")  # of the code that measures imports


@cache
def measuring_code(package: Path = Path(__file__).parent.parent) -> str:
    """A digest of the source files that an evaluation's numbers come from: another one where any of them was changed."""
    return sources_sha256([package / room for room in ROOMS])


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One kind of evaluation of one checkpoint."""

    kind: str
    step: int
    tokens_seen: int
    data_fingerprint: str
    options: dict[str, Plain]  # all that decides the numbers beside the weights, precision and data
    precision: str
    weights_sha256: str
    series: tuple[Series, ...]
    asked: dict[str, Plain] = field(default_factory=dict)  # the keys of `eval` it was asked for with; {}: by an older version
    code: dict[str, str] = field(
        default_factory=dict
    )  # `Measurement.code`; {}: by an older version, whose files hold no sha256 of themselves

    @property
    def name(self) -> str:
        """The evaluation's kind in a sentence, such as `long-context evaluation`."""
        return f"{self.kind.replace('_', '-')} evaluation"

    @property
    def reporting(self) -> "Evaluation":
        """The evaluation on the documents that report; means that are known of all held-out text alone say so in their names."""
        of_text = any(each.data_fingerprint for each in self.series)
        series = [each.reporting for each in self.series]
        whole = [each if each.samples or not of_text else replace(each, metric=f"{each.metric}, all held-out text") for each in series]
        return replace(self, series=tuple(sorted(whole, key=lambda each: not each.samples)))

    def plain(self) -> dict[str, Plain]:
        """The content of its file."""
        return vars(self) | {"series": [series.plain() for series in self.series]}

    @classmethod
    def of(cls, content: dict[str, Plain]) -> "Evaluation":
        """The evaluation that `plain` was called on. Raises KeyError where it lacks something, ValueError where it isn't that."""
        try:
            series = tuple(Series.of(each) for each in content["series"])
            return cls(**typed(cls, {"asked": {}, "code": {}} | content) | {"series": series})
        except (TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"a field has another type than it should: {one_line(error, None)}") from None


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """evaluations/KIND.step-N.json of a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.json"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """The evaluation files of a run folder, by kind and step."""
    matches = {path: re.fullmatch(r"(.+)\.step-(\d+)\.json", path.name) for path in (run / EVALUATIONS).glob("*.json")}
    return {(match[1], int(match[2])): path for path, match in matches.items() if match}


def read_evaluation(path: Path) -> dict[str, Plain]:
    """The content of an evaluation's file; one that an older version wrote holds no sha256 of itself, and no `code`.

    Raises:
        RunError: it is missing or damaged, was altered, or is not of the kind and step of its name.
    """
    try:
        content = read_json(path)
        if "sha256" in content or "code" in content:
            content = unsealed(content, path)
    except RunError as error:
        raise RunError(f"{error}; {remedy(path)}") from None
    kind, _, step = path.stem.rpartition(".step-")
    if (content.get("kind", kind), content.get("step", int(step))) != (kind, int(step)):
        raise RunError(f"{path}: holds the {content['kind']} of step {content['step']}; {remedy(path)}")
    return content


def remedy(path: Path) -> str:
    """Words on what to do about an evaluation's file that can't be believed."""
    run, step = path.parent.parent, int(path.stem.rpartition(".step-")[2])
    if not step_path(run / CHECKPOINTS, step).exists():
        return "bring it back: the checkpoint of its step is no longer there to be measured again"
    return f"bring it back, or measure it again: lm eval {run} --checkpoint {step}"


def last_evaluations(
    run: Path, config: dict[str, Plain], known: Mapping[Path, Evaluation] = MappingProxyType({})
) -> tuple[list[Evaluation], list[str]]:
    """The last evaluation of each kind that holds series, and words for each that `config` asks for and that is missing; `known`: those
    that have been read, by their files.

    Raises:
        RunError: a file that can't be read; one that an older version wrote counts as missing.
    """
    last, wanted = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}, _wanted(config)
    evaluations, missing = [], []
    for kind in dict.fromkeys((*EvalConfig.known(), *last)):
        name = f"{kind.replace('_', '-')} evaluation"
        if kind not in last:
            missing += [f"no {name}"] if kind in wanted else []
            continue
        if last[kind] in known:
            evaluations.append(known[last[kind]])
            continue
        content = read_evaluation(last[kind])
        try:
            if "series" in content or kind in wanted:  # downstream tasks keep a record of their own
                evaluations.append(Evaluation.of(content))
        except KeyError as error:
            again = "if it was measured by an older version, measure it again with `lm eval`"
            missing.append(f"no {name} that can be read ({last[kind]}: no {error.args[0]}; {again})")
        except ValueError as error:
            raise RunError(f"{last[kind]}: {one_line(error, None)}") from None
    return evaluations, missing


def _wanted(config: dict[str, Plain]) -> set[str]:
    """The kinds that a run's configuration asks for; none where an older version wrote it so that it can't be told."""
    problems = []
    asked, data = (build(schema, config.get(key) or {}, key, problems) for key, schema in (("eval", EvalConfig), ("data", DataConfig)))
    return set() if problems else set(asked.wanted(data))
