"""How many examples a law is tried on: each builds and runs a program, so few in the fast run."""

from __future__ import annotations

import pytest

__all__ = ["law"]

law = pytest.mark.law
