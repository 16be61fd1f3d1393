"""Evaluations of a run folder: one JSON file for each kind and step, and the series in it."""

import re
from dataclasses import dataclass
from pathlib import Path

from lm.errors import RunError
from lm.runs.adaptors import ADAPTORS, is_wanted
from lm.runs.folder import EVALUATIONS, read_json
from lm.runs.series import Series
from lm.schema import Plain


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One kind of evaluation of one checkpoint."""

    kind: str
    step: int
    tokens_seen: int
    series: tuple[Series, ...]

    @property
    def name(self) -> str:
        """Its kind in a sentence, such as `long-context evaluation`."""
        return f"{self.kind.replace('_', '-')} evaluation"


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """evaluations/KIND.step-N.json of a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.json"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """The evaluation files of a run folder, by kind and step."""
    found = {path: re.fullmatch(r"(.+)\.step-(\d+)\.json", path.name) for path in (run / EVALUATIONS).glob("*.json")}
    return {(match[1], int(match[2])): path for path, match in found.items() if match}


def last_evaluations(run: Path, config: dict[str, Plain]) -> tuple[list[Evaluation], list[str]]:
    """The last evaluation of each kind that holds series, and what is lacking of those that `config` asks for, in words.

    Raises:
        RunError: a file that can't be read; one that an older version wrote is lacking instead.
    """
    last = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}
    found, lacking = [], []
    for kind in dict.fromkeys((*ADAPTORS, *last)):
        name = f"{kind.replace('_', '-')} evaluation"
        if kind not in last:
            lacking += [f"no {name}"] if is_wanted(kind, config) else []
            continue
        content = read_json(last[kind])
        try:
            if "series" in content or kind in ADAPTORS:
                series = [Series.of(one) for one in content["series"]] if "series" in content else ADAPTORS[kind](content)
                found.append(Evaluation(kind, content["step"], content["tokens_seen"], tuple(series)))
        except KeyError as error:
            again = "if it was measured by an older version, measure it again with `lm eval`"
            lacking.append(f"no {name} that can be read ({last[kind]}: no {error.args[0]}; {again})")
        except (TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{last[kind]}: {' '.join(str(error).split())}") from None
    return found, lacking
