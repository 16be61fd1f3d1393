"""What the preparation of a made-up folder of text costs, in a process of its own.

python scripts/bench.py data [--megabytes 1000] [--folder DIR]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.py data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the text that is prepared")
    parser.add_argument("--folder", type=Path, help="where to make it [default: the system's temporary folder]")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        text, stores = Path(temporary) / "text", Path(temporary) / "stores"
        made_up_folder(text, options.megabytes)
        command = [sys.executable, "-c", PREPARE, str(text), str(stores)]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for name, value in json.loads(result.stdout.splitlines()[-1]).items():
        print(f"{name:<16} {value:>16,.2f}")
