"""Downstream tasks: the lm-evaluation-harness on our models, and `lm harness`."""

import importlib
import json
import math
import sys
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
from lm.commands.model_commands import print_tasks  # noqa: E402
from lm.config.model_config import Learned  # noqa: E402
from lm.data.prepare import prepare  # noqa: E402
from lm.errors import ConfigError, RunError  # noqa: E402
from lm.evaluation.generation import generate, pieces  # noqa: E402
from lm.evaluation.harness import HarnessLM, run_tasks  # noqa: E402
from lm.experiments.run_outcome import Outcome  # noqa: E402
from lm.model.decoder import Decoder  # noqa: E402
from lm.model.device import Device  # noqa: E402
from lm.model.spec import ModelSpec  # noqa: E402
from lm.runs.folder import read_sealed  # noqa: E402
from lm.runs.loading import Loaded, export  # noqa: E402
from lm.runs.record import read_run  # noqa: E402
from lm.training.train import train  # noqa: E402

CPU = Device(torch.device("cpu"), bf16=False)
NORMALIZERS = [opt.Softmax(), opt.SSMax(), opt.SSMax(n="sample"), opt.LogN(n="sample"), opt.Relu2(), opt.Relu2(n="sample")]
CHOICES = [("the cat sat", [" on", " under", " over the"]), ("it is", [" a", " b", " cd", " a b"]), ("", ["what", "no"])] * 2
TEXTS = ["a dab of a fad. " * 12, "bad", "a cab ", "ab cd " * 5]


def made(tiny, normalizer: object = None, max_length: int | None = None) -> HarnessLM:
    """The tiny model as initialised, with attention sharp enough to tell contexts apart."""
    config = tiny()
    store = prepare(config.data)
    config.model.normalizer = normalizer or opt.Softmax()
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len, seed=1)
    with torch.no_grad():
        for block in decoder.blocks:
            block.attention.qkv.weight.mul_(8)
        decoder.embedding.weight.mul_(20)
    return HarnessLM(Loaded(decoder, ModelSpec.of(decoder), store.tokenizer(), store.path), max_length, CPU)


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, 0, ("task", 0, 1)) for one in arguments]


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
    together = model.loglikelihood_rolling(ask("loglikelihood_rolling", *((text,) for text in TEXTS)))
    alone = [model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))[0] for text in TEXTS]
    assert together == pytest.approx(alone, abs=1e-5)


def test_rows_are_batched_by_length_and_equal_ones_are_computed_once(tiny, monkeypatch):
    monkeypatch.setattr("lm.evaluation.held_out.EVAL_TOKENS", 6)
    model, shapes = made(tiny), []
    forward = model.decoder.forward
    monkeypatch.setattr(model.decoder, "forward", lambda tokens, *more: (shapes.append(tuple(tokens.shape)), forward(tokens, *more))[1])
    rows = [([1, 2, 3, 4], 2), ([1, 2, 3, 5], 1), ([1, 2, 9, 4], 1), ([4, 5, 6, 7], 1), ([3, 4], 1), ([3, 5], 1)]
    found = model.score(rows)
    assert shapes == [(2, 3), (1, 3), (1, 1)]
    monkeypatch.undo()
    assert [-nll for nll, _ in found] == pytest.approx([log_p(model, *row)[0] for row in rows], abs=1e-5)


def test_only_a_continuation_whose_every_token_is_the_most_probable_is_greedy(tiny):
    model = made(tiny)
    start = [model.prefix_token_id, 70, 71]
    likely = list(generate(model.decoder, start, 4, temperature=0))
    other = [*likely[:1], (likely[1] + 1) % 400, *likely[2:]]
    assert [greedy for _, greedy in model.score([(start + likely, 4), (start + other, 4)])] == [True, False]


