"""Reductions: against numpy, on scalars, on nothing, on integers that overflow, on infinities and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import Array, close, run, same_bits
from tests.runtime.laws import law

PRECISIONS = ("float64", "float32", "float16")
SPECIAL = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 1.5, np.inf, np.nan])
AXES = st.one_of(st.none(), st.sets(st.sampled_from([0, -2, 2]), max_size=3).map(sorted))

REDUCTIONS: dict[str, Any] = {
    "reduce_l1_norm": lambda x, **k: np.abs(x).sum(**k),
    "reduce_l2_norm": lambda x, **k: np.sqrt(np.square(x).sum(**k)),
    "reduce_log_sum": lambda x, **k: np.log(x.sum(**k)),
    "reduce_log_sum_exp": lambda x, **k: np.log(np.exp(x).sum(**k)),
    "reduce_max": np.max,
    "reduce_mean": np.mean,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
    "reduce_sum": np.sum,
    "reduce_sum_square": lambda x, **k: np.square(x).sum(**k),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@law
@given(
    x=hnp.arrays(np.float32, (2, 3, 2), elements=SPECIAL), axes=AXES, keep=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
)  # fmt: skip
def test_special_values(name: str, x: Array, axes: Any, keep: bool, precision: str) -> None:
    """NaN comes through, infinities behave as in IEEE arithmetic; an empty list of axes reduces nothing."""
    with np.errstate(all="ignore"):
        axis = None if axes is None else tuple(axes)
        expected = REDUCTIONS[name](x.astype(np.float64), axis=axis, keepdims=keep)
    options = {} if axes is None else {"axes": np.array(axes, np.int32)}
    found = run(lambda x: getattr(mb, name)(x=x, keep_dims=keep, **options), {"x": x}, precision=precision)[0]
    close(found, expected)


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_prod", "reduce_sum_square", "reduce_max", "reduce_min"])
@law
@given(x=hnp.arrays(np.int32, (2, 3), elements=st.integers(-(2**31), 2**31 - 1)))
def test_integers_wrap(name: str, x: Array) -> None:
    expected = REDUCTIONS[name](x.astype(object), axis=1)
    wrapped = [(int(each) + 2**31) % 2**32 - 2**31 for each in expected]
    same_bits(run(lambda x: getattr(mb, name)(x=x, axes=[1]), {"x": x})[0], np.array(wrapped, np.int32))


@law
@given(x=hnp.arrays(np.int32, (2, 3), elements=st.integers(-1000, 1000)))
def test_integers_without_an_integer_answer(x: Array) -> None:
    """The exact answer loses its fraction."""
    exact = x.astype(np.float64)
    for name in ("reduce_mean", "reduce_l2_norm"):
        expected = np.trunc(REDUCTIONS[name](exact, axis=1)).astype(np.int32)
        same_bits(run(lambda x, name=name: getattr(mb, name)(x=x, axes=[1]), {"x": x})[0], expected)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_scalars(name: str) -> None:
    for keep in (True, False):
        found = run(lambda x, keep=keep: getattr(mb, name)(x=x, keep_dims=keep), {"x": np.float32(2.5)})[0]
        close(found, REDUCTIONS[name](np.float64(2.5)))


def test_nothing() -> None:
    x = np.zeros((0, 2), np.float32)
    for name, expected in (("reduce_sum", 0), ("reduce_prod", 1), ("reduce_l2_norm", 0), ("reduce_mean", np.nan)):
        close(run(lambda x, name=name: getattr(mb, name)(x=x, axes=[0]), {"x": x})[0], np.full(2, expected))
    for name in ("reduce_max", "reduce_min", "reduce_argmax"):
        options: dict[str, Any] = {"axis": 0} if name.endswith("argmax") else {"axes": [0]}
        with pytest.raises(InputError, match=f"{name} .* non-zero size"):
            run(lambda x, name=name, options=options: getattr(mb, name)(x=x, **options), {"x": x})


@pytest.mark.parametrize("name", ["reduce_argmax", "reduce_argmin"])
@law
@given(
    x=hnp.arrays(np.float32, (2, 3, 4), elements=SPECIAL), axis=st.integers(-3, 2), keep=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
)  # fmt: skip
def test_places_of_extremes(name: str, x: Array, axis: int, keep: bool, precision: str) -> None:
    """The first of equal ones; NaN is both the largest and the smallest, as in numpy."""
    expected = getattr(np, name.removeprefix("reduce_"))(x, axis=axis, keepdims=keep)

    def build(x: Any) -> Any:
        op = getattr(mb, name)
        return op(x=x, axis=axis, keep_dims=keep), op(x=x, axis=axis, keep_dims=keep, output_dtype="uint16")

    for found, dtype in zip(run(build, {"x": x}, precision=precision), (np.int32, np.uint16)):
        same_bits(found, expected.astype(dtype))
