"""Associative recall: what stands in a sequence, and what training and test sequences share."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config.data_config import MQAR
from lm.data.tasks import make_example

INDICES, SUBSETS = st.integers(0, 2**32 - 1), st.sampled_from(["train", "test"])


@given(index=INDICES, subset=SUBSETS, length=st.integers(32, 200), queries=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_recall_asks_each_key_once_and_shows_each_value_in_its_pair_alone(
    index: int, subset: str, length: int, queries: int
):
    task = MQAR(queries=queries)
    sequence = make_example(task, 1, index, length, subset)
    tokens, answers = sequence.tokens, sequence.answer_spans[:, 0]
    front = tokens[: length + 1 - 2 * queries]
    assert len(answers) == queries
    assert (answers == np.arange(len(front) + 1, length + 1, 2)).all(), "questions are the end of the sequence"
    pairs = np.flatnonzero(front < task.keys)
    assert len(pairs) == len(set(front[pairs])) == 8
    values = dict(zip(front[pairs], front[pairs + 1], strict=True))
    assert len(set(values.values())) == 8
    assert ((front >= task.keys) & (front < task.keys + task.values)).sum() == 8, "filler is neither key nor value"
    assert len(set(tokens[answers - 1])) == queries
    for place in answers:
        assert values[tokens[place - 1]] == tokens[place]
        assert (tokens == tokens[place]).sum() == (tokens == tokens[place - 1]).sum() == 2


@given(index=INDICES)
@settings(max_examples=60, deadline=None)
def test_training_and_test_sequences_of_recall_share_no_pair_if_asked(index: int):
    task = MQAR(held_out="pairs")
    for subset in ("train", "test"):
        sequence = make_example(task, 1, index, 64, subset)
        keys, values = (
            sequence.tokens[sequence.asked_needle_spans[:, 0]],
            sequence.tokens[sequence.evidence_spans[:, 0]] - task.keys,
        )
        assert (((keys + values) % 8 == 0) == (subset == "test")).all()
    assert any(MQAR(held_out="pairs", joined=True).problems())
    assert any(MQAR(held_out="pairs", values=63).problems())


@given(index=INDICES)
@settings(max_examples=60, deadline=None)
def test_training_and_test_sequences_of_recall_share_no_list_of_pairs(index: int):
    """Single pairs they share: keeping some from training would teach that they are wrong."""
    task = MQAR(keys=4, values=4, filler=4, pairs=2, queries=2)
    lists = {}
    for subset in ("train", "test"):
        for number in range(index % 2**40, index % 2**40 + 40):
            sequence = make_example(task, 1, number, 24, subset)
            order = np.argsort(sequence.asked_needle_spans[:, 0])
            keys, values = (
                sequence.tokens[sequence.asked_needle_spans[order, 0]],
                sequence.tokens[sequence.evidence_spans[order, 0]],
            )
            lists.setdefault(subset, set()).add((*keys.tolist(), *values.tolist()))
    assert not lists["train"] & lists["test"]


@given(index=INDICES, subset=SUBSETS, length=st.integers(24, 200))
@settings(max_examples=60, deadline=None)
def test_joined_pairs_are_one_symbol_each(index: int, subset: str, length: int):
    task = MQAR(keys=16, values=12, filler=5, pairs=8, joined=True)
    sequence = make_example(task, 1, index, length, subset)
    assert (sequence.tokens[:-16] >= 33).sum() == 8
    pairs = sequence.tokens[sequence.evidence_spans[:, 0]] - 33
    assert (pairs // 12 == sequence.tokens[sequence.answer_spans[:, 0] - 1]).all()
    assert (pairs % 12 == sequence.tokens[sequence.answer_spans[:, 0]] - 16).all()
    assert len(set(pairs // 12)) == len(set(pairs % 12)) == 8
    assert sequence.tokens[:-16].min() >= 28, "filler is neither key nor value"
