"""Hidden folders beside what is being written: held by the run that made them, removed by the next if it was killed.

A run holds the lock of a file in its folder for as long as it lives, however it ends. Whoever gets the lock of a folder
knows that nobody works in it any more. Where a file system has no locks nobody gets one, and what others left stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from .swap import move_to_free_path

__all__ = ["REPLACED", "Staging", "close_all_stagings", "is_staging_name", "remove_stale_stagings"]

REPLACED = "replaced"
"What is put aside in a staging folder while something else takes its place; it goes back when that fails."
_LOCK_NAME = "lock"
_SUFFIX = ".mil-ane-passes"
_MAX_NAME_BYTES = 180  # bytes of the name that are kept, so that the hidden name is one file systems take, too
_OPEN_STAGINGS: set[Staging] = set()


class Staging:
    """A new folder `folder` on the file system of `target`, gone when closed; a context manager.

    What runs to the same `target` that were killed have left behind is removed first. Raises OSError.
    """

    def __init__(self, target: Path) -> None:
        remove_stale_stagings(target)
        self.target = target
        self._process = os.getpid()
        self.folder, self._handle = _make_folder(target)
        _OPEN_STAGINGS.add(self)

    def close(self) -> None:
        """Remove the folder with all in it."""
        if (
            self not in _OPEN_STAGINGS or os.getpid() != self._process
        ):  # a forked child has a copy of what is its parent's
            return
        _OPEN_STAGINGS.discard(self)
        _discard_folder(self.folder, self.target)
        os.close(self._handle)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def close_all_stagings() -> None:
    """Remove all folders of this process: it is about to end."""
    for staging in list(_OPEN_STAGINGS):
        staging.close()


def remove_stale_stagings(target: Path) -> None:
    """Remove the folders beside `target` that runs to it have left behind; those of runs still alive stay.

    So do folders of another user: in a folder that several users write to anybody can make one of such a name, and
    what lies in it would take the place of a package.
    """
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if is_staging_name(entry.name, target):
                with suppress(OSError):  # one that cannot be removed does not keep the others
                    _remove_stale_folder(Path(entry.path), target)


def _remove_stale_folder(folder: Path, target: Path) -> None:
    """Remove one folder that nobody works in. Raises OSError where that cannot be known."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    handle = _open_lock(folder)
    try:
        if _take_lock(handle, fcntl.LOCK_NB):
            _discard_folder(folder, target)
    finally:
        os.close(handle)


def is_staging_name(name: str, target: Path) -> bool:
    """Whether `name` is one that staging folders for `target` have."""
    prefix = _build_prefix(target.name)
    return name.startswith(prefix) and name.endswith(_SUFFIX) and "." not in name[len(prefix) : -len(_SUFFIX)]


def _build_prefix(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) > _MAX_NAME_BYTES:
        name = hashlib.sha256(encoded).hexdigest()
    return f".{name}."


def _make_folder(target: Path) -> tuple[Path, int]:
    """A new folder and the open file whose lock says that it is in use."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_build_prefix(target.name), suffix=_SUFFIX, dir=target.parent))
        try:
            handle = _open_lock(folder)
        except FileNotFoundError:
            continue  # a run that looked before there was a lock took the folder for one left behind
        except OSError:
            folder.rmdir()
            raise
        _take_lock(handle, 0)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder / _LOCK_NAME)):
                return folder, handle
        os.close(handle)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _take_lock(handle: int, flags: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except OSError:  # held by another, or there are no locks here
        return False
    return True


def _discard_folder(folder: Path, target: Path) -> None:
    """Removes `folder` with all in it; what was put aside there goes back unless something is in its place."""
    aside = folder / REPLACED
    if os.path.lexists(aside) and not os.path.lexists(target):
        try:
            move_to_free_path(aside, target)
        except FileExistsError:
            pass  # another run was quicker
        except OSError:
            return
    # A thread that is still copying may make one more file while the others are being removed.
    for _ in range(3):
        with suppress(OSError):
            for inner, _, _ in os.walk(folder):
                os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
