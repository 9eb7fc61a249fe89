"""A small package, made once, and a copy of it for each test to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .helpers import conv_program, make


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("built") / "source.mlpackage", conv_program())


@pytest.fixture
def source(built, tmp_path) -> Path:
    """A copy of `built`, which a file of tests may have replaced by one of its own."""
    return Path(shutil.copytree(built, tmp_path / "in" / "source.mlpackage"))
