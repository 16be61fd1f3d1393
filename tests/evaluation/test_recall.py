"""Recall: accuracy and loss of a task's answers, and runs that train on tasks."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from folders import curves_of, measure_curves

from lm.config.data_config import MQAR, Needle, Task
from lm.config.load import load_config
from lm.config.model_config import ModelConfig
from lm.data.batches import NO_TARGET, train_loader, train_sequences
from lm.data.prepare import prepare
from lm.data.tasks import Draw, Example, make_example
from lm.errors import ConfigError
from lm.evaluation import answers
from lm.evaluation.answers import Recall, answer_token_losses_and_hits
from lm.evaluation.held_out import Validation, validation_sequences
from lm.evaluation.measurement import HeldOutSequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.report.evaluation_tables import EvaluationResult
from lm.training.train import train

CPU = Device(torch.device("cpu"), bf16=False)
RECALL = "data.tasks=[{task: {name: mqar, keys: 8, values: 8, filler: 8, pairs: 4, queries: 4}}]"
SYMBOLS = [RECALL, "eval.long_context.length_factor=0", "eval.recall={length_factors: [1, 2], sequences: 8}"]
NEEDLE = "data.tasks=[{weight: 0.25, task: needle}]"


# ---------------------------------------------------------------- measuring


def sequences(task: Task, length: int, count: int) -> list[Example]:
    """The first test sequences of a task."""
    return [make_example(task, 0, index, length, "test") for index in range(count)]


def copies(task: Task, length: int, count: int) -> list[Example]:
    """Sequences of the task's symbols that end as they begin: an answer of six tokens."""
    drawn = [Draw(0, "test", index).integers(task.vocab_size, length + 1) for index in range(count)]
    first, last = np.array([[0, 6]]), np.array([[length - 5, length + 1]])
    return [Example(np.append(tokens[:-6], tokens[:6]), last, first, first) for tokens in drawn]


CASES = pytest.mark.parametrize(
    ("task", "length", "make"),
    [
        (MQAR(keys=16, values=16), 50, sequences),
        (MQAR(joined=True, keys=8, values=9), 64, sequences),
        (MQAR(keys=16, values=16), 40, copies),
    ],
)


@CASES
def test_answers_equal_the_full_computation(
    task: Task, length: int, make: Callable[..., list[Example]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lm.evaluation.held_out.MAX_BATCH_TOKENS", 150)
    decoder = Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32, init_std=0.3, dropout=0.5), task.vocab_size, 16)
    held_out = HeldOutSequences.from_examples(make(task, length, 7), np.ones(task.vocab_size))
    nll, hits = answer_token_losses_and_hits(decoder, held_out, CPU)
    assert decoder.training
    tokens = torch.from_numpy(held_out.sequences)
    logits = decoder.eval().logits(tokens[:, :-1]).detach()
    losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").numpy()
    assert np.allclose(nll, np.where(held_out.answer_mask, losses, 0), atol=1e-5)
    assert np.array_equal(hits, held_out.answer_mask & (logits.argmax(-1) == tokens[:, 1:]).numpy())


@pytest.mark.slow
@pytest.mark.parametrize("task", [MQAR(pairs=8, queries=8), MQAR(pairs=8, queries=3), Needle(needles=2, distractors=3)])
def test_chance_is_what_picking_among_the_answers_shown_gives(task: Task):
    rng, rights = np.random.default_rng(0), []
    answer_count, question_count = {"mqar": lambda: (task.pairs, task.queries), "needle": lambda: (5, 2)}[task.name]()
    for _ in range(4_000):
        answers = rng.permutation(answer_count)[:question_count]
        rights += [
            rng.choice(np.setdiff1d(np.arange(answer_count), answers[:i])) == answers[i] for i in range(question_count)
        ]
    assert task.chance == pytest.approx(np.mean(rights), abs=0.02)


