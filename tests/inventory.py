"""Everything that a user sees, as plain data: commands, keys, parameter names, files and what is in them.

python tests/inventory.py           compare with tests/inventory.yaml
python tests/inventory.py --write   write it again; the commit says why what a user sees had to change

Numbers are left out, and what they are numbers of is kept: paths, keys, headings, and the types of values. An inventory
is a tree whose leaves are one line each, so that a difference is named by its path.
"""

import argparse
import csv
import difflib
import json
import re
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import torch
import yaml
from conftest import PAINTING, ROOT, unpainted
from conftest import lm as command
from folders import Sent
from safetensors import safe_open
from typer.main import get_command

from lm.cli import app
from lm.config.load import load_config
from lm.model.decoder import Decoder

Tree = dict[str, "Tree"] | list[str] | str

FROZEN = ROOT / "tests" / "inventory.yaml"
TINY = str(ROOT / "tests" / "tiny.yaml")

NORMALIZERS = [  # beside each with its defaults: options that give it other parameters
    "{name: ssmax, bias: true}",
    "{name: ssmax, scale: none}",
    "{name: cosine, log_n: true}",
    "{name: sigmoid, bias: true}",
    "[window, ssmax]",
]
GAU = "model.block={name: gau, key_size: 16}"
DECODERS = {
    "attention, rope, swiglu, rms": [],
    "learned positions": ["model.position=learned"],
    "no positions": ["model.position=none"],
    "gelu": ["model.mlp=gelu"],
    "relu2": ["model.mlp=relu2"],
    "layer": ["model.norm=layer"],
    "layer, bias": ["model.norm=layer", "model.bias=true"],
    "bias": ["model.bias=true"],
    "tied": ["model.tied=true"],
    "qk_norm": ["model.qk_norm=true"],
    "gau": [GAU, "model.n_head=1"],
    "gau, layer, bias, qk_norm": [GAU, "model.n_head=1", "model.norm=layer", "model.bias=true", "model.qk_norm=true"],
    "gau, learned positions, tied, relu2": [
        GAU,
        "model.n_head=1",
        "model.position=learned",
        "model.tied=true",
        "model.normalizer=relu2",
    ],
}

LONG = ["data.seq_len=128", "eval.long_context={length_factor: 2, sequences: 8}", "eval.swap_lengths=[1,2]"]
RECALL = ["eval.recall={tasks: [passkey], length_factors: [2], sequences: 8}"]
NEEDLE = [
    "eval.needle={length_factors: [2], depths: [0.5], trials: 8, heads_at: 2, finetune: {steps: 1, batch_sequences: 1}}"
]
SWAP = ["phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: {name: ssmax, bias: true}}]"]
ONLY_VALIDATION = ["eval.long_context.length_factor=0"]
MQAR = [
    "data.tasks=[{task: {name: mqar, keys: 16, values: 16, pairs: 4, queries: 4}}]",
    "eval.recall={length_factors: [2], sequences: 8}",
]


# ---------------------------------------------------------------- commands and keys


def commands() -> Tree:
    """Each command's help, and by argument or option: type, default and help."""
    return dict(_commands(get_command(app), "lm"))


