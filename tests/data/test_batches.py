"""The order in which a run reads its tokens."""

import hashlib

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lm.config.data_config import DataConfig, FileSource, MixedLengths, TrainedTokenizer
from lm.config.load import load_config
from lm.config.tree import key_effect
from lm.data.batches import (
    SLOTS_PER_BLOCK,
    Batch,
    TextStream,
    TrainSequences,
    assign_slots_to_streams,
    long_window_starts,
    train_loader,
    train_sequences,
    validation_starts,
)
from lm.data.prepare import prepare
from lm.data.store import SourceCounts, Split, Store
from lm.errors import ConfigError
from lm.plain import to_plain

SEQ_LEN, BATCH_SLOTS, STEPS = 16, 8, 50


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("batches")
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(" ".join(f"word{(number * k) % 89}" for k in range(10 + 4 * number)))
    data = DataConfig(
        FileSource(paths=[str(folder)]), TrainedTokenizer(300), val_fraction=0.3, root=str(folder / "stores")
    )
    return prepare(data)


class CountedSplit:
    """A split whose token i is i, so that sequences tell where they come from."""

    take_windows = Split.take_windows

    def __init__(self, sizes: list[int]):
        self.n_tokens, self.offsets = sum(sizes), np.cumsum([0, *sizes])
        self.sources = (SourceCounts("all", self.n_tokens, len(sizes), 0),)

    def tokens_at(self, index: np.ndarray) -> np.ndarray:
        return index


class Counted:
    """A store of such a split."""

    def __init__(self, n_tokens: int, fingerprint: str = "ab" * 32):
        self.fingerprint, self.train = fingerprint, CountedSplit([n_tokens])


def stream(n_tokens: int, seq_len: int, seed: int) -> TextStream:
    return TrainSequences(Counted(n_tokens), DataConfig(seq_len=seq_len), 1, seed).streams[0]


def whole(batch: Batch) -> torch.Tensor:
    """The sequences of a batch with their last targets: (B, T + 1)."""
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    return torch.cat((batch.tokens, batch.targets[:, -1:]), 1)


def digests(batches: np.ndarray) -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(batch).tobytes()).hexdigest() for batch in batches]


SPLITS = ((1, 1), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2))  # ranks, and sequences of a micro-batch


def global_batches(store: Store, world: int, micro_batch: int, workers: int, first_step: int = 0) -> list[str]:
    """What all ranks read, put together step by step."""
    ranks = []
    for rank in range(world):
        sequences = TrainSequences(store, DataConfig(seq_len=SEQ_LEN), BATCH_SLOTS, seed=1)
        loader = train_loader(sequences, rank, world, micro_batch, first_step, STEPS, workers)
        micro_batches = list(loader)
        assert len(loader) == (STEPS - first_step) * BATCH_SLOTS // world // micro_batch
        assert all(
            batch.tokens.dtype == torch.int64 and batch.tokens.shape == (micro_batch, SEQ_LEN)
            for batch in micro_batches
        )
        ranks.append(
            torch.cat([whole(batch) for batch in micro_batches]).view(
                STEPS - first_step, BATCH_SLOTS // world, SEQ_LEN + 1
            )
        )
    return digests(torch.cat(ranks, 1).numpy())


@pytest.fixture(scope="module")
def expected(store: Store) -> list[str]:
    sequences = TrainSequences(store, DataConfig(seq_len=SEQ_LEN), BATCH_SLOTS, seed=1)
    assert sequences.streams[0].sequences_per_epoch < STEPS * BATCH_SLOTS, "the steps must span epochs"
    return digests(np.stack([whole(sequences.batch(step)) for step in range(STEPS)]))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("first_step", [0, 17])
@pytest.mark.parametrize(
    ("world", "micro_batch", "workers"),
    [
        *((world, micro_batch, 0) for world, micro_batch in SPLITS),
        *(pytest.param(*split, 4, marks=[] if split == (2, 4) else pytest.mark.slow) for split in SPLITS),
    ],
)
def test_global_batches_do_not_depend_on_how_they_are_read(
    store: Store, expected: list[str], world: int, micro_batch: int, workers: int, first_step: int
):
    assert global_batches(store, world, micro_batch, workers, first_step) == expected[first_step:]


