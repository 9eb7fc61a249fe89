"""The house rules that can be counted: short functions, documented modules, and a word list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "mil_ane_passes").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short(path):
    long = [f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
            for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            and node.end_lineno - node.lineno + 1 > 40]
    assert not long, long


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "no docstring"


def test_nothing_is_left_to_do_in_secret():
    leftover = re.compile(r"\b(TODO|FIXME|XXX|xfail|type: ignore)\b")
    found = [f"{path.relative_to(ROOT)}: {match[0]}"
             for path in SOURCES for match in leftover.finditer(path.read_text())]
    assert not found, found
