"""What is measured: metrics, with their names, units and directions."""

import re
from dataclasses import dataclass, replace
from typing import Literal

Better = Literal["lower", "higher", "none"]  # which direction is better; none: the metric only describes


@dataclass(frozen=True)
class Metric:
    """A metric. Words in braces in its name stand for what differs, such as {LENGTH}, until `named` puts it there."""

    name: str  # in metrics.jsonl
    unit: str = ""  # such as `nats per token`; a `fraction` lies within 0 and 1
    better: Better = "none"
    meaning: str = ""  # in words, for the list of all metrics
    quantity: str = ""  # its name in reports, such as `loss`
    # what it is measured on: documents, of which a third choose learning rates, or questions, which all choose rates
    # and all report; empty: only its mean is known
    units: Literal["", "documents", "questions"] = ""

    @property
    def title(self) -> str:
        """Its name, with words in capitals for what differs."""
        return re.sub("[{}]", "", self.name)

    @property
    def decides(self) -> bool:
        """Whether it is measured for each sequence or question, so that an experiment's `primary.metric` can be it."""
        return bool(self.units)

    def named(self, **words: object) -> "Metric":
        """The metric with `words` in place of the words in braces in its name."""
        return replace(self, name=self.name.format(**words).strip())

    def matches(self, name: str) -> bool:
        """Whether `name` is its name, with anything in place of words in braces."""
        pattern = re.sub(r"\\ \\{SETTING\\}$", r"(\ .+)?", re.escape(self.name))  # left out where there is one setting
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", pattern), name) is not None
