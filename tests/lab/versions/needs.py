"""Marks tests of what only newer versions of coremltools do, and says what the installed one does instead."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest

__all__ = ["coremltools_from", "older_than", "unable"]

_UNABLE = ("Unsupported fx node _assert_tensor_metadata", "PyTorch convert function for op 'rms_norm' not implemented")
"What coremltools 8.3 says of programs that today's torch exports; the patched frontend converts them."


def older_than(version: str) -> bool:
    """Whether the installed coremltools is older."""
    return _numbers(ct.__version__) < _numbers(version)


def coremltools_from(version: str, otherwise: str) -> Any:
    """A mark: skipped with an older coremltools, whose behaviour `otherwise` tells."""
    return pytest.mark.skipif(older_than(version), reason=f"coremltools {ct.__version__} {otherwise}")


def unable(error: Exception) -> str | None:
    """Why a model could not be had, where an older coremltools by itself does not take what torch wrote; else None."""
    trace, ours = error.__traceback__, False
    while trace is not None:
        ours, trace = ours or "torch_frontend" in trace.tb_frame.f_code.co_filename, trace.tb_next
    if ours or not older_than("9.0"):
        return None
    return next((f"coremltools {ct.__version__}: {said}" for said in _UNABLE if said in str(error)), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
