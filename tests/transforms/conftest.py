"""Packages of several kinds, each built once for all tests of edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import coremltools as ct
import pytest

from tests.package.helpers import conv_program, make
from tests.package.test_unchanged import BUILDERS

_OWN = {
    "halves": lambda path: make(path, conv_program(ct.target.iOS16), ct.target.iOS16,
                                compute_precision=ct.precision.FLOAT16),
}


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Callable[[str], Path]:
    """The package of a kind: those of tests/package/test_unchanged.py, and "halves" (fp16 inside, fp32 outside)."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = {**BUILDERS, **_OWN}[kind](tmp_path_factory.mktemp(kind) / "source.mlpackage")
        return made[kind]

    return of