def test_an_answer_is_right_if_all_its_tokens_are(tiny, monkeypatch):
    """Of two questions with answers of several tokens, one in each sequence has one wrong token."""

    def one_wrong_token(decoder: Decoder, held_out: HeldOutSequences, *_: object) -> np.ndarray:
        hits = held_out.answer_mask.copy()
        hits[np.arange(len(hits)), hits.argmax(1)] = False
        return np.stack((np.where(held_out.answer_mask, 0.5, 0), hits))

    config = tiny(
        "data.seq_len=256", "eval.recall={tasks: [{name: needle, needles: 2}], length_factors: [1], sequences: 4}"
    )
    recall = Recall(config, prepare(config.data))
    monkeypatch.setattr(answers, "answer_token_losses_and_hits", one_wrong_token)
    decoder = Decoder(config.model, recall.store.vocab_size, 32)
    whole, token, loss = measure_curves(recall, decoder, CPU)
    assert (whole.metric, token.metric, loss.metric) == ("accuracy", "token accuracy", "loss of answers")
    assert (whole.means[0], loss.means[0]) == (0.5, 0.5)
    counts = token.points[0].weights
    assert token.means[0] == pytest.approx(1 - 4 / counts.sum())
    assert whole.points[0].weights.tolist() == [2] * 4


def test_the_result_is_plain_has_rows_and_scores_and_is_the_same_each_time(tiny):
    small = "{name: mqar, keys: 4, values: 8, pairs: 2, queries: 2, filler: 1}"
    tasks = f"eval.recall.tasks=[{{name: mqar, keys: 8, values: 8, filler: 8, pairs: 4, queries: 2}}, {small}]"
    config = tiny(*SYMBOLS, tasks, "eval.recall.length_factors=[1, 2.5]", "eval.recall.sequences=3")
    store = prepare(config.data)
    recall = Recall(config, store)
    decoder = Decoder(config.model, store.vocab_size, 32)
    first, second = (recall.evaluate(decoder, CPU, 0, 0) for _ in range(2))
    curves = curves_of(first)
    assert first.frame.equals(second.frame)
    assert [result.x.tolist() for result in curves] == 6 * [[32, 80]]
    settings = ("keys 8, filler 8, pairs 4", "keys 4, filler 1, pairs 2")
    logged = [name for result in curves for name in result.logged_means]
    assert logged == [f"recall/mqar ({options}) {length}" for options in settings for length in (32, 80)]
    chances = [level for result in curves for level in result.references.values()]
    assert chances == pytest.approx([(1 / 4 + 1 / 3) / 2, (1 / 2 + 1) / 2])
    metrics = ["accuracy", "accuracy: chance", "token accuracy", "loss of answers"]
    result = EvaluationResult(Path(), first, is_cached=False)
    assert list(dict.fromkeys(row["quantity"] for row in result.rows)) == metrics


def test_what_recall_can_not_measure_is_refused(tiny):
    no_long_context = "eval.long_context.length_factor=0"
    assert "eval.recall.tasks[0] = 'mqar': is over symbols, and this model knows none" in refused(
        "eval.recall.tasks=[mqar]"
    )
    assert "eval.recall.tasks[0] = 'needle': is in text, and this model knows symbols alone" in refused(
        RECALL, no_long_context, "eval.recall.tasks=[needle]"
    )
    assert "has 160 symbols, the model 24" in refused(RECALL, no_long_context, "eval.recall.tasks=[mqar]")
    assert "unknown name" in refused("eval.recall.tasks=[nedle]")
    config = tiny(
        NEEDLE, "eval.recall.length_factors=[0.5]", "data.seq_len=128", "optim.batch_tokens=1024", no_long_context
    )
    store = prepare(config.data)
    with pytest.raises(
        ConfigError,
        match=r"eval.recall.length_factors = \[0.5\]: needle in sequences of 64: the needles and their questions need "
        r"sequences of",
    ):
        Recall(config, store)


# ---------------------------------------------------------------- training


