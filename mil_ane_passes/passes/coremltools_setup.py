"""Setup of coremltools: imports it and registers our passes, except in the command, which imports it on demand.

In the command, messages that coremltools logs during its import (missing Mac-only libraries, an untested torch version)
would precede every message of this package, so they are suppressed. Work that does not need coremltools (help, copying
large files) starts before its import, which takes a second. In a library, nothing is suppressed or deferred.

coremltools also imports torch, transformers, scipy and others if they are installed, for converters and training that
no command uses; this is five sixths of its import time. In the command it is imported as if they were not installed,
which it supports; modules of this package still import torch.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ..utils.garbage_collection import pause_garbage_collection

__all__ = [
    "ENTRY_POINT_GROUP",
    "WORKER_VARIABLE",
    "freeze_imported_objects",
    "hide_folders_named_as_packages",
    "hide_optional_packages",
    "is_importing",
    "register_with_coremltools",
    "silence_coremltools",
]

WORKER_VARIABLE = "MIL_ANE_PASSES_WORKER"
"""Set in the environment of worker processes that run single jobs of a batch; they behave like the command."""

_OPTIONAL_PACKAGES = frozenset({
    "executorch", "libsvm", "pandas", "scipy", "sklearn", "tensorflow", "torch", "torchao", "torchaudio", "torchvision",
    "transformers", "xgboost"})
"What coremltools 8.3 to 9.0 tries to import, and works without (`coremltools/_deps`)."
ENTRY_POINT_GROUP = "mil_ane_passes.rules"
"The group of entry points by which other distributions offer rules."
_COMMAND = "mil-ane-passes"
_RUN_AS_MODULE = frozenset({"-m", "__main__"})


def register_with_coremltools(guard: Any = None) -> None:
    """Register every rewrite with coremltools as `ane::<name>`. Does nothing in the command, which imports on demand.

    `guard` as for `register_passes`.
    """
    if not _is_command_process():
        with pause_garbage_collection():
            from .pipeline import register_passes

            register_passes(guard)


def freeze_imported_objects() -> None:
    """Exclude imported objects from garbage collection, in the command only.

    coremltools and torch are half a million objects that live until exit, and scanning them once takes longer than
    rewriting a model. As a library, does nothing.
    """
    # Not among imports within an import, which pauses the collector, and not before coremltools is there.
    if gc.isenabled() and "coremltools" in sys.modules and _is_command_process():
        _freeze_once()


@cache
def _freeze_once() -> None:
    gc.freeze()  # only the first time: garbage from later work on a model has to be collected


def hide_optional_packages() -> None:
    """Let modules of coremltools find none of its optional packages, from now on in this process.

    Only for processes that convert nothing. Does nothing where coremltools is imported already, or where plugins are
    installed: a plugin may use any part of coremltools.
    """
    from importlib.metadata import entry_points  # imported here, where stop signals are handled

    if "coremltools" not in sys.modules and not entry_points(group=ENTRY_POINT_GROUP):
        sys.meta_path.insert(0, _OptionalPackageFinder(_OPTIONAL_PACKAGES))


def hide_folders_named_as_packages() -> None:
    """Let modules of coremltools take no folder for an optional package, from now on in this process.

    `python -m` also imports from the working folder. A clone of ExecuTorch there is an `executorch` to coremltools,
    which then fails to import what such a folder lacks.
    """
    from importlib.util import find_spec

    specs = {name: find_spec(name) for name in _OPTIONAL_PACKAGES}
    sys.meta_path.insert(0, _OptionalPackageFinder(
        frozenset(name for name, spec in specs.items() if spec is not None and spec.origin is None)))


class _OptionalPackageFinder:
    """Import hook that hides packages from modules of coremltools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self._names and _find_importer(sys._getframe(1)).partition(".")[0] == "coremltools":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _find_importer(frame: FrameType | None) -> str:
    """Return the name of the module that imports, from a frame of the import system."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("importlib."):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


@contextmanager
def silence_coremltools() -> Iterator[None]:
    """Suppress coremltools log messages below the level ERROR inside the `with`."""
    logger = logging.getLogger("coremltools")
    logger.addFilter(_is_error_record)
    try:
        yield
    finally:
        logger.removeFilter(_is_error_record)


def is_importing(frame: FrameType | None) -> bool:
    """Return whether an import is in progress in `frame` or its callers; exceptions raised there may be swallowed."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _is_command_process() -> bool:
    if WORKER_VARIABLE in os.environ:
        return True
    command = Path(sys.argv[0]).stem if sys.argv else ""
    return command == _COMMAND or (command in _RUN_AS_MODULE and "mil_ane_passes" in sys.orig_argv)


def _is_error_record(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
