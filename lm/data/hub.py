"""Datasets of the Hugging Face hub, in a folder of that form, or saved by `Dataset.save_to_disk`, as documents."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.data_config import Hub
from lm.data.text_files import ROWS, OnError, check_column, column_texts, files_in
from lm.errors import DataError, one_line
from lm.files import FileHashes
from lm.progress import Progress
from lm.schema import Plain

if TYPE_CHECKING:
    from datasets import Dataset, DatasetInfo, IterableDataset


class Unreachable(DataError):
    """The hub can't be reached."""


def downloaded(name: str, revision: str | None, wanted: list[str], where: str = "") -> Path:
    """The files of a model on the hub whose names match `wanted`, in its cache: a folder named by the commit.

    Args:
        where: words that end errors.

    Raises:
        DataError: not a name on the hub, no such model, or no network and not in the cache.
    """
    if name.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DataError(f"{name}: no such folder or file, and not a name on the hub, such as HuggingFaceTB/SmolLM2-135M{where}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # many kinds: offline, no such model, no permission
        raise DataError(f"{name}: no such folder, and the hub does not give it: {one_line(error, 200)}{where}") from None


def upload(folder: Path, name: str) -> str:
    """Upload a folder to the hub as the model `name`, which is created if it is not there; returns its address.

    Raises:
        DataError: no network, no permission, or not a name.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # many kinds: offline, no such user, no permission
        remedy = f"the folder is written: once that is mended, `hf upload {name} {folder}`"
        raise DataError(f"{name}: the hub does not take it: {one_line(error, 200)}; {remedy}") from None
    return str(address)


def documents(source: Hub, root: Path, on_error: OnError, vocabulary: object = None) -> Iterator[str]:
    """The texts in a column of the dataset."""
    dataset = _call(source, lambda datasets: _dataset(datasets, source))
    where = f"data.source.dataset: '{source.dataset}' ({source.split})"
    names = dataset.column_names
    if names is not None:
        check_column(where, source.column, names)
    chosen = dataset if names is None else dataset.select_columns([source.column])
    tables = chosen.with_format("arrow").iter(ROWS)  # arrow: a row that isn't UTF-8 can be left out alone
    read = iter(lambda: _call(source, lambda _: next(tables, None)), None)
    yield from islice(column_texts(read, source.column, where, on_error), source.max_documents)


def held_out(source: Hub) -> Hub | None:
    """The dataset's own validation split as a source, if the configuration names one."""
    if source.validation_split is None:
        return None
    return dataclasses.replace(source, split=source.validation_split, validation_split=None, max_documents=None)


def identity(source: Hub, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """The options, and the hashes of a local folder's files; of a hub dataset without a pinned commit, the hash by `datasets`.

    If the hub can't be reached for that hash, it is the one recorded in the latest store of the same options in `root`.
    """
    names = ("dataset", "config", "split", "validation_split", "column", "revision", "max_documents")
    options = {name: getattr(source, name) for name in names}
    folder = Path(source.dataset)
    if folder.is_dir():
        paths = sorted(files_in(folder))
        return options | {"files": [{"path": path.relative_to(folder).as_posix(), "sha256": hashes.sha256(path)} for path in paths]}
    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return options  # a commit identifies the content, so that a prepared store opens without a network
    try:
        return options | {"fingerprint": _call(source, lambda datasets: _builder(datasets, source).hash)}
    except Unreachable as error:
        if (recorded := _recorded(options, root)) is None:
            raise
        Progress().say(f"note: {error}; it is taken to be what it was when the latest store of it was prepared (pin data.source.revision)")
        return recorded


def _recorded(options: dict[str, Plain], root: Path) -> dict[str, Plain] | None:
    """The identity with these options in the latest manifest that holds one."""
    found: list[tuple[float, dict[str, Plain]]] = []
    for path in root.glob("*/manifest.json"):
        try:
            identities = json.loads(path.read_bytes())["source"]
            found += [(path.stat().st_mtime, one) for one in identities if {**options, "fingerprint": one["fingerprint"]} == one]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or a store of another kind
    return max(found, key=lambda one: one[0])[1] if found else None


def licence(source: Hub) -> str:
    """The licence that the dataset card or the dataset states."""
    try:
        stated = _call(source, lambda datasets: _card_licence(source) or _info(datasets, source).license)
    except DataError:
        return "not known (the dataset card can't be read)"
    return stated or "not stated by the dataset"


def _card_licence(source: Hub) -> str:
    """The licences in the metadata of the dataset card, README.md."""
    from huggingface_hub import DatasetCard, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path = Path(source.dataset, "README.md")
    if not Path(source.dataset).is_dir():
        try:
            path = Path(hf_hub_download(source.dataset, "README.md", repo_type="dataset", revision=source.revision))
        except EntryNotFoundError:
            return ""
    if not path.is_file():
        return ""
    stated = DatasetCard.load(path, ignore_metadata_errors=True).data.to_dict().get("license") or []
    return ", ".join(map(str, stated)) if isinstance(stated, list) else str(stated)


def _dataset(datasets, source: Hub) -> "Dataset | IterableDataset":
    if not _is_saved(source):
        return datasets.load_dataset(
            source.dataset, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
    saved = datasets.load_from_disk(source.dataset)
    splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or source.split): saved}
    if source.split not in splits:
        raise ValueError(f"it was saved with the splits {', '.join(splits)}")
    return splits[source.split]


def _info(datasets, source: Hub) -> "DatasetInfo":
    return _dataset(datasets, source).info if _is_saved(source) else _builder(datasets, source).info


def _is_saved(source: Hub) -> bool:
    """True for a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(Path(source.dataset, name).is_file() for name in ("state.json", "dataset_dict.json"))


def _builder(datasets, source: Hub):
    return datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision)


def _call(source: Hub, call: Callable):
    """`call(datasets)`; any error of the library or the network becomes a DataError of one line."""
    import datasets

    if source.dataset.startswith((".", "/", "~")) and not Path(source.dataset).is_dir():
        raise DataError(f"data.source.dataset: '{source.dataset}': no such folder")
    try:
        return call(datasets)
    except Exception as error:  # the library has no common base class
        text = f"config {source.config}, split {source.split}, revision {source.revision}"
        text = f"data.source.dataset: '{source.dataset}' ({text}): {one_line(error)}"
        if isinstance(error, ConnectionError):
            raise Unreachable(f"{text}; prepare it once where there is a network") from None
        raise DataError(text) from None
