"""Tokenizers: trained, and from files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from texts import TEXTS, files_config, split_tokens, stored_texts, write_texts, write_tokenizer
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from lm.config.data_config import DataConfig, FileSource, PretrainedTokenizer, TokenizerFile, TrainedTokenizer
from lm.data.build import Document, can_cut_between_words, encode_documents, split_text
from lm.data.prepare import prepare
from lm.data.tokenizer import END_OF_TEXT, count_token_bytes, encode, load_tokenizer, train_tokenizer
from lm.errors import DataError


def test_a_trained_tokenizer_knows_every_byte_and_is_deterministic():
    first, second = (train_tokenizer(iter(TEXTS), TrainedTokenizer(300)) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.token_to_id(END_OF_TEXT) == 0
    assert sorted(first.id_to_token(index) for index in range(1, 257)) == sorted(
        token for token in first.get_vocab() if len(token) == 1
    )
    characters = "".join(map(chr, [*range(0x800), *range(0xE000, 0x11000), *range(0x10FF00, 0x110000)]))
    assert first.decode(encode(first, [characters])[0], skip_special_tokens=False) == characters


def test_a_vocabulary_beyond_the_text_is_an_error_that_names_what_fits(text_data: DataConfig):
    with pytest.raises(
        DataError, match=r"data\.tokenizer\.vocab_size = 60000: .* supports only (\d+) entries"
    ) as error:
        prepare(dataclasses.replace(text_data, tokenizer=TrainedTokenizer(60000)))
    supported = int(str(error.value).split("only ")[1].split()[0])
    assert prepare(dataclasses.replace(text_data, tokenizer=TrainedTokenizer(supported))).vocab_size == supported


def test_a_tokenizer_file_is_used_whatever_it_was_set_to(text_data: DataConfig, tmp_path: Path):
    Path(text_data.source.paths[0], "odd.txt").write_text("text with </s> in it")
    spec = TokenizerFile(str(write_tokenizer(tmp_path / "tokenizer.json")), "</s>")
    store = prepare(dataclasses.replace(text_data, tokenizer=spec))
    assert (store.vocab_size, store.end_of_text_id) == (292, 290)
    assert sorted(stored_texts(store)) == sorted([*TEXTS, "text with </s> in it"])
    assert (np.concatenate((split_tokens(store.train), split_tokens(store.val))) == 290).sum() == len(TEXTS) + 1
    assert store.bytes_per_token[291] == len("Zwölf".encode())
    assert store.bytes_per_token[290] == 0


def words_tokenizer(path: Path, last: int, **changes) -> TokenizerFile:
    """A tokenizer of letters, which is not byte-level but gives letters and spaces back."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {"<eos>": 0, "[unk]": 1, " ": 2, **{letter: n for n, letter in enumerate("abcdefghij", 3)}}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["z"] = last  # written by hand: the library counts to the largest id to write it
    path.write_text(json.dumps({**content, **changes}))
    return TokenizerFile(str(path), "<eos>")


LETTERS = ["abc defz", "jig", "fee fade z", "badge cab"]


def test_bytes_per_token_are_the_corpus_mean_where_the_vocabulary_does_not_say(tmp_path: Path):
    spec = words_tokenizer(tmp_path / "letters.json", 13)
    assert count_token_bytes(load_tokenizer(Path(spec.path), "<eos>")) is None
    store = prepare(files_config(write_texts(tmp_path / "texts", LETTERS), tmp_path, tokenizer=spec))
    np.testing.assert_allclose(store.bytes_per_token, [0, *[1] * 13], rtol=1e-6)
    assert store.manifest["token_bytes"] == "corpus mean"
    assert sorted(stored_texts(store)) == sorted(LETTERS)


def test_bytes_per_token_are_those_that_a_byte_level_decoder_gives(tmp_path: Path):
    # the second is one byte of no character; the third no byte, and stands for itself
    letters = {"<eos>": 0, "a": 1, "é": 2, "漢": 3, "Ã©": 4}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    model = {"type": "WordLevel", "vocab": letters, "unk_token": "a"}
    spec = words_tokenizer(tmp_path / "letters.json", 5, model=model, decoder=decoder)
    assert count_token_bytes(load_tokenizer(Path(spec.path), "<eos>")).tolist() == [0, 1, 1, 3, 2]


def test_more_than_65536_entries_are_stored_as_uint32(tmp_path: Path):
    spec = words_tokenizer(tmp_path / "letters.json", 70_000)
    store = prepare(files_config(write_texts(tmp_path / "texts", LETTERS), tmp_path, tokenizer=spec))
    assert store.vocab_size == 70_001
    assert split_tokens(store.train).dtype == np.uint32
    assert 70_000 in np.concatenate((split_tokens(store.train), split_tokens(store.val)))


