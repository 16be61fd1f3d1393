"""Downstream tasks of EleutherAI's lm-evaluation-harness (lm-eval) as an evaluation, and lm's models as the harness
sees them.
"""

import difflib
import hashlib
import importlib.metadata
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lm.config.eval_config import DownstreamConfig
from lm.config.tree import Config
from lm.data.store import Store
from lm.data.tokenizer import encoding_of
from lm.errors import ConfigError, LMError, Problem, RunError, one_line
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.evaluation.generation import Continuation, Sampling, Writing
from lm.evaluation.held_out import T, batches
from lm.files import expand_home
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, eval_mode, preserved_random_state
from lm.model.spec import ModelSpec
from lm.runs.evaluations import Sample, Series, Shown
from lm.runs.loading import LoadedModel
from lm.schema import Plain

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise RunError(
        f"downstream tasks need lm-eval ({error.name} is not installed); run: pip install 'lm-eval>=0.4.9'"
    ) from None
if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

NEW_TOKENS = 256  # the most new tokens of a request, if its task sets no limit
_NEW_TOKENS_KEYS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names of this limit in tasks
_GENERATION_KEYS = {*_NEW_TOKENS_KEYS, "until", "do_sample", "temperature", "top_k", "top_p"}

TokenWindow = tuple[list[int], int]  # token ids, and how many of them, at the end, are to be scored


