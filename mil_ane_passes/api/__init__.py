"""The public functions: each loads, does one job, and returns a report. The command line adds only words to them."""

from __future__ import annotations

from .calibrating import calibrate
from .checking import verify
from .editing import edit
from .linting import lint
from .passes import pipeline
from .rewriting import rewrite
from .running import fault_models, run, trace

__all__ = ["calibrate", "edit", "fault_models", "lint", "pipeline", "rewrite", "run", "trace", "verify"]
