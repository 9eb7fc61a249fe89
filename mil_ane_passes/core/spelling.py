"""What an option is called by the one who gave it: `--fix-shape` on the command line, `fix_shape` in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["asked", "by_command", "is_command", "option", "spoken", "without_proof"]

_COMMAND: ContextVar[bool] = ContextVar("mil_ane_passes.command", default=False)


@contextmanager
def by_command(holds: bool = True) -> Iterator[None]:
    """What is said meanwhile is said to somebody who gave a command (or, where it does not hold, to a caller)."""
    token = _COMMAND.set(holds)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def is_command() -> bool:
    return _COMMAND.get()


def spoken(command: str, python: str) -> str:
    """The one of two texts that is in the words of the one who asked."""
    return command if is_command() else python


def option(name: str) -> str:
    """An option in a sentence, by its name in Python: `--max-growth` or `max_growth=`."""
    return spoken(f"--{name.replace('_', '-')}", f"{name}=")


def without_proof() -> str:
    """How to ask `rewrite` not to prove."""
    return spoken("--no-verify", "verify=False")


def asked(name: str, *given: object) -> str:
    """An option and what it was given, as an error begins: `--io fp16 image` or `io fp16 image`."""
    return " ".join([spoken(option(name), name), *map(str, given)])
