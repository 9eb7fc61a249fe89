"""The public functions: each loads, does one job, and returns a report. The command line adds only words to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from .calibration import calibrate
    from .editing import edit
    from .linting import lint
    from .pass_pipeline import pipeline
    from .rewriting import rewrite
    from .running import list_fault_models, run, trace
    from .verification import verify

__all__ = ["calibrate", "edit", "lint", "list_fault_models", "pipeline", "rewrite", "run", "trace", "verify"]

_HOME = {
    "calibrate": ".calibration",
    "edit": ".editing",
    "list_fault_models": ".running",
    "lint": ".linting",
    "pipeline": ".pass_pipeline",
    "rewrite": ".rewriting",
    "run": ".running",
    "trace": ".running",
    "verify": ".verification",
}

# An edit needs none of what predicts and verifies.
if not TYPE_CHECKING:  # so that a checker refuses names that are not there
    __getattr__ = make_lazy_getattr(__name__, _HOME)
