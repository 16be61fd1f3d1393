"""Token ids of other programs: every format gives the same store, and what is damaged or does not fit is one line."""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from test_tokenizer import words_tokenizer, write_tokenizer
from texts import TEXTS, documents, files_config, readable_documents, write_texts

from lm.config.data_config import DataConfig, FileSource, Mixture, TokenizerFile, TokenSource, WeightedSource
from lm.config.load import load_config
from lm.data.prepare import prepare, store_summary
from lm.data.token_files import FORMAT_BY_FIRST_BYTES, Vocabulary
from lm.data.tokenizer import encode, tokenizer_from_options
from lm.errors import ConfigError, DataError

END = 290  # the id of end of text in these files


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerFile:
    return TokenizerFile(str(write_tokenizer(tmp_path / "tokenizer.json")), "</s>")


@pytest.fixture
def ids(tokenizer: TokenizerFile) -> list[list[int]]:
    """The ids of each text."""
    return encode(tokenizer_from_options(tokenizer), TEXTS)


# ---------------------------------------------------------------- writers, after the programs that write these files


def nanogpt(folder: Path, ids: list[list[int]]) -> Path:
    np.array([token for document in ids for token in (*document, END)], "<u2").tofile(folder / "train.bin")
    return folder / "train.bin"


def modded(folder: Path, ids: list[list[int]], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    stream = np.array([token for document in ids for token in (END, *document)], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(stream)
    (folder / "train.bin").write_bytes(header.tobytes() + stream.tobytes())
    return folder / "train.bin"


def jsonl(folder: Path, ids: list[list[int]]) -> Path:
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in ids))
    return folder / "ids.jsonl"


def parquet(folder: Path, ids: list[list[int]], dtype: str = "uint16", column: str = "input_ids") -> Path:
    kind = pyarrow.list_(getattr(pyarrow, dtype)())
    pyarrow.parquet.write_table(
        pyarrow.table({column: pyarrow.array(ids, kind)}), folder / "ids.parquet", row_group_size=7
    )
    return folder / "ids.parquet"


def saved(folder: Path, ids: list[list[int]]) -> Path:
    datasets.Dataset.from_dict({"text": ["" for _ in ids], "input_ids": ids}).save_to_disk(
        folder / "saved", num_shards=2
    )
    return folder / "saved"


WRITERS: dict[str, tuple[str, Callable[..., Path]]] = {
    "nanogpt": ("nanogpt", nanogpt),
    "modded-nanogpt": ("modded-nanogpt", modded),
    "llm.c of Llama 3": ("modded-nanogpt", lambda folder, ids: modded(folder, ids, 20240801, 7, "<u4")),
    "jsonl": ("column", jsonl),
    **{
        f"parquet of {kind}": ("column", lambda folder, ids, kind=kind: parquet(folder, ids, kind))
        for kind in ("int32", "uint64")
    },
    "saved": ("saved", saved),
}


def config(tmp_path: Path, tokenizer: TokenizerFile, kind: str, path: Path, **changes) -> DataConfig:
    return files_config(tmp_path, tmp_path, source=TokenSource([str(path)], kind, **changes), tokenizer=tokenizer)


@pytest.mark.parametrize("name", WRITERS)
def test_ids_are_read_back_document_for_document(
    tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]], name: str
):
    kind, write = WRITERS[name]
    data = config(tmp_path, tokenizer, kind, write(tmp_path, ids))
    vocabulary = Vocabulary(tokenizer)
    assert [document.tolist() for document in documents(data.source, vocabulary=vocabulary)] == ids
    store = prepare(data)
    stored = [split.document(n).tolist() for split in (store.train, store.val) for n in range(split.n_documents)]
    assert sorted(stored) == sorted([END, *document] for document in ids)
    assert store.manifest["token_bytes"] == "exact"
    assert store.train.n_bytes + store.val.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_files_of_their_own_are_held_out_whole(tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]]):
    (tmp_path / "val").mkdir()
    val = nanogpt(tmp_path / "val", ids[:5])
    data = config(tmp_path, tokenizer, "nanogpt", nanogpt(tmp_path, ids), validation_paths=[str(val)])
    store = prepare(data)
    assert [store.val.document(n)[1:].tolist() for n in range(5)] == ids[:5]
    assert [store.train.document(n)[1:].tolist() for n in range(store.train.n_documents)] == ids[5:]
    assert "data.val_fraction" not in store_summary(store)


def test_a_stream_without_borders_is_one_document(tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]]):
    """As nanoGPT prepares Shakespeare."""
    for name, part in (("train", ids[:30]), ("val", ids[30:])):
        np.concatenate(part).astype("<u2").tofile(tmp_path / f"{name}.bin")
    store = prepare(
        config(tmp_path, tokenizer, "nanogpt", tmp_path / "train.bin", validation_paths=[str(tmp_path / "val.bin")])
    )
    assert (store.train.n_documents, store.val.n_documents) == (1, 1)
    assert store.train.document(0)[1:].tolist() == [token for document in ids[:30] for token in document]


