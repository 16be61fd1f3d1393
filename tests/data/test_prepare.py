"""What preparation makes of text, and how it ends when it can not go on."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
from texts import TEXTS, file_states, files_config, split_tokens, start_script, stored_texts, write_texts

from lm.config.data_config import DataConfig, FileSource, TrainedTokenizer
from lm.config.tree import Config
from lm.data.prepare import check_text_lengths, prepare
from lm.data.store import Store
from lm.data.tokenizer import train_tokenizer
from lm.errors import ConfigError, DataError
from lm.evaluation.held_out import long_sequences

# ---------------------------------------------------------------- the prepared store


def test_split_facts_agree_with_the_tokens(text_data: DataConfig):
    store = prepare(text_data)
    for split in (store.train, store.val):
        probability = (np.bincount(split_tokens(store.train), minlength=store.vocab_size) + 1) / (
            store.train.n_tokens + store.vocab_size
        )
        assert split.n_tokens == len(split_tokens(split)) == split.offsets[-1]
        assert split.n_documents == len(split.offsets) - 1
        assert split.longest == np.diff(split.offsets).max()
        assert split.unigram_cross_entropy == pytest.approx(-np.log(probability[split_tokens(split)]).mean())
        # exact: the bytes of all tokens are the text's
        assert store.bytes_per_token[split_tokens(split)].sum() == split.n_bytes
        assert split_tokens(split).dtype == np.uint16
        with pytest.raises(ValueError, match="read-only"):
            split.offsets[0] = 1
    assert store.manifest["token_bytes"] == "exact"


def test_a_second_prepare_changes_nothing_and_is_quick(text_data: DataConfig):
    first = prepare(text_data)
    before = file_states(first.path)
    begin = time.perf_counter()
    second = prepare(text_data)
    assert time.perf_counter() - begin < 1
    assert file_states(first.path) == before
    assert (second.path, second.fingerprint) == (first.path, first.fingerprint)


@pytest.mark.parametrize("change", ["content", "new file", "val_fraction", "vocab_size"])
def test_a_changed_input_makes_another_store(text_data: DataConfig, change: str):
    first = prepare(text_data)
    folder = Path(text_data.source.paths[0])
    if change == "content":
        (folder / "010.txt").write_text("Another text altogether.")
    elif change == "new file":
        (folder / "999.txt").write_text("One more text.")
    elif change == "val_fraction":
        text_data = dataclasses.replace(text_data, val_fraction=0.5)
    else:
        text_data = dataclasses.replace(text_data, tokenizer=TrainedTokenizer(310))
    second = prepare(text_data)
    assert second.path != first.path
    assert second.fingerprint != first.fingerprint
    assert Store.open(str(first.path)).fingerprint == first.fingerprint


def test_the_summary_is_one_line_of_figures(text_data: DataConfig, capfd: pytest.CaptureFixture):
    Path(text_data.source.paths[0], "zzz.txt").write_text(" \n")
    store = prepare(text_data, progress=True)
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    for figure in ("44 documents", "(1 blank left out)", f"{store.val.n_documents} documents", "bytes a token"):
        assert figure in out
    prepare(text_data)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- held-out documents


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_the_held_out_fraction_reaches_val_fraction_and_leaves_a_document(tmp_path: Path, fraction: float):
    store = prepare(
        files_config(
            write_texts(tmp_path / "texts", TEXTS), tmp_path, val_fraction=fraction, tokenizer=TrainedTokenizer(258)
        )
    )
    sizes = [len(text.encode()) for text in TEXTS]
    assert store.train.n_documents >= 1
    assert store.val.n_documents >= 1
    assert store.val.n_bytes >= min(fraction * sum(sizes), sum(sizes) - max(sizes))
    assert store.val.n_bytes <= fraction * sum(sizes) + max(sizes)


@pytest.mark.parametrize("n_others", [1, 20, 300])
def test_a_document_of_most_of_the_text_is_trained_on(tmp_path: Path, n_others: int):
    texts = [f"document {n} of some words " * 5 for n in range(n_others)] + ["one large document of all. " * 5000]
    store = prepare(files_config(write_texts(tmp_path / "texts", texts), tmp_path, tokenizer=TrainedTokenizer(270)))
    assert store.val.n_bytes <= max(0.5 * sum(map(len, texts[:-1])), len(texts[0])) + 150
    assert store.val.n_documents >= 1


def test_the_tokenizer_sees_training_documents_only(tmp_path: Path):
    """Each document repeats a word of its own: only words of training documents become tokens."""
    words = [
        hashlib.sha256(str(n).encode()).hexdigest().translate(str.maketrans("0123456789", "ghijklmnop"))[:10]
        for n in range(20)
    ]
    store = prepare(
        files_config(
            write_texts(tmp_path / "t", [f"{word} " * 50 for word in words]), tmp_path, tokenizer=TrainedTokenizer(390)
        )
    )
    vocabulary = set(store.tokenizer().get_vocab())
    decoded = stored_texts(store)
    train, val = decoded[: store.train.n_documents], decoded[store.train.n_documents :]
    assert all(f"Ġ{text.split()[0]}" in vocabulary for text in train)
    assert not any(f"Ġ{text.split()[0]}" in vocabulary for text in val)


@pytest.mark.parametrize("texts", [["one text only"], ["the same text", "the same text"], [" ", "\n\n"]])
def test_fewer_than_two_different_documents_is_an_error_with_a_remedy(tmp_path: Path, texts: list[str]):
    with pytest.raises(DataError, match=r"data\.source\.separator"):
        prepare(files_config(write_texts(tmp_path / "texts", texts), tmp_path))
    assert not list((tmp_path / "stores").glob("*[!.lock]*/"))


def test_input_that_changes_while_it_is_read_is_noticed(text_data: DataConfig, monkeypatch: pytest.MonkeyPatch):
    """The tokenizer's pass comes between scan and encoding: change a file there."""
    import lm.data.build as module

    def train_and_change(texts, spec):
        tokenizer = train_tokenizer(texts, spec)
        Path(text_data.source.paths[0], "005.txt").write_text("changed")
        return tokenizer

    monkeypatch.setattr(module, "train_tokenizer", train_and_change)
    with pytest.raises(DataError, match=r"changed while it was read \(document 6\)"):
        prepare(text_data)
    assert [path.name for path in Path(text_data.root).iterdir()] == [".lock"]


