"""Batches of many packages: finds them, distributes them to workers, and skips results that are up to date.

Nothing here imports coremltools before a package has to be processed.
"""

from __future__ import annotations

from .batch_command import BatchInterrupted, batch

__all__ = ["BatchInterrupted", "batch"]
