"""Downstream tasks: the lm-evaluation-harness on our models, and as an evaluation."""

import importlib
import json
import math
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import lm as command
from folders import losses, metrics, series
from hypothesis import given, settings
from hypothesis import strategies as st

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import lm  # noqa: E402
from lm.attention import catalogue as opt  # noqa: E402
from lm.config.data_config import TokenizerFile  # noqa: E402
from lm.config.load import to_yaml  # noqa: E402
from lm.config.model_config import Learned  # noqa: E402
from lm.data.prepare import prepare  # noqa: E402
from lm.data.tokenizer import tokenizer_identity  # noqa: E402
from lm.errors import ConfigError, RunError  # noqa: E402
from lm.evaluation.evaluate import evaluate_runs  # noqa: E402
from lm.evaluation.generation import Sampling, generate, text_pieces  # noqa: E402
from lm.evaluation.harness import Downstream, HarnessLM, _restored_random_state  # noqa: E402
from lm.experiments.run_outcome import Outcome  # noqa: E402
from lm.model.decoder import Decoder  # noqa: E402
from lm.model.device import Device  # noqa: E402
from lm.model.spec import ModelSpec  # noqa: E402
from lm.runs.loading import LoadedModel, export  # noqa: E402
from lm.training.train import train  # noqa: E402

CPU = Device(torch.device("cpu"), bf16=False)
NORMALIZERS = [
    opt.Softmax(),
    opt.SSMax(),
    opt.SSMax(n="sample"),
    opt.LogN(n="sample"),
    opt.Relu2(),
    opt.Relu2(n="sample"),
]
CHOICES = [
    ("the cat sat", [" on", " under", " over the"]),
    ("it is", [" a", " b", " cd", " a b"]),
    ("", ["what", "no"]),
] * 2
TEXTS = ["a dab of a fad. " * 12, "bad", "a cab ", "ab cd " * 5]


def made(tiny, normalizer: object = None, max_length: int | None = None, end_tokens: tuple[str, ...] = ()) -> HarnessLM:
    """The tiny model as initialised, with attention sharp enough to tell contexts apart."""
    config = tiny()
    store = prepare(config.data)
    config.model.normalizer = normalizer or opt.Softmax()
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len, seed=1)
    with torch.no_grad():
        for block in decoder.blocks:
            block.attention.qkv.weight.mul_(8)
        decoder.embedding.weight.mul_(20)
    spec = ModelSpec.from_decoder(decoder, end_tokens=end_tokens)
    return HarnessLM(LoadedModel(decoder, spec, store.tokenizer(), store.path), max_length, CPU)


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, argument, 0, ("task", 0, 1)) for argument in arguments]


def log_p(model: HarnessLM, tokens: list[int], last: int) -> tuple[float, bool]:
    """The definition: one sequence, all logits."""
    with torch.no_grad():
        p = F.log_softmax(model.decoder.logits(torch.tensor([tokens[:-1]]))[0].double(), -1)
    p, targets = p[-last:], torch.tensor(tokens[-last:])
    return float(p.gather(1, targets[:, None]).sum()), bool((p.argmax(-1) == targets).all())


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_likelihoods_of_a_batch_are_those_of_single_rows_computed_directly(tiny, normalizer):
    model = made(tiny, normalizer)
    pairs = [(context, choice) for context, choices in CHOICES for choice in choices]
    batched = model.loglikelihood(ask("loglikelihood", *pairs))
    assert len({round(value, 4) for value, _ in batched}) == 9
    for pair, (value, greedy) in zip(pairs, batched, strict=True):
        context, continuation = model.encode_pair(*pair)
        direct, argmax_tokens = log_p(model, context + continuation, len(continuation))
        assert (value, greedy) == (pytest.approx(direct, abs=1e-5), argmax_tokens)
        assert model.loglikelihood(ask("loglikelihood", pair))[0][0] == pytest.approx(value, abs=1e-5)
    batch_values = model.loglikelihood_rolling(ask("loglikelihood_rolling", *((text,) for text in TEXTS)))
    single_values = [model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))[0] for text in TEXTS]
    assert batch_values == pytest.approx(single_values, abs=1e-5)


