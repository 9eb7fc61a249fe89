"""Python's cycle collector, paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off"]


@contextmanager
def collector_off() -> Iterator[None]:
    """Pause the collector while modules are imported, or a graph is built or rewritten: that makes many objects and
    drops few, and each full collection would look at all of them again, which makes the cost grow faster than they."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
