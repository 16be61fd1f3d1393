"""What the data side costs: python scripts/bench.py data [--tokens 1e9] [--megabytes 0]

Start-up, memory and sequences a second on a store of `--tokens` tokens (a sparse file: its content is zeros); with
`--megabytes`, also the preparation of a made-up folder of that size. Each is measured in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from lm.config.data_config import DataConfig, Files, TrainedTokenizer
from lm.data.prepare import prepare
from lm.data.store import MANIFEST, SHARD_TOKENS, Store, npy, shard_path, write_file
from lm.files import file_sha256, write_sealed

START = """
import json, sys, time
from pathlib import Path
from lm.config.data_config import DataConfig
from lm.data.batches import TrainSequences
from lm.data.store import Store

def memory(name):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))

imported, begin = memory("RssAnon"), time.perf_counter()
store = Store.open(Path(sys.argv[1]))
opened = time.perf_counter()
sequences = TrainSequences(store, DataConfig(seq_len=1024), 64, seed=1)
sequences.batch(0)
first, after = time.perf_counter(), memory("RssAnon")
peak = memory("VmHWM")
steps = 0
while time.perf_counter() - first < 5:
    steps += 1
    sequences.batch(steps)
seconds = time.perf_counter() - first
print(json.dumps({
    "open, s": opened - begin, "first batch, s": first - opened,
    "memory after imports, MB": imported, "memory after the first batch, MB": after,
    "memory at the end, MB": memory("RssAnon"),
    "peak RSS of start-up, MB": peak, "pages of the store mapped at the end, MB": memory("RssFile"),
    "sequences of 1,024 a second": steps * 64 / seconds, "tokens a second": steps * 65536 / seconds,
}))
"""
PREPARE = """
import json, sys, time
from lm.config.data_config import DataConfig, Files, TrainedTokenizer
from lm.data.prepare import prepare

begin = time.perf_counter()
store = prepare(DataConfig(Files([sys.argv[1]]), TrainedTokenizer(4096), root=sys.argv[2]), progress=True)
peak = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
seconds, n_bytes = time.perf_counter() - begin, store.train.n_bytes + store.val.n_bytes
print(json.dumps({
    "prepare, s": seconds, "MB a second": n_bytes / 1e6 / seconds,
    "tokens": store.train.n_tokens + store.val.n_tokens, "peak RSS, MB": peak,
}))
"""


def made_up_folder(folder: Path, megabytes: int) -> None:
    """Files of JSON lines, 64 MB each: documents of 1 to 30 kB of made-up words, no two the same."""
    rng = np.random.default_rng(0)
    words = np.array(["".join(rng.choice(list("abcdefghiklmnoprstuvw"), rng.integers(2, 9))) for _ in range(20_000)])
    frequency = 1 / np.arange(10, len(words) + 10)
    pool = " ".join(rng.choice(words, 2_000_000, p=frequency / frequency.sum()))
    folder.mkdir(parents=True)
    n_bytes = number = 0
    while n_bytes < megabytes * 1_000_000:
        with open(folder / f"{n_bytes // 1_000_000:06d}.jsonl", "w") as file:
            while file.tell() < 64_000_000 and n_bytes + file.tell() < megabytes * 1_000_000:
                begin, size = rng.integers(len(pool) - 30_000), rng.integers(1_000, 30_000)
                file.write(json.dumps({"text": f"{number} {pool[begin : begin + size]}"}) + "\n")
                number += 1
            n_bytes += file.tell()


def sparse_store(folder: Path, n_tokens: int) -> Path:
    """A store of so many training tokens, all zero, in documents of 1,000: a real one whose shards are made larger by
    holes.
    """
    texts = folder / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"document {number} " + "of a few words " * 200)
    store = prepare(DataConfig(Files([str(texts)]), TrainedTokenizer(270), root=str(folder / "stores")))
    files = dict(store.manifest["files"])
    for number, begin in enumerate(range(0, n_tokens, SHARD_TOKENS)):
        path, size = shard_path(store.path / "train", number), 2 * min(SHARD_TOKENS, n_tokens - begin)
        path.touch()
        os.truncate(path, size)
        files[path.name] = {"bytes": size, "sha256": file_sha256(path)}
    offsets = np.append(np.arange(0, n_tokens, 1000), n_tokens).astype("<i8")
    files |= write_file(store.path / "train.offsets.npy", npy(offsets))
    (source,), counts = (
        store.manifest["splits"]["train"]["sources"],
        {"n_tokens": n_tokens, "n_documents": len(offsets) - 1},
    )
    train = {
        **store.manifest["splits"]["train"],
        **counts,
        "longest": min(1000, n_tokens),
        "sources": [{**source, **counts}],
    }
    write_sealed(
        store.path / MANIFEST,
        {**store.manifest, "files": files, "splits": {**store.manifest["splits"], "train": train}},
    )
    return Store.open(store.path).path


def measure(title: str, script: str, *arguments: Path) -> None:
    """Run `script` in a process of its own and print the figures it gives."""
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    print(title)
    for name, value in json.loads(result.stdout.splitlines()[-1]).items():
        print(f"  {name:<38} {value:>16,.2f}" if value < 100 else f"  {name:<38} {value:>16,.0f}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=float, default=1e9, help="size of the store that is opened")
    parser.add_argument("--megabytes", type=int, default=0, help="size of the text that is prepared; 0: none")
    parser.add_argument("--folder", type=Path, help="where to make it [default: the system's temporary folder]")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        measure(f"a store of {options.tokens:,.0f} tokens", START, sparse_store(folder, int(options.tokens)))
        if options.megabytes:
            made_up_folder(folder / "text", options.megabytes)
            measure(f"preparing {options.megabytes:,} MB of text", PREPARE, folder / "text", folder / "prepared")
