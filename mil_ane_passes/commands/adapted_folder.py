"""Folders that `adapt` has written: their manifest, and the packages in them that run on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "MANIFEST", "is_cpu_lookup"]

MANIFEST = "manifest.json"
KINDS = ("decoder", "encoder")
"Values of `kind` in manifests."
_MAX_BYTES = 1 << 22
"A manifest has a few KB per part; a larger file is not one of ours, and is not read."


def is_cpu_lookup(package: str | os.PathLike[str]) -> bool:
    """Return whether the manifest beside a package names it as a lookup, which the folder's README runs on the CPU.

    A manifest that cannot be read, that is not one of `adapt`, or that names the package as another one, too, is
    ignored.
    """
    path = Path(os.path.abspath(package))
    try:
        return _names_lookup(_read_manifest(path.parent / MANIFEST), path.name)
    except (OSError, ValueError, RecursionError):
        return False


def _names_lookup(manifest: dict[str, Any], name: str) -> bool:
    """Return whether a package is a lookup, and not a main package or one that runs once, in a manifest of `adapt`."""
    if manifest.get("kind") not in KINDS or manifest.get("schema") != 1:
        return False
    parts = manifest.get("parts") if manifest["kind"] == "decoder" else [manifest]
    parts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    lookups = [part.get("lookup") for part in parts]
    others = [manifest.get("once"), *(part.get("main") for part in parts)]
    return name in lookups and json.dumps(name) not in json.dumps(others)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises OSError or ValueError if it is not one."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is not a manifest")
    with path.open("rb") as file:
        found = json.loads(file.read(_MAX_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not an object")
    return found
