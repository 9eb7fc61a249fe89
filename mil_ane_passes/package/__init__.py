"""Packages on disk: loaded as pymil programs with their weights mapped, saved with every untouched byte kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .ahead import CopyAhead
    from .destination import check_destination
    from .model import Package, load, package_of_mlmodel
    from .write import save

__all__ = ["CopyAhead", "Package", "check_destination", "load", "package_of_mlmodel", "save"]

_HOME = {"CopyAhead": ".ahead", "Package": ".model", "check_destination": ".destination", "load": ".model",
         "package_of_mlmodel": ".model", "save": ".write"}

# A copy can start before coremltools is there.
__getattr__ = lazily(__name__, _HOME)
