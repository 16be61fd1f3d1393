"""`lm diagnose --text`: the attention weights of single heads on a text, of several models side by side, as pictures and a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.inference_config import InferenceSetting
from lm.config.load import merge, overrides_in
from lm.data.batches import Batch
from lm.data.tokenizer import encoding_of
from lm.diagnostics.attention_rows import AttentionRows
from lm.diagnostics.concentration import effective_keys
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.diagnostics import check_source, config_of, read_file
from lm.evaluation.evaluate import open_device
from lm.files import write_together
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.swapped import for_inference
from lm.progress import Progress
from lm.report.pictures import Map, Picture
from lm.report.tables import table_bytes
from lm.runs.evaluations import number
from lm.runs.loading import Loaded, load
from lm.schema import Plain


@dataclass(frozen=True, eq=False)
class Maps:
    """All heads' weights on one sequence."""

    size: int  # tokens along each side of a cell; 1: every weight has a cell of its own
    weights: np.ndarray  # (layers, H, K, K) fp32, queries by keys; NaN where no query of a cell sees a key of it, or not finite
    queries: np.ndarray  # (layers, H, K, K) int64, the token that each weight is of; -1 where there is none
    keys: np.ndarray  # likewise
    effective: np.ndarray  # (layers, H), mean of N_eff / n over queries, the first token left out: the smaller, the more concentrated

    def most_concentrated(self, count: int) -> list[tuple[int, int]]:
        """(layer, head) of the heads with the smallest `effective`, at most `count` of them, in the order of layers."""
        order = np.argsort(np.nan_to_num(self.effective, nan=np.inf), axis=None, kind="stable")[:count]
        heads = self.effective.shape[1]
        return sorted((int(place) // heads, int(place) % heads) for place in order)


@torch.no_grad()
def attention_maps(decoder: Decoder, tokens: Tensor, cells: int) -> Maps:
    """The maps of a decoder on `tokens` (L,), at most `cells` along each side. Holds the weights of some queries of a layer at a time.

    A cell of a long sequence holds its weight of largest magnitude: a mean would lose single keys with much weight, such as a sink.
    """
    length = len(tokens)
    size = -(-length // cells)
    across = -(-length // size)
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    shape = len(decoder.normalizers()), heads, across, across
    best = torch.full(shape, -1.0)  # magnitudes
    weights, queries, keys = torch.full(shape, torch.nan), *torch.full((2, *shape), -1)
    effective = torch.full((*shape[:2], length), torch.nan)
    sequence = torch.cat((tokens, tokens[:1])).unsqueeze(0)  # the last token has nothing to predict
    for block in attention_blocks(decoder, Batch.of(sequence)):
        rows = AttentionRows.of(block)
        effective[block.layer][:, block.queries.cpu()] = (effective_keys(rows.without_first) / (rows.n - 1)).cpu()
        magnitude = rows.size.masked_fill(~rows.visible, -1.0)
        largest, at = F.pad(magnitude, (0, across * size - magnitude.size(-1)), value=-1.0).unflatten(-1, (across, size)).max(-1)
        at = at + torch.arange(0, across * size, size, device=at.device)  # (H, T, K), index of the key
        head = torch.arange(len(largest), device=at.device).unsqueeze(-1)
        for cell in (block.queries // size).unique().tolist():
            inside = (block.queries // size == cell).nonzero().squeeze(-1)
            top, place = largest[:, inside].max(1)  # (H, K)
            query, key = inside[place], at[head, inside[place], torch.arange(across, device=at.device)]
            cell_weights = rows.weights[head, query, key.clamp(max=rows.weights.size(-1) - 1)]
            here = block.layer, slice(None), cell
            larger = (top.cpu() > best[here]) | top.isnan().cpu()
            for stored, new in ((best, top), (weights, cell_weights), (queries, block.queries[query]), (keys, key)):
                stored[here] = torch.where(larger, new.cpu(), stored[here])
    return Maps(size, weights.numpy(), queries.numpy(), keys.numpy(), effective.nanmean(-1).numpy())


# ---------------------------------------------------------------- pictures


LABELLED = 40  # tokens up to which each has its text at the axes
DECADES = 4  # of weights that colours tell apart, below the largest


@dataclass(frozen=True, eq=False)
class ShownModel:
    """One model's attention on the text, under one inference setting."""

    name: str  # the name of the run or model, and its setting where there are several
    amount: str  # how much of the model is shown, in words
    source: Path  # its folder
    setting: str  # label of the inference setting
    tokens: list[str]  # the text of each token; the first one begins the document
    characters: list[int]  # where each token begins in the text; 0 for the first one
    maps: Maps
    heads: list[tuple[int, int]]  # (layer, head) of those that are shown


def attention_picture(models: Sequence[ShownModel]) -> Picture:
    """A map of each head, on one scale of colours: logarithmic, on both sides of 0 where weights are negative."""
    shown = np.concatenate([model.maps.weights[layer, head].ravel() for model in models for layer, head in model.heads])
    shown = shown[np.isfinite(shown)]
    top, scale = float(np.abs(shown).max(initial=0.0)) or 1.0, "signed" if (shown < 0).any() else "log"
    wide = [math.ceil(math.sqrt(len(model.heads))) for model in models]
    deep = max(math.ceil(len(model.heads) / across) for model, across in zip(models, wide, strict=True))
    grids: list[list[Map | None]] = []  # of each model, row by row
    for model, across in zip(models, wide, strict=True):
        labels, words, maps = _labels(model), "" if len(model.tokens) <= LABELLED else ", token (character)", []
        for layer, head in model.heads:
            title = "\n".join([model.name, model.amount] * (not maps) + [f"layer {layer}, head {head}"])
            weights, axes = model.maps.weights[layer, head], (f"key{words}", labels, labels)
            maps.append(Map(title, *axes, weights, top, top / 10**DECADES, False, f"query{words}", scale, "weight"))
        grids.append(maps + [None] * (deep * across - len(maps)))
    starts = [(grid, row * across, across) for row in range(deep) for grid, across in zip(grids, wide, strict=True)]
    cells = [cell for grid, start, across in starts for cell in grid[start : start + across]]
    side = 4.2 if min(len(model.tokens) for model in models) <= LABELLED else 2.9
    same_tokens = all(model.tokens == models[0].tokens for model in models)
    return Picture(cells, [], "", sum(wide), (side, side), shared="xy" if same_tokens else "x")


def _labels(model: ShownModel) -> list[str]:
    """Each token's text if they are few, else some positions: of the token, and in brackets of its first character in the text."""
    count, size = len(model.tokens), model.maps.size
    if count <= LABELLED:
        return [token_label(token) for token in model.tokens]
    labels = [""] * -(-count // size)
    for mark in np.linspace(0, count - 1, 5).round().astype(int) // size * size:
        labels[mark // size] = f"{number(mark)} ({number(model.characters[mark])})"
    return labels


def token_label(token: str) -> str:
    """A token's text as a label shows it."""
    return "".join("\u00b7" if letter == " " else letter if letter.isprintable() else repr(letter)[1:-1] for letter in token) or "-"


# ---------------------------------------------------------------- lm diagnose --text


CELLS = 128  # along each side of a map
MOST_HEADS = 16  # shown of a model, unless layers or heads are named
MOST_TOKENS = 2**16


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

    Raises LMError: no model there, no text, one that is too long, no such layer or head.
    """
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", overrides or []))
    asked = changes["eval"]["diagnostics"]
    if unused := sorted(set(asked) - {"inference"}):
        raise ConfigError([Problem(f"eval.diagnostics.{name}", asked[name], "has no effect with --text") for name in unused])
    text = read_text(text)
    for source in sources:
        check_source(source)
    shown = [model for source in sources for model in _of_model(load(source, checkpoint), text, layers, heads, changes)]
    out = out or shown[0].source / "attention.csv"
    drawn = attention_picture(shown)
    table = table_bytes([cell for model in shown for cell in cells_of(model)], out)
    files = {out: table} | {out.with_suffix(suffix): drawn.file(suffix) for suffix in (".png", ".svg")}
    write_together(files)
    return [f"{model.name}: {model.amount}" if len(shown) > 1 else model.amount for model in shown] + [*map(str, files)]


def read_text(asked: str) -> str:
    """The text of a file, or `asked` itself. Raises RunError of an empty one, of a file that is not UTF-8, or a file's name without it."""
    try:
        is_file = Path(asked).is_file()
    except (OSError, ValueError):  # too long a name, or one with a null byte
        is_file = False
    if not is_file and len(asked.split()) == 1 and ("/" in asked or Path(asked).suffix in (".txt", ".md", ".json", ".csv")):
        raise RunError(f"--text {asked}: no such file")
    text = read_file(asked, "--text ") if is_file else asked
    if not text.strip():
        raise RunError(f"--text{f' {asked}' if is_file else ''}: is empty; give a file or a text")
    return text


def _of_model(
    loaded: Loaded, text: str, layers: list[int] | None, heads: list[int] | None, changes: dict[str, Plain]
) -> Iterator[ShownModel]:
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
    device = open_device(config, loaded.environment).device
    tokens, characters = ["<start>"] + [text[a:b] for a, b in encoded.offsets], [0] + [a for a, _ in encoded.offsets]
    settings: list[InferenceSetting] = config.eval.diagnostics.inference
    with Progress().bar(f"{loaded.folder.name}: attention", len(settings)) as advance:
        for setting in settings:
            decoder = for_inference(loaded.decoder, setting).to(device)
            with torch.autocast(device.type, enabled=False):
                maps = attention_maps(decoder, torch.tensor(ids, device=device), CELLS)
            chosen = [(layer, head) for layer in layers or range(depth) for head in heads or range(width)]
            if layers is None and heads is None and len(chosen) > MOST_HEADS:
                chosen = maps.most_concentrated(MOST_HEADS)
            every = maps.effective.size
            amount = f"{len(ids):,} tokens, {len(text):,} characters; " + f"{len(chosen)} of " * (len(chosen) < every) + f"{every} heads"
            amount += f"; a cell is the largest of {maps.size} x {maps.size} weights" if maps.size > 1 else ""
            name = loaded.folder.name + (f", {setting.label}" if len(settings) > 1 else "")
            yield ShownModel(name, amount, loaded.folder, setting.label, tokens, characters, maps, chosen)
            advance(1)


def cells_of(model: ShownModel) -> Iterator[dict[str, Plain]]:
    """A line of the table for each cell of each head that is shown: the weight, its query and its key."""
    for layer, head in model.heads:
        place = {"run": str(model.source), "setting": model.setting, "layer": layer, "head": head}
        queries, keys, weights = (array[layer, head] for array in (model.maps.queries, model.maps.keys, model.maps.weights))
        for query, key, weight in zip(queries.flat, keys.flat, weights.flat, strict=True):
            if query >= 0:
                characters = {"query_character": model.characters[query], "key_character": model.characters[key]}
                tokens = {"query_token": model.tokens[query], "key_token": model.tokens[key]}
                yield place | {"query": int(query), "key": int(key)} | characters | tokens | {"weight": float(weight)}
