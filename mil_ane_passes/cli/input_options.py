"""Options for the inputs of a model and for the limits on its runs."""

from __future__ import annotations

import argparse
from typing import Any

from ..utils.budget import DEFAULT_MAX_STEPS
from ..utils.errors import InputError
from .arrays import read_arrays

__all__ = ["add_input_options", "add_limit_options", "read_inputs", "read_limits"]


def add_input_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--feeds", metavar="F.npz", action="append", default=[],
                        help="inputs by name; may be given several times")
    parser.add_argument("--ranges", metavar="LIST",
                        help="range of values of inputs, both ends included, e.g. 'image=0:1,ids=0:29999'")


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-seconds", metavar="S", default="none",
                        help="stop when the model has run so long, all runs together (default: none, no limit)")
    parser.add_argument(
        "--max-steps",
        metavar="N",
        default=str(DEFAULT_MAX_STEPS),
        help=f"stop a run after so many steps of loops, or none: no limit (default: {DEFAULT_MAX_STEPS})",
    )


def read_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the limits on runs, for the public functions. Raises InputError for values that are not numbers."""
    return {"max_seconds": _parse_limit("--max-seconds", arguments.max_seconds, float),
            "max_steps": _parse_limit("--max-steps", arguments.max_steps, int)}


def _parse_limit(name: str, text: str, kind: type[float]) -> float | None:
    if text == "none":
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise InputError(f"{name} {text}: expected a number above 0, or none for no limit") from error


def read_inputs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the feeds and ranges of the command line, for the public functions."""
    from ..equivalence.user_inputs import parse_ranges

    return {"feeds": [read_arrays(path) for path in arguments.feeds], "ranges": parse_ranges(arguments.ranges)}
