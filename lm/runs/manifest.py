"""The manifest of a run folder or model folder lists the sha256 of each file that lm has written there. Files are
checked by it before they are used.

Each line of manifest.jsonl is {"file", "sha256", "step", "weights"}. A line is added before its file gets its name, so
that a reader never meets a file without its line. A kill between the two leaves a line without a file, which does no
harm.

All lines of a file count, so that a kill while a file is replaced leaves the old file valid. Several processes, such as
training and `lm eval`, may add lines at a time: each addition is one write.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from lm.errors import RunError
from lm.files import file_sha256, replace_file, write_text
from lm.plain import Plain

MANIFEST_FILE = "manifest.jsonl"

Entry = dict[str, Plain]  # a line of the manifest


def manifest_entry(name: str, sha256: str, step: int, weights_sha256: str | None = None) -> Entry:
    """Return the manifest's line for the file `name`, a path within the folder.

    Args:
        step: training steps up to which the file holds results.
        weights_sha256: sha256 of the weights that the file holds, or on which it holds a measurement.
    """
    return {"file": name, "sha256": sha256, "step": step, "weights": weights_sha256}


def add_entries(folder: Path, *entries: Entry) -> None:
    """Add lines to the manifest of `folder`, synced to disk. Raises RunError: the manifest can't be written."""
    text = "".join("\n" + json.dumps(line) for line in entries)  # a line that a power cut leaves unfinished stays alone
    try:
        with (folder / MANIFEST_FILE).open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"{folder / MANIFEST_FILE}: can't be written: {error.strerror}") from None


def write_files(folder: Path, contents: Mapping[str, bytes], step: int = 0, weights_sha256: str | None = None) -> None:
    """Write files {name: content} of `folder` and their manifest lines. No file is replaced before all are written.
    Raises RunError as `replace_file` does.
    """
    with ExitStack() as stack:
        for name, content in contents.items():
            file = stack.enter_context(replace_file(folder / name))
            file.write(content)
            file.flush()  # a full disk shows here, while every file is still as it was
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        add_entries(folder, *(manifest_entry(name, sha256, step, weights_sha256) for name, sha256 in hashes.items()))


def check_file(folder: Path, name: str, sha256: str | None = None, advice: str = "bring it back") -> None:
    """Check that the file `name` of `folder` is as lm wrote it: the manifest has its sha256.

    sha256: the hash of the file's content, if it has been read already.

    Raises RunError, whose message ends in `advice`: the file is missing, was altered, or is of another folder.
    """
    try:
        sha256 = sha256 or file_sha256(folder / name)
    except OSError as error:
        raise RunError(f"{folder / name}: can't be read: {error.strerror}; {advice}") from None
    # whole entries are compared as text, as `add_entries` wrote them: folders may have thousands
    if json.dumps({"file": name, "sha256": sha256})[:-1] + "," not in _manifest_text(folder):
        reason = f"was altered, or is of another folder (its sha256 is not in {MANIFEST_FILE})"
        raise RunError(f"{folder / name}: {reason}; {advice}")


def read_file(folder: Path, name: str, advice: str = "bring it back") -> bytes:
    """Return the content of the file `name` of `folder`, checked by the manifest (`check_file`)."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise RunError(f"{folder / name}: can't be read: {error.strerror}; {advice}") from None
    check_file(folder, name, hashlib.sha256(content).hexdigest(), advice)
    return content


def read_entries(folder: Path, name: str = "") -> list[Entry]:
    """Return the readable lines of the manifest of `folder`, of all files or of the file `name`. Raises RunError: there
    is no manifest.
    """
    start = json.dumps({"file": name})[:-1] if name else ""
    lines = map(parse_line, (line for line in _manifest_text(folder).splitlines() if line.startswith(start)))
    return [line for line in lines if line and {"file", "sha256", "weights"} <= line.keys()]


def truncate_manifest(folder: Path, step: int) -> None:
    """Delete the lines of files with results of steps after `step`, which a resumed run writes anew. At step 0 delete
    all lines.
    """
    if (folder / MANIFEST_FILE).is_file():
        kept_lines = [line for line in read_entries(folder) if step and line["step"] <= step]
        write_text(folder / MANIFEST_FILE, "".join("\n" + json.dumps(line) for line in kept_lines))


def parse_line(text: str | bytes) -> dict[str, Plain] | None:
    """Return a line of a manifest or log as a dict; None if `text` is no JSON object with an integer `step`."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _manifest_text(folder: Path) -> str:
    """Return the text of the manifest of `folder`. Raises RunError: there is none."""
    try:
        return (folder / MANIFEST_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise RunError(
            f"{folder}: has no {MANIFEST_FILE}: it is of lm 0.11 or earlier, and lm 0.11 reads it, or the file was "
            "lost: bring it back"
        ) from None