def test_rows_are_batched_by_length_and_equal_ones_are_computed_once(tiny, monkeypatch):
    monkeypatch.setattr("lm.evaluation.held_out.EVAL_TOKENS", 6)
    model, shapes = made(tiny), []
    forward = model.decoder.forward
    monkeypatch.setattr(
        model.decoder,
        "forward",
        lambda tokens, *arguments, **options: (
            shapes.append(tuple(tokens.shape)),
            forward(tokens, *arguments, **options),
        )[1],
    )
    rows = [([1, 2, 3, 4], 2), ([1, 2, 3, 5], 1), ([1, 2, 9, 4], 1), ([4, 5, 6, 7], 1), ([3, 4], 1), ([3, 5], 1)]
    scores = model.score(rows)
    assert shapes == [(2, 3), (1, 3), (1, 1)]
    monkeypatch.undo()
    assert [-nll for nll, _ in scores] == pytest.approx([log_p(model, *row)[0] for row in rows], abs=1e-5)


def test_only_a_continuation_whose_every_token_is_the_most_probable_is_greedy(tiny):
    model = made(tiny)
    start = [model.prefix_token_id, 70, 71]
    greedy_tokens = list(generate(model.decoder, start, 4, Sampling(temperature=0)))
    other = [*greedy_tokens[:1], (greedy_tokens[1] + 1) % 400, *greedy_tokens[2:]]
    assert [greedy for _, greedy in model.score([(start + greedy_tokens, 4), (start + other, 4)])] == [True, False]


def test_tokens_of_context_and_continuation_spell_both(tiny):
    model = made(tiny)

    @given(context=st.text(max_size=12), continuation=st.text(max_size=12))
    @settings(max_examples=150, deadline=None)
    def check(context: str, continuation: str):
        before, after = model.encode_pair(context, continuation)
        assert before[0] == model.prefix_token_id
        assert model.prefix_token_id not in before[1:] + after
        assert model.tokenizer.decode(before[1:]) == context.rstrip()
        assert model.tokenizer.decode(before[1:] + after) == context + continuation
        assert (not after) == (not continuation and context == context.rstrip())

    check()


def test_an_empty_context_is_the_start_of_a_document(tiny):
    model = made(tiny)
    whole, first, second = model.loglikelihood(
        ask("loglikelihood", ("", "a bad cab"), ("", "a bad"), ("a bad", " cab"))
    )
    assert whole[0] == pytest.approx(first[0] + second[0], abs=1e-5)
    assert whole[0] == pytest.approx(
        log_p(model, [model.prefix_token_id, *model.tok_encode("a bad cab")], len(model.tok_encode("a bad cab")))[0]
    )
    assert model.loglikelihood(ask("loglikelihood", ("", ""), ("a", ""))) == [(0.0, True)] * 2
    assert not model.n_cut


def test_a_long_context_loses_its_left_and_is_counted(tiny):
    model = made(tiny, max_length=8)
    context, continuation = model.encode_pair("a bad cab " * 20, "dab")
    (value, _), (short, _) = model.loglikelihood(ask("loglikelihood", ("a bad cab " * 20, "dab"), ("a", "b")))
    assert value == pytest.approx(log_p(model, (context + continuation)[-9:], len(continuation))[0], abs=1e-5)
    assert value != pytest.approx(log_p(model, context + continuation, len(continuation))[0], abs=1e-3)
    assert (dict(model.n_cut), short < 0) == ({"task": 1}, True)


def test_a_text_longer_than_the_model_takes_is_scored_in_parts_each_token_once(tiny):
    model = made(tiny, max_length=8)
    text = TEXTS[0]
    tokens = [model.prefix_token_id, *model.tok_encode(text)]
    parts, expected = model.split_windows(tokens[:1], tokens[1:]), 0.0
    assert len(parts) == math.ceil((len(tokens) - 1) / 8)
    position = 1
    for row, scored in parts:
        assert row == tokens[position + scored - len(row) : position + scored]
        assert len(row) == 9
        position += scored
        expected += log_p(model, row, scored)[0]
    assert position == len(tokens)
    (rolling,) = model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
    ((value, _),) = model.loglikelihood(ask("loglikelihood", ("", text)))
    assert (rolling, value) == (pytest.approx(expected, abs=1e-4), rolling)
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", ("",))) == [0.0]


