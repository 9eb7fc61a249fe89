"""The fast run converts each case by one of its frontends, which differs from case to case; the slow run by all."""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.parent.name == "patches" and "frontend" in parameters:
            others = {name: value for name, value in parameters.items() if name != "frontend"}
            place = item.nodeid.split("[")[0]
            cases[place, str(sorted(others.items(), key=str))].append(item)
    for case, frontends in cases.items():
        chosen = zlib.crc32(str(case).encode()) % len(frontends)
        for position, item in enumerate(frontends):
            if position != chosen:
                item.add_marker("slow")
