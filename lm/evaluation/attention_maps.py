"""Show single heads' attention weights on a text, for several models side by side (`lm diagnose --text`).

The weights are written as pictures and as a table.
"""

import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

from lm.data.batches import Batch
from lm.data.tokenizer import encode_with_offsets
from lm.diagnostics.attention_rows import AttentionRows
from lm.errors import ConfigError, RunError
from lm.files import write_together
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.plain import Plain
from lm.report.pictures import PLOT_SETTINGS
from lm.report.tables import table_bytes
from lm.runs.loading import LoadedModel, load

MAX_TOKENS = 256  # the longest text
MAX_LABELLED_TOKENS = 40  # the most tokens with which the axes show each token's text
MAX_SHOWN_HEADS = 16  # the most heads of a model that are shown, unless layers or heads are named
COLOUR_DECADES = 4  # powers of ten below the largest weight that the colours cover
IndexList = list[int] | None  # of layers or heads; None: all


@torch.no_grad()
def attention_maps(decoder: Decoder, tokens: Tensor) -> np.ndarray:
    """Return all heads' attention weights on `tokens` (T,): (layers, H, T, T) fp32, NaN where a query does not see a
    key.
    """
    normalizers, count = decoder.normalizers(), len(tokens)
    weights = torch.full(
        (len(normalizers), max(normalizer.layer.n_head for normalizer in normalizers), count, count), math.nan
    )
    sequence = torch.cat((tokens, tokens[:1])).unsqueeze(0)  # the appended token is a target that is not read
    for block in attention_blocks(decoder, Batch.from_sequences(sequence)):
        rows = AttentionRows.from_block(block)
        heads, queries, keys = rows.weights.shape
        first = int(block.queries[0])
        visible = rows.weights.masked_fill(~rows.visible, math.nan).cpu()
        weights[block.layer, :heads, first : first + queries, :keys] = visible
    return weights.numpy()


@dataclass(frozen=True, eq=False)
class ModelAttention:
    """This class holds one model's attention weights on the text, and the heads to show."""

    source: Path  # the model's folder
    token_texts: list[str]  # the text of each token; the first one begins the document
    maps: np.ndarray  # (layers, H, T, T), as from `attention_maps`
    shown_heads: list[tuple[int, int]]  # (layer, head) of the shown heads


