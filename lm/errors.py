"""Defines errors that a user can act on: the command line prints their text and exits with a non-zero status."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass


class LMError(Exception):
    """Base class of every error meant for the user. `exit_code` is the process's exit status."""

    exit_code = 1


class DataError(LMError):
    """Raised if a corpus, tokenizer or token store can't be used as requested."""


class RunError(LMError):
    """Raised if a run folder, checkpoint or other file can't be used, or a training run can't go on."""


class Diverged(RunError):
    """Raised if a training run stops because losses or gradients are not finite. The exit status differs from the one
    of an interrupted run.

    Attributes:
        step: the step (1-based) at which the run stopped.
    """

    exit_code = 3

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text on one line, cut to `limit` characters. If the text is empty, return the name of the
    exception's class.
    """
    return abbreviate(str(error), limit) or type(error).__name__


def one_line_with_cause(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text on one line, as `one_line` does. If the text lacks the exception's first cause, add
    this in parentheses.
    """
    cause = error
    while earlier_cause := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
        cause = earlier_cause
    text, cause_text = one_line(error, limit), one_line(cause, limit)
    return text if cause_text in text else f"{text} ({cause_text})"


def abbreviate(text: str, limit: int = 300) -> str:
    """Return `text` on one line. If it has more than `limit` characters, return its beginning and ` ...`, `limit`
    characters in all.
    """
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4]} ..."


def suggestion_or_all_names(word: str, names: Iterable[str]) -> str:
    """Return advice on an unknown `word`: the most similar of `names`, or else all of them. If `names` has a method
    `suggestions`, the names that this method returns are taken instead, such as names of plugins.
    """
    names = [*getattr(names, "suggestions", names.__iter__)()]
    matches = [name for name in names if name.startswith(f"{word} ")]  # of a metric at several lengths, say
    matches = matches or difflib.get_close_matches(str(word).lower(), names, n=1)
    return f"did you mean '{matches[0]}'?" if matches else f"choose from: {', '.join(names) or 'nothing'}"


def terminal_text(text: str) -> str:
    """Return `text` with control characters in visible form, such as `\\x1b` for the escape character of a terminal.
    Characters that reverse or break a line are written as, e.g., `\\u202e`. Tabs and line ends stay.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def yaml_scalar(value: object) -> str:
    """Return a value that is neither a list nor a map as YAML text."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)


def value_text(value: object) -> str:
    """Return a value as text for messages. null, true and false are written as in YAML, also within lists and maps,
    other values as by Python's repr.
    """
    if value is None or isinstance(value, bool):
        return yaml_scalar(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {value_text(item)}' for name, item in value.items())}}}"
    return f"[{', '.join(map(value_text, value))}]" if isinstance(value, list | tuple) else repr(value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that CPU or GPU memory ran out. Such errors are Python's MemoryError, torch's
    OutOfMemoryError for a GPU, and torch's RuntimeError for the CPU.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def is_rust_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic of a library written in Rust (tokenizers, safetensors). Such a panic is a
    BaseException, but no Exception.
    """
    return type(error).__module__ == "pyo3_runtime"


@dataclass(frozen=True)
class Problem:
    """A problem of a configuration: the path of the key, the key's value, the reason, and the remedy."""

    key_path: str
    value: object
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{abbreviate(self.key_path)} = {abbreviate(value_text(self.value))}: {self.reason}"
        return f"{text}; {self.remedy}" if self.remedy else text


class PluginUnavailable(KeyError):
    """Raised if the key `name` in a block of the configuration refers to a plugin that may not or can't be imported, or
    is invalid. The error's attributes are `reason` and `remedy`.
    """

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


class ConfigError(LMError):
    """Raised for an invalid configuration. The error's text lists the problems, one per line."""

    exit_code = 2

    def __init__(self, problems: list[Problem] | list[str] | Problem | str):
        items = problems if isinstance(problems, list) else [problems]
        self.problems = [item for item in items if isinstance(item, Problem)]
        lines = [str(item) for item in items]
        head = f"{len(lines)} problems in the configuration:\n  " if len(lines) > 1 else ""
        super().__init__(head + "\n  ".join(lines))
