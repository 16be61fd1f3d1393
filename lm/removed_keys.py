"""Configuration keys, and values of keys, that earlier versions had: what to do without each.

A block that gives such a key its former default, as the configurations of older runs do, is read as before.
"""

import re
from collections.abc import Iterator

# {path of a key, as in docs/config.md; `*` for any part: (former default, advice)}
REMOVED_KEYS: dict[str, tuple[object, str]] = {
    "model.transfer": (None, "tune optim.lr for each size; what it gained is in docs/recipes.md"),
    "eval.downstream": (None, "write eval.tasks=[NAME, ...]; tasks of your own are the paths of their YAML files"),
    "more_seeds": ([], "write all seeds in `seeds`, before the first run"),
    "primary.learned": (None, "compare means: by `matters`, or tokens to a level: `reach`"),
    "optim.groups.*.eps": (None, "set optim.optimizer.eps, which all groups have"),
    "optim.optimizer[muon].nesterov": (True, "drop it: Muon has Nesterov's momentum"),
    "optim.optimizer[muon].ns_steps": (5, "drop it: Muon makes five Newton-Schulz iterations"),
    "optim.optimizer[muon].adjust_lr": ("match_rms_adamw", "drop it, and give the rate of steps of about AdamW's size"),
    "eval.*.every": (None, "give fractions of the run: eval.needle.at=[0.5, 1], for example"),
    "eval.*.max_seconds": (None, "drop it, and measure fewer sequences where an evaluation takes too long"),
    "eval.needle.finetune.batch_sequences": (16, "drop it: fine-tuning has 16 sequences a step"),
    "eval.needle.finetune.lr": (2e-4, "drop it: fine-tuning has a rate of 2e-4"),
    "eval.diagnostics.top_k": ([8, 64], "drop it: the weight on the largest 8 and 64 keys is measured"),
    "eval.diagnostics.nearest": ([16, 64], "drop it: the weight on the nearest 16 and 64 keys is measured"),
    "eval.*.inference[].rope[yarn].fast": (32.0, "drop it: pairs of at least 32 periods stay"),
    "eval.*.inference[].rope[yarn].slow": (1.0, "drop it: pairs of at most one period are interpolated"),
    "log.notes": (None, "set WANDB_NOTES in the environment"),
    "log.score_sequences": (2, "drop it: two sequences are looked at"),
    "eval.diagnostics.limits": (
        {
            "vectors": "embedding",
            "unit": True,
            "first_token": True,
            "queries": 16,
            "sample_size": 144,
            "temperatures": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
            "steps": [0.001, 0.1, 10.0],
            "directions": 16,
        },
        "its statistics have fixed options; lm.diagnostics.limits has functions of any vectors and number of keys",
    ),
    "data.min_document_bytes": (1, "drop it, and leave short documents out of the files"),
    "data.max_document_bytes": (None, "drop it, and leave long documents out of the files"),
    "data.prepare_workers": (None, "drop it: a thread a core tokenises; taskset gives it fewer"),
    "data.tokenizer[train].special_tokens": ([], "drop it, or name a tokenizer.json that has them"),
    "model.position.scaling[llama3].slow": (1.0, "drop it: Llama 3's 1 is the only one"),
    "model.position.scaling[llama3].fast": (4.0, "drop it: Llama 3's 4 is the only one"),
    "model.position.scaling[yarn].slow": (1.0, "drop it: YaRN's 1 is the only one"),
    "model.position.scaling[yarn].fast": (32.0, "drop it: YaRN's 32 is the only one"),
    **{
        f"{block}[passkey].{name}": (default, f"drop it, or set it of the task needle{where}")
        for block in ("data.tasks[].task", "eval.recall.tasks[]")
        for name, default, where in (
            ("filler", "grass", ", which lies in the corpus"),
            ("depth", None, ""),
            ("absent", False, ""),
        )
    },
    "eval.others": ([], "measure it after training, on the model that lm.load gives"),
}
# {(name of a key, value, or name of a block): advice}
REMOVED_VALUES = {
    ("tokenizer", "gpt2"): "put vocab.json and merges.txt into a folder, and set data.tokenizer={name: pretrained, "
    "model: FOLDER}",
    ("tokenizer", "tiktoken"): "set data.tokenizer={name: pretrained, model: MODEL}, e.g. openai-community/gpt2 for "
    "r50k_base, Xenova/gpt-4 for cl100k_base, Xenova/gpt-4o for o200k_base",
    **{
        (key, name): advice
        for key, advice in {
            "task": "write its sequences to Parquet, a list of ids a row: data.source={name: tokens, format: column}",
            "tasks": "ask it of the model that lm.load gives",
        }.items()
        for name in ("induction", "flip_flop")
    },
    ("lengths", "fixed"): "set data.lengths={name: mixed, weights: {LENGTH: 1}}",
    ("lengths", "documents"): "give other lengths, with data.documents=isolate: no attention then crosses documents",
    **{
        ("package", name): "save its text, a file a document, and set data.source={name: files, paths: [FOLDER]}"
        for name in ("kjv", "moby", "shakespeare")
    },
    ("format", "megatron"): "write its documents to Parquet, a list of ids a row, and set data.source.format=column",
    ("to", "csv"): "metrics.jsonl has all of it: pandas.read_json('metrics.jsonl', lines=True)",
}
_PATTERNS = {path: re.compile(re.escape(path).replace(r"\*", r"[^.]*")) for path in REMOVED_KEYS}
_NAMES = {path.rpartition(".")[2] for path in REMOVED_KEYS}


