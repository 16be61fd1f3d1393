"""The command line: one Typer app; heavy imports happen inside the commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lm.errors import LMError

app = typer.Typer(
    help="What does an attention normalizer do to a language model?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Arguments = Annotated[list[str], typer.Argument(help="YAML files and key=value overrides, later ones win", show_default=False)]
Runs = Annotated[list[Path], typer.Argument(help="run folders", show_default=False)]


@app.command()
def config(
    arguments: Annotated[list[str] | None, typer.Argument(help="YAML files and key=value overrides", show_default=False)] = None,
    reference: Annotated[bool, typer.Option(help="print the reference of all keys instead (docs/config.md)")] = False,
) -> None:
    """Print the resolved configuration, or every problem in it."""
    from lm.config import load, reference_markdown, to_yaml

    print(reference_markdown() if reference else to_yaml(load(arguments or [])), end="")


@app.command()
def prepare(arguments: Arguments) -> None:
    """Make the token store of a configuration (`lm train` does it by itself)."""
    from lm.config import load
    from lm.data.prepare import prepare

    loaded = load(arguments)
    prepare(loaded.data, progress=True)


@app.command()
def train(arguments: Arguments) -> None:
    """Train a model; the run is kept in a folder of its own (runs/NAME)."""
    from lm.config import load

    loaded = load(arguments)
    from lm.training.run import train

    raise typer.Exit(train(loaded))


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="eval.* and other overrides, key=value", show_default=False)] = None,
    checkpoint: Annotated[str, typer.Option(help="`last`, a step, or a checkpoint's path")] = "last",
) -> None:
    """Measure validation loss and loss by position of a run's checkpoint; kept in its evaluations/."""
    from lm.evaluation.run import evaluate_run

    evaluate_run(run, checkpoint, overrides or [])


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder to write; default: the first run's")] = None,
    baseline: Annotated[str | None, typer.Option(help="name of the run others are compared with; default: the first")] = None,
) -> None:
    """Write the report of one run, or of several side by side: report.html, picture and tables."""
    from lm.report import print_table, write_report

    files = write_report(runs, out or runs[0], baseline)
    print_table(runs, baseline)
    print(f"report: {files.html}\npicture: {files.png}")


def main() -> None:
    """Entry point: an error meant for the user is one line and a non-zero exit status."""
    try:
        app()
    except LMError as error:
        sys.exit(_fail(str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(_fail("interrupted", 130))
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        sys.exit(_fail(f"{named}{error.strerror or error}", 1))


def _fail(text: str, status: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    return status
