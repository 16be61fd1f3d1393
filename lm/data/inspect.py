"""`lm data inspect`: checks a token store, and prints what is in it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config.load import load_config
from lm.data.prepare import open_prepared, summary
from lm.data.store import MANIFEST, SPLITS, Store
from lm.data.tokenizer import decode

QUANTILES = 10, 50, 90, 100  # percentages of a split's documents, by length
SAMPLE_CHARACTERS = 200  # characters of a printed sample of text


def inspect(arguments: list[str], samples: int) -> Store:
    """Check every byte of a token store, print statistics on it, and return it. `arguments`: the store's folder, or a
    configuration.

    Raises DataError: there is no such store, or it is damaged.
    """
    folder = Path(arguments[0])
    is_store = len(arguments) == 1 and (folder / MANIFEST).is_file()
    store = Store.open(folder) if is_store else open_prepared(load_config(arguments).data)
    store.verify()
    for line in store_description(store, samples):
        print(line)
    return store


def store_description(store: Store, samples: int) -> Iterator[str]:
    """Yield lines that report files, counts by split and source, quantiles of lengths, and `samples` training documents
    of each source, evenly spread over it.
    """
    manifest = store.manifest
    n_bytes = sum(file["bytes"] for file in manifest["files"].values())
    sizes = f"the sha256 of all {len(manifest['files'])} files ({n_bytes / 1e6:,.1f} MB) is verified"
    yield f"{summary(store)}\nfingerprint  {store.fingerprint}; {sizes}"
    yield from (f"unreadable   {line}" for line in manifest["unreadable"]["first"])
    if origin := manifest.get("tokenizer_origin"):
        yield f"tokenizer    {origin['model']} at {origin['commit']}"
    yield ""
    yield f"{'':<6} {'source':<24} {'documents':>12} {'tokens':>16} {'bytes':>18} {'bytes/token':>12}"
    for name in SPLITS:
        for source in getattr(store, name).sources:
            rate = source.n_bytes / max(1, source.n_tokens)
            yield (
                f"{name:<6} {source.label[:24]:<24} {source.n_documents:>12,} {source.n_tokens:>16,} "
                f"{source.n_bytes:>18,} {rate:>12.2f}"
            )
    yield ""
    for name in SPLITS:
        if len(lengths := getattr(store, name).lengths):
            quantiles = [f"{int(np.percentile(lengths, percent)):,} ({percent} %)" for percent in QUANTILES]
            yield f"{name}: documents have at most so many tokens: {', '.join(quantiles)}"
    tokenizer, train, begin = store.tokenizer(), store.train, 0
    for source in train.sources:
        count = min(samples, source.n_documents)
        for index in (begin + number * source.n_documents // count for number in range(count)):
            tokens = train.document(index)[1:]
            text = decode(tokenizer, tokens[:SAMPLE_CHARACTERS].tolist(), special=True)[:SAMPLE_CHARACTERS]
            yield f"\n{source.label}, training document {index:,} of {len(tokens):,} tokens:\n  {text!r}"
        begin += source.n_documents
