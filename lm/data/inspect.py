"""`lm data inspect`: prints the contents of a token store, and how much of its held-out text also occurs in its
training text.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config.load import load_config
from lm.data.prepare import open_prepared
from lm.data.store import MANIFEST, SPLITS, Split, Store
from lm.data.tokenizer import decode

N_GRAM = 13  # tokens, as in GPT-3's study of contamination (arXiv 2005.14165, appendix C)
MAX_SAMPLED_N_GRAMS = 2**17  # most held-out n-grams that are looked up for a source
_BLOCK_TOKENS = 2**22  # training tokens hashed at a time
_FILTER_BITS = 24  # bits of a hash that index a table of 16 MB, which rules out most training n-grams
_HASH_BASE = 0x9E3779B97F4A7C15  # odd base of the polynomial hashes, modulo 2^64


def overlap(store: Store) -> list[tuple[str, int, float]]:
    """Return (label, number of held-out n-grams looked up, fraction of them that also occur in the training text) for
    each source.

    An n-gram is a window of `N_GRAM` tokens of one document. All n-grams of a source, or `MAX_SAMPLED_N_GRAMS` evenly
    spaced n-grams, are looked up by 64-bit hash. Sources without held-out n-grams are left out. The training tokens are
    read once, in blocks.
    """
    hashes_by_source, first_token = [], 0
    for source in store.val.sources:
        hashes = _held_out_hashes(store.val, store.end_of_text, first_token, source.n_tokens)
        first_token += source.n_tokens
        if len(hashes):
            hashes_by_source.append((source.label, hashes))
    held_out_hashes = (
        np.unique(np.concatenate([hashes for _, hashes in hashes_by_source]))
        if hashes_by_source
        else np.empty(0, np.uint64)
    )
    shared_hashes = _occurring_hashes(store.train, held_out_hashes)
    return [(label, len(hashes), float(np.isin(hashes, shared_hashes).mean())) for label, hashes in hashes_by_source]


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


def _occurring_hashes(split: Split, held_out_hashes: np.ndarray) -> np.ndarray:
    """Return the hashes of the sorted `held_out_hashes` that are also hashes of n-grams in the split."""
    if not len(held_out_hashes):
        return held_out_hashes
    is_candidate = np.zeros(2**_FILTER_BITS, bool)
    is_candidate[held_out_hashes >> np.uint64(64 - _FILTER_BITS)] = True
    occurs = np.zeros(len(held_out_hashes), bool)
    for begin in range(0, split.n_tokens - N_GRAM + 1, _BLOCK_TOKENS):
        hashes = n_gram_hashes(
            split.tokens_at(np.arange(begin, min(split.n_tokens, begin + _BLOCK_TOKENS + N_GRAM - 1)))
        )
        hashes = hashes[is_candidate[hashes >> np.uint64(64 - _FILTER_BITS)]]
        nearest_index = np.minimum(np.searchsorted(held_out_hashes, hashes), len(held_out_hashes) - 1)
        occurs[nearest_index[held_out_hashes[nearest_index] == hashes]] = True
    return held_out_hashes[occurs]


# ---------------------------------------------------------------- printing


BAR_WIDTH, SAMPLE_CHARACTERS = 50, 200  # characters of a histogram's longest bar, and of a printed sample of text


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
    """Yield lines that report files, counts by split and source, overlap, histograms of lengths, `samples` documents of
    each source.
    """
    manifest = store.manifest
    n_bytes = sum(file["bytes"] for file in manifest["files"].values())
    n_shards = sum(len(getattr(store, name).shards) for name in SPLITS)
    yield f"{store.path}"
    yield (
        f"fingerprint  {store.fingerprint}; the sha256 of all {len(manifest['files'])} files ({n_bytes / 1e6:,.1f} "
        "MB) is verified"
    )
    vocabulary = f"vocabulary of {store.vocab_size:,}, bytes per token: {manifest['token_bytes']}"
    yield f"tokens       {np.dtype(store.train.dtype)} in {n_shards} shard(s), {vocabulary}"
    yield f"left out     {', '.join(f'{name} {count:,}' for name, count in manifest['left_out'].items())}"
    yield (
        f"unreadable   {manifest['unreadable']['count']:,} files, documents or rows, "
        f"{manifest['unreadable']['bytes']:,} bytes"
    )
    yield from (f"             {line}" for line in manifest["unreadable"]["first"])
    if origin := manifest.get("tokenizer_origin"):
        yield f"tokenizer    {origin['model']} at {origin['commit']}"
    if ids := manifest.get("ids"):
        n_first, n_last, max_id = ids["end_of_text_first"], ids["end_of_text_last"], ids["largest_id"]
        yield (
            f"ids          {ids['documents']:,} documents, largest id {max_id:,}; end of text first in {n_first:,}, "
            f"last in {n_last:,}"
        )
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
    for name in SPLITS:
        yield ""
        yield from histogram(name, getattr(store, name))
    tokenizer = store.tokenizer()
    for label, index in sample_documents(store.train, samples):
        text = decode(tokenizer, store.train.document(index)[1 : SAMPLE_CHARACTERS + 1].tolist(), special=True)[
            :SAMPLE_CHARACTERS
        ]
        yield ""
        yield f"{label}, training document {index:,} of {store.train.lengths[index] - 1:,} tokens:"
        yield f"  {text!r}"


def histogram(name: str, split: Split) -> Iterator[str]:
    """Yield lines of a histogram of document lengths, binned by powers of two: number of documents and fraction of all
    tokens.
    """
    if not split.n_documents:
        yield f"{name}: no documents"
        return
    powers = np.floor(np.log2([split.lengths.min(), split.longest])).astype(int)
    edges = 2 ** np.arange(powers[0], powers[1] + 2)
    documents, tokens = (np.histogram(split.lengths, edges, weights=weights)[0] for weights in (None, split.lengths))
    median = int(np.median(split.lengths))
    yield (
        f"{name}: tokens in a document (median {median:,}, longest {split.longest:,}), documents, fraction of all "
        "tokens"
    )
    for low, high, count, n_tokens in zip(edges[:-1], edges[1:], documents, tokens, strict=True):
        bar = "█" * round(BAR_WIDTH * n_tokens / tokens.max())
        yield f"  {low:>11,} to {high - 1:>11,} {count:>12,} {n_tokens / split.n_tokens:>7.1%} {bar}".rstrip()


def sample_documents(split: Split, samples: int) -> Iterator[tuple[str, int]]:
    """Yield (source's label, document's index in the split) for up to `samples` documents of each source, evenly spread
    over the source.
    """
    begin = 0
    for source in split.sources:
        count = min(samples, source.n_documents)
        yield from ((source.label, begin + number * source.n_documents // count) for number in range(count))
        begin += source.n_documents
