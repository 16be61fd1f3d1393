"""Writes, locks and hashes files and folders. They are written completely or not at all, and synced to disk."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from lm.errors import DataError, RunError, one_line
from lm.plain import Plain

UNFINISHED_MARK = "unfinished"  # part of the names of files and folders that are being written


def expand_home(path: str | os.PathLike) -> Path:
    """Return `path` with a leading `~` or `~USER` replaced by the home folder. Raises RunError: no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RunError(f"{path}: no such user") from None


def new_temporary_path(path: Path) -> Path:
    """Return a new path beside `path`, for a file or folder that will be renamed to `path`.

    The umask decides the mode of this file, unlike with `tempfile`.
    """
    name = os.fsencode(path.name)[:100].decode(errors="ignore")  # file systems limit the bytes of a name
    return path.parent / f".{name}-{UNFINISHED_MARK}-{secrets.token_hex(8)}"


@contextmanager
def replace_file(path: Path, name_in_errors: str = "the file") -> Iterator[BinaryIO]:
    """Return a context that yields a temporary file, open for writing. At the end the file is synced and renamed to
    `path`.

    If an error occurs, `path` is unchanged and the temporary file is deleted.

    name_in_errors: what the error message calls the file, e.g. "the report".

    Raises RunError: the file can't be written (no permission, a full disk); the error names the path and the reason.
    """
    temporary_path = new_temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError, raised from the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or one_line(error, 200)
        raise RunError(f"{path}: can't save {name_in_errors}: {reason}; what was there before is intact") from None
    finally:
        with suppress(OSError):
            temporary_path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, completely or not at all. Raises RunError with the file and the reason."""
    write_together({path: text.encode()})


def write_together(contents: Mapping[Path, bytes], name_in_errors: str = "the file") -> None:
    """Write several files, {path: content}; none is replaced before all are written. Raises RunError as `replace_file`
    does.
    """
    with ExitStack() as stack:
        for path, content in contents.items():
            file = stack.enter_context(replace_file(path, name_in_errors))
            file.write(content)
            file.flush()  # a full disk shows here, while every file is still as it was


def require_new_path(path: Path) -> None:
    """Raise RunError if `path` exists, unless it is an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path}: exists already; choose another")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Return a context that yields an empty temporary folder. At the end the folder is renamed to `path`, or deleted if
    an error occurs.

    Raises RunError: `path` exists and is not empty, or can't be written.
    """
    require_new_path(path)
    temporary_folder = new_temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_folder.mkdir()
        yield temporary_folder
        os.replace(temporary_folder, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


LockProblem = str  # why nothing is locked; empty if there is a lock


@contextmanager
def file_lock(
    path: Path, on_conflict: Callable[[], object], open_flags: int = os.O_RDWR | os.O_CREAT
) -> Iterator[LockProblem]:
    """Return a context that holds a lock on a file against other processes. A missing file is created. The lock ends
    with the process at the latest.

    Args:
        on_conflict: called if another process has the lock; unless the call raises, this process then waits for the
            lock.
        open_flags: the flags of `os.open` that open the file.

    Yields:
        An empty string if the file is locked. If the file system has no locks, nothing is locked, and the string says
            so. The caller adds the consequence and the remedy to this text.
    """
    descriptors, lock_problem = [os.open(path, open_flags, 0o666)], ""

    def release() -> None:
        while descriptors:
            os.close(descriptors.pop())

    # workers may outlive a killed parent by seconds and must not keep its lock
    os.register_at_fork(after_in_child=release)
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


def folder_lock(folder: Path, conflict_message: str) -> AbstractContextManager[LockProblem]:
    """Return a context that locks a folder as `file_lock` does. If another process has the lock, entering the context
    raises RunError with the text `conflict_message`.
    """

    def refuse() -> NoReturn:
        raise RunError(f"{folder}: {conflict_message}") from None

    return file_lock(folder, refuse, os.O_RDONLY)


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
    """Return `content` as the bytes of an indented JSON file."""
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Plain]:
    """Return the object in a JSON file as a dict. Raises RunError if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON: {one_line(error, 160)}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON object")
    return content


# ---------------------------------------------------------------- sha256 of plain data and of files


# a file changed more recently than this may change again with the same modification time
_RECENT_CHANGE_NS = 2_000_000_000


def file_sha256(path: Path) -> str:
    """Return a file's sha256. Raises OSError if the file can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(content: Plain) -> str:
    """Return a sha256 of `content` as JSON that is the same for any order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class FileHashes:
    """Computes the sha256 of files, and caches them in a file in the folder `root`.

    A cached hash is found by a file's path, size, times and inode. One of these changes when the content does.
    """

    def __init__(self, root: Path):
        self.cache_path, self.is_changed, self.sha256_by_file_state = root / ".hashes.json", False, {}
        with suppress(RunError):  # a missing or damaged cache: the files are hashed again
            self.sha256_by_file_state = read_json(self.cache_path)

    def sha256(self, path: Path) -> str:
        """Return the sha256 of a file, from the cache if possible. Raises DataError if the file can't be read."""
        try:
            status = path.stat()
            changed = max(status.st_mtime_ns, status.st_ctime_ns)
            file_state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
            if file_state in self.sha256_by_file_state:
                return self.sha256_by_file_state[file_state]
            digest = file_sha256(path)
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from None
        if time.time_ns() - changed > _RECENT_CHANGE_NS:
            self.sha256_by_file_state[file_state], self.is_changed = digest, True
        return digest

    def save(self) -> None:
        """Write the cache to disk if it has changed and its folder exists and is writable."""
        if self.is_changed and self.cache_path.parent.is_dir():
            with suppress(RunError):
                write_text(self.cache_path, json.dumps(self.sha256_by_file_state))


def source_files_sha256(paths: Iterable[str | Path]) -> str:
    """Return 16 hex digits of a sha256 over the relative paths and contents of source files. These are the files in
    `paths`, and all .py and .cpp files in the folders in `paths`.
    """
    digest = hashlib.sha256()
    for source in map(Path, paths):
        for path in sorted([*source.rglob("*.py"), *source.rglob("*.cpp")]) if source.is_dir() else [source]:
            digest.update(f"{path.relative_to(source.parent).as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()[:16]
