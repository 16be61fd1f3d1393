"""Claims: which process works on a run, kept in files so that processes on several machines never work on one run at the same time.

A claim on a run is the file `NAME.N` of the highest N in the folder of claims. Whoever finds it released or stale creates `NAME.N+1`, which
a file system grants to one process alone; no claim is ever deleted or taken out of another's hands, so nothing depends on what a directory
listing has not seen yet.

A claim is stale
- at once, if its holder was a process of this machine, and neither it nor the process that trains for it is alive;
- else when the holder, which touches it every `HEARTBEAT_SECONDS`, has not done so for `STALE_SECONDS` by the file system's clock.

A holder that was only slow (a suspended machine) finds the later claim at its next heartbeat, and stops what it trains.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lm.files import temporary_file, write_new
from lm.machine import born, this_machine
from lm.runs.folder import json_bytes, write_json
from lm.schema import Plain

HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 600.0


@dataclass(eq=False)
class Claim:
    """A claim that this process holds.

    Attributes:
        path: its file.
        on_lost: called, in another thread, when another process has taken the claim over.
        lost: whether that has happened.
    """

    path: Path
    content: dict[str, Plain]
    on_lost: Callable[[], None]
    lost: bool = field(default=False)

    def trained_by(self, pid: int) -> None:
        """Write down the process that trains: while it lives, the claim is not stale on this machine, whoever started it."""
        self.content |= {"child": pid, "child_born": born(pid)}
        write_json(self.path, self.content)


class Claims:
    """The claims in a folder that processes share.

    Args:
        folder: is made by the first claim.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._held: list[Claim] = []
        self._lock = threading.Lock()
        self._heart: threading.Thread | None = None

    def take(self, name: str, on_lost: Callable[[], None] = lambda: None) -> Claim | None:
        """The claim on `name`, a path relative to the folder; None while another process holds it."""
        number, content = self._last(name)
        if number and not self._is_free(self._path(name, number), content):
            return None
        mine = {"host": this_machine(), "pid": os.getpid(), "born": born(os.getpid()), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        claim = Claim(self._path(name, number + 1), mine, on_lost)
        if not write_new(claim.path, json_bytes(mine)):
            return None
        with self._lock:
            self._held.append(claim)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, daemon=True)
                self._heart.start()
        return claim

    def release(self, claim: Claim) -> None:
        """Give a claim back."""
        with self._lock:
            self._held.remove(claim)
        write_json(claim.path, claim.content | {"released": True})

    def release_all(self) -> None:
        """Give all claims back."""
        for claim in list(self._held):
            self.release(claim)

    def holders(self, names: Iterable[str]) -> dict[str, str]:
        """Who holds the claims on `names`, in words; without those that nobody holds."""
        found, places = {}, dict[Path, dict[str, int]]()
        for name in names:
            path = self._path(name, 0)
            if path.parent not in places:
                places[path.parent] = _numbers(path.parent)
            if number := places[path.parent].get(Path(name).name):
                content = self._content(name, number)
                if not self._is_free(self._path(name, number), content):
                    found[name] = f"process {content.get('pid', '?')} on {str(content.get('host', '?')).split()[0]}"
        return found

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}.{number}"

    def _last(self, name: str) -> tuple[int, dict[str, Plain]]:
        """The number of the latest claim, 0 if there is none, and what it says."""
        number = _numbers(self._path(name, 0).parent).get(Path(name).name, 0)
        return number, self._content(name, number)

    def _content(self, name: str, number: int) -> dict[str, Plain]:
        """What a claim says; nothing of one that is just being written."""
        content = {}
        with suppress(OSError, ValueError):
            content = json.loads(self._path(name, number).read_bytes())
        return content if isinstance(content, dict) else {}

    def _is_free(self, path: Path, content: dict[str, Plain]) -> bool:
        """Whether a claim was released, or is stale."""
        if content.get("released"):
            return True
        if content.get("host") == this_machine():
            processes = [(content.get("pid"), content.get("born")), (content.get("child"), content.get("child_born"))]
            # a process that could not read when it was born left that empty
            return not any(isinstance(pid, int) and (now := born(pid)) and since in (now, "") for pid, since in processes)
        try:
            with temporary_file(self.folder / "now") as (_, now):
                # a date in the future is of no heartbeat
                return abs(os.stat(now).st_mtime - os.stat(path).st_mtime) > STALE_SECONDS
        except OSError:
            return False

    def _beat(self) -> None:
        """Touch the claims that are held, and find out which were taken over."""
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            with self._lock:
                held = [claim for claim in self._held if not claim.lost]
            for claim in held:
                with suppress(OSError):
                    os.utime(claim.path)
                name, _, number = str(claim.path.relative_to(self.folder)).rpartition(".")
                if self._last(name)[0] > int(number):
                    claim.lost = True
                    claim.on_lost()


def _numbers(place: Path) -> dict[str, int]:
    """The number of the latest claim on each name in a folder."""
    found: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for entry in os.listdir(place):
            name, _, number = entry.rpartition(".")
            if number.isdecimal():
                found[name] = max(found.get(name, 0), int(number))
    return found
