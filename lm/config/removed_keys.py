"""Lists configuration keys that earlier versions had, with their defaults, so that configurations of older runs can be
read, and keep their hashes.
"""

import re
from collections.abc import Iterator

from lm.plain import Plain, direct_items_with_paths, flatten, join_path

# {path of a key, as in docs/config.md: its default in 0.11.0}; names of runs have a hash of all keys of that version
REMOVED_HASHED_KEYS: dict[str, Plain] = {
    "data.min_document_bytes": 1,
    "data.tokenizer[train].special_tokens": [],
    "model.position.scaling[llama3].slow": 1.0,
    "model.position.scaling[llama3].fast": 4.0,
    "model.position.scaling[yarn].slow": 1.0,
    "model.position.scaling[yarn].fast": 32.0,
    "data.tasks[].task[mqar].varied": False,
    "eval.recall.tasks[][mqar].varied": False,
    "eval.needle.finetune": {"steps": 0},
    "eval.diagnostics.by_position": False,
    "optim.on_nonfinite": "stop",
    "model.normalizer[lssa].power": 1.0,
}
# {path of a key, `*` for any part of it: its default}; these keys are in no hash
REMOVED_KEYS: dict[str, Plain] = REMOVED_HASHED_KEYS | {
    "more_seeds": [],
    "primary.learned": None,
    "primary.reach": None,
    "data.max_document_bytes": None,
    "data.prepare_workers": None,
    "model.transfer": None,
    "optim.groups.*.eps": None,
    "optim.z_loss": None,
    "optim.optimizer[muon].nesterov": True,
    "optim.optimizer[muon].ns_steps": 5,
    "optim.optimizer[muon].adjust_lr": "match_rms_adamw",
    "trainer.profile": None,
    "eval.downstream": None,
    "eval.others": [],
    "eval.*.every": None,
    "eval.*.max_seconds": None,
    "eval.*.inference[].rope[yarn].fast": 32.0,
    "eval.*.inference[].rope[yarn].slow": 1.0,
    "eval.diagnostics.text": None,
    "eval.diagnostics.top_k": [8, 64],
    "eval.diagnostics.nearest": [16, 64],
    "eval.diagnostics.limits": {
        "vectors": "embedding",
        "unit": True,
        "first_token": True,
        "queries": 16,
        "sample_size": 144,
        "temperatures": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
        "steps": [0.001, 0.1, 10.0],
        "directions": 16,
    },
    "log.notes": None,
    "log.project": None,
    "log.entity": None,
    "log.tags": [],
    "log.score_sequences": 2,
    "log.dynamics": ["gradient_norm"],
}
REMOVED_LOGGERS = ("csv", "trackio", "tensorboard")  # in `log.to`
# names that earlier versions had, of tasks, lengths, tokenizers, texts, other values and options of commands, too
REMOVED_NAMES = (
    *REMOVED_LOGGERS,
    *("copy", "max", "induction", "passkey", "flip_flop", "curriculum", "documents", "fixed", "gpt2", "tiktoken"),
    *("kjv", "moby", "shakespeare", "megatron", "embedding", "exp", "fit"),
    *("--anew", "--by", "--copy", "--needle", "--out", "--push", "--suite", "--tasks", "--top-p"),
)
_REMOVED_KEY_PATTERNS = {
    re.compile(re.escape(path).replace(r"\*", r"[^.]*")): value for path, value in REMOVED_KEYS.items()
}


def removed_defaults(block_path: str, block_name: str, key_name: str) -> list[Plain]:
    """Return a list with the former default of a removed key; an empty list if lm never had the key.

    Args:
        block_path: the path of the key's block, e.g. `data.tasks[0].task`.
        block_name: the block's `name`, e.g. `mqar`; empty if it has none.
        key_name: the key's name within the block.
    """
    block = re.sub(r"\[\d+\]", "[]", block_path)
    paths = f"{block}.{key_name}".lstrip("."), f"{block}[{block_name}].{key_name}"
    return [value for pattern, value in _REMOVED_KEY_PATTERNS.items() if any(map(pattern.fullmatch, paths))]


def removed_name_advice(name: Plain) -> str:
    """Return advice for an error message if earlier versions had `name`, such as a task, a tokenizer or an option of a
    command; else an empty text.
    """
    return "; earlier versions had it, see CHANGELOG.md" if name in REMOVED_NAMES else ""


def removed_hashed_defaults(plain_data: Plain, path: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield (path, default) of each key that version 0.11.0 had in the blocks of this configuration (plain data), and
    that was removed since.

    The name of an experiment's run ends in a hash of the configuration, which counts all keys of version 0.11.0. With
    these defaults the name stays the same after a key is removed.
    """
    if isinstance(plain_data, dict):
        block = re.sub(r"\[\d+\]", "[]", path)
        for key, value in REMOVED_HASHED_KEYS.items():
            parent, _, name = key.rpartition(".")
            if parent in (block, f"{block}[{plain_data.get('name')}]"):
                yield from flatten(value, f"{path}.{name}").items()
    if isinstance(plain_data, dict | list):
        for item_path, item in direct_items_with_paths(plain_data, path):
            yield from removed_hashed_defaults(item, item_path)


def drop_removed_keys(plain_data: Plain, path: str = "") -> Plain:
    """Return the configuration (plain data) of an older run without removed keys that have their former defaults.

    Removed keys of `log` and removed loggers, which change no result, are left out whatever their values.
    """
    if isinstance(plain_data, list):
        return [
            drop_removed_keys(item, f"{path}[]")
            for item in plain_data
            if path != "log.to" or item not in REMOVED_LOGGERS
        ]
    if not isinstance(plain_data, dict):
        return plain_data
    return {
        name: drop_removed_keys(value, join_path(path, name))
        for name, value in plain_data.items()
        if value not in (former_defaults := removed_defaults(path, str(plain_data.get("name", "")), name))
        and not (former_defaults and path == "log")
    }
