"""File operations: clone if the file system supports it, else copy in the kernel if possible, and sync."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .file_clone import clone_file

# Bytes that are read at once if the kernel cannot copy.
_READ_CHUNK_BYTES = 1 << 20
# Bytes that the kernel copies in one call: few enough to stop soon when the copy is cancelled.
_COPY_PIECE_BYTES = 64 << 20

Check = Callable[[], None]


def copy_file(source: Path, target: Path, check: Check | None = None) -> None:
    """Copy `source` to the new file `target`; the two share blocks if the file system supports it.

    Holes of a sparse file stay holes. `check` is called before each piece of 64 MB; an exception that it raises ends
    the copy. Raises OSError, also if the source changes during the copy.
    """
    if clone_file(source, target):
        return
    with open(source, "rb") as src, open(target, "xb") as dst:
        before = get_file_stamp(os.fstat(src.fileno()))
        for start, end in _iterate_data_ranges(src.fileno()):
            for at in range(start, end, _COPY_PIECE_BYTES):
                if check is not None:
                    check()
                count = min(_COPY_PIECE_BYTES, end - at)
                copy_range(src.fileno(), dst.fileno(), at, at, count)
                _begin_writing(dst.fileno(), at, count)
        os.ftruncate(dst.fileno(), before[1])
        if get_file_stamp(os.fstat(src.fileno())) != before:
            raise OSError(errno.EBUSY, "the file was changed while it was copied", os.fspath(source))


def get_file_stamp(found: os.stat_result) -> tuple[int, int, int]:
    """Return values that differ after a file was changed or replaced: inode number, size in bytes, modification
    time."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def copy_range(src: int, dst: int, start: int, to: int, count: int) -> None:
    """Copy `count` bytes at `start` of file `src` to `to` of file `dst`; OSError when the source is shorter."""
    done = _copy_in_kernel(src, dst, start, to, count)
    while done < count:
        chunk = os.pread(src, min(_READ_CHUNK_BYTES, count - done), start + done)
        if not chunk:
            raise OSError(f"the source ends after {start + done} bytes, {start + count} expected")
        write_all(dst, chunk, to + done)
        done += len(chunk)


def write_all(dst: int, data: bytes | memoryview, to: int) -> None:
    """Write all of `data` at `to` of file `dst`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(dst, view, to)
        view, to = view[written:], to + written


def link_file(source: Path, target: Path) -> bool:
    """Make `target` a hard link to the file `source`; return False, with no file at `target`, if that is not possible.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # File systems without hard links, other devices and missing rights all end here: the caller copies instead.
        return False
    return True


def _iterate_data_ranges(handle: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges (start, end) of a file that hold data.

    The holes between them read as zeros and take no space.
    """
    found = os.fstat(handle)
    if found.st_blocks * 512 >= found.st_size:
        yield 0, found.st_size
        return
    at = 0
    while at < found.st_size:
        try:
            start = os.lseek(handle, at, os.SEEK_DATA)
        except OSError:  # no more data, or a file system that does not report holes
            if at == 0 and found.st_blocks:
                yield 0, found.st_size
            return
        at = os.lseek(handle, start, os.SEEK_HOLE)
        yield start, at


def _copy_in_kernel(src: int, dst: int, start: int, to: int, count: int) -> int:
    """Copy with copy_file_range and return the number of bytes copied: fewer than `count` if the file system cannot."""
    done = 0
    if sys.platform == "linux":
        while done < count:
            try:
                copied = os.copy_file_range(src, dst, count - done, start + done, to + done)
            except OSError:
                # The copy in Python that follows meets the same error (such as a full disk) and reports it.
                break
            if copied == 0:
                break
            done += copied
    return done


def _begin_writing(handle: int, start: int, count: int) -> None:
    """Let the disk begin to write these bytes now: the later sync of the file then takes less time."""
    if sys.platform == "linux":
        os.posix_fadvise(handle, start, count, os.POSIX_FADV_DONTNEED)


def copy_mode(source: Path, target: Path) -> None:
    """Copy the permissions of `source` to `target`; the owner of a folder always keeps full access."""
    shutil.copymode(source, target)
    if target.is_dir():
        target.chmod(target.stat().st_mode | 0o700)


def sync_path(path: Path) -> None:
    """Wait until file or folder `path` is on disk; errors of file systems that cannot sync folders are ignored."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    finally:
        os.close(handle)
