"""The result of processing many packages, as data, as JSON and as text."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._version import make_json_header
from ..report.table import format_table
from ..utils.text_format import format_count, format_lines, format_short_repr

__all__ = ["BatchItem", "BatchReport"]


@dataclass
class BatchItem:
    """The result for one package.

    `status`: "written", "unchanged" (copied as it is), "not verified" or "dry run" of `rewrite`, "clean", "findings" or
    "below limit" (fewer ops on the ANE than `fail_under`) of `lint`; "up to date" (the result of an earlier run was
    kept), "failed" or "not run" (interrupted) of both. `code` is the exit code of the command for this package alone.
    `count` is the number of rewritten matches, or of findings that are not notes; `bytes` the size of the package in
    bytes, of `rewrite` the new one, of `lint` the linted one; `seconds` wall time.
    """

    name: str
    source: str
    output: str | None
    status: str = "not run"
    code: int = 2
    count: int | None = None
    ops_before: int | None = None
    ops_after: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    error: str = ""
    left_out_passes: list[str] = field(default_factory=list)
    "The passes of a preset that `rewrite` left out, as they broke the equivalence check."
    failed_passes: list[str] = field(default_factory=list)
    "The passes of a preset that `rewrite` rolled back, as they failed with an error."
    upgraded: bool = False
    "The model is a NeuralNetwork and was read as an ML Program; in what way is in `report`."
    report_file: str | None = None
    "The path of the JSON of the command's own report."
    held: dict[str, Any] | None = None
    "The report itself, if it is not stored in a file."

    @property
    def report(self) -> dict[str, Any] | None:
        """The command's own report as a dictionary, read from its file on access; None if there is no report."""
        if self.report_file is None:
            return self.held
        found: dict[str, Any] = json.loads(Path(self.report_file).read_text(encoding="utf-8"))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "source": self.source, "output": self.output, "status": self.status, "exit": self.code,
            "count": self.count, "ops": {"before": self.ops_before, "after": self.ops_after}, "bytes": self.bytes,
            "seconds": None if self.seconds is None else round(self.seconds, 6), "error": self.error or None,
            "left_out_passes": self.left_out_passes, "failed_passes": self.failed_passes, "report": self.report,
            **({"upgraded": True} if self.upgraded else {}),
        }


@dataclass
class BatchReport:
    """The results of all packages, in the order of the sources.

    `command` is "rewrite" or "lint", `seconds` wall time.
    """

    command: str
    folder: str | None
    items: list[BatchItem] = field(default_factory=list)
    seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)
    "ExecuTorch programs (.pte) in the folders, which are not read."

    @property
    def exit_code(self) -> int:
        """The largest exit code of the items: 2 if one could not be run, 1 if one is not verified, has findings, or is
        below the required share, else 0."""
        return max((item.code for item in self.items), default=0)

    def counts(self) -> dict[str, int]:
        """Count the packages of each status."""
        return dict(sorted(Counter(item.status for item in self.items).items()))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `batch --format json` prints."""
        return {
            **make_json_header("batch"), "each": self.command,
            "folder": self.folder, "exit": self.exit_code, "counts": self.counts(), "seconds": round(self.seconds, 6),
            "items": [item.to_dict() for item in self.items], "skipped": self.skipped,
        }

    def __repr__(self) -> str:
        return format_short_repr(self, command=self.command, folder=self.folder, packages=len(self.items),
                                 counts=self.counts(), exit_code=self.exit_code)

    def __str__(self) -> str:
        head = ("name", "status", "fired" if self.command == "rewrite" else "findings", "ops", "bytes", "seconds", "")
        align = (str.ljust, str.ljust, *(str.rjust,) * 4, str.ljust)
        return format_lines([*format_table(head, align, map(_format_cells, self.items)), self._format_outcome(),
                             *self._format_skipped()])

    def _format_skipped(self) -> list[str]:
        many = format_count(len(self.skipped), "ExecuTorch program")
        return [f"{many} not read ({', '.join(self.skipped)}): lint and rewrite read them, one at a time"
                ] if self.skipped else []

    def _format_outcome(self) -> str:
        spoken = {"findings": "with findings", "below limit": "below the limit"}
        parts = ", ".join(f"{number} {spoken.get(status, status)}" for status, number in self.counts().items())
        many = format_count(len(self.items), "package")
        return f"{many} in {self.seconds:.1f} s: {parts or 'nothing done'}"


def _format_cells(item: BatchItem) -> tuple[str, ...]:
    ops = "" if item.ops_before is None else str(item.ops_before)
    if item.ops_after not in (None, item.ops_before):
        ops += f" -> {item.ops_after}"
    seconds = "" if item.seconds is None else f"{item.seconds:.1f}"
    without = ", ".join(f"ane::{name}" for name in [*item.left_out_passes, *item.failed_passes])
    notes = ["upgraded from a NeuralNetwork"] * item.upgraded + [f"without {without}"] * bool(without)
    error = " ".join(item.error.split()) or ", ".join(notes)
    return item.name, item.status, _format_count(item.count), ops, _format_count(item.bytes), seconds, error


def _format_count(value: int | None) -> str:
    return "" if value is None else str(value)
