"""`lm diagnose --text`: the attention weights of single heads on a text, of several models side by side, as pictures and a table."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lm.config.inference_config import InferenceSetting
from lm.config.load import merge, overrides_in
from lm.data.tokenizer import encoding_of
from lm.diagnostics.attention_maps import Maps, attention_maps
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.attention_pictures import Panels, draw
from lm.evaluation.diagnostics import check_source, config_of
from lm.evaluation.evaluate import open_device
from lm.files import write_together
from lm.model.inference import for_inference
from lm.progress import Progress
from lm.report.tables import table_bytes
from lm.runs.loading import Loaded, load
from lm.schema import Plain

CELLS = 128  # along each side of a map
MOST_HEADS = 16  # shown of a model, unless layers or heads are named
MOST_TOKENS = 2**16


@dataclass(frozen=True, eq=False)
class Shown:
    """One model's attention on the text, under one inference setting.

    Attributes:
        name: of the run or model, and its setting where there are several.
        source: its folder.
        setting: label of the inference setting.
        tokens: the text of each token; the first one begins the document.
        characters: where each token begins in the text; 0 for the first one.
        heads: (layer, head) of those that are shown.
    """

    name: str
    source: Path
    setting: str
    tokens: list[str]
    characters: list[int]
    maps: Maps
    heads: list[tuple[int, int]]


def show_attention(
    sources: list[Path],
    text: str,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    checkpoint: str = "last",
    overrides: list[str] | None = None,
    out: Path | None = None,
) -> list[Shown]:
    """Attention weights of models on a text: a table and two pictures of it beside each other, whose names are printed.

    Args:
        sources: run folders, checkpoints, exports and other model folders.
        text: a UTF-8 file, or the text itself.
        layers, heads: those to show, from 0; None: all of those of a small model, of others the most concentrated ones.
        checkpoint: of run folders: `last`, `best` or a step.
        overrides: `key=value` of eval.diagnostics.inference and trainer.
        out: the table, .csv or .json; the pictures lie beside it. None: attention.csv in the folder of the first model.

    Raises:
        LMError: no model there, no text, one that is too long, no such layer or head.
    """
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write a table of this kind; name a .csv or .json file")
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    if unused := set(changes["eval"]["diagnostics"]) - {"inference"}:
        values = changes["eval"]["diagnostics"]
        raise ConfigError([Problem(f"eval.diagnostics.{name}", values[name], "has no effect with --text") for name in sorted(unused)])
    text = read_text(text)
    for source in sources:
        check_source(source)
    found: list[Shown] = []
    for source in sources:
        loaded = load(source, checkpoint)
        found += _of_model(loaded, text, layers, heads, changes)
    several = len(found) > 1
    out = out or found[0].source / "attention.csv"
    png, svg = draw([Panels(one.name, _said(one, text), one.tokens, one.characters, one.maps, one.heads) for one in found])
    rows = [row for one in found for row in rows_of(one)]
    pictures = {out.with_suffix(".png"): png, out.with_suffix(".svg"): svg}
    write_together({out: table_bytes(rows, out), **pictures})
    for one in found:
        print(f"{one.name}: {_said(one, text)}" if several else _said(one, text))
    print("\n".join(map(str, [out, *pictures])))
    return found


def read_text(given: str) -> str:
    """The text of a file, or `given` itself. Raises RunError of an empty one, of a file that is not UTF-8, or a file's name without it."""
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long a name, or one with a null byte
        is_file = False
    if not is_file and len(given.split()) == 1 and ("/" in given or Path(given).suffix in (".txt", ".md", ".json", ".csv")):
        raise RunError(f"--text {given}: no such file")
    try:
        text = Path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--text {given}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
    if not text.strip():
        raise RunError(f"--text{f' {given}' if is_file else ''}: is empty; give a file or a text")
    return text


def _of_model(loaded: Loaded, text: str, layers: list[int] | None, heads: list[int] | None, changes: dict[str, Plain]) -> Iterator[Shown]:
    """One for each inference setting."""
    config, (tokenizer, start) = config_of(loaded, changes), loaded.tokenizer_and_start()
    encoded = encoding_of(tokenizer, text)
    ids, ends = [start, *encoded.ids], loaded.spec.model.position.ends
    longest = loaded.spec.seq_len if ends else MOST_TOKENS
    if len(ids) > longest:
        why = "its learned positions end at" if ends else "of one text are shown at most"
        raise RunError(f"--text: {len(ids):,} tokens to {loaded.folder}, {why} {longest:,}; give a shorter one")
    depth, width = loaded.spec.model.n_layer, max(one.layer.n_head for one in loaded.decoder.normalizers())
    for name, asked, count in (("layer", layers, depth), ("head", heads, width)):
        if wrong := [number for number in asked or [] if not 0 <= number < count]:
            raise ConfigError(f"--{name} {wrong[0]}: {loaded.folder} has {count} {name}s, 0 to {count - 1}")
    where = replace(open_device(config, loaded.environment), bf16=False)
    tokens, characters = ["<start>"] + [text[a:b] for a, b in encoded.offsets], [0] + [a for a, _ in encoded.offsets]
    settings: list[InferenceSetting] = config.eval.diagnostics.inference
    with Progress().bar(f"{loaded.folder.name}: attention", len(settings)) as advance:
        for setting in settings:
            decoder = for_inference(loaded.decoder, setting).to(where.device)
            with torch.autocast(where.device.type, enabled=False):
                maps = attention_maps(decoder, torch.tensor(ids, device=where.device), CELLS)
            chosen = [(layer, head) for layer in layers or range(depth) for head in heads or range(width)]
            if layers is None and heads is None and len(chosen) > MOST_HEADS:
                chosen = maps.most_concentrated(MOST_HEADS)
            name = loaded.folder.name + (f", {setting.label}" if len(settings) > 1 else "")
            yield Shown(name, loaded.folder, setting.label, tokens, characters, maps, chosen)
            advance(1)


def _said(one: Shown, text: str) -> str:
    """What of a model is shown, in words."""
    every = one.maps.effective.size
    heads = f"{len(one.heads)} of {every} heads" if len(one.heads) < every else f"{every} heads"
    cell = f"; a cell is the largest of {one.maps.size} x {one.maps.size} weights" if one.maps.size > 1 else ""
    return f"{len(one.tokens):,} tokens, {len(text):,} characters; {heads}{cell}"


def rows_of(one: Shown) -> Iterator[dict[str, Plain]]:
    """A row for each cell of each head that is shown: the weight, and the tokens that it is of."""
    for layer, head in one.heads:
        of = {"run": str(one.source), "setting": one.setting, "layer": layer, "head": head}
        queries, keys, weights = (array[layer, head] for array in (one.maps.queries, one.maps.keys, one.maps.weights))
        for query, key, weight in zip(queries.flat, keys.flat, weights.flat, strict=True):
            if query >= 0:
                tokens = {"query_token": one.tokens[query], "key_token": one.tokens[key]}
                characters = {"query_character": one.characters[query], "key_character": one.characters[key]}
                yield of | {"query": int(query), "key": int(key)} | characters | tokens | {"weight": float(weight)}
