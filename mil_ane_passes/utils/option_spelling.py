"""Spelling of options in messages: `--fix-shape` on the command line, `fix_shape` in Python."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "choose_spelling",
    "describe_as_steps",
    "format_advised_option",
    "format_no_verify_option",
    "format_option",
    "format_option_values",
    "is_command",
    "use_command_spelling",
]

_COMMAND: ContextVar[bool] = ContextVar("mil_ane_passes.command", default=False)
_NO_STEPS: tuple[str, Collection[str]] = ("", ())
_STEPS: ContextVar[tuple[str, Collection[str]]] = ContextVar("mil_ane_passes.steps", default=_NO_STEPS)
"The command whose steps are running, and the options of `edit` that request these steps elsewhere."


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


@contextmanager
def describe_as_steps(command: str, options: Collection[str]) -> Iterator[None]:
    """Format `options` of `edit` as steps of `command` inside the `with`, because its user has not given them."""
    token = _STEPS.set((command, options))
    try:
        yield
    finally:
        _STEPS.reset(token)


def format_option(name: str) -> str:
    """Format an option in a sentence, from its name in Python: `--max-growth` or `max_growth=`."""
    return choose_spelling(f"--{name.replace('_', '-')}", f"{name}=")


def format_no_verify_option() -> str:
    """Format the option of `rewrite` that turns off verification."""
    return choose_spelling("--no-verify", "verify=False")


def format_option_values(name: str, *given: object) -> str:
    """Format an option with its values, as at the start of an error: `--io fp16 image` or `io fp16 image`.

    If the option requests a step that another command runs, the step is named: `step io of adapt (fp16 image)`.
    """
    command, steps = _STEPS.get()
    if name in steps:
        values = f" ({' '.join(map(str, given))})" if given else ""
        return f"step {choose_spelling(name.replace('_', '-'), name)} of {command}{values}"
    return _join_option(name, given)


def format_advised_option(name: str, *given: object) -> str:
    """Format an option of `edit` with its values in advice; another command's errors add that it is one of `edit`."""
    return f"{_join_option(name, given)}{' of edit' if name in _STEPS.get()[1] else ''}"


def _join_option(name: str, given: tuple[object, ...]) -> str:
    return " ".join([choose_spelling(format_option(name), name), *map(str, given)])
