"""Fault models: published wrong results, imitated on request. They prove nothing about a given chip.

Each file here whose name has no leading underscore may define quirks, classes derived from `Quirk`; they are found by
listing the folder. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple

from .base import Quirk, in_force

__all__ = ["QUIRKS", "Described", "Quirk", "described", "in_force"]


class Described(NamedTuple):
    """One row of a table of quirks."""

    name: str
    summary: str
    sources: tuple[str, ...]


def _found() -> dict[str, type[Quirk]]:
    quirks: dict[str, type[Quirk]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda each: each.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        quirks.update({each.name: each for each in vars(module).values() if _is_quirk(each, module.__name__)})
    return quirks


def _is_quirk(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Quirk) and value is not Quirk and value.__module__ == module


#: name -> class
QUIRKS: dict[str, type[Quirk]] = _found()


def described() -> list[Described]:
    """Name, one-sentence summary and sources (URLs) of every quirk, by name: for `--help` and for tables."""
    return [
        Described(name, quirk.summary(), tuple(quirk.source.split("; "))) for name, quirk in sorted(QUIRKS.items())
    ]