def test_tokens_of_context_and_continuation_spell_both(tiny):
    model = made(tiny)

    @given(context=st.text(max_size=12), continuation=st.text(max_size=12))
    @settings(max_examples=150, deadline=None)
    def check(context: str, continuation: str):
        before, after = model.encode_pair(context, continuation)
        assert before[0] == model.eot_token_id
        assert model.eot_token_id not in before[1:] + after
        assert model.tokenizer.decode(before[1:]) == context.rstrip()
        assert model.tokenizer.decode(before[1:] + after) == context + continuation
        assert (not after) == (not continuation and context == context.rstrip())

    check()


def test_an_empty_context_is_the_start_of_a_document(tiny):
    model = made(tiny)
    whole, first, then = model.loglikelihood(ask("loglikelihood", ("", "a bad cab"), ("", "a bad"), ("a bad", " cab")))
    assert whole[0] == pytest.approx(first[0] + then[0], abs=1e-5)
    assert whole[0] == pytest.approx(
        log_p(model, [model.eot_token_id, *model.tok_encode("a bad cab")], len(model.tok_encode("a bad cab")))[0]
    )
    assert model.loglikelihood(ask("loglikelihood", ("", ""), ("a", ""))) == [(0.0, True)] * 2
    assert not model.cut


def test_a_long_context_loses_its_left_and_is_counted(tiny):
    model = made(tiny, max_length=8)
    context, continuation = model.encode_pair("a bad cab " * 20, "dab")
    (value, _), (short, _) = model.loglikelihood(ask("loglikelihood", ("a bad cab " * 20, "dab"), ("a", "b")))
    assert value == pytest.approx(log_p(model, (context + continuation)[-9:], len(continuation))[0], abs=1e-5)
    assert value != pytest.approx(log_p(model, context + continuation, len(continuation))[0], abs=1e-3)
    assert (dict(model.cut), short < 0) == ({"task": 1}, True)


def test_a_text_longer_than_the_model_takes_is_scored_in_parts_each_token_once(tiny):
    model = made(tiny, max_length=8)
    text = TEXTS[0]
    tokens = [model.prefix_token_id, *model.tok_encode(text)]
    parts, expected = model.parts(tokens[:1], tokens[1:]), 0.0
    assert len(parts) == math.ceil((len(tokens) - 1) / 8)
    done = 1
    for row, scored in parts:
        assert row == tokens[done + scored - len(row) : done + scored]
        assert len(row) == 9
        done += scored
        expected += log_p(model, row, scored)[0]
    assert done == len(tokens)
    (rolling,) = model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
    ((value, _),) = model.loglikelihood(ask("loglikelihood", ("", text)))
    assert (rolling, value) == (pytest.approx(expected, abs=1e-4), rolling)
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", ("",))) == [0.0]


def test_text_is_written_as_lm_generate_does_up_to_the_first_stop(tiny):
    model = made(tiny)
    ids = [model.prefix_token_id, *model.tok_encode("a bad")]
    text = model.tokenizer.decode(ids + list(generate(model.decoder, ids, 12, temperature=0)))[len("a bad") :]
    asked = [{"max_gen_toks": 12}, {"max_new_tokens": 12, "until": text[5]}, {"max_gen_toks": 12, "until": [text[7:9], text[3:5]]}]
    written = model.generate_until(ask("generate_until", *(("a bad", how) for how in asked)))
    assert text.startswith(written[0])
    assert len(written[0]) >= len(text) - 1  # the last character may be a part of one
    assert written[1:] == [text[: text.index(text[5])], text[: min(text.index(text[3:5]), text.index(text[7:9]))]]
    assert not model.cut


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
    asked = [(context, how) for context in contexts for how in hows]
    together = model.generate_until(ask("generate_until", *asked))
    for index, ((context, how), text) in enumerate(zip(asked, together, strict=True)):
        assert text == alone(model, context, how, index), (context, how)
    assert len(set(together)) > len(contexts)
    assert any(len(short) < len(whole) and whole.startswith(short) for whole, short in zip(together[::4], together[1::4], strict=True))


