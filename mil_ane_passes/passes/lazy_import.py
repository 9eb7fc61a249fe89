"""Lazy imports of the names of a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..utils.garbage_collection import pause_garbage_collection
from .coremltools_setup import freeze_imported_objects

__all__ = ["make_lazy_getattr"]


def make_lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a `__getattr__` for the module `package`; `homes` maps each name to the submodule that defines it.

    A name whose home is `.name` is that submodule itself.
    """

    def import_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        with pause_garbage_collection():
            module = importlib.import_module(homes[name], package)
            value = module if homes[name] == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        freeze_imported_objects()
        return value

    return import_name
