"""Keys of the block `eval`: they switch evaluations on, and say when they run and on which sequences.

`EvalConfig` has a block for each kind of evaluation, such as `recall`. An inference setting is a scaling of RoPE, and
options of normalizers, that differ from training.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, Literal, get_args

from torch import Tensor

from lm.attention.options import Options
from lm.config.data_config import SOURCES, TASKS, DataConfig, Source, Task
from lm.config.model_config import ModelConfig, Position, divide_low_frequencies
from lm.config.normalizers import change_options
from lm.config.schema import key, section, variant
from lm.errors import Problem, yaml_scalar
from lm.plain import Plain, to_plain

SCALING_FACTOR_HELP = "scaling factor s; null: the sequence's length in training lengths"


@dataclass(frozen=True)
class RopeScaling:
    """Base class of scalings of RoPE for sequences s times as long as in training. The base class itself leaves RoPE as
    in training.
    """

    name: ClassVar[str] = "as_trained"

    def length_ratio(self, trained_length: int, length: int) -> float:
        """Return the scaling factor s: the option `factor` if it is set, else the ratio max(1, `length` /
        `trained_length`)."""
        return getattr(self, "factor", None) or max(1.0, length / trained_length)

    def scaled_theta(self, theta: float, head_size: int, s: float) -> float:
        """Return RoPE's base at the scaling factor `s`, from its base `theta` in training."""
        return theta

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        """Return the radians per token by which each pair of dimensions rotates at the scaling factor `s`: (pairs,).

        Args:
            frequencies: (pairs,), radians per token in training.
            periods: (pairs,), the number of each pair's periods within the training length.
        """
        return frequencies

    def score_factor(self, s: float) -> float:
        """Return the factor by which this scaling multiplies attention scores at the scaling factor `s`."""
        return 1.0


NO_SCALING = RopeScaling()


@dataclass(frozen=True)
class ThetaFactor(RopeScaling):
    """RoPE's base theta is multiplied by `factor`; the SSMax paper (arXiv 2501.19399) takes 50."""

    name: ClassVar[str] = "theta"
    factor: float = key(50.0, "multiplies theta", ge=1e-3, le=1e6)

    def scaled_theta(self, theta: float, head_size: int, s: float) -> float:
        return theta * s


@dataclass(frozen=True)
class Interpolation(RopeScaling):
    """Position interpolation (arXiv 2306.15595) divides all frequencies by s. s is `factor` or, if that is null, the
    sequence's length in training lengths, at least 1.
    """

    name: ClassVar[str] = "interpolation"
    factor: float | None = key(None, SCALING_FACTOR_HELP, ge=1, le=1e6)

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        return frequencies / s


@dataclass(frozen=True)
class NTK(RopeScaling):
    """NTK-aware scaling multiplies theta by s^(D / (D - 2)), where D is the head size. This divides the lowest
    frequency by s and keeps the highest.
    """

    name: ClassVar[str] = "ntk"
    factor: float | None = key(None, SCALING_FACTOR_HELP, ge=1, le=1e6)

    def scaled_theta(self, theta: float, head_size: int, s: float) -> float:
        return theta * s ** (head_size / max(1, head_size - 2))


# Pairs with at most so many periods in a training sequence are interpolated by s; those with at least so many stay.
SLOW_PERIODS, FAST_PERIODS = 1.0, 32.0


@dataclass(frozen=True)
class InferenceYarn(RopeScaling):
    """YaRN (arXiv 2309.00071) divides the frequencies of low-frequency pairs of dimensions by s. With `temperature` it
    also multiplies attention logits by a factor that grows with s.
    """

    name: ClassVar[str] = "yarn"
    factor: float | None = key(None, SCALING_FACTOR_HELP, ge=1, le=1e6)
    temperature: bool = key(True, "multiply logits by (0.1 ln s + 1)^2")

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        return divide_low_frequencies(frequencies, periods, SLOW_PERIODS, FAST_PERIODS, s)

    def score_factor(self, s: float) -> float:
        return (0.1 * math.log(s) + 1) ** 2 if self.temperature else 1.0


