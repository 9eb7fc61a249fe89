"""A pytest plugin: runs one in so many of the tests that were collected, and of each file at least one."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--one-in", type=int, default=1, help="run one in so many tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    every = config.getoption("one_in")
    seen: dict[str, int] = {}
    kept, left = [], []
    for item in items:
        index = seen[item.location[0]] = seen.get(item.location[0], -1) + 1
        (left if index % every else kept).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)
