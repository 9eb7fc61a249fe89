"""Paths and states that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("few", max_examples=25, deadline=None)
settings.register_profile("many", max_examples=250, deadline=None)

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before torch is there: tests side by side share the cores
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


def pytest_configure(config):
    settings.load_profile("many" if _asks_for_slow(config) else "few")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """The slow run has the laws, too, with many draws."""
    if _asks_for_slow(config):
        for item in items:
            if item.get_closest_marker("law"):
                item.add_marker("slow")


def _asks_for_slow(config):
    return config.getoption("markexpr") == "slow"


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
