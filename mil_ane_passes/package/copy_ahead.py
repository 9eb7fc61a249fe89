"""Copy-ahead: a package's large files are copied next to the target while the program is still being rewritten.

The kernel copies and the disk writes without Python, so the copy runs at the same time as the rewrite. If the rewrite
fails or changes nothing, the copies are removed.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from .contents import list_contents
from .files import copy_file, get_file_stamp, sync_path
from .manifest import MANIFEST
from .staging import Staging

_MIN_COPY_AHEAD_BYTES = 8 << 20
"Smallest size of a file, in bytes, that is copied ahead: a smaller one is copied in a few milliseconds anyway."


class _Cancelled(Exception):
    """The copies are cancelled."""


class CopyAhead:
    """Starts copying the large files of the folder `source` into the folder of `target`; a context manager.

    On exit, copies that were not used are removed. The writer moves the finished copies into place with `take`. If a
    file could not be copied ahead, `take` returns False; the writer then copies the file itself, meets the same error,
    and reports it. Raises InputError for a package whose contents cannot be copied.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self._copies: dict[Path, tuple[Path, tuple[int, int, int]]] = {}
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._cancelled = False
        # The source may be any path, even a whole disk: only what looks like a package is searched and copied.
        found = list_contents(source) if (source / MANIFEST).is_file() else []
        large = [source / item.path for item in found if item.kind == "file" and item.size >= _MIN_COPY_AHEAD_BYTES]
        target = Path(os.path.abspath(target))
        if not large or not os.access(target.parent, os.W_OK):
            return
        try:
            self._staging = Staging(target)
        except OSError:
            # A copy ahead only saves time: without a staging folder here, the writer makes its own and reports the
            # error.
            return
        self._thread = threading.Thread(target=self._copy_files, args=(large, self._staging.folder), daemon=True)
        self._thread.start()

    def _copy_files(self, files: list[Path], folder: Path) -> None:
        for number, path in enumerate(files):
            copy = folder / str(number)
            try:
                found = get_file_stamp(path.stat())
                copy_file(path, copy, self._check_cancelled)
                sync_path(copy)
            except (OSError, _Cancelled):
                # The writer copies this file again, and reports its error with the path.
                return
            self._copies[path] = copy, found

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise _Cancelled

    def take_copy(self, source: Path, target: Path) -> bool:
        """Move the finished copy of `source` to `target`; False if there is no copy, or `source` has changed since."""
        if self._thread is not None:
            self._thread.join()
        copy, found = self._copies.pop(source, (None, None))
        # The stamp was taken before the copy: a source that changed during or after it is copied again.
        if copy is None or found != get_file_stamp(source.stat()):
            return False
        os.rename(copy, target)
        return True

    def __enter__(self) -> CopyAhead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._cancelled = True
        if self._thread is not None:
            self._thread.join()
        if self._staging is not None:
            self._staging.close()
