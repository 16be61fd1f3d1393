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
from lm.evaluation.diagnostics import check_source, config_of, read_file
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
        name: the name of the run or model, and its setting where there are several.
        said: how much of the model is shown, in words.
        source: its folder.
        setting: label of the inference setting.
        tokens: the text of each token; the first one begins the document.
        characters: where each token begins in the text; 0 for the first one.
        heads: (layer, head) of those that are shown.
    """

    name: str
    said: str
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
) -> list[str]:
    """Write attention weights of models on a text: a table and two pictures of it beside each other; returns lines to print.

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
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    given = changes["eval"]["diagnostics"]
    if unused := sorted(set(given) - {"inference"}):
        raise ConfigError([Problem(f"eval.diagnostics.{name}", given[name], "has no effect with --text") for name in unused])
    text = read_text(text)
    for source in sources:
        check_source(source)
    shown = [model for source in sources for model in _of_model(load(source, checkpoint), text, layers, heads, changes)]
    out = out or shown[0].source / "attention.csv"
    png, svg = draw([Panels(model.name, model.said, model.tokens, model.characters, model.maps, model.heads) for model in shown])
    table = table_bytes([cell for model in shown for cell in cells_of(model)], out)
    files = {out: table, out.with_suffix(".png"): png, out.with_suffix(".svg"): svg}
    write_together(files)
    return [f"{model.name}: {model.said}" if len(shown) > 1 else model.said for model in shown] + [*map(str, files)]


def read_text(given: str) -> str:
    """The text of a file, or `given` itself. Raises RunError of an empty one, of a file that is not UTF-8, or a file's name without it."""
    try:
        is_file = Path(given).is_file()
    except (OSError, ValueError):  # too long a name, or one with a null byte
        is_file = False
    if not is_file and len(given.split()) == 1 and ("/" in given or Path(given).suffix in (".txt", ".md", ".json", ".csv")):
        raise RunError(f"--text {given}: no such file")
    text = read_file(given, "--text ") if is_file else given
    if not text.strip():
        raise RunError(f"--text{f' {given}' if is_file else ''}: is empty; give a file or a text")
    return text


def _of_model(loaded: Loaded, text: str, layers: list[int] | None, heads: list[int] | None, changes: dict[str, Plain]) -> Iterator[Shown]:
    """A model's attention, once for each inference setting."""
    config, (tokenizer, start) = config_of(loaded, changes), loaded.tokenizer_and_start()
    encoded = encoding_of(tokenizer, text)
    ids, ends = [start, *encoded.ids], loaded.spec.model.position.ends
    longest = loaded.spec.seq_len if ends else MOST_TOKENS
    if len(ids) > longest:
        why = "its learned positions end at" if ends else "of one text are shown at most"
        raise RunError(f"--text: {len(ids):,} tokens to {loaded.folder}, {why} {longest:,}; give a shorter one")
    depth, width = loaded.spec.model.n_layer, max(normalizer.layer.n_head for normalizer in loaded.decoder.normalizers())
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
            every = maps.effective.size
            said = f"{len(ids):,} tokens, {len(text):,} characters; " + f"{len(chosen)} of " * (len(chosen) < every) + f"{every} heads"
            said += f"; a cell is the largest of {maps.size} x {maps.size} weights" if maps.size > 1 else ""
            name = loaded.folder.name + (f", {setting.label}" if len(settings) > 1 else "")
            yield Shown(name, said, loaded.folder, setting.label, tokens, characters, maps, chosen)
            advance(1)


def cells_of(model: Shown) -> Iterator[dict[str, Plain]]:
    """A line of the table for each cell of each head that is shown: the weight, its query and its key."""
    for layer, head in model.heads:
        place = {"run": str(model.source), "setting": model.setting, "layer": layer, "head": head}
        queries, keys, weights = (array[layer, head] for array in (model.maps.queries, model.maps.keys, model.maps.weights))
        for query, key, weight in zip(queries.flat, keys.flat, weights.flat, strict=True):
            if query >= 0:
                characters = {"query_character": model.characters[query], "key_character": model.characters[key]}
                tokens = {"query_token": model.tokens[query], "key_token": model.tokens[key]}
                yield place | {"query": int(query), "key": int(key)} | characters | tokens | {"weight": float(weight)}
