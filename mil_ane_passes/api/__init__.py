"""Public functions: each loads a model, does one job, and returns a report. The command line only formats them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..passes.lazy_import import make_lazy_getattr

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

# Lazy: an edit needs no code for prediction or verification.
if not TYPE_CHECKING:  # so that a type checker reports unknown names
    __getattr__ = make_lazy_getattr(__name__, _HOME)
