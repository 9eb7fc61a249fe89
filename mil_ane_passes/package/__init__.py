"""Packages on disk: loaded as pymil programs with their weights mapped, saved with every untouched byte kept."""

from __future__ import annotations

from .model import Package, load, package_of_mlmodel
from .write import check_destination, save

__all__ = ["Package", "check_destination", "load", "package_of_mlmodel", "save"]
