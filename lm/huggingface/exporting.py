"""`lm export --format hf`: a model and its card as a plain GPT-2, Llama or Qwen folder that transformers loads without code of ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lm.attention.options import shown
from lm.config.effects import function_of
from lm.config.load import to_yaml
from lm.data.tokenizer import TOKENIZER_CONFIG
from lm.errors import RunError
from lm.files import new_folder, replacing
from lm.huggingface.architectures import ARCHITECTURES, Architecture, Part, Shape
from lm.huggingface.fields import Fields
from lm.huggingface.importing import CONFIG, SINGLE
from lm.model.spec import ModelSpec
from lm.runs.checkpoints import Described, write_weights
from lm.runs.evaluations import Evaluation, evaluation_files, read_evaluation
from lm.runs.folder import TOKENIZER
from lm.runs.loading import Loaded, load
from lm.schema import Plain

MOST_PLACES = 8  # of a series: longer ones are in the run's evaluations


def model_card(loaded: Loaded, kind: str) -> str:
    """The text, in Markdown, with the header that the hub reads.

    Args:
        kind: `model_type` of the exported model.
    """
    spec, model = loaded.spec, loaded.spec.model
    parameters = sum(value.numel() for value in loaded.decoder.parameters())
    rows = {
        "architecture": f"{kind}, {model.n_layer} layers, width {model.n_embd}, {model.block.label(model)}",
        "heads": f"{model.n_head}, of keys and values {model.kv_heads}, of size {model.key_dims}",
        "parameters": f"{parameters:,}",
        "positions": model.position.label,
        "attention": model.normalizer.label(),
        "training length": f"{spec.seq_len:,} tokens",
        "vocabulary": f"{spec.vocab_size:,}",
    }
    if loaded.tokenizer is not None:
        rows["documents start with"] = f"`{spec.end_of_text}`: put it before a text, as in training; the tokenizer does not"
    parts = ["---\nlibrary_name: transformers\npipeline_tag: text-generation\n---", f"# {loaded.folder.resolve().name}", _table(rows)]
    parts += ["## Training", _training(loaded)]
    if figures := _figures(loaded):
        parts += ["## Figures", figures]
    return "\n\n".join(parts) + "\n"


def _training(loaded: Loaded) -> str:
    origin = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in loaded.origin.items())
    imported = f"The weights were imported: {origin}." if origin else ""
    if loaded.config is None:
        return imported or "No training run is behind these weights."
    config, environment = loaded.config, loaded.environment
    sources = ", ".join(weighted.source.label for weighted in config.data.sources)
    rows = {
        "steps": f"{loaded.stamp['step']:,} of {config.trainer.max_steps:,}",
        "tokens": f"{loaded.stamp['tokens_seen']:,}, in batches of {config.optim.batch_tokens:,}",
        "data": "made up by tasks" if config.data.symbolic else sources,
        "data fingerprint": str(loaded.stamp["data_fingerprint"])[:16],
        "seed": str(config.seed),
        "precision": str(environment.get("precision", "not recorded")),
        "started from": (environment.get("started_from") or {}).get("path", "random weights"),
    }
    text = f"{_table(rows)}\n\n<details><summary>The whole configuration</summary>\n\n```yaml\n{to_yaml(config)}```\n\n</details>"
    return f"{imported}\n\n{text}" if imported else text


def _figures(loaded: Loaded) -> str:
    """A table of what was measured at this step, empty if nothing was."""
    lines = []
    for (_, step), path in sorted(evaluation_files(loaded.folder).items()):
        content = read_evaluation(path)
        if step != loaded.stamp["step"] or "series" not in content:
            continue
        for series in Evaluation.of(content).series:
            if series.shown is None or len(series.places) > MOST_PLACES:
                continue
            for place in series.places:
                units = len(series.column(series.column_at(place))[0].values) if series.samples else ""
                name = " ".join(word for word in (series.metric, series.what, f"({series.unit})" if series.unit else "") if word)
                where = f"{series.axis.label} {place}" if series.axis else ""
                lines.append(f"| {name} | {series.setting} | {where} | {series.mean_at(place):.4f} | {units} |")
    head = "| metric | inference setting | where | mean | units |\n|---|---|---|---|---|\n"
    return head + "\n".join(lines) if lines else ""


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


# ---------------------------------------------------------------- the model


def export_for_transformers(source: Path, checkpoint: str, out: Path) -> Path:
    """Write the model at `source` to the folder `out` in the format of transformers, in fp32. Returns `out`.

    Weights, config.json, the tokenizer, and README.md: what the model is, how it was trained, and its figures.

    Raises:
        RunError: nothing to load there, a model that no architecture holds (with the reason), or `out` can't be written.
    """
    loaded = load(source, checkpoint)
    shape = Shape(loaded.spec.model, loaded.spec.vocab_size, loaded.spec.seq_len)
    architecture, config = _architecture(shape, source)
    described, tensors = _tensors(architecture, shape, config, loaded)
    with new_folder(out) as folder:
        with replacing(folder / SINGLE, "the weights") as file:
            write_weights(file, described, tensors)
        files = {CONFIG: {**config, **_tokens(loaded)}}
        if loaded.tokenizer is not None:
            with replacing(folder / TOKENIZER) as file:
                file.write((loaded.folder / TOKENIZER).read_bytes())
            files[TOKENIZER_CONFIG] = _tokenizer_config(loaded.spec)
        for name, content in files.items():
            with replacing(folder / name) as file:
                file.write((json.dumps(content, indent=2) + "\n").encode())
        with replacing(folder / "README.md") as file:
            file.write(model_card(loaded, architecture.model_type).encode())
    return out


def _architecture(shape: Shape, source: Path) -> tuple[Architecture, dict[str, Plain]]:
    """The architecture that holds such a model, and its configuration. Raises RunError with how the nearest one differs."""
    ours, differences = function_of(shape.model), {}
    for name, architecture in ARCHITECTURES.items():
        config = architecture.write(shape)
        theirs = function_of(architecture.read(Fields(config, source)).model)
        apart = [
            f"{key} = {shown(theirs.get(key))} (here {shown(ours.get(key))})"
            for key in dict.fromkeys((*ours, *theirs))
            if ours.get(key) != theirs.get(key) and ("." not in key or (key in ours and key in theirs))  # else another variant's option
        ]
        apart += [reason] if (reason := architecture.unfit(shape)) else []
        if not apart:
            return architecture, config
        differences[name] = apart
    name, apart = min(differences.items(), key=lambda item: len(item[1]))
    nearest = f"the nearest, {name}, has {', '.join(apart)}"
    remedy = "without --format hf it is exported for lm"
    raise RunError(f"{source}: no architecture of transformers computes this model without code of ours; {nearest}; {remedy}")


def _tensors(
    architecture: Architecture, shape: Shape, config: dict[str, Plain], loaded: Loaded
) -> tuple[dict[str, Described], Iterator[tuple[str, Tensor]]]:
    """Types and shapes of the tensors by their names in transformers, and the tensors, made one by one."""
    state = loaded.decoder.state_dict()
    parts = list(architecture.placed(shape, Fields(config, loaded.path), architecture.base))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            for (name, _), value in zip(part.theirs, _split(part, state[part.ours].float()), strict=True):
                yield name, value

    return {name: (torch.float32, size) for part in parts for name, size in part.theirs}, tensors()


def _split(part: Part, value: Tensor) -> Iterator[Tensor]:
    """The tensors that one of our parameters becomes."""
    sizes = [size[-1] if part.transposed else size[0] for _, size in part.theirs]
    for piece in value.split(sizes):
        yield piece.t().contiguous() if part.transposed else piece.contiguous()


def _tokens(loaded: Loaded) -> dict[str, Plain]:
    """Ids of the token that starts, and so ends, documents."""
    if loaded.tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    _, start = loaded.tokenizer_and_start()
    return {"bos_token_id": start, "eos_token_id": start}


def _tokenizer_config(spec: ModelSpec) -> dict[str, Plain]:
    end = spec.end_of_text
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": spec.seq_len,
        "clean_up_tokenization_spaces": False,
    }
