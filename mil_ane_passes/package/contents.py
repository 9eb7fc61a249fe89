"""Contents of a package's folder: files, folders, and links that stay inside; anything else is rejected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..utils.errors import InputError

__all__ = ["Item", "list_contents"]

# A package has three levels of folders; 64 leaves room for anything a user adds, and ends endless nesting.
_MAX_DEPTH = 64
_REMEDY = "remove it from the package, or use a copy without it"


@dataclass(frozen=True)
class Item:
    """One entry of a package: its path relative to the package's folder, kind ("file", "folder", "link") and size in
    bytes."""

    path: Path
    kind: str
    size: int


def list_contents(root: Path) -> list[Item]:
    """List all entries of the folder `root`, sorted by name, folders before their contents.

    Raises InputError for entries that cannot be copied: a pipe, a device or a socket (a copy would hang), a link that
    leads out of the folder, folders nested more than 64 levels deep. Raises OSError when the folder cannot be listed.
    """
    found: list[Item] = []
    waiting = [Path()]
    while waiting:
        folder = waiting.pop()
        if len(folder.parts) > _MAX_DEPTH:
            raise InputError(f"{root}: folders are nested more than {_MAX_DEPTH} levels deep; a package has three: "
                             f"{_REMEDY}")
        with os.scandir(root / folder) as entries:
            items = [_make_item(root, folder / entry.name, entry) for entry in sorted(entries, key=lambda e: e.name)]
        found += items
        waiting += [item.path for item in reversed(items) if item.kind == "folder"]
    return found


def _make_item(root: Path, path: Path, entry: os.DirEntry[str]) -> Item:
    if entry.is_symlink():
        _check_link(root, path)
        return Item(path, "link", 0)
    if entry.is_dir():
        return Item(path, "folder", 0)
    if entry.is_file():
        return Item(path, "file", entry.stat().st_size)
    raise InputError(f"{root}: {path} is a pipe, a device or a socket; expected files and folders: {_REMEDY}")


def _check_link(root: Path, path: Path) -> None:
    """Raise InputError for a link that, in a copy of the package, would lead outside or back to the source."""
    leads = os.readlink(root / path)
    plain = os.path.normpath(path.parent / leads)
    real_root, real = os.path.realpath(root), os.path.realpath(root / path)
    if os.path.isabs(leads) or plain.split(os.sep)[0] == ".." or os.path.commonpath([real_root, real]) != real_root:
        raise InputError(f"{root}: {path} is a link to {leads}, outside the package; expected the file itself: use a "
                         f"copy with resolved links (cp -rL)")
