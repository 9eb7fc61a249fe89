"""Many packages in one go: found, shared out to workers, each result kept whole, and nothing done twice.

Nothing here imports coremltools before a package has to be worked on.
"""

from __future__ import annotations

from .batch_command import BatchInterrupted, batch

__all__ = ["BatchInterrupted", "batch"]
