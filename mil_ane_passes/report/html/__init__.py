"""A lint report as one self-contained HTML page."""

from __future__ import annotations

from .page import build_page

__all__ = ["build_page"]
