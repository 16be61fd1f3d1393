"""Errors a user can act on: the command line prints their text on one line and exits non-zero."""

from dataclasses import dataclass


class LMError(Exception):
    """Base of every error meant for the user; `exit_code` is the process's exit status."""

    exit_code = 1


class DataError(LMError):
    """A corpus, tokenizer or token store that can't be used as asked."""


class RunError(LMError):
    """A run folder, checkpoint or training run that can't go on."""


class Diverged(RunError):
    """A training run that stopped at losses or gradients that are not finite; its exit status tells it from one that was interrupted.

    Attributes:
        step: the first that could not be made.
    """

    exit_code = 3

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


def one_line(error: BaseException, longest: int | None = 300) -> str:
    """An exception's text on one line of at most `longest` characters (None: all of it); the name of its class if it has no text."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def abbreviated(text: str, longest: int = 300) -> str:
    """A text on one line of at most `longest` characters."""
    line = " ".join(text[: 2 * longest].split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


def shown(value: object) -> str:
    """A value as a user writes it: null, true and false as in YAML, within lists and blocks, too; any other as Python does."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(inner)}' for name, inner in value.items())}}}"
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, list | tuple) else repr(value)


def out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, of the CPU or of a GPU: Python's MemoryError, or torch's, which for the CPU is a RuntimeError."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def panicked(error: BaseException) -> bool:
    """True of a panic in a library that is written in Rust (tokenizers, safetensors), which is raised as a BaseException of its own."""
    return type(error).__module__ == "pyo3_runtime"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: where, what, why, and what to do."""

    path: str
    value: object
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{abbreviated(self.path)} = {abbreviated(shown(self.value))}: {self.reason}"
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(LMError):
    """Every problem found in a configuration, one a line; of very many, the first."""

    exit_code = 2
    most_lines = 30

    def __init__(self, problems: list[Problem] | list[str] | str):
        self.problems = [problem for problem in problems if isinstance(problem, Problem)] if isinstance(problems, list) else []
        lines = [str(problem) for problem in problems] if isinstance(problems, list) else [problems]
        head = f"{len(lines)} problems in the configuration:\n  " if len(lines) > 1 else ""
        more = [f"... and {len(lines) - self.most_lines} more"] if len(lines) > self.most_lines else []
        super().__init__(head + "\n  ".join(lines[: self.most_lines] + more))
