"""Reading of JSON files supplied by users."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = ["read_json"]


def read_json(path: str | PathLike[str], who: str, expected: str) -> Any:
    """Read a JSON file. Raises InputError, which names `who` requested the file and what was `expected`."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{who}: no file '{file}'; {expected}", option=who)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{who}: '{file}' cannot be read as JSON ({error}); {expected}", option=who) from error
