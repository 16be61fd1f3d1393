"""Commands on trained models."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lm.commands.arguments import AllowPlugin, Checkpoint, New, Results, Source, check_results, paths_and_overrides, split_overrides
from lm.errors import ConfigError
from lm.schema import Plain

if TYPE_CHECKING:
    from lm.report.evaluation_tables import Evaluated

RunsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|MODEL|CONFIG|KEY=VALUE",
        help="run folders; model folders and a configuration of the text to measure them on; overrides, e.g. eval.sequences=512",
        show_default=False,
    ),
]
Suite = Annotated[
    str, typer.Option(help="quick, full, or a YAML file with an `eval` block [default: the run's own `eval` block]", show_default=False)
]
NeedleOption = Annotated[
    bool,
    typer.Option("--needle", help="needle in a haystack at 1x to 16x the training length; base models need eval.needle.finetune.steps=300"),
]
To = Annotated[
    str, typer.Option(help="the new normalizer, e.g. ssmax; its options are overrides, e.g. model.normalizer.bias=true", show_default=False)
]
Init = Annotated[
    str | None,
    typer.Option(
        help="initial values of its parameters: match, unit, a number, or fit (least KL divergence from the old model); default: its own"
    ),
]


def evaluate(
    arguments: RunsAndOverrides,
    checkpoint: Checkpoint = "last",
    suite: Suite = "",
    needle: NeedleOption = False,
    out: Results = None,
    as_json: Annotated[bool, typer.Option("--json", help="print all numbers as JSON, one object each, and nothing else")] = False,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Evaluate trained models.

    Results are written to evaluations/ in each run folder; what was measured before is not measured again.
    """
    from lm.evaluation.evaluate import evaluate_runs

    check_results(out)
    folders, overrides = paths_and_overrides(arguments, "no run folder given, e.g. runs/softmax")
    grid = ["eval.needle.length_factors=[1,2,4,8,16]"] if needle else []
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            results = evaluate_runs(folders, checkpoint, suite, grid + overrides)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept, and the same command goes on from there", file=sys.stderr)
        raise
    _print_evaluations(results, out, as_json)


def _print_evaluations(results: list["Evaluated"], out: Path | None, as_json: bool = False) -> None:
    """Print tables of evaluations, or their numbers as JSON, and write all numbers to the file `out`."""
    from lm.report.evaluation_tables import print_results, results_bytes, write_table

    if as_json:
        print(results_bytes(results, Path("all.json")).decode(), end="")
    else:
        print_results(results, out)
    if out:
        write_table(results, out)


def diagnose(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT|CONFIG|KEY=VALUE",
            help="run folders; checkpoints; exports, with a configuration of text; overrides, e.g. eval.diagnostics.sequences=32",
            show_default=False,
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(help="a UTF-8 file or a text: draw the weights of single heads on it instead of statistics", show_default=False),
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(help="a layer that --text draws, from 0; may be repeated", show_default=False)] = None,
    head: Annotated[list[int] | None, typer.Option(help="a head that --text draws, from 0; may be repeated", show_default=False)] = None,
    checkpoint: Checkpoint = "last",
    out: Results = None,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Describe the attention of trained models.

    Statistics of attention weights by layer, head and position, beside those of the untrained model and of shuffled scores
    (docs/diagnostics.md). Those of runs are kept in evaluations/. With --text: maps of single heads' weights.
    """
    sources, overrides = paths_and_overrides(arguments, "no run folder, checkpoint or export given, e.g. runs/softmax")
    check_results(out)
    if text is None and (layer or head):
        raise ConfigError(f"--{'layer' if layer else 'head'}: of the maps that --text draws; give a text, too")
    if text is None:
        from lm.evaluation.diagnostics import diagnose

        _print_evaluations(diagnose(sources, checkpoint, overrides), out)
    else:
        from lm.evaluation.attention_text import show_attention

        text = os.fsencode(text).decode(errors="replace")  # UTF-8, whatever the locale
        print(*show_attention(sources, text, layer or None, head or None, checkpoint, overrides, out), sep="\n")


def swap(
    source: Source,
    to: To,
    out: New,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="of a model without a training run: the configuration of the text to measure on; overrides, e.g. eval.sequences=512",
            show_default=False,
        ),
    ] = None,
    init: Init = None,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Replace the normalizer of a trained model.

    Writes the new model as a run folder of its own, and measures how far its outputs differ from the old model's.
    """
    from lm.evaluation.swap import swap_run
    from lm.report.evaluation_tables import Evaluated, print_results

    files, overrides = split_overrides(arguments or [])
    result = swap_run(source, checkpoint, to, init, out, overrides, files)
    print(*result.models, sep="\n")
    print_results([Evaluated(out, result.evaluation, cached=False)], result.path)
    print(*result.notes, sep="\n")
    if result.warning:
        print(result.warning, file=sys.stderr)


