"""How much of the held-out text also occurs in training text: shared n-grams of tokens."""

import numpy as np

from lm.data.store import Split, Store

N_GRAM = 13  # tokens, as in GPT-3's study of contamination (arXiv 2005.14165, appendix C)
SAMPLED = 2**17  # held-out n-grams of each source that are looked up
_BLOCK = 2**22  # training tokens hashed at a time
_FILTER_BITS = 24  # a table of 16 MB, which most training n-grams don't get past
_BASE = 0x9E3779B97F4A7C15  # odd: hashes are polynomials in it, modulo 2^64


def overlap(store: Store) -> list[tuple[str, int, float]]:
    """(source, n-grams looked up, fraction of them found anywhere in the training text), for each source with held-out n-grams.

    The n-grams are windows of `N_GRAM` tokens of single documents, all of them or `SAMPLED` that are evenly spaced. They are compared by 64
    bits of a hash. Reads the training tokens once; memory does not grow with them.
    """
    found, first = [], 0
    for source in store.val.sources:
        hashes = _held_out_hashes(store.val, store.end_of_text, first, source.n_tokens)
        first += source.n_tokens
        if len(hashes):
            found.append((source.label, hashes))
    wanted = np.unique(np.concatenate([hashes for _, hashes in found])) if found else np.empty(0, np.uint64)
    shared = _occurring(store.train, wanted)
    return [(label, len(hashes), float(np.isin(hashes, shared).mean())) for label, hashes in found]


def n_gram_hashes(tokens: np.ndarray) -> np.ndarray:
    """Hashes of all windows of `N_GRAM` tokens: uint64 (tokens - N_GRAM + 1,)."""
    first = tokens.astype(np.uint64) + np.uint64(1)
    hashes, length = first, 1
    for bit in f"{N_GRAM:b}"[1:]:  # the hash of a window is that of its first half, times a power of the base, plus that of its second
        hashes = hashes[: len(hashes) - length] * np.uint64(pow(_BASE, length, 2**64)) + hashes[length:]
        length *= 2
        if bit == "1":
            hashes = hashes[:-1] * np.uint64(_BASE) + first[length:]
            length += 1
    return hashes ^ (hashes >> np.uint64(29))


def _held_out_hashes(split: Split, end_of_text: int, first: int, n_tokens: int) -> np.ndarray:
    """Hashes of n-grams without an end-of-text token among `n_tokens` from `first`."""
    n_windows = n_tokens - N_GRAM + 1
    if n_windows < 1:
        return np.empty(0, np.uint64)
    starts = first + np.unique(np.linspace(0, n_windows - 1, min(n_windows, SAMPLED)).astype(np.int64))
    windows = split.take(starts, N_GRAM)
    windows = windows[(windows != end_of_text).all(1)]
    return n_gram_hashes(windows.ravel())[::N_GRAM]


def _occurring(split: Split, wanted: np.ndarray) -> np.ndarray:
    """Those of the sorted hashes `wanted` that n-grams of the split have."""
    if not len(wanted):
        return wanted
    table = np.zeros(2**_FILTER_BITS, bool)
    table[wanted >> np.uint64(64 - _FILTER_BITS)] = True
    found = np.zeros(len(wanted), bool)
    for begin in range(0, split.n_tokens - N_GRAM + 1, _BLOCK):
        hashes = n_gram_hashes(split.at(np.arange(begin, min(split.n_tokens, begin + _BLOCK + N_GRAM - 1))))
        hashes = hashes[table[hashes >> np.uint64(64 - _FILTER_BITS)]]
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found[place[wanted[place] == hashes]] = True
    return wanted[found]
