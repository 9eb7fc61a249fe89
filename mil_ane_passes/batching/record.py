"""What stands beside the results: of which source, by which options, and with which report each was made.

The record of DIR/NAME.mlpackage is DIR/.mil-ane-passes/NAME.mlpackage.json, its report NAME.mlpackage.report.json. A
record is written whole: as "started" before the work, and once more after its result is there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..package.refusals import refusals
from ..package.replacing import replace_file
from .fingerprint import same, stamps

__all__ = ["KEPT", "RECORDS", "Record", "write_whole"]

RECORDS = ".mil-ane-passes"
KEPT = ("code", "count", "ops_before", "ops_after", "bytes", "left_out_passes", "failed_passes")
"What is kept of an item, besides its report."
_COUNTS = ("count", "ops_before", "ops_after", "bytes")
_SCHEMA = 1


def _is_whole(data: dict[str, Any]) -> bool:
    """Whether a record has the form in which it was written; one that was damaged counts as missing."""
    files, outputs, item = data.get("files", {}), data.get("outputs", {}), data.get("item")
    kept = item is None or (isinstance(item, dict) and item.keys() == set(KEPT) and isinstance(item["code"], int)
                            and isinstance(item["left_out_passes"], list)
                            and all(isinstance(item[name], int | None) for name in _COUNTS))
    return (kept and (item is not None or data.get("state") != "done") and isinstance(data.get("source", ""), str)
            and isinstance(files, dict) and all(map(_is_print, files.values()))
            and isinstance(outputs, dict) and all(map(_are_numbers, outputs.values())))


def _is_print(each: Any) -> bool:
    return (isinstance(each, dict) and isinstance(each.get("size"), int) and _are_numbers(each.get("stamp"))
            and len(each["stamp"]) == len(("modified", "changed", "inode"))
            and isinstance(each.get("sha256", 0), str | None))


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, int) for each in values)


class Record:
    """The record of one `output` below `folder`. `state` is "none", "started", "failed" or "done"."""

    def __init__(self, folder: Path, output: Path) -> None:
        self.folder, self.output = folder, output
        place = folder / RECORDS / output.relative_to(folder)
        self.path = place.with_name(f"{place.name}.json")
        self.report = place.with_name(f"{place.name}.report.json")
        self.data = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) and data.get("schema") == _SCHEMA and _is_whole(data) else {}

    @property
    def state(self) -> str:
        return str(self.data.get("state", "none"))

    @property
    def source(self) -> str:
        """The path of the package that the result was made of; empty where there is no result."""
        return str(self.data.get("source", ""))

    def is_untouched(self) -> bool:
        """Whether the result lies there as it was written, or half of a run may have left it there."""
        return self.state == "started" or ("outputs" in self.data and self.data["outputs"] == stamps(self.output))

    def is_of(self, source: str) -> bool:
        """Whether the result was made of what is in package `source` now. May have to read the package."""
        now = same(self.data.get("files", {}), source)
        if now is not None and now != self.data["files"]:  # not to be read again the next time
            self.data["files"] = now
            self._write(self.data)
        return now is not None

    def start(self) -> None:
        """Say that the result may appear from now on."""
        self._write({**self.data, "state": "started"})

    def give_up(self, report: dict[str, Any] | None = None) -> None:
        """Say that there is no new result; one of earlier is still known. `report` says why."""
        if report is not None:
            write_whole(self.report, json.dumps(report, allow_nan=False))
        if self.data or report is not None:
            self._write({**self.data, "state": "failed"})
        else:
            self.path.unlink(missing_ok=True)

    def finish(self, report: dict[str, Any], **facts: Any) -> None:
        """Say that the result is there, and what it is made of."""
        write_whole(self.report, json.dumps(report, allow_nan=False))
        self._write({**facts, "state": "done", "outputs": stamps(self.output)})

    def _write(self, data: dict[str, Any]) -> None:
        write_whole(self.path, json.dumps({**data, "schema": _SCHEMA, "tool": "mil-ane-passes"}, allow_nan=False))


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all, in a folder that is made if need be; one that is there is replaced."""
    with refusals(path, "the file"):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
