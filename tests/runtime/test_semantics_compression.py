"""Quantisation and compressed weights: numpy's arithmetic on blocks, sparse and vector forms, and rounding."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.type_mapping import nptype_from_builtin
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.helpers import Array, close, draw, run, same_bits
from tests.runtime.laws import law

pytestmark = pytest.mark.usefixtures("elements_at_once")
PRECISIONS = ("float64", "float32", "float16")


def narrow(values: Any, dtype: Any) -> Array:
    """As an array of a type of less than eight bits."""
    return np.asarray(values).astype(nptype_from_builtin(dtype))


def weight(build: Any, opset: Any = ct.target.iOS18, precision: str = "float64") -> Array:
    """The compressed weight as an operand: added to zeros."""
    def used(zero: Any) -> Any:
        return mb.add(x=mb.cast(x=zero, dtype="fp32"), y=build())

    return run(used, {"zero": np.zeros((), np.float16)}, opset=opset, precision=precision)[0]


def blown_up(parameter: Array, shape: tuple[int, ...]) -> Array:
    for axis, extent in enumerate(shape):
        parameter = np.repeat(parameter, extent // parameter.shape[axis], axis)
    return parameter


@law
@given(
    seed=st.integers(0, 99), blocks=st.sampled_from([(1, 1), (4, 2), (2, 4), (4, 8), (1, 4)]),
    dtype=st.sampled_from([types.int4, types.uint4, types.int8, types.uint8, types.fp32]),
    offset=st.sampled_from("nsf"), precision=st.sampled_from(PRECISIONS),
)  # fmt: skip
def test_blocks_on_two_axes(seed: int, blocks: tuple[int, int], dtype: Any, offset: str, precision: str) -> None:
    """Differences of narrow integers do not wrap: -8 - 7 is -15."""
    rng, low, high = np.random.default_rng(seed), -8, 8
    if dtype in (types.uint4, types.uint8):
        low, high = 0, 16
    data, scale = narrow(rng.integers(low, high, (4, 8)), dtype), draw(seed, *blocks)
    zero = rng.integers(low, high, blocks)
    given_ = {"n": None, "s": narrow(zero, dtype), "f": zero.astype(np.float32) + 0.5}[offset]
    shift = 0 if given_ is None else blown_up(given_.astype(np.float64), (4, 8))
    expected = (data.astype(np.float64) - shift) * blown_up(scale, (4, 8))

    def build() -> Any:
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=given_)

    close(weight(build, precision=precision), expected)


def looked_up(indices: Array, lut: Array, axis: int) -> Array:
    """The table of each element's block, element by element, with vectors along `axis`."""
    size, shape = lut.shape[-1], list(indices.shape)
    shape[axis] *= size
    made = np.zeros(shape)
    for place in np.ndindex(*indices.shape):
        block = tuple(each * lut.shape[k] // indices.shape[k] for k, each in enumerate(place))
        for part in range(size):
            target = list(place)
            target[axis] = place[axis] * size + part
            made[tuple(target)] = lut[(*block, int(indices[place]), part)]
    return made


LUTS = {
    "seed": st.integers(0, 99), "bits": st.sampled_from([1, 2, 3, 4, 6]), "axis": st.sampled_from([0, 1, -1]),
    "blocks": st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4)]), "vector": st.sampled_from([1, 2, 4]),
}  # fmt: skip


@law
@given(**LUTS)
def test_tables_of_vectors(seed: int, bits: int, axis: int, blocks: tuple[int, int], vector: int) -> None:
    dtype = types.string_to_builtin(f"uint{bits}")
    indices = narrow(np.random.default_rng(seed).integers(0, 2**bits, (4, 8)), dtype)
    lut = draw(seed, *blocks, 2**bits, vector)

    def build() -> Any:
        return mb.constexpr_lut_to_dense(indices=indices, lut=lut, vector_axis=np.int32(axis))

    close(weight(build), looked_up(indices, lut, axis))


