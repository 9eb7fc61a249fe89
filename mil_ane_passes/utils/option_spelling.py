"""Spelling of options in messages: `--fix-shape` on the command line, `fix_shape` in Python."""

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
    """Use the command line spelling inside the `with` (or, with `holds=False`, the Python spelling)."""
    token = _COMMAND.set(holds)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_command() -> bool:
    return _COMMAND.get()


def choose_spelling(command: str, python: str) -> str:
    """Return the text for the current interface: command line or Python."""
    return command if is_command() else python


def format_option(name: str) -> str:
    """Format an option in a sentence, from its name in Python: `--max-growth` or `max_growth=`."""
    return choose_spelling(f"--{name.replace('_', '-')}", f"{name}=")


def format_no_verify_option() -> str:
    """Format the option of `rewrite` that turns off verification."""
    return choose_spelling("--no-verify", "verify=False")


def format_option_values(name: str, *given: object) -> str:
    """Format an option with its values, as at the start of an error: `--io fp16 image` or `io fp16 image`."""
    return " ".join([choose_spelling(format_option(name), name), *map(str, given)])
