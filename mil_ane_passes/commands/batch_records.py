"""Records stored beside the results: the source, the options and the report of each.

The record of DIR/NAME.mlpackage is DIR/.mil-ane-passes/NAME.mlpackage.json, its report NAME.mlpackage.report.json. A
record is written atomically: as "started" before the work, and again after its result is written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..package.file_replacement import replace_file
from ..package.write_errors import convert_write_errors

__all__ = [
    "RECORDED_FIELDS",
    "RECORDS_FOLDER",
    "Record",
    "collect_stamps",
    "refresh_if_unchanged",
    "sum_file_sizes",
    "take_fingerprint",
    "update_link_stamps",
    "write_text_atomically",
]


RECORDS_FOLDER = ".mil-ane-passes"
RECORDED_FIELDS = ("code", "count", "ops_before", "ops_after", "bytes", "left_out_passes", "failed_passes",
                   "upgraded")
"Fields of an item that are recorded, besides its report."
_COUNT_FIELDS = ("count", "ops_before", "ops_after", "bytes")
_SCHEMA = 1


def _is_valid_record(data: dict[str, Any]) -> bool:
    """Return whether a record has the expected form; a damaged one counts as missing."""
    files, outputs, item = data.get("files", {}), data.get("outputs", {}), data.get("item")
    kept = item is None or (
        isinstance(item, dict)
        and item.keys() == set(RECORDED_FIELDS)
        and isinstance(item["code"], int)
        and isinstance(item["left_out_passes"], list)
        and isinstance(item["upgraded"], bool)
        and all(isinstance(item[name], int | None) for name in _COUNT_FIELDS)
    )
    return (kept and (item is not None or data.get("state") != "done") and isinstance(data.get("source", ""), str)
            and isinstance(files, dict) and all(map(_is_fingerprint_entry, files.values()))
            and isinstance(outputs, dict) and all(map(_is_int_list, outputs.values())))


def _is_fingerprint_entry(each: Any) -> bool:
    return (isinstance(each, dict) and isinstance(each.get("size"), int) and _is_int_list(each.get("stamp"))
            and len(each["stamp"]) == len(("modified", "changed", "inode"))
            and isinstance(each.get("sha256", 0), str | None))


def _is_int_list(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, int) for each in values)


class Record:
    """The record of one `output` below `folder`. `state` is "none", "started", "failed" or "done"."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output = folder, output
        place = folder / RECORDS_FOLDER / output.relative_to(folder)
        self.path = place.with_name(f"{place.name}.json")
        self.report = place.with_name(f"{place.name}.report.json")
        self.data = self._read_file()

    def _read_file(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            # A missing or damaged record means that the job has not run: it runs again and writes a new one.
            return {}
        return data if isinstance(data, dict) and data.get("schema") == _SCHEMA and _is_valid_record(data) else {}

    @property
    def state(self) -> str:
        return str(self.data.get("state", "none"))

    @property
    def source(self) -> str:
        """The path of the package that the result was made from; empty without a result."""
        return str(self.data.get("source", ""))

    def is_untouched(self) -> bool:
        """Return whether the result is as it was written, or may be left over from an interrupted run."""
        return self.state == "started" or (
            "outputs" in self.data and self.data["outputs"] == collect_stamps(self.output)
        )

    def is_made_from(self, source: str) -> bool:
        """Return whether the result was made from the current content of package `source`.

        May have to read the package.
        """
        now = refresh_if_unchanged(self.data.get("files", {}), source)
        if now is not None and now != self.data["files"]:  # not to be read again the next time
            self.data["files"] = now
            self._write_file(self.data)
        return now is not None

    def start(self) -> None:
        """Record that the result may appear from now on."""
        self._write_file({**self.data, "state": "started"})

    def mark_failed(self, report: dict[str, Any] | None = None) -> None:
        """Record that no new result was written; an earlier one is still known. `report` has the reason."""
        if report is not None:
            write_text_atomically(self.report, json.dumps(report, allow_nan=False))
        if self.data or report is not None:
            self._write_file({**self.data, "state": "failed"})
        else:
            self.path.unlink(missing_ok=True)

    def finish(self, report: dict[str, Any], **facts: Any) -> None:
        """Record that the result was written, and what it was made from."""
        write_text_atomically(self.report, json.dumps(report, allow_nan=False))
        self._write_file({**facts, "state": "done", "outputs": collect_stamps(self.output)})

    def _write_file(self, data: dict[str, Any]) -> None:
        write_text_atomically(
            self.path, json.dumps({**data, "schema": _SCHEMA, "tool": "mil-ane-passes"}, allow_nan=False)
        )


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file atomically; missing folders are created, and an existing file is replaced."""
    with convert_write_errors(path, "the file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))


Fingerprint = dict[str, dict[str, Any]]
"For each file, by its path in the package: `size` in bytes, `stamp`, and `sha256` or None."

_ALWAYS_HASHED_BYTES = 64 << 20
"Files of up to this many bytes are always hashed: it takes less than a tenth of a second."
# Files are hashed in pieces of this size, so that a weight file never has to be in memory as a whole.
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
