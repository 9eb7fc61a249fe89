"""What stands beside the results: of which source, by which options, and with which report each was made.

The record of DIR/NAME.mlpackage is DIR/.mil-ane-passes/NAME.mlpackage.json, its report NAME.mlpackage.report.json. A
record is written whole: as "started" before the work, and once more after its result is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..package.file_replacement import replace_file
from ..package.write_errors import convert_write_errors
from .fingerprint import collect_stamps, refresh_if_unchanged

__all__ = ["RECORDED_FIELDS", "RECORDS_FOLDER", "Record", "write_text_atomically"]

RECORDS_FOLDER = ".mil-ane-passes"
RECORDED_FIELDS = ("code", "count", "ops_before", "ops_after", "bytes", "left_out_passes", "failed_passes")
"What is kept of an item, besides its report."
_COUNT_FIELDS = ("count", "ops_before", "ops_after", "bytes")
_SCHEMA = 1


def _is_valid_record(data: dict[str, Any]) -> bool:
    """Whether a record has the form in which it was written; one that was damaged counts as missing."""
    files, outputs, item = data.get("files", {}), data.get("outputs", {}), data.get("item")
    kept = item is None or (
        isinstance(item, dict)
        and item.keys() == set(RECORDED_FIELDS)
        and isinstance(item["code"], int)
        and isinstance(item["left_out_passes"], list)
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
        self.data = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) and data.get("schema") == _SCHEMA and _is_valid_record(data) else {}

    @property
    def state(self) -> str:
        return str(self.data.get("state", "none"))

    @property
    def source(self) -> str:
        """The path of the package that the result was made of; empty where there is no result."""
        return str(self.data.get("source", ""))

    def is_untouched(self) -> bool:
        """Whether the result lies there as it was written, or half of a run may have left it there."""
        return self.state == "started" or (
            "outputs" in self.data and self.data["outputs"] == collect_stamps(self.output)
        )

    def is_made_from(self, source: str) -> bool:
        """Whether the result was made of what is in package `source` now. May have to read the package."""
        now = refresh_if_unchanged(self.data.get("files", {}), source)
        if now is not None and now != self.data["files"]:  # not to be read again the next time
            self.data["files"] = now
            self._write(self.data)
        return now is not None

    def start(self) -> None:
        """Say that the result may appear from now on."""
        self._write({**self.data, "state": "started"})

    def mark_failed(self, report: dict[str, Any] | None = None) -> None:
        """Say that there is no new result; one of earlier is still known. `report` says why."""
        if report is not None:
            write_text_atomically(self.report, json.dumps(report, allow_nan=False))
        if self.data or report is not None:
            self._write({**self.data, "state": "failed"})
        else:
            self.path.unlink(missing_ok=True)

    def finish(self, report: dict[str, Any], **facts: Any) -> None:
        """Say that the result is there, and what it is made of."""
        write_text_atomically(self.report, json.dumps(report, allow_nan=False))
        self._write({**facts, "state": "done", "outputs": collect_stamps(self.output)})

    def _write(self, data: dict[str, Any]) -> None:
        write_text_atomically(
            self.path, json.dumps({**data, "schema": _SCHEMA, "tool": "mil-ane-passes"}, allow_nan=False)
        )


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all, in a folder that is made if need be; one that is there is replaced."""
    with convert_write_errors(path, "the file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