def removed_key(block_path: str, variant: str, name: str) -> tuple[object, str] | None:
    """Return the former default of a removed key and advice on it; None if lm never had the key.

    Args:
        block_path: the path of the key's block, e.g. `data.tasks[0].task`.
        variant: the block's `name`, e.g. `mqar`; empty if it has none.
        name: the key's name within the block.
    """
    if name not in _NAMES:
        return None
    path = re.sub(r"\[\d+\]", "[]", f"{block_path}.{name}" if block_path else str(name))
    variant_path = f"{path.rpartition('.')[0]}[{variant}].{name}"
    matches = (key for key, pattern in _PATTERNS.items() if pattern.fullmatch(path) or pattern.fullmatch(variant_path))
    return REMOVED_KEYS.get(next(matches, ""))


# Keys with a default that had left before 0.11.0. The names of runs have a hash of all keys of that version.
_BEFORE_HASHES = (
    "more_seeds",
    "log.score_sequences",
    "eval.needle.finetune.batch_sequences",
    "eval.needle.finetune.lr",
)
_BEFORE_HASHES += ("eval.diagnostics.top_k", "eval.diagnostics.nearest", "eval.diagnostics.limits", "eval.others")
_BEFORE_HASHES += tuple(f"optim.optimizer[muon].{name}" for name in ("nesterov", "ns_steps", "adjust_lr"))
# {path of a block, with its name if only blocks of this name had the key: {name of a key: default in 0.11.0}}
_HASHED: dict[str, dict[str, object]] = {}
for _path in (path for path in REMOVED_KEYS if "*" not in path and path not in _BEFORE_HASHES):
    if (default := REMOVED_KEYS[_path][0]) is not None:
        _HASHED.setdefault(_path.rpartition(".")[0], {})[_path.rpartition(".")[2]] = default


def hashed_defaults(plain: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield path and default of each key that blocks of a configuration (plain data) had in 0.11.0, and have no more.
    The hash of a configuration counts them, so that runs keep their names.
    """
    if isinstance(plain, dict):
        pattern = re.sub(r"\[\d+\]", "[]", path)
        for block in (pattern, f"{pattern}[{plain.get('name')}]"):
            yield from ((f"{path}.{name}", value) for name, value in _HASHED.get(block, {}).items())
        for name, value in plain.items():
            yield from hashed_defaults(value, f"{path}.{name}" if path else str(name))
    elif isinstance(plain, list):
        for index, item in enumerate(plain):
            yield from hashed_defaults(item, f"{path}[{index}]")


def without_removed(plain: object, path: str = "") -> object:
    """Return the configuration (plain data) of an older run without removed keys that have their former defaults, and
    without removed values in its lists. Data that are no mapping stay as they are.
    """
    if not isinstance(plain, dict):
        return plain
    result = {}
    for name, value in plain.items():
        entry = removed_key(path, str(plain.get("name", "")), name)
        if entry and entry[0] == value:
            continue
        inner = f"{path}.{name}" if path else str(name)
        if isinstance(value, list):
            removed_values = [text for key, text in REMOVED_VALUES if key == name]
            value = [without_removed(item, f"{inner}[]") for item in value if item not in removed_values]
        result[name] = without_removed(value, inner)
    return result