def import_(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER|FILE.gguf|NAME", help="model in the format of transformers, GGUF file, or name on the hub")
    ],
    out: New,
    length: Annotated[
        int | None, typer.Option(min=2, help="training length in tokens [default: its max_position_embeddings]", show_default=False)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="of a model on the hub: commit, tag or branch", show_default=False)] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a tokenizer's folder [default: the model's own]", show_default=False)
    ] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="token that starts a document [default: <|endoftext|> if it has that, else its BOS or EOS]", show_default=False),
    ] = None,
) -> None:
    """Import a pretrained model.

    GPT-2, Llama (SmolLM2, TinyLlama), Qwen 2 or Qwen 3 become a model folder that other commands accept (docs/pretrained.md).
    No code of the model is executed.
    """
    from lm.huggingface.importing import import_model

    import_model(source, out, length, revision, tokenizer, end_of_text)


def export(
    source: Source,
    out: New,
    checkpoint: Checkpoint = "last",
    format: Annotated[Literal["lm", "hf"], typer.Option(help="lm: a model folder; hf: a folder that transformers loads")] = "lm",
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="also upload the folder to the Hugging Face hub under this name", show_default=False)
    ] = None,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Export a trained model.

    Writes safetensors, JSON and the tokenizer to a folder that `lm.load` and all commands accept as a model, or one that transformers
    loads (docs/pretrained.md).
    """
    if push is not None:
        from lm.huggingface.exporting import check_hub_name

        check_hub_name(push)
    if format == "hf":
        from lm.huggingface.exporting import export_for_transformers

        print(export_for_transformers(source, checkpoint, out))
    else:
        from lm.runs.loading import export

        print(export(source, checkpoint, out))
    if push is not None:
        from lm.huggingface.exporting import upload

        print(upload(out, push))


def generate(
    source: Source,
    prompt: Annotated[str, typer.Option(help="text to continue")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="largest number of tokens to generate")] = 200,
    temperature: Annotated[float, typer.Option(help="divides the logits; 0: always the most probable token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="sample from the k most probable tokens only")] = None,
    top_p: Annotated[float | None, typer.Option(help="sample from the most probable tokens whose probabilities sum to this")] = None,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Generate text with a trained model.

    Tokens are printed as they are sampled.
    """
    from lm.evaluation.generation import generate_text

    prompt = os.fsencode(prompt).decode(errors="replace")  # UTF-8, whatever the locale
    for piece in generate_text(source, checkpoint, prompt, max_new_tokens, temperature, top_k, top_p, seed):
        print(piece, end="", flush=True)
    print()


def harness(
    source: Source,
    tasks: Annotated[
        str, typer.Option(help="names or patterns of tasks, separated by commas, e.g. lambada_openai,arc_easy", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="overrides, e.g. trainer.precision=32", show_default=False)
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder with task files of your own")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="examples shown before each question [default: the task's]")] = None,
    limit: Annotated[float | None, typer.Option(help="largest number of documents of each task; below 1: a fraction of them")] = None,
    max_length: Annotated[int | None, typer.Option(help="context length in tokens [default: the training length]")] = None,
    metadata: Annotated[str | None, typer.Option(help="what tasks ask for, e.g. '{max_seq_lengths: [512]}'", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write [default: in evaluations/ of the run folder]")] = None,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Run tasks of the lm-evaluation-harness.

    Needs the package lm-eval (docs/evaluation.md).
    """
    from lm.config.yaml_text import parse_yaml
    from lm.errors import ConfigError, Problem
    from lm.evaluation.harness import run_tasks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    known = parse_yaml(metadata, "--metadata") if metadata else None
    if not isinstance(known, dict | None):
        raise ConfigError([Problem("--metadata", metadata, "must be a map", "write it as '{name: value}'")])
    result, path = run_tasks(source, names, checkpoint, include_path, num_fewshot, limit, max_length, out, overrides or [], known)
    print_tasks(result, source)
    if path:
        print(path)


def print_tasks(result: dict[str, Plain], source: Path) -> None:
    """Print a table of metrics with their standard errors, an arrow where more (or less) is better, and what was cut."""
    from lm.report.tables import from_lines, print_tables

    lines: list[dict[str, str]] = []
    for name, task in {**result["tasks"], **result["groups"]}.items():
        cells = {"task": name, "shots": str(task.get("num_fewshot", "")), "documents": str(task.get("documents", ""))}
        for metric, value in task["metrics"].items():
            base, *kind = metric.split(",")
            if base.endswith("_stderr"):
                continue
            arrow = {True: " ↑", False: " ↓"}.get(task.get("higher_is_better", {}).get(base), "")
            error = task["metrics"].get(",".join([f"{base}_stderr", *kind]))
            lines.append(cells | {"metric": metric + arrow, "value": f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")})
            cells = dict.fromkeys(cells, "")
    print_tables(from_lines(f"{source}, step {result['step']}", lines, ("shots", "documents", "value")))
    for name, task in result["tasks"].items():
        if task["requests_cut"]:
            print(f"{name}: {task['requests_cut']} requests were longer than {task['max_length']} tokens and lost some on the left")
        if task["requests_shortened"]:
            print(f"{name}: {task['requests_shortened']} requests had room for fewer new tokens than they may write")
