"""Atomic writes, locks and hashes: files and folders are written completely or not at all, and synced to disk."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NoReturn

from lm.errors import DataError, RunError, one_line
from lm.machine import born, this_machine
from lm.schema import Plain

UNFINISHED = "unfinished"  # part of the names of files and folders that are being filled
ABANDONED_SECONDS = 86_400.0  # age at which an unfinished file of another machine counts as abandoned


def expanded(path: str | os.PathLike) -> Path:
    """The path, in which `~` is the home folder. Raises RunError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RunError(f"{path}: no such user") from None


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """An empty file beside `path` to write, and its path; it is deleted at the end, unless it was renamed. Unfinished files that killed
    processes have left beside it are deleted, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=unfinished(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            _delete_abandoned(Path(name))
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def unfinished(path: Path) -> str:
    """The beginning of the name of a file that this process fills in place of `path`: it names the machine and the process."""
    name = os.fsencode(path.name)[:100].decode(errors="ignore")  # file systems count bytes
    return f".{name}-{UNFINISHED}-{_machine()}-{os.getpid()}-{born(os.getpid())}-"


def _delete_abandoned(new_path: Path) -> None:
    """Delete the unfinished files and folders beside `new_path`, which was made just now, of processes that have ended.

    Files of other machines are deleted if they are `ABANDONED_SECONDS` old by the file system's clock. The start times
    of processes tell which have ended; file locks would not do, as not all file systems have them.
    """
    pattern = re.compile(rf"\..+-{UNFINISHED}-([0-9a-f]{{8}})-(\d+)-(\w+)-\w{{8}}")
    for leftover in new_path.parent.glob(f".*-{UNFINISHED}-*"):
        with suppress(OSError):  # deleted meanwhile
            if match := pattern.fullmatch(leftover.name):
                machine, pid, start = match.groups()
                is_local, age = machine == _machine(), new_path.stat().st_mtime - leftover.stat().st_mtime
                if (is_local and born(int(pid)) != start) or (not is_local and age > ABANDONED_SECONDS):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@cache
def _machine() -> str:
    return hashlib.sha256(this_machine().encode()).hexdigest()[:8]


@contextmanager
def replacing(path: Path, noun: str = "the file") -> Iterator[BinaryIO]:
    """A file to write in place of `path`: a temporary one in the same folder, synced and renamed at the end.

    If an error occurs, `path` is as it was and no file is left behind. `noun` names the file in the error.

    Raises RunError: the file can't be written (no permission, a full disk); it names the path and the reason.
    """
    try:
        with temporary_file(path) as (file, temporary_path):
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary_path, 0o644)
            os.replace(temporary_path, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError, raised from the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or one_line(error, 200)
        raise RunError(f"{path}: can't save {noun}: {reason}; what was there before is intact") from None


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) completely or not at all. Raises RunError, which names the file and the reason."""
    write_together({path: text.encode()})


def write_new(path: Path, content: bytes) -> bool:
    """Write a file unless it exists: exactly one of several processes writes it, on this machine or on others that share the folder.

    It appears whole: a temporary file is linked to its name, which a file system allows to one process. On a file system without hard
    links it is created exclusively, and for an instant is empty.

    Returns:
        True if this call has written it.

    Raises RunError: the file can't be written.
    """
    try:
        with temporary_file(path) as (file, temporary_path):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary_path, 0o644)
            try:
                os.link(temporary_path, path)
            except FileExistsError:
                return os.stat(temporary_path).st_nlink == 2  # over NFS an earlier try may have made the link, and its reply have been lost
            except OSError:
                with open(path, "xb") as new_file:
                    new_file.write(content)
        sync_folder(path.parent)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(f"{path}: can't save the file: {error.strerror}") from None


def write_together(contents: Mapping[Path, bytes], noun: str = "the file") -> None:
    """Write files that belong together; none is replaced before all are on the disk. Raises RunError as `replacing` does."""
    with ExitStack() as stack:
        for path, content in contents.items():
            file = stack.enter_context(replacing(path, noun))
            file.write(content)
            file.flush()  # a full disk shows here, while every file is still as it was


