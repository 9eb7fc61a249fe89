"""Models of other converters have the framework's values after our passes, and the recorded ops off the ANE."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

import mil_ane_passes
from tests.lab.records import read_record

from . import table
from .__main__ import make_cases
from .cases import PINS, PLAIN, REWRITTEN, UNGUARDED, Result, find_missing, measure_case

PAGE = Path(mil_ane_passes.__file__).parent / "README.md"
RECORDED: dict[tuple[str, str], list[Result]] = defaultdict(list)
for _result in table.read_record():
    RECORDED[_result.converter, _result.name].append(_result)
FLOAT32_BOUND = 2e-3
"Relative to the framework in float32; the conversion rounds weights to float16."


@pytest.mark.slow
@pytest.mark.parametrize(("converter", "name"), RECORDED)
def test_values_are_the_frameworks_and_the_table_is_true(converter, name, tmp_path):
    if missing := find_missing(converter):
        pytest.skip(missing)
    (case,) = (case for case in make_cases(converter) if case.name == name)
    plain, *ours = results = list(measure_case(case, tmp_path))
    assert plain.way == PLAIN and plain.float32 <= FLOAT32_BOUND
    for each in ours:
        assert each.float32 <= 1.1 * plain.float32 + 1e-6, each.way
        assert each.float16 <= 2 * plain.float16 + 1e-3, each.way
        assert sum(each.unsupported.values()) <= sum(plain.unsupported.values()), each.way
    if version(converter) == PINS[converter][0]:
        assert list(map(_get_counts, results)) == list(map(_get_counts, RECORDED[converter, name])), (
            "run python -m tests.lab.converters --record")


def _get_counts(result: Result) -> tuple[object, ...]:
    return result.way, result.ops, result.unsupported, result.unknown


def test_the_record_is_complete():
    assert read_record(table.RECORD)["versions"] == {converter: pins[0] for converter, pins in PINS.items()}
    for (converter, _), results in RECORDED.items():
        orders = ["ours on theirs", "theirs on ours"] if converter == "stablehlo-coreml" else []
        assert [result.way for result in results] == [PLAIN, *orders, REWRITTEN, UNGUARDED]
    fixed = [name for (_, name), (plain, *ours) in RECORDED.items() if _count(plain) and not _count(ours[-1])]
    assert {"GRU by `lax.scan`", "conv net"} <= set(fixed), "some of the models are entirely on the ANE afterwards"


def _count(result: Result) -> int:
    return sum(result.unsupported.values())


def test_the_page_names_the_versions():
    text = PAGE.read_text()
    for converter, (pin, other) in PINS.items():
        assert f"`{converter}=={pin}`" in text and f"`{other}`" in text


@pytest.mark.slow
def test_the_package_imports_none_of_them():
    """Not even inside functions: they are no dependencies."""
    others = {"stablehlo_coreml", "jax", "jaxlib", "onnx2coreml", "onnx", "onnxruntime", "netron", "executorch"}
    for path in Path(mil_ane_passes.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
            assert not others & {name.partition(".")[0] for name in names}, path