def test_text_is_written_as_lm_generate_does_up_to_the_first_stop(tiny):
    model = made(tiny)
    ids = [model.prefix_token_id, *model.tok_encode("a bad")]
    text = model.tokenizer.decode(ids + list(generate(model.decoder, ids, 12, Sampling(temperature=0))))[len("a bad") :]
    limits = [
        {"max_gen_toks": 12},
        {"max_new_tokens": 12, "until": text[5]},
        {"max_gen_toks": 12, "until": [text[7:9], text[3:5]]},
    ]
    texts = model.generate_until(ask("generate_until", *(("a bad", options) for options in limits)))
    assert text.startswith(texts[0])
    assert len(texts[0]) >= len(text) - 1  # the last character may be a part of one
    assert texts[1:] == [text[: text.index(text[5])], text[: min(text.index(text[3:5]), text.index(text[7:9]))]]
    assert not model.n_cut


def test_text_ends_at_the_tokens_that_end_documents(tiny, monkeypatch):
    model = made(tiny, end_tokens=("<|endoftext|>", "~"))
    drawn_ids = iter([*model.tok_encode("a cab"), model.tokenizer.token_to_id("~"), *model.tok_encode("bad")])
    monkeypatch.setattr("lm.evaluation.harness.Continuation.draw", lambda self: [next(drawn_ids)])
    assert model.generate_until(ask("generate_until", ("a bad", {"max_gen_toks": 12}))) == ["a cab"]
    config, models = tiny("eval.downstream.tasks=[]"), []
    store = prepare(config.data)
    config.data.tokenizer = TokenizerFile(str(store.path / "tokenizer.json"), end_tokens=["~"])
    same_tokens = TokenizerFile(config.data.tokenizer.path)
    assert tokenizer_identity(config.data.tokenizer) == tokenizer_identity(same_tokens)
    monkeypatch.setattr("lm.evaluation.harness._evaluate", lambda model, *_: models.append(model) or {"samples": {}})
    measurement = Downstream(config, store)
    measurement.measure(model.decoder, CPU, lambda units: None)
    assert models[0].end_ids == model.end_ids[1:]
    assert measurement.options["end_tokens"] == ["~"]  # other ones are measured again
    with pytest.raises(RunError, match=r"its tokenizer has no token </typo> \(end_tokens\)"):
        made(tiny, end_tokens=("</typo>",))


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_texts_written_together_are_those_written_alone(tiny, normalizer):
    model = made(tiny, normalizer, max_length=64)
    contexts = ["a bad", "a cab", "a dab", "the cab", "", "a bad cab " * 4, "a bad"]
    stop = alone(model, "a cab", {"max_gen_toks": 12})[3:5]
    hows = [
        {"max_gen_toks": 12},
        {"max_gen_toks": 12, "until": [stop, "~"]},
        {"max_gen_toks": 12, "do_sample": True, "top_k": 20},
        {"max_gen_toks": 3},
    ]
    requests = [(context, options) for context in contexts for options in hows]
    texts = model.generate_until(ask("generate_until", *requests))
    for index, ((context, options), text) in enumerate(zip(requests, texts, strict=True)):
        assert text == alone(model, context, options, index), (context, options)
    assert len(set(texts)) > len(contexts)
    assert any(
        len(short) < len(whole) and whole.startswith(short)
        for whole, short in zip(texts[::4], texts[1::4], strict=True)
    )


def test_a_top_k_of_0_keeps_all_tokens_as_elsewhere(tiny):
    model, options = made(tiny), {"max_gen_toks": 4, "do_sample": True}
    texts = [model.generate_until(ask("generate_until", ("a cab", how))) for how in (options, {**options, "top_k": 0})]
    assert texts[0] == texts[1]


