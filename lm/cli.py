"""Defines the command line: a Typer app of all commands, which turns errors into messages and exit statuses."""

import atexit
import contextlib
import gc
import inspect
import io
import os
import re
import sys
from typing import Annotated, NoReturn, TextIO

import typer

from lm import __version__
from lm.commands import compare_commands, model_commands, train_commands
from lm.config.removed_keys import removed_name_advice
from lm.errors import LMError, is_out_of_memory, one_line, terminal_text
from lm.plugins import PLUGINS

# A class of typer's parser, which newer versions of typer contain and older ones take from click.
UsageError = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help=(
        "Train small language models with different attention normalizers, and compare them.\n\n\b\n"
        "  lm compare quickstart-recall --jobs 2       # a first experiment, with verdicts and a report\n"
        "  lm train softmax name=mine optim.lr=1e-3    # a run; any key as key=value\n"
        "  lm eval runs/mine eval.sequences=64         # measured on more text\n"
        "  lm report runs/mine                         # its page\n\n"
        "All configuration keys: lm config --reference"
    ),
    context_settings={"max_content_width": 120},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for _module in (compare_commands, train_commands, model_commands):  # in the order of `lm --help`
    for _name, _command in vars(_module).items():
        if inspect.isfunction(_command) and _command.__module__ == _module.__name__ and _name[0] != "_":
            app.command(_name.rstrip("_").replace("_", "-"))(_command)


def _print_version(is_requested: bool) -> None:
    """Print lm's version and exit, if the option `--version` is given."""
    if is_requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
):
    """Define the options that come before any command."""


class TerminalStream:
    """A text stream that makes control characters visible (`terminal_text`). All commands print to such a stream.

    rich, which prints control characters of its own, writes to the underlying stream, `rich_proxied_file`.
    """

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `text` with its control characters made visible."""
        return self.rich_proxied_file.write(terminal_text(text))

    def __getattr__(self, name: str) -> object:
        """Return the attribute `name` of the underlying stream."""
        return getattr(self.rich_proxied_file, name)


def main() -> None:
    """Run the command line. An error meant for the user prints a message, without a traceback, and gives a non-zero
    exit status.
    """
    # Python would search all that torch has loaded for reference cycles, many times during its import and at the end
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # for é in an ASCII locale, and for file names that are not valid Unicode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            with contextlib.redirect_stdout(TerminalStream(sys.stdout)) if sys.stdout else contextlib.nullcontext():
                # the exit code of typer.Exit, 130 after Ctrl-C, else None
                status = app(prog_name="lm", standalone_mode=False)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here, where the error of a full disk is caught and reported
        sys.exit(status or 0)
    except LMError as error:
        _exit_with_error(str(error), error.exit_code)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # raised where a command is missing; its text is the help
            error.show()
            sys.exit(error.exit_code)
        _exit_with_error(_usage_message(error), error.exit_code)
    except OSError as error:
        if isinstance(sys.stdout, io.TextIOWrapper):  # at exit, Python would write again what could not be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of stdout has ended, such as `head` in `lm ... | head`
            sys.exit(1)
        _exit_with_error((f"{error.filename}: " if error.filename else "") + (error.strerror or str(error)), 1)
    except Exception as error:
        if not (text := _failure_message(error)):
            raise
        _exit_with_error(text, 1)


def _usage_message(error: UsageError) -> str:
    """Return a one-line message about a wrong command line. For an unknown option, the message says how configuration
    keys are written.
    """
    text = " ".join(error.format_message().split()).rstrip(".")
    if type(error).__name__ == "NoSuchOption":
        takes_keys = "=VALUE" in error.ctx.get_usage()
        text += removed_name_advice(error.option_name) or "; keys are written as key=value, without dashes" * takes_keys
    # an option without its value is told without a context: it is always one of a command
    command = error.ctx.command_path if error.ctx else f"lm {sys.argv[1]}"
    return f"{text[:1].lower()}{text[1:]}; see {command} --help"


_MEMORY_REMEDIES = {  # by command: how to lower its use of memory
    "train": "lower trainer.micro_batch, set trainer.activation_checkpointing=true, or lower data.seq_len or the "
    "model's size",
    "generate": "shorten the prompt, or lower --max-new-tokens",
}


def _failure_message(error: BaseException) -> str:
    """Return a one-line message if memory ran out, a compiled library can't be loaded, or a plugin failed. Such a
    library is incomplete if its compiler was killed. Return an empty text for other errors, which are bugs of lm.
    """
    if is_out_of_memory(error):
        requested_memory = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        text = "out of memory" + (f" (asked for {requested_memory[1]})" if requested_memory else "")
        other_remedy = "measure fewer or shorter sequences, or use a machine with more"
        return f"{text}: {_MEMORY_REMEDIES.get(''.join(sys.argv[1:2]), other_remedy)}"
    if cut_short := re.search(r"ImportError: (\S+\.so): ", str(error)):
        return f"{cut_short[1]}: compiled code that can't be loaded, as after a kill: delete it, and start again"
    failure, command = PLUGINS.failure_and_check_command(error)
    return failure and f"{failure}: {type(error).__name__}: {one_line(error)}; check it with {command}"


def _exit_with_error(text: str, status: int) -> NoReturn:
    """Print an error message to stderr and exit with `status`."""
    print(f"error: {terminal_text(text)}", file=sys.stderr)
    sys.exit(status)
