"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mil_ane_passes.runtime.ops import constexpr_ops


@pytest.fixture(params=[1 << 20, 8], ids=["at once", "in pieces"], scope="module")
def elements_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Decompress weights at once, and some elements at a time as if they were large."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constexpr_ops, "_ELEMENTS_AT_ONCE", request.param)
        yield
