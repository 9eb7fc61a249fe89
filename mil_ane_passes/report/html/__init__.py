"""A lint report as one HTML page that needs nothing beside it."""

from __future__ import annotations

from .page import build_page

__all__ = ["build_page"]