# ---------------------------------------------------------------- processes that die, wait or run out of space


SMALL_STEPS = {"lm.data.build.SHARD_BYTES": 100_000, "lm.data.build.BATCH_BYTES": 50_000}
SMALL = "import time, lm.data.build, lm.data.store\n" + "".join(
    f"{name} = {value}\n" for name, value in SMALL_STEPS.items()
)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of SMALL, in this process."""
    for name, value in SMALL_STEPS.items():
        monkeypatch.setattr(name, value)


def contents(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.path.iterdir()}


def test_a_killed_prepare_goes_on_from_its_whole_shards_to_the_same_bytes(
    large_texts: Path, tmp_path: Path, small_steps: None, capfd: pytest.CaptureFixture
):
    data = DataConfig(FileSource([str(large_texts)]), TrainedTokenizer(300), root=str(tmp_path / "whole"))
    expected = prepare(data)
    assert len(expected.train.shard_starts) > 3
    after_three = (
        "write, written = lm.data.build.write_store_file, []\n"
        "def write_file(path, content):\n"
        "    write(path, content), written.append(path.name)\n"
        "    if path.name == 'omitted-00002.json': print('three', flush=True), time.sleep(60)\n"
        "lm.data.build.write_store_file = write_file\n"
    )
    root = tmp_path / "killed"
    process = start_script(
        f"{SMALL}{after_three}lm.data.build.usable_cores = lambda: 2\nprepare(data)", large_texts, root
    )
    assert process.stdout.readline() == "three\n", process.communicate()
    process.kill()
    process.communicate()
    (partial,) = root.glob(".*.partial")
    lists = sorted(partial.glob("*/omitted-*"))
    assert [path.name for path in lists] == ["omitted-00000.json", "omitted-00001.json", "omitted-00002.json"]
    assert not list(root.glob("[!.]*"))
    lists[1].unlink()
    capfd.readouterr()
    store = prepare(dataclasses.replace(data, root=str(root)), progress=True)
    output = capfd.readouterr().err
    assert "finishing an interrupted token store" in output
    assert "tokenizer:" not in output
    assert contents(store) == contents(expected)
    assert not list(root.glob(".*.partial"))


@pytest.mark.parametrize("n_kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_prepare_killed_at_any_moment_leaves_no_store_that_looks_whole(
    large_texts: Path, tmp_path: Path, small_steps: None, n_kills: int
):
    """Killed again and again in one root, and each time in a root of its own."""
    data = DataConfig(FileSource([str(large_texts)]), TrainedTokenizer(300), root=str(tmp_path / "whole"))
    begin = time.perf_counter()
    expected = prepare(data)
    duration, rng = time.perf_counter() - begin, np.random.default_rng(n_kills)
    for number in range(n_kills):
        root = tmp_path / ("same" if number % 2 else str(number))
        process = start_script(f"{SMALL}print('begin', flush=True)\nprepare(data)", large_texts, root)
        assert process.stdout.readline() == "begin\n", process.communicate()
        time.sleep(rng.uniform(0, 1.2 * duration))
        process.kill()
        process.communicate()
        for path in root.glob("[!.]*"):
            assert contents(Store.open(path)) == contents(expected)
        if number % 2 == 0:
            assert contents(prepare(dataclasses.replace(data, root=str(root)))) == contents(expected)
    assert contents(prepare(dataclasses.replace(data, root=str(tmp_path / "same")))) == contents(expected)


def test_the_store_is_the_same_for_any_number_of_threads(
    large_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lm.data.build.BATCH_BYTES", 50_000)
    data = DataConfig(FileSource([str(large_texts)]), TrainedTokenizer(300))
    stores = []
    for n in (1, 3):
        monkeypatch.setattr("lm.data.build.usable_cores", lambda n=n: n)
        stores.append(prepare(dataclasses.replace(data, root=str(tmp_path / str(n)))))
    assert contents(stores[0]) == contents(stores[1])


@pytest.mark.parametrize("where", ["file", "/proc/lm-stores", "/dev/null/stores"])
def test_a_root_that_can_not_be_written_is_one_line(text_data: DataConfig, tmp_path: Path, where: str):
    (tmp_path / "file").write_text("")
    root = str(tmp_path / where)  # an absolute `where` stands for itself
    with pytest.raises(DataError, match=r"set data\.root") as error:
        prepare(dataclasses.replace(text_data, root=root))
    assert root in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [500, 3_000, 30_000])
def test_a_full_disk_is_one_line_with_the_remedy_and_leaves_nothing(large_texts: Path, tmp_path: Path, limit: int):
    """Files are limited to a size that the tokenizer, a part, or a file of the store exceeds."""
    script = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from lm.errors import LMError\ntry: prepare(data)\nexcept LMError as error: print(error)"
    )
    out, err = start_script(script, large_texts, tmp_path).communicate(timeout=120)
    assert out.count("\n") == 1, err
    assert "make room, or set data.root to another folder" in out
    assert not list(tmp_path.glob("[!.]*"))


def test_processes_that_prepare_at_once_agree_and_only_one_works(large_texts: Path, tmp_path: Path):
    script = (
        "import time, lm.data.prepare as module\nbuild = module.build_store\n"
        "module.build_store = lambda *given: (time.sleep(2), build(*given))\n"
        "print(prepare(data, progress=True).fingerprint)"
    )
    processes = [start_script(script, large_texts, tmp_path) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    assert len({out.splitlines()[-1] for out, _ in results}) == 1
    assert sum("preparing a new token store" in err for _, err in results) == 1
    assert sum("waiting for another process" in err for _, err in results) >= 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


# ---------------------------------------------------------------- sequences that fit


def test_a_seq_len_beyond_the_text_is_an_error_that_names_a_value_that_fits(text_data: DataConfig):
    store = prepare(text_data)
    longest = store.val.longest

    def problems(seq_len: int, factor: float | str) -> str:
        config = Config(data=dataclasses.replace(text_data, seq_len=seq_len))
        config.eval.long_context.length_factor = factor
        try:
            check_text_lengths(store, config)
            if config.eval.long_context.is_wanted(config.data):
                long_sequences(store, config)
        except ConfigError as error:
            return str(error)
        return ""

    assert problems(longest - 1, 1.0) == problems(longest, 0.0) == problems(store.val.n_tokens - 1, 0.0) == ""
    assert f"the longest has {longest:,}" in problems(longest, 1.0)
    assert "set it to auto" in problems(8, 1000.0)
    assert problems(8, "auto") == ""
    n_tokens = store.val.n_tokens
    assert f"a sequence needs {n_tokens + 1:,} tokens, the held-out text has {n_tokens:,}" in problems(n_tokens, 0.0)


# ---------------------------------------------------------------- memory

MEMORY = """
from pathlib import Path
import lm.data.build
from lm.config.data_config import TokenizerFile

