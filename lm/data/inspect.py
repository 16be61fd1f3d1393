"""`lm data inspect`: prints the contents of a token store, and how much of its held-out text also occurs in its
training text.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config.load import load_config
from lm.data.prepare import open_prepared, summary
from lm.data.store import MANIFEST, SPLITS, Split, Store
from lm.data.tokenizer import decode

N_GRAM = 13  # tokens, as in GPT-3's study of contamination (arXiv 2005.14165, appendix C)
MAX_SAMPLED_N_GRAMS = 2**17  # most held-out n-grams that are looked up for a source
_BLOCK_TOKENS = 2**22  # training tokens hashed at a time
_HASH_BASE = 0x9E3779B97F4A7C15  # odd base of the polynomial hashes, modulo 2^64


def overlap(store: Store) -> list[tuple[str, int, float]]:
    """Return (label, number of held-out n-grams looked up, fraction of them that also occur in the training text) for
    each source.

    An n-gram is a window of `N_GRAM` tokens of one document. All n-grams of a source, or `MAX_SAMPLED_N_GRAMS` evenly
    spaced n-grams, are looked up by 64-bit hash. Sources without held-out n-grams are left out. The training tokens are
    read once, in blocks.
    """
    hashes_by_source, first_token = {}, 0
    for source in store.val.sources:
        hashes = _held_out_hashes(store.val, store.end_of_text, first_token, source.n_tokens)
        first_token += source.n_tokens
        if len(hashes):
            hashes_by_source[source.label] = hashes
    occurs = {label: np.zeros(len(hashes), bool) for label, hashes in hashes_by_source.items()}
    for begin in range(0, store.train.n_tokens - N_GRAM + 1, _BLOCK_TOKENS):
        end = min(store.train.n_tokens, begin + _BLOCK_TOKENS + N_GRAM - 1)
        training_hashes = n_gram_hashes(store.train.tokens_at(np.arange(begin, end)))
        for label, hashes in hashes_by_source.items():
            occurs[label] |= np.isin(hashes, training_hashes)
    return [(label, len(mask), float(mask.mean())) for label, mask in occurs.items()]


def n_gram_hashes(tokens: np.ndarray) -> np.ndarray:
    """Return the hash of every window of `N_GRAM` consecutive tokens: uint64 (tokens - N_GRAM + 1,)."""
    token_hashes = tokens.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(max(0, len(tokens) - N_GRAM + 1), np.uint64)
    for offset in range(N_GRAM):
        hashes *= np.uint64(_HASH_BASE)
        hashes += token_hashes[offset : offset + len(hashes)]
    return hashes ^ (hashes >> np.uint64(29))


def _held_out_hashes(split: Split, end_of_text: int, first: int, n_tokens: int) -> np.ndarray:
    """Return hashes (uint64) of the n-grams among the `n_tokens` tokens from index `first` on, without n-grams that
    hold an end-of-text token. `overlap` looks these hashes up in the training tokens."""
    n_windows = n_tokens - N_GRAM + 1
    if n_windows < 1:
        return np.empty(0, np.uint64)
    starts = first + np.unique(np.linspace(0, n_windows - 1, min(n_windows, MAX_SAMPLED_N_GRAMS)).astype(np.int64))
    windows = split.take(starts, N_GRAM)
    windows = windows[(windows != end_of_text).all(1)]
    return n_gram_hashes(windows.ravel())[::N_GRAM]


# ---------------------------------------------------------------- printing


QUANTILES = 10, 50, 90, 100  # percentages of a split's documents, by length
SAMPLE_CHARACTERS = 200  # characters of a printed sample of text


def inspect(arguments: list[str], samples: int) -> Store:
    """Check every byte of a token store, print statistics on it, and return it. `arguments`: the store's folder, or a
    configuration.

    Raises DataError: there is no such store, or it is damaged.
    """
    folder = Path(arguments[0])
    is_store = len(arguments) == 1 and (folder.is_dir() or folder.name == MANIFEST)
    store = (
        Store.open(folder.parent if folder.name == MANIFEST else folder)
        if is_store
        else open_prepared(load_config(arguments).data)
    )
    store.verify()
    for line in store_description(store, samples):
        print(line)
    return store


def store_description(store: Store, samples: int) -> Iterator[str]:
    """Yield lines that report files, counts by split and source, overlap, quantiles of lengths, `samples` documents of
    each source.
    """
    manifest = store.manifest
    n_bytes = sum(file["bytes"] for file in manifest["files"].values())
    sizes = f"the sha256 of all {len(manifest['files'])} files ({n_bytes / 1e6:,.1f} MB) is verified"
    yield f"{summary(store)}\nfingerprint  {store.fingerprint}; {sizes}"
    yield from (f"unreadable   {line}" for line in manifest["unreadable"]["first"])
    if origin := manifest.get("tokenizer_origin"):
        yield f"tokenizer    {origin['model']} at {origin['commit']}"
    yield ""
    yield f"{'':<6} {'source':<24} {'documents':>12} {'tokens':>16} {'bytes':>18} {'bytes/token':>12}  licence"
    for name in SPLITS:
        for source in getattr(store, name).sources:
            rate = source.n_bytes / max(1, source.n_tokens)
            yield (
                f"{name:<6} {source.label[:24]:<24} {source.n_documents:>12,} {source.n_tokens:>16,} "
                f"{source.n_bytes:>18,} {rate:>12.2f}"
                f"  {source.licence}"
            )
    yield ""
    yield f"held-out {N_GRAM}-grams of tokens that also occur in training text:"
    fractions = overlap(store)
    yield from (f"  {label[:24]:<24} {fraction:>7.1%} of {count:,} looked up" for label, count, fraction in fractions)
    interpretation = (
        "such text is quoted, copied or near-duplicate: a model can recall it, and its loss there says "
        "nothing about new text"
    )
    yield f"  {interpretation}" if fractions else f"  none: no held-out document has {N_GRAM} tokens"
    yield ""
    for name in SPLITS:
        if len(lengths := getattr(store, name).lengths):
            quantiles = [f"{int(np.percentile(lengths, percent)):,} ({percent} %)" for percent in QUANTILES]
            yield f"{name}: documents have at most so many tokens: {', '.join(quantiles)}"
    tokenizer = store.tokenizer()
    for label, index in sample_documents(store.train, samples):
        text = decode(tokenizer, store.train.document(index)[1 : SAMPLE_CHARACTERS + 1].tolist(), special=True)[
            :SAMPLE_CHARACTERS
        ]
        yield ""
        yield f"{label}, training document {index:,} of {store.train.lengths[index] - 1:,} tokens:"
        yield f"  {text!r}"


def sample_documents(split: Split, samples: int) -> Iterator[tuple[str, int]]:
    """Yield (source's label, document's index in the split) for up to `samples` documents of each source, evenly spread
    over the source.
    """
    begin = 0
    for source in split.sources:
        count = min(samples, source.n_documents)
        yield from ((source.label, begin + number * source.n_documents // count) for number in range(count))
        begin += source.n_documents
