"""How many examples a law is tried on: each builds and runs a program, on machines that others use too."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["law"]

law = settings(max_examples=40, deadline=None)
