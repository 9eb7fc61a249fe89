"""Ops that only move elements: against numpy's indexing, with every mask and bound, and the declared shapes."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional

from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import close, draw, run, same_bits
from tests.runtime.laws import law

X = draw(0, 3, 4, 5)
#: narrow integers may hold bounds too; far out of range is legal for a slice, as in Python
BOUND = st.integers(-9, 9)
STRIDE = st.sampled_from([-3, -2, -1, 1, 2, 4])


@st.composite
def slicings(pick: Any, squeezes: bool = True) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """(operands of a slice of X, numpy's index for it)."""
    parts: dict[str, list[Any]] = {name: [] for name in ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze")}
    index: list[Any] = []
    for extent in X.shape:
        squeeze = squeezes and pick(st.booleans())
        first = pick(st.integers(-extent, extent - 1) if squeeze else BOUND)
        last, step, from_end, to_end = pick(BOUND), pick(STRIDE), pick(st.booleans()), pick(st.booleans())
        masks = (False if squeeze else from_end, to_end, squeeze)
        for name, value in zip(parts, (first, last, step, *masks)):
            parts[name].append(value)
        index.append(first if squeeze else slice(None if from_end else first, None if to_end else last, step))
    return {"squeeze_mask": parts.pop("squeeze"), **parts}, tuple(index)


@law
@given(slicing=slicings(), dtype=st.sampled_from([np.int8, np.int16, np.int32]))
def test_slices_are_numpys(slicing: Any, dtype: Any) -> None:
    options, index = slicing
    bounds = {name: np.array(options.pop(name), dtype) for name in ("begin", "end")}
    options["stride"] = np.array(options["stride"], dtype)

    def build(x: Any, begin: Any, end: Any) -> Any:
        return mb.slice_by_index(x=x, begin=begin, end=end, **options)

    found = run(build, {"x": X, **bounds})[0]
    np.testing.assert_array_equal(found, X[index])


@law
@given(slicing=slicings(), seed=st.integers(0, 9))
def test_updated_slices_are_numpys(slicing: Any, seed: int) -> None:
    options, index = slicing
    update = draw(seed, *X[index].shape)
    assume(update.ndim)
    bounds = {name: np.array(options.pop(name), np.int32) for name in ("begin", "end")}
    expected = X.copy()
    expected[index] = update

    def build(x: Any, update: Any, begin: Any, end: Any) -> Any:
        return mb.slice_update(x=x, update=update, begin=begin, end=end, **options)

    found = run(build, {"x": X, "update": update, **bounds})[0]
    np.testing.assert_array_equal(found, expected)


@law
@given(pick=st.data())
def test_slices_of_a_size(pick: Any) -> None:
    begin, size, index = [], [], []
    for extent in X.shape:
        first = pick.draw(st.integers(0, extent))
        count = pick.draw(st.sampled_from([-1, *range(extent - first + 1)]))
        begin.append(first - extent if first < extent and pick.draw(st.booleans()) else first)
        size.append(count)
        index.append(slice(first, extent if count == -1 else first + count))

    def build(x: Any, begin: Any) -> Any:
        return mb.slice_by_size(x=x, begin=begin, size=size)

    np.testing.assert_array_equal(run(build, {"x": X, "begin": np.array(begin, np.int32)})[0], X[tuple(index)])


@pytest.mark.parametrize("begin", [3, -5])
def test_a_slice_of_a_size_that_is_not_there(begin: int) -> None:
    def build(x: Any, begin: Any) -> Any:
        return mb.slice_by_size(x=x, begin=begin, size=[2])

    with pytest.raises(InputError, match=r"slice_by_size .* (exceeds dimension size|'begin' is -5)"):
        run(build, {"x": X[0, :, 0], "begin": np.array([begin], np.int32)})


@pytest.mark.parametrize("extent", [1, 2])
def test_squeezing_keeps_the_declared_rank(extent: int) -> None:
    """An axis of unknown extent stays, as type inference has it, even when it turns out to be 1."""
    x = draw(0, extent, 1, 3)

    def build(x: Any) -> Any:
        return mb.squeeze(x=x), mb.squeeze(x=x, axes=[0, 1]), mb.squeeze(x=x, axes=[-2])

    for found in run(build, {"x": x}, shapes={"x": (get_new_symbol(), 1, 3)}):
        close(found, x[:, 0])


def test_squeezing_known_extents() -> None:
    x = draw(0, 1, 2, 1, 1)

    def build(x: Any) -> Any:
        return mb.squeeze(x=x), mb.squeeze(x=x, axes=[0, 1])

    everything, some = run(build, {"x": x})
    close(everything, x.ravel())
    close(some, x[0])
    close(run(lambda x: mb.squeeze(x=x), {"x": x[:, :1]})[0], x[0, 0, 0, 0])


@law
@given(data=st.data(), dtype=st.sampled_from([np.bool_, np.int8, np.uint16, np.float32]))
def test_shape_changes(data: Any, dtype: Any) -> None:
    x = (X * 9).astype(dtype) if dtype != np.uint16 else (np.abs(X) * 9).astype(dtype)
    perm = data.draw(st.permutations([0, 1, -1]))
    axes = data.draw(st.sets(st.sampled_from([0, -2, 2]), max_size=2).map(sorted))
    new_axes = sorted(data.draw(st.sets(st.sampled_from([0, 2, -1]), min_size=1)))

    def build(x: Any) -> Any:
        moved = mb.transpose(x=x, perm=perm)
        turned = mb.reverse(x=x, axes=np.array(axes, np.int32)) if axes else mb.reverse(x=x)
        return moved, turned, mb.expand_dims(x=x, axes=new_axes), mb.sliding_windows(x=x, axis=-2, size=2, stride=2)

    windows = np.lib.stride_tricks.sliding_window_view(x, 2, axis=1)[:, ::2].swapaxes(2, 3)
    turned = np.flip(x, axes or None)
    expected = (x.transpose(perm), turned, np.expand_dims(x, new_axes), windows)
    for found, truth in zip(run(build, {"x": x}, precision="float32"), expected):
        same_bits(found, np.ascontiguousarray(truth))


@pytest.mark.parametrize(
    ("opset", "shape", "expected"),
    [
        (ct.target.iOS15, [0, -1, 5], (3, 4, 5)),
        (ct.target.iOS16, [-1, 0, 0], (3, 4, 5)),
        (ct.target.iOS17, [0, -1], (4, 15)),
        (ct.target.iOS17, [0, 0, 0, 0, 0], (1, 1, 3, 4, 5)),
        (ct.target.iOS17, [-1], (60,)),
    ],
)
def test_zeros_in_shapes(opset: Any, shape: list[int], expected: tuple[int, ...]) -> None:
    """Since iOS17 zeros are counted from the right; before, the ranks must be equal and it makes no difference."""

    def build(x: Any, shape: Any) -> Any:
        return mb.reshape(x=x, shape=shape)

    found = run(build, {"x": X, "shape": np.array(shape, np.int32)}, opset=opset)[0]
    close(found, X.reshape(expected))


def test_reshape_like() -> None:
    x, first, second = draw(0, 60), np.zeros((3, 4, 9), np.float32), np.zeros((7, 5), np.bool_)

    def build(x: Any, first: Any, second: Any) -> Any:
        return mb.reshape_like(
            x=x, ref_tensors=(first, second), begins=(0, -1), ends=(-1, 0), end_masks=(False, True)
        )

    close(run(build, {"x": x, "first": first, "second": second})[0], x.reshape(3, 4, 5))


@law
@given(lengths=st.tuples(*[st.integers(0, 4)] * 3), batch=st.sampled_from([0, -3]), seq=st.sampled_from([1, -2]))
def test_reverse_sequence(lengths: tuple[int, ...], batch: int, seq: int) -> None:
    expected = X.copy()
    for each, length in enumerate(lengths):
        expected[each, :length] = X[each, :length][::-1]

    def build(x: Any, lengths: Any) -> Any:
        return mb.reverse_sequence(x=x, lengths=lengths, batch_axis=batch, seq_axis=seq)

    np.testing.assert_array_equal(run(build, {"x": X, "lengths": np.array(lengths, np.int8)})[0], expected)


@law
@given(factor=st.sampled_from([1, 2, 3]), precision=st.sampled_from(["float64", "float16"]))
def test_shuffles(factor: int, precision: str) -> None:
    x = draw(0, 2, 2 * factor**2, 3, 5, dtype=np.float16)
    expected = functional.pixel_shuffle(torch.from_numpy(x), factor).numpy()

    def build(x: Any) -> Any:
        there = mb.pixel_shuffle(x=x, upscale_factor=factor)
        return there, mb.pixel_unshuffle(x=there, downscale_factor=np.uint32(factor))

    for found, truth in zip(run(build, {"x": x}, precision=precision), (expected, x)):
        np.testing.assert_array_equal(found, truth)


@law
@given(rows=st.sampled_from([1, 2, 3]), columns=st.sampled_from([1, 2]), seed=st.integers(0, 3))
def test_space_to_batch_is_strided_slices(rows: int, columns: int, seed: int) -> None:
    """Batch element (i, j, n) is every `rows`-th row from i on and every `columns`-th column from j on of image n."""
    x = draw(seed, 2, 3, 6, 4)

    def build(x: Any) -> Any:
        spread = mb.space_to_batch(x=x, block_shape=[rows, columns], paddings=[[rows, 0], [0, columns]])
        return spread, mb.batch_to_space(x=spread, block_shape=[rows, columns], crops=[[rows, 0], [0, columns]])

    spread, back = run(build, {"x": x})
    padded = np.pad(x, ((0, 0), (0, 0), (rows, 0), (0, columns)))
    expected = [padded[:, :, i::rows, j::columns] for i in range(rows) for j in range(columns)]
    close(spread, np.concatenate(expected))
    close(back, x)
