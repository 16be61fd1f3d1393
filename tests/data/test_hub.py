"""Datasets of the Hugging Face hub, of folders and as saved: what is read, identified, held out and stated."""

import dataclasses
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from texts import TEXTS, documents, one_line_error, readable_documents, stored_texts, write_parquet

from lm.config.data_config import DataConfig, HubSource, TrainedTokenizer
from lm.data import sources as module
from lm.data.prepare import prepare, store_summary
from lm.data.sources import source_identity
from lm.data.store import Store
from lm.data.tokenizer import download_files
from lm.errors import DataError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSource:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_parquet(folder / "train.parquet", {"text": TEXTS, "id": list(range(len(TEXTS)))})
    return HubSource(dataset=str(folder))


def test_streaming_or_not_is_the_same_store_and_a_changed_file_is_not(hub: HubSource, tmp_path: Path):
    data = DataConfig(hub, TrainedTokenizer(300), root=str(tmp_path / "stores"))
    first = prepare(data)
    assert sorted(stored_texts(first)) == sorted(TEXTS)
    assert prepare(dataclasses.replace(data, source=dataclasses.replace(hub, streaming=True))).path == first.path
    write_parquet(Path(hub.dataset) / "train.parquet", {"text": TEXTS[1:]})
    assert prepare(data).path != first.path


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_hub_settings_are_one_line(hub: HubSource, streaming: bool):
    source = dataclasses.replace(hub, streaming=streaming)
    assert "one of: text, id" in one_line_error(dataclasses.replace(source, column="body"))
    assert "['train']" in one_line_error(dataclasses.replace(source, split="test"))
    assert "'default'" in one_line_error(dataclasses.replace(source, config="en"))
    assert "row 1: column 'id' holds int" in one_line_error(dataclasses.replace(source, column="id"))
    assert "no such folder" in one_line_error(dataclasses.replace(source, dataset="./nowhere"))


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_the_hub_that_can_not_be_read_are_left_out_alone(hub: HubSource, streaming: bool):
    rows = [b"first", b"caf\xe9", None, *(text.encode() for text in TEXTS)]
    texts = pyarrow.array(rows, pyarrow.binary()).cast(pyarrow.string(), safe=False).view(pyarrow.string())
    write_parquet(Path(hub.dataset) / "train.parquet", {"text": texts, "id": list(range(len(rows)))})
    source = dataclasses.replace(hub, streaming=streaming)
    readable, errors = readable_documents(source)
    assert readable == ["first", "", *TEXTS]
    assert "row 2: column 'text' is not UTF-8" in str(errors[0])
    assert len(errors) == 1
    assert readable_documents(dataclasses.replace(source, max_documents=3))[0] == ["first", ""]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_that_can_not_be_read_any_further_is_an_error_whatever_is_skipped(hub: HubSource, streaming: bool):
    path = Path(hub.dataset) / "train.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"^data\.source\.dataset: "):
        readable_documents(dataclasses.replace(hub, streaming=streaming))


def test_a_pinned_commit_is_identified_without_a_network():
    source = HubSource(dataset="someone/something", revision="0123456789" * 4)
    assert source_identity(source, Path("data")) != source_identity(
        dataclasses.replace(source, revision="1123456789" * 4), Path("data")
    )


# ---------------------------------------------------------------- streams


def prepared(hub: HubSource, tmp_path: Path, **changes) -> Store:
    return prepare(
        dataclasses.replace(DataConfig(hub, TrainedTokenizer(300), root=str(tmp_path / "stores")), **changes)
    )


def test_a_stream_is_read_once(hub: HubSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opens, dataset = [], module._load_dataset
    monkeypatch.setattr(module, "_load_dataset", lambda *arguments: (opens.append(1), dataset(*arguments))[1])
    store = prepared(dataclasses.replace(hub, streaming=True), tmp_path)
    assert opens == [1]
    assert sorted(stored_texts(store)) == sorted(TEXTS)
    assert not list(store.path.glob("stream*"))


# ---------------------------------------------------------------- validation splits


@pytest.fixture
def with_validation(hub: HubSource) -> HubSource:
    """The last of its five validation texts is also a training text; two are the same."""
    validation = ["held out 1", "held out 2", "held out 3", "held out 3", TEXTS[7]]
    write_parquet(Path(hub.dataset) / "validation.parquet", {"text": validation, "id": list(range(5))})
    return dataclasses.replace(hub, validation_split="validation")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_validation_split_is_held_out_whole_and_is_no_training_text(
    with_validation: HubSource, tmp_path: Path, streaming: bool
):
    store = prepared(dataclasses.replace(with_validation, streaming=streaming, max_documents=30), tmp_path)
    texts = stored_texts(store)
    assert texts[store.train.n_documents :] == ["held out 1", "held out 2", "held out 3", "held out 3", TEXTS[7]]
    assert texts[: store.train.n_documents] == [text for text in TEXTS[:30] if text != TEXTS[7]]
    assert "val_fraction" not in store_summary(store)


def test_the_validation_split_must_be_another_one():
    assert next(HubSource(dataset="a", validation_split="train").problems()).key_path == "validation_split"


# ---------------------------------------------------------------- saved datasets


def test_a_saved_dataset_reads_like_any_other(hub: HubSource, tmp_path: Path):
    import datasets

    dataset = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(str(tmp_path / "splits"))
    for folder in ("one", "splits"):
        assert list(documents(HubSource(dataset=str(tmp_path / folder)))) == TEXTS
        store = prepared(HubSource(dataset=str(tmp_path / folder)), tmp_path / f"of-{folder}")
        assert store.train.n_documents > 30
    source = HubSource(dataset=str(tmp_path / "splits"), split="test")
    assert list(documents(source)) == TEXTS[:3]
    assert "it was saved with the splits train, test" in one_line_error(dataclasses.replace(source, split="dev"))
    assert source_identity(source, tmp_path) != source_identity(
        HubSource(dataset=str(tmp_path / "one"), split="test"), tmp_path
    )


# ---------------------------------------------------------------- no network


def test_an_error_of_the_hub_says_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub") from OSError("the proxy refuses")

    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for read, remedy in (
        (
            lambda: prepared(HubSource(dataset="a/b", split="train"), tmp_path),
            "; pin data.source.revision to a commit, and",
        ),
        (lambda: download_files("a/b", None, []), ""),
    ):
        with pytest.raises(DataError) as error:
            read()
        assert f"Couldn't reach the hub (the proxy refuses){remedy}" in str(error.value)
