"""sha256 of plain data and of files; the hashes of source files are cached, so that opening a store does not read its corpus."""

import contextlib
import hashlib
import json
import time
from pathlib import Path

from lm.errors import DataError, RunError
from lm.files import write_text
from lm.schema import Plain

FILE = ".hashes.json"
_SETTLED_NS = 2_000_000_000  # a file changed this recently may change again without another modification time


def file_sha256(path: Path) -> str:
    """A file's sha256. Raises OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_sha256(plain: Plain) -> str:
    """sha256 of plain data; the order of keys doesn't matter."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> list[int]:
    """Size, times and inode: what changes with the content of a file."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class FileHashes:
    """sha256 by file, cached in `root`; a file is read again if its size, times or inode differ."""

    def __init__(self, root: Path):
        self.path = root / FILE
        self.changed = False
        try:
            kept = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            kept = {}
        entries = kept.items() if isinstance(kept, dict) else ()  # anything else: a damaged cache, which is computed again
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
            with contextlib.suppress(RunError):
                write_text(self.path, json.dumps(self.known))
