"""Several sources in one store; copies, short and long documents, and what can't be read."""

import dataclasses
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from folders import measure_curves
from texts import TEXTS, files_config, split_tokens, stored_texts, write_parquet, write_texts

from lm.config.data_config import (
    DataConfig,
    FileSource,
    Mixture,
    Needle,
    TrainedTokenizer,
    WeightedSource,
    WeightedTask,
)
from lm.config.load import load_config
from lm.config.tree import Config
from lm.data.batches import TrainSequences, assign_slots_to_streams, train_sequences
from lm.data.prepare import check_text_lengths, prepare, store_summary
from lm.data.store import Split, Store
from lm.errors import ConfigError, DataError
from lm.evaluation.held_out import Validation
from lm.model.decoder import Decoder
from lm.model.device import Device

LETTERS = [f"letter {n} of many: " + "yours truly, " * (n % 7 + 3) for n in range(30)]


def mixture(tmp_path: Path, folders: dict[str, list[str]], **changes) -> DataConfig:
    """A mixture of folders of texts, equally weighted."""
    parts = [
        WeightedSource(1 / len(folders), FileSource([str(write_texts(tmp_path / name, texts))]))
        for name, texts in folders.items()
    ]
    return dataclasses.replace(
        DataConfig(Mixture(parts), TrainedTokenizer(300), root=str(tmp_path / "stores"), val_fraction=0.2), **changes
    )


def part_texts(store: Store, split: Split) -> list[list[str]]:
    """The documents of each part of a split, found by the parts' sizes."""
    tokenizer, begin, by_part = store.tokenizer(), 0, []
    for part in split.sources:
        texts = [
            tokenizer.decode(split.document(n)[1:].tolist(), skip_special_tokens=False)
            for n in range(begin, begin + part.n_documents)
        ]
        assert sum(len(text.encode()) for text in texts) == part.n_bytes
        assert split.offsets[begin + part.n_documents] - split.offsets[begin] == part.n_tokens
        begin += part.n_documents
        by_part.append(texts)
    assert begin == split.n_documents
    return by_part


# ---------------------------------------------------------------- parts


def test_the_parts_of_a_split_are_the_sources_in_order(tmp_path: Path):
    store = prepare(mixture(tmp_path, {"novels": TEXTS, "letters": LETTERS}))
    train, val = part_texts(store, store.train), part_texts(store, store.val)
    for part, texts in enumerate((TEXTS, LETTERS)):
        assert sorted(train[part] + val[part]) == sorted(texts)
        assert sum(len(text.encode()) for text in val[part]) >= 0.2 * sum(len(text.encode()) for text in texts)
    assert [part.label for part in store.train.sources] == ["novels", "letters"]
    assert store.path.name.startswith("novels-letters-")


def test_other_weights_are_the_same_store(tmp_path: Path):
    data = mixture(tmp_path, {"novels": TEXTS, "letters": LETTERS})
    store = prepare(data)
    data.source.of[0].weight, data.source.of[1].weight = 0.9, 0.1
    assert prepare(data).path == store.path


def test_a_document_held_out_of_one_part_is_trained_on_in_none(tmp_path: Path):
    folders = {"novels": TEXTS, "both": [*LETTERS, *TEXTS[::2]]}
    for deduplicate in (True, False):
        store = prepare(mixture(tmp_path, folders, deduplicate=deduplicate))
        train, val = (list(chain(*part_texts(store, split))) for split in (store.train, store.val))
        assert not set(train) & set(val)
        assert set(train) | set(val) == {*TEXTS, *LETTERS}
        assert len(train) + len(val) == len(TEXTS) + len(LETTERS) + (0 if deduplicate else len(TEXTS[::2]))