ROPE_SCALINGS = {v.name: v for v in (RopeScaling, ThetaFactor, Interpolation, NTK, InferenceYarn)}


@dataclass(frozen=True)
class InferenceSetting:
    """An inference setting is a RoPE scaling, and options of normalizers, with which a trained model is evaluated. The
    model's weights stay unchanged (`lm.model.swapped.with_inference_setting`).
    """

    rope: RopeScaling = variant(ROPE_SCALINGS, "as_trained", "scaling of RoPE's frequencies")
    normalizer: dict[str, bool | int | float | str] = key(
        {}, "options that differ from training, e.g. {clip: true}; normalizers without such an option ignore it"
    )

    @property
    def label(self) -> str:
        """Return a short description of the setting, e.g. `theta x 50` or `as trained, clip=true`. Different settings
        have different labels.
        """
        rope = self.rope
        words = {"as_trained": "as trained", "theta": "theta x"}.get(rope.name, rope.name)
        if getattr(rope, "factor", None):
            words += f" {_number_text(rope.factor)}"
        options = [
            f"{spec.name} {_number_text(getattr(rope, spec.name))}"
            for spec in fields(rope)
            if spec.name != "factor" and getattr(rope, spec.name) != spec.default
        ]
        return ", ".join(
            [words, *options, *(f"{name}={yaml_scalar(value)}" for name, value in self.normalizer.items())]
        )

    def changed_normalizers(self, trained_normalizers: list[Options], path: str) -> tuple[list[Options], list[Problem]]:
        """Return the model's normalizer options with this setting's changes, and the problems of these changes.

        YaRN's temperature multiplies queries, so it is a problem for a normalizer whose scores are not proportional to
        the queries.

        path: the setting's path within the evaluation's block, such as `inference[0]`, for the problems.
        """
        problems: list[Problem] = []
        key_path = f"{path}.normalizer"
        normalizers = [change_options(options, self.normalizer, key_path, problems) for options in trained_normalizers]
        for name in self.missing_options(trained_normalizers):
            reason = "no normalizer of this model has this option"
            problems.append(Problem(f"{key_path}.{name}", self.normalizer[name], reason, "drop it"))
        layers = [layer for options in trained_normalizers for layer in options.layer_options()]
        unscaled_names = [layer.name for layer in layers if not layer.scales_with_q]
        if unscaled_names and getattr(self.rope, "temperature", False):
            reason = f"is a factor on queries, and none on the scores of {unscaled_names[0]}"
            problems.append(Problem(f"{path}.rope.temperature", True, reason, "set it to false"))
        return normalizers, list({problem.key_path: problem for problem in problems}.values())

    def missing_options(self, normalizers: list[Options]) -> list[str]:
        """Return the names of options in this setting that none of `normalizers` has."""
        names = {spec.name for options in normalizers for layer in options.layer_options() for spec in fields(layer)}
        return [name for name in self.normalizer if name not in names]


