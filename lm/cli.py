"""The command line: one Typer app; heavy imports happen inside the commands."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from lm.errors import ConfigError, LMError, one_line, out_of_memory

app = typer.Typer(
    help=(
        "Train small language models with different attention normalizers, and compare them.\n\n\b\n"
        "Compare two normalizers on the default corpus:\n"
        "  lm train configs/softmax.yaml\n"
        "  lm train configs/ssmax.yaml\n"
        "  lm report runs/softmax runs/ssmax\n\n"
        "All configuration keys: lm config --reference"
    ),
    context_settings={"max_content_width": 120},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

data = typer.Typer(help="Inspect token stores.", no_args_is_help=True)
app.add_typer(data, name="data")

Configuration = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG|KEY=VALUE", help="YAML files and overrides, e.g. optim.lr=3e-4; later ones win", show_default=False),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders, e.g. runs/softmax", show_default=False)]
RunsAndOverrides = Annotated[
    list[str], typer.Argument(metavar="RUN|KEY=VALUE", help="run folders and overrides, e.g. eval.sequences=512", show_default=False)
]
Suite = Annotated[
    str, typer.Option(help="quick, full, or a YAML file with an `eval` block [default: the run's own `eval` block]", show_default=False)
]
NeedleOption = Annotated[
    bool,
    typer.Option("--needle", help="needle in a haystack at 1x to 16x the training length; base models need eval.needle.finetune.steps=300"),
]
Results = Annotated[Path | None, typer.Option("--out", "-o", help="also write all numbers to this .csv or .json file", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="overrides, e.g. eval.sequences=512", show_default=False)]
Reference = Annotated[bool, typer.Option("--reference", help="print every key with type, default and description instead (docs/config.md)")]
Checkpoint = Annotated[str, typer.Option(help="last, best (lowest validation loss), a step, or a checkpoint's path")]
Source = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="run folder, checkpoint or export", show_default=False)]
To = Annotated[
    str, typer.Option(help="the new normalizer, e.g. ssmax; its options are overrides, e.g. model.normalizer.bias=true", show_default=False)
]
Init = Annotated[
    str | None,
    typer.Option(
        help="initial values of its parameters: match, unit, a number, or fit (least KL divergence from the old model); default: its own"
    ),
]
New = Annotated[Path, typer.Option("--out", "-o", help="folder to create", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="folder to write [default: the run's own folder; of several runs, `report` beside the first]"),
]


def _allow(context: typer.Context, packages: list[str] | None) -> None:
    """Allow plugins; at the end of a command that succeeds, say which of them nothing needed."""
    from lm.attention.plugins import PLUGINS

    def report_unneeded() -> None:
        for name in sorted(PLUGINS.unneeded().intersection(packages or ())):
            if not isinstance(sys.exc_info()[1], LMError):
                print(f"note: --allow-plugin {name}: no normalizer of this package is named here; nothing was imported", file=sys.stderr)

    PLUGINS.allow(packages or ())
    context.call_on_close(report_unneeded)


AllowPlugin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE", callback=_allow, help="allow the model to import its normalizers from this package", show_default=False
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(help="the arm that the others are compared with: its label, its normalizer or one of its runs [default: the first]"),
]


@app.command()
def config(arguments: Configuration = [], reference: Reference = False) -> None:  # noqa: B006
    """Print the resolved configuration.

    If something is wrong with it, print every problem instead and exit with status 2.
    """
    from lm.config.load import load, reference_markdown, to_yaml

    print(reference_markdown() if reference else to_yaml(load(arguments)), end="")


@app.command()
def normalizers() -> None:
    """Print the table of attention normalizers.

    Formula, parameters, kernel, source and options of each (docs/normalizers.md).
    """
    from lm.attention.catalogue import markdown

    print(markdown(), end="")


@app.command("check-normalizer")
def check_normalizer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a normalizer, e.g. ssmax; one of your own: package.module:Class")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="its options, e.g. bias=true", show_default=False)
    ] = None,
) -> None:
    """Test a normalizer against the common contract.

    Prints one line for each promise of the contract; exit status 1 if one is broken (docs/normalizers-own.md).
    """
    from lm.config.load import load_normalizer

    normalizer = load_normalizer(name, options or [])
    from lm.attention.contract import results

    broken = 0
    for part in normalizer.layer_options():
        for promise, how in results(part):
            broken += bool(how)
            print(f"{part.label()}: {'BROKEN' if how else 'kept'}: {promise}" + (f": {how}" if how else ""))
    if broken:
        raise typer.Exit(1)


@app.command()
def prepare(arguments: Configuration) -> None:
    """Build the token store of a configuration.

    `lm train` does this by itself if the store does not exist.
    """
    _require_file(arguments)
    from lm.config.load import load

    loaded = load(arguments)
    from lm.data.prepare import prepare

    prepare(loaded.data, progress=True)


@data.command("inspect")
def inspect_data(
    arguments: Annotated[
        list[str], typer.Argument(metavar="STORE|CONFIG|KEY=VALUE", help="a token store, or the configuration it is built from")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="file of the picture, .png or .svg [default: beside the store]")] = None,
    samples: Annotated[int, typer.Option(help="how many documents of each source to print", min=0)] = 2,
) -> None:
    """Verify a token store and summarize its contents.

    Compares every file with its checksum; prints counts, document lengths and samples.
    """
    from lm.data.inspect import inspect

    inspect(arguments, out, samples)


@app.command()
def train(arguments: Configuration, allow_plugin: AllowPlugin = None) -> None:
    """Train a model.

    Everything about the run is written to its run folder, runs/NAME, where NAME is the name of the first YAML file
    unless name=NAME is given. resume=auto continues a run from its last checkpoint.
    """
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
    """Evaluate trained models.

    Results are written to evaluations/ in each run folder; what was measured before is not measured again.
    """
    from lm.evaluation.evaluate import evaluate_runs

    folders = [Path(one) for one in arguments if "=" not in one]
    if not folders:
        raise ConfigError("no run folder given, e.g. runs/softmax")
    grid = ["eval.needle.length_factors=[1,2,4,8,16]"] if needle else []
    evaluate_runs(folders, checkpoint, suite, grid + [one for one in arguments if "=" in one], out)


@app.command()
def diagnose(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CHECKPOINT|KEY=VALUE",
            help="run folders, checkpoints or exports, and overrides, e.g. eval.diagnostics.sequences=32",
            show_default=False,
        ),
    ],
    checkpoint: Checkpoint = "last",
    out: Results = None,
    allow_plugin: AllowPlugin = None,
) -> None:
    """Describe the attention of trained models.

    Statistics of attention weights by layer, head and position, beside those of the untrained model and of shuffled scores
    (docs/diagnostics.md). Those of runs are kept in evaluations/.
    """
    from lm.evaluation.diagnose import diagnose

    sources = [Path(one) for one in arguments if "=" not in one]
    if not sources:
        raise ConfigError("no run folder, checkpoint or export given, e.g. runs/softmax")
    diagnose(sources, checkpoint, [one for one in arguments if "=" in one], out)


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
    """Replace the normalizer of a trained model.

    Writes the new model as a run folder of its own, and measures how far its outputs differ from the old model's.
    """
    from lm.evaluation.swap import swap_run

    swap_run(source, checkpoint, to, init, out, overrides or [])


@app.command()
def export(source: Source, out: New, checkpoint: Checkpoint = "last", allow_plugin: AllowPlugin = None) -> None:
    """Export a trained model.

    Writes safetensors, JSON and the tokenizer to a folder that `lm.load` and all commands accept as a model.
    """
    from lm.runs.loading import export

    print(export(source, checkpoint, out))


@app.command()
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


@app.command()
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
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write [default: in evaluations/ of the run folder]")] = None,
    checkpoint: Checkpoint = "last",
    allow_plugin: AllowPlugin = None,
) -> None:
    """Run tasks of the lm-evaluation-harness.

    Needs the package lm-eval (docs/evaluation.md).
    """
    from lm.evaluation.downstream import measure

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    measure(source, names, checkpoint, include_path, num_fewshot, limit, max_length, out, overrides or [])


@app.command()
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT|KEY=VALUE",
            help="YAML files of base, arms, seeds, tune, primary; and overrides of the base configuration",
            show_default=False,
        ),
    ],
    plan: Annotated[bool, typer.Option("--plan", help="print the plan alone")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    report_only: Annotated[bool, typer.Option("--report-only", help="judge what is there, train nothing")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="try the runs that failed again")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="drop final seeds, from the last on, until the estimate is no longer", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="folder of the reports [default: each experiment's own]", show_default=False)
    ] = None,
    commands: Annotated[bool, typer.Option("--commands", help="print a command for each run that can start now, train nothing")] = False,
    submit: Annotated[
        Literal["slurm", "local"] | None, typer.Option(help="work in jobs of SLURM, or in the background here", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="jobs to submit")] = 1,
    job_options: Annotated[str, typer.Option(metavar="KEY=VALUE,...", help="of each job, e.g. partition=gpu,timeout_min=240")] = "",
) -> None:
    """Train and compare the arms of an experiment.

    A file names arms, seeds and learning rates; several are worked on one after the other. Finished runs are kept and
    interrupted ones resumed: the same command continues. Writes verdicts and a report (docs/experiments.md).
    """
    files, overrides = [Path(one) for one in arguments if "=" not in one], [one for one in arguments if "=" in one]
    if not files:
        raise ConfigError("no experiment file given, e.g. configs/experiments/ssmax.yaml")
    from lm.experiments.compare import Work, compare, print_commands, submit_workers

    modes = {"--plan": plan, "--report-only": report_only, "--commands": commands, "--submit": submit}
    modes |= {"--minutes": minutes is not None, "--out": out} if submit or commands else {}
    if len(given := [name for name, on in modes.items() if on]) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other")
    if commands:
        print_commands(files, overrides)
    elif submit:
        submit_workers(files, overrides, jobs, workers, job_options, submit, retry)
    else:
        compare(files, overrides, Work(jobs, retry, minutes), plan, report_only, out)


@app.command()
def report(runs: Runs, out: Out = None, baseline: Baseline = None) -> None:
    """Write the report of one run, or compare several.

    Writes report.html, the picture report.png, and tables as CSV, Markdown and LaTeX.
    """
    from lm.report.html import write_report
    from lm.report.tables import print_table

    files = write_report(runs, out or (runs[0] if len(runs) == 1 else runs[0].parent / "report"), baseline)
    print_table(runs, baseline)
    print(f"report: {files.html}\npicture: {files.png}")


def main() -> None:
    """Entry point: an error meant for the user is one line and a non-zero exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # é in an ASCII locale; names of files that are not valid Unicode
    try:
        try:
            app()  # a wrong command line or Ctrl-C ends in here, with status 2 or 130
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here, where a full disk can be reported
    except LMError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # as by `| head`, which has seen enough
        _discard_output()
        sys.exit(1)
    except UnicodeEncodeError as error:
        _fail(f"the locale's encoding, {error.encoding}, has no {error.object[error.start]!a}: set LC_ALL=C.UTF-8", 1)
    except OSError as error:
        _discard_output()
        _fail((f"{error.filename}: " if error.filename else "") + (error.strerror or str(error)), 1)
    except Exception as error:
        if not (text := _resources_or_plugin(error)):
            raise
        _fail(text, 1)