def check_new(path: Path) -> None:
    """Raise RunError if `path` exists and is not an empty folder."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: exists already; choose another")
    except OSError as error:
        raise RunError(f"{path}: can't make the folder: {error.strerror}") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end; if an error occurs, no folder is left behind. Unfinished folders of killed
    processes are deleted.

    Raises RunError: `path` exists and is not empty, or can't be made.
    """
    check_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=unfinished(path)))
        _delete_abandoned(temporary_folder)
    except OSError as error:
        raise RunError(f"{path}: can't make the folder: {error.strerror}") from None
    try:
        yield temporary_folder
        os.chmod(temporary_folder, 0o755)
        os.replace(temporary_folder, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


@contextmanager
def locked(path: Path, on_conflict: Callable[[], object], flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[str]:
    """Lock a file against other processes, and make it if it does not exist; a process that ends in any way gives its lock up.

    Args:
        on_conflict: called if another process has the lock; unless the call raises, the lock is then waited for.
        flags: the flags of `os.open` that open the file.

    Yields:
        The empty string; on a file system without locks, on which no file is locked, a clause on the folder, to which callers add the
        consequence and the remedy.
    """
    descriptors, lock_problem = [os.open(path, flags, 0o666)], ""

    def release() -> None:
        while descriptors:
            os.close(descriptors.pop())

    os.register_at_fork(after_in_child=release)  # workers may outlive a killed parent by seconds and must not keep its lock
    try:
        try:
            fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_conflict()
            fcntl.flock(descriptors[0], fcntl.LOCK_EX)
        except OSError as error:
            lock_problem = f"{path if path.is_dir() else path.parent}: its file system has no locks ({error.strerror})"
        yield lock_problem
    finally:
        release()


def locked_folder(folder: Path, refusal: str) -> AbstractContextManager[str]:
    """Lock a folder as `locked` does a file, without waiting. Raises RunError, with `refusal`, if another process has the lock."""

    def refuse() -> NoReturn:
        raise RunError(f"{folder}: {refusal}") from None

    return locked(folder, refuse, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Sync `folder` to disk, so that a rename within it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- JSON


def write_json(path: Path, content: Plain) -> Path:
    """`content` as indented JSON, whole or not at all; returns the file's path."""
    write_together({path: json_bytes(content)})
    return path


def json_bytes(content: Plain) -> bytes:
    """`content` as the text of an indented JSON file."""
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Plain]:
    """The object in a JSON file. Raises RunError if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON: {one_line(error, 160)}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON object")
    return content


def sealed(content: dict[str, Plain]) -> dict[str, Plain]:
    """`content` as it is read back from JSON, with a `sha256` of itself."""
    content = json.loads(json.dumps(content, allow_nan=False))  # with keys as they will be read: JSON's keys are texts
    return {**content, "sha256": plain_sha256(content)}


def unsealed(content: dict[str, Plain], path: Path) -> dict[str, Plain]:
    """`content`, which was read from `path`, without its `sha256`. Raises RunError if it has no sha256, or was altered."""
    body = {name: value for name, value in content.items() if name != "sha256"}
    if "sha256" not in content:
        raise RunError(f"{path}: holds no sha256 of itself: it is of an older version, and must be made again")
    if content["sha256"] != plain_sha256(body):
        raise RunError(f"{path}: was altered (its sha256 differs)")
    return body


def write_sealed(path: Path, content: dict[str, Plain]) -> Path:
    """`content` as JSON with a `sha256` of itself, whole or not at all; returns the file's path."""
    return write_json(path, sealed(content))


def read_sealed(path: Path) -> dict[str, Plain]:
    """The content that `write_sealed` wrote. Raises RunError if the file is missing, damaged or altered."""
    return unsealed(read_json(path), path)


# ---------------------------------------------------------------- sha256 of plain data and of files


HASHES_FILE = ".hashes.json"
_SETTLED_NS = 2_000_000_000  # a file changed this recently may change again without another modification time


def file_sha256(path: Path) -> str:
    """A file's sha256. Raises OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_sha256(plain: Plain) -> str:
    """sha256 of plain data; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> list[int]:
    """Size, times and inode of a file, which change with its content."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class FileHashes:
    """sha256 by file, cached in `root`; a file is read again if its size, times or inode differ."""

    def __init__(self, root: Path):
        self.path = root / HASHES_FILE
        self.is_changed = False
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = {}
        items = content.items() if isinstance(content, dict) else ()  # other content: a damaged cache, which is computed again
        self.hashes = {name: entry for name, entry in items if isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)}

    def cached(self, path: Path) -> str | None:
        """The file's cached sha256; None if the file must be read for it."""
        try:
            entry = self.hashes.get(str(path.resolve()))
            return entry[-1] if entry and entry[:-1] == _state(path) else None
        except OSError:
            return None

    def sha256(self, path: Path) -> str:
        """The file's sha256. Raises DataError if it can't be read."""
        try:
            if cached_hash := self.cached(path):
                return cached_hash
            state = _state(path)
            digest = file_sha256(path)
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from None
        if time.time_ns() - max(state[1:3]) > _SETTLED_NS:
            self.hashes[str(path.resolve())] = [*state, digest]
            self.is_changed = True
        return digest

    def save(self) -> None:
        """Save the cache, if its folder exists and can be written."""
        if self.is_changed and self.path.parent.is_dir():
            with suppress(RunError):
                write_text(self.path, json.dumps(self.hashes))


def sources_sha256(places: Iterable[str | Path]) -> str:
    """Sixteen digits of a sha256 over source files and the Python and C++ files in folders: over their relative paths and contents."""
    digest = hashlib.sha256()
    for place in map(Path, places):
        for path in sorted([*place.rglob("*.py"), *place.rglob("*.cpp")]) if place.is_dir() else [place]:
            digest.update(f"{path.relative_to(place.parent).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
