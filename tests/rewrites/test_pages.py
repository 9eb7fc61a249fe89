"""The page of every rewrite says why it is there, when it acts, how exact it is and what it costs."""

from __future__ import annotations

import inspect

import pytest

from mil_ane_passes.passes.registry import get_all_rewrites


@pytest.mark.parametrize("rule", get_all_rewrites().values(), ids=lambda rule: rule.name)
def test_every_part_is_there_once(rule):
    lines = (inspect.getdoc(rule) or "").splitlines()
    for part in ("why", "when", "exact", "cost"):
        assert len([line for line in lines if line.startswith(f"{part:<8}") and line[8:].strip()]) == 1, part