@pytest.mark.parametrize("changes", [{}, {"normalizer": {"type": "NFC"}}, {"normalizer": {"type": "Lowercase"}}])
def test_a_document_that_the_tokenizer_does_not_give_back_is_named_or_left_out_and_counted(
    tmp_path: Path, changes: dict[str, dict[str, str]]
):
    """A letter that is decomposed, in upper case, or unknown; in files with separators, rows and whole files."""
    letters = {"c\u0327": "NFC", "D": "Lowercase", "!": ""}
    odd, cause = next(
        (odd, cause) for odd, cause in letters.items() if cause == changes.get("normalizer", {}).get("type", "")
    )
    spec = words_tokenizer(tmp_path / "letters.json", 13, **changes)
    write_texts(folder := tmp_path / "texts", [f"abc {odd} def", "abc def", "jig"])
    (folder / "a.txt").write_text(f"fee|cab{odd}|fade")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("bad", f"{odd}{odd}", "i"))
    )
    data = files_config(folder, tmp_path, source=FileSource([str(folder)], separator="|"), tokenizer=spec)
    with pytest.raises(DataError, match="does not give text back unchanged") as error:
        prepare(data)
    message = str(error.value)
    assert message.startswith(f"{folder}/000.txt: data.tokenizer: ")
    assert message.isascii()
    assert ascii(f"abc {odd} def") in message
    assert not cause or f"its normalizer is {cause}" in message
    assert not list((tmp_path / "stores").glob(".*.partial"))
    others = [f"{word} {letter}" for word in LETTERS for letter in "abcdefghij"]
    (folder / "z.txt").write_text("|".join(others))
    store = prepare(dataclasses.replace(data, on_error="skip"))
    kept = ["abc def", "jig", "fee", "fade", "bad", "i", *others]
    assert sorted(stored_texts(store)) == sorted(kept)
    unreadable = store.manifest["unreadable"]
    assert unreadable["count"] == 3
    places = [text.partition(": data.tokenizer")[0] for text in unreadable["first"]]
    assert places == [f"{folder}/000.txt", f"{folder}/a.txt: document from byte 4 on", f"{folder}/rows.jsonl: line 2"]
    assert store.train.n_bytes + store.val.n_bytes == len("".join(kept))


WITH_SPACE = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
CHANGING = {  # settings of a tokenizer.json under which text would not come back
    "lower case (as many bytes as before)": {"normalizer": {"type": "Lowercase"}},
    "a prefix space": {"pre_tokenizer": WITH_SPACE},
    "no bytes before merging": {"pre_tokenizer": None},
    "added token that swallows spaces before it": {"added": {"content": "word1", "lstrip": True}},
    "marks where words go on": {"model": {"continuing_subword_prefix": "##", "merges": []}},
}
HARMLESS = {  # settings under which the store is as exact as without
    "byte fallback": {"model": {"byte_fallback": True}},
    "a token for unknown text": {"model": {"unk_token": "<|endoftext|>"}},
    "no words": {"pre_tokenizer": {**WITH_SPACE, "add_prefix_space": False, "use_regex": False}},
    "an added word that is special": {"added": {"content": "word1", "special": True}},
}


def changed_tokenizer(path: Path, changes: dict[str, dict], vocab_size: int = 400) -> TokenizerFile:
    """A byte-level tokenizer.json with other settings: of the file, its model (`model`) and with another token
    (`added`).
    """
    tokenizer = train_tokenizer(iter(TEXTS), TrainedTokenizer(vocab_size))
    tokenizer.add_special_tokens(["</s>"])
    content = json.loads(tokenizer.to_str())
    token = {
        "id": vocab_size + 1,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    content["added_tokens"] += [token | changes["added"]] if "added" in changes else []
    content["model"] |= changes.get("model", {})
    path.write_text(
        json.dumps(content | {name: value for name, value in changes.items() if name not in ("added", "model")})
    )
    return TokenizerFile(str(path), "</s>")


@pytest.mark.parametrize("changes", CHANGING.values(), ids=CHANGING.keys())
def test_a_byte_level_tokenizer_that_changes_text_is_refused(
    text_data: DataConfig, tmp_path: Path, changes: dict[str, dict]
):
    with pytest.raises(DataError, match="does not give text back unchanged"):
        prepare(dataclasses.replace(text_data, tokenizer=changed_tokenizer(tmp_path / "tokenizer.json", changes)))


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS.keys())
def test_a_byte_level_tokenizer_that_does_not_change_text_is_exact(
    text_data: DataConfig, tmp_path: Path, changes: dict[str, dict]
):
    store = prepare(dataclasses.replace(text_data, tokenizer=changed_tokenizer(tmp_path / "tokenizer.json", changes)))
    assert sorted(stored_texts(store)) == sorted(TEXTS)
    assert store.manifest["token_bytes"] == "exact"