def test_a_part_of_one_document_is_trained_on(tmp_path: Path):
    store = prepare(mixture(tmp_path, {"novel": ["one long story " * 50], "letters": LETTERS}))
    assert store.val.sources[0].n_documents == 0
    assert store.train.sources[0].n_documents == 1
    with pytest.raises(DataError, match="none of which can be held out"):
        prepare(mixture(tmp_path, {"a": ["one text"], "b": ["another text"]}))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "{name: mixture, of: [{weight: 0.5}, {weight: 0.4}]}",
            r"data\.source\.of = \[0\.5, 0\.4\]: the weights sum to 0\.9, not to 1",
        ),
        ("{name: mixture}", r"data\.source\.of = \[\]: must be given"),
        (
            "{name: mixture, of: [{source: {name: package, packages: sympy}}]}",
            r"of\[0\]\.source\.packages.*did you mean 'package'",
        ),
    ],
)
def test_a_bad_mixture_is_named(source: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        load_config(["configs/softmax.yaml", f"data.source={source}"])


def test_a_small_source_is_refused_unless_it_is_filler_alone(tmp_path: Path):
    data = mixture(tmp_path, {"novels": TEXTS, "notes": LETTERS[:2]}, seq_len=160)
    store, tasks = prepare(data), [WeightedTask(1.0, Needle())]
    with pytest.raises(ConfigError, match=r"data\.seq_len = 160: .*, the training text of notes has .*; add text, or"):
        check_text_lengths(store, Config(data=data))
    config = Config(data=dataclasses.replace(data, tasks=tasks))
    check_text_lengths(store, config)
    assert train_sequences(store, config).batch(0).tokens.size(1) == 160


# ---------------------------------------------------------------- copies, short and long documents


def test_copies_are_left_out_and_counted(tmp_path: Path):
    data = files_config(write_texts(tmp_path / "texts", [*TEXTS, *TEXTS[:7], *TEXTS[:2]]), tmp_path)
    store = prepare(data)
    assert sorted(stored_texts(store)) == sorted(TEXTS)
    assert store.manifest["left_out"]["copies"] == 9
    assert "(9 copies left out)" in store_summary(store)
    with_copies = prepare(dataclasses.replace(data, deduplicate=False))
    assert len(stored_texts(with_copies)) == len(TEXTS) + 9
    assert with_copies.path != store.path


# ---------------------------------------------------------------- what can't be read


@pytest.fixture
def mixed(tmp_path: Path) -> DataConfig:
    """A folder of good files, among them what can't be read: other encodings, a damaged parquet file, bad rows."""
    folder = write_texts(tmp_path / "texts", TEXTS[:20])
    write_parquet(folder / "a.parquet", {"text": TEXTS[20:25]})
    damaged = write_parquet(folder / "b.parquet", {"text": LETTERS}).read_bytes()
    (folder / "b.parquet").write_bytes(damaged[:200] + b"\xff" * 40 + damaged[240:-20])
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    rows = [json.dumps({"text": text}).encode() for text in TEXTS[25:28]]
    (folder / "rows.jsonl").write_bytes(
        b"\n".join([rows[0], b"{", rows[1], b'{"text": "caf\xe9"}', b'{"text": 3}', b"[1]", rows[2]])
    )
    return files_config(folder, tmp_path)


def test_what_can_not_be_read_is_left_out_counted_and_listed(mixed: DataConfig):
    store = prepare(dataclasses.replace(mixed, on_error="skip"))
    assert sorted(stored_texts(store)) == sorted(TEXTS[:28])
    unreadable = store.manifest["unreadable"]
    assert unreadable["count"] == len(unreadable["first"]) == 7
    for place in (
        "b.parquet",
        "latin.txt: not UTF-8",
        "gone.txt: can't be read: No such file or directory; mend it, remove it, or set data.on_error=skip",
        "rows.jsonl: line 2",
        "rows.jsonl: line 4: not UTF-8",
        "line 5",
        "line 6",
    ):
        assert any(place in line for line in unreadable["first"])
    assert "7 files, documents or rows unreadable, the first:" in store_summary(store)


def test_sequences_are_drawn_from_each_part_by_its_weight_whatever_their_sizes(tmp_path: Path):
    data = mixture(tmp_path, {"letters": LETTERS, "texts": TEXTS})
    store = prepare(data)
    edges = np.cumsum([0, *(part.n_tokens for part in store.train.sources)])
    for weights in ([0.25, 0.75], [0.9, 0.1]):
        parts = [WeightedSource(weight, part.source) for weight, part in zip(weights, data.sources, strict=True)]
        weighted = dataclasses.replace(data, source=Mixture(parts), seq_len=32)
        sequences = TrainSequences(store, weighted, 16, seed=1)
        for stream, begin, end in zip(sequences.streams, edges[:-1], edges[1:], strict=False):
            part = split_tokens(store.train)[begin:end]
            rows, _ = stream.read(np.arange(400), 32)
            for sequence, start in zip(rows, stream.slot_starts(np.arange(400)), strict=True):
                assert np.array_equal(sequence, np.take(part, range(start, start + 33), mode="wrap"))
        streams, _ = assign_slots_to_streams(sequences.stream_weights, sequences.seed_integers, np.arange(2000))
        assert (streams == 0).sum() == pytest.approx(2000 * weights[0], abs=2)
        assert sequences.batch(3).tokens.shape == (16, 32)


def test_the_validation_of_a_mixture_tells_its_sources_apart(tmp_path: Path):
    data = mixture(tmp_path, {"letters": LETTERS, "texts": TEXTS})
    base = load_config([str(ROOT / "tests" / "tiny.yaml"), "data.source=package"])
    config = dataclasses.replace(
        base, data=dataclasses.replace(data, seq_len=32), eval=dataclasses.replace(base.eval, sequences=1000)
    )
    store = prepare(data)
    decoder = Decoder(config.model, store.vocab_size, 32)
    loss, _, *sources = measure_curves(Validation(config, store), decoder, Device(torch.device("cpu"), bf16=False))
    losses_by_source = {curve.task: (len(curve.points[0].values), curve.overall_mean) for curve in sources}
    assert set(losses_by_source) == {"letters", "texts"}
    losses = loss.points[0].values
    first = losses_by_source["letters"][0]
    assert losses_by_source["letters"][1] == pytest.approx(np.mean(losses[:first]), abs=1e-5)
    assert losses_by_source["texts"] == (len(losses) - first, pytest.approx(np.mean(losses[first:]), abs=1e-5))


@pytest.mark.parametrize(("weight", "letters", "level"), [(0.25, 0.12, True), (0.25, 0.5, False), (1, 0.12, False)])
def test_the_loss_has_a_level_to_be_below_where_text_is_trained_on_as_the_store_has_it(
    tmp_path: Path, weight: float, letters: float, level: bool
):
    sources = mixture(tmp_path, {"letters": LETTERS, "texts": TEXTS})
    sources.source.of[0].weight, sources.source.of[1].weight = letters, 1 - letters
    tasks = f"data.tasks=[{{weight: {weight}, task: needle}}]"
    base = load_config([str(ROOT / "tests" / "tiny.yaml"), "data.source=package", tasks])
    config = dataclasses.replace(
        base, data=dataclasses.replace(base.data, source=sources.source, tokenizer=sources.tokenizer, root=sources.root)
    )
    store = prepare(config.data)
    validated = measure_curves(
        Validation(config, store), Decoder(config.model, store.vocab_size, 32), Device(torch.device("cpu"), bf16=False)
    )
    names = ["unigram cross-entropy" + ", at most" * (letters == 0.5)] * (weight < 1)
    assert [*validated[0].references] == names
    assert all((value == store.val.unigram_cross_entropy) is level for value in validated[0].references.values())
