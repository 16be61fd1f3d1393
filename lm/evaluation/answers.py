"""Evaluate a model's answers to questions in long sequences, in fp32.

`Recall` asks questions of synthetic tasks. `NeedleMeasurement` hides numbers in text (needle in a haystack), and also
measures each head's attention to them.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.config.data_config import Needle, Task
from lm.config.eval_config import lengths_from_factors
from lm.config.tree import Config
from lm.data.batches import NO_TARGET, Batch
from lm.data.store import Store
from lm.data.tasks import FillerText, TaskError, check_task, make_example
from lm.diagnostics.attention_rows import HEAD_AXIS
from lm.errors import ConfigError, Problem
from lm.evaluation.held_out import LENGTH_AXIS, drop_single_setting, inference_setting_labels, measure_sequences
from lm.evaluation.measurement import HeldOutSequences, Measurement, metric_rows, sampling_unit_frame, tokens_sha256
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.plain import Plain, distinct_names, to_plain
from lm.runs.evaluations import NATS, Metric

ValuesAndUnits = tuple[
    np.ndarray, pd.DataFrame
]  # (units, 1) values of sequences, and the sequences as `sampling_unit_frame`
QUESTION_SEED = 0  # seed of the sequences with questions, the same for every model
ATTENTION_NEEDLE_DEPTH = 0.5  # depth of the needles that heads' attention is measured on


def answer_token_losses_and_hits(decoder: Decoder, held_out: HeldOutSequences, device: Device) -> np.ndarray:
    """Return for each answer token its loss -log p (nats), and 1 if it is the model's most probable token, else 0.

    The result is (2, N, length) fp32, and 0 where no answer is predicted. Sequences hold the correct answers to earlier
    questions (teacher forcing). All ranks call this function.

    Memory holds logits of answer tokens only, and no T x T attention weights of T tokens, unless the normalizer needs
    them.
    """

    def measure(indices: list[int]) -> Tensor:
        batch = held_out.batch(indices).to(device.device)
        sequence, position = (batch.targets != NO_TARGET).nonzero(as_tuple=True)
        targets, start = batch.targets[sequence, position], int(position.min())
        hidden = decoder.hidden_states(batch, start)[sequence, position - start]
        hits = argmax_tokens(hidden, decoder.head) == targets
        values = torch.zeros(*batch.targets.shape, 2, device=device.device)
        values[sequence, position] = torch.stack((token_nll(hidden, decoder.head, targets), hits.float()), 1)
        return values

    values = measure_sequences([decoder], held_out.lengths, (held_out.length, 2), device, measure)
    return np.moveaxis(values, -1, 0)


class AnswerMeasurement(Measurement):
    """This base class evaluates answers to questions, in fp32, under each inference setting and at several sequence
    lengths.

    An inference setting changes the trained model, as `theta x 50` multiplies RoPE's base. The option `length_factors`
    gives the lengths, as multiples of the training length.
    """

    measures_in_fp32, ignores_train_length = True, True
    tasks: dict[str, Task]  # by name
    haystack: FillerText | None  # the corpus that fills sequences of its tasks; None: all tasks are over symbols

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        options = cls.options_of(config)
        lengths = lengths_from_factors(options.length_factors, config.data)
        return {"SETTING": [setting.label for setting in options.inference], "LENGTH": lengths}

    def check_fits(self, task: Task, length: int, key: str, count: int = 1) -> None:
        """Raise ConfigError unless `task` can make `count` different sequences of `length` tokens.

        key: the option of the evaluation that the error names.
        """
        try:
            check_task(task, QUESTION_SEED, length, "test", count, self.haystack)
        except TaskError as error:
            reason, value = f"{task.name} in sequences of {length:,}: {error}", getattr(self.eval_config, key)
            remedy = "leave that length out, or ask for fewer"
            raise ConfigError([Problem(f"eval.{self.kind}.{key}", value, reason, remedy)]) from error

    @cached_property
    def lengths(self) -> list[int]:
        """Return the sequence lengths that are measured, in predicted tokens, in ascending order."""
        return lengths_from_factors(self.eval_config.length_factors, self.config.data)


ACCURACY = Metric(
    unit="fraction", better="higher", quantity="accuracy", units="questions", interval=True, axis=LENGTH_AXIS,
    title="Accuracy by sequence length", measured_on="sequences with questions",
    caption="accuracy by sequence length, given the correct answers to earlier questions",
    levels="chance, picking among the answers shown and not yet given",
)  # fmt: skip
ANSWER_LOSS = Metric(unit=NATS, better="lower", quantity="loss of answers", units="questions", axis=LENGTH_AXIS)


def accuracy_metric(metric: Metric, questions: int, chance: float | None, task_options: str) -> Metric:
    """Return an accuracy metric with the details of one task.

    Args:
        metric: the metric without these details.
        questions: number of questions at each length.
        chance: mean accuracy of guessing; None: unknown.
        task_options: the task's options as JSON.
    """
    references = () if chance is None else (("chance", chance),)
    return replace(metric, amount=f"{questions:,} different ones a length", references=references, options=task_options)


def rows_by_length(
    metric: Metric, lengths: list[int], values_by_length: Sequence[ValuesAndUnits], **fields: str
) -> pd.DataFrame:
    """Return the table rows of a metric that was measured at several sequence lengths. `values_by_length` has the
    values of each length and the units (questions or sequences) that they belong to. fields: `task` and
    `inference_setting` of `metric_rows`."""
    points = zip(values_by_length, lengths, strict=True)
    return pd.concat(metric_rows(metric, *values_and_units, [length], **fields) for values_and_units, length in points)


class Recall(AnswerMeasurement):
    """Recall measures the accuracy of whole answers and of answer tokens, and the loss of answers, by sequence length.

    Sequences hold the correct answers to earlier questions (teacher forcing).
    """

    kind = "recall"
    logged_metrics = (
        replace(ACCURACY, name="recall/{TASK} {LENGTH} {SETTING}", meaning="whole answers that are correct"),
    )

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        settings = inference_setting_labels(cls.options_of(config).inference)
        return super().placeholder_values(config) | {"SETTING": settings, "TASK": [*cls.tasks_of(config)]}

    @classmethod
    def tasks_of(cls, config: Config) -> dict[str, Task]:
        """Return the tasks that a configuration asks for, by names that tell them apart."""
        tasks = cls.options_of(config).measured_tasks(config.data)
        return dict(zip(distinct_names([to_plain(task) for task in tasks]), tasks, strict=True))

    @classmethod
    def sequence_options(cls, config: Config, metric: str) -> dict[str, Plain]:
        tasks = {
            name: to_plain(task) for name, task in cls.tasks_of(config).items() if metric.startswith(f"recall/{name} ")
        }
        return super().sequence_options(config, metric) | {"tasks": tasks}

    def __init__(self, config: Config, store: Store):
        """Check the tasks. Raises ConfigError: a task does not fit into a length, or the held-out text is too short for
        it.
        """
        super().__init__(config, store)
        self.tasks = self.tasks_of(config)
        self.haystack = FillerText(store) if any(task.vocab_size is None for task in self.tasks.values()) else None
        for task, length in product(self.tasks.values(), self.lengths):
            self.check_fits(task, length, "length_factors", self.eval_config.sequences)

    @property
    def further_inputs(self) -> dict[str, Plain]:
        return super().further_inputs | {"tasks": [to_plain(task) for task in self.tasks.values()]}

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        blocks, setting_metric = [], drop_single_setting(self.logged_metrics[0], self.eval_config.inference)
        for (setting, model), (name, task) in product(self.decoders_by_setting(decoder), self.tasks.items()):
            options = to_plain(task)
            fields, options = {"task": options.pop("name"), "inference_setting": setting}, json.dumps(options)
            samples = [self._recall_values(model, task, length, device) for length in self.lengths]
            questions = int(samples[0][0][1]["weight"].sum())
            whole = accuracy_metric(setting_metric.fill_placeholders(TASK=name), questions, task.chance, options)
            token = replace(ANSWER_LOSS, unit="fraction", better="higher", quantity="token accuracy", options=options)
            metrics = whole, token, replace(ANSWER_LOSS, options=options)
            for metric, by_metric in zip(metrics, zip(*samples, strict=True), strict=True):
                blocks.append(rows_by_length(metric, self.lengths, by_metric, **fields))
        return blocks

    def _recall_values(self, decoder: Decoder, task: Task, length: int, device: Device) -> list[ValuesAndUnits]:
        """Return three measurements of each sequence: accuracy of whole answers, accuracy of answer tokens, and loss of
        answers.
        """
        count = self.eval_config.sequences
        examples = [make_example(task, QUESTION_SEED, index, length, "test", self.haystack) for index in range(count)]
        held_out = HeldOutSequences.from_examples(examples, self.store.bytes_per_token)
        losses, hits = answer_token_losses_and_hits(decoder, held_out, device)
        whole = [
            [right[start - 1 : stop - 1].all() for start, stop in item.answer_spans]
            for right, item in zip(hits, examples, strict=True)
        ]
        units = held_out.sampling_units("", weigh_by_targets=True)
        questions = units.assign(weight=len(whole[0]))
        samples = [(held_out.sequence_means(values), units) for values in (hits, losses)]
        return [(np.mean(whole, axis=1)[:, None], questions), *samples]


# ---------------------------------------------------------------- needles


@dataclass(frozen=True)
class NeedleTrial:
    """A trial is a question about a number in a text: the prompt and the correct answer."""

    prompt: np.ndarray  # (T,) int64
    answer: np.ndarray  # (A,) int64
    correct_number: str  # the correct number, in digits
    number_span: tuple[int, int]  # [start, stop) in the prompt, of the number in its needle
    sequence_index: int  # index of its sequence, which other trials may share


# The metrics of `trial_scores`. `exact` is 1 if the greedily decoded text begins with the whole number. More digits may
# follow, as the loss on answers teaches no model to stop.
TRIAL_METRICS = (replace(ANSWER_LOSS, unit="fraction", better="higher", quantity="exact", interval=True), ANSWER_LOSS)


def trial_scores(decoder: Decoder, trials: list[NeedleTrial], sequence_length: int, task_text: FillerText) -> Tensor:
    """Return scores (questions, metrics) fp32 of questions with equally long prompts, one column for each metric in
    `TRIAL_METRICS`.

    Each prompt is the beginning of a sequence of `sequence_length` tokens. Normalizers with the option `n: sample` take
    this length as n.
    """
    prompts = torch.from_numpy(np.stack([trial.prompt for trial in trials])).to(next(decoder.parameters()).device)
    cache = DecodingCache(sequence_length)
    first_logits = decoder.head(decoder(prompts, cache=cache, output_start=prompts.size(1) - 1)).float()  # (B, 1, V)
    outputs = _greedy_tokens(decoder, first_logits, cache.fork(), max(len(trial.answer) for trial in trials) + 2)
    answers = pad_sequence([torch.from_numpy(trial.answer) for trial in trials], True).to(prompts.device)  # (B, A)
    logits = first_logits
    if answers.size(1) > 1:
        logits = torch.cat((logits, decoder.head(decoder(answers[:, :-1], cache=cache)).float()), 1)  # (B, A, V)
    nll = F.cross_entropy(logits.mT, answers, reduction="none")  # (B, A)
    score_rows = []
    for trial, losses, tokens in zip(trials, nll, outputs.cpu().numpy(), strict=True):
        exact = task_text.decode_until_special_token(tokens).strip().startswith(trial.correct_number)
        score_rows.append([float(exact), float(losses[: len(trial.answer)].mean())])
    return torch.tensor(score_rows)


def _greedy_tokens(decoder: Decoder, first_logits: Tensor, cache: DecodingCache, count: int) -> Tensor:
    """Return the next `count` tokens by greedy decoding, (B, count).

    first_logits: logits (B, 1, V) of the first of these tokens.
    """
    tokens = [first_logits.argmax(-1)]
    for _ in range(count - 1):
        tokens.append(decoder.head(decoder(tokens[-1], cache=cache)).argmax(-1))
    return torch.cat(tokens, 1)


def needle_trials(task: Needle, length: int, n_trials: int, text: FillerText) -> list[NeedleTrial]:
    """Return `n_trials` questions about needles in test sequences of `length` tokens. They are the same for
    every model.
    """
    trials: list[NeedleTrial] = []
    for index in range(-(-n_trials // task.needles)):
        sequence = make_example(task, QUESTION_SEED, index, length, "test", text)
        for (start, stop), span in zip(sequence.answer_spans, sequence.evidence_spans, strict=True):
            answer = sequence.tokens[start:stop]
            trials.append(NeedleTrial(sequence.tokens[:start], answer, text.decode(answer).strip(), tuple(span), index))
    return trials[:n_trials]


def attention_to_needle(decoder: Decoder, trial: NeedleTrial, length: int) -> Tensor:
    """Return each head's attention from the prompt's last token to the needle's number, (layers, H) fp32.

    The whole sequence has `length` tokens. The attention is the sum of weights on the number's tokens. arXiv 2501.19399
    (Figs. 7 and 8) does not define it, so this definition is ours. Memory holds the weights of one query only.
    """
    tokens = torch.from_numpy(trial.prompt[None]).to(decoder.head.weight.device)
    blocks = attention_blocks(decoder, Batch(tokens, tokens, None), [-1], length)
    return torch.stack([block.weights[0, :, 0, slice(*trial.number_span)].sum(-1) for block in blocks]).cpu()


class NeedleMeasurement(AnswerMeasurement):
    """This evaluation asks for numbers (needles) hidden in text, by sequence length and depth in the text.

    It also measures a control without the needle and, with the option `heads_at`, each head's attention to the needle.
    """

    kind = "needle"
    logged_metrics = (
        replace(ACCURACY, name="needle/exact {LENGTH} {SETTING}", meaning="needles whose number is written"),
        replace(
            ACCURACY,
            name="needle/control {LENGTH} {SETTING}",
            meaning="the same without the needle in the text",
            control=True,
        ),
    )

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        # without depths there is the control alone
        return [metric for metric in super().metrics(config) if metric.control or cls.options_of(config).depths]

    def __init__(self, config: Config, store: Store):
        """Check the needles. Raises ConfigError: they don't fit into one of the lengths, or into the length
        `heads_at`.
        """
        super().__init__(config, store)
        options, self.haystack = self.eval_config, FillerText(store)
        task = Needle(needles=options.needles, distractors=options.distractors)
        self.tasks = {f"depth {100 * depth:g}%": replace(task, depth=depth) for depth in options.depths}
        self.tasks["no needle"] = replace(task, absent=True)
        for length in self.lengths:
            self.check_fits(task, length, "length_factors", options.trials)
        self.attention_length = round((options.heads_at or 0) * config.data.seq_len)
        if options.heads_at:
            self.check_fits(task, self.attention_length, "heads_at")

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        blocks, head_blocks = [], []
        for setting, model in self.decoders_by_setting(decoder):
            blocks += self._accuracy_rows(model, setting, device)
            head_blocks += self._attention_rows(model, setting, device) if self.eval_config.heads_at else []
        return blocks + head_blocks

    def _chance_level(self, task: Needle) -> float | None:
        """Return the mean accuracy, over trials, of guessing among the numbers that earlier questions have not asked
        for.

        Returns None if the needle is absent or is the only number.
        """
        # earlier questions of a sequence stand in the prompt with their answers
        candidates = task.needles + task.distractors
        return task.chance and float(
            np.mean([1 / (candidates - index % task.needles) for index in range(self.eval_config.trials)])
        )

    def _accuracy_rows(self, decoder: Decoder, setting: str, device: Device) -> Iterator[pd.DataFrame]:
        """Yield rows of accuracy over all depths and for the control; then each metric of `TRIAL_METRICS` by depth and
        for the control.
        """
        samples = {
            name: [self._scored_trials(task, decoder, length, device) for length in self.lengths]
            for name, task in self.tasks.items()
        }
        options = json.dumps({"needles": self.eval_config.needles, "distractors": self.eval_config.distractors})
        *depths, control = self.tasks
        for metric, names in zip(self.logged_metrics, (depths, [control]), strict=True):
            if names:
                pooled = [_mean_over_depths(by_depth) for by_depth in zip(*map(samples.get, names), strict=True)]
                task_metric = accuracy_metric(
                    metric, self.eval_config.trials, self._chance_level(self.tasks[names[0]]), options
                )
                fields = {"task": f"needle{', control without it' * metric.control}", "inference_setting": setting}
                yield rows_by_length(task_metric, self.lengths, pooled, **fields)
        for (name, task), (column, metric) in product(self.tasks.items(), enumerate(TRIAL_METRICS)):
            chance = self._chance_level(task) if metric.interval else None
            task_metric = replace(metric, references=() if chance is None else (("chance", chance),), options=options)
            points = [(scores[:, [column]], units) for scores, units in samples[name]]
            yield rows_by_length(task_metric, self.lengths, points, task=name, inference_setting=setting)

    def _scored_trials(self, task: Needle, decoder: Decoder, length: int, device: Device) -> ValuesAndUnits:
        """Return the scores (questions, metrics) of a task's questions in sequences of `length` tokens, and a frame
        with one row for each question (`_trial_units`)."""
        trials = needle_trials(task, length, self.eval_config.trials, self.haystack)

        def measure(indices: list[int]) -> Tensor:
            return trial_scores(decoder, [trials[index] for index in indices], length, self.haystack)

        lengths = [len(trial.prompt) for trial in trials]
        return measure_sequences([decoder], lengths, (len(TRIAL_METRICS),), device, measure), _trial_units(trials)

    def _attention_rows(self, decoder: Decoder, setting: str, device: Device) -> Iterator[pd.DataFrame]:
        """Yield rows of each head's attention to the number, by trial, for needles at the depth
        `ATTENTION_NEEDLE_DEPTH`.
        """
        normalizers, length = decoder.normalizers(), self.attention_length
        shape = len(normalizers), normalizers[0].layer.n_head
        task = Needle(needles=1, distractors=self.eval_config.distractors, depth=ATTENTION_NEEDLE_DEPTH)
        trials = needle_trials(task, length, self.eval_config.trials, self.haystack)

        def measure(indices: list[int]) -> Tensor:
            return torch.stack([attention_to_needle(decoder, trials[index], length) for index in indices])

        weights = measure_sequences([decoder], [len(trial.prompt) for trial in trials], shape, device, measure)
        uniform = np.mean([(trial.number_span[1] - trial.number_span[0]) / len(trial.prompt) for trial in trials])
        metric = Metric(
            "", "fraction", "higher", quantity="attention to the number", units="questions", axis=HEAD_AXIS,
            references=(("uniform attention", float(uniform)),),
            options=json.dumps({"length": length, "depth": ATTENTION_NEEDLE_DEPTH}),
        )  # fmt: skip
        for layer, values in enumerate(weights.swapaxes(0, 1).astype(float)):
            yield metric_rows(
                metric,
                values,
                _trial_units(trials),
                [*range(shape[1])],
                task=f"layer {layer}",
                inference_setting=setting,
            )


def _trial_units(trials: list[NeedleTrial]) -> pd.DataFrame:
    """Return a row for each question, as `sampling_unit_frame` makes them. Questions of one sequence are in one group,
    as they are not independent.
    """
    sha256 = tokens_sha256(part for trial in trials for part in (trial.prompt, trial.answer))
    return sampling_unit_frame(sha256, np.array([trial.sequence_index for trial in trials]))


def _mean_over_depths(scores_by_depth: Sequence[ValuesAndUnits]) -> ValuesAndUnits:
    """Return each trial's fraction of exact answers over all depths. Every depth asks the same questions."""
    fractions = np.mean([scores[:, :1] for scores, _ in scores_by_depth], axis=0)
    hashes = "".join(units["sequences"].iloc[0] for _, units in scores_by_depth)
    sequences = hashlib.sha256(hashes.encode()).hexdigest()[:16]
    return fractions, scores_by_depth[0][1].assign(sequences=sequences)