def test_a_tokenizer_with_dropout_is_refused(text_data: DataConfig, tmp_path: Path):
    spec = changed_tokenizer(tmp_path / "tokenizer.json", {"model": {"dropout": 0.1}})
    with pytest.raises(
        DataError,
        match=r"tokenizer\.json: model\.dropout = 0\.1 gives a text different tokens each time; set it to null",
    ):
        prepare(dataclasses.replace(text_data, tokenizer=spec))


@pytest.mark.parametrize("special", ["Document", "Ġword"])
@pytest.mark.parametrize("as_end", [True, False])
def test_a_special_token_that_text_becomes_is_refused(
    text_data: DataConfig, tmp_path: Path, special: str, as_end: bool, monkeypatch: pytest.MonkeyPatch
):
    spec = changed_tokenizer(tmp_path / "tokenizer.json", {"added": {"content": special, "special": True}})
    ids = json.loads(Path(spec.path).read_text())["model"]["vocab"]
    assert special in ids, "the case is none otherwise"
    spec = TokenizerFile(spec.path, special) if as_end else spec
    with pytest.raises(DataError, match=f"the text has the special token '{special}' in it as a word") as error:
        prepare(dataclasses.replace(text_data, tokenizer=spec))
    assert "\n" not in str(error.value)
    monkeypatch.setattr("lm.data.build.PIECE_CHARACTERS", 10)
    store = prepare(dataclasses.replace(text_data, tokenizer=spec, on_error="skip", val_fraction=0.5))
    assert set(stored_texts(store)) == {text for text in TEXTS if special.replace("Ġ", " ") not in text}


# ---------------------------------------------------------------- long documents in pieces


def test_a_document_encoded_in_pieces_has_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    alphabet = np.array([*"aaabbbcccdddee      '.,A1\n\té漢", "'s", "  ", "\r\n"])
    texts = ["".join(rng.choice(alphabet, 3_000)) for _ in range(20)] + TEXTS
    tokenizer = train_tokenizer(iter(texts), TrainedTokenizer(400))

    def encoded() -> tuple[np.ndarray, int, int]:
        """All tokens, the bytes of text, and the number of documents or pieces."""
        documents = (Document(text, len(text.encode()), index=index) for index, text in enumerate(texts))
        parts = list(encode_documents(documents, tokenizer, END_OF_TEXT))
        assert [piece.index for piece, _ in parts if piece.is_first_piece] == [*range(len(texts))]
        tokens = np.concatenate([tokens for _, tokens in parts])
        return tokens, sum(piece.n_bytes for piece, _ in parts), len(parts)

    tokens, n_bytes, n_documents = encoded()
    end = tokenizer.token_to_id(END_OF_TEXT)
    plain_ids = [[end, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    assert (tokens.tolist(), n_documents) == ([index for ids in plain_ids for index in ids], len(texts))
    monkeypatch.setattr("lm.data.build.PIECE_CHARACTERS", 10)
    assert sum(len(list(split_text(text))) for text in texts) > 1_000
    monkeypatch.setattr("lm.data.build.BATCH_BYTES", 1_000)
    in_pieces, in_pieces_bytes, n_pieces = encoded()
    np.testing.assert_array_equal(in_pieces, tokens)
    assert in_pieces.dtype == tokens.dtype
    assert in_pieces_bytes == n_bytes
    assert n_pieces > 1_000


def test_a_tokenizer_is_trained_on_short_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.data.build.MAX_WORD_LENGTH", 4)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"abcdefgh{number} " * 500)
    store = prepare(DataConfig(FileSource(paths=[str(tmp_path)]), TrainedTokenizer(262), root=str(tmp_path / "stores")))
    assert (
        max(map(len, Tokenizer.from_file(str(store.path / "tokenizer.json")).get_vocab().keys() - {END_OF_TEXT})) == 4
    )


def test_only_tokenizers_that_separate_words_encode_in_pieces(tmp_path: Path):
    assert can_cut_between_words(train_tokenizer(iter(TEXTS), TrainedTokenizer(300)))
    for change in ({"pre_tokenizer": None}, {"normalizer": {"type": "Lowercase"}}):
        assert not can_cut_between_words(load_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", **change), "</s>"))


# ---------------------------------------------------------------- bad files


def test_bad_tokenizer_files_are_one_line(text_data: DataConfig, tmp_path: Path):
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "text.json").write_bytes(b"\xff\xfe")
    good = write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "cut.json").write_bytes(good.read_bytes()[:-9])
    cases = {
        "missing.json": "No such file",
        "no.json": "not a tokenizer.json",
        "text.json": "not a tokenizer.json",
        "cut.json": "not a tokenizer.json",
        ".": "directory",
    }
    for name, expected in cases.items():
        with pytest.raises(DataError, match=expected) as error:
            prepare(dataclasses.replace(text_data, tokenizer=TokenizerFile(str(tmp_path / name))))
        assert "\n" not in str(error.value)
        assert "data.tokenizer.path" in str(error.value)
    with pytest.raises(DataError, match=r"no token '<eos>'; set data\.tokenizer\.end_of_text .*<\|endoftext\|>"):
        load_tokenizer(good, "<eos>")


@pytest.mark.parametrize("kept", [5, 120])
def test_a_vocabulary_whose_merges_were_cut_short_is_refused(kept: int, tmp_path: Path):
    content = json.loads(train_tokenizer(iter(TEXTS), TrainedTokenizer(400)).to_str())
    content["model"]["merges"] = content["model"]["merges"][:kept]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"no merge makes \d+ of its 142 tokens: .* cut short; fetch it again"):
        load_tokenizer(tmp_path / "tokenizer.json", END_OF_TEXT)


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [({"a": 0, "b": 0}, {"<s>": 2}), ({"a": 0, "b": 1}, {"<s>": 1}), ({"a": 0}, {"<s>": 1, "<t>": 1})],
)
def test_two_tokens_of_one_id_are_refused(vocabulary: dict[str, int], added: dict[str, int], tmp_path: Path):
    """Among the model's tokens, among added tokens, and one of each, to which the library gives another id."""
    shared = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": index, "content": token} | shared for token, index in added.items()]
    content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": tokens}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"'.*' and '.*' both have the id [01]; give each token an id of its own"):
        load_tokenizer(tmp_path / "tokenizer.json", "<s>")


