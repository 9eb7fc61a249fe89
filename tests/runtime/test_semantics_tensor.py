"""Ops that make, join, split, order and select: against numpy, on values and shapes their own op tests leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import Array, close, draw, run, same_bits
from tests.runtime.laws import law

PRECISIONS = ("float64", "float32", "float16")
#: few values, so that there are ties
TIES = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 2.0, np.inf, np.nan])
FLOATS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=TIES)
INTS = hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), elements=st.integers(-(2**31), 3))


@law
@given(
    x=st.one_of(FLOATS, INTS), axis=st.integers(-1, 0), ascending=st.booleans(), precision=st.sampled_from(PRECISIONS)
)
def test_order(x: Array, axis: int, ascending: bool, precision: str) -> None:
    """Ties keep their order and NaN comes last, as in numpy's stable sort of x or -x."""
    key = x.astype(np.float64) * (1 if ascending else -1)
    expected = np.argsort(key, axis=axis, kind="stable")

    def build(x: Any) -> Any:
        options = {"axis": axis, "ascending": ascending}
        return mb.argsort(x=x, **options), *mb.topk(x=x, k=x.shape[axis], **options)

    order, values, indices = run(build, {"x": x}, precision=precision)
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_topk_of_narrow_integers(dtype: Any) -> None:
    """-x would wrap: the smallest of the signed ones and all of the unsigned ones."""
    info = np.iinfo(dtype)
    x = np.array([5, info.max, info.min, 7], dtype)

    def build(x: Any) -> Any:
        return mb.topk(x=x, k=3, sort=False, output_indices_dtype="uint16")

    values, indices = run(build, {"x": x})
    same_bits(values, np.array([info.max, 7, 5], dtype))
    same_bits(indices, np.array([1, 3, 0], np.uint16))


def test_topk_without_indices() -> None:
    x = np.array([[3, 1, 2]], np.int32)

    def build(x: Any) -> Any:
        return mb.topk(x=x, k=2, return_indices=False, ascending=True)

    (values,) = run(build, {"x": x})
    same_bits(values, np.array([[1, 2]], np.int32))


STEPS = st.sampled_from([0.1, 0.25, 0.3, -0.1, -0.7, 1.0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@law
@given(tenths=st.tuples(st.integers(-20, 20), st.integers(-20, 20)), step=STEPS, precision=st.sampled_from(PRECISIONS))
def test_ranges_of_floats(dtype: Any, tenths: tuple[int, int], step: float, precision: str) -> None:
    """As long as numpy's, at every precision: 0.3 / 0.1 is just 3 in float32, and more than 3 in float64."""
    start, end, step = dtype(tenths[0] / 10), dtype(tenths[1] / 10), dtype(step)
    expected = np.arange(start, end, step)
    found = run(lambda start: mb.range_1d(start=start, end=end, step=step), {"start": start}, precision=precision)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, start + np.arange(len(expected)) * np.float64(step), rtol=2e-3, atol=2e-3)


@law
@given(start=st.integers(-9, 9), end=st.integers(-9, 9), step=st.integers(-3, 3).filter(bool))
def test_ranges_of_integers(start: int, end: int, step: int) -> None:
    feeds = {"start": np.int32(start), "end": np.int32(end), "step": np.int32(step)}
    same_bits(run(mb.range_1d, feeds)[0], np.arange(start, end, step, dtype=np.int32))


def test_a_range_without_a_step() -> None:
    feeds = {"start": np.int32(0), "end": np.int32(3), "step": np.int32(0)}
    with pytest.raises(InputError, match="step is 0"):
        run(mb.range_1d, feeds)


@law
@given(x=INTS, exclusive=st.booleans(), reverse=st.booleans())
def test_cumsum_wraps(x: Array, exclusive: bool, reverse: bool) -> None:
    flipped = np.flip(x, 0) if reverse else x
    sums = np.cumsum(flipped, 0, dtype=np.int32)
    if exclusive:
        sums = np.concatenate([np.zeros_like(sums[:1]), sums[:-1]])
    expected = np.flip(sums, 0) if reverse else sums
    same_bits(run(lambda x: mb.cumsum(x=x, exclusive=exclusive, reverse=reverse), {"x": x})[0], expected.copy())


@law
@given(lower=st.integers(-1, 4), upper=st.integers(-1, 4), shape=st.sampled_from([(3, 4), (2, 4, 2), (1, 2, 3, 3)]))
def test_band_part(lower: int, upper: int, shape: tuple[int, ...]) -> None:
    x = draw(0, *shape)
    expected = np.tril(x, upper) if upper >= 0 else x
    expected = np.triu(expected, -lower) if lower >= 0 else expected
    close(run(lambda x: mb.band_part(x=x, lower=lower, upper=upper), {"x": x})[0], expected)
    flags = run(lambda x: mb.band_part(x=x, lower=lower, upper=upper), {"x": x > 0})[0]
    np.testing.assert_array_equal(flags, (x > 0) & (expected != 0))


def test_outside_the_band_everything_is_zero() -> None:
    """The documentation's words, not its formula: 0 times NaN would be NaN."""
    found = run(lambda x: mb.band_part(x=x, lower=0, upper=0), {"x": np.full((2, 2), np.nan, np.float32)})[0]
    np.testing.assert_array_equal(found, [[np.nan, 0], [0, np.nan]])


@law
@given(
    indices=hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=3), elements=st.integers(-2, 4)),
    size=st.integers(0, 3), axis=st.integers(-2, 1),
)  # fmt: skip
def test_one_hot(indices: Array, size: int, axis: int) -> None:
    """An index outside has no hot element: -1 does not count from the end."""
    expected = np.moveaxis(indices[..., None] == np.arange(size), -1, axis)

    def build(indices: Any, size: Any) -> Any:
        numbers = mb.one_hot(indices=indices, one_hot_vector_size=size, axis=axis, on_value=2.5, off_value=-1.0)
        return numbers, mb.one_hot(indices=indices, one_hot_vector_size=size, axis=axis, on_value=True, off_value=False)

    numbers, flags = run(build, {"indices": indices, "size": np.int32(size)})
    np.testing.assert_array_equal(numbers, np.where(expected, 2.5, -1.0))
    same_bits(flags, np.ascontiguousarray(expected))


