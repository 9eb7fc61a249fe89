"""Rewrite Core ML ML Programs so that they run correctly, whole and fast on the Apple Neural Engine, and prove it."""

from __future__ import annotations

from ._version import __version__
from .core.pipeline import register_passes

register_passes()
