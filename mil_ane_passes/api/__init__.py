"""The public functions: each loads, does one job, and returns a report. The command line adds only words to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .calibrating import calibrate
    from .checking import verify
    from .editing import edit
    from .linting import lint
    from .passes import pipeline
    from .rewriting import rewrite
    from .running import fault_models, run, trace

__all__ = ["calibrate", "edit", "fault_models", "lint", "pipeline", "rewrite", "run", "trace", "verify"]

_HOME = {"calibrate": ".calibrating", "edit": ".editing", "fault_models": ".running", "lint": ".linting",
         "pipeline": ".passes", "rewrite": ".rewriting", "run": ".running", "trace": ".running", "verify": ".checking"}

# An edit needs none of what predicts and proves.
if not TYPE_CHECKING:  # so that a checker refuses names that are not there
    __getattr__ = lazily(__name__, _HOME)