def test_a_text_and_its_ids_are_one_document(tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]]):
    folder = write_texts(tmp_path / "texts", TEXTS)
    parts = [
        WeightedSource(0.5, FileSource([str(folder)])),
        WeightedSource(0.5, TokenSource([str(jsonl(tmp_path, ids))], "column")),
    ]
    store = prepare(files_config(folder, tmp_path, source=Mixture(parts), tokenizer=tokenizer, deduplicate=False))
    documents_by_split = [
        {split.document(place)[1:].tobytes() for place in range(split.n_documents)}
        for split in (store.train, store.val)
    ]
    assert not set.intersection(*documents_by_split)


# ---------------------------------------------------------------- what is refused


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def four_bytes(content: bytes) -> bytes:
    return np.frombuffer(content, "<u2").astype("<u4").tobytes()


def structs(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [{"ids": [1, 2]}]}), folder / "ids.parquet")
    return folder / "ids.parquet"


def packed(place: int, form: str, value: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + struct.pack(form, value) + content[place + struct.calcsize(form) :]


def refused_files(folder: Path, ids: list[list[int]]) -> dict[str, tuple[str, Callable[[], Path], str]]:
    """Format, a function that writes the file, and words of the refusal."""

    def beside_empty() -> Path:
        (nanogpt(folder, ids).parent / "more.bin").touch()
        return folder

    def row(content: bytes) -> Callable[[], Path]:
        return lambda: changed(jsonl(folder, ids), lambda _: content)

    strange, interior = [*ids[:3], [5, 291, 292, 7]], [*ids[:3], [5, END, 7]]
    return {
        "empty": ("nanogpt", lambda: changed(nanogpt(folder, ids), lambda content: b""), "is empty"),
        "empty in a folder": ("nanogpt", beside_empty, "more.bin: is empty; remove it"),
        **{
            f"other {start}": ("nanogpt", lambda start=start: changed(nanogpt(folder, ids), start.__add__), ": is ")
            for start in FORMAT_BY_FIRST_BYTES
        },
        "text": ("nanogpt", lambda: changed(nanogpt(folder, ids), lambda content: b"some text " * 20), ": is text"),
        "padded": ("column", lambda: jsonl(folder, [*ids[:3], [5, 6] + [0] * 9]),
            "line 4: column 'input_ids': ends in 9 times the special token <|endoftext|> (id 0): padding"),
        "padded on the left": ("column", lambda: parquet(folder, [[0] * 9 + [5, 6], *ids[:3]]), "row 1: column "
            "'input_ids': begins in 9 times the special token <|endoftext|> (id 0): padding"),
        "padding alone": ("column", lambda: jsonl(folder, [*ids[:3], [0] * 4]), "begins in 4 times"),
        "padded by end of text": ("saved", lambda: saved(folder, [[*document, END, END, END] for document in ids]),
            "ends in 3 times the special token </s> (id 290): padding, which would be trained on; cut each row by"),
        "odd": ("nanogpt", lambda: changed(nanogpt(folder, ids), lambda content: content[:-1]), "not 2 for each id"),
        "headed": ("nanogpt", lambda: modded(folder, ids), "set that"),
        "unknown id": ("nanogpt", lambda: nanogpt(folder, strange), "document 4, from id"),
        "negative id": ("column", lambda: jsonl(folder, [*ids, [5, -1]]), "token 1 has the id -1"),
        "end inside": ("column", lambda: jsonl(folder, interior),
            "inside the document, at token 1; split the document there"),
        "no header": ("modded-nanogpt", lambda: nanogpt(folder, ids), "damaged, or of another format"),
        "wrong magic": ("modded-nanogpt", lambda: changed(modded(folder, ids), packed(0, "<i", 20240521)),
            "begins with 20240521 1"),
        "four bytes": ("nanogpt", lambda: changed(nanogpt(folder, ids), four_bytes), "as in ids of 4 bytes"),
        "no such file": ("nanogpt", lambda: jsonl(folder, ids).parent, ".bin files, which"),
        "wrong count": ("modded-nanogpt", lambda: changed(modded(folder, ids), packed(8, "<i", -3)),
            "of -3 ids that its header says"),
        "cut": ("modded-nanogpt", lambda: changed(modded(folder, ids), lambda content: content[:-2]),
            "that its header says"),
        "text in a column": ("column", row(b'{"input_ids": "a"}'), "line 1: column 'input_ids' does not hold"),
        "numbers": ("column", row(b'{"input_ids": [0.5]}'), "does not hold a list of token ids"),
        "struct": ("column", lambda: structs(folder), "row 1: column 'input_ids' does not hold a list of token ids"),
        "null inside": ("column", lambda: parquet(folder, [[1, None, 2]]), "does not hold a list of token ids"),
        "no column": ("column", lambda: parquet(folder, ids, column="ids"), "one of: ids"),
        "parquet cut": ("column", lambda: changed(parquet(folder, ids), lambda content: content[:-9]),
            "can't be read: "),
        "splits": ("saved", lambda: saved(folder, ids).parent, "it has no state.json"),
        "saved damaged": (
            "saved",
            lambda: changed(sorted(saved(folder, ids).glob("*.arrow"))[1], lambda content: content[:100]).parent,
            "can't be read: "
        ),
        "saved without the column": ("saved", lambda: saved(folder, ids), "no column 'labels'")
    }  # fmt: skip


def test_a_file_of_another_kind_that_a_glob_matches_is_named(
    tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]]
):
    nanogpt(tmp_path, ids), jsonl(tmp_path, ids)
    with pytest.raises(DataError, match=r"ids\.jsonl: can't read files of this kind; .* takes \.bin files"):
        prepare(config(tmp_path, tokenizer, "nanogpt", tmp_path / "[it][dr]*"))
    (tmp_path / "trees").mkdir()  # which a glob passes over
    assert prepare(config(tmp_path, tokenizer, "nanogpt", tmp_path / "tr*")).train.n_tokens