def _commands(command_object: object, path: str) -> Iterator[tuple[str, Tree]]:
    completion = ("install_completion", "show_completion")  # typer's own, of no function of ours
    yield (
        path,
        {
            "help": command_object.help,
            **dict(
                _parameter(command_object, parameter)
                for parameter in command_object.params
                if parameter.name not in completion
            ),
        },
    )
    for name, inner in getattr(command_object, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def _parameter(owner: object, parameter: object) -> tuple[str, str]:
    hint, info = typing.get_args(typing.get_type_hints(owner.callback, include_extras=True)[parameter.name])
    limits = [f"{sign} {limit}" for sign, limit in ((">=", info.min), ("<=", info.max)) if limit is not None]
    default = "required" if parameter.required else f"default {parameter.default!r}"
    option = parameter.param_type_name == "option"
    name = ", ".join((*parameter.opts, *parameter.secondary_opts)) if option else parameter.metavar or parameter.name
    return name, "; ".join([" ".join([_type(hint), *limits]), default, parameter.help or ""])


def _type(hint: object) -> str:
    words = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path", types.NoneType: "nothing"}
    if hint in words:
        return words[hint]
    inner = [_type(argument) for argument in typing.get_args(hint)]
    return f"any number of {inner[0]}" if typing.get_origin(hint) is list else " or ".join(inner)


def configuration() -> Tree:
    """Each configuration key's type and default."""
    return _keys(_said("config", "--reference"))


def _keys(markdown: str) -> dict[str, str]:
    """Rows (key, type, default, help) of a reference's table."""
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \| `(.*?)` \| ", markdown, re.MULTILINE)
    return {key: f"{kind.replace('&#124;', '|')}; default {default}" for key, kind, default in rows}


def _said(*arguments: str) -> str:
    """What a command prints."""
    result = command(*arguments)
    if result.returncode:
        raise RuntimeError(f"lm {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


# ---------------------------------------------------------------- parameters


def normalizers() -> Tree:
    """The names of normalizers, their options, and the parameters of those that have some."""
    table, options = _said("normalizers").split("## Options")
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    parameters = {
        spelled: {
            name: shape for name, shape in _parameters(f"model.normalizer={spelled}").items() if ".normalizer." in name
        }
        or "none"
        for spelled in (*names, *NORMALIZERS)
    }
    return {"names": names, "options": _keys(options), "parameters": parameters}


def decoders() -> Tree:
    """Names and shapes of a tiny decoder's state, by what its configuration changes."""
    return {label: _parameters("model.n_layer=1", *changes) for label, changes in DECODERS.items()}


def _parameters(*changes: str) -> dict[str, str]:
    config = load_config(
        [TINY, "data.source.paths=[.]", "eval.long_context={length_factor: 0, inference: [{}]}", *changes]
    )
    decoder = Decoder(config.model, 400, config.data.seq_len, seed=None)
    buffers = {name for name, _ in decoder.named_buffers()}
    return {
        name: _shape(value) + (", no parameter" if name in buffers else "")
        for name, value in decoder.state_dict().items()
    }


def _shape(tensor: torch.Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------- files


def files() -> Tree:
    """What commands write: files, the keys and types in them, and headings."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch(PAINTING, unpainted),
        mock.patch("lm.evaluation.swap.FIT_BATCHES", 1),
    ):
        return _files(Path(folder))


def _files(folder: Path) -> Tree:
    for number in range(30):
        path = folder / "text" / "ab"[number % 2] / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"word{(number * k) % 89}" for k in range(300)))
    runs, server = folder / "runs", Sent()
    common = [
        TINY,
        "data.tokenizer.vocab_size=300",
        f"data.root={folder}/stores",
        f"runs={runs}",
        "log.wandb=offline",
        *LONG,
    ]
    sources = [f"{{name: files, paths: [{folder}/text/{part}]}}" for part in "ab"]
    mixture = (
        f"data.source={{name: mixture, of: [{', '.join(f'{{weight: 0.5, source: {source}}}' for source in sources)}]}}"
    )
    text = [*common, f"data.source.paths=[{folder}/text]"]
    overrides = [*RECALL, *NEEDLE]
    in_clone = mock.patch(
        "lm.training.banner.git_state", return_value=("0" * 40, False)
    )  # also in the sdist, which knows no commit
    with mock.patch("wandb.init", server.init), mock.patch("wandb.setup"), in_clone:
        _said("train", *text, "name=softmax", *overrides)
        _said("train", *text, "name=phases", *overrides, *SWAP)
        _said("train", *text, "name=softmax-2", "seed=2", *ONLY_VALIDATION)
        _said("train", *text, "name=phases-2", "seed=2", *ONLY_VALIDATION, *SWAP)
        _said("train", *common, "name=mixture", *ONLY_VALIDATION, mixture, "optim.on_nonfinite=skip")
        _said("train", *text, "name=symbols", *ONLY_VALIDATION, *MQAR)
    sent_keys = [f"init: {name}" for start in server.starts for name in start]
    sent_keys += [f"define_metric: {axis}" for axis in server.axes] + [
        name for _, values in server.lines for name in values
    ]
    pair = [str(runs / name) for name in ("softmax", "phases")]
    _said("eval", *pair, "--out", str(folder / "eval.csv"))
    _said("eval", pair[0], "--out", str(folder / "eval.json"))
    _said("swap", pair[0], "--to", "ssmax", "--init", "fit", "--out", str(runs / "swapped"))
    _said("export", pair[1], "--out", str(folder / "export"))
    _said("report", *pair, *(f"{run}-2" for run in pair), "--out", str(folder / "report"))
    _said("data", "inspect", *text)
    checkpoint = torch.load(runs / "phases" / "checkpoints" / "last.ckpt", weights_only=True)
    with safe_open(folder / "export" / "model.safetensors", "pt") as exported:
        weights = {name: _shape(exported.get_tensor(name)) for name in exported.keys()}  # noqa: SIM118
    return {
        "written": sorted(
            {
                _name(path, folder)
                for path in folder.rglob("*")
                if path.is_file() and folder / "text" not in path.parents
            }
        ),
        "JSON and YAML": _documents(folder),
        "checkpoint": {"keys": sorted(checkpoint), "lm": typed([checkpoint["lm"]])},
        "checkpoint, weights": {name: _shape(value) for name, value in checkpoint["state_dict"].items()},
        "export, weights": weights,
        "metrics.jsonl": {name: _metrics(runs / name) for name in ("softmax", "phases", "mixture", "symbols")},
        "wandb": [*dict.fromkeys(sent_keys)],
        "lm eval --out": {"columns": _lines(folder / "eval.csv")[0], "rows": _measured(folder / "eval.csv")},
        "report": _report(folder / "report"),
    }


def _name(path: Path, folder: Path) -> str:
    """A file's path below the folder, without what differs from run to run."""
    name = str(path.relative_to(folder))
    return re.sub(r"(?<=-)[0-9a-f]{12,16}(?=[./])", "HASH", re.sub(r"step-\d{6}", "step-N", name))


def _documents(folder: Path) -> Tree:
    """Keys and types of values in all files of a name together.

    Left out are tokenizers, whose format is another's, and cached evaluations, which are those beside them.
    """
    documents: dict[str, list[object]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".yaml") and path.name != "tokenizer.json" and path.parent.name != "cache":
            name = re.sub(r"^(stores|runs)/[^/]+/", r"\1/*/", _name(path, folder))
            parse = yaml.safe_load if path.suffix == ".yaml" else json.loads
            documents.setdefault(name, []).append(parse(path.read_text()))
    return {name: typed(documents) for name, documents in sorted(documents.items())}


def typed(values: list[object], path: str = "", is_missing: bool = False) -> dict[str, str]:
    """{key path: types of its values} of values that stand in one place of several documents.

    Items of a list are `[]`; keys that are data (paths, parameters, lengths: whatever is not a lower-case word) are
    `*`.
    """
    maps = [_data_as_star(value) for value in values if isinstance(value, dict)]
    items = [item for value in values if isinstance(value, list) for item in value]
    names = sorted({name for items in maps for name, _ in items})
    inner: dict[str, str] = {}
    for name in names:
        inner_values = [value for items in maps for key, value in items if key == name]
        inner |= typed(
            inner_values,
            f"{path}.{name}" if path else name,
            name != "*" and any(name not in dict(items) for items in maps),
        )
    inner |= typed(items, f"{path}[]") if items else {}
    kinds = {_kind(value) for value in values} - ({"map"} if names else set()) - ({"list"} if items else set())
    kind = ", ".join([*([" or ".join(sorted(kinds))] if kinds else []), *(["sometimes missing"] if is_missing else [])])
    return ({path: kind} if kind else {}) | inner


def _data_as_star(value: dict[object, object]) -> list[tuple[str, object]]:
    return [(key if re.fullmatch(r"[a-z_][a-z0-9_]*", str(key)) else "*", inner) for key, inner in value.items()]


def _kind(value: object) -> str:
    words = {
        dict: "map",
        list: "list",
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "text",
        types.NoneType: "null",
    }
    return words[type(value)]


def _metrics(run: Path) -> list[str]:
    """The keys of each kind of line."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return list(dict.fromkeys(", ".join(json.loads(line)) for line in lines))


def _lines(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def _measured(path: Path) -> list[str]:
    """What `lm eval` gives numbers of."""
    with path.open(newline="") as file:
        records = list(csv.DictReader(file))
    names = ("kind", "setting", "where", "metric", "over")
    lines = dict.fromkeys(" | ".join(line[name] for name in names) for line in records)
    return list(dict.fromkeys(re.sub(r"layer \d+, head \d+", "layer L, head H", line) for line in lines))


# ---------------------------------------------------------------- reports


class Headings(HTMLParser):
    """The text of a page's headings, captions, and heads of columns and rows, in their order."""

    TAGS = ("h1", "h2", "caption", "th")

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.TAGS:
            self.inside = tag
            self.found.append(f"{tag}:")

    def handle_endtag(self, tag: str) -> None:
        if tag == self.inside:
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside and data.strip():
            self.found[-1] += f" {data.strip()}"


def _report(folder: Path) -> Tree:
    """Titles and heads of the tables, in each format, and the page's headings."""
    page = Headings()
    page.feed((folder / "report.html").read_text())
    head, *lines = _lines(folder / "table.csv")
    columns = [head.index(name) for name in ("table", "quantity", "unit")]
    markdown, tex = ((folder / name).read_text() for name in ("table.md", "table.tex"))
    return {
        "table.csv": {
            "columns": head,
            "rows": list(dict.fromkeys(" | ".join(line[index] for index in columns) for line in lines)),
        },
        "table.md": _heads(r"^(.+)\n\n(\|.+\|)\n\| ---", markdown),
        "table.tex": _heads(r"^% (.+)\n.*\n\\toprule\n(.*)\n(.*)\n\\midrule", tex),
        "report.html": page.found,
    }


def _heads(pattern: str, text: str) -> list[str]:
    return [line for head in re.findall(pattern, text, re.MULTILINE) for line in head]


# ---------------------------------------------------------------- comparing

PARTS: dict[str, Callable[[], Tree]] = {
    "commands": commands,
    "configuration": configuration,
    "normalizers": normalizers,
    "decoders": decoders,
    "files": files,
}


def frozen(part: str) -> Tree:
    """A part of the inventory as it was written down."""
    return _written()[part]


@cache
def _written() -> Tree:
    return yaml.safe_load(FROZEN.read_text(encoding="utf-8"))


def differences(tree: Tree, frozen_tree: Tree) -> list[str]:
    """What two trees do not share, a line each: `- ` it was, `+ ` it is."""
    diff = difflib.unified_diff(list(_facts(frozen_tree)), list(_facts(tree)), lineterm="", n=0)
    return [line for line in diff if not line.startswith(("---", "+++", "@@"))]


def _facts(tree: Tree, path: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _facts(inner, f"{path} > {name}" if path else name)
    elif isinstance(tree, list):
        yield from (f"{path}: {item}" for item in tree)
    else:
        yield f"{path}: {tree}"


def main() -> int:
    """Compare or write; exit status 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    trees = {part: make() for part, make in PARTS.items()}
    if arguments.write:
        FROZEN.write_text(
            yaml.safe_dump(trees, sort_keys=False, allow_unicode=True, width=sys.maxsize), encoding="utf-8"
        )
        return 0
    lines = [line for part in PARTS for line in differences(trees[part], frozen(part))]
    print("\n".join(lines) or "equal")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
