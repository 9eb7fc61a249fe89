"""Packages on disk: loaded as pymil programs with their weights mapped, saved with every untouched byte kept."""

from __future__ import annotations

from .ahead import CopyAhead
from .model import Package, load, package_of_mlmodel
from .write import check_destination, save

__all__ = ["CopyAhead", "Package", "check_destination", "load", "package_of_mlmodel", "save"]
