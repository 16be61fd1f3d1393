"""Synthetic tasks: exact lengths and depths, no leaks, the same sequences everywhere, and tasks in text."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import occurrences, split_tokens
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lm.config.data_config import MQAR, DataConfig, FileSource, Needle, Task, TrainedTokenizer
from lm.config.load import load_config
from lm.data.prepare import prepare
from lm.data.tasks import Draw, Example, FillerText, TaskError, check_task, make_example
from lm.errors import ConfigError, DataError

TINY = str(Path(__file__).parents[1] / "tiny.yaml")
SYMBOLIC = [MQAR(), MQAR(keys=8, values=8), MQAR(keys=16, values=16, joined=True)]
FEW = MQAR(keys=4, values=4, filler=1, pairs=2, queries=2)  # with few different sequences
TEXTUAL = [Needle(), Needle(needles=2, distractors=2), Needle(depth=0.5)]
CONTROLS = [Needle(absent=True), Needle(needles=2, distractors=2, absent=True)]
INDICES, SEEDS, SUBSETS = st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.sampled_from(["train", "test"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> FillerText:
    """Twelve documents of sentences and numbers."""
    folder, raw = tmp_path_factory.mktemp("tasks"), np.random.PCG64(7).random_raw
    for number in range(12):
        words = [f"{'abcdefgh'[int(w) % 8]}{'aeiou'[int(w >> 8) % 5]}{int(w >> 16) % 300}" for w in raw(1500)]
        (folder / f"{number:02d}.txt").write_text(
            "The special number is: ".join(" ".join(words[i : i + 50]) for i in range(0, 1500, 50))
        )
    data = DataConfig(
        FileSource(paths=[str(folder)]), TrainedTokenizer(400), val_fraction=0.3, root=str(folder / "stores")
    )
    return FillerText(prepare(data))


def label(task: Task) -> str:
    changes = [f"{name}={value}" for name, value in vars(task).items() if value != getattr(type(task)(), name)]
    return "-".join([task.name, *changes])


def check(task: Task, sequence: Example, length: int) -> None:
    """What holds for a sequence of every task."""
    assert sequence.tokens.shape == (length + 1,)
    assert sequence.tokens.dtype == np.int64
    assert sequence.answer_spans.shape == sequence.evidence_spans.shape == sequence.asked_needle_spans.shape
    assert (sequence.answer_spans[:, 0] >= 1).all()
    assert sequence.answer_spans[-1, 1] == length + 1, "a sequence ends with an answer"
    assert sequence.answer_mask.sum() == (sequence.answer_spans[:, 1] - sequence.answer_spans[:, 0]).sum()
    for (start, stop), (begin, end), (first, last) in zip(
        sequence.answer_spans, sequence.evidence_spans, sequence.asked_needle_spans, strict=True
    ):
        assert sequence.answer_mask[start - 1 : stop - 1].all()
        if end:
            assert first <= begin < end <= last <= start
            if not getattr(task, "joined", False):
                assert (sequence.tokens[begin:end] == sequence.tokens[start:stop]).all()


# ---------------------------------------------------------------- every task


@pytest.mark.parametrize("task", SYMBOLIC, ids=label)
@given(seed=SEEDS, index=INDICES, length=st.integers(33, 300), subset=SUBSETS)
@settings(max_examples=40, deadline=None)
def test_sequences_of_symbols_are_of_the_length_asked_for_and_show_their_answers(
    task: Task, seed: int, index: int, length: int, subset: str
):
    sequence = make_example(task, seed, index, length, subset)
    check(task, sequence, length)
    assert 0 <= sequence.tokens.min() <= sequence.tokens.max() < task.vocab_size


@pytest.mark.parametrize("task", [*TEXTUAL, *CONTROLS], ids=label)
@given(seed=SEEDS, index=INDICES, length=st.integers(450, 900), subset=SUBSETS)
@settings(max_examples=15, deadline=None)
def test_sequences_of_text_are_of_the_length_asked_for_and_show_their_answers(
    text: FillerText, task: Task, seed: int, index: int, length: int, subset: str
):
    sequence = make_example(task, seed, index, length, subset, text)
    check(task, sequence, length)
    assert (sequence.evidence_spans.max(1) == 0).all() == (task in CONTROLS)


def digest(task: Task, length: int, text: FillerText | None = None) -> str:
    sequences = [
        make_example(task, 1, index, length, subset, text).tokens for subset in ("train", "test") for index in range(4)
    ]
    return hashlib.sha256(np.stack(sequences).astype("<i8").tobytes()).hexdigest()[:16]


PINNED = {
    "mqar": "fb45790e1f2e8d55",
    "mqar-keys=8-values=8": "ae7a7406f7b61258",
    "mqar-keys=16-values=16-joined=True": "6990adac98ade3fc",
}


@pytest.mark.parametrize("task", SYMBOLIC, ids=label)
def test_the_sequences_never_change_between_processes_and_versions(task: Task):
    assert digest(task, 64) == PINNED[label(task)]


@pytest.mark.parametrize("task", SYMBOLIC, ids=label)
def test_seeds_parts_and_indices_give_different_sequences(task: Task):
    sequences = {
        make_example(task, seed, index, 64, subset).tokens.tobytes()
        for seed in (1, 2)
        for index in range(50)
        for subset in ("train", "test")
    }
    assert len(sequences) == 200


@pytest.mark.parametrize("task", [*SYMBOLIC, *TEXTUAL], ids=label)
def test_a_sequence_too_short_says_how_long_it_must_be(task: Task, text: FillerText):
    with pytest.raises(ValueError, match=r"need sequences of at least \d+ tokens, not 2"):
        make_example(task, 1, 0, 2, "train", text)


def test_test_sequences_that_can_not_all_differ_are_refused():
    count = int(FEW.n_distinct_sequences(16, "test"))
    check_task(FEW, 1, 16, "test", count)
    with pytest.raises(TaskError, match="5,000 test sequences can't all differ: there are about 18"):
        check_task(FEW, 1, 16, "test", 5000)
    symbols = [
        "data.seq_len=16",
        "optim.batch_tokens=256",
        "eval.long_context.length_factor=0",
        "eval.swap_lengths=[1]",
        "data.source=package",
    ]
    task = "data.tasks=[{task: {name: mqar, keys: 4, values: 4, filler: 1, pairs: 2, queries: 2}}]"
    load_config([TINY, *symbols, task, f"eval.sequences={count}"])
    with pytest.raises(
        ConfigError, match=r"^eval\.sequences = 5000: can't all differ: mqar has about 18 test sequences of 16"
    ):
        load_config([TINY, *symbols, task, "eval.sequences=5000"])


@pytest.mark.parametrize(
    "task", ["{name: mqar, keys: 1, values: 1, pairs: 1, queries: 1}", "{name: mqar, keys: 99, values: 99, pairs: 99}"]
)
def test_a_run_whose_task_has_no_sequences_is_refused_in_one_line(tmp_path: Path, task: str):
    overrides = [
        "data.seq_len=32",
        f"data.root={tmp_path}",
        "eval.long_context.length_factor=0",
        "eval.swap_lengths=[1]",
        "data.source=package",
    ]
    data = load_config([TINY, *overrides, f"data.tasks=[{{task: {task}}}]", "eval.sequences=1"]).data
    with pytest.raises(DataError, match=r"^data\.tasks: mqar: .*; change data\.seq_len or the task's options$"):
        prepare(data)
    assert not list(tmp_path.rglob("manifest.json"))


# ---------------------------------------------------------------- text


def numbers_of(text: FillerText, sequence: Example) -> list[str]:
    return [text.decode(sequence.tokens[start:stop]).strip() for start, stop in sequence.answer_spans]


@pytest.mark.parametrize("task", [*TEXTUAL, *CONTROLS], ids=label)
@given(index=INDICES, subset=SUBSETS)
@settings(max_examples=15, deadline=None)
def test_an_answer_stands_nowhere_else_in_tokens_or_text(text: FillerText, task: Task, index: int, subset: str):
    sequence = make_example(task, 1, index, 500, subset, text)
    expected = 1 if task in CONTROLS else 2
    content = text.decode(sequence.tokens)
    for number, (start, stop) in zip(numbers_of(text, sequence), sequence.answer_spans, strict=True):
        assert number.isdigit()
        assert len(number) == 7
        assert content.count(number) == expected
        assert occurrences(sequence.tokens, sequence.tokens[start:stop]) == expected


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("length", [100, 333, 800])
def test_the_needle_lies_at_its_depth_to_the_token(text: FillerText, depth: float, length: int):
    asking = text.encode("\nWhat is the special magic")
    for index in range(5):
        sequence = make_example(Needle(depth=depth), 1, index, length, "train", text)
        (start, stop), question = sequence.asked_needle_spans[0], sequence.answer_spans[0]
        end = next(
            place
            for place in range(question[0] - len(asking), 0, -1)
            if (sequence.tokens[place : place + len(asking)] == asking).all()
        )
        assert start == round(depth * (end - (stop - start)))


def with_prefix(kind: str) -> Tokenizer:
    """A tokenizer that puts a space before a text: as Llama 2's file does, as its newer files do, and as RoBERTa's."""
    space = "Ġ" if kind == "byte-level" else "▁"
    letters = [
        space,
        "Ċ" if kind == "byte-level" else "\n",
        *"0123456789.:? ",
        *map(chr, (*range(65, 91), *range(97, 123))),
    ]
    words = [f"{space}s", f"{space}so"]
    vocab = {token: index for index, token in enumerate(["</s>", *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, [(space, "s"), (f"{space}s", "o")]))
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


@pytest.mark.parametrize("kind", ["normalizer", "metaspace", "byte-level"])
def test_a_tokenizer_that_puts_a_space_before_a_text_puts_none_into_sentences(kind: str):
    """A sequence has the tokens of its own text, and an answer begins with a digit."""
    tokenizer = with_prefix(kind)
    ids = np.array(tokenizer.encode("so so " * 500).ids[2:])
    split = SimpleNamespace(
        n_tokens=len(ids),
        longest=len(ids),
        offsets=np.array([0, len(ids)]),
        take_windows=lambda start, n: ids[start[0] :][None, :n],
    )
    size = tokenizer.get_vocab_size()
    text = FillerText(SimpleNamespace(vocab_size=size, tokenizer=lambda: tokenizer, train=split, val=split))
    for index in range(5):
        sequence = make_example(Needle(needles=2, depth=0.5), 0, index, 400, "test", text)
        content = " " * (kind == "byte-level") + text.decode(sequence.tokens).lstrip()
        tokens = tokenizer.encode(content).ids
        assert sequence.tokens.tolist()[-len(tokens) + 1 :] == tokens[1:]
        digits = {*map(tokenizer.token_to_id, "0123456789")}
        for spans in (sequence.answer_spans, sequence.evidence_spans):
            assert all({*sequence.tokens[start:stop].tolist()} <= digits for start, stop in spans)


@given(index=INDICES)
@settings(max_examples=15, deadline=None)
def test_needles_and_their_questions_say_what_they_should(text: FillerText, index: int):
    task = Needle(needles=2, distractors=1)
    sequence = make_example(task, 1, index, 600, "test", text)
    assert text.decode(sequence.tokens).count("The special magic") == 5
    for (first, last), (begin, end), number in zip(
        sequence.asked_needle_spans, sequence.evidence_spans, numbers_of(text, sequence), strict=True
    ):
        sentence = text.decode(sequence.tokens[first:last])
        city = sentence.removeprefix(" The special magic ").partition(" number")[0]
        assert sentence == f" The special magic {city} number is: {number}."
        assert text.decode(sequence.tokens[begin:end]) == f" {number}"
        assert (
            f"\nWhat is the special magic {city} number? The special magic {city} number is: {number}"
            in text.decode(sequence.tokens)
        )


def test_training_and_test_sequences_of_text_share_no_number(text: FillerText):
    by_subset = {
        subset: {
            n for i in range(60) for n in numbers_of(text, make_example(Needle(distractors=1), 1, i, 300, subset, text))
        }
        for subset in ("train", "test")
    }
    assert not by_subset["train"] & by_subset["test"]
    for subset, numbers in by_subset.items():
        assert all(Draw(1, subset, 0).subset_has(int(number)) for number in numbers)


def test_filler_is_of_the_split_and_within_a_document(text: FillerText):
    for subset, split in text._split_by_subset.items():
        content = split_tokens(split).tobytes()
        for index in range(30):
            tokens = text.draw_filler(Draw(1, subset, index), 200)
            assert tokens.astype(split.dtype).tobytes() in content
            assert not (tokens == split_tokens(split)[0]).any(), "a document begins with the end-of-text token"
        assert len(text.draw_filler(Draw(1, subset, 0), split.longest + 1)) == split.longest + 1
        with pytest.raises(ValueError, match="more than the"):
            text.draw_filler(Draw(1, subset, 0), split.n_tokens + 1)
