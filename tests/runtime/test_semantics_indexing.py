"""Gathers and scatters: against loops over numpy arrays, with batch axes, narrow and negative indices, rank 0."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import example, given
from hypothesis import strategies as st

from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import Array, close, draw, run, same_bits
from tests.runtime.laws import law

X = draw(0, 2, 3, 4, 5)
OPSETS = (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18)


def taken(x: Array, indices: Array, axis: int, batch_dims: int) -> Array:
    """`tf.gather`, image by image."""
    if batch_dims == 0:
        return np.take(x, indices, axis)
    return np.stack([taken(x[each], indices[each], axis - 1, batch_dims - 1) for each in range(len(x))])


@law
@given(
    data=st.data(), axis=st.integers(-4, 3), batch_dims=st.integers(0, 2), dtype=st.sampled_from([np.int16, np.int32])
)
def test_gather_with_batch_axes(data: Any, axis: int, batch_dims: int, dtype: Any) -> None:
    place = axis % 4
    batch_dims = min(batch_dims, place)
    shape = X.shape[:batch_dims] + data.draw(st.sampled_from([(), (2,), (2, 3), (0,)]))
    extent = X.shape[place]
    indices = np.random.default_rng(data.draw(st.integers(0, 9))).integers(-extent, extent, shape).astype(dtype)

    def build(x: Any, indices: Any) -> Any:
        return mb.gather(x=x, indices=indices, axis=axis, batch_dims=batch_dims)

    found = run(build, {"x": X, "indices": indices}, opset=ct.target.iOS16)[0]
    close(found, taken(X, indices, place, batch_dims))


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("table", [draw(0, 5), draw(0, 5, 3)])
@pytest.mark.parametrize("indices", [np.array(1, np.int32), np.array([[4, 0]], np.int32), np.zeros((0,), np.int32)])
def test_rows_of_a_constant_table(opset: Any, table: Array, indices: Array) -> None:
    found = run(lambda indices: mb.gather(x=table, indices=indices, axis=0), {"indices": indices}, opset=opset)[0]
    close(found, np.take(table, indices, 0))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_tables_and_indices(dtype: Any) -> None:
    """Indices of 200 and more are no negative ones."""
    x = np.arange(251).astype(dtype)
    indices = np.array([0, 100 if dtype == np.int8 else 250], np.int8 if dtype == np.int8 else np.uint8)

    def build(x: Any, indices: Any) -> Any:
        along = mb.gather_along_axis(x=x, indices=indices)
        nd = mb.gather_nd(x=x, indices=mb.expand_dims(x=indices, axes=[1]))
        return mb.gather(x=x, indices=indices, axis=0), along, nd

    for found in run(build, {"x": x, "indices": indices}):
        same_bits(found, x[indices])


@law
@given(seed=st.integers(0, 99), axis=st.integers(-4, 3), count=st.integers(0, 6))
def test_along_an_axis(seed: int, axis: int, count: int) -> None:
    shape = list(X.shape)
    shape[axis] = count
    indices = np.random.default_rng(seed).integers(0, X.shape[axis], shape).astype(np.int32)
    updates, expected = draw(seed, *shape), X.astype(np.float64)
    for place in np.ndindex(*shape):
        target = list(place)
        target[axis] = indices[place]
        expected[tuple(target)] -= updates[place]

    def build(x: Any, indices: Any, updates: Any) -> Any:
        changed = mb.scatter_along_axis(data=x, indices=indices, updates=updates, axis=axis, mode="sub")
        return mb.gather_along_axis(x=x, indices=indices, axis=axis), changed

    gathered, changed = run(build, {"x": X, "indices": indices, "updates": updates})
    close(gathered, np.take_along_axis(X, indices, axis))
    close(changed, expected)


@law
@given(seed=st.integers(0, 99), depth=st.integers(1, 4), outer=st.sampled_from([(1,), (3,), (2, 2)]))
def test_slices_by_index_vectors(seed: int, depth: int, outer: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    indices = np.stack([rng.integers(0, extent, outer) for extent in X.shape[:depth]], -1).astype(np.int32)
    updates, expected = draw(seed, *outer, *X.shape[depth:]), X.astype(np.float64)
    for place in np.ndindex(*outer):
        target = tuple(indices[place])
        expected[target] = np.maximum(expected[target], updates[place])

    def build(x: Any, indices: Any, updates: Any) -> Any:
        return mb.gather_nd(x=x, indices=indices), mb.scatter_nd(data=x, indices=indices, updates=updates, mode="max")

    gathered, changed = run(build, {"x": X, "indices": indices, "updates": updates})
    close(gathered, X[tuple(np.moveaxis(indices, -1, 0))])
    close(changed, expected)


@law
@given(seed=st.integers(0, 99), batch_dims=st.integers(0, 2), depth=st.integers(1, 2))
def test_index_vectors_with_batch_axes(seed: int, batch_dims: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    extents = X.shape[batch_dims : batch_dims + depth]
    outer = (*X.shape[:batch_dims], 3)
    indices = np.stack([rng.integers(0, extent, outer) for extent in extents], -1).astype(np.int32)

    def build(x: Any, indices: Any) -> Any:
        return mb.gather_nd(x=x, indices=indices, batch_dims=batch_dims)

    expected = [X[(*place[:batch_dims], *indices[place])] for place in np.ndindex(*outer)]
    close(run(build, {"x": X, "indices": indices})[0], np.reshape(expected, (*outer, *X.shape[batch_dims + depth :])))


MODES = {
    "update": lambda old, new: new, "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum,
    "min": np.minimum, "div": lambda old, new: np.trunc(np.float64(old) / new) if new else 0,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@law
@given(
    data=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3),
    changes=st.lists(st.tuples(st.integers(-3, 2), st.integers(-5, 5)), min_size=1, max_size=5),
)
@example(data=[0, -(2**31), 7], changes=[(1, -1), (1, 2), (2, -2), (2, 2)])
@example(data=[-(2**31), -(2**31), 7], changes=[(1, 0), (0, -1), (0, -1), (1, -1)])
def test_scatters_of_integers(mode: str, data: list[int], changes: list[tuple[int, int]]) -> None:
    """Sums and products wrap; quotients lose their fraction, a division by zero is 0; updates come one by one."""
    x, expected = np.array(data, np.int32), [int(each) for each in data]
    for index, update in changes:
        exact = int(MODES[mode](expected[index], update))
        expected[index] = (exact + 2**31) % 2**32 - 2**31
    indices, updates = (np.array(each, np.int32) for each in zip(*changes))

    def build(x: Any, indices: Any, updates: Any) -> Any:
        return mb.scatter(data=x, indices=indices, updates=updates, mode=mode)

    found = run(build, {"x": x, "indices": indices, "updates": updates}, opset=ct.target.iOS15)[0]
    same_bits(found, np.array(expected, np.int32))


def test_scatters_add_unless_told_otherwise() -> None:
    """The documentation of `scatter` says `update`; its own default, and what it says of the other two, is `add`."""
    feeds = {"x": np.array([1, 2], np.float32), "indices": np.array([1], np.int32), "updates": np.float32([5])}
    for opset in (ct.target.iOS15, ct.target.iOS17):
        for op in (mb.scatter, mb.scatter_along_axis):

            def build(x: Any, indices: Any, updates: Any, op: Any = op) -> Any:
                return op(data=x, indices=indices, updates=updates)

            close(run(build, feeds, opset=opset)[0], [1, 7])


@pytest.mark.parametrize("index", [-1, 4, -5])
@pytest.mark.parametrize("name", ["gather", "gather_along_axis", "scatter", "scatter_along_axis"])
def test_validated_indices(name: str, index: int) -> None:
    """Since iOS17 a negative index is out of bounds where indices are validated."""
    feeds = {"x": draw(0, 4), "indices": np.array([index], np.int32), "updates": draw(1, 1)}

    def build(validate: bool, opset: Any) -> Any:
        def inner(x: Any, indices: Any, updates: Any) -> Any:
            options = {"validate_indices": validate} if opset >= ct.target.iOS17 else {}
            if name.startswith("gather"):
                return getattr(mb, name)(x=x, indices=indices, axis=0, **options)
            return getattr(mb, name)(data=x, indices=indices, updates=updates, axis=0, **options)

        return run(inner, feeds, opset=opset)

    with pytest.raises(InputError, match=rf"{name} .*: found indices {index}\.\.{index}, expected 0\.\.3"):
        build(True, ct.target.iOS17)
    if index == -1:
        assert len(build(False, ct.target.iOS15)) == 1
    else:
        with pytest.raises(InputError, match=r"expected -4\.\.3"):
            build(False, ct.target.iOS17)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("mode", "expected"), [("mul", np.inf), ("div", np.inf), ("add", np.inf)])
def test_scatters_that_overflow_give_infinities_without_a_warning(mode, expected):
    @mb.program(input_specs=[mb.TensorSpec((2,), types.fp32)])
    def program(x):
        update = {"mul": 3e38, "div": 0.0, "add": 3e38}[mode]
        return mb.scatter(data=x, indices=np.int32([0]), updates=np.float32([update]), mode=mode)

    (found,) = Runtime(program, precision="float32")({"x": np.float32([3e38, 1])}).values()
    assert found.tolist() == [expected, 1]
