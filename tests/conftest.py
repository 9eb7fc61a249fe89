"""Paths and states that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of small packages."""
    return FIXTURES


@pytest.fixture
def clean_registry():
    """Rules that a test adds are forgotten afterwards, by us and by coremltools."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    from mil_ane_passes.core.registry import refresh

    known = dict(PASS_REGISTRY.passes)
    refresh()
    yield
    refresh()
    PASS_REGISTRY.passes.clear()
    PASS_REGISTRY.passes.update(known)
