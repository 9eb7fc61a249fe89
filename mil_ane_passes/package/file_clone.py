"""File clones: copies that share the blocks of the original until one of the two is written to, at no cost.

Linux: FICLONE (btrfs, xfs, bcachefs, ...). macOS: clonefile (APFS), written from its manual and tested only against a
stub; any failure of it leads to a plain copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["clone_file"]

_FICLONE = 0x40049409  # the ioctl's number in linux/fs.h


def clone_file(source: Path, target: Path) -> bool:
    """Make `target` a clone of `source`; return False, with no file left at `target`, if that is not possible."""
    if sys.platform == "linux":
        return _clone_linux(source, target)
    call = _load_clonefile() if sys.platform == "darwin" else None
    return call is not None and call(os.fsencode(source), os.fsencode(target), ctypes.c_uint32(0)) == 0


def _clone_linux(source: Path, target: Path) -> bool:
    with open(source, "rb") as src, open(target, "xb") as dst:
        try:
            fcntl.ioctl(dst.fileno(), _FICLONE, src.fileno())
        except OSError:
            target.unlink()
            return False
    return True


def _load_clonefile() -> Callable[[bytes, bytes, ctypes.c_uint32], int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "clonefile", None)

