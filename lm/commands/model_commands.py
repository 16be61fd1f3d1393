"""Defines the commands on trained models: `eval`, `diagnose`, `swap`, `import`, `export` and `generate`."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lm.commands.arguments import (
    AllowPlugin,
    CheckpointChoice,
    ModelSource,
    NewFolder,
    OutFile,
    check_out_file,
    paths_and_overrides,
)
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.report.evaluation_tables import EvaluationResult

RunsAndOverrides = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|MODEL|CONFIG|KEY=VALUE",
        help="run folders; model folders and a configuration of the text to measure them on; overrides, e.g. "
        "eval.sequences=512",
    ),
]
NormalizerName = Annotated[
    str, typer.Option(help="the new normalizer, e.g. ssmax; its options are overrides, e.g. model.normalizer.bias=true")
]
InitialValues = Annotated[
    str | None,
    typer.Option(
        help="initial values of its parameters: match (follow the old normalizer), unit or a number; default: its own"
    ),
]


def eval_(
    arguments: RunsAndOverrides,
    checkpoint: CheckpointChoice = "last",
    normalizer: Annotated[
        str, typer.Option(help="normalizer of models hf:FOLDER, which run in transformers, e.g. ssmax")
    ] = "softmax",
    length: Annotated[
        int | None, typer.Option(min=2, help="training length of models hf:FOLDER [default: max_position_embeddings]")
    ] = None,
    out: OutFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print all numbers as JSON, one object each, and nothing else")
    ] = False,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Evaluate trained models.

    Results are written to evaluations/ in each run folder; what was measured before is not measured again, so that the
    same command goes on where it was stopped.
    """
    from lm.evaluation.evaluate import evaluate_runs

    check_out_file(out)
    folders, overrides = paths_and_overrides(arguments, "no run folder given, e.g. runs/softmax")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        results = evaluate_runs(folders, checkpoint, overrides, "eval", normalizer, length)
    _print_evaluations(results, out, as_json)


def _print_evaluations(results: list["EvaluationResult"], out: Path | None, as_json: bool = False) -> None:
    """Print tables of evaluations, or their numbers as JSON, and write all numbers to the file `out` if it is given."""
    from lm.files import write_together
    from lm.report.evaluation_tables import print_results, results_file_content

    if as_json:
        print(results_file_content(results, Path("all.json")).decode(), end="")
    else:
        print_results(results, out)
    if out:
        write_together({out: results_file_content(results, out)})


def diagnose(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT|CONFIG|KEY=VALUE",
            help="run folders; checkpoints; exports, and a configuration of the text to measure these on; overrides, "
            "e.g. eval.diagnostics.sequences=32",
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(help="a UTF-8 file, or a text, on which attention maps of single heads are drawn"),
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(help="a layer that --text draws, from 0; may be repeated")] = None,
    head: Annotated[list[int] | None, typer.Option(help="a head that --text draws, from 0; may be repeated")] = None,
    checkpoint: CheckpointChoice = "last",
    out: OutFile = None,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Describe the attention of trained models.

    Statistics of attention weights by layer, head and position, beside those of the untrained model
    (docs/diagnostics.md). Statistics of a run are kept in its folder evaluations/. --text draws maps of single
    heads' weights instead.
    """
    sources, overrides = paths_and_overrides(arguments, "no run folder, checkpoint or export given, e.g. runs/softmax")
    check_out_file(out)
    if text is None and (layer or head):
        raise ConfigError(f"--{'layer' if layer else 'head'}: of the maps that --text draws; give a text, too")
    if text is not None and overrides:
        raise ConfigError(f"{overrides[0]}: --text takes no keys")
    if text is None:
        from lm.evaluation.evaluate import evaluate_runs

        _print_evaluations(evaluate_runs(sources, checkpoint, overrides, "diagnose"), out)
    else:
        from lm.evaluation.attention_maps import write_attention

        text = os.fsencode(text).decode(errors="replace")  # UTF-8, whatever the locale
        print(*write_attention(sources, text, layer or None, head or None, checkpoint, out), sep="\n")


def swap(
    source: ModelSource,
    to: NormalizerName,
    out: NewFolder,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="for a model without a training run, the configuration of the text to measure on; overrides, e.g. "
            "eval.sequences=512",
        ),
    ] = None,
    init: InitialValues = None,
    checkpoint: CheckpointChoice = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Replace the normalizer of a trained model.

    Writes the new model as a run folder of its own, and measures how far its outputs differ from the old model's.
    """
    from lm.evaluation.swap import swap_run
    from lm.report.evaluation_tables import EvaluationResult, print_results

    files, overrides = paths_and_overrides(arguments or [])
    result = swap_run(source, checkpoint, to, init, out, overrides, files)
    print(*result.description_lines, sep="\n")
    print_results([EvaluationResult(out, result.evaluation, is_cached=False)], result.evaluation_file)
    print(*result.notes, sep="\n")
    if result.warning:
        print(result.warning, file=sys.stderr)


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="FOLDER|NAME", help="model in the format of transformers, or name on the hub"),
    ],
    out: NewFolder,
    length: Annotated[
        int | None, typer.Option(min=2, help="training length in tokens [default: its max_position_embeddings]")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="commit, tag or branch of a model on the hub")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or a tokenizer's folder [default: the model's own]")
    ] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="token that starts a document [default: <|endoftext|> if it has that, else its BOS or EOS]"),
    ] = None,
) -> None:
    """Import a pretrained model.

    GPT-2, Llama, Qwen 2 and 3, SmolLM3, Ministral 3, OLMo 2 and GPT-NeoX become a model folder that other commands
    accept (docs/pretrained.md). No code of the model is executed.
    """
    from lm.huggingface.importing import import_model

    import_model(source, out, length, revision, tokenizer, end_of_text)


def export(
    source: ModelSource,
    out: NewFolder,
    checkpoint: CheckpointChoice = "last",
    format: Annotated[
        Literal["lm", "hf"], typer.Option(help="lm: a model folder; hf: a folder that transformers loads")
    ] = "lm",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Export a trained model.

    Writes safetensors, JSON and the tokenizer to a folder that `lm.load` and all commands accept as a model, or one
    that transformers loads (docs/pretrained.md).
    """
    if format == "hf":
        from lm.huggingface.exporting import export_for_transformers

        print(export_for_transformers(source, checkpoint, out))
    else:
        from lm.runs.loading import export

        print(export(source, checkpoint, out))


def generate(
    source: ModelSource,
    prompt: Annotated[str, typer.Option(help="text to continue")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=10**7, help="largest number of tokens to generate")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, max=1e6, help="divides the logits; 0: always the most probable token")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="sample from the k most probable tokens only")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the sampling")] = 0,
    checkpoint: CheckpointChoice = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Generate text with a trained model.

    Tokens are printed as they are sampled.
    """
    from lm.evaluation.generation import Sampling, generate_text

    prompt = os.fsencode(prompt).decode(errors="replace")  # UTF-8, whatever the locale
    # a terminal gets no control characters of the text, a file gets the text as it is
    stream = sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    for piece in generate_text(source, checkpoint, prompt, max_new_tokens, Sampling(temperature, top_k, seed)):
        print(piece, end="", file=stream, flush=True)
    print()
