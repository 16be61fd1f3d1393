"""sha256 of source files, remembered: opening a store must not read its corpus again."""

import hashlib
import json
import os
import time
from pathlib import Path

from lm.errors import DataError

FILE = ".hashes.json"
_SETTLED_NS = 2_000_000_000  # a file changed this recently may change again within one tick of its clock


class FileHashes:
    """sha256 by file, kept in `root`; a file is read again once its size, times or inode differ."""

    def __init__(self, root: Path):
        self.path = root / FILE
        self.changed = False
        try:
            self.known = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            self.known = {}

    def sha256(self, path: Path) -> str:
        """The file's sha256. Raises DataError if it can't be read."""
        try:
            found = path.stat()
            state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
            name = str(path.resolve())
            known = self.known.get(name)
            if known and known[:-1] == state:
                return known[-1]
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from None
        if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS:
            self.known[name] = [*state, digest]
            self.changed = True
        return digest

    def save(self) -> None:
        """Keep them, if the folder is there and can be written; they are a convenience only."""
        if self.changed and self.path.parent.is_dir():
            temporary = self.path.with_name(f"{FILE}.{os.getpid()}")
            try:
                temporary.write_text(json.dumps(self.known))
                os.replace(temporary, self.path)
            except OSError:
                temporary.unlink(missing_ok=True)