# ---------------------------------------------------------------- of pretrained models


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the hub gives for the commit of someone/model; other models it doesn't know."""
    folder = tmp_path / "cache" / COMMIT
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer.json")

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert "tokenizer.json" in allow_patterns
        if (name, revision) != ("someone/model", "v1"):
            raise ConnectionError("404:\nno such model")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return folder


def test_a_pretrained_models_tokenizer_is_that_of_its_file_wherever_it_lies(
    text_data: DataConfig, hub: Path, tmp_path: Path
):
    by_file = prepare(dataclasses.replace(text_data, tokenizer=TokenizerFile(str(hub / "tokenizer.json"), "</s>")))
    remote, local = PretrainedTokenizer("someone/model", "v1", "</s>"), PretrainedTokenizer(str(hub), None, "</s>")
    store = prepare(dataclasses.replace(text_data, tokenizer=remote))
    assert store.fingerprint == by_file.fingerprint
    assert prepare(dataclasses.replace(text_data, tokenizer=local)).path == store.path
    other = json.loads((hub / "tokenizer.json").read_text())
    (hub / "tokenizer.json").write_text(json.dumps(other | {"truncation": None}))
    assert prepare(dataclasses.replace(text_data, tokenizer=remote)).path != store.path


@pytest.mark.parametrize(
    ("model", "revision", "end", "expected"),
    [
        ("nowhere", None, "</s>", "nowhere: no such folder or file, and not a name on the hub"),
        (
            "someone/other",
            None,
            "</s>",
            "someone/other: no such folder, and the hub does not give it: 404: no such model",
        ),
        ("{hub}", "v1", "</s>", "is on this machine, not on the hub; set data.tokenizer.revision to null"),
        ("{hub}/../gpt2", None, "</s>", "gpt2: has no tokenizer.json; from older files transformers writes one: "),
        ("{hub}", None, "<end>", "no token '<end>'; set data.tokenizer.end_of_text to one"),
    ],
)
def test_a_pretrained_model_without_a_usable_tokenizer_is_one_line(
    text_data: DataConfig, hub: Path, model: str, revision: str | None, end: str, expected: str
):
    (hub.parent / "gpt2").mkdir()
    ByteLevelBPETokenizer().save_model(str(hub.parent / "gpt2"))
    with pytest.raises(DataError) as error:
        prepare(dataclasses.replace(text_data, tokenizer=PretrainedTokenizer(model.format(hub=hub), revision, end)))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(Path(text_data.root).glob("*-*"))
