"""What is measured: metrics, with their names, units and directions, and the axes along which they are measured."""

import re
from dataclasses import dataclass, replace
from typing import Literal

Better = Literal["lower", "higher", "none"]  # which direction is better; none: the metric only describes


@dataclass(frozen=True)
class Axis:
    """An axis along which a metric is measured, such as positions or sequence lengths."""

    name: str  # such as `position in the sequence`
    unit: str  # unit of its values; pictures mark the training length on axes of `tokens`
    before: str  # words before a value in a sentence, such as `at positions`
    log: bool = True  # drawn on a logarithmic scale

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Metric:
    """A metric. Words in braces in its name stand for what differs, such as {LENGTH}, until `named` puts it there."""

    name: str = ""  # in metrics.jsonl; empty: training does not log it
    unit: str = ""  # such as `nats per token`; a `fraction` lies within 0 and 1
    better: Better = "none"
    meaning: str = ""  # in words, for the list of all metrics
    quantity: str = ""  # its name in reports, such as `loss`
    # what it is measured on: documents, of which a third choose learning rates, or questions, which all choose rates
    # and all report; empty: only its mean is known
    units: Literal["", "documents", "questions"] = ""
    # whether a mean has an interval: Student's t over documents, Wilson's interval over sequences with questions
    interval: bool = False
    axis: Axis | None = None  # None: a single number
    title: str = ""  # of its table and picture in reports, which other metrics may share; empty: no report shows it
    measured_on: str = ""  # a plural noun for the sequences of the measurement, such as `validation sequences`
    amount: str = ""  # number and length of these sequences, such as `256 of 512 tokens`
    caption: str = ""  # what the picture shows, in words
    levels: str = ""  # its reference levels, in words
    references: tuple[tuple[str, float], ...] = ()  # name and value of levels to compare it with, such as chance
    options: str = ""  # options of its task, as JSON, which tell equal names of tasks apart
    # whether it shows that the measurement works, not what the model can do; drawn without interval
    control: bool = False

    @property
    def pattern(self) -> str:
        """Its name, with words in capitals for what differs."""
        return re.sub("[{}]", "", self.name)

    @property
    def decides(self) -> bool:
        """Whether it is measured for each sequence or question, so that an experiment's `primary.metric` can be it."""
        return bool(self.units)

    def fill_name(self, **words: object) -> "Metric":
        """The metric with `words` in place of these words in braces in its name; others stay."""
        name = re.sub(r"\{(\w+)\}", lambda word: str(words.get(word[1], word[0])), self.name)
        return replace(self, name=name.strip())

    def logs(self, name: str) -> bool:
        """Whether training logs it, and logs it as `name`."""
        return bool(self.name) and self.matches(name)

    def matches(self, name: str) -> bool:
        """Whether `name` is its name, with anything in place of words in braces."""
        pattern = re.sub(r"\\ \\{SETTING\\}$", r"(\ .+)?", re.escape(self.name))  # left out where there is one setting
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", pattern), name) is not None
