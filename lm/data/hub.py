"""Datasets of the Hugging Face hub, or in a folder of that form, as documents."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from lm.config.data_config import Hub
from lm.data.hashes import FileHashes
from lm.data.reading import ROWS, OnError, check_column, column_texts
from lm.data.text_files import files_in
from lm.errors import DataError, one_line
from lm.schema import Plain


def documents(source: Hub, root: Path, on_error: OnError) -> Iterator[str]:
    """The texts in a column of the dataset."""
    dataset = _call(
        source,
        lambda datasets: datasets.load_dataset(
            source.dataset, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        ),
    )
    where = f"data.source.dataset: '{source.dataset}' ({source.split})"
    names = dataset.column_names
    if names is not None:
        check_column(where, source.column, names)
    chosen = dataset if names is None else dataset.select_columns([source.column])
    tables = chosen.with_format("arrow").iter(ROWS)  # arrow: a row that isn't UTF-8 can be left out alone
    read = iter(lambda: _call(source, lambda _: next(tables, None)), None)
    yield from islice(column_texts(read, source.column, where, on_error), source.max_documents)


def identity(source: Hub, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """The options, and the hashes of a local folder's files; of a hub dataset without a pinned commit, the hash by `datasets`."""
    settings = {name: getattr(source, name) for name in ("dataset", "config", "split", "column", "revision", "max_documents")}
    folder = Path(source.dataset)
    if folder.is_dir():
        paths = sorted(files_in(folder))
        return settings | {"files": [{"path": path.relative_to(folder).as_posix(), "sha256": hashes.sha256(path)} for path in paths]}
    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return settings  # a commit says it all, so that a prepared store opens without a network
    return settings | {"fingerprint": _call(source, lambda datasets: _builder(datasets, source).hash)}


def licence(source: Hub) -> str:
    """As the dataset states it."""
    return _call(source, lambda datasets: _builder(datasets, source).info.license) or "not stated by the dataset"


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
        offline = "; prepare it once where there is a network" if isinstance(error, ConnectionError) else ""
        settings = f"config {source.config}, split {source.split}, revision {source.revision}"
        raise DataError(f"data.source.dataset: '{source.dataset}' ({settings}): {one_line(error)}{offline}") from None