@law
@given(**LUTS)
def test_sparse_tables(seed: int, bits: int, axis: int, blocks: tuple[int, int], vector: int) -> None:
    """The joint form: sparse indices, a table, then the dense weight; with vectors each place of the mask repeats."""
    rng, dtype = np.random.default_rng(seed), types.string_to_builtin(f"uint{bits}")
    mask = rng.integers(0, 2, (4, 8))
    indices, lut = rng.integers(0, 2**bits, (4, 8)), draw(seed, *blocks, 2**bits, vector)

    def build() -> Any:
        marks, data = mb.constexpr_lut_to_sparse(
            indices_mask=narrow(mask, types.uint1), indices_nonzero_data=narrow(indices[mask != 0], dtype), lut=lut,
            vector_axis=np.int32(axis),
        )  # fmt: skip
        return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=marks)

    close(weight(build), np.repeat(mask, vector, axis) * looked_up(indices, lut, axis))


@law
@given(seed=st.integers(0, 99), blocks=st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 8)]))
def test_sparse_blocks(seed: int, blocks: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    mask, data = rng.integers(0, 2, (4, 8)), rng.integers(-8, 8, (4, 8))
    scale, offset = draw(seed, *blocks), narrow(rng.integers(-8, 8, blocks), types.int4)

    def build() -> Any:
        marks, values = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=narrow(mask, types.uint1), nonzero_data=narrow(data[mask != 0], types.int4), scale=scale,
            offset=offset,
        )  # fmt: skip
        return mb.constexpr_sparse_to_dense(nonzero_data=values, mask=marks)

    dense = (data - blown_up(offset.astype(np.float64), (4, 8))) * blown_up(scale, (4, 8))
    close(weight(build), mask * dense)


def test_a_quantised_table() -> None:
    """The joint form of table and quantisation: the table holds int8, which the scales turn into numbers."""
    indices, lut = narrow(np.arange(32).reshape(4, 8) % 4, types.uint2), np.array([-128, 0, 5, 127], np.int8)

    def build() -> Any:
        data = mb.constexpr_lut_to_dense(indices=indices, lut=lut.reshape(1, 1, 4, 1))
        return mb.constexpr_blockwise_shift_scale(data=data, scale=np.float32([[0.5], [2], [1], [1]]))

    close(weight(build), lut[indices.astype(np.int64)] * np.array([[0.5], [2], [1], [1]]))


RANGES = {"int8": (-128, 127), "uint8": (0, 255)}
HALVES = np.array([-1e9, -129.5, -128.5, -2.5, -1.5, -0.5, -0.0, 0.5, 1.5, 2.5, 126.5, 254.5, 1e9, np.inf, -np.inf])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("zero", [None, 3])
def test_quantising_rounds_half_to_even_and_saturates(dtype: str, zero: int | None, precision: str) -> None:
    x, kind = HALVES.astype(np.float32), np.dtype(dtype)
    expected = np.clip(np.round(x) + (zero or 0), *RANGES[dtype]).astype(kind)

    def build(x: Any) -> Any:
        options = {} if zero is None else {"zero_point": kind.type(zero)}
        made = mb.quantize(input=x, scale=np.float32(1), output_dtype=dtype, **options)
        return made, mb.dequantize(input=made, scale=np.float32(0.5), **options)

    made, back = run(build, {"x": x}, precision=precision)
    same_bits(made, expected)
    close(back, (expected.astype(np.float64) - (zero or 0)) * 0.5)


@law
@given(seed=st.integers(0, 99), axis=st.integers(-3, 2), dtype=st.sampled_from(["int8", "uint8"]))
def test_quantising_along_an_axis(seed: int, axis: int, dtype: str) -> None:
    """What was quantised comes back within half a step, and what came back is quantised to the same."""
    x = draw(seed, 2, 3, 4)
    low, high = RANGES[dtype]
    rest = tuple(each for each in range(3) if each != axis % 3)
    scale = (np.abs(x).max(rest) / 60).astype(np.float32)
    zero = np.random.default_rng(seed).integers(low + 64, high - 63, x.shape[axis]).astype(dtype)
    options = {"scale": scale, "zero_point": zero, "axis": axis}

    def build(x: Any) -> Any:
        made = mb.quantize(input=x, output_dtype=dtype, **options)
        back = mb.dequantize(input=made, **options)
        return made, back, mb.quantize(input=back, output_dtype=dtype, **options)

    made, back, again = run(build, {"x": x})
    step = scale.reshape([-1 if each == axis % 3 else 1 for each in range(3)])
    assert (np.abs(back - x) <= step * 0.5001).all()
    same_bits(again, made)
