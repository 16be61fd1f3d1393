"""Atomic writes: files and folders are written completely or not at all, and synced to disk."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lm.errors import RunError, one_line

UNFINISHED = "unfinished"  # in the names of folders that are being filled


@contextmanager
def replacing(path: Path, what: str = "the file") -> Iterator[BinaryIO]:
    """A file to write in place of `path`: a temporary one in the same folder, synced and renamed at the end.

    If anything fails, `path` is as it was and nothing is left behind. `what` names it in the error.

    Raises:
        RunError: it can't be written (no permission, a full disk), naming the path and the reason.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor, "wb") as file:
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
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


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
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return os.stat(temporary).st_nlink == 2  # over NFS the reply may have been lost, and the link made by an earlier try
        except OSError:
            with open(path, "xb") as file:
                file.write(content)
        sync_folder(path.parent)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(f"{path}: can't save the file: {error.strerror}") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


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
        _delete_abandoned(path)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-{UNFINISHED}-"))
    except OSError as error:
        raise RunError(f"{path}: can't make the folder: {error.strerror}") from None
    try:
        with locked_folder(temporary, "another process fills it"):
            yield temporary
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _delete_abandoned(path: Path) -> None:
    """Delete unfinished folders for `path` that no process has locked: those who made them have ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}-{UNFINISHED}-*"):
        with suppress(OSError):  # in use, deleted meanwhile, or on a file system without locks
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)


@contextmanager
def locked_folder(folder: Path, refusal: str) -> Iterator[None]:
    """Lock `folder` against other processes that lock it; a process that ends, however that happens, gives its lock up.

    On a file system without locks nothing is locked.

    Raises:
        RunError: another process has it: the folder and `refusal`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    held = [descriptor]

    def release() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=release)  # workers may outlive a killed parent by seconds and must not keep its lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        release()
        raise RunError(f"{folder}: {refusal}") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        release()


def sync_folder(folder: Path) -> None:
    """Sync `folder` to disk, so that a rename within it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