def _number_text(value: float) -> str:
    """Return a number as text: six significant digits if they represent `value` exactly, else all digits."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def inference_problems(settings: list[InferenceSetting], position: Position) -> Iterator[Problem]:
    """Yield the problems of an evaluation's inference settings: equal settings, or a scaling for a model without RoPE.
    The problems' paths are relative to the evaluation's block.
    """
    if not settings or any(setting in settings[:index] for index, setting in enumerate(settings)):
        labels = [setting.label for setting in settings]
        yield Problem("inference", labels, "must be a list of different inference settings", "set it to [{}]")
    for index, setting in enumerate(settings):
        if setting.rope.name != "as_trained" and not position.rotates:
            reason = f"model.position = {position.name} has no RoPE to scale"
            yield Problem(f"inference[{index}].rope", setting.rope.name, reason, "set it to as_trained")


# ---------------------------------------------------------------- evaluations


DIAGNOSTICS_COMMANDS = ("train", "eval", "diagnose")  # commands that use the keys of `eval.diagnostics`
AUTO_LENGTH_FACTOR = 8.0  # the longest sequences of `length_factor: auto`, in training lengths
MAX_LENGTH_FACTOR = 65536  # largest length of a sequence, in training lengths
# most tokens read after the end of a needle's sequence: its answer has at least 1 token, a generated number up to 8
MAX_TOKENS_AFTER_SEQUENCE = 7
MAX_SEQUENCES = 10**6


@dataclass
class EvaluationTiming:
    """Says when an evaluation is measured during training: at fractions of the run's steps."""

    at: list[float] = key([1.0], "fractions of the run at which it is measured", gt=0, le=1)

    def is_due(self, step: int, max_steps: int) -> bool:
        """Return whether the evaluation runs after optimizer step `step`, 1-based. The evaluation runs when the
        fraction of steps that are done reaches a number in `at`.
        """
        return step in {max(1, round(fraction * max_steps)) for fraction in self.at}


@dataclass
class ValidationTiming(EvaluationTiming):
    """The validation runs after each `every` steps, and at the end."""

    every: int = 1

    def is_due(self, step: int, max_steps: int) -> bool:
        """Return whether the validation runs after optimizer step `step`, 1-based."""
        return step % self.every == 0 or super().is_due(step, max_steps)


TIMING_KEYS = tuple(spec.name for spec in fields(EvaluationTiming))


