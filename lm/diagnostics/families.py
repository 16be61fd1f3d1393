"""The table of statistics: the families that `eval.diagnostics.statistics` names."""

from collections.abc import Callable

from lm.config.eval_config import DiagnosticsConfig
from lm.diagnostics import concentration, limits, sparsity_statistics
from lm.diagnostics.rows import Family

FAMILIES: dict[str, Callable[[DiagnosticsConfig], Family]] = {
    "concentration": lambda asked: concentration.family(asked.top_k, asked.nearest),
    "sparsity": lambda asked: sparsity_statistics.family(),
    "limits": lambda asked: limits.family(asked.limits, max(1, asked.queries // asked.limits.queries)),
}


def families(asked: DiagnosticsConfig) -> tuple[Family, ...]:
    """The families that are asked for, with their options."""
    return tuple(FAMILIES[name](asked) for name in asked.statistics)
