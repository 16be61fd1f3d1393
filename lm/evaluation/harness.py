"""Downstream tasks of EleutherAI's lm-evaluation-harness (the package lm-eval) as an evaluation, and our models as it sees them."""

import difflib
import hashlib
import importlib.metadata
import math
import random
from collections import Counter
from collections.abc import Iterator
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
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device, eval_mode
from lm.model.spec import ModelSpec
from lm.runs.evaluations import Sample, Series, Shown
from lm.runs.loading import Loaded
from lm.schema import Plain

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise RunError(f"downstream tasks need lm-eval ({error.name} is not installed); run: pip install 'lm-eval>=0.4.9'") from None
if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

NEW_TOKENS = 256  # at most, where a task doesn't say
_NEW_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # as tasks spell it
_GENERATION_KEYS = {*_NEW_TOKENS_KEYS, "until", "do_sample", "temperature", "top_k", "top_p"}

TokenWindow = tuple[list[int], int]  # token ids, and how many of the last are to be scored


class HarnessLM(LM):
    """A trained model as the harness sees one: `simple_evaluate(model=HarnessLM(lm.load(RUN)), ...)`.

    Every text starts a document, so the end-of-text token comes before it. What is longer than `max_length` loses tokens
    on the left. Batches hold sequences of one length, so that nothing is padded and n is each sequence's own under every policy.

    Args:
        loaded: what `lm.load` gives; its decoder is moved to the device.
        max_length: tokens the model is given at once [default: the training length].
        where: device and precision [default: the GPU if there is one, fp32].

    Raises RunError: no tokenizer beside the weights; ConfigError: a `max_length` that the model can't take.
    """

    def __init__(self, loaded: Loaded, max_length: int | None = None, where: Device | None = None):
        super().__init__()
        self.tokenizer, start = loaded.tokenizer_and_start()
        decoder = loaded.decoder
        self.max_length = decoder.seq_len if max_length is None else max_length
        if self.max_length < 2:
            raise ConfigError([Problem("max_length", max_length, "must be 2 or more")])
        if decoder.config.position.ends and self.max_length > decoder.seq_len:
            raise ConfigError([Problem("max_length", max_length, f"learned positions end at {decoder.seq_len}")])
        self.where = where or Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"), bf16=False)
        self._device = self.where.device
        self.decoder = decoder.to(self._device).eval()
        self.eot_token_id = self.prefix_token_id = start
        self.cut: Counter[str] = Counter()  # requests of each task that lost tokens on the left
        self.shortened: Counter[str] = Counter()  # those that may write fewer tokens than they ask for, for want of room

    def tok_encode(self, string: str) -> list[int]:
        """Token ids of a text, none of them special."""
        return encoding_of(self.tokenizer, string).ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, which together spell both, the end-of-text token first.

        White space that ends the context goes to the continuation, as everywhere in the harness. Where the tokens of
        the whole text don't start with those of the context, the continuation is encoded by itself.
        """
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        before, whole = self.tok_encode(stripped), self.tok_encode(stripped + continuation)
        after = whole[len(before) :] if whole[: len(before)] == before else self.tok_encode(continuation)
        return [self.prefix_token_id, *before], after

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p(continuation | context) in nats, and whether each of its tokens is the most probable.

        A continuation longer than `max_length` is scored in parts, as `loglikelihood_rolling` does.
        """
        parts = []
        for request in requests:
            context, continuation = self.encode_pair(*request.args)
            if len(context) + len(continuation) > self.max_length + 1:
                self.cut[request.task_name] += 1
            parts.append(self.parts(context, continuation))
        return self._answered("loglikelihood", requests, self._together(parts, disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """For each (text,): log p(text) in nats; each token once, the first after the end-of-text token, in parts of `max_length`."""
        parts = [self.parts([self.prefix_token_id], self.tok_encode(request.args[0])) for request in requests]
        return self._answered("loglikelihood_rolling", requests, [log_p for log_p, _ in self._together(parts, disable_tqdm)])

    def _answered(self, kind: str, requests: list[Instance], answers: list[T]) -> list[T]:
        """The answers, kept in the harness's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers

    def parts(self, context: list[int], continuation: list[int]) -> list[TokenWindow]:
        """Windows of at most `max_length` + 1 tokens that predict each token of `continuation` once.

        One, cut from the left, if that much holds it; else, as the harness has it, parts side by side, of which the
        last reaches back to see `max_length` tokens.
        """
        if len(continuation) <= self.max_length:
            return [((context + continuation)[-self.max_length - 1 :], len(continuation))] if continuation else []
        windows = get_rolling_token_windows(continuation, context[-1], self.max_length, context_len=1)
        return [([*seen, predicted[-1]], len(predicted)) for seen, predicted in windows]

    def _together(self, parts: list[list[TokenWindow]], quiet: bool) -> list[tuple[float, bool]]:
        """log p over each request's parts, and whether all their tokens are the most probable."""
        scores = iter(self.score([window for windows in parts for window in windows], quiet))
        own = [[next(scores) for _ in windows] for windows in parts]
        return [(-sum(nll for nll, _ in scored), all(hits for _, hits in scored)) for scored in own]

    @torch.no_grad()
    def score(self, windows: list[TokenWindow], quiet: bool = False) -> list[tuple[float, bool]]:
        """For each window: the sum of -log p (nats) over the tokens to be scored, and whether each is the most probable.

        Windows that differ in the last token alone, as the choices of many tasks do, are computed once.
        """
        by_input: dict[tuple[int, ...], list[int]] = {}
        for index, (tokens, _) in enumerate(windows):
            by_input.setdefault(tuple(tokens[:-1]), []).append(index)
        result: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        with tqdm(total=len(windows), desc="likelihoods", leave=False, disable=quiet or None) as bar:
            for inputs in batches(sorted(by_input, key=len, reverse=True), len):
                asked = [(place, index) for place, tokens in enumerate(inputs) for index in by_input[tokens]]
                sizes = [windows[index][1] for _, index in asked]
                with self.where.autocast():
                    hidden = self.decoder(torch.tensor(inputs, device=self._device), first=len(inputs[0]) - max(sizes))
                states = torch.cat([hidden[place, -size:] for (place, _), size in zip(asked, sizes, strict=True)])
                targets = [token for (_, index), size in zip(asked, sizes, strict=True) for token in windows[index][0][-size:]]
                targets = torch.tensor(targets, device=self._device)
                head = self.decoder.head
                nll = token_nll(states, head, targets).double().cpu().split(sizes)
                hits = (argmax_tokens(states, head) == targets).cpu().split(sizes)
                for (_, index), n, hit in zip(asked, nll, hits, strict=True):
                    result[index] = float(n.sum()), bool(hit.all())
                bar.update(len(asked))
        return result

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """For each (context, options): what the model writes on, up to the first of `until`, the end of text, or the most tokens.

        Contexts of one length that may have as many new tokens are continued together. `max_length` holds context and new tokens: the
        context loses tokens on the left to make room, but never more than leave it half of `max_length`; then there are fewer new
        tokens. The i-th request draws with seed i.
        """
        asked = [self._asked(request, seed) for seed, request in enumerate(requests)]
        answers = [""] * len(asked)
        with tqdm(total=len(asked), desc="texts", leave=False, disable=disable_tqdm or None) as bar:
            for new in sorted({text.new for text in asked}, reverse=True):
                alike = [index for index, text in enumerate(asked) if text.new == new]
                for together in batches(alike, lambda index: len(asked[index].ids) + asked[index].new):
                    for index, answer in zip(together, self._write([asked[index] for index in together]), strict=True):
                        answers[index] = answer
                    bar.update(len(together))
        return self._answered("generate_until", requests, answers)

    def _asked(self, request: Instance, seed: int) -> "_AskedText":
        """Read what a request asks for; its context is cut to the room that there is."""
        (context, options), task = request.args, request.task_name
        unknown = [name for name in options if name not in _GENERATION_KEYS and (name, options[name]) != ("num_beams", 1)]
        if unknown:
            raise ConfigError([Problem(f"generation_kwargs.{name}", options[name], "not supported", f"task {task}") for name in unknown])
        asked = next((int(options[name]) for name in _NEW_TOKENS_KEYS if options.get(name) is not None), NEW_TOKENS)
        ids = [self.prefix_token_id, *self.tok_encode(context)]
        room = max(self.max_length - asked, self.max_length // 2)
        if len(ids) > room:
            self.cut[task] += 1
            ids = ids[-room:]
        new = min(asked, self.max_length - len(ids))
        if new < asked:
            self.shortened[task] += 1
        temperature = float(options.get("temperature") or 0) if options.get("do_sample", True) else 0.0
        if options.get("do_sample") and options.get("temperature") is None:
            temperature = 1.0
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        return _AskedText(ids, new, Sampling(temperature, options.get("top_k"), options.get("top_p"), seed), stops)

    def _write(self, asked: list["_AskedText"]) -> list[str]:
        """The texts that follow contexts of one length, with as many new tokens; each ends by itself, and the others go on."""
        writings = [Writing(self.tokenizer, text.ids) for text in asked]
        begins, answers, going = [len(writing.shown) for writing in writings], [""] * len(asked), [*range(len(asked))]
        new = asked[0].new
        continuation = Continuation(self.decoder, [text.ids for text in asked], len(asked[0].ids) + new, [text.sampling for text in asked])
        for _ in range(new):
            with self.where.autocast():
                tokens = continuation.draw()
            kept = []
            for place, (index, token) in enumerate(zip(going, tokens, strict=True)):
                if token == self.eot_token_id:
                    continue
                writings[index].add(token)
                text = writings[index].shown[begins[index] :]
                ends = [text.find(stop) for stop in asked[index].stops if stop in text]
                answers[index] = text[: min(ends)] if ends else text
                kept += [] if ends else [place]
            if not kept:
                break
            going = [going[place] for place in kept]
            continuation.keep(kept)
        return answers


@dataclass(frozen=True)
class _AskedText:
    """A text that the model is to write."""

    ids: list[int]  # tokens of the context
    new: int  # new tokens at most
    sampling: Sampling  # how they are drawn
    stops: list[str]  # texts before which it ends


def _find(asked: DownstreamConfig) -> tuple[list[str], "TaskManager"]:
    """The names that `asked.tasks` stand for, and the manager that knows them.

    Reading the harness's own 14,000 tasks takes a quarter of a minute, so it's left out where `include_path` has all that is named.
    """
    from lm_eval.tasks import TaskManager

    path, metadata = asked.include_path, asked.metadata or None
    if path:
        if not Path(path).is_dir():
            raise ConfigError([Problem("eval.downstream.include_path", path, "no such folder")])
        manager = TaskManager(include_path=path, include_defaults=False, metadata=metadata)
        if set(asked.tasks) <= set(manager.all_subtasks):
            return asked.tasks, manager
    manager = TaskManager(include_path=path, metadata=metadata)
    problems, names = [], []
    for task in asked.tasks:
        matched = [task] if task in manager.all_tasks else sorted(manager.match_tasks([task]))
        names += [name for name in matched if name not in names]
        if not matched:
            close = difflib.get_close_matches(task, manager.all_tasks, 3, cutoff=0.8)
            remedy = f"did you mean {' or '.join(close)}?" if close else "`lm-eval ls tasks` lists them; yours: include_path"
            problems.append(Problem("eval.downstream.tasks", task, "no such task", remedy))
    if problems:
        raise ConfigError(problems)
    return names, manager


def _evaluate(model: HarnessLM, names: list[str], manager: "TaskManager", asked: DownstreamConfig) -> dict[str, Plain]:
    """The harness's results, with those of each document.

    Raises:
        RunError: what is wrong with a task or its data, in one line.
    """
    import lm_eval

    try:
        return lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, num_fewshot=asked.num_fewshot, limit=asked.limit, log_samples=True,
            metadata=asked.metadata or None, bootstrap_iters=0,  # standard errors are made of its documents, where they are needed
        )  # fmt: skip
    except (LMError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # all that a task's file, code and data can raise
        raise RunError(f"{', '.join(names)}: the harness failed: {type(error).__name__}: {one_line(error)}") from error


def _metrics(results: dict[str, Plain]) -> dict[str, float]:
    """The numbers of the harness's `metric,filter` keys, without the filter `none`."""
    return {key.removesuffix(",none"): float(value) for key, value in results.items() if "," in key and not isinstance(value, str)}


# ---------------------------------------------------------------- as an evaluation


class Downstream(Measurement):
    """Tasks of the harness as an evaluation: each metric of a task is a series with a value for each document, where it is their mean."""

    kind = "downstream"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: no such task."""
        super().__init__(config, store)
        self.names, self.manager = _find(self.asked)

    @property
    def options(self) -> dict[str, Plain]:
        return {"seq_len": self.config.data.seq_len, **self.asked_plain, "lm_eval": importlib.metadata.version("lm_eval")}

    @property
    def work(self) -> int:
        return len(self.names)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        spec = ModelSpec.of(decoder, self.store.manifest["end_of_text"]["token"])
        with eval_mode(decoder), _own_random_state():
            model = HarnessLM(Loaded(decoder, spec, self.store.tokenizer(), self.store.path), self.asked.max_length, where)
            given = _evaluate(model, self.names, self.manager, self.asked)
        progress(len(self.names))
        return [series for task in given["samples"] for series in self._series(task, given, model)]

    def _series(self, task: str, given: dict[str, Plain], model: HarnessLM) -> Iterator[Series]:
        """The metrics of a task, of the harness's results, and how many of its requests were too long for the model."""
        lost = {"requests lost tokens on the left": model.cut[task], "may write fewer tokens than they ask for": model.shortened[task]}
        words = "".join(f", {count:,} {what}" for what, count in lost.items() if count)
        for name, mean in _metrics(given["results"][task]).items():
            metric, _, kind = name.partition(",")
            if metric.endswith("_stderr"):
                continue
            answers = [answer for answer in given["samples"][task] if answer.get("filter", "none") == (kind or "none")]
            answers.sort(key=lambda answer: answer["doc_id"])
            values = np.array(
                [answer.get(metric, math.nan) for answer in answers if not isinstance(answer.get(metric), list | tuple)], float
            )
            by_document = len(values) == len(answers) > 0 and math.isclose(values.mean(), mean, abs_tol=1e-6)
            hashes = "\n".join(str(answer.get("doc_hash")) for answer in answers)
            sample = Sample(hashlib.sha256(hashes.encode()).hexdigest(), values[:, None], np.ones(len(values)), np.arange(len(values)))
            better = {True: "higher", False: "lower"}.get(given["higher_is_better"].get(task, {}).get(metric), "none")
            shown = Shown("Downstream tasks", "documents of downstream tasks", f"{len(answers):,} of {task}{words}")
            unit = "fraction" if by_document and values.min() >= 0 and values.max() <= 1 else ""
            yield self.series(
                name, unit, better, mean, what=task, samples=(sample,) * by_document, interval="documents" if by_document else "none",
                logged=(f"{self.kind}/{task}/{name}",), shown=shown,
            )  # fmt: skip


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Keep the random state of Python, numpy and torch, which the harness seeds."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the harness seeds this one)
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