def test_sequences_of_tasks_are_a_function_of_the_step_however_they_are_read(tiny):
    config = tiny(*SYMBOLS, "data.lengths={name: mixed, weights: {16: 0.5, 32: 0.5}}")
    store = prepare(config.data)
    sequences = train_sequences(store, config)
    contents = set()
    for step in range(8):
        batch = sequences.batch(step)
        length = sequences.sequence_length(step)
        assert batch.tokens.shape == (256 // length, length)
        assert ((batch.targets != NO_TARGET).sum(1) == 4).all()
        loaders = [train_loader(train_sequences(store, config), rank, 2, 2, step, step + 1, 0) for rank in range(2)]
        micro_batches = [*chain(*loaders)]
        assert torch.equal(torch.cat([micro_batch.tokens for micro_batch in micro_batches]), batch.tokens)
        assert torch.equal(torch.cat([micro_batch.targets for micro_batch in micro_batches]), batch.targets)
        contents |= {sequence.numpy().tobytes() for sequence in batch.tokens}
    assert len(contents) == 8 * 256 / 32 + sum(8 for step in range(8) if sequences.sequence_length(step) == 16)


def test_the_loss_is_the_mean_over_the_targets(tiny, tmp_path: Path):
    config = tiny(*SYMBOLS, "name=a", "trainer.max_steps=3", "optim.warmup_steps=1")
    assert train(config) == 0
    store = prepare(config.data)
    sequences = train_sequences(store, config)
    decoder = Decoder(config.model, store.vocab_size, 32, config.seed)
    batch = sequences.batch(0)
    expected = F.cross_entropy(
        decoder.logits(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=NO_TARGET
    )
    first = json.loads((tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in decoder.parameters()])
    assert first["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_validation_sequences_are_dealt_to_the_nearest_whole_number(tiny):
    shares = (
        "data.tasks=[{weight: 0.7, task: mqar}, {weight: 0.2, task: {name: mqar, queries: 4}}, "
        "{weight: 0.1, task: {name: mqar, queries: 1}}]"
    )
    config = tiny(shares, SYMBOLS[1], "eval.sequences=10")
    assert np.bincount(validation_sequences(prepare(config.data), config).source_indices).tolist() == [7, 2, 1]


def test_validation_sequences_follow_the_weights_of_tasks_over_symbols(tiny):
    shares = (
        "data.tasks=[{weight: 0.75, task: {name: mqar, queries: 4}}, {weight: 0.2, task: {name: mqar, queries: 5}}, "
        "{weight: 0.05, task: {name: mqar, queries: 1}}]"
    )
    config = tiny(shares, SYMBOLS[1], "eval.sequences=40")
    validation = Validation(config, store := prepare(config.data))
    decoder = Decoder(config.model, store.vocab_size, 32)
    whole, *sources = measure_curves(validation, decoder, CPU)
    units = [(result.task, len(result.points[0].values)) for result in sources]
    assert units == [(f"mqar (queries {n})", count) for n, count in ((4, 30), (5, 8), (1, 2))], "and no bits per byte"
    assert [*whole.references] == ["unigram cross-entropy, at most"], "the store counts tasks alike"
    assert whole.about.amount == "40 of 32 tokens, nats per token of the answers"
    sequence = make_example(MQAR(queries=5), 0, 7, 32, "test")
    (held_out,) = validation.held_out
    assert (held_out.sequences[37] == sequence.tokens).all()
    assert (held_out.target_mask[37] == sequence.answer_mask).all()
    counts = held_out.target_mask.sum(1)
    assert (whole.points[0].weights == counts).all()
    weights = [counts[:30].sum(), counts[30:38].sum(), counts[38:].sum()]
    assert np.average([result.overall_mean for result in sources], weights=weights) == pytest.approx(
        whole.overall_mean, abs=1e-5
    )


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config([str(ROOT / "tests" / "tiny.yaml"), *overrides, "data.source.paths=[x]"])
    return str(error.value)
