"""Staging folders: hidden folders beside the target, in which a run prepares its output.

A run holds the lock of a file in its folder until it ends, even if it is killed. A run that gets the lock of a folder
left by another run therefore knows that no run uses the folder, and removes it. On a file system without locks the lock
cannot be taken, so folders of other runs stay.
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
"Name in a staging folder of the package that is being replaced; it is moved back if the replacement fails."
_LOCK_NAME = "lock"
_SUFFIX = ".mil-ane-passes"
_MAX_NAME_BYTES = 180  # longer names are hashed, so that file systems accept the hidden name
_OPEN_STAGINGS: set[Staging] = set()


class Staging:
    """A new folder `folder` on the file system of `target`, removed when closed; a context manager.

    Folders that killed runs to the same `target` have left behind are removed first. Raises OSError.
    """

    def __init__(self, target: Path) -> None:
        remove_stale_stagings(target)
        self.target = target
        self._process = os.getpid()
        self.folder, self._handle = _make_folder(target)
        _OPEN_STAGINGS.add(self)

    def close(self) -> None:
        """Remove the folder with everything in it."""
        if (
            self not in _OPEN_STAGINGS or os.getpid() != self._process
        ):  # a forked child has a copy of its parent's objects
            return
        _OPEN_STAGINGS.discard(self)
        _discard_folder(self.folder, self.target)
        os.close(self._handle)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def close_all_stagings() -> None:
    """Remove all staging folders of this process, which is about to end."""
    for staging in list(_OPEN_STAGINGS):
        staging.close()


def remove_stale_stagings(target: Path) -> None:
    """Remove the folders beside `target` that runs to it have left behind; those of runs still alive stay.

    Folders of another user stay, too. In a folder that several users write to, anybody can make a folder of such a
    name, and the package in it would be restored to the target's path.
    """
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if is_staging_name(entry.name, target):
                with suppress(OSError):  # a folder that cannot be removed does not prevent the removal of the others
                    _remove_stale_folder(Path(entry.path), target)


def _remove_stale_folder(folder: Path, target: Path) -> None:
    """Remove one folder if no run uses it. Raises OSError if that cannot be determined."""
    found = os.lstat(folder)
    # See `remove_stale_stagings` for folders of other users.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    handle = _open_lock(folder)
    try:
        if _take_lock(handle, fcntl.LOCK_NB):
            _discard_folder(folder, target)
    finally:
        os.close(handle)


def is_staging_name(name: str, target: Path) -> bool:
    """Return whether `name` is the name of a staging folder for `target`."""
    prefix = _build_prefix(target.name)
    return name.startswith(prefix) and name.endswith(_SUFFIX) and "." not in name[len(prefix) : -len(_SUFFIX)]


def _build_prefix(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) > _MAX_NAME_BYTES:
        name = hashlib.sha256(encoded).hexdigest()
    return f".{name}."


def _make_folder(target: Path) -> tuple[Path, int]:
    """Return a new folder and the open file whose lock marks it as in use."""
    while True:
        try:
            made = tempfile.mkdtemp(prefix=_build_prefix(target.name), suffix=_SUFFIX, dir=target.parent)
        except OSError as error:  # the message would name the staging folder, which the user does not know
            raise OSError(error.errno, error.strerror, str(target)) from error
        folder = Path(made)
        try:
            handle = _open_lock(folder)
        except FileNotFoundError:
            continue  # another run saw the folder before it was locked and removed it as stale
        except OSError:
            folder.rmdir()
            raise
        _take_lock(handle, 0)
        # Between opening and locking, another run may have removed the folder and made a new one of the same name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder / _LOCK_NAME)):
                return folder, handle
        os.close(handle)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _take_lock(handle: int, flags: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except OSError:  # another process holds the lock, or the file system has no locks
        return False
    return True


def _discard_folder(folder: Path, target: Path) -> None:
    """Remove `folder` with everything in it; first move a replaced package back, unless its path is taken."""
    aside = folder / REPLACED
    if os.path.lexists(aside) and not os.path.lexists(target):
        try:
            move_to_free_path(aside, target)
        except FileExistsError:
            pass  # another run has published a package meanwhile
        except OSError:
            # The replaced package is still in `folder`, so the folder must stay.
            return
    # A copy thread that has not stopped yet may create one more file while the others are being removed.
    for _ in range(3):
        with suppress(OSError):
            for inner, _, _ in os.walk(folder):
                # Files in a read-only folder cannot be removed.
                os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
