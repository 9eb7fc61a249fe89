"""Which cases the fast run leaves to the slow one: of each model it takes one way of capturing it, not all of them."""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

WAYS_OF_CAPTURING = ("frontend", "way", "exported", "export")
"Parameters that say how torch captures a model: traced, scripted or exported. The choice differs from case to case."


def leave_to_slow(items: list[pytest.Item]) -> None:
    """Mark as slow all but one way of capturing each case."""
    cases = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if any(name in parameters for name in WAYS_OF_CAPTURING):
            # By the ids of the other parameters: values may be functions, which print differently in each process.
            ways = {str(parameters[name]) for name in WAYS_OF_CAPTURING if name in parameters}
            others = [part for part in item.callspec.id.split("-") if part not in ways]
            cases[item.nodeid.split("[")[0], "-".join(others)].append(item)
    for case, ways in cases.items():
        chosen = zlib.crc32(str(case).encode()) % len(ways)
        for position, item in enumerate(ways):
            if position != chosen:
                item.add_marker("slow")
