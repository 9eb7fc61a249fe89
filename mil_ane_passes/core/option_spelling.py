"""What an option is called by the one who gave it: `--fix-shape` on the command line, `fix_shape` in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "choose_spelling",
    "format_no_verify_option",
    "format_option",
    "format_option_values",
    "is_command",
    "use_command_spelling",
]

_COMMAND: ContextVar[bool] = ContextVar("mil_ane_passes.command", default=False)


@contextmanager
def use_command_spelling(holds: bool = True) -> Iterator[None]:
    """What is said meanwhile is said to somebody who gave a command (or, where it does not hold, to a caller)."""
    token = _COMMAND.set(holds)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_command() -> bool:
    return _COMMAND.get()


def choose_spelling(command: str, python: str) -> str:
    """The one of two texts that is in the words of the one who asked."""
    return command if is_command() else python


def format_option(name: str) -> str:
    """An option in a sentence, by its name in Python: `--max-growth` or `max_growth=`."""
    return choose_spelling(f"--{name.replace('_', '-')}", f"{name}=")


def format_no_verify_option() -> str:
    """How to ask `rewrite` not to verify."""
    return choose_spelling("--no-verify", "verify=False")


def format_option_values(name: str, *given: object) -> str:
    """An option and what it was given, as an error begins: `--io fp16 image` or `io fp16 image`."""
    return " ".join([choose_spelling(format_option(name), name), *map(str, given)])