@law
@given(x=FLOATS)
def test_non_zero(x: Array) -> None:
    """NaN is not zero, -0.0 is."""
    same_bits(run(lambda x: mb.non_zero(x=x), {"x": x})[0], np.argwhere(x).astype(np.int32))


@law
@given(
    x=hnp.arrays(np.float32, (3, 4), elements=TIES), pad=st.tuples(*[st.integers(0, 2)] * 4),
    mode=st.sampled_from(["constant", "reflect", "replicate"]),
)  # fmt: skip
def test_pad(x: Array, pad: tuple[int, ...], mode: str) -> None:
    options = {"mode": "edge" if mode == "replicate" else mode}
    expected = np.pad(x, np.reshape(pad, (2, 2)), **options)

    def build(x: Any, pad: Any) -> Any:
        return mb.pad(x=x, pad=pad, mode=mode)

    np.testing.assert_array_equal(run(build, {"x": x, "pad": np.array(pad, np.int32)})[0], expected)


def test_joining_and_splitting_scalars_and_nothing() -> None:
    one, none, pair = np.float32(3), np.zeros((0, 2), np.float32), np.ones((1, 2), np.float32)

    def build(one: Any, none: Any, pair: Any) -> Any:
        parts = mb.split(x=mb.concat(values=[none, pair, none], axis=-2), split_sizes=[0, 1], axis=0)
        return mb.concat(values=[one, one], axis=0), mb.stack(values=[one, one], axis=-1), *parts

    joined, stacked, nothing, something = run(build, {"one": one, "none": none, "pair": pair})
    close(joined, [3, 3])
    close(stacked, [3, 3])
    close(nothing, none)
    close(something, pair)


def test_filling() -> None:
    def build(shape: Any, like: Any) -> Any:
        return mb.fill(shape=shape, value=True), mb.fill(shape=shape), mb.fill_like(ref_tensor=like, value=2.5)

    flags, zeros, like = run(build, {"shape": np.array([2, 1], np.int32), "like": np.int32(7)})
    same_bits(flags, np.ones((2, 1), np.bool_))
    close(zeros, np.zeros((2, 1)))
    close(like, 2.5)
