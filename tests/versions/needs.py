"""Marks tests of what only newer versions of coremltools do, and says what the installed one does instead."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import pytest

__all__ = ["coremltools_from", "older_than"]


def older_than(version: str) -> bool:
    """Whether the installed coremltools is older."""
    return _numbers(ct.__version__) < _numbers(version)


def coremltools_from(version: str, otherwise: str) -> Any:
    """A mark: skipped with an older coremltools, whose behaviour `otherwise` tells."""
    return pytest.mark.skipif(older_than(version), reason=f"coremltools {ct.__version__} {otherwise}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
