"""`lm diagnose --text`: the attention weights of single heads on a text, for several models side by side, as pictures
and a table.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.load import overrides_in
from lm.data.batches import Batch
from lm.data.tokenizer import encoding_of
from lm.diagnostics.attention_rows import AttentionRows
from lm.errors import ConfigError, RunError
from lm.evaluation.evaluate import changed_config, open_device, text_config
from lm.files import write_together
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.swapped import applicable_settings, for_inference
from lm.plain import Plain
from lm.progress import Progress
from lm.report.pictures import Map, Picture, colour_scale
from lm.report.tables import table_bytes
from lm.runs.evaluations import number
from lm.runs.loading import LoadedModel, load


@dataclass(frozen=True, eq=False)
class Maps:
    """Maps, K x K cells each, of all heads' attention on one sequence. A cell shows the weight of one of its queries on
    one of its keys.
    """

    size: int  # tokens along each side of a cell; 1: every weight has its own cell
    # (layers, H, K, K) fp32, queries by keys; NaN where no query sees a key; not finite where a weight is not
    weights: np.ndarray
    queries: np.ndarray  # (layers, H, K, K) int64, index of each weight's query token; -1 where no query sees a key
    keys: np.ndarray  # (layers, H, K, K) int64, index of each weight's key token; -1 likewise


@torch.no_grad()
def attention_maps(decoder: Decoder, tokens: Tensor, cells: int) -> Maps:
    """Maps of a decoder's attention on `tokens` (L,), with up to `cells` cells per side. Memory holds weights of some
    queries of one layer.

    A cell of a long sequence shows its weight of largest magnitude: a mean would lose single keys with much weight,
    such as a sink.
    """
    size = -(-len(tokens) // cells)
    side = -(-len(tokens) // size)
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    shape = len(decoder.normalizers()), heads, side, side
    weights = torch.full(shape, math.nan)
    queries, keys = (torch.full(shape, -1) for _ in range(2))
    sequence = torch.cat((tokens, tokens[:1])).unsqueeze(0)  # the appended token is a target that is not read
    # a block of queries is some whole rows of cells
    for block in attention_blocks(decoder, Batch.of(sequence), block=-(-cells // size) * size):
        rows = AttentionRows.from_block(block)
        magnitude = rows.magnitudes.masked_fill(~rows.visible, -1.0)
        peaks, places = F.max_pool2d(magnitude, size, ceil_mode=True, return_indices=True)  # (H, rows, columns) each
        found = rows.weights.flatten(1).gather(1, places.flatten(1)).view_as(peaks)
        query, key = block.queries[places // rows.visible.size(1)], places % rows.visible.size(1)
        is_seen, first = (peaks >= 0) | peaks.isnan(), int(block.queries[0]) // size
        for cells_of_all, values, unseen in ((weights, found, math.nan), (queries, query, -1), (keys, key, -1)):
            of_block = cells_of_all[block.layer, :, first : first + peaks.size(1), : peaks.size(2)]
            of_block.copy_(torch.where(is_seen, values, unseen))
    return Maps(size, weights.numpy(), queries.numpy(), keys.numpy())


# ---------------------------------------------------------------- pictures


MAX_LABELS = 40  # the most tokens with which the axes show each token's text
DECADES = 4  # powers of ten below the largest weight that the colours cover


@dataclass(frozen=True, eq=False)
class ShownModel:
    """One model's attention on the text, under one inference setting."""

    name: str  # the name of the run or model, and its setting where there are several
    amount: str  # how much of the model is shown, in words
    source: Path  # the model's folder
    setting: str  # label of the inference setting
    tokens: list[str]  # the text of each token; the first one begins the document
    maps: Maps
    heads: list[tuple[int, int]]  # (layer, head) of the shown heads


