"""Prepares a token store from its sources once, in a folder named by a hash of its sources and options. Later runs open
the store.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.data_config import DataConfig, TrainedTokenizer
from lm.data import tokenizer
from lm.data.build import build_store
from lm.data.sources import source_identity, source_labels
from lm.data.store import MANIFEST_FILE, STORE_FORMAT, Store, data_fingerprint
from lm.errors import ConfigError, DataError, Problem, RunError, one_line
from lm.files import file_lock, json_sha256, read_json
from lm.plain import Plain, to_plain
from lm.progress import Progress

if TYPE_CHECKING:
    from lm.config.tree import Config  # imports torch, without which a store can be prepared


def prepare(data: DataConfig, progress: bool = False, preferred_fingerprint: str = "") -> Store:
    """Open the token store of a configuration. If it does not exist, build it first, or finish an interrupted
    preparation.

    The folder is `data.root/LABEL-KEY`. LABEL names the sources or tasks. KEY is a hash of all that determines the
    content: sources or tasks, tokenizer, filters and format. The folder appears complete or not at all; processes that
    need the store at the same time wait for the process that builds it.

    Args:
        progress: print progress (stderr) and a summary (stdout).
        preferred_fingerprint: a store in `data.root` with this `Store.fingerprint` is opened if there is one, whether
            or not its sources still exist.

    Raises DataError: a source can't be read, is too small, or the store can't be written or is damaged.
    """
    store = find_store(data, preferred_fingerprint) if preferred_fingerprint else None
    if store is None:
        store = Store.open(_find_or_build_folder(data, Progress("auto" if progress else "none")))
    if progress:
        print(store_summary(store), flush=True)
    return store


def _find_or_build_folder(data: DataConfig, progress: Progress) -> Path:
    """Return the folder of the store, which is built first if it does not exist. One process at a time builds stores in
    `data.root`.
    """
    target = _store_folder(data, _store_identity(data))
    root = target.parent
    waiting_note = f"{root}: waiting for another process that prepares a token store"
    try:
        if not target.exists():
            root.mkdir(parents=True, exist_ok=True)
            with file_lock(root / ".lock", lambda: progress.say(waiting_note)) as lock_problem:
                if lock_problem:
                    raise DataError(
                        f"{lock_problem}, which keep processes from preparing one store at the same time; set "
                        "data.root to a folder on another one; a store that was prepared there may be moved here"
                    )
                identity = _store_identity(data)  # sources may have changed while another process prepared
                target = _store_folder(data, identity)
                if not target.exists():  # another process may have built the store meanwhile
                    build_store(data, identity, target, progress)
    except KeyboardInterrupt:
        progress.say("stopped; the same command continues from what is done")
        raise
    except OSError as error:  # of writing the store: readers raise DataError
        reason = error.strerror or one_line(error)
        raise DataError(
            f"{target}: can't write the token store: {reason}; make room, or set data.root to another folder"
        ) from None
    return target


def expected_vocab_size(data: DataConfig) -> int | None:
    """Return the vocabulary size of the token store, or of the tokenizer if no store is prepared. Return None if the
    tokenizer can't be read.
    """
    if data.symbolic:
        return max(weighted.task.vocab_size for weighted in data.tasks) + 1  # plus the end-of-text token
    with suppress(DataError):
        return Store.open(_store_folder(data, _store_identity(data))).vocab_size
    if isinstance(data.tokenizer, TrainedTokenizer):
        return data.tokenizer.vocab_size
    with suppress(DataError):
        return tokenizer.vocab_size(tokenizer.tokenizer_from_options(data.tokenizer))
    return None


def find_store(data: DataConfig, store_fingerprint: str) -> Store | None:
    """Open the store in `data.root` with this `Store.fingerprint`, whether or not its sources still exist. Return None
    if there is none.
    """
    for path in sorted(data.token_stores_folder.glob(f"*/{MANIFEST_FILE}")):
        with suppress(RunError, KeyError, TypeError, AttributeError):  # a damaged manifest, or a file of another kind
            manifest = read_json(path)
            if manifest["format"] == STORE_FORMAT and data_fingerprint(manifest["files"]) == store_fingerprint:
                return Store.open(path.parent)
    return None


def store_summary(store: Store) -> str:
    """Return a line that describes a store: its size, omissions, bytes per token and held-out fraction. For a store
    without text, the line has the names of the tasks and the number of symbols instead.
    """
    train, val, manifest = store.train, store.val, store.manifest
    if manifest["token_bytes"] == "one a symbol":
        tasks = ", ".join(source.label for source in train.sources)
        return f"{store.path}: sequences made up for {tasks}, over {store.vocab_size - 1:,} symbols"
    n_bytes, n_tokens = train.n_bytes + val.n_bytes, train.n_tokens + val.n_tokens
    unreadable, left_out = manifest["unreadable"], manifest["left_out"]
    omissions = [f"{left_out[name]:,} {name} left out" for name in ("blank", "copies") if left_out[name]]
    if unreadable["count"]:
        size = f"{unreadable['count']:,} files, documents or rows"
        omissions.append(f"{size} unreadable, the first: {unreadable['first'][0]}")
    return (
        f"{store.path}: {train.n_documents + val.n_documents:,} documents"
        + f" ({', '.join(omissions)})" * bool(omissions)
        + f", {n_tokens:,} tokens of a vocabulary of {store.vocab_size:,}, {n_bytes / n_tokens:.2f} bytes a token; "
        f"held out: {val.n_documents:,} documents, {val.n_bytes / n_bytes:.1%} of the text"
    )


def check_text_lengths(store: Store, config: "Config", key_in_error: str = "data.seq_len") -> None:
    """Raise ConfigError if training text, held-out text or a mixture's source is too short for a sequence of
    `config.data.seq_len` tokens.

    key_in_error: the configuration key that sets this length, for the error.
    """
    data, texts = config.data, [("training text", store.train.n_tokens), ("held-out text", store.val.n_tokens)]
    if len(data.sources) > 1 and data.text_weight:  # otherwise sources' weights draw no sequence
        texts += [(f"training text of {source.label}", source.n_tokens) for source in store.train.sources]
    name, n_tokens = min(texts, key=lambda text: text[1])
    if n_tokens <= data.seq_len:
        reason = f"a sequence needs {data.seq_len + 1:,} tokens, the {name} has {n_tokens:,} ({store.path.name})"
        remedy = f"add text, or train on sequences of {n_tokens - 1} tokens or less"
        raise ConfigError([Problem(key_in_error, data.seq_len, reason, remedy)])


# ---------------------------------------------------------------- the store of a configuration


def _store_identity(data: DataConfig) -> dict[str, Plain]:
    """Return everything that determines the store's content, as plain data. The weights of a mixture's sources are not
    included.
    """
    if data.symbolic:
        # `varied`: a key of earlier versions, whose stores are found
        tasks = [to_plain(weighted.task) | {"varied": False} for weighted in data.tasks]
        return {"format": STORE_FORMAT, "source": {"name": "tasks", "tasks": tasks, "seq_len": data.seq_len}}
    return {
        "format": STORE_FORMAT,
        "source": [source_identity(weighted.source, data.token_stores_folder) for weighted in data.sources],
        "tokenizer": tokenizer.tokenizer_identity(data.tokenizer),
        "val_fraction": data.val_fraction,
        "deduplicate": data.deduplicate,
        "document_bytes": [1, None],  # keys of earlier versions, whose stores are found
        "on_error": data.on_error,
    }


def _store_folder(data: DataConfig, identity: dict[str, Plain]) -> Path:
    """Return the folder of the store with this `identity`. The folder's name consists of the names of sources or tasks,
    and a hash.
    """
    tasks = dict.fromkeys(weighted.task.name for weighted in data.tasks)
    name = "+".join(tasks) if data.symbolic else "-".join(source_labels(data))
    return data.token_stores_folder / f"{name[:60]}-{json_sha256(identity)[:12]}"
