"""Packages on disk: loaded as pymil programs with their weights mapped, saved with every untouched byte kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ahead import CopyAhead
    from .destination import check_destination
    from .model import Package, load, package_of_mlmodel
    from .write import save

__all__ = ["CopyAhead", "Package", "check_destination", "load", "package_of_mlmodel", "save"]

_HOME = {"CopyAhead": ".ahead", "Package": ".model", "check_destination": ".destination", "load": ".model",
         "package_of_mlmodel": ".model", "save": ".write"}


def __getattr__(name: str) -> Any:
    """Imported when first used: a copy can start before coremltools is there."""
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