def attention_picture(models: Sequence[ShownModel]) -> Picture:
    """A picture with a map of each shown head, on one logarithmic scale of colours, which has both sides of 0 if any
    weight is negative.
    """
    shown_weights = np.concatenate(
        [model.maps.weights[layer, head].ravel() for model in models for layer, head in model.heads]
    )
    shown_weights = shown_weights[np.isfinite(shown_weights)]
    top = float(np.abs(shown_weights).max(initial=0.0)) or 1.0
    norm = colour_scale(top / 10**DECADES, top, "signed" if (shown_weights < 0).any() else "log")
    columns = math.ceil(math.sqrt(max(len(model.heads) for model in models)))  # of each model
    maps: list[list[Map]] = []
    for model in models:
        labels, axis_note = _labels(model), "" if len(model.tokens) <= MAX_LABELS else ", token"
        maps.append([])
        for layer, head in model.heads:
            title = "\n".join([model.name, model.amount] * (not maps[-1]) + [f"layer {layer}, head {head}"])
            axes = f"key{axis_note}", labels, labels
            weights = model.maps.weights[layer, head]
            maps[-1].append(Map(title, *axes, weights, norm, f"query{axis_note}", False, "weight"))
    cells: list[Map | None] = []
    for start in range(0, max(map(len, maps)), columns):
        rows = [of_model[start : start + columns] for of_model in maps]
        cells += [cell for row in rows for cell in row + [None] * (columns - len(row))]
    side = 4.2 if min(len(model.tokens) for model in models) <= MAX_LABELS else 2.9
    same_tokens = all(model.tokens == models[0].tokens for model in models)
    return Picture(cells, [], "", columns * len(maps), (side, side), shared="xy" if same_tokens else "x")