def attention_picture_by_suffix(models: Sequence[ModelAttention]) -> dict[str, bytes]:
    """Return the content of a PNG and an SVG file, by suffix, with a map of each shown head.

    All maps share one logarithmic colour scale, which covers both signs if any weight is negative.
    """
    weights = np.concatenate([model.maps[head].ravel() for model in models for head in model.shown_heads])
    weights = weights[np.isfinite(weights)]
    top = float(np.abs(weights).max(initial=0.0)) or 1.0
    norm, colours = LogNorm(top / 10**COLOUR_DECADES, top), "viridis"
    if (weights < 0).any():
        norm, colours = SymLogNorm(top / 10**COLOUR_DECADES, vmin=-top, vmax=top), "RdBu_r"
    most_heads = max(len(model.shown_heads) for model in models)
    columns = math.ceil(math.sqrt(most_heads))  # of each model
    rows = -(-most_heads // columns)
    with matplotlib.rc_context(PLOT_SETTINGS | {"axes.grid": False}):
        figure = Figure(figsize=(4 * columns * len(models), 4 * rows), layout="constrained")
        grid = figure.subplots(rows, columns * len(models), squeeze=False)
        for number, model in enumerate(models):
            for place, (layer, head) in enumerate(model.shown_heads):
                axes = grid[place // columns, number * columns + place % columns]
                image = axes.imshow(np.clip(model.maps[layer, head], norm.vmin, norm.vmax), colours, norm)
                title = f"{model.source.resolve().name}\n" * (place == 0) + f"layer {layer}, head {head}"
                axes.set(title=title, xlabel="key", ylabel="query")
                if len(model.token_texts) <= MAX_LABELLED_TOKENS:
                    # a dot for each space, and escapes for what can't be seen
                    labels = [repr(token)[1:-1].replace(" ", "\u00b7") or "-" for token in model.token_texts]
                    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
                    axes.set_yticks(range(len(labels)), labels, fontsize=6)
        for axes in grid.flat:
            if not axes.images:
                axes.set_axis_off()
        figure.colorbar(image, ax=grid, label="weight", format="{x:g}", aspect=40, pad=0.02)
        files = {suffix: io.BytesIO() for suffix in (".png", ".svg")}
        for suffix, file in files.items():
            figure.savefig(file, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else {})
    return {suffix: file.getvalue() for suffix, file in files.items()}


def write_attention(
    sources: list[Path], text: str, layers: IndexList, heads: IndexList, checkpoint: str, table_path: Path | None
) -> list[str]:
    """Write the attention weights of models on a text as a table and two picture files; return lines to print.

    Args:
        sources: run folders, checkpoints, exports and other model folders.
        text: a UTF-8 file, or the text itself.
        layers: indices of layers to show, from 0; None: all.
        heads: indices of heads to show, from 0; None: all. Of more than `MAX_SHOWN_HEADS` heads, some have to be named.
        checkpoint: the checkpoint of run folders: `last`, `best` or a step.
        table_path: file of the table, .csv or .json; the pictures lie beside it. None: attention.csv in the first
            model's folder.

    Raises LMError: there is no model at a source, no text, no such layer or head, or the text is too long.
    """
    text = read_text(text)
    models = [model_attention(load(source, checkpoint), text, layers, heads) for source in sources]
    path = table_path or models[0].source / "attention.csv"
    files = {path: table_bytes([cell for model in models for cell in weight_rows(model)], path)}
    files |= {path.with_suffix(suffix): content for suffix, content in attention_picture_by_suffix(models).items()}
    write_together(files)
    lines = [f"{model.source}: {len(model.token_texts)} tokens, {len(model.shown_heads)} heads" for model in models]
    return [*lines, *map(str, files)]


def read_text(text_or_path: str) -> str:
    """Return the content of the file `text_or_path` if there is one, else the argument itself.

    Raises RunError: the text is empty, the file is not UTF-8, or what looks like a path is no file.
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


def model_attention(model: LoadedModel, text: str, layers: IndexList, heads: IndexList) -> ModelAttention:
    """Return a model's attention on the text, computed on the CPU. Raises RunError or ConfigError as `write_attention`
    does.
    """
    tokenizer, start = model.tokenizer_and_start_id()
    encoded = encode_with_offsets(tokenizer, text)
    ids, has_end = [start, *encoded.ids], model.spec.model.position.has_length_limit
    max_tokens = min(MAX_TOKENS, model.spec.seq_len if has_end else MAX_TOKENS)
    if len(ids) > max_tokens:
        raise RunError(f"--text: {len(ids):,} tokens to {model.folder}, more than {max_tokens:,}; give a shorter text")
    shape = model.spec.model.n_layer, max(normalizer.layer.n_head for normalizer in model.decoder.normalizers())
    for name, indices, count in zip(("layer", "head"), (layers, heads), shape, strict=True):
        if wrong := [index for index in indices or [] if not 0 <= index < count]:
            raise ConfigError(f"--{name} {wrong[0]}: {model.folder} has {count} {name}s, 0 to {count - 1}")
    shown_heads = [*product(layers or range(shape[0]), heads or range(shape[1]))]
    if layers is None and heads is None and len(shown_heads) > MAX_SHOWN_HEADS:
        raise ConfigError(f"--text: {model.folder} has {len(shown_heads)} heads: choose some by --layer and --head")
    tokens = ["<start>"] + [text[begin:end] for begin, end in encoded.offsets]
    return ModelAttention(model.folder, tokens, attention_maps(model.decoder, torch.tensor(ids)), shown_heads)


def weight_rows(model: ModelAttention) -> Iterator[dict[str, Plain]]:
    """Yield a table row for each weight of the shown heads on a key that the query sees."""
    for layer, head in model.shown_heads:
        weights = model.maps[layer, head]
        for query, key in np.argwhere(np.isfinite(weights)).tolist():
            yield {
                "run": str(model.source), "layer": layer, "head": head, "query": query,
                "key": key, "query_token": model.token_texts[query], "key_token": model.token_texts[key],
                "weight": float(weights[query, key]),
            }  # fmt: skip
