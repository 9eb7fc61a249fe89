"""The tables of cases: a function of tensors, what to call it with, and by which frontends it is converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checks import FRONTENDS

__all__ = ["FRONTENDS", "REFUSED", "TRACE_AND_EXPORT", "VALUES", "Case", "add_case", "add_refused", "case"]

TRACE_AND_EXPORT = ("trace", "export")


@dataclass(frozen=True)
class Case:
    """A function, an example of its inputs, the options of `check`, and for refused cases what the error says."""

    name: str
    function: Callable[..., Any] = field(repr=False)
    example: tuple[torch.Tensor, ...] = field(repr=False)
    frontends: Sequence[str] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    match: str = field(default="", repr=False)


VALUES: list[Case] = []
"Cases whose values must be those of PyTorch."
REFUSED: list[Case] = []
"Cases that must be refused with an error that matches."


def add_case(name: str, function: Callable[..., Any], *example: torch.Tensor, frontends: Sequence[str] = ("trace",),
             **options: Any) -> None:
    """Add a function without a name of its own to `VALUES`; torch cannot script one."""
    if "script" in frontends and function.__name__ == "<lambda>":
        raise ValueError(f"{name}: torch scripts functions by def only, got a lambda; decorate a def with @case")
    VALUES.append(Case(_number(name, VALUES), function, example, frontends, options))


def add_refused(name: str, match: str, function: Callable[..., Any], *example: torch.Tensor,
                frontends: Sequence[str] = ("trace",), **options: Any) -> None:
    """Add a function that must be refused to `REFUSED`."""
    REFUSED.append(Case(_number(name, REFUSED), function, example, frontends, options, match))


def case(*example: torch.Tensor, frontends: Sequence[str] = ("trace",), **options: Any) -> Callable[..., Any]:
    """Decorate a function to add it to `VALUES` under its name."""
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        add_case(function.__name__.replace("_", " "), function, *example, frontends=frontends, **options)
        return function

    return add


def _number(name: str, cases: list[Case]) -> str:
    """Make a name that is already in the table one of its own."""
    count = sum(case.name.split(", case ")[0] == name for case in cases)
    return f"{name}, case {count + 1}" if count else name
