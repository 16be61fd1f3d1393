"""`lm data inspect`: what is in a token store, in the terminal and as a picture."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lm.config.load import load
from lm.data.overlap import N_GRAM, overlap
from lm.data.prepare import open_prepared
from lm.data.store import MANIFEST, SPLITS, Split, Store
from lm.data.tokenizer import decode
from lm.errors import DataError

BAR, SAMPLE = 50, 200  # characters


def inspect(arguments: list[str], out: Path | None, samples: int) -> None:
    """Check every byte of the store that `arguments` name (its folder, or a configuration), print its statistics, plot the lengths.

    Raises:
        DataError: there is no such store, it is damaged, or the picture can't be written.
    """
    folder = Path(arguments[0])
    is_store = len(arguments) == 1 and (folder.is_dir() or folder.name == MANIFEST)
    store = Store.open(folder.parent if folder.name == MANIFEST else folder) if is_store else open_prepared(load(arguments).data)
    store.verify()
    for line in describe(store, samples):
        print(line)
    picture = out or store.path.with_name(f"{store.path.name}.lengths.png")
    draw_lengths(store, picture)
    print(f"picture: {picture}")


def describe(store: Store, samples: int) -> Iterator[str]:
    """Lines: facts, counts by split and source, histogram of lengths, samples."""
    manifest = store.manifest
    n_bytes = sum(file["bytes"] for file in manifest["files"].values())
    shards = sum(len(getattr(store, name).shards) for name in SPLITS)
    yield f"{store.path}"
    yield f"fingerprint  {store.fingerprint}; the sha256 of all {len(manifest['files'])} files ({n_bytes / 1e6:,.1f} MB) is verified"
    exact = f"vocabulary of {store.vocab_size:,}, bytes per token: {manifest['token_bytes']}"
    yield f"tokens       {store.train.shards[0].dtype} in {shards} shard(s), {exact}"
    yield f"left out     {', '.join(f'{name} {count:,}' for name, count in manifest['left_out'].items())}"
    yield f"unreadable   {manifest['unreadable']['count']:,} files, documents or rows, {manifest['unreadable']['bytes']:,} bytes"
    yield from (f"             {line}" for line in manifest["unreadable"]["first"])
    yield ""
    yield f"{'':<6} {'source':<24} {'documents':>12} {'tokens':>16} {'bytes':>18} {'bytes/token':>12}  licence"
    for name in SPLITS:
        for source in getattr(store, name).sources:
            rate = source.n_bytes / max(1, source.n_tokens)
            yield (
                f"{name:<6} {source.label[:24]:<24} {source.n_documents:>12,} {source.n_tokens:>16,} {source.n_bytes:>18,} {rate:>12.2f}"
                f"  {source.licence}"
            )
    yield ""
    yield from overlaps(store)
    for name in SPLITS:
        yield ""
        yield from histogram(name, getattr(store, name))
    tokenizer = store.tokenizer()
    for label, index in sample_documents(store.train, samples):
        text = decode(tokenizer, store.train.document(index)[1 : SAMPLE + 1].tolist(), special=True)[:SAMPLE]
        yield ""
        yield f"{label}, training document {index:,} of {store.train.lengths[index] - 1:,} tokens:"
        yield f"  {text!r}"


def overlaps(store: Store) -> Iterator[str]:
    """Lines: the fraction of held-out n-grams that occur in the training text, by source, and what it means."""
    yield f"held-out {N_GRAM}-grams of tokens that also occur in training text:"
    found = overlap(store)
    for label, count, fraction in found:
        yield f"  {label[:24]:<24} {fraction:>7.1%} of {count:,} looked up"
    if found:
        yield "  such text is quoted, copied or near-duplicate: a model can recall it, and its loss there says nothing about new text"
    else:
        yield f"  none: no held-out document has {N_GRAM} tokens"


def histogram(name: str, split: Split) -> Iterator[str]:
    """Lines: the number of documents, and the fraction of tokens, with lengths from one power of two to the next."""
    edges, documents, tokens = length_histogram(split.lengths)
    median = int(np.median(split.lengths))
    yield f"{name}: tokens in a document (median {median:,}, longest {split.longest:,}), documents, fraction of all tokens"
    for low, high, count, n_tokens in zip(edges[:-1], edges[1:], documents, tokens, strict=True):
        bar = "█" * round(BAR * n_tokens / tokens.max())
        yield f"  {low:>11,} to {high - 1:>11,} {count:>12,} {n_tokens / split.n_tokens:>7.1%} {bar}".rstrip()


def length_histogram(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges at powers of two, the documents between each two of them, and their tokens."""
    powers = np.floor(np.log2(lengths)).astype(int)
    first, last = powers.min(), powers.max()
    documents = np.bincount(powers - first, minlength=last - first + 1)
    tokens = np.bincount(powers - first, lengths, last - first + 1)
    return 2 ** np.arange(first, last + 2), documents, tokens


def sample_documents(split: Split, samples: int) -> Iterator[tuple[str, int]]:
    """(label, index) of `samples` documents of each source, evenly spread."""
    begin = 0
    for source in split.sources:
        count = min(samples, source.n_documents)
        yield from ((source.label, begin + number * source.n_documents // count) for number in range(count))
        begin += source.n_documents


def draw_lengths(store: Store, path: Path) -> None:
    """A figure of the number of tokens by length of their document, split and source."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, name in zip(axes, SPLITS, strict=True):
        split = getattr(store, name)
        edges = length_histogram(split.lengths)[0]
        ends = np.cumsum([source.n_documents for source in split.sources])[:-1]
        by_source = [np.histogram(lengths, edges, weights=lengths)[0] / 1e6 for lengths in np.split(split.lengths, ends)]
        below = np.zeros(len(edges) - 1)
        for source, tokens in zip(split.sources, by_source, strict=True):
            axis.bar(np.arange(len(tokens)), tokens, 0.9, below, label=source.label)
            below += tokens
        axis.set_xticks(np.arange(len(edges)) - 0.5, [_short(edge) for edge in edges], fontsize=8)
        axis.set_title(f"{name}: {split.n_documents:,} documents, {split.n_tokens / 1e6:,.2f} M tokens", fontsize=10)
        axis.set_xlabel("tokens in the document")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens, millions")
    axes[0].legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't write the picture: {getattr(error, 'strerror', None) or error}") from None
    finally:
        pyplot.close(figure)


def _short(number: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
