"""Records of what the tools of the lab measured, as JSON files, and the Markdown tables that are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["ROOT", "format_head", "format_row", "format_table", "read_record", "write_record"]


def read_record(path: Path, default: Any = None) -> Any:
    """Read what was recorded last; `default` where nothing was and there is one."""
    if default is not None and not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def write_record(path: Path, record: Any, indent: int = 1) -> None:
    """Write a record; paths of the project's files in its texts become relative to the project."""
    text = json.dumps(record, indent=indent).replace(f"{ROOT}/", "")
    path.write_text(text + "\n", encoding="utf-8")


def format_row(cells: Iterable[object]) -> str:
    """Format a line of a table; a bar in a cell would end it."""
    escaped = (str(cell).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def format_head(names: Iterable[str]) -> str:
    """Format the two lines that a table begins with."""
    names = list(names)
    return f"{format_row(names)}\n{format_row('---' for _ in names)}"


def format_table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([format_head(names), *map(format_row, rows)])
