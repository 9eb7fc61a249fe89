"""Fingerprints of packages, to detect whether a package has changed since it was read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["collect_stamps", "refresh_if_unchanged", "sum_file_sizes", "take_fingerprint", "update_link_stamps"]

Fingerprint = dict[str, dict[str, Any]]
"For each file, by its path in the package: `size` in bytes, `stamp`, and `sha256` or None."

_ALWAYS_HASHED_BYTES = 64 << 20
"Files of up to this many bytes are always hashed: it takes less than a tenth of a second."
_CHUNK_BYTES = 1 << 20


def take_fingerprint(package: str | os.PathLike[str], deep: bool) -> Fingerprint:
    """Take the fingerprint of `package`. The content of large files is hashed only if `deep`."""
    found: Fingerprint = {}
    for name, path in _iterate_files(Path(package)):
        size, stamp = _read_stamp(path)
        found[name] = {
            "size": size,
            "stamp": stamp,
            "sha256": _hash_file(path) if deep or size <= _ALWAYS_HASHED_BYTES else None,
        }
    return found


def refresh_if_unchanged(before: Fingerprint, package: str | os.PathLike[str]) -> Fingerprint | None:
    """Return the current fingerprint of `package` if its content is that of the fingerprint `before`; else None.

    A file whose stamp is unchanged is not read: the time of the last change of a file's inode cannot be set by hand. A
    file that was copied, moved, unpacked or touched counts as the same if its size and hash are; without a hash it
    counts as changed.
    """
    files = dict(_iterate_files(Path(package)))
    if files.keys() != before.keys():
        return None
    now: Fingerprint = {}
    for name, path in files.items():
        was = before[name]
        size, stamp = _read_stamp(path)
        touched = [size, stamp] != [was["size"], was["stamp"]]
        if touched and (size != was["size"] or was["sha256"] is None or _hash_file(path) != was["sha256"]):
            return None
        now[name] = {"size": size, "stamp": stamp, "sha256": was["sha256"]}
    return now


def update_link_stamps(files: Fingerprint, package: str | os.PathLike[str]) -> Fingerprint:
    """Update `files` after work that may have hard-linked some of them, which changes their inodes but nothing else."""
    now: Fingerprint = {}
    for name, path in _iterate_files(Path(package)):
        if name in files:
            (size, stamp), was = _read_stamp(path), files[name]
            same_file = [size, stamp[0], stamp[2]] == [was["size"], was["stamp"][0], was["stamp"][2]]
            now[name] = {**was, "stamp": stamp} if same_file else was
    return files | now


def collect_stamps(output: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Collect size and modification time of every file of `output`, a package or a single file; they survive a move."""
    return {name: [status.st_size, status.st_mtime_ns]
            for name, path in _iterate_files(Path(output)) for status in [os.lstat(path)]}


def sum_file_sizes(files: Any) -> int:
    """Sum the bytes of all files of a fingerprint, or of `collect_stamps`."""
    return sum(each["size"] if isinstance(each, dict) else each[0] for each in files.values())


def _iterate_files(top: Path) -> Iterator[tuple[str, Path]]:
    """Yield every path in a folder that is not a folder, without following links; for a file, that file alone."""
    if not top.is_dir():
        if os.path.lexists(top):
            yield ".", top
        return
    for place, folders, names in os.walk(top):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders.sort()
        for name in sorted([*names, *links]):
            path = Path(place, name)
            yield path.relative_to(top).as_posix(), path


def _read_stamp(path: Path) -> tuple[int, list[int]]:
    status = os.lstat(path)
    return status.st_size, [status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _hash_file(path: Path) -> str:
    if path.is_symlink() or not path.is_file():
        return f"link to {os.readlink(path)}" if path.is_symlink() else "no file"
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
