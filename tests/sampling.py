"""Selects the cases of the fast run: one way of capturing each model, and some cases of functions marked `sampled`."""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

WAYS_OF_CAPTURING = ("frontend", "way", "exported", "export")
"Parameters that say how torch captures a model: traced, scripted or exported. The choice differs from case to case."


def leave_to_slow(items: list[pytest.Item]) -> None:
    """Mark as slow what the fast run leaves out."""
    _choose_ways_of_capturing(items)
    _choose_cases(items)


def _choose_cases(items: list[pytest.Item]) -> None:
    """Mark as slow all but n cases of each function marked `sampled(n)`, of those that are not slow already."""
    cases = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (_, number), found in cases.items():
        # By checksum: neighbours in a table are alike, and the choice should not change when a case is added.
        for item in sorted(found, key=lambda item: zlib.crc32(item.nodeid.encode()))[number:]:
            item.add_marker("slow")


def _choose_ways_of_capturing(items: list[pytest.Item]) -> None:
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