@dataclass
class EvaluationKindConfig(EvaluationTiming):
    """Base class of the options of one kind of evaluation, such as recall: when it is measured, and on which
    sequences.
    """

    # the key that is empty or 0 while the evaluation is off, unless a class overrides `is_wanted`; errors name it
    switch_key: ClassVar[str] = ""
    needs_text_model: ClassVar[bool] = True  # true if a model that was trained on symbols alone can't be measured

    def is_wanted(self, data: DataConfig) -> bool:
        """Return whether these options switch the evaluation on for a model that is trained on `data`."""
        return bool(getattr(self, self.switch_key))

    def required_positions(self, data: DataConfig) -> int:
        """Return the number of positions that the evaluation needs a model to have: the tokens of its longest sequence,
        answers that are generated after it included. `length_factor: auto` shortens sequences to the learned positions,
        so it needs no more than the training length.
        """
        return data.seq_len

    def conflicts(self, data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
        """Yield a problem for each contradiction between this block and other keys, such as sequences that exceed
        learned positions. Paths are relative to this block.

        This method is called only if the evaluation is on. `length_factor: auto` never contradicts learned positions,
        as with them it takes at most the training length.
        """
        if data.symbolic and self.needs_text_model:
            yield Problem(self.switch_key, getattr(self, self.switch_key), "needs a model of text", "switch it off")
        yield from inference_problems(getattr(self, "inference", [InferenceSetting()]), model.position)
        if model.position.has_length_limit and (required := self.required_positions(data)) > data.seq_len:
            reason = f"makes {required:,} tokens be read, and learned positions end at {data.seq_len:,}"
            remedy = "leave longer sequences out, or train with model.position=rope"
            yield Problem(self.switch_key, getattr(self, self.switch_key), reason, remedy)


@dataclass
class InferenceEvaluationConfig(EvaluationKindConfig):
    """Base class of the options of an evaluation that is measured under one or several inference settings."""

    inference: list[InferenceSetting] = section(
        InferenceSetting, "inference settings under which it is measured", default=[InferenceSetting()]
    )


def lengths_from_factors(factors: list[float], data: DataConfig) -> list[int]:
    """Return sequence lengths in predicted tokens: the training length times each of `factors`, rounded, but at least 1
    token. The lengths ascend, without duplicates.
    """
    return sorted({max(1, round(factor * data.seq_len)) for factor in factors})


@dataclass
class LongContextConfig(InferenceEvaluationConfig):
    """Options of the evaluation `long_context`: the loss by position in long sequences."""

    switch_key: ClassVar[str] = "length_factor"
    length_factor: float | Literal["auto"] = key(
        8.0,
        "sequence length, in training lengths; 0: off; auto: the first of 8, 4, 2 ... that two held-out documents are "
        "long enough for",
        ge=0,
        le=MAX_LENGTH_FACTOR,
    )
    sequences: int = key(
        32, "sequences, spread over the held-out documents that are long enough", ge=1, le=MAX_SEQUENCES
    )
    inference: list[InferenceSetting] = section(
        InferenceSetting,
        "inference settings under which it is measured",
        default=[InferenceSetting(), InferenceSetting(ThetaFactor())],
    )

    @property
    def max_length_factor(self) -> float:
        """Return the length of the longest sequences that this evaluation may measure, in training lengths."""
        return AUTO_LENGTH_FACTOR if self.length_factor == "auto" else self.length_factor

    def required_positions(self, data: DataConfig) -> int:
        return data.seq_len if self.length_factor == "auto" else round(self.length_factor * data.seq_len)


@dataclass
class ByLengthConfig(InferenceEvaluationConfig):
    """Options of the evaluation `by_length`: the loss on the same tokens, cut into sequences of several lengths."""

    switch_key: ClassVar[str] = "lengths"
    lengths: list[int] = key(
        [], "tokens in a sequence, each a divisor of the longest, e.g. [32, 64, 128]; []: off", ge=2
    )
    sequences: int = key(128, "sequences of the longest length, spread over the held-out text", ge=1, le=MAX_SEQUENCES)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each length that occurs twice or does not divide the longest length."""
        if len(set(self.lengths)) < len(self.lengths):
            yield Problem("lengths", self.lengths, "must be different lengths")
        if non_divisors := [length for length in self.lengths if max(self.lengths) % length]:
            reason = (
                f"does not divide the longest, {max(self.lengths)}: the same tokens are cut into sequences of "
                "each length"
            )
            yield Problem("lengths", non_divisors[0], reason, "give divisors of the longest")

    def required_positions(self, data: DataConfig) -> int:
        return max(self.lengths)


@dataclass
class TextsConfig(EvaluationKindConfig):
    """Options of the evaluation `texts`: the loss on texts other than the held-out text."""

    switch_key: ClassVar[str] = "of"
    of: dict[str, Source] = variant(
        SOURCES, {}, "texts beside the held-out one, e.g. {code: {name: files, paths: [code]}}"
    )
    sequences: int = key(256, "sequences of seq_len tokens from each text, spread over it", ge=1, le=MAX_SEQUENCES)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each name of a text that can't be part of a metric's name."""
        for name in self.of:
            if name == "name" or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                yield Problem(f"of.{name}", name, "can't be the name of a text", "use letters, digits, - _ and .")


@dataclass
class RecallConfig(InferenceEvaluationConfig):
    """Options of the evaluation `recall`: accuracy on synthetic tasks, by sequence length."""

    switch_key: ClassVar[str] = "length_factors"
    needs_text_model: ClassVar[bool] = False
    tasks: list[Task] = variant(
        TASKS, [], "tasks to measure, e.g. [needle, {name: needle, needles: 3}]; empty: those of data.tasks"
    )
    length_factors: list[float] = key(
        [1.0, 2.0, 4.0, 8.0, 16.0], "sequence lengths, in training lengths; []: off", gt=0, le=MAX_LENGTH_FACTOR
    )
    sequences: int = key(128, "sequences of each task and length", ge=1, le=MAX_SEQUENCES)

    def is_wanted(self, data: DataConfig) -> bool:
        return bool(self.length_factors and (data.tasks or self.tasks))

    def measured_tasks(self, data: DataConfig) -> list[Task]:
        """Return the tasks that the evaluation measures: the tasks in its options, or else the tasks that the model is
        trained on.
        """
        return self.tasks or [weighted.task for weighted in data.tasks]

    def required_positions(self, data: DataConfig) -> int:
        return round(max(self.length_factors) * data.seq_len)

    def conflicts(self, data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
        yield from super().conflicts(data, model)
        n_symbols = max((weighted.task.vocab_size for weighted in data.tasks), default=0) if data.symbolic else 0
        for index, task in enumerate(self.tasks):
            path = f"tasks[{index}]"
            if bool(task.vocab_size) != data.symbolic:
                kinds = ("is in text, and this model knows symbols alone", "is over symbols, and this model knows none")
                yield Problem(path, task.name, kinds[bool(task.vocab_size)], "name another task")
            elif task.vocab_size and task.vocab_size > n_symbols:
                reason = f"has {task.vocab_size} symbols, the model {n_symbols}"
                yield Problem(path, task.name, reason, "set its options as in data.tasks")


@dataclass
class NeedleConfig(InferenceEvaluationConfig):
    """Options of the evaluation `needle`: needles in a haystack, by context length and depth."""

    switch_key: ClassVar[str] = "length_factors"
    length_factors: list[float] = key(
        [], "context lengths, in training lengths, e.g. [1, 2, 4, 8, 16]; []: off", gt=0, le=MAX_LENGTH_FACTOR
    )
    depths: list[float] = key([0.0, 0.25, 0.5, 0.75, 1.0], "fractions of the text before the needle", ge=0, le=1)
    trials: int = key(
        100,
        "questions for each length and depth, and for each length in a control without a needle",
        ge=1,
        le=MAX_SEQUENCES,
    )
    needles: int = key(1, "needles in a sequence, each asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not asked for", ge=0, le=32)
    heads_at: float | None = key(
        None,
        "length, in training lengths, at which every head's attention to the needle is measured; null: off",
        gt=0,
        le=MAX_LENGTH_FACTOR,
    )

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if `heads_at` is set while the evaluation is off."""
        if self.heads_at and not self.length_factors:
            yield Problem(
                "heads_at", self.heads_at, "eval.needle.length_factors is []", "set eval.needle.length_factors"
            )

    def required_positions(self, data: DataConfig) -> int:
        return round(max(*self.length_factors, self.heads_at or 0) * data.seq_len) + MAX_TOKENS_AFTER_SEQUENCE


@dataclass
class DownstreamTasksConfig(EvaluationKindConfig):
    """Options of the evaluation `tasks`, downstream tasks of lm-eval. Users set them by `eval.tasks` and
    `eval.tasks_limit`, not in a nested block.
    """

    switch_key: ClassVar[str] = "tasks"
    tasks: list[str] = key([], "`eval.tasks`")
    limit: int | None = key(None, "`eval.tasks_limit`")


StatisticFamily = Literal["concentration", "sparsity", "limits"]


@dataclass
class DiagnosticsConfig(InferenceEvaluationConfig):
    """Options of the evaluation `diagnostics`: statistics of attention weights."""

    switch_key: ClassVar[str] = "length_factor"
    required_keys: ClassVar[Sequence[str]] = ("statistics",)
    needs_text_model: ClassVar[bool] = False
    statistics: list[StatisticFamily] = key(
        ["concentration", "sparsity"], f"families of statistics: {', '.join(get_args(StatisticFamily))}"
    )
    length_factor: float = key(
        1.0,
        "sequence length, in training lengths; unless it is 1, a sequence lies in one held-out document",
        gt=0,
        le=MAX_LENGTH_FACTOR,
    )
    sequences: int = key(16, "held-out sequences, spread over the held-out text", ge=1, le=MAX_SEQUENCES)
    queries: int = key(
        64, "queries of each sequence, spread evenly over the logarithm of the number of keys", ge=1, le=MAX_SEQUENCES
    )

    def is_wanted(self, data: DataConfig) -> bool:
        return True

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if a family of statistics is named twice."""
        if len(set(self.statistics)) < len(self.statistics):
            yield Problem("statistics", self.statistics, "names something twice")

    def required_positions(self, data: DataConfig) -> int:
        return round(self.length_factor * data.seq_len)

    def conflicts(self, data: DataConfig, model: ModelConfig) -> Iterator[Problem]:
        yield from super().conflicts(data, model)
        if data.symbolic and self.length_factor != 1:
            yield Problem("length_factor", self.length_factor, "needs a model of text", "leave it out")


@dataclass
class EvalConfig:
    """The options of all evaluations: keys for the validation, and a nested block for each other kind, such as `recall`
    or `needle`.
    """

    every: int | None = key(None, "steps between validations; null: twenty a run", ge=1)
    sequences: int = key(
        256, "validation sequences of seq_len tokens, spread over the held-out text", ge=1, le=MAX_SEQUENCES
    )
    on_error: Literal["log", "stop"] = key(
        "log", "if an evaluation fails during training: report it and train on, or stop"
    )
    swap_lengths: list[float] = key(
        [1.0, 2.0, 4.0], "lengths, in training lengths, to measure a swap at; []: off", gt=0, le=MAX_LENGTH_FACTOR
    )
    tasks: list[str] = key(
        [],
        "tasks of the lm-evaluation-harness (the package lm-eval), by name or YAML file, at the last step: "
        "tasks/TASK/METRIC; []: off",
        omit_default=True,
    )
    tasks_limit: int | None = key(None, "largest number of documents of each task; null: all", ge=1, omit_default=True)
    long_context: LongContextConfig = section(
        LongContextConfig, "loss by position, beyond the training length or within it"
    )
    by_length: ByLengthConfig | None = section(
        ByLengthConfig, "loss on the same held-out tokens, cut into sequences of several lengths", default=None
    )
    texts: TextsConfig | None = section(
        TextsConfig, "loss on texts beside the held-out one, each by its name: text/NAME/loss", default=None
    )
    recall: RecallConfig = section(RecallConfig, "accuracy on synthetic tasks, by length")
    needle: NeedleConfig = section(NeedleConfig, "needles in a haystack, by length and depth")
    diagnostics: DiagnosticsConfig | None = section(
        DiagnosticsConfig,
        "statistics of attention weights, also of the untrained model",
        {"commands": DIAGNOSTICS_COMMANDS},
        default=None,
    )

    @classmethod
    @cache
    def kind_names(cls) -> list[str]:
        """Return the names of the kinds of evaluation, such as `recall`; the validation is first."""
        return ["validation", *(spec.name for spec in fields(cls) if "blocks" in spec.metadata), "tasks"]

    @property
    def non_null_kind_options(self) -> dict[str, EvaluationKindConfig]:
        """Map the name of each kind of evaluation except the validation to its options. Kinds whose block is null are
        left out.
        """
        blocks = {name: getattr(self, name) for name in self.kind_names()[1:-1]}
        blocks["tasks"] = DownstreamTasksConfig(tasks=self.tasks, limit=self.tasks_limit)
        return {kind: options for kind, options in blocks.items() if options is not None}

    def wanted_kinds(self, data: DataConfig) -> list[str]:
        """Return the names of the kinds of evaluation that are on for a model that is trained on `data`; the validation
        is first.
        """
        return ["validation", *(kind for kind, block in self.non_null_kind_options.items() if block.is_wanted(data))]

    def measurement_options(self, kind: str) -> dict[str, Plain]:
        """Return {key: value} of the options that determine the numbers that `kind` measures. Null options and the keys
        of `EvaluationTiming` are left out.
        """
        if kind == "validation":
            return {"sequences": self.sequences}
        plain = to_plain(self.non_null_kind_options[kind]) if kind in self.non_null_kind_options else {}
        return {name: value for name, value in plain.items() if value is not None and name not in TIMING_KEYS}
