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

UNFINISHED = "unfinished"  # in the names of files and folders that are being filled
ABANDONED_SECONDS = 86_400.0  # after which nothing of another machine is being filled any more


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """An empty file beside `path` to write, and its path; it is deleted at the end, unless it was renamed. What killed processes have left
    beside it is deleted, too."""
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
    return f".{path.name[:100]}-{UNFINISHED}-{_machine()}-{os.getpid()}-{born(os.getpid())}-"


def _delete_abandoned(mine: Path) -> None:
    """Delete the unfinished files and folders beside `mine`, which was made just now, of processes that have ended: those of this machine,
    and of others what is `ABANDONED_SECONDS` old by the file system's clock. No file lock says so, as not all file systems have them."""
    name = re.compile(rf"\..+-{UNFINISHED}-([0-9a-f]{{8}})-(\d+)-(\w+)-\w{{8}}")
    for leftover in mine.parent.glob(f".*-{UNFINISHED}-*"):
        with suppress(OSError):  # deleted meanwhile
            if match := name.fullmatch(leftover.name):
                machine, pid, since = match.groups()
                here, age = machine == _machine(), mine.stat().st_mtime - leftover.stat().st_mtime
                if (here and born(int(pid)) != since) or (not here and age > ABANDONED_SECONDS):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


@cache
def _machine() -> str:
    return hashlib.sha256(this_machine().encode()).hexdigest()[:8]


@contextmanager
def replacing(path: Path, what: str = "the file") -> Iterator[BinaryIO]:
    """A file to write in place of `path`: a temporary one in the same folder, synced and renamed at the end.

    If anything fails, `path` is as it was and nothing is left behind. `what` names it in the error.

    Raises:
        RunError: it can't be written (no permission, a full disk), naming the path and the reason.
    """
    try:
        with temporary_file(path) as (file, temporary):
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError, raised from the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or one_line(error, 200)
        raise RunError(f"{path}: can't save {what}: {reason}; what was there before is intact") from None


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) completely or not at all. Raises RunError naming the file and the reason."""
    write_together({path: text.encode()})


def write_new(path: Path, content: bytes) -> bool:
    """Write a file unless there is one: of several processes, on this machine or on others that share the folder, exactly one does.

    It appears whole: a temporary file is linked to its name, which a file system does for one of them. Where there are no hard links, it
    is created exclusively, and for an instant is empty.

    Returns:
        True if this call has written it.

    Raises:
        RunError: it can't be written.
    """
    try:
        with temporary_file(path) as (file, temporary):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return os.stat(temporary).st_nlink == 2  # over NFS the reply may have been lost, and the link made by an earlier try
            except OSError:
                with open(path, "xb") as exclusive:
                    exclusive.write(content)
        sync_folder(path.parent)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(f"{path}: can't save the file: {error.strerror}") from None


def write_together(contents: Mapping[Path, bytes], what: str = "the file") -> None:
    """Write files that belong together; none is replaced before all are on the disk. Raises RunError as `replacing`."""
    with ExitStack() as stack:
        for path, content in contents.items():
            file = stack.enter_context(replacing(path, what))
            file.write(content)
            file.flush()  # a full disk shows here, while every file is still as it was


def check_new(path: Path) -> None:
    """Raises RunError if there is something at `path` other than an empty folder."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: exists already; choose another")
    except OSError as error:
        raise RunError(f"{path}: can't make the folder: {error.strerror}") from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end; if anything fails, nothing is left behind. What a killed process left of
    an earlier attempt is deleted.

    Raises:
        RunError: `path` exists and holds something, or can't be made.
    """
    check_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=unfinished(path)))
        _delete_abandoned(temporary)
    except OSError as error:
        raise RunError(f"{path}: can't make the folder: {error.strerror}") from None
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: Path, taken: Callable[[], object], flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[str]:
    """Lock a file, which is made if need be, against other processes; a process that ends, however that happens, gives its lock up.

    Args:
        taken: called if another process has it, which is then waited for, unless the call raises.
        flags: to open it with.

    Yields:
        Empty; on a file system without locks, on which nothing is locked, a sentence that says so of the folder, to which its consequence
        and the remedy are added.
    """
    descriptors, unlocked = [os.open(path, flags, 0o666)], ""

    def release() -> None:
        while descriptors:
            os.close(descriptors.pop())

    os.register_at_fork(after_in_child=release)  # workers may outlive a killed parent by seconds and must not keep its lock
    try:
        try:
            fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken()
            fcntl.flock(descriptors[0], fcntl.LOCK_EX)
        except OSError as error:
            unlocked = f"{path if path.is_dir() else path.parent}: its file system has no locks ({error.strerror})"
        yield unlocked
    finally:
        release()


def locked_folder(folder: Path, refusal: str) -> AbstractContextManager[str]:
    """The same for a folder, which is not waited for. Raises RunError if another process has it: the folder and `refusal`."""

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
        self.changed = False
        try:
            stored = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            stored = {}
        entries = stored.items() if isinstance(stored, dict) else ()  # anything else: a damaged cache, which is computed again
        self.known = {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)}

    def cached(self, path: Path) -> str | None:
        """The file's sha256, if it is known without reading the file."""
        try:
            known = self.known.get(str(path.resolve()))
            return known[-1] if known and known[:-1] == _state(path) else None
        except OSError:
            return None

    def sha256(self, path: Path) -> str:
        """The file's sha256. Raises DataError if it can't be read."""
        try:
            if known := self.cached(path):
                return known
            state = _state(path)
            digest = file_sha256(path)
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from None
        if time.time_ns() - max(state[1:3]) > _SETTLED_NS:
            self.known[str(path.resolve())] = [*state, digest]
            self.changed = True
        return digest

    def save(self) -> None:
        """Save the cache, if its folder exists and can be written."""
        if self.changed and self.path.parent.is_dir():
            with suppress(RunError):
                write_text(self.path, json.dumps(self.known))


def sources_sha256(places: Iterable[str | Path]) -> str:
    """Sixteen digits of a sha256 over Python files, and over those in folders: their paths there, and what is in them."""
    digest = hashlib.sha256()
    for place in map(Path, places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{path.relative_to(place.parent).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
