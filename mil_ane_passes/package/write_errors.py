"""Messages for write errors: the file that could not be written, the reason, and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..utils.errors import InputError
from .staging import is_staging_name

__all__ = ["convert_write_errors"]

_WRITABLE_REMEDY = "choose a folder with write permission"
_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of your quota, or choose another disk",
    errno.EFBIG: "the file system or a limit (ulimit -f) does not allow such a large file",
    errno.EROFS: _WRITABLE_REMEDY,
    errno.EACCES: _WRITABLE_REMEDY,
    errno.EPERM: _WRITABLE_REMEDY,
    errno.ENAMETOOLONG: "choose a shorter name or path",
    errno.ENOENT: "a folder or file was removed during the run",
    errno.EEXIST: "two names differ only in a way that this file system ignores, such as case",
}


class _WriteError(InputError):
    """The error of an output at `target`; its cause is the OSError."""

    target: Path | None = None


@contextmanager
def convert_write_errors(target: Path, what: str = "the package") -> Iterator[None]:
    """Convert an OSError of writing `what` to `target` into an InputError.

    Use it only while nothing has been changed at `target`: the message says that existing files are unchanged. An error
    of a package that is first written into the staging folder of `target` becomes one of `target`.
    """
    try:
        yield
    except OSError as error:
        raise _make_error(error, target, what) from error
    except _WriteError as error:
        if error.target is None or not isinstance(error.__cause__, OSError) or not _is_staged(error.target, target):
            raise
        raise _make_error(error.__cause__, target, what) from error.__cause__


def _make_error(error: OSError, target: Path, what: str) -> _WriteError:
    reason = error.strerror or str(error)
    remedy = (
        _REMEDIES.get(error.errno or 0)
        if _is_write_error(error, target)
        else "check that it is readable and complete"
    )
    stays = "existing files are unchanged" if _is_present(target) else "nothing was written there"
    made = _WriteError(f"{target}: {what} cannot be written ({reason}{_format_file_name(error)}); {stays}"
                       f"{f': {remedy}' if remedy else ''}")
    made.target = target
    return made


def _is_staged(path: Path, target: Path) -> bool:
    """Return whether `path` is inside a staging folder of `target`."""
    return any(is_staging_name(each.name, target) for each in (path, *path.parents))


def _is_write_error(error: OSError, target: Path) -> bool:
    """Return whether writing failed, and not reading the files that are copied."""
    if not isinstance(error.filename, str | bytes):
        return True
    path = Path(os.fsdecode(error.filename))
    return path in (target, *target.parents) or _is_staged(path, target)


def _format_file_name(error: OSError) -> str:
    return f": {os.path.basename(os.fsdecode(error.filename))}" if isinstance(error.filename, str | bytes) else ""


def _is_present(target: Path) -> bool:
    try:
        return os.path.lexists(target)
    except OSError:
        return False