def alone(model: HarnessLM, context: str, options: dict, seed: int = 0) -> str:
    """The definition: one text by `generate`, cut before the first stop."""
    ids = [model.prefix_token_id, *model.tok_encode(context)]
    sampling = bool(options.get("do_sample"))
    tokens = generate(
        model.decoder,
        ids,
        options["max_gen_toks"],
        Sampling(1.0 if sampling else 0.0, options.get("top_k"), None, seed),
    )
    text = "".join(list(text_pieces(model.tokenizer, ids, model.end_ids, tokens))[1:])
    return text[: min([text.index(stop) for stop in options.get("until", ()) if stop in text], default=len(text))]


def test_contexts_of_one_length_are_continued_together_and_those_that_have_ended_are_dropped(tiny, monkeypatch):
    model, shapes = made(tiny), []
    context = "a bad"
    stop = alone(model, context, {"max_gen_toks": 8})[2:4]
    forward = model.decoder.forward
    monkeypatch.setattr(
        model.decoder,
        "forward",
        lambda tokens, *arguments, **options: (
            shapes.append(tuple(tokens.shape)),
            forward(tokens, *arguments, **options),
        )[1],
    )
    length = len(model.tok_encode(context)) + 1
    arguments = {"max_gen_toks": 8, "until": stop}
    texts = model.generate_until(
        ask(
            "generate_until",
            (context, arguments),
            ("a bad cab", arguments),
            (context, {"max_gen_toks": 8}),
            (context, arguments),
        )
    )
    assert texts[0] == texts[3] == texts[2][: texts[2].index(stop)]
    of_three = [shape for shape in shapes if shape[0] == 3]
    assert of_three[0] == (3, length), "prompts of one length are read together"
    assert 0 < len(of_three) < 8
    assert shapes.count((1, 1)) >= 8 - len(of_three), "the one without a stop goes on alone"


def test_no_more_tokens_are_held_together_than_of_evaluations(tiny, monkeypatch):
    model, sizes = made(tiny), []
    length = len(model.tok_encode("a bad")) + 1 + 4
    monkeypatch.setattr("lm.evaluation.held_out.EVAL_TOKENS", 2 * length)
    write = model._generate
    monkeypatch.setattr(model, "_generate", lambda texts: (sizes.append(len(texts)), write(texts))[1])
    model.generate_until(ask("generate_until", *[("a bad", {"max_gen_toks": 4})] * 5))
    assert sizes == [2, 2, 1]


def test_draws_follow_from_the_request_and_greedy_wins_without_do_sample(tiny):
    model = made(tiny)
    greedy, sampled = (
        {"max_gen_toks": 8, "do_sample": False, "temperature": 2.0},
        {"max_gen_toks": 8, "do_sample": True},
    )
    requests = ask(
        "generate_until",
        ("a", greedy),
        ("a", {"max_gen_toks": 8}),
        ("a", sampled),
        ("a", sampled),
        ("a", {**sampled, "top_k": 1}),
    )
    first, second = (model.generate_until(requests) for _ in range(2))
    assert first == second
    assert first[0] == first[1] == first[4]
    assert first[2] != first[3] != first[0]
    with pytest.raises(ConfigError, match=r"generation_kwargs\.repetition_penalty = 2: not supported; task task"):
        model.generate_until(ask("generate_until", ("a", {"repetition_penalty": 2})))


def test_context_and_new_tokens_share_max_length(tiny, monkeypatch):
    model, lengths = made(tiny, max_length=16), []
    monkeypatch.setattr(
        model,
        "_generate",
        lambda texts: lengths.extend((len(text.ids), text.max_new_tokens) for text in texts) or [""] * len(texts),
    )
    long = "a bad cab " * 20
    model.generate_until(
        ask("generate_until", ("a", {}), (long, {}), (long, {"max_gen_toks": 4}), ("a", {"max_gen_toks": 4}))
    )
    assert lengths == [(2, 14), (8, 8), (12, 4), (2, 4)]
    assert (dict(model.n_cut), dict(model.n_shortened)) == ({"task": 2}, {"task": 2})


