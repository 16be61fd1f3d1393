"""The journal of an unfinished token store: what is complete on disk, with hashes, so that nothing damaged is continued."""

import json
from pathlib import Path

from lm.data.hashes import file_sha256, plain_sha256
from lm.data.writing import SplitWriter, write_whole
from lm.schema import Plain

JOURNAL = "journal.json"


class Journal:
    """What an interrupted preparation completed in `folder`; empty if it completed nothing, or if the journal is damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entry: dict[str, Plain] = {}
        try:
            found = json.loads((folder / JOURNAL).read_bytes())
            if isinstance(found["entry"], dict) and plain_sha256(found["entry"]) == found["sha256"]:
                self.entry = found["entry"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            pass

    @property
    def n_documents(self) -> int:
        """Documents whose tokens are on disk."""
        count = self.entry.get("documents")
        return count if isinstance(count, int) and count > 0 else 0

    def holds(self, name: str) -> bool:
        """True if the file `name` is what `keep` wrote."""
        path = self.folder / name
        return path.is_file() and self.entry.get(name) == file_sha256(path)

    def keep(self, name: str, content: bytes) -> None:
        """Write the file `name`, and record its hash."""
        write_whole(self.folder / name, content)
        self._write({name: file_sha256(self.folder / name)})

    def advance(self, n_documents: int, writers: dict[str, SplitWriter]) -> None:
        """Record that the first `n_documents` documents are on disk, in the splits that `writers` write."""
        for writer in writers.values():
            writer.sync()
        self._write({"documents": n_documents} | {name: writer.progress() for name, writer in writers.items()})

    def resumed(self, name: str, vocab_size: int, end_of_text: int) -> SplitWriter | None:
        """A writer that continues the split `name`; None if its files are not those of the last `advance`."""
        progress = self.entry.get(name)
        if not isinstance(progress, dict) or not isinstance(n_tokens := progress.get("n_tokens"), int):
            return None
        try:
            writer = SplitWriter(self.folder, name, vocab_size, end_of_text, n_tokens)
        except (EOFError, ValueError, FileNotFoundError):  # too few tokens, or ids beyond the vocabulary
            return None
        if writer.progress() == progress:
            return writer
        writer.close()
        return None

    def remove(self) -> None:
        """Delete the journal: the store is complete."""
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _write(self, changes: dict[str, Plain]) -> None:
        self.entry |= changes
        write_whole(self.folder / JOURNAL, json.dumps({"entry": self.entry, "sha256": plain_sha256(self.entry)}).encode())
