"""Files on disk: cloned where the file system can, copied by the kernel where it can, synced."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_CHUNK = 1 << 20
_FICLONE = 0x40049409


def copy_file(source: Path, target: Path) -> None:
    """Makes `target` with the bytes of `source`; it shares the source's blocks where the file system can do that."""
    with open(source, "rb") as src, open(target, "xb") as dst:
        if not _clone(src.fileno(), dst.fileno()):
            copy_range(src.fileno(), dst.fileno(), 0, 0, os.fstat(src.fileno()).st_size)


def copy_range(src: int, dst: int, start: int, to: int, count: int) -> None:
    """Copies `count` bytes at `start` of file `src` to `to` of file `dst`; OSError when the source is shorter."""
    done = _kernel_copy(src, dst, start, to, count)
    while done < count:
        chunk = os.pread(src, min(_CHUNK, count - done), start + done)
        if not chunk:
            raise OSError(f"the source ends after {start + done} bytes, {start + count} expected")
        write_all(dst, chunk, to + done)
        done += len(chunk)


def write_all(dst: int, data: bytes, to: int) -> None:
    """Writes all of `data` at `to` of file `dst`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(dst, view, to)
        view, to = view[written:], to + written


def _kernel_copy(src: int, dst: int, start: int, to: int, count: int) -> int:
    """How many bytes the kernel copied by itself; not all file systems can."""
    done = 0
    if sys.platform == "linux":
        while done < count:
            try:
                copied = os.copy_file_range(src, dst, count - done, start + done, to + done)
            except OSError:
                # Whatever the reason (a full disk too), the copy by hand meets it again and reports it.
                break
            if copied == 0:
                break
            done += copied
    return done


def _clone(src: int, dst: int) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(dst, _FICLONE, src)
    except OSError:
        return False
    return True


def copy_mode(source: Path, target: Path) -> None:
    """Gives `target` the permissions of `source`; folders stay usable by their owner."""
    shutil.copymode(source, target)
    if target.is_dir():
        target.chmod(target.stat().st_mode | 0o700)


def sync(path: Path) -> None:
    """Waits until file or folder `path` is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