def test_a_length_the_model_cannot_take_is_refused(tiny):
    with pytest.raises(ConfigError, match="must be 2 or more"):
        made(tiny, max_length=1)
    source = made(tiny)
    source.decoder.config.position = Learned()
    copy = LoadedModel(source.decoder, ModelSpec.from_decoder(source.decoder), source.tokenizer, Path())
    with pytest.raises(ConfigError, match="learned positions end at 32"):
        HarnessLM(copy, max_length=33)
    with pytest.raises(RunError, match="no tokenizer"):
        HarnessLM(LoadedModel(source.decoder, ModelSpec.from_decoder(source.decoder), None, Path()))


# ---------------------------------------------------------------- the harness's tasks


DOCUMENTS = {
    "choice": [
        {"text": text, "choices": choices[:2], "answer": index % 2} for index, (text, choices) in enumerate(CHOICES)
    ],
    "rolling": [{"text": text} for text in TEXTS],
    "write": [{"text": "a bad", "answer": "?"}, {"text": "the", "answer": "?"}],
}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture
def include(tmp_path: Path, monkeypatch) -> Path:
    """A folder of the three tasks `our_choice`, `our_rolling`, `our_write`, and nothing of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, documents in DOCUMENTS.items():
        lines = [json.dumps(document) + "\n" for document in documents]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
        }
        task = {"task": f"our_{name}", **source, "fewshot_split": "test", **TASKS[name], "metadata": {"version": 3}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def scored(
    source: Path, include: Path, tasks: list[str], extra: str = "", files: tuple[Path, ...] = (), **options: str
) -> dict[str, float]:
    """The metrics of tasks by `task/metric`, as `lm eval` measures them."""
    override = f"eval.downstream={{tasks: [{', '.join(tasks)}], include_path: {include}{extra and ', '}{extra}}}"
    evaluations = [
        result.evaluation
        for result in evaluate_runs([source, *files], overrides=[override, "trainer.accelerator=cpu"], **options)
    ]
    return {
        f"{curve.what}/{curve.metric}": float(curve.means[0])
        for evaluation in evaluations
        if evaluation.kind == "downstream"
        for curve in evaluation.series
    }


def test_scores_are_those_of_our_own_functions(tiny, include, monkeypatch):
    config = tiny("name=scored")
    train(config)
    source = lm.load(config.run_folder)
    model = HarnessLM(source, device=CPU)
    texts = model.generate_until(
        ask(
            "generate_until",
            *((document["text"], {"max_gen_toks": 6, "until": "\n"}) for document in DOCUMENTS["write"]),
        )
    )
    (include / "write.jsonl").write_text(
        "".join(json.dumps({"text": d["text"], "answer": texts[0]}) + "\n" for d in DOCUMENTS["write"])
    )

    result = scored(config.run_folder, include, ["our_choice", "our_rolling", "our_write"])
    right = 0
    for document in DOCUMENTS["choice"]:
        pairs = [model.encode_pair(document["text"], choice) for choice in document["choices"]]
        values = [log_p(model, a + b, len(b))[0] for a, b in pairs]
        right += values.index(max(values)) == document["answer"]
    assert result["our_choice/acc"] == pytest.approx(right / len(DOCUMENTS["choice"]))
    total = 0.0
    for text in TEXTS:
        tokens = model.tok_encode(text)
        total += sum(log_p(model, *row)[0] for row in model.split_windows([model.prefix_token_id], tokens))
    perplexity = math.exp(-total / sum(len(text.encode()) for text in TEXTS))
    assert result["our_rolling/byte_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["our_write/exact_match"] == (0.5 if texts[0] != texts[1] else 1.0)
    checkpoint = config.run_folder / "checkpoints" / "step-000008.ckpt"
    assert (
        scored(config.run_folder, include, ["our_rolling"], checkpoint=str(checkpoint))["our_rolling/byte_perplexity"]
        == result["our_rolling/byte_perplexity"]
    )
    scored(config.run_folder, include, ["our_choice"], "num_fewshot: 2, limit: 3, max_length: 4")
    (amount,) = {curve.shown.amount for curve in series(config.run_folder, "downstream", 8)}
    assert amount.startswith("3 of our_choice, "), "the requests that were too long are counted"
    assert amount.endswith(" requests lost tokens on the left")


def test_broken_tasks_and_settings_are_told_in_one_line(tiny, include):
    config = tiny("name=broken", "trainer.max_steps=4")
    train(config)
    folder = config.run_folder
    for place, extra, words in (
        (include, "num_fewshot: 10000", r"eval\.downstream\.num_fewshot = 10000: must be >= 0 and <= 1000"),
        (Path("nowhere"), "", r"eval\.downstream\.include_path = 'nowhere': no such folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            scored(folder, place, ["our_choice"], extra)
    (include / "choice.jsonl").unlink()
    with pytest.raises(RunError, match="our_choice: the harness failed: FileNotFoundError") as error:
        scored(folder, include, ["our_choice"])
    assert "\n" not in str(error.value)
    assert not (folder / "evaluations" / "downstream.step-000004.json").exists()


@pytest.mark.parametrize("normalizer", ["softmax", "ssmax"])
def test_an_export_for_transformers_has_our_scores_by_the_name_hf(tiny, include, tmp_path: Path, normalizer: str):
    config = tiny("name=exported", f"model.normalizer={normalizer}", "trainer.max_steps=4")
    train(config)
    out = tmp_path / "hf"
    assert command("export", str(config.run_folder), "--format", "hf", "-o", str(out)).returncode == 0
    tasks = ["our_choice", "our_rolling"]
    our_scores = scored(config.run_folder, include, tasks)
    manager = TaskManager(include_path=str(include), include_defaults=False)
    importlib.import_module("lm_eval.models")  # registers them
    arguments = f"pretrained={out},trust_remote_code=True,device=cpu,dtype=float32"
    # The harness puts the token that starts a document before a text by itself where it scores all of it.
    for task, metric, extra in (("our_choice", "acc", ""), ("our_rolling", "byte_perplexity", ",add_bos_token=False")):
        results = lm_eval.simple_evaluate(
            model="hf", model_args=arguments + extra, tasks=[task], task_manager=manager, log_samples=False
        )
        assert results["results"][task][f"{metric},none"] == pytest.approx(our_scores[f"{task}/{metric}"], rel=1e-4)


def test_an_unknown_task_is_refused_with_the_nearest(tiny, include):
    config = tiny("name=commanded", "trainer.max_steps=4")
    train(config)
    override = f"eval.downstream={{tasks: [our_choise], include_path: {include}}}"
    wrong = command("eval", str(config.run_folder), override)
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "error: eval.downstream.tasks = 'our_choise': no such task; did you mean our_choice?\n",
    )


def test_tasks_are_an_evaluation_whose_metrics_have_a_value_for_each_document(tiny, include):
    override = f"eval.downstream={{tasks: [our_choice, our_rolling, our_write], include_path: {include}, every: 4}}"
    config, plain = tiny("name=run", override, "model.dropout=0.2"), tiny("name=plain", "model.dropout=0.2")
    train(config)
    train(plain)
    assert losses(config.run_folder) == losses(plain.run_folder)  # the random state of training stays as it is
    logged = next(line for line in reversed(metrics(config.run_folder)) if "downstream/our_choice/acc" in line)
    scores = scored(config.run_folder, include, ["our_choice", "our_rolling", "our_write"], "every: 4")
    assert {name: logged[f"downstream/{name}"] for name in scores} == pytest.approx(scores)
    curves = {curve.what: curve for curve in series(config.run_folder, "downstream", 8)}
    (sample,) = curves["our_choice"].samples
    assert (sample.values.shape, curves["our_choice"].unit, curves["our_choice"].better) == (
        (6, 1),
        "fraction",
        "higher",
    )
    assert not curves["our_rolling"].samples  # no mean over documents
    outcome = Outcome(config.run_folder, 8, "downstream/our_choice/acc")
    assert outcome.values("downstream/our_choice/acc").mean == pytest.approx(logged["downstream/our_choice/acc"])
    result = command("eval", str(config.run_folder), "--json")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in json.loads(result.stdout) if (line["kind"], line["metric"]) == ("downstream", "acc")]
    assert (line["where"], line["value"]) == ("our_choice", pytest.approx(logged["downstream/our_choice/acc"]))


def test_tasks_that_take_too_long_are_given_up(tiny, include):
    config = tiny("name=late", f"eval.downstream={{tasks: [our_choice], include_path: {include}, max_seconds: 1e-6}}")
    train(config)
    assert metrics(config.run_folder)[-1]["downstream/failed"] == "took longer than its max_seconds"


def test_a_measurement_that_fails_leaves_the_random_states_as_they_were():
    python_state = random.getstate()
    with suppress(TimeoutError), _restored_random_state():
        random.seed(1234)
        raise TimeoutError
    assert random.getstate() == python_state


def test_no_standard_error_is_bootstrapped_as_none_is_kept(tiny, include, monkeypatch):
    task = yaml.safe_load((include / "choice.yaml").read_text())
    perplexity = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}  # as of LAMBADA
    last_word = {"task": "our_word", "output_type": "loglikelihood", "doc_to_target": "a", "metric_list": [perplexity]}
    (include / "word.yaml").write_text(yaml.safe_dump({**task, **last_word, "doc_to_choice": None}))
    monkeypatch.delattr("lm_eval.api.metrics.bootstrap_stderr")
    config = tiny("name=run", "trainer.max_steps=4")
    train(config)
    assert scored(config.run_folder, include, ["our_word"])["our_word/perplexity"] > 1


def test_metadata_reaches_the_tasks_and_the_record(tiny, include):
    config = tiny("name=run", "trainer.max_steps=4")
    train(config)
    (include / "made.py").write_text(
        "import datasets\n\n\ndef load(**given):\n"
        "    rows = [{'text': 'the', 'choices': [' a', ' b'], 'answer': 0}] * given['number']\n"
        "    return {'test': datasets.Dataset.from_list(rows)}\n"
    )
    task = "task: our_made\ncustom_dataset: !function made.load\ntest_split: test\n" + yaml.safe_dump(TASKS["choice"])
    (include / "made.yaml").write_text(task)
    scored(config.run_folder, include, ["our_made"], "metadata: {number: 5}")
    assert {len(curve.samples[0].values) for curve in series(config.run_folder, "downstream", 4)} == {5}


def test_a_group_stands_for_its_tasks(tiny, include, monkeypatch):
    config = tiny("name=grouped")
    train(config)
    group = {
        "group": "ours",
        "task": ["our_choice", "our_write"],
        "aggregate_metric_list": [{"metric": "acc"}],
        "metadata": {"version": 1},
    }
    (include / "ours.yaml").write_text(yaml.safe_dump(group))
    manager = TaskManager(
        include_path=str(include), include_defaults=False
    )  # without the harness's own tasks, to save time
    monkeypatch.setattr("lm.evaluation.harness._find_tasks", lambda config: (config.tasks, manager))
    assert {name.partition("/")[0] for name in scored(config.run_folder, include, ["ours"])} == {
        "our_choice",
        "our_write",
    }


def test_an_export_scores_as_its_run(tiny, include, tmp_path):
    config = tiny("name=source")
    train(config)
    exported, text = export(config.run_folder, "last", tmp_path / "exported"), tmp_path / "text.yaml"
    text.write_text(to_yaml(config))
    assert scored(exported, include, ["our_rolling"], files=(text,)) == scored(
        config.run_folder, include, ["our_rolling"]
    )


def test_without_the_extra_the_error_names_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lm.evaluation.harness")
    with pytest.raises(RunError, match=r"need lm-eval .*; run: pip install 'lm-eval>=0.4.9'"):
        import lm.evaluation.harness  # noqa: F401
