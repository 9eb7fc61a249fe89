"""Skips work that coremltools and torch repeat in each conversion and that no fast test is about.

Measured on short-time Fourier transforms (CPU time of the tests): a third of it. `-m slow` converts without this.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import pytest


def skip_repeated_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate programs once a pipeline, collect garbage as Python does, and list torch's composite ops once."""
    _validate_once_a_pipeline(monkeypatch)
    monkeypatch.setattr("coremltools.converters._converters_entry.gc", SimpleNamespace(collect=lambda: 0))
    if "torch" in sys.modules:
        _list_composite_ops_once(monkeypatch)


def _validate_once_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate at the end of a pipeline of passes, not after each of about ninety."""
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    validate, apply_pipeline = Program.validate, PassPipelineManager.apply_pipeline
    code = getattr(apply_pipeline, "__wrapped__", apply_pipeline).__code__

    def validate_elsewhere(program: Any, *arguments: Any, **options: Any) -> None:
        if sys._getframe(1).f_code is not code:
            validate(program, *arguments, **options)

    def apply_and_validate(program: Any, pipeline: Any) -> None:
        apply_pipeline(program, pipeline)
        validate(program)

    monkeypatch.setattr(Program, "validate", validate_elsewhere)
    monkeypatch.setattr(PassPipelineManager, "apply_pipeline", staticmethod(apply_and_validate))


def _list_composite_ops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up torch's composite ops once, not in each of a dozen namespaces in each export."""
    from torch._export import utils

    if hasattr(utils, "_materialize_cpp_cia_ops"):
        monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops))
