"""Rewrite Core ML ML Programs so that they run correctly, entirely and fast on the Apple Neural Engine, and verify
them.

    mil_ane_passes.convert(model, ...)
    ct.convert(model, ..., pass_pipeline=mil_ane_passes.pipeline())
    mil_ane_passes.rewrite("in.mlpackage", "out.mlpackage")

Importing this registers the passes `ane::*` with coremltools and changes nothing else.

Every function may be called from several threads. coremltools keeps the program it builds in globals, so a second
thread waits until the first one is done. Use processes for parallel work (`batch(..., jobs=N)`). Reports of `lint` and
`rewrite` hold programs and cannot be pickled: return their `to_dict()` or `str()` from a function in another process.
A progress callback may call the API again, but must not wait for another thread that does. coremltools' own functions
are not covered: with several threads, call `ct.convert` and the MIL builder inside `with mil_ane_passes.exclusive():`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .passes.coremltools_setup import register_with_coremltools
from .passes.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from . import runtime, torch_frontend
    from .commands.adapt import adapt
    from .commands.batch import batch
    from .commands.calibrate import calibrate
    from .commands.edit import edit
    from .commands.lint import lint
    from .commands.pipeline import pipeline
    from .commands.rewrite import rewrite
    from .commands.run import run, trace
    from .commands.upgrade import upgrade
    from .commands.verify import verify
    from .neuralnetwork.loading import load
    from .package import Package, save
    from .torch_frontend.convert import convert
    from .utils.errors import AnePassesError, InputError, LimitReached, NotSupported, RuleError
    from .utils.locking import exclusive

__all__ = [
    "AnePassesError", "InputError", "LimitReached", "NotSupported", "Package", "RuleError", "__version__", "adapt",
    "batch", "calibrate", "convert", "edit", "exclusive", "lint", "load", "pipeline", "rewrite", "run", "runtime",
    "save", "torch_frontend", "trace", "upgrade", "verify",
]

_HOMES = {
    ".commands.adapt": ("adapt",),
    ".commands.batch": ("batch",),
    ".commands.calibrate": ("calibrate",),
    ".commands.edit": ("edit",),
    ".commands.lint": ("lint",),
    ".commands.pipeline": ("pipeline",),
    ".commands.rewrite": ("rewrite",),
    ".commands.run": ("run", "trace"),
    ".commands.upgrade": ("upgrade",),
    ".commands.verify": ("verify",),
    ".utils.errors": ("AnePassesError", "InputError", "LimitReached", "NotSupported", "RuleError"),
    ".utils.locking": ("exclusive",),
    ".neuralnetwork.loading": ("load",),
    ".package": ("Package", "save"),
    ".runtime": ("runtime",),
    ".torch_frontend": ("torch_frontend",),
    ".torch_frontend.convert": ("convert",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def _make_guard(target: str, most: float) -> Any:
    """Make the guard for `target` that allows the predicted cost to increase by the fraction `most`."""
    home = import_module(f"{__name__}.commands.pipeline")  # when it is needed, as with all names below
    return home.make_guard(home.make_forecaster(target), most)


register_with_coremltools(_make_guard)

if not TYPE_CHECKING:  # so that a checker refuses names that are not there
    __getattr__ = make_lazy_getattr(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
