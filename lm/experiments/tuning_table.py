"""Tuning tables: the runs that chose an experiment's rates, as `tuning.csv` lists them and `tune.table` reads them."""

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lm.config.tree import Config, effect_of
from lm.errors import ConfigError
from lm.experiments.run_outcome import SELECTION
from lm.removed_keys import removed_defaults
from lm.runs.folder import DIVERGED
from lm.schema import Plain, flatten, to_plain
from lm.statistics.tuning import Rate, key_values, read_rate


@dataclass(frozen=True)
class TuningRun:
    size: str
    arm: str
    key: str  # the configuration keys that are tuned, as `Tune.heading` gives them
    rate: Rate
    seed: int
    # values of SELECTION (val/loss) and of the primary metric, on the data that choose rates; infinite: the run
    # diverged; None: not known
    selection_value: float | None
    primary_value: float | None
    configuration: str  # the settings of the run, as `settings_words` gives them


def read_tuning_table(path: Path, metric: str) -> tuple[TuningRun, ...]:
    """Read the tuning runs that a tuning table lists.

    metric: the column of the primary metric. Without this column, `TuningRun.primary_value` is None in all runs.

    Raises ConfigError: the file does not exist, or is no tuning table.
    """

    def number(line: dict[str, str], column: str) -> float | None:
        text = line.get(column) or ""
        value = math.inf if text == DIVERGED else float(text or 0)
        if math.isnan(value):
            raise ValueError
        return value if text else None

    runs: list[TuningRun] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for line in reader:
                rate, selection, names = read_rate(line["rate"]), number(line, SELECTION), line["key"].split(" / ")
                primary = None if selection is None else number(line, metric)
                if not all(0 < value < math.inf for value in key_values(rate)) or len(names) != len(key_values(rate)):
                    raise ValueError
                name, words = (line["size"], line["arm"], line["key"]), line["configuration"]
                runs.append(TuningRun(*name, rate, int(line["seed"]), selection, primary, words))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (tune.table)") from None
    except (csv.Error, KeyError, ValueError, TypeError, AttributeError):
        columns = f"size, arm, key, a rate above 0, a seed, a {SELECTION} that is a number or `{DIVERGED}`"
        raise ConfigError(
            f"{path}: line {reader.line_num} is of no tuning table: it needs {columns}, and a configuration, as in "
            "tuning.csv, which `lm compare` writes"
        ) from None
    return tuple(runs)


def values_by_arm_and_rate(
    runs: Iterable[TuningRun], size: str, value_of: Callable[[TuningRun], float | None]
) -> dict[str, dict[Rate, list[float]]]:
    """The values (`value_of`) of a size's tuning runs, without None, for each arm and rate as a list in ascending order
    of seeds.
    """
    values: dict[str, dict[Rate, list[float]]] = {}
    for run in sorted((run for run in runs if run.size == size), key=lambda run: (run.rate, run.seed)):
        if (value := value_of(run)) is not None:
            values.setdefault(run.arm, {}).setdefault(run.rate, []).append(value)
    return values


# ---------------------------------------------------------------- the configuration that was tuned


def settings_words(config: Config, tuned_keys: Iterable[str], source_name: str) -> str:
    """Settings of model, data and training that are not at their defaults, as `KEY=VALUE; ...`, without seeds,
    precision and tuned keys.

    source_name: the arm whose weights the run starts from, named in place of their path; empty: random weights.
    """
    skipped_keys = (*tuned_keys, "init_from", "branch_from")
    settings = {
        path: value
        for path, value in flatten(to_plain(config)).items()
        if value not in (None, _defaults().get(path))
        and path not in skipped_keys
        and effect_of(path).affects in ("model", "training")
    }
    settings |= {"from": source_name} if source_name else {}
    return "; ".join(f"{path}={value}" for path, value in sorted(settings.items()))


@cache
def _defaults() -> dict[str, Plain]:
    return flatten(to_plain(Config()))


def differing_keys(description: str, other_description: str) -> list[str]:
    """List the keys whose values differ between two configurations, each described in the form of `settings_words`.
    Former defaults of removed keys, which tables of older versions hold, are no difference.
    """

    def settings(words: str) -> set[tuple[str, str]]:
        values = dict(text.partition("=")[::2] for text in words.split("; "))
        blocks = {path: path.rpartition(".")[::2] for path in values}
        removed = {
            path: [*map(str, removed_defaults(block, values.get(f"{block}.name", ""), name))]
            for path, (block, name) in blocks.items()
        }
        return {(path, value) for path, value in values.items() if value not in removed[path]}

    return sorted({path for path, _ in settings(description) ^ settings(other_description)})