_SMALLER = {  # by command: what needs less memory
    "train": "lower trainer.micro_batch, data.seq_len or the model's size",
    "eval": "lower the lengths of eval.*, or their sequences",
    "diagnose": "lower eval.diagnostics.length_factor",
    "swap": "lower data.seq_len or eval.sequences",
    "generate": "shorten the prompt, or lower --max-new-tokens",
    "harness": "lower --max-length",
}


def _resources_or_plugin(error: Exception) -> str:
    """One line for memory that ran out, or for code from outside that failed; empty for any other error, which is a defect of lm."""
    if out_of_memory(error):
        amount = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        remedy = _SMALLER.get(sys.argv[1], "") if len(sys.argv) > 1 else ""
        text = "out of memory" + (f" (asked for {amount[1]})" if amount else "")
        return f"{text}: {remedy or 'use a machine with more'}"
    from lm.attention.plugins import PLUGINS

    if failure := PLUGINS.failure(error):
        return f"normalizer {failure}: {type(error).__name__}: {one_line(error)}; check it with lm check-normalizer"
    return ""


def _discard_output() -> None:
    """Let what could not be written to stdout go, or the interpreter would try again at exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _require_file(arguments: list[str]) -> None:
    """Refuse to start a long command on the defaults because the configuration file was forgotten."""
    if all("=" in one for one in arguments):
        raise ConfigError("no configuration file given, e.g. configs/softmax.yaml")


def _fail(text: str, status: int) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(status)