def _labels(model: ShownModel) -> list[str]:
    """Axis labels: each token's text if there are at most `MAX_LABELS` tokens, else the token index of five cells."""
    count, size = len(model.tokens), model.maps.size
    if count <= MAX_LABELS:
        return [token_label(token) for token in model.tokens]
    labels = [""] * -(-count // size)
    for mark in np.linspace(0, count - 1, 5).round().astype(int) // size * size:
        labels[mark // size] = number(mark)
    return labels


def token_label(token: str) -> str:
    """A token's text with a dot for each space and escapes for what can't be seen."""
    return repr(token)[1:-1].replace(" ", "\u00b7") or "-"


# ---------------------------------------------------------------- lm diagnose --text


CELLS_A_SIDE = 128  # along each side of a map
MAX_HEADS = 16  # the most heads of a model that are shown, unless layers or heads are named
MAX_TEXT_TOKENS = 2**14  # the longest text, for models without learned positions
Indices = list[int] | None  # of layers or heads; None: all


def show_attention(
    sources: list[Path],
    text: str,
    layers: Indices,
    heads: Indices,
    checkpoint: str,
    overrides: list[str],
    table_path: Path | None,
) -> list[str]:
    """Write attention weights of models on a text, as a table and two picture files beside it; return lines to print.

    Args:
        sources: run folders, checkpoints, exports and other model folders.
        text: a UTF-8 file, or the text itself.
        layers, heads: indices, from 0, to show; None: all. Of more than `MAX_HEADS` heads, some have to be named.
        checkpoint: the checkpoint of run folders: `last`, `best` or a step.
        overrides: changes `key=value` of eval.diagnostics.inference and of keys of trainer.
        table_path: file of the table, .csv or .json; the pictures lie beside it. None: attention.csv in the folder of
            the first model.

    Raises LMError: no model at a source, no text, a text that is too long, no such layer or head.
    """
    changes, text = overrides_in("diagnose", overrides), read_text(text)
    models = [
        model for source in sources for model in _shown_models(load(source, checkpoint), text, layers, heads, changes)
    ]
    table_path = table_path or models[0].source / "attention.csv"
    picture = attention_picture(models)
    files = {table_path: table_bytes([cell for model in models for cell in cells_of(model)], table_path)}
    files |= {table_path.with_suffix(".png"): picture.png, table_path.with_suffix(".svg"): picture.svg.encode()}
    write_together(files)
    return [*(f"{model.name}: {model.amount}" for model in models), *map(str, files)]


def read_text(text_or_path: str) -> str:
    """The text of the file `text_or_path`, else the argument itself. Raises RunError: an empty text, no UTF-8, a path
    without a file.
    """
    is_file = os.path.isfile(Path(text_or_path))  # False, too, for a name that is too long, or has a null byte
    looks_like_a_path = "/" in text_or_path or Path(text_or_path).suffix in (".txt", ".md", ".json", ".csv")
    if not is_file and looks_like_a_path and len(text_or_path.split()) == 1:
        raise RunError(f"--text {text_or_path}: no such file")
    try:
        text = Path(text_or_path).read_text(encoding="utf-8") if is_file else text_or_path
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"--text {text_or_path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None
    if not text.strip():
        raise RunError(f"--text{f' {text_or_path}' if is_file else ''}: is empty; give a file or a text")
    return text


def _shown_models(
    model: LoadedModel, text: str, layers: Indices, heads: Indices, changes: dict[str, Plain]
) -> Iterator[ShownModel]:
    config = changed_config(changes, model.config or text_config(model, ()))
    tokenizer, start = model.tokenizer_and_start()
    encoded = encoding_of(tokenizer, text)
    ids, has_end = [start, *encoded.ids], model.spec.model.position.has_last_position
    max_tokens = model.spec.seq_len if has_end else MAX_TEXT_TOKENS
    if len(ids) > max_tokens:
        reason = "its learned positions end at" if has_end else "of one text are shown at most"
        raise RunError(f"--text: {len(ids):,} tokens to {model.folder}, {reason} {max_tokens:,}; give a shorter one")
    shape = model.spec.model.n_layer, max(normalizer.layer.n_head for normalizer in model.decoder.normalizers())
    for name, indices, count in zip(("layer", "head"), (layers, heads), shape, strict=True):
        if wrong := [index for index in indices or [] if not 0 <= index < count]:
            raise ConfigError(f"--{name} {wrong[0]}: {model.folder} has {count} {name}s, 0 to {count - 1}")
    shown_heads = [*product(layers or range(shape[0]), heads or range(shape[1]))]
    if layers is None and heads is None and len(shown_heads) > MAX_HEADS:
        raise ConfigError(f"--text: {model.folder} has {len(shown_heads)} heads: choose some by --layer and --head")
    device = open_device(config, model.environment).device
    tokens = ["<start>"] + [text[begin:end] for begin, end in encoded.offsets]
    settings = applicable_settings(model.decoder, config.eval.diagnostics.inference)
    if not settings:
        raise RunError(f"{model.path}: no setting of eval.diagnostics.inference is for its normalizer; give another")
    folder_name = model.folder.resolve().name
    with Progress().bar(f"{folder_name}: attention", len(settings)) as bar:
        for setting in settings:
            decoder = for_inference(model.decoder, setting).to(device)
            with torch.autocast(device.type, enabled=False):
                maps = attention_maps(decoder, torch.tensor(ids, device=device), CELLS_A_SIDE)
            amount = f"{len(ids):,} tokens, {len(text):,} characters; {len(shown_heads)} of {math.prod(shape)} heads"
            amount += f"; a cell is the largest of {maps.size} x {maps.size} weights" if maps.size > 1 else ""
            name = folder_name + (f", {setting.label}" if len(settings) > 1 else "")
            yield ShownModel(name, amount, model.folder, setting.label, tokens, maps, shown_heads)
            bar.update()


def cells_of(model: ShownModel) -> Iterator[dict[str, Plain]]:
    """Table rows of the shown heads, one for each cell in which a query sees a key: the cell's weight, and this
    weight's query and key.
    """
    for layer, head in model.heads:
        cells = (array[layer, head].flat for array in (model.maps.queries, model.maps.keys, model.maps.weights))
        for query, key, weight in zip(*cells, strict=True):
            if query >= 0:
                yield {
                    "run": str(model.source), "setting": model.setting, "layer": layer, "head": head,
                    "query": int(query), "key": int(key),
                    "query_token": model.tokens[query], "key_token": model.tokens[key], "weight": float(weight),
                }  # fmt: skip
