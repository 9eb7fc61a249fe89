"""Fault models: published wrong results, imitated on request. They are no evidence about a given chip.

Quirks are classes derived from `Quirk`. They are found by listing the files of this folder whose names have no leading
underscore. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple

from .base import Quirk, select_quirks

__all__ = ["QUIRKS", "Quirk", "QuirkDescription", "describe_quirks", "select_quirks"]


class QuirkDescription(NamedTuple):
    """One row of a table of quirks."""

    name: str
    summary: str
    sources: tuple[str, ...]


def _find_quirks() -> dict[str, type[Quirk]]:
    quirks: dict[str, type[Quirk]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda each: each.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        quirks.update({each.name: each for each in vars(module).values() if _is_quirk(each, module.__name__)})
    return quirks


def _is_quirk(value: object, module: str) -> bool:
    """Return whether `value` is a fault model of the module; base classes have no name."""
    return (isinstance(value, type) and issubclass(value, Quirk) and hasattr(value, "name")
            and value.__module__ == module)


#: name -> class
QUIRKS: dict[str, type[Quirk]] = _find_quirks()


def describe_quirks() -> list[QuirkDescription]:
    """List name, one-sentence summary and sources (URLs) of every quirk, sorted by name, for `--help` and tables."""
    return [
        QuirkDescription(name, quirk.summary(), tuple(quirk.source.split("; ")))
        for name, quirk in sorted(QUIRKS.items())
    ]
