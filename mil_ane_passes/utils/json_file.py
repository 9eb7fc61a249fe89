"""Reading of JSON files supplied by users.

The forms that several commands read are described here, so that a missing file is reported before modules that need
coremltools are imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = ["BASELINE_FORM", "MEASUREMENT_FORM", "expect_json_file", "read_json"]

BASELINE_FORM = "make one with `mil-ane-passes lint IN --format json -o FILE`"
MEASUREMENT_FORM = ("expected the result.json of measure.py (mil-ane-passes mac-script writes it), or a dumped compute "
                    "plan")


def expect_json_file(who: str, expected: str) -> Callable[[Path], None]:
    """Return a check of a path that raises the error of `read_json` for a missing file."""
    return lambda file: _check_exists(file, who, expected)


def read_json(path: str | PathLike[str], who: str, expected: str) -> Any:
    """Read a JSON file. Raises InputError, which names `who` requested the file and what was `expected`."""
    file = Path(path)
    _check_exists(file, who, expected)
    try:
        return json.loads(file.read_bytes())  # in any encoding of Unicode: PowerShell writes UTF-16
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{who}: '{file}' cannot be read as JSON ({error}); {expected}", option=who) from error


def _check_exists(file: Path, who: str, expected: str) -> None:
    if file.is_dir():
        raise InputError(f"{who}: '{file}' is a folder; {expected}", option=who)
    if not file.is_file():
        raise InputError(f"{who}: no file '{file}'; {expected}", option=who)