lm.data.build.BATCH_BYTES = lm.data.build.PIECE_CHARACTERS = 100_000  # little beside what would be kept
lm.data.build.usable_cores = lambda: 1

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def prepared(folder, tokenizer):
    return prepare(DataConfig(FileSource([f"{sys.argv[1]}/{folder}"]), tokenizer, root=sys.argv[2]))

first = prepared("small", TrainedTokenizer(500))
before = peak()
store = prepared("large", TokenizerFile(f"{first.path}/tokenizer.json"))
print(store.train.n_bytes + store.val.n_bytes, peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path):
    """8 MB after 2 MB, in a process of its own."""
    rng = np.random.default_rng(0)
    words = " ".join(rng.choice([rng.bytes(4).hex() for _ in range(100)], 40_000))
    for name, count in (("small", 100), ("large", 400)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "rows.jsonl", "w") as file:
            for number in range(count):
                begin = int(rng.integers(len(words) - 20_000))
                file.write(json.dumps({"text": f"{number} {words[begin : begin + 20_000]}"}) + "\n")
    out, err = start_script(
        MEMORY, tmp_path, tmp_path / "stores", TOKENIZERS_PARALLELISM="false", MALLOC_ARENA_MAX="1"
    ).communicate(timeout=300)
    assert out, err
    n_bytes, growth = map(int, out.split())
    assert n_bytes > 8_000_000 - 10_000, err
    assert growth < 5_000, err  # KiB


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_memory_holds_a_long_document_a_few_times_at_most(tmp_path: Path, suffix: str):
    """A line of 8 MB after one of 0.5 MB, in a process of its own."""
    rng = np.random.default_rng(0)
    words = " ".join(rng.choice([rng.bytes(4).hex() for _ in range(100)], 900_000))
    for name, length in (("small", 500_000), ("large", 8_000_000)):
        (tmp_path / name).mkdir()
        lines = [words[:length], *(f"{number} {words[:20_000]}" for number in range(10))]
        entries = lines if suffix == "txt" else [json.dumps({"text": line}) for line in lines]
        (tmp_path / name / f"lines.{suffix}").write_text("\n".join(entries))
    script = MEMORY if suffix == "jsonl" else MEMORY.replace('{folder}"]', '{folder}"], separator="\\n"')
    out, err = start_script(
        script, tmp_path, tmp_path / "stores", TOKENIZERS_PARALLELISM="false", MALLOC_ARENA_MAX="1"
    ).communicate(timeout=300)
    assert out, err
    n_bytes, growth = map(int, out.split())
    assert n_bytes > 8_000_000, err
    assert 1024 * growth < 4 * n_bytes, err
