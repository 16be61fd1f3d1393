"""Measure downstream tasks with EleutherAI's lm-evaluation-harness (lm-eval), on the model as exported for
transformers.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import logging
import math
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import ConfigError, LMError, Problem, RunError, one_line
from lm.evaluation.measurement import Measurement, metric_rows, sampling_unit_frame
from lm.files import expand_home
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum
from lm.model.spec import ModelSpec
from lm.plain import Plain
from lm.runs.evaluations import Metric
from lm.runs.loading import LoadedModel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

BATCH_TOKENS = 2**14  # most tokens of a batch of sequences of the training length
TASK_FILE_SUFFIXES = (".yaml", ".yml")


@cache
def _lm_eval_adapter_class() -> type["HFLM"]:
    """Return a subclass of lm-eval's HFLM that counts truncated requests and handles the token that starts a document.

    A whole text is scored after exactly one such token. Importing lm-eval takes seconds, so the class is made when
    needed.
    """
    from lm_eval.models.huggingface import HFLM  # takes seconds to import

    class Adapter(HFLM):
        n_truncated = 0  # requests longer than `max_length`, whose first tokens are left out

        def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:
            self.add_bos_token = False  # lm-eval puts the token before the text by itself
            try:
                return super().loglikelihood_rolling(requests, disable_tqdm)
            finally:
                self.add_bos_token = None

        def _loglikelihood_tokens(self, requests: list[tuple], **options: object) -> list[tuple[float, bool]]:
            self.n_truncated += sum(len(context) + len(target) > self.max_length + 1 for _, context, target in requests)
            return super()._loglikelihood_tokens(requests, **options)

    return Adapter


class DownstreamTasks(Measurement):
    """This evaluation runs tasks of lm-eval. A metric has one value per document if the documents' mean is the task's
    result; else only the task's result is kept.

    Raises ConfigError when constructed: there is no such task.
    """

    kind = "tasks"
    logged_metrics = (Metric("tasks/{TASK}/{METRIC}", meaning="a metric of lm-eval, by its names", units="documents"),)

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.task_names, self.task_manager = find_tasks(self.eval_config.tasks)

    @property
    def further_inputs(self) -> dict[str, Plain]:
        end_tokens = [*self.config.data.tokenizer.end_tokens]
        return super().further_inputs | {"lm_eval": importlib.metadata.version("lm_eval"), "end_tokens": end_tokens}

    @property
    def is_cacheable(self) -> bool:
        # a task file of the user may read files that are not known here
        return not any(name.endswith(TASK_FILE_SUFFIXES) for name in self.task_names)

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        from lm.huggingface.exporting import transformers_model  # each run imports this module, few measure tasks

        blocks: list[pd.DataFrame] = []

        def measure_tasks() -> torch.Tensor:
            store, end_tokens = self.store, self.config.data.tokenizer.end_tokens
            spec = ModelSpec.from_decoder(decoder, store.manifest["end_of_text"]["token"], end_tokens)
            model, tokenizer = transformers_model(LoadedModel(decoder, spec, store.tokenizer(), store.path))
            seq_len, precision = self.config.data.seq_len, torch.bfloat16 if device.bf16 else None
            for name in self.task_names:
                adapter = _lm_eval_adapter_class()(
                    model, tokenizer=tokenizer, max_length=seq_len, mixed_precision_dtype=precision,
                    batch_size=max(1, BATCH_TOKENS // seq_len),
                )  # fmt: skip
                if results := _lm_eval_results(adapter, name, self.task_manager, self.eval_config.limit):
                    task_frames = (self._task_rows(task, results, adapter) for task in results["samples"])
                    blocks.extend(chain.from_iterable(task_frames))
            return torch.zeros(1)

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        # lm-eval's progress bars are for terminals alone
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            all_reduce_sum(device, measure_tasks)  # all ranks fail together
        if device.world_size > 1:
            broadcast_blocks = [blocks]
            torch.distributed.broadcast_object_list(broadcast_blocks, device=device.device)
            (blocks,) = broadcast_blocks
        return blocks

    def _task_rows(self, task: str, results: dict[str, Plain], adapter: "HFLM") -> Iterator[pd.DataFrame]:
        """Yield rows of a task's metrics from lm-eval's results. Reports also show how many requests were too long."""
        cut_note = f", {adapter.n_truncated:,} requests lost tokens on the left" if adapter.n_truncated else ""
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
            units = sampling_unit_frame(hashlib.sha256(hashes.encode()).hexdigest(), np.arange(len(values)))
            lm_metric = Metric(
                self.logged_metrics[0].name,
                "fraction" if by_document and values.min() >= 0 and values.max() <= 1 else "",
                {True: "higher", False: "lower"}.get(results["higher_is_better"].get(task, {}).get(metric), "none"),
                quantity=name, units="documents" * by_document, interval=by_document, title="Downstream tasks",
                measured_on="documents of downstream tasks", amount=f"{len(answers):,} of {task}{cut_note}",
            )  # fmt: skip
            measured = (values[:, None], units) if by_document else (float(mean),)
            yield metric_rows(lm_metric, *measured, task=task)


def find_tasks(patterns: list[str]) -> tuple[list[str], "TaskManager"]:
    """Return the names of tasks, groups and task files that match the patterns `patterns`, and lm-eval's task manager.

    Reading lm-eval's 14,000 tasks takes a quarter of a minute; task files don't need them.

    Raises ConfigError: there is no such task or file. Raises RunError: lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise RunError(f"downstream tasks: {error.name} is not installed; pip install 'lm-eval[hf]>=0.4.13'") from None

    manager, names = TaskManager(include_defaults=not all(task.endswith(TASK_FILE_SUFFIXES) for task in patterns)), []
    for task in patterns:
        path = expand_home(task)
        matches = [str(path)] if path.is_file() else sorted(manager.match_tasks([task]))
        if not matches:
            remedy = "`lm-eval ls tasks` lists them; yours: the path of a YAML file"
            raise ConfigError([Problem("eval.tasks", task, "no such task", remedy)])
        names += matches
    return [*dict.fromkeys(names)], manager


def _lm_eval_results(
    adapter: "HFLM", name: str, task_manager: "TaskManager", limit: int | None
) -> dict[str, Plain] | None:
    """Return lm-eval's results for a task or group, with the results for each document; None on all ranks but the
    first.

    Raises RunError: a task or its data is wrong; the message says how, in one line.
    """
    from lm_eval import simple_evaluate

    try:
        return simple_evaluate(
            model=adapter, tasks=[name], task_manager=task_manager, limit=limit, log_samples=True,
            # standard errors are computed from documents, where needed
            bootstrap_iters=0,
        )  # fmt: skip
    except (LMError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # all that a task's file, code and data can raise
        raise RunError(f"{name}: lm-eval failed: {type(error).__name__}: {one_line(error)}") from error
