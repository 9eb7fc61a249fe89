"""Fault models: published wrong results, imitated on request. They prove nothing about a given chip.

Each file here defines one class with `name`, `source`, `op_types` and `apply`; files are found by listing the folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

__all__ = ["QUIRKS", "Quirk"]


class Quirk(Protocol):
    """A fault of some machine: replaces an op's results by the ones published for that machine."""

    name: ClassVar[str]
    source: ClassVar[str]
    op_types: ClassVar[tuple[str, ...]]

    def apply(self, op: Any, inputs: Any, outputs: Sequence[Any]) -> Sequence[Any]:
        """The faulty results of `op`, given its inputs and its right results."""
        ...


def _found() -> dict[str, type[Quirk]]:
    quirks: dict[str, type[Quirk]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda each: each.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        quirks.update({each.name: each for each in vars(module).values() if _is_quirk(each, module.__name__)})
    return quirks


def _is_quirk(value: object, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and hasattr(value, "apply")


#: name -> class
QUIRKS: dict[str, type[Quirk]] = _found()
