"""No unfinished work is left in the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "mil_ane_passes").rglob("*.py"))


def test_nothing_is_left_to_do_in_secret():
    leftover = re.compile(r"\b(TODO|FIXME|XXX|xfail|type: ignore)\b")
    found = [f"{path.relative_to(ROOT)}: {match[0]}"
             for path in SOURCES for match in leftover.finditer(path.read_text())]
    assert not found, found
