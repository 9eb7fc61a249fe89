"""What holds for all fault models: off unless named, fp16 only unless said, shapes and types kept, in nested blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

from mil_ane_passes.runtime import QUIRKS
from mil_ane_passes.runtime.quirks import describe_quirks
from tests.runtime.helpers import run, same_bits
from tests.runtime.quirks.cases import CASES, PRECISIONS
from tests.without_torch import without_torch

#: under precision float16 the declared type alone already gives what these imitate
_TYPED = {"exp_overflow", "square_overflow"}


def test_each_has_a_case() -> None:
    assert sorted(CASES) == sorted(QUIRKS)


def test_each_is_described() -> None:
    rows = describe_quirks()
    assert [row.name for row in rows] == sorted(QUIRKS)
    for row in rows:
        assert row.summary.endswith(".") and len(row.summary) <= 120 and "|" not in row.summary
        assert row.sources and all(source.startswith("https://") for source in row.sources)


def test_describing_needs_no_torch() -> None:
    code = "from mil_ane_passes.runtime.quirks import describe_quirks; print(len(describe_quirks()))"
    assert int(without_torch(code).stdout) == len(QUIRKS)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_fires_only_when_named(name: str, precision: str) -> None:
    case = CASES[name]
    right = run(case.build, {"x": case.fires}, precision=precision)[0]
    faulty = run(case.build, {"x": case.fires}, precision=precision, quirks=[name])[0]
    assert faulty.shape == right.shape and faulty.dtype == right.dtype
    if precision != "float16" or name not in _TYPED:
        assert not np.array_equal(faulty, right, equal_nan=True)
    others = [other for other in QUIRKS if other != name]
    same_bits(run(case.build, {"x": case.fires}, precision=precision, quirks=others)[0], right)
    same_bits(run(case.build, {"x": case.fires}, precision=precision, quirks=[name, name])[0], faulty)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_spares_what_is_below_the_cliff(name: str, precision: str) -> None:
    case = CASES[name]
    right = run(case.build, {"x": case.spared}, precision=precision)[0]
    assert np.isfinite(right).all()
    np.testing.assert_array_equal(run(case.build, {"x": case.spared}, precision=precision, quirks=[name])[0], right)


@pytest.mark.parametrize("name", CASES)
def test_what_is_declared_fp32_is_spared(name: str) -> None:
    case = CASES[name]
    wide = {"x": case.fires.astype(np.float32)}
    right, faulty = run(case.build, wide)[0], run(case.build, wide, quirks=[name])[0]
    assert np.array_equal(right, faulty, equal_nan=True) is not QUIRKS[name].any_float
    # The one report that names no type.
    assert QUIRKS[name].any_float is (name == "conv_transpose_1d_bias")


@pytest.mark.parametrize("name", CASES)
def test_it_strikes_in_nested_blocks(name: str) -> None:
    case = CASES[name]
    plain = run(case.build, {"x": case.fires}, quirks=[name])[0]

    def branched(x: Any, go: Any) -> Any:
        return mb.cond(pred=go, _true_fn=lambda: case.build(x), _false_fn=lambda: case.build(mb.mul(x=x, y=x)))

    nested = run(branched, {"x": case.fires, "go": np.array(True)}, quirks=[name])[0]
    np.testing.assert_array_equal(nested, plain)


@pytest.mark.parametrize("name", CASES)
def test_it_strikes_under_symbolic_extents(name: str) -> None:
    case = CASES[name]
    x = np.concatenate([case.fires, case.fires])
    fixed = run(case.build, {"x": x}, quirks=[name])[0]
    found = run(case.build, {"x": x}, quirks=[name], shapes={"x": (get_new_symbol(), *x.shape[1:])})[0]
    np.testing.assert_array_equal(found, fixed)
