"""Each conversion ends in a full garbage collection; what is imported once and for all need not be gone through."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def imported_once() -> None:
    import torch.export._trace  # noqa: F401 - the larger part of what torch.export imports when first used

    gc.collect()
    gc.freeze()
