"""Series of evaluations whose files hold none yet, made of what those files hold."""

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from lm.runs.series import Axis, Sample, Series, Shown, numbers
from lm.schema import Plain

_NATS = "nats per token"
_AFTER = "after the right answers to earlier questions"
_VALIDATION = "Validation, rows of the training length", "validation rows"
_ROLL_OUT = "roll-out"  # answers after the model's own, in place of the right ones


def is_wanted(kind: str, config: dict[str, Plain]) -> bool:
    """Whether a run's configuration asks for evaluations of a kind."""
    asked = config.get("eval") or {}
    recall, needle, long = (asked.get(name) or {} for name in ("recall", "needle", "long_context"))
    wanted = {
        "validation": True,
        "long_context": long.get("length_factor", 1),
        "recall": recall.get("length_factors") and (config["data"].get("tasks") or recall.get("tasks")),
        "needle": needle.get("length_factors"),
    }
    return bool(wanted.get(kind))


def of_log(loss: float, bits: float | None, unigram_entropy: float | None, seq_len: int) -> list[Series]:
    """The last validation that was logged while training: means alone."""
    references = {} if unigram_entropy is None else {"unigram entropy": unigram_entropy}
    return _validation_series(loss, bits, references, seq_len, Shown(*_VALIDATION, ""))


def _validation(content: dict[str, Plain]) -> list[Series]:
    values = numbers(content["nll_by_row"])
    if values.shape != (content["rows"],):
        raise ValueError(f"nll_by_row has shape {values.shape}, not ({content['rows']},)")
    rows = Sample(content["rows_sha256"], values[:, None], numbers(content["targets_by_row"]), np.array(content["document_by_row"]))
    token = "token" if content["bits_per_byte"] is not None or content["loss"] is None else "token of the answers"
    method = (
        f"Validation loss is the mean negative log-likelihood in nats per {token} over {len(values):,} held-out rows of the training length"
    )
    shown = Shown(*_VALIDATION, f"{len(values):,} of {content['seq_len']:,} tokens", method=method)
    references = {"unigram entropy": float(numbers(content["unigram_entropy"]))}
    given = {"samples": (rows,), "data_fingerprint": content["data_fingerprint"], "interval": "bootstrap"}
    return _validation_series(content["loss"], content["bits_per_byte"], references, content["seq_len"], shown, **given)


def _validation_series(
    loss: float | None, bits: float | None, references: dict[str, float], seq_len: int, shown: Shown, **given
) -> list[Series]:
    common = {"better": "lower", "seq_len": seq_len, "shown": shown}
    found = [Series("validation", "val loss", _NATS, means=numbers([loss]), references=references, logged=("val/loss",), **common, **given)]
    if bits is not None or loss is None:  # symbols are no bytes
        found.append(Series("validation", "bits per byte", "", means=numbers([bits]), logged=("val/bits_per_byte",), **common))
    return found


def _long_context(content: dict[str, Plain]) -> list[Series]:
    edges, length, rows = content["bucket_edges"], content["length"], content["rows"]
    documents = np.array(content["document_by_row"])
    amount = f"{rows:,} of {length:,} tokens"
    method = (
        f"Loss beyond the training length is measured on {rows:,} held-out rows of {length:,} tokens, by position, without further training"
    )
    shown = Shown("Long rows, by position", "long-context rows", amount, "loss by position, mean over rows", method=method)
    found = []
    for one in content["settings"]:
        by_bucket = numbers(one["nll_by_row"])
        found.append(
            Series(
                "long_context", "loss", _NATS, "lower", content["seq_len"], by_bucket.mean(0), setting=one["label"],
                axis=Axis("position in the row", "tokens", "at positions", tuple(edges), bins=True),
                samples=(Sample(content["rows_sha256"], by_bucket, np.ones(rows), documents),),
                curve=numbers(one["nll_by_position"]), data_fingerprint=content["data_fingerprint"], interval="bootstrap",
                logged=(f"long/loss {one['label']}",), shown=shown,
            )
        )  # fmt: skip
    return found


