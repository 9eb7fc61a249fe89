"""A lint report as one HTML page that needs nothing beside it."""

from __future__ import annotations

from .page import page

__all__ = ["page"]