class HarnessLM(LM):
    """A trained model as lm-evaluation-harness (lm-eval) takes one:
    `lm_eval.simple_evaluate(model=HarnessLM(lm.load(RUN)), ...)`.

    Every text starts a document, so the end-of-text token comes before it. A text that is longer than `max_length`
    loses tokens on the left. Batches hold sequences of one length, without padding, so that n (docs/n.md) counts each
    sequence's own tokens.

    Args:
        model: the model that `lm.load` gives; its decoder is moved to the device.
        max_length: the most tokens in an input of the model [default: the training length].
        device: device and precision [default: the GPU if there is one, fp32].

    Raises RunError: no tokenizer beside the weights; ConfigError: a `max_length` that the model can't take.
    """

    def __init__(self, model: LoadedModel, max_length: int | None = None, device: Device | None = None):
        super().__init__()
        self.tokenizer, start = model.tokenizer_and_start()
        decoder = model.decoder
        self.max_length = decoder.seq_len if max_length is None else max_length
        if self.max_length < 2:
            raise ConfigError([Problem("max_length", max_length, "must be 2 or more")])
        if decoder.config.position.has_last_position and self.max_length > decoder.seq_len:
            raise ConfigError([Problem("max_length", max_length, f"learned positions end at {decoder.seq_len}")])
        self.device_and_precision = device or Device(
            torch.device("cuda" if torch.cuda.is_available() else "cpu"), bf16=False
        )
        self._device = self.device_and_precision.device
        self.decoder = decoder.to(self._device).eval()
        self.prefix_token_id, self.end_ids = start, model.end_ids
        self.n_cut: Counter[str] = Counter()  # number of requests that lost tokens on the left, by task
        self.n_shortened: Counter[str] = (
            Counter()
        )  # number of requests whose limit of new tokens was lowered to fit, by task

    def tok_encode(self, string: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return encoding_of(self.tokenizer, string).ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of the context, with the end-of-text token first, and of the continuation; together they spell both
        texts.

        White space at the end of the context goes to the continuation, as everywhere in lm-eval. If the tokens of the
        whole text don't start with the tokens of the context, the continuation is encoded by itself.
        """
        stem = context.rstrip()
        continuation = context[len(stem) :] + continuation
        context_ids, ids = self.tok_encode(stem), self.tok_encode(stem + continuation)
        continuation_ids = (
            ids[len(context_ids) :] if ids[: len(context_ids)] == context_ids else self.tok_encode(continuation)
        )
        return [self.prefix_token_id, *context_ids], continuation_ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) log p(continuation | context), nats, and whether all its tokens are
        the most probable.

        A continuation longer than `max_length` is scored in several windows, as `loglikelihood_rolling` does.
        """
        windows = []
        for request in requests:
            context, continuation = self.encode_pair(*request.args)
            if len(context) + len(continuation) > self.max_length + 1:
                self.n_cut[request.task_name] += 1
            windows.append(self.split_windows(context, continuation))
        return self._keep_answers("loglikelihood", requests, self._request_scores(windows, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log p(text), nats, for each (text,). Tokens are scored once (`split_windows`), the first after the
        end-of-text token.
        """
        windows = [self.split_windows([self.prefix_token_id], self.tok_encode(request.args[0])) for request in requests]
        return self._keep_answers(
            "loglikelihood_rolling", requests, [log_p for log_p, _ in self._request_scores(windows, disable_tqdm)]
        )

    def _keep_answers(self, kind: str, requests: list[Instance], answers: list[T]) -> list[T]:
        """Add the answers to lm-eval's cache, and return them."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers

    def split_windows(self, context: list[int], continuation: list[int]) -> list[TokenWindow]:
        """Windows of at most `max_length` + 1 tokens in which each token of `continuation` is predicted once.

        There is one window, cut on the left, if it can hold the continuation. Else the continuation is cut into
        consecutive windows, as in lm-eval, and the last window begins so early that it has `max_length` inputs.
        """
        if len(continuation) <= self.max_length:
            return [((context + continuation)[-self.max_length - 1 :], len(continuation))] if continuation else []
        windows = get_rolling_token_windows(continuation, context[-1], self.max_length, context_len=1)
        return [([*inputs, targets[-1]], len(targets)) for inputs, targets in windows]

    def _request_scores(self, request_windows: list[list[TokenWindow]], quiet: bool) -> list[tuple[float, bool]]:
        """For each request, log p of the scored tokens of its windows, in nats, and whether each scored token is the
        most probable one.
        """
        scores = iter(self.score([window for windows in request_windows for window in windows], quiet))
        request_scores = [[next(scores) for _ in windows] for windows in request_windows]
        return [
            (-sum(nll for nll, _ in window_scores), all(hits for _, hits in window_scores))
            for window_scores in request_scores
        ]

    @torch.no_grad()
    def score(self, windows: list[TokenWindow], quiet: bool = False) -> list[tuple[float, bool]]:
        """Return for each window the sum of -log p (nats) over its scored tokens, and whether every scored token is the
        most probable one.

        Windows that differ only in the last token, as the choices of many tasks do, are computed once.
        """
        by_input: dict[tuple[int, ...], list[int]] = {}
        for index, (tokens, _) in enumerate(windows):
            by_input.setdefault(tuple(tokens[:-1]), []).append(index)
        result: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        with tqdm(total=len(windows), desc="likelihoods", leave=False, disable=quiet or None) as bar:
            for inputs in batches(sorted(by_input, key=len, reverse=True), len):
                self.device_and_precision.check_time()
                pairs = [
                    (input_index, index) for input_index, tokens in enumerate(inputs) for index in by_input[tokens]
                ]
                sizes = [windows[index][1] for _, index in pairs]
                with self.device_and_precision.autocast():
                    hidden = self.decoder(torch.tensor(inputs, device=self._device), first=len(inputs[0]) - max(sizes))
                states = torch.cat(
                    [hidden[input_index, -size:] for (input_index, _), size in zip(pairs, sizes, strict=True)]
                )
                targets = [
                    token for (_, index), size in zip(pairs, sizes, strict=True) for token in windows[index][0][-size:]
                ]
                targets = torch.tensor(targets, device=self._device)
                head = self.decoder.head
                nll = token_nll(states, head, targets).double().cpu().split(sizes)
                hits = (argmax_tokens(states, head) == targets).cpu().split(sizes)
                for (_, index), values, value_hits in zip(pairs, nll, hits, strict=True):
                    result[index] = float(values.sum()), bool(value_hits.all())
                bar.update(len(pairs))
        return result

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return for each (context, options) the generated text, up to a stop string (`until`), an end token, or the
        limit of new tokens.

        Contexts of one length with one limit are continued together. If context and new tokens exceed `max_length`, the
        context loses tokens on the left, down to half of `max_length`. If that is not enough, the limit is lowered. The
        i-th request samples with seed i.
        """
        texts = [self._text_request(request, seed) for seed, request in enumerate(requests)]
        answers = [""] * len(texts)
        with tqdm(total=len(texts), desc="texts", leave=False, disable=disable_tqdm or None) as bar:
            for new_tokens in sorted({text.max_new_tokens for text in texts}, reverse=True):
                indices = [index for index, text in enumerate(texts) if text.max_new_tokens == new_tokens]
                for group in batches(indices, lambda index: len(texts[index].ids) + texts[index].max_new_tokens):
                    for index, answer in zip(group, self._generate([texts[index] for index in group]), strict=True):
                        answers[index] = answer
                    bar.update(len(group))
        return self._keep_answers("generate_until", requests, answers)

    def _text_request(self, request: Instance, seed: int) -> "_TextRequest":
        """Read a request of `generate_until`, and cut its context to fit `max_length`. Raises ConfigError: an
        unsupported option.
        """
        (context, options), task = request.args, request.task_name
        unknown_names = [
            name for name in options if name not in _GENERATION_KEYS and (name, options[name]) != ("num_beams", 1)
        ]
        if problems := [
            Problem(f"generation_kwargs.{name}", options[name], "not supported", f"task {task}")
            for name in unknown_names
        ]:
            raise ConfigError(problems)
        limit = next((int(options[name]) for name in _NEW_TOKENS_KEYS if options.get(name) is not None), NEW_TOKENS)
        ids = [self.prefix_token_id, *self.tok_encode(context)]
        room = max(self.max_length - limit, self.max_length // 2)
        if len(ids) > room:
            self.n_cut[task] += 1
            ids = ids[-room:]
        new_tokens = min(limit, self.max_length - len(ids))
        if new_tokens < limit:
            self.n_shortened[task] += 1
        temperature = float(options.get("temperature") or 0) if options.get("do_sample", True) else 0.0
        if options.get("do_sample") and options.get("temperature") is None:
            temperature = 1.0
        stop_option = options.get("until") or []
        stops = [stop for stop in ([stop_option] if isinstance(stop_option, str) else stop_option) if stop]
        return _TextRequest(
            ids, new_tokens, Sampling(temperature, options.get("top_k") or None, options.get("top_p"), seed), stops
        )

    def _generate(self, texts: list["_TextRequest"]) -> list[str]:
        """Texts generated after contexts of one length, with one limit of new tokens; a text that has ended leaves the
        batch.
        """
        writings = [Writing(self.tokenizer, text.ids) for text in texts]
        starts, answers, active_indices = (
            [len(writing.shown) for writing in writings],
            [""] * len(texts),
            [*range(len(texts))],
        )
        prompts, samplings, new_tokens = (
            [text.ids for text in texts],
            [text.sampling for text in texts],
            texts[0].max_new_tokens,
        )
        continuation = Continuation(self.decoder, prompts, len(prompts[0]) + new_tokens, samplings)
        for _ in range(new_tokens):
            self.device_and_precision.check_time()
            with self.device_and_precision.autocast():
                tokens = continuation.draw()
            active_rows = []
            for row, (index, token) in enumerate(zip(active_indices, tokens, strict=True)):
                if token in self.end_ids:
                    continue
                writings[index].add(token)
                text = writings[index].shown[starts[index] :]
                ends = [text.find(stop) for stop in texts[index].stops if stop in text]
                answers[index] = text[: min(ends)] if ends else text
                active_rows += [] if ends else [row]
            if not active_rows:
                break
            active_indices = [active_indices[row] for row in active_rows]
            continuation.keep(active_rows)
        return answers


@dataclass(frozen=True)
class _TextRequest:
    ids: list[int]  # tokens of the context
    max_new_tokens: int
    sampling: Sampling  # how the new tokens are sampled
    stops: list[str]  # stop strings: the text ends before the first of them


def _find_tasks(options: DownstreamConfig) -> tuple[list[str], "TaskManager"]:
    """Names of the tasks that match `options.tasks`, and lm-eval's task manager. Raises ConfigError: no such folder or
    task.

    Reading lm-eval's own 14,000 tasks takes a quarter of a minute; they are not read if `options.include_path` has all
    named tasks.
    """
    from lm_eval.tasks import TaskManager

    path, metadata = options.include_path and str(expand_home(options.include_path)), options.metadata or None
    if path:
        if not Path(path).is_dir():
            raise ConfigError([Problem("eval.downstream.include_path", path, "no such folder")])
        manager = TaskManager(include_path=path, include_defaults=False, metadata=metadata)
        if set(options.tasks) <= set(manager.all_subtasks):
            return options.tasks, manager
    manager = TaskManager(include_path=path, metadata=metadata)
    problems, names = [], []
    for task in options.tasks:
        matches = [task] if task in manager.all_tasks else sorted(manager.match_tasks([task]))
        names += [name for name in matches if name not in names]
        if not matches:
            close_names = difflib.get_close_matches(task, manager.all_tasks, 3, cutoff=0.8)
            remedy = (
                f"did you mean {' or '.join(close_names)}?"
                if close_names
                else "`lm-eval ls tasks` lists them; yours: include_path"
            )
            problems.append(Problem("eval.downstream.tasks", task, "no such task", remedy))
    if problems:
        raise ConfigError(problems)
    return names, manager


def _evaluate(
    model: HarnessLM, names: list[str], manager: "TaskManager", options: DownstreamConfig
) -> dict[str, Plain]:
    """Results of lm-eval for the tasks `names`, with the results of each document.

    Raises RunError: a task or its data is wrong; the message says how, in one line.
    """
    import lm_eval

    try:
        return lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, num_fewshot=options.num_fewshot, limit=options.limit,
            log_samples=True,
            # standard errors are computed from documents, where needed
            metadata=options.metadata or None, bootstrap_iters=0,
        )  # fmt: skip
    except (LMError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # all that a task's file, code and data can raise
        raise RunError(f"{', '.join(names)}: the harness failed: {type(error).__name__}: {one_line(error)}") from error


# ---------------------------------------------------------------- as an evaluation


class Downstream(Measurement):
    """Tasks of lm-eval as an evaluation: a series for each metric of a task, with values by document if the metric is
    their mean.
    """

    kind = "downstream"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: no such task."""
        super().__init__(config, store)
        self.names, self.manager = _find_tasks(self.eval_config)

    @property
    def options(self) -> dict[str, Plain]:
        options = {
            "seq_len": self.config.data.seq_len,
            **self.plain_eval_config,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }
        end_tokens = self.config.data.tokenizer.end_tokens
        return options | ({"end_tokens": [*end_tokens]} if end_tokens else {})

    @property
    def work_units(self) -> int:
        return len(self.names)

    def cacheable(self, series: Sequence[Series]) -> bool:
        # the user's task files may read files that are not known here
        return not self.eval_config.include_path and super().cacheable(series)

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[Series]:
        spec = ModelSpec.from_decoder(
            decoder, self.store.manifest["end_of_text"]["token"], self.config.data.tokenizer.end_tokens
        )
        with eval_mode(decoder), _restored_random_state():
            model = HarnessLM(
                LoadedModel(decoder, spec, self.store.tokenizer(), self.store.path), self.eval_config.max_length, device
            )
            results: dict[str, Plain] = {}
            # all ranks stop together if one has no time left
            all_reduce_sum(
                device,
                lambda: results.update(_evaluate(model, self.names, self.manager, self.eval_config)) or torch.zeros(1),
            )
        progress(len(self.names))
        return [series for task in results["samples"] for series in self._series(task, results, model)]

    def _series(self, task: str, results: dict[str, Plain], model: HarnessLM) -> Iterator[Series]:
        """Series of a task's metrics in lm-eval's results; reports also show how many of its requests were too long for
        the model.
        """
        notes = {
            "requests lost tokens on the left": model.n_cut[task],
            "may write fewer tokens than they ask for": model.n_shortened[task],
        }
        request_notes = "".join(f", {count:,} {phrase}" for phrase, count in notes.items() if count)
        for key, mean in results["results"][task].items():
            metric, has_filter, filter_name = key.partition(",")
            if not has_filter or metric.endswith("_stderr") or isinstance(mean, str):
                continue
            name = key.removesuffix(",none")
            answers = [answer for answer in results["samples"][task] if answer.get("filter", "none") == filter_name]
            answers.sort(key=lambda answer: answer["doc_id"])
            numbers = (answer.get(metric, math.nan) for answer in answers)
            values = np.array([number for number in numbers if not isinstance(number, list | tuple)], float)
            by_document = len(values) == len(answers) > 0 and math.isclose(values.mean(), mean, abs_tol=1e-6)
            hashes = "\n".join(str(answer.get("doc_hash")) for answer in answers)
            sample = Sample(
                hashlib.sha256(hashes.encode()).hexdigest(),
                values[:, None],
                np.ones(len(values)),
                np.arange(len(values)),
            )
            better = {True: "higher", False: "lower"}.get(results["higher_is_better"].get(task, {}).get(metric), "none")
            display = Shown(
                "Downstream tasks", "documents of downstream tasks", f"{len(answers):,} of {task}{request_notes}"
            )
            unit = "fraction" if by_document and values.min() >= 0 and values.max() <= 1 else ""
            fields = {"samples": (sample,), "interval": "documents"} if by_document else {}
            log_names = (f"{self.kind}/{task}/{name}",)
            yield self.series(name, unit, better, float(mean), what=task, logged=log_names, shown=display, **fields)


@contextmanager
def _restored_random_state() -> Iterator[None]:
    """A context that restores the random states of Python, numpy and torch, which lm-eval seeds."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 (the harness seeds this one)
    try:
        with preserved_random_state():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
