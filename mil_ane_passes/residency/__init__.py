"""Where each op of a program is predicted to run, at what cost, and in which segments."""

from __future__ import annotations

from .predict import predict

__all__ = ["predict"]