def _recall(content: dict[str, Plain]) -> list[Series]:
    """Teacher-forced, and where a row asks several questions, so that it differs, in a roll-out: another inference setting."""
    lines: dict[str, list[tuple]] = {}
    for cell in content["cells"]:
        task, asked = cell["task"], cell["questions_by_row"]
        ways = [(cell["label"], cell["by_row"], cell["chance"])]
        ways += [(f"{cell['label']}, {_ROLL_OUT}", cell["rollout_by_row"], cell["rollout_chance"])] if max(asked) > 1 else []
        for label, right, chance in ways:
            place = cell["length"], cell["rows_sha256"], right, asked, chance
            lines.setdefault(json.dumps([task, label]), []).append((task, label, place))
    return [_answers(content, task, label, [place for *_, place in line]) for line in lines.values() for task, label, _ in line[:1]]


def _needle(content: dict[str, Plain]) -> list[Series]:
    """All depths of a length together, the control, without a needle, apart. A trial asks the same at each depth: it counts once."""
    taught = content["finetune"]
    groups: dict[tuple[str, bool, int], list[dict[str, Plain]]] = {}
    for cell in content["cells"]:
        groups.setdefault((cell["label"], cell["absent"], cell["length"]), []).append(cell)
    lines: dict[tuple[str, bool], list[tuple]] = {}
    for (label, absent, length), cells in groups.items():
        by_trial = np.mean([cell["by_trial"] for cell in cells], axis=0)
        sha256 = hashlib.sha256(json.dumps([taught, *(cell["trials_sha256"] for cell in cells)]).encode()).hexdigest()
        lines.setdefault((label, absent), []).append((length, sha256, by_trial, [1] * len(by_trial), cells[0]["chance"]))
    options = {"needles": content["needles"], "distractors": content["distractors"], "fine-tuned": taught["steps"]}
    names = {False: "needle", True: "needle, control without it"}
    return [_answers(content, {"name": names[absent]} | options, label, places) for (label, absent), places in lines.items()]


def _answers(content: dict[str, Plain], task: dict[str, Plain], setting: str, places: Sequence[tuple]) -> Series:
    samples = []
    for _, sha256, right, asked, _ in sorted(places, key=lambda place: place[0]):
        weights = numbers(asked)
        samples.append(Sample(sha256, numbers(right)[:, None], weights, np.arange(len(weights))))
    chances = [chance for *_, chance in places if chance is not None]
    name = f"chance, {_ROLL_OUT}" if setting.endswith(_ROLL_OUT) else "chance"
    shown = Shown(
        "Answers right, by tokens in the row",
        "rows with questions",
        f"{int(samples[0].weights.sum()):,} different ones a length",
        f"answers right by length of the row, {_AFTER}, or in a {_ROLL_OUT} after the model's own",
        "chance, picking among the answers shown and not yet given",
        f"Answers to held-out questions are right as wholes, under greedy decoding in fp32 {_AFTER} "
        f"(in a {_ROLL_OUT} after the model's own),",
    )
    means = np.array([np.average(sample.values[:, 0], weights=sample.weights) for sample in samples])
    axis = Axis("length of the row", "tokens", "in rows of", tuple(sorted(place[0] for place in places)))
    options = {key: value for key, value in task.items() if key != "name"}
    return Series(
        content["kind"], "answers right", "fraction", "higher", content["seq_len"], means, task["name"], options, setting, axis,
        tuple(samples),
        references=dict([(name, chances[0])] if chances else []), interval="wilson", control="control" in task["name"], shown=shown,
    )  # fmt: skip


ADAPTORS: dict[str, Callable[[dict[str, Plain]], list[Series]]] = {
    "validation": _validation,
    "long_context": _long_context,
    "recall": _recall,
    "needle": _needle,
}
