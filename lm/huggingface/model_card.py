"""README.md of an exported model: what it is, how it was trained, and its figures with the number of units behind each."""

from lm.config.load import to_yaml
from lm.runs.evaluations import Evaluation, evaluation_files, read_evaluation
from lm.runs.loading import Loaded

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
        for one in Evaluation.of(content).series:
            if one.shown is None or len(one.places) > MOST_PLACES:
                continue
            for place in one.places:
                units = len(one.column(one.column_at(place))[0].values) if one.samples else ""
                name = " ".join(word for word in (one.metric, one.what, f"({one.unit})" if one.unit else "") if word)
                where = f"{one.axis.label} {place}" if one.axis else ""
                lines.append(f"| {name} | {one.setting} | {where} | {one.mean_at(place):.4f} | {units} |")
    head = "| metric | inference setting | where | mean | units |\n|---|---|---|---|---|\n"
    return head + "\n".join(lines) if lines else ""


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