def alone(model: HarnessLM, context: str, how: dict, seed: int = 0) -> str:
    """The definition: one text by `generate`, cut before the first stop."""
    ids = [model.prefix_token_id, *model.tok_encode(context)]
    drawn = bool(how.get("do_sample"))
    tokens = generate(model.decoder, ids, how["max_gen_toks"], 1.0 if drawn else 0.0, how.get("top_k"), None, seed)
    text = "".join(list(pieces(model.tokenizer, ids, model.eot_token_id, tokens))[1:])
    return text[: min([text.index(stop) for stop in how.get("until", ()) if stop in text], default=len(text))]


def test_contexts_of_one_length_are_continued_together_and_those_that_have_ended_are_dropped(tiny, monkeypatch):
    model, shapes = made(tiny), []
    context = "a bad"
    stop = alone(model, context, {"max_gen_toks": 8})[2:4]
    forward = model.decoder.forward
    monkeypatch.setattr(
        model.decoder, "forward", lambda tokens, *more, **how: (shapes.append(tuple(tokens.shape)), forward(tokens, *more, **how))[1]
    )
    length = len(model.tok_encode(context)) + 1
    until = {"max_gen_toks": 8, "until": stop}
    texts = model.generate_until(
        ask("generate_until", (context, until), ("a bad cab", until), (context, {"max_gen_toks": 8}), (context, until))
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
    write = model._write
    monkeypatch.setattr(model, "_write", lambda texts: (sizes.append(len(texts)), write(texts))[1])
    model.generate_until(ask("generate_until", *[("a bad", {"max_gen_toks": 4})] * 5))
    assert sizes == [2, 2, 1]


def test_draws_follow_from_the_request_and_greedy_wins_without_do_sample(tiny):
    model = made(tiny)
    greedy, drawn = {"max_gen_toks": 8, "do_sample": False, "temperature": 2.0}, {"max_gen_toks": 8, "do_sample": True}
    requests = ask("generate_until", ("a", greedy), ("a", {"max_gen_toks": 8}), ("a", drawn), ("a", drawn), ("a", {**drawn, "top_k": 1}))
    first, again = (model.generate_until(requests) for _ in range(2))
    assert first == again
    assert first[0] == first[1] == first[4]
    assert first[2] != first[3] != first[0]
    with pytest.raises(ConfigError, match=r"generation_kwargs\.repetition_penalty = 2: not supported; task task"):
        model.generate_until(ask("generate_until", ("a", {"repetition_penalty": 2})))


def test_context_and_new_tokens_share_max_length(tiny, monkeypatch):
    model, seen = made(tiny, max_length=16), []
    monkeypatch.setattr(model, "_write", lambda texts: seen.extend((len(text.ids), text.new) for text in texts) or [""] * len(texts))
    long = "a bad cab " * 20
    model.generate_until(ask("generate_until", ("a", {}), (long, {}), (long, {"max_gen_toks": 4}), ("a", {"max_gen_toks": 4})))
    assert seen == [(2, 14), (8, 8), (12, 4), (2, 4)]
    assert (dict(model.cut), dict(model.shortened)) == ({"task": 2}, {"task": 2})


def test_a_length_the_model_cannot_take_is_refused(tiny):
    with pytest.raises(ConfigError, match="must be 2 or more"):
        made(tiny, max_length=1)
    loaded = made(tiny)
    loaded.decoder.config.position = Learned()
    again = Loaded(loaded.decoder, ModelSpec.of(loaded.decoder), loaded.tokenizer, Path())
    with pytest.raises(ConfigError, match="learned positions end at 32"):
        HarnessLM(again, max_length=33)
    with pytest.raises(RunError, match="no tokenizer"):
        HarnessLM(Loaded(loaded.decoder, ModelSpec.of(loaded.decoder), None, Path()))


# ---------------------------------------------------------------- the harness's tasks


DOCUMENTS = {
    "choice": [{"text": text, "choices": choices[:2], "answer": index % 2} for index, (text, choices) in enumerate(CHOICES)],
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
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}, "test_split": "test"}
        task = {"task": f"our_{name}", **source, "fewshot_split": "test", **TASKS[name], "metadata": {"version": 3}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def test_scores_are_those_of_our_own_functions(tiny, include, monkeypatch):
    config = tiny("name=scored")
    train(config)
    loaded = lm.load(config.run_folder)
    model = HarnessLM(loaded, where=CPU)
    texts = model.generate_until(ask("generate_until", *((one["text"], {"max_gen_toks": 6, "until": "\n"}) for one in DOCUMENTS["write"])))
    (include / "write.jsonl").write_text("".join(json.dumps({"text": d["text"], "answer": texts[0]}) + "\n" for d in DOCUMENTS["write"]))

    result, _ = run_tasks(config.run_folder, ["our_choice", "our_rolling", "our_write"], include_path=include)
    right = 0
    for one in DOCUMENTS["choice"]:
        pairs = [model.encode_pair(one["text"], choice) for choice in one["choices"]]
        values = [log_p(model, a + b, len(b))[0] for a, b in pairs]
        right += values.index(max(values)) == one["answer"]
    assert result["tasks"]["our_choice"]["metrics"]["acc"] == pytest.approx(right / len(DOCUMENTS["choice"]))
    total = 0.0
    for text in TEXTS:
        tokens = model.tok_encode(text)
        total += sum(log_p(model, *row)[0] for row in model.parts([model.eot_token_id], tokens))
    perplexity = math.exp(-total / sum(len(text.encode()) for text in TEXTS))
    assert result["tasks"]["our_rolling"]["metrics"]["byte_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["tasks"]["our_write"]["metrics"]["exact_match"] == (0.5 if texts[0] != texts[1] else 1.0)

    kept = read_sealed(config.run_folder / "evaluations" / "harness.step-000008.json")
    assert kept == result
    assert {key: kept[key] for key in ("kind", "step", "checkpoint")} == {"kind": "harness", "step": 8, "checkpoint": "last.ckpt"}
    one = dict(kept["tasks"]["our_choice"])
    assert one.pop("metrics").keys() == {"acc", "acc_stderr"}
    version = lm_eval.__version__ if hasattr(lm_eval, "__version__") else one["lm_eval"]
    assert one == {
        "version": 3,
        "num_fewshot": 0,
        "documents": 6,
        "limit": None,
        "max_length": 32,
        "precision": "32",
        "lm_eval": version,
        "requests_cut": 0,
        "requests_shortened": 0,
        "higher_is_better": {"acc": True},
    }
    # another task or setting is added to the file; what it had stays
    run_tasks(config.run_folder, ["our_choice"], include_path=include, num_fewshot=2, limit=3, max_length=64)
    kept = json.loads((config.run_folder / "evaluations" / "harness.step-000008.json").read_text())
    assert kept["tasks"].keys() == {"our_choice", "our_rolling", "our_write"}
    settings = [kept["tasks"]["our_choice"][key] for key in ("num_fewshot", "limit", "documents", "max_length")]
    assert settings == [2, 3, 3, 64]
    assert "validation" in {each.kind for each in read_run(config.run_folder).evaluations}

    by_name = lm_eval.simple_evaluate(
        model="lm",
        model_args=f"path={config.run_folder},checkpoint=last,max_length=32",
        tasks=["our_choice"],
        task_manager=TaskManager(include_path=str(include), include_defaults=False),
        device="cpu",
        batch_size=4,
    )
    assert by_name["results"]["our_choice"]["acc,none"] == result["tasks"]["our_choice"]["metrics"]["acc"]
    with pytest.raises(ConfigError, match="maxlen = 3: not a key of model_args"):
        HarnessLM.create_from_arg_string(f"path={config.run_folder},maxlen=3")


def test_broken_tasks_and_settings_are_told_in_one_line(tiny, include):
    config = tiny("name=broken", "trainer.max_steps=4")
    train(config)
    folder = config.run_folder
    with pytest.raises(ConfigError, match=r"--tasks = '': names no task\n  --limit = 0: must be above 0 and"):
        run_tasks(folder, [], include_path=include, limit=0)
    with pytest.raises(ConfigError, match=r"--num-fewshot = .*\n  --limit = inf: .*\n  --max-length = 1: must be from 2"):
        run_tasks(folder, ["our_choice"], include_path=include, num_fewshot=10**30, limit=math.inf, max_length=1)
    with pytest.raises(ConfigError, match=r"model\.n_head = '4': can't be changed"):
        run_tasks(folder, ["our_choice"], include_path=include, overrides=["model.n_head=4"])
    with pytest.raises(RunError, match=r"steps saved"):
        run_tasks(folder, ["our_choice"], checkpoint="7", include_path=include)
    (include / "choice.jsonl").unlink()
    with pytest.raises(RunError, match="our_choice: the harness failed: FileNotFoundError") as found:
        run_tasks(folder, ["our_choice"], include_path=include)
    assert "\n" not in str(found.value)
    assert not (folder / "evaluations" / "harness.step-000004.json").exists()


@pytest.mark.parametrize("normalizer", ["softmax", "ssmax"])
def test_an_export_for_transformers_has_our_scores_by_the_name_hf(tiny, include, tmp_path: Path, normalizer: str):
    config = tiny("name=exported", f"model.normalizer={normalizer}", "trainer.max_steps=4")
    train(config)
    out = tmp_path / "hf"
    assert command("export", str(config.run_folder), "--format", "hf", "-o", str(out)).returncode == 0
    tasks = ["our_choice", "our_rolling"]
    ours, _ = run_tasks(config.run_folder, tasks, include_path=include, out=tmp_path / "scores.json")
    manager = TaskManager(include_path=str(include), include_defaults=False)
    importlib.import_module("lm_eval.models")  # registers them
    arguments = f"pretrained={out},trust_remote_code=True,device=cpu,dtype=float32"
    # The harness puts the token that starts a document before a text by itself where it scores all of it.
    for task, metric, more in (("our_choice", "acc", ""), ("our_rolling", "byte_perplexity", ",add_bos_token=False")):
        theirs = lm_eval.simple_evaluate(model="hf", model_args=arguments + more, tasks=[task], task_manager=manager, log_samples=False)
        assert theirs["results"][task][f"{metric},none"] == pytest.approx(ours["tasks"][task]["metrics"][metric], rel=1e-4)


def test_lm_harness_from_the_command_line(tiny, include):
    config = tiny("name=commanded", "trainer.max_steps=4")
    train(config)
    options = ["--include-path", str(include), "trainer.threads=1"]
    result = command("harness", str(config.run_folder), "--tasks", "our_choice,our_write", "--limit", "2", *options)
    kept = config.run_folder / "evaluations" / "harness.step-000004.json"
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, str(kept)), result.stderr
    assert "our_choice" in result.stdout
    assert "acc ↑" in result.stdout
    assert json.loads(kept.read_text())["tasks"]["our_choice"]["documents"] == 2
    wrong = command("harness", str(config.run_folder), "--tasks", "our_choise", *options)
    assert (wrong.returncode, wrong.stderr) == (2, "error: --tasks = 'our_choise': no such task; did you mean our_choice?\n")


def test_tasks_are_an_evaluation_whose_metrics_have_a_value_for_each_document(tiny, include):
    asked = f"eval.downstream={{tasks: [our_choice, our_rolling, our_write], include_path: {include}, every: 4}}"
    config, plain = tiny("name=run", asked, "model.dropout=0.2"), tiny("name=plain", "model.dropout=0.2")
    train(config)
    train(plain)
    assert losses(config.run_folder) == losses(plain.run_folder)  # the random state of training stays as it is
    result, _ = run_tasks(config.run_folder, ["our_choice", "our_rolling", "our_write"], include_path=include)
    logged = next(line for line in reversed(metrics(config.run_folder)) if "downstream/our_choice/acc" in line)
    names = {"our_choice": "acc", "our_rolling": "byte_perplexity", "our_write": "exact_match"}
    for task, metric in names.items():
        assert logged[f"downstream/{task}/{metric}"] == pytest.approx(result["tasks"][task]["metrics"][metric])
    found = {one.what: one for one in series(config.run_folder, "downstream", 8)}
    (sample,) = found["our_choice"].samples
    assert (sample.values.shape, found["our_choice"].unit, found["our_choice"].better) == ((6, 1), "fraction", "higher")
    assert not found["our_rolling"].samples  # no mean over documents
    outcome = Outcome(config.run_folder, 8, "downstream/our_choice/acc")
    assert outcome.values("downstream/our_choice/acc").mean == pytest.approx(logged["downstream/our_choice/acc"])
    again = command("eval", str(config.run_folder), "--json")
    assert again.returncode == 0, again.stderr
    (line,) = [line for line in json.loads(again.stdout) if (line["kind"], line["metric"]) == ("downstream", "acc")]
    assert (line["where"], line["value"]) == ("our_choice", pytest.approx(logged["downstream/our_choice/acc"]))


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
    options = ["--include-path", str(include), "--metadata", "{number: 5}"]
    ended = command("harness", str(config.run_folder), "--tasks", "our_made", *options)
    assert ended.returncode == 0, ended.stderr
    kept = json.loads((config.run_folder / "evaluations" / "harness.step-000004.json").read_text())["tasks"]["our_made"]
    assert (kept["documents"], kept["metadata"]) == (5, {"number": 5})
    wrong = command("harness", str(config.run_folder), "--tasks", "our_made", "--metadata", "five")
    assert (wrong.returncode, wrong.stderr) == (2, "error: --metadata = 'five': must be a map; write it as '{name: value}'\n")


def test_a_group_is_kept_with_its_tasks(tiny, include, monkeypatch, capsys):
    config = tiny("name=grouped")
    train(config)
    group = {"group": "ours", "task": ["our_choice", "our_write"], "aggregate_metric_list": [{"metric": "acc"}], "metadata": {"version": 1}}
    (include / "ours.yaml").write_text(yaml.safe_dump(group))
    manager = TaskManager(include_path=str(include), include_defaults=False)  # without the harness's own tasks, to save time
    monkeypatch.setattr("lm.evaluation.harness._find", lambda tasks, include_path, metadata=None: (tasks, manager))
    result, _ = run_tasks(config.run_folder, ["ours"], include_path=include)
    assert result["tasks"].keys() == {"our_choice", "our_write"}
    assert result["groups"]["ours"]["tasks"] == ["our_choice", "our_write"]
    assert result["groups"]["ours"]["metrics"]["acc"] == result["tasks"]["our_choice"]["metrics"]["acc"]
    print_tasks(result, config.run_folder)
    assert " ours " in capsys.readouterr().out


def test_an_export_and_a_checkpoint_score_as_their_run(tiny, include, tmp_path):
    config = tiny("name=source")
    train(config)
    exported, file = export(config.run_folder, "last", tmp_path / "exported"), tmp_path / "out" / "result.json"
    results = [
        run_tasks(source, ["our_rolling"], include_path=include, out=file)[0]
        for source in (config.run_folder, exported, config.run_folder / "checkpoints" / "step-000008.ckpt")
    ]
    assert results[0]["tasks"] == results[1]["tasks"] == results[2]["tasks"]
    assert json.loads(file.read_text()) == results[2]
    assert not list(config.run_folder.glob("evaluations/harness*"))
    run_tasks(exported, ["our_rolling"], include_path=include)
    assert not (exported / "evaluations").exists()


def test_without_the_extra_the_error_names_it(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lm.evaluation.harness")
    with pytest.raises(RunError, match=r"need lm-eval .*; run: pip install 'lm-eval>=0.4.9'"):
        import lm.evaluation.harness  # noqa: F401
