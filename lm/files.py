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

UNFINISHED = "unfinished"  # part of the names of files and folders that are being written
ABANDONED_SECONDS = 86_400.0  # age at which an unfinished file of another machine counts as abandoned


def expanded(path: str | os.PathLike) -> Path:
    """`path`, in which `~` or `~USER` is replaced by the home folder. Raises RunError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RunError(f"{path}: no such user") from None


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A context that yields an empty file beside `path`, open for writing, and its path; the file is deleted at the end, unless it was
    renamed. Unfinished files that ended processes have left in the folder are deleted, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=unfinished(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            _delete_abandoned(Path(name))
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def unfinished(path: Path) -> str:
    """The prefix of the names of temporary files and folders that are to become `path`; it names this machine and process."""
    name = os.fsencode(path.name)[:100].decode(errors="ignore")  # file systems limit the bytes of a name
    return f".{name}-{UNFINISHED}-{_machine()}-{os.getpid()}-{born(os.getpid())}-"


def _delete_abandoned(new_path: Path) -> None:
    """Delete the unfinished files and folders of ended processes that are in the folder of `new_path`, which was made just now.

    Files of other machines are deleted once they are `ABANDONED_SECONDS` old by the file system's clock. Start times of processes, in the
    files' names, tell which processes have ended; file locks can't, as not all file systems have them.
    """
    pattern = re.compile(rf"\..+-{UNFINISHED}-([0-9a-f]{{8}})-(\d+)-(\w+)-\w{{8}}")
    for leftover in new_path.parent.glob(f".*-{UNFINISHED}-*"):
        with suppress(OSError):  # another process has deleted it meanwhile
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
    """A context that yields a temporary file in the folder of `path`, synced and renamed to `path` at the end.

    If an error occurs, `path` is as it was and the temporary file is deleted. `noun` names the file in the error.

    Raises RunError: the file can't be written (no permission, a full disk); the error names the path and the reason.
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
    """Write `text` to `path` in UTF-8, completely or not at all. Raises RunError, which names the file and the reason."""
    write_together({path: text.encode()})


def write_new(path: Path, content: bytes) -> bool:
    """Write a file unless it exists: exactly one of several processes writes it, on this machine or on others that share the folder.

    The file appears whole: a temporary file is hard-linked to `path`, in which only one process can succeed. On a file system without hard
    links, the file is opened for exclusive creation, and is empty for an instant.

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
                return os.stat(temporary_path).st_nlink == 2  # over NFS, the link may have been made and the reply lost
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
    """Write files that belong together; no file is replaced before all contents are written. Raises RunError as `replacing` does."""
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
    """A context that yields an empty folder, renamed to `path` at the end; if an error occurs, the folder is deleted. Unfinished folders
    of ended processes are deleted, too.

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
    """A context that locks a file, which is created if it is missing, against other processes; a process that ends in any way unlocks it.

    Args:
        on_conflict: called if another process has the lock; unless the call raises, the lock is then waited for.
        flags: the flags of `os.open` that open the file.

    Yields:
        The empty string; on a file system without locks, where the file is not locked, a clause that says so, to which callers add the
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
    """Write `content` to `path` as indented JSON, completely or not at all; return `path`."""
    write_together({path: json_bytes(content)})
    return path


def json_bytes(content: Plain) -> bytes:
    """The bytes of an indented JSON file that holds `content`."""
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
    """`content`, as it would be read back from JSON, with the further key `sha256`: the hash of all other keys and values."""
    content = json.loads(json.dumps(content, allow_nan=False))  # JSON turns keys into texts: the hash is of keys as read back
    return {**content, "sha256": plain_sha256(content)}


def unsealed(content: dict[str, Plain], path: Path) -> dict[str, Plain]:
    """`content`, which was read from `path`, without its key `sha256`. Raises RunError: there is no such key, or its hash differs."""
    body = {name: value for name, value in content.items() if name != "sha256"}
    if "sha256" not in content:
        raise RunError(f"{path}: holds no sha256 of itself: it is of an older version, and must be made again")
    if content["sha256"] != plain_sha256(body):
        raise RunError(f"{path}: was altered (its sha256 differs)")
    return body


def write_sealed(path: Path, content: dict[str, Plain]) -> Path:
    """Write `content` with its hash (`sealed`) to `path` as JSON, completely or not at all; return `path`."""
    return write_json(path, sealed(content))


def read_sealed(path: Path) -> dict[str, Plain]:
    """The content that `write_sealed` wrote to `path`. Raises RunError if the file is missing, damaged or altered."""
    return unsealed(read_json(path), path)


# ---------------------------------------------------------------- sha256 of plain data and of files


HASHES_FILE = ".hashes.json"
_SETTLED_NS = 2_000_000_000  # a file changed more recently than this may change again with the same modification time


def file_sha256(path: Path) -> str:
    """A file's sha256. Raises OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_sha256(plain: Plain) -> str:
    """sha256 of plain data; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> list[int]:
    """Size, modification time, change time and inode of a file: one of them changes when its content does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class FileHashes:
    """The sha256 of files, cached in a file in the folder `root`; a file is hashed again if its size, times or inode have changed."""

    def __init__(self, root: Path):
        self.path = root / HASHES_FILE
        self.is_changed = False
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = {}
        items = content.items() if isinstance(content, dict) else ()  # other content is a damaged cache: the files are hashed again
        self.hashes = {name: entry for name, entry in items if isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)}

    def cached(self, path: Path) -> str | None:
        """The file's cached sha256; None if it is not cached or the file has changed."""
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
    """The first 16 hex digits of a sha256 over the relative paths and contents of `places`: files, or folders with .py and .cpp files."""
    digest = hashlib.sha256()
    for source in map(Path, places):
        for path in sorted([*source.rglob("*.py"), *source.rglob("*.cpp")]) if source.is_dir() else [source]:
            digest.update(f"{path.relative_to(source.parent).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