@pytest.mark.parametrize(
    "more", ["", "data.lengths={name: mixed, weights: {16: 0.5, 32: 0.5}}", "data.tasks=[{weight: 0.5, task: needle}]"]
)
def test_a_seed_of_the_data_decides_the_batches_alone(store: Store, more: str):
    tiny = [str(ROOT / "tests" / "tiny.yaml"), "data.source=package", "data.seq_len=128", *([more] if more else [])]

    def read(*overrides: str) -> list[str]:
        sequences = train_sequences(store, load_config([*tiny, *overrides]))
        return digests(np.stack([sequences.batch(step).tokens.ravel()[:256] for step in range(4)]))

    assert read("seed=5") == read("seed=3", "data.seed=5") == read("seed=5", "data.seed=5") != read("seed=3")
    assert "seed" not in to_plain(load_config(tiny))["data"], "the configurations of existing runs stay as they are"
    assert key_effect("data.seed") == key_effect("seed")


def test_the_order_never_changes_between_versions():
    """Runs that were begun with an earlier version must go on with the same tokens."""
    sequences = TrainSequences(Counted(1000), DataConfig(seq_len=10), 8, seed=3)
    assert sequences.streams[0].slot_starts(np.arange(8)).tolist() == GOLDEN


GOLDEN = [832, 892, 262, 172, 582, 632, 202, 792]


