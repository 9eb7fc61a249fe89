"""Atomic renames that publish a finished package: one that replaces nothing, and one that swaps two paths.

Linux (renameat2) and macOS (renamex_np) swap two paths in one step: at every moment, a complete package is at the path.
Some file systems, mostly network ones, do not support this. There the old package is first renamed to another path, and
the target's path is free for a moment. If a run is killed in that moment, the next run to the path puts the package
back. The macOS call was written from its manual and has never been run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["exchange_paths", "move_to_free_path"]

# The value of AT_FDCWD in linux/fcntl.h: a relative path starts from the working folder.
_AT_FDCWD = -100
# RENAME_NOREPLACE and RENAME_EXCHANGE of renameat2, RENAME_EXCL and RENAME_SWAP of renamex_np.
_NO_REPLACE_FLAGS = {"linux": 1, "darwin": 4}
_EXCHANGE_FLAGS = {"linux": 2, "darwin": 2}
_UNSUPPORTED_ERRORS = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def move_to_free_path(staged: Path, target: Path) -> None:
    """Rename `staged` to `target`, which must be free; FileExistsError when it is not."""
    if _rename_with_flag(staged, target, _NO_REPLACE_FLAGS):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
    try:
        os.rename(staged, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target)) from error
        raise


def exchange_paths(staged: Path, target: Path, aside: Path) -> None:
    """Replace `target` by `staged`; the old `target` is afterwards at `staged`, or at `aside`, which must be free.

    Raises FileNotFoundError if `target` does not exist, FileExistsError if another run put something there between the
    two renames.
    """
    if _rename_with_flag(staged, target, _EXCHANGE_FLAGS):
        return
    os.rename(target, aside)
    try:
        move_to_free_path(staged, target)
    except FileExistsError:
        raise
    except BaseException:
        move_to_free_path(aside, target)
        raise


def _rename_with_flag(old: Path, new: Path, flags: dict[str, int]) -> bool:
    """Rename with a flag; return False if the system or the file system does not support it."""
    call = _load_rename_call(sys.platform)
    if call is None:
        return False
    if call(os.fsencode(old), os.fsencode(new), flags[sys.platform]) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED_ERRORS:
        return False
    raise OSError(code, os.strerror(code), os.fspath(new))


def _load_rename_call(platform: str) -> Callable[[bytes, bytes, int], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if platform == "linux" and hasattr(library, "renameat2"):
        return lambda old, new, flag: int(library.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(flag)))
    if platform == "darwin" and hasattr(library, "renamex_np"):
        return lambda old, new, flag: int(library.renamex_np(old, new, ctypes.c_uint(flag)))
    return None
