"""Packages saved as loaded: byte for byte the same."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mil_ane_passes.package import load, save

from ...package.helpers import tree


def count_unchanged_saves(packages: Iterable[Path], folder: Path) -> dict[str, Any]:
    """How many of `packages` came back, and how many did not."""
    tries = failures = 0
    for package in packages:
        tries += 1
        target = folder / "saved.mlpackage"
        save(load(package), target)
        if tree(target) != tree(package):
            failures += 1
            print(f"{package}: not the same after saving", file=sys.stderr)
        shutil.rmtree(target)
    return {"tries": tries, "failures": failures}