@given(
    n_tokens=st.integers(2, 3000),
    seq_len=st.integers(1, 80),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_an_epoch_predicts_every_token_once_but_for_fewer_than_a_sequence(
    n_tokens: int, seq_len: int, seed: int, epoch: int
):
    assume(n_tokens > seq_len)
    text = stream(n_tokens, seq_len, seed)
    batch, _ = text.read(epoch * text.sequences_per_epoch + np.arange(text.sequences_per_epoch), seq_len)
    targets = np.sort(batch[:, 1:].ravel())
    assert (batch[:, 1:] == (batch[:, :-1] + 1) % n_tokens).all()
    assert (np.diff(targets) > 0).all()
    assert n_tokens - len(targets) < seq_len


def test_epochs_seeds_and_stores_give_different_orders():
    def order(seed: int, epoch: int, fingerprint: str = "ab" * 32) -> tuple[int, ...]:
        text = TrainSequences(Counted(5000, fingerprint), DataConfig(seq_len=10), 1, seed).streams[0]
        return tuple(text.slot_starts(epoch * 500 + np.arange(500)))

    orders = [order(1, 0), order(1, 1), order(2, 0), order(2, 1), order(1, 0, "cd" * 32)]
    assert len(set(orders)) == len(orders)


# ---------------------------------------------------------------- held-out sequences


@given(n_tokens=st.integers(1, 2000), seq_len=st.integers(1, 100), limit=st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_validation_sequences_are_spread_evenly_and_share_no_target(n_tokens: int, seq_len: int, limit: int):
    split = CountedSplit([n_tokens])
    starts = validation_starts(split, seq_len, limit)
    batch = split.take_windows(starts, seq_len + 1)
    assert batch.shape == (min(limit, (n_tokens - 1) // seq_len), seq_len + 1)
    assert len(np.unique(batch[:, 1:])) == batch[:, 1:].size
    if len(starts) > 1:
        gaps = np.diff([*starts, (n_tokens - 1) // seq_len * seq_len])
        assert gaps.max() - gaps.min() <= seq_len


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), length=st.integers(1, 30), limit=st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_long_windows_lie_within_documents_spread_evenly_over_all_there_are(sizes: list[int], length: int, limit: int):
    split = CountedSplit(sizes)
    starts, all_starts = long_window_starts(split, length, limit), long_window_starts(split, length, 10**6)
    fitting = [(size - 1) // length for size in sizes]
    assert len(all_starts) == sum(fitting)
    assert len(starts) == min(limit, sum(fitting))
    document = np.searchsorted(split.offsets, all_starts, "right") - 1
    assert np.bincount(document, minlength=len(sizes)).tolist() == fitting
    assert (all_starts + length + 1 <= split.offsets[document + 1]).all()
    same_document = np.diff(document) == 0
    assert (np.diff(all_starts)[same_document] == length).all()
    first = np.unique(document, return_index=True)[1]
    last = np.searchsorted(document, document[first], "right") - 1
    before = all_starts[first] - split.offsets[document[first]]
    after = split.offsets[document[last] + 1] - all_starts[last] - length - 1
    assert (np.abs(before - after) <= 1).all(), "in the middle of each document"
    places = np.searchsorted(all_starts, starts)
    assert (all_starts[places] == starts).all()
    if len(places) > 1:
        gaps = np.diff([*places, len(all_starts)])
        assert gaps.max() - gaps.min() <= 1


# ---------------------------------------------------------------- sequences of several lengths


def test_a_mixture_of_lengths_changes_how_a_step_is_cut_and_not_its_tokens(store):
    plain = TrainSequences(store, DataConfig(seq_len=64), 4, seed=1)
    mixed = TrainSequences(
        store, DataConfig(seq_len=64, lengths=MixedLengths({16: 0.25, 32: 0.25, 64: 0.5})), 4, seed=1
    )
    for step in range(40):
        length, sequences = mixed.sequence_length(step), whole(mixed.batch(step))
        assert sequences.shape == (4 * 64 // length, length + 1)
        assert np.array_equal(sequences[:, 1:].ravel(), whole(plain.batch(step))[:, 1:].ravel())
        assert np.array_equal(sequences[:, :-1].ravel(), whole(plain.batch(step))[:, :-1].ravel())


@pytest.mark.parametrize(
    ("lengths", "problem"),
    [
        ("{name: mixed}", r"^data\.lengths\.weights = {}: sum to 0, not to 1;"),
        ("{name: mixed, weights: {7: 1.0}}", r"^data\.lengths\.weights = 7: does not divide data\.seq_len = 32"),
        ("{name: mixed, weights: {8: -0.5, 32: 1.5}}", r"^data\.lengths\.weights = .*: must be > 0$"),
        ("curriculum", r"^data\.lengths\.name = 'curriculum': unknown name; choose from: full"),
    ],
)
def test_wrong_lengths_are_refused_in_one_line(lengths: str, problem: str):
    with pytest.raises(ConfigError, match=problem) as error:
        load_config([str(ROOT / "tests" / "tiny.yaml"), "data.source=package", f"data.lengths={lengths}"])
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- documents and streams


def test_isolated_positions_begin_anew_with_each_document(store):
    batch = TrainSequences(store, DataConfig(seq_len=64, documents="isolate"), 16, 1).batch(0)
    for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
        offset = 0
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            offset = 0 if token == store.end_of_text_id else offset
            assert position == offset
            offset += 1
    assert (batch.positions == 0).sum() > len(batch.positions)
    assert TrainSequences(store, DataConfig(seq_len=64), 4, 1).batch(0).positions is None


@given(
    weights=st.lists(st.floats(1e-6, 1), min_size=2, max_size=6), first=st.integers(0, 10**9), seed=st.integers(0, 99)
)
@settings(max_examples=100, deadline=None)
def test_streams_have_the_fraction_of_slots_that_their_weights_say_however_long_the_run(
    weights: list[float], first: int, seed: int
):
    fractions = np.array(weights) / sum(weights)
    streams, places = assign_slots_to_streams(weights, (1, seed), np.arange(first, first + 3 * SLOTS_PER_BLOCK))
    slots = np.arange(first, first + 3 * SLOTS_PER_BLOCK)
    for number, fraction in enumerate(fractions):
        of_stream = streams == number
        assert (np.diff(places[of_stream]) == 1).all(), "a stream's slots come in order, none twice and none left out"
        assert (np.abs(places[of_stream] - fraction * slots[of_stream]) < 1 + fraction * len(fractions)).all()


def test_the_assignment_of_slots_never_changes_between_versions():
    assigned = np.stack(assign_slots_to_streams([0.5, 0.3, 0.2], (1, 2), np.arange(12) + 5 * SLOTS_PER_BLOCK)).tolist()
    assert assigned == GOLDEN_ASSIGNMENT


GOLDEN_ASSIGNMENT = [
    [0, 2, 0, 1, 1, 0, 0, 0, 2, 1, 0, 2],
    [2560, 1024, 2561, 1536, 1537, 2562, 2563, 2564, 1025, 1538, 2565, 1026],
]
