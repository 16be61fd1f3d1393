"""The keys of `eval`: what is measured, when and how."""

from dataclasses import dataclass
from typing import Literal

from lm.config.inference_config import InferenceSetting, ThetaFactor
from lm.config.task_config import TASKS, Task
from lm.schema import key, section, sections, variants


@dataclass
class Schedule:
    """When an evaluation runs during training, and how long it may take."""

    every: int | None = key(None, "steps between evaluations during training; null: only `at`", ge=1)
    at: list[float] = key([1.0], "shares of the run at which it is measured", gt=0, le=1)
    max_seconds: float | None = key(None, "give an evaluation up, and say so, when it takes longer; null: never", gt=0)

    def is_due(self, step: int, max_steps: int) -> bool:
        """True every so many steps, and at those shares of the run."""
        return step in {max(1, round(share * max_steps)) for share in self.at} or bool(self.every and step % self.every == 0)


@dataclass
class LongContextConfig(Schedule):
    length_factor: float = key(8.0, "length of the rows, in training lengths; 0: off", ge=0)
    rows: int = key(32, "rows, spread over the held-out documents that are long enough", ge=1)
    settings: list[InferenceSetting] = sections(
        InferenceSetting, "how the model is used there, each measured", (InferenceSetting(), InferenceSetting(ThetaFactor()))
    )


@dataclass
class RecallConfig(Schedule):
    tasks: list[Task] = variants(TASKS, "tasks to ask for, e.g. [passkey, {name: needle, needles: 3}]; empty: those of data.tasks")
    length_factors: list[float] = key([1.0, 2.0, 4.0, 8.0, 16.0], "lengths of the rows, in training lengths; []: off", gt=0)
    rows: int = key(128, "rows of each task and length", ge=1)
    settings: list[InferenceSetting] = sections(InferenceSetting, "how the model is used, each measured", (InferenceSetting(),))


@dataclass
class FinetuneConfig:
    """Supervised fine-tuning before a needle evaluation; of a copy, never of the run."""

    steps: int = key(0, "steps of fine-tuning on needles at the training length, loss on the answers alone; 0: none", ge=0)
    rows: int = key(16, "rows in a step", ge=1)
    lr: float = key(2e-4, "peak learning rate of AdamW: a third each of warm-up, constant and decay", gt=0)


@dataclass
class NeedleConfig(Schedule):
    length_factors: list[float] = key([], "lengths of the context, in training lengths, e.g. [1, 2, 4, 8, 16]; []: off", gt=0)
    depths: list[float] = key([0.0, 0.25, 0.5, 0.75, 1.0], "share of the text before the needle", ge=0, le=1)
    trials: int = key(100, "questions in each cell of lengths and depths, and in each control without a needle", ge=1)
    needles: int = key(1, "needles in a row, each asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not asked for", ge=0, le=32)
    heads_at: float | None = key(
        None, "length, in training lengths, at which every head's attention to the needle is measured; null: off", gt=0
    )
    finetune: FinetuneConfig = section(FinetuneConfig, "base models don't answer: fine-tune a copy first")
    settings: list[InferenceSetting] = sections(InferenceSetting, "how the model is used, each measured", (InferenceSetting(),))


@dataclass
class EvalConfig:
    every: int | None = key(None, "steps between validations; null: twenty a run", ge=1)
    rows: int = key(256, "validation rows of seq_len tokens, spread over the held-out text", ge=1)
    on_error: Literal["log", "stop"] = key("log", "when an evaluation fails during training: say so and train on, or stop")
    swap_lengths: list[float] = key([1.0, 2.0, 4.0], "training lengths at which a swap of the normalizer is measured; []: off", ge=1)
    long_context: LongContextConfig = section(LongContextConfig, "loss by position beyond the training length")
    recall: RecallConfig = section(RecallConfig, "answers of synthetic tasks, by length")
    needle: NeedleConfig = section(NeedleConfig, "needles in a haystack, by length and depth")