@pytest.mark.parametrize("name", refused_files(Path(), [[1]] * 4))
def test_files_that_are_damaged_or_do_not_fit_are_one_line(
    tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]], name: str
):
    (tmp_path / "files").mkdir()
    kind, write, expected = refused_files(tmp_path / "files", ids)[name]
    path = write()
    data = config(tmp_path, tokenizer, kind, path, **({"column": "labels"} if "labels" in expected else {}))
    with pytest.raises(DataError) as error:
        prepare(data)
    assert expected in str(error.value)
    assert str(path.with_suffix("")) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(Path(data.root).glob("*-*"))
    assert not list(Path(data.root).glob(".*.partial"))


@pytest.mark.parametrize("name", ["BPE", "WordLevel"])
@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "Fuse"}])
def test_ids_whose_decoded_text_has_other_bytes_are_refused(tmp_path: Path, decoder: dict | None, name: str):
    """As of a character-level preparation, whose tokenizer.json has no decoder."""
    letters = "abc def. " * 30
    vocabulary = {"</s>": 0, **{letter: n for n, letter in enumerate(sorted(set(letters)), 1)}}
    model = {"type": name, "vocab": vocabulary, "unk_token": "</s>"} | ({"merges": []} if name == "BPE" else {})
    tokenizer = words_tokenizer(tmp_path / "letters.json", 9, model=model, decoder=decoder)
    tokenizer = dataclasses.replace(tokenizer, end_of_text="</s>")
    ids = [[vocabulary[letter] for letter in letters[:length]] for length in range(100, 130)]
    data = config(tmp_path, tokenizer, "column", jsonl(tmp_path, ids))
    if decoder == {"type": "Fuse"}:
        store = prepare(data)
        assert store.train.n_bytes + store.val.n_bytes == sum(map(len, ids))
    else:
        expected = "ids decode to 'a b c   d" if decoder else "has no decoder, without which bytes of text can't be"
        with pytest.raises(DataError, match=expected):
            prepare(dataclasses.replace(data, on_error="skip"))


def test_unknown_tokens_at_an_end_are_no_padding(tmp_path: Path):
    tokenizer = words_tokenizer(tmp_path / "letters.json", 13)
    unknown = tokenizer_from_options(tokenizer).token_to_id("[unk]")
    ids = [[unknown, unknown, 1 + n % 9, *range(1, n)] for n in range(2, 10)]
    assert prepare(config(tmp_path, tokenizer, "column", jsonl(tmp_path, ids))).manifest["unreadable"]["count"] == 0


def test_documents_that_do_not_fit_are_left_out_and_counted_where_errors_are_skipped(
    tmp_path: Path, tokenizer: TokenizerFile, ids: list[list[int]]
):
    path = nanogpt(tmp_path, [*ids[:20], [5, 4000], *ids[20:]])
    read_documents, errors = readable_documents(TokenSource([str(path)], "nanogpt"), Vocabulary(tokenizer))
    assert [document.tolist() for document in read_documents] == ids
    assert len(errors) == 1
    store = prepare(dataclasses.replace(config(tmp_path, tokenizer, "nanogpt", path), on_error="skip"))
    assert store.manifest["unreadable"]["count"] == 1


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("{name: tokens, paths: [a.bin], format: nanogpt}",
         "data.tokenizer = 'train': token ids have a tokenizer already"),
        ("{name: mixture, of: [{source: {name: tokens, paths: [a.bin], format: nanogpt}}]}",
            "data.tokenizer = 'train': token ids have"),
        ("{name: tokens, paths: [a.bin]}", "data.source.format = null: must be given"),
        ("{name: tokens, format: column}", "data.source.paths"),
        ("{name: tokens, format: nanogpt, paths: [a.bin], validation_paths: ['']}",
            "data.source.validation_paths = '': is among the training files, or empty"),
        ("{name: tokens, format: nanogpt, paths: [a.bin], validation_paths: [a.bin]}",
            "data.source.validation_paths = 'a.bin': is among")
    ]
)  # fmt: skip
def test_options_that_do_not_go_together_are_named(source: str, path: str):
    with pytest.raises(ConfigError) as error:
        load_config(["configs/softmax.yaml", f"data.source={source}"])
    assert path in str(error.value)
