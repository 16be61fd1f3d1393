"""Change files of run folders and model folders, and their lines in the manifest, as if lm had written them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from lm.files import file_sha256, json_bytes
from lm.runs.folder import MANIFEST_FILE, METRICS_FILE, add_entries, manifest_entry, write_files


def record_files(folder: Path, *names: str) -> None:
    """Add lines for the named files, by default all, to the manifest of a run folder or model folder."""
    found = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = names or tuple(name for name in found if name not in (MANIFEST_FILE, METRICS_FILE))
    steps = {name: int("".join(re.findall(r"step-(\d+)", name)) or 0) for name in names}
    add_entries(folder, *(manifest_entry(name, file_sha256(folder / name), step) for name, step in steps.items()))


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file of a run folder or model folder, and its line in the manifest."""
    content = json.loads(path.read_text())
    change(content)
    write_files(path.parent, {path.name: json_bytes(content)})


def write_recorded_file(path: Path, content: dict | str) -> None:
    """Write text or JSON as a file of a folder, with its line in the manifest."""
    write_files(path.parent, {path.name: content.encode() if isinstance(content, str) else json_bytes(content)})
