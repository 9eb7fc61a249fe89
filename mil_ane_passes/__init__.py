"""Rewrite Core ML ML Programs so that they run correctly, whole and fast on the Apple Neural Engine, and prove it.

    mil_ane_passes.convert(model, ...)
    ct.convert(model, ..., pass_pipeline=mil_ane_passes.pipeline())
    mil_ane_passes.rewrite("in.mlpackage", "out.mlpackage")

Importing this registers the passes `ane::*` with coremltools and changes nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .core.host import register
from .core.lazy import lazily

if TYPE_CHECKING:
    from . import runtime, torch_frontend
    from .api import calibrate, edit, lint, pipeline, rewrite, run, trace, verify
    from .batching import batch
    from .core.errors import AnePassesError, InputError, NotSupported, RuleError
    from .package import Package, load, save
    from .torch_frontend.convert import convert

__all__ = [
    "AnePassesError", "InputError", "NotSupported", "Package", "RuleError", "__version__", "batch", "calibrate",
    "convert", "edit", "lint", "load", "pipeline", "rewrite", "run", "runtime", "save", "torch_frontend", "trace",
    "verify",
]

_HOMES = {
    ".api": ("calibrate", "edit", "lint", "pipeline", "rewrite", "run", "trace", "verify"),
    ".batching": ("batch",),
    ".core.errors": ("AnePassesError", "InputError", "NotSupported", "RuleError"),
    ".package": ("Package", "load", "save"),
    ".runtime": ("runtime",),
    ".torch_frontend": ("torch_frontend",),
    ".torch_frontend.convert": ("convert",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

register()

if not TYPE_CHECKING:  # so that a checker refuses names that are not there
    __getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
