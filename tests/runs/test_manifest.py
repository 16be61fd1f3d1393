"""The manifest of a folder: what a kill, a second process, a move and a resume leave of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import lm
from lm.errors import RunError
from lm.runs.folder import MANIFEST_FILE, read_entries, read_file, truncate_manifest, write_files
from lm.runs.record import read_run
from lm.training.train import train


def test_a_kill_before_a_file_gets_its_name_leaves_the_old_one_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(tmp_path, {"a.json": b"1"})

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_files(tmp_path, {"a.json": b"2", "b.json": b"3"}, step=4)
    assert read_file(tmp_path, "a.json") == b"1"
    assert not (tmp_path / "b.json").exists()
    write_files(tmp_path, {"a.json": b"2"}, step=4)
    assert read_file(tmp_path, "a.json") == b"2"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(tmp_path, {"a.json": b"1"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"manifest\.jsonl: can't be written: No space left on device"):
        write_files(tmp_path, {"a.json": b"2"})
    assert read_file(tmp_path, "a.json") == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", MANIFEST_FILE]


WRITER = """
import sys
from pathlib import Path
from lm.runs.folder import write_files
for number in range(50):
    write_files(Path(sys.argv[1]), {f"{sys.argv[2]}-{number}": b"x"}, step=number)
"""


def test_two_processes_that_write_at_a_time_lose_no_line(tmp_path: Path):
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], cwd=ROOT) for name in ("training", "eval")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    names = {line["file"] for line in read_entries(tmp_path)}
    assert names == {f"{name}-{number}" for name in ("training", "eval") for number in range(50)}


def test_a_line_that_a_power_cut_left_unfinished_harms_no_other(tmp_path: Path):
    write_files(tmp_path, {"a": b"1"})
    with (tmp_path / MANIFEST_FILE).open("a") as file:
        file.write('\n{"file": "b", "sha2')
    (tmp_path / "b").write_bytes(b"2")
    write_files(tmp_path, {"c": b"3"})
    assert [read_file(tmp_path, name) for name in "ac"] == [b"1", b"3"]
    with pytest.raises(RunError, match=r"/b: was altered, or is of another folder"):
        read_file(tmp_path, "b")


def test_a_resume_drops_the_lines_of_later_steps(tmp_path: Path):
    for step in (0, 2, 4):
        write_files(tmp_path, {f"step-{step}": b"x"}, step=step)
    truncate_manifest(tmp_path, 2)
    assert [line["step"] for line in read_entries(tmp_path)] == [0, 2]
    assert [line["file"] for line in read_entries(tmp_path, "step-2")] == ["step-2"]
    truncate_manifest(tmp_path, 0)
    assert read_entries(tmp_path) == []


def test_a_run_folder_that_is_copied_moved_or_linked_whole_is_read_as_before(tiny, tmp_path: Path):
    config = tiny("name=a", "trainer.max_steps=4", "eval.long_context.length_factor=0")
    assert train(config) == 0
    copy = Path(shutil.copytree(config.run_folder, tmp_path / "copy"))
    moved, link = config.run_folder.rename(tmp_path / "moved"), tmp_path / "link"
    link.symlink_to(moved)
    for folder in (copy, moved, link):
        assert lm.load(folder).metadata["step"] == 4
        assert read_run(folder).evaluations[0].step == 4
