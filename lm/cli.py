"""The command line: one Typer app; heavy imports happen inside the commands."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from lm.errors import ConfigError, LMError

app = typer.Typer(
    help="What does an attention normalizer do to a language model?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

data = typer.Typer(help="Look into prepared text.", no_args_is_help=True)
app.add_typer(data, name="data")

Configuration = Annotated[
    list[str], typer.Argument(metavar="CONFIG... [KEY=VALUE]...", help="YAML files and overrides, later ones win", show_default=False)
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders", show_default=False)]
RunsAndOverrides = Annotated[
    list[str], typer.Argument(metavar="RUN... [KEY=VALUE]...", help="run folders, and e.g. eval.rows=512", show_default=False)
]
Suite = Annotated[str, typer.Option(help="quick, full, or a YAML file with an `eval` block [default: as the run says]", show_default=False)]
NeedleOption = Annotated[
    bool, typer.Option("--needle", help="needles at 1x to 16x the training length; base models want eval.needle.finetune.steps=300")
]
Results = Annotated[Path | None, typer.Option("--out", "-o", help="a .csv or .json file for all numbers", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. eval.rows=512", show_default=False)]
Reference = Annotated[bool, typer.Option("--reference", help="print all keys with their meaning instead (docs/config.md)")]
Checkpoint = Annotated[str, typer.Option(help="`last`, `best`, a step, or a checkpoint's path")]
Source = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="run folder, checkpoint or export", show_default=False)]
To = Annotated[str, typer.Option(help="the new normalizer; its options as e.g. model.normalizer.bias=true", show_default=False)]
Init = Annotated[str | None, typer.Option(help="its first values: match, unit, a number, or fit (least KL to the old model)")]
New = Annotated[Path, typer.Option("--out", "-o", help="folder to make", show_default=False)]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="folder to write [default: the run's, or `report` beside several]")]


def _allow(packages: list[str] | None) -> None:
    from lm.attention.plugins import PLUGINS

    PLUGINS.allow(packages or ())


AllowPlugin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE", callback=_allow, help="import normalizers of this package where the model names them", show_default=False
    ),
]
Baseline = Annotated[str | None, typer.Option(help="run or arm that others are compared with [default: the first]")]


@app.command()
def config(arguments: Configuration = [], reference: Reference = False) -> None:  # noqa: B006
    """Print the resolved configuration, or every problem in it."""
    from lm.config.load import load, reference_markdown, to_yaml

    print(reference_markdown() if reference else to_yaml(load(arguments)), end="")


@app.command()
def normalizers() -> None:
    """Print the table of normalizers: formula, parameters, kernel, source, options (docs/normalizers.md)."""
    from lm.attention.catalogue import markdown

    print(markdown(), end="")


@app.command("check-normalizer")
def check_normalizer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="as in model.normalizer; package.module:Class for one of your own")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="e.g. bias=true", show_default=False)] = None,
) -> None:
    """Put a normalizer to what all of them promise: a line for each promise; exit status 1 if one is broken."""
    from lm.config.load import load_normalizer

    normalizer = load_normalizer(name, options or [])
    from lm.attention.contract import results

    broken = 0
    for part in normalizer.parts():
        for promise, how in results(part):
            broken += bool(how)
            print(f"{part.label()}: {'BROKEN' if how else 'kept'}: {promise}" + (f": {how}" if how else ""))
    if broken:
        raise typer.Exit(1)


@app.command()
def prepare(arguments: Configuration) -> None:
    """Make the token store of a configuration (`lm train` does it by itself)."""
    _require_file(arguments)
    from lm.config.load import load

    loaded = load(arguments)
    from lm.data.prepare import prepare

    prepare(loaded.data, progress=True)


@data.command("inspect")
def inspect_data(
    arguments: Annotated[list[str], typer.Argument(metavar="STORE | CONFIG...", help="a token store, or a configuration of one")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the picture, .png or .svg [default: beside the store]")] = None,
    samples: Annotated[int, typer.Option(help="documents of each source to show", min=0)] = 2,
) -> None:
    """Check a token store to the byte, and show what is in it: counts, lengths of documents, samples."""
    from lm.data.inspect import inspect

    inspect(arguments, out, samples)


@app.command()
def train(arguments: Configuration, allow_plugin: AllowPlugin = None) -> None:
    """Train a model; the run is kept in a folder of its own (runs/NAME)."""
    _require_file(arguments)
    from lm.config.load import load

    loaded = load(arguments)
    from lm.training.train import train

    raise typer.Exit(train(loaded))


@app.command("eval")
def evaluate(
    arguments: RunsAndOverrides,
    checkpoint: Checkpoint = "last",
    suite: Suite = "",
    needle: NeedleOption = False,
    out: Results = None,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Measure checkpoints of runs; kept in their evaluations/. What was measured before is not measured again."""
    from lm.evaluation.evaluate import evaluate_runs

    folders = [Path(one) for one in arguments if "=" not in one]
    if not folders:
        raise ConfigError("no run folder given, e.g. runs/softmax")
    grid = ["eval.needle.length_factors=[1,2,4,8,16]"] if needle else []
    evaluate_runs(folders, checkpoint, suite, grid + [one for one in arguments if "=" in one], out)


@app.command()
def swap(
    source: Source,
    to: To,
    out: New,
    overrides: Overrides = None,
    init: Init = None,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Replace the normalizer of a trained model and measure what that did; the new model is a run folder of its own."""
    from lm.evaluation.swap import swap_run

    swap_run(source, checkpoint, to, init, out, overrides or [])


@app.command()
def export(source: Source, out: New, checkpoint: Checkpoint = "last", allow_plugin: AllowPlugin = None) -> None:
    """Write a trained model as safetensors, JSON and tokenizer, for `lm.load` and others."""
    from lm.runs.loading import export

    print(export(source, checkpoint, out))


@app.command()
def generate(
    source: Source,
    prompt: Annotated[str, typer.Option(help="text to go on from")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="tokens to write at most")] = 200,
    temperature: Annotated[float, typer.Option(help="divides the logits; 0: always the likeliest token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="draw among the k likeliest only")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw among the likeliest with this probability in all")] = None,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Write text with a trained model, as it comes."""
    from lm.evaluation.generation import generate_text

    for piece in generate_text(source, checkpoint, prompt, max_new_tokens, temperature, top_k, top_p, seed):
        print(piece, end="", flush=True)
    print()


@app.command()
def harness(
    source: Source,
    tasks: Annotated[str, typer.Option(help="names or patterns of tasks, separated by commas", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. trainer.precision=32", show_default=False)
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="folder of your own task files")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="examples shown before each question [default: the task's]")] = None,
    limit: Annotated[float | None, typer.Option(help="documents of each task at most; below 1: a share of them")] = None,
    max_length: Annotated[int | None, typer.Option(help="tokens the model is given at once [default: the training length]")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write [default: in the run's evaluations/]")] = None,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Measure downstream tasks of the lm-evaluation-harness (docs/evaluation.md); needs the package lm-eval."""
    from lm.evaluation.downstream import measure

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    measure(source, names, checkpoint, include_path, num_fewshot, limit, max_length, out, overrides or [])


@app.command()
def report(runs: Runs, out: Out = None, baseline: Baseline = None) -> None:
    """Write the report of one run, or of several side by side: report.html, picture and tables."""
    from lm.report.html import write_report
    from lm.report.tables import print_table

    files = write_report(runs, out or (runs[0] if len(runs) == 1 else runs[0].parent / "report"), baseline)
    print_table(runs, baseline)
    print(f"report: {files.html}\npicture: {files.png}")


def main() -> None:
    """Entry point: an error meant for the user is one line and a non-zero exit status."""
    try:
        app()  # a wrong command line or Ctrl-C ends in here, with status 2 or 130
    except LMError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # else Python complains of the closed pipe at exit
        sys.exit(141)
    except OSError as error:
        _fail((f"{error.filename}: " if error.filename else "") + (error.strerror or str(error)), 1)


def _require_file(arguments: list[str]) -> None:
    """A command that works for hours is not started on defaults because a file's name was forgotten."""
    if all("=" in one for one in arguments):
        raise ConfigError("no configuration file given, e.g. configs/softmax.yaml")


def _fail(text: str, status: int) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(status)
