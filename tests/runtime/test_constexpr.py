"""Compressed weights: against the values coremltools materialises, in use, and never kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.type_mapping import nptype_from_builtin

from mil_ane_passes.runtime import Runtime
from tests.runtime.helpers import Array, close, draw, program

pytestmark = pytest.mark.usefixtures("elements_at_once")
X = draw(0, 3, 8)


def materialised(build: Any, opset: Any) -> tuple[Array, Array]:
    """(what `x @ weight.T` gives here, what it gives with the weight coremltools materialises)."""
    weights = []

    def used(x: Any) -> Any:
        weight = build()
        weights.append(weight.op.materialized_val_inference())
        return mb.linear(x=x, weight=weight)

    (found,) = Runtime(program(used, {"x": X}, opset=opset), precision="float64")({"x": X}).values()
    return found, X.astype(np.float64) @ np.asarray(weights[0]).astype(np.float64).T


def sub_byte(values: Any, dtype: Any) -> Array:
    return np.asarray(values).astype(nptype_from_builtin(dtype))


def packed(values: Array, bits: int) -> Array:
    stream = ((values.ravel()[:, None] >> np.arange(bits)) & 1).astype(np.uint8).ravel()
    return np.packbits(stream, bitorder="little")


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("axis", [0, 1])
def test_affine(axis: int) -> None:
    data = RNG.integers(-128, 128, (4, 8)).astype(np.int8)
    zero_point = RNG.integers(-9, 9, data.shape[axis]).astype(np.int8)
    scale = np.abs(draw(1, data.shape[axis])) + 0.1

    def build() -> Any:
        return mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero_point, scale=scale, axis=axis)

    close(*materialised(build, ct.target.iOS16))


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_packed_lut(bits: int) -> None:
    indices, lut = RNG.integers(0, 2**bits, (4, 8)), draw(1, 2**bits)

    def build() -> Any:
        return mb.constexpr_lut_to_dense(indices=packed(indices, bits), lut=lut, shape=np.array([4, 8], np.uint32))

    close(*materialised(build, ct.target.iOS16))


def test_packed_sparse() -> None:
    mask = RNG.integers(0, 2, (4, 8))
    data = draw(1, int(mask.sum()))

    def build() -> Any:
        return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=packed(mask, 1), shape=np.array([4, 8], np.uint32))

    close(*materialised(build, ct.target.iOS16))


def test_cast() -> None:
    weight = draw(1, 4, 8, dtype=np.float16)
    close(*materialised(lambda: mb.constexpr_cast(source_val=weight, output_dtype="fp32"), ct.target.iOS16))


@pytest.mark.parametrize("with_offset", [True, False])
def test_blockwise(with_offset: bool) -> None:
    data, scale = sub_byte(RNG.integers(-8, 8, (4, 8)), types.int4), draw(1, 2, 4)
    offset = sub_byte(RNG.integers(-8, 8, (2, 4)), types.int4) if with_offset else None

    def build() -> Any:
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=offset)

    close(*materialised(build, ct.target.iOS18))


@pytest.mark.parametrize(("vector", "axis"), [(1, None), (2, 0), (2, 1), (4, -1)])
def test_grouped_and_vector_lut(vector: int, axis: int | None) -> None:
    shape = [4, 8]
    if axis is not None:
        shape[axis] //= vector
    indices, lut = sub_byte(RNG.integers(0, 4, shape), types.uint2), draw(1, 2, 1, 4, vector)

    def build() -> Any:
        return mb.constexpr_lut_to_dense(indices=indices, lut=lut, vector_axis=axis)

    close(*materialised(build, ct.target.iOS18))


def test_sparse_lut_and_sparse_blockwise() -> None:
    mask = sub_byte(RNG.integers(0, 2, (4, 8)), types.uint1)
    count = int(mask.sum())
    indices, lut = sub_byte(RNG.integers(0, 4, count), types.uint2), draw(1, 1, 1, 4, 1)
    data, scale = RNG.integers(-128, 128, count).astype(np.int8), draw(2, 4, 1)

    def palettized() -> Any:
        made = mb.constexpr_lut_to_sparse(indices_mask=mask, indices_nonzero_data=indices, lut=lut)
        return mb.constexpr_sparse_to_dense(mask=made[0], nonzero_data=made[1])

    def quantized() -> Any:
        made = mb.constexpr_sparse_blockwise_shift_scale(data_mask=mask, nonzero_data=data, scale=scale)
        return mb.constexpr_sparse_to_dense(mask=made[0], nonzero_data=made[1])

    close(*materialised(palettized, ct.target.iOS18))
    close(*materialised(quantized, ct.target.iOS18))


def test_mapped_weights_are_read_when_used_and_not_changed(tmp_path: Path) -> None:
    weight = draw(1, 4, 8, dtype=np.float16)
    weight.tofile(tmp_path / "weights.bin")
    mapped = np.memmap(tmp_path / "weights.bin", np.float16, "r", shape=(4, 8))
    x = X.astype(np.float16)
    made = program(lambda x: mb.linear(x=x, weight=mapped), {"x": x})
    for precision in ("float64", "float32", "float16"):
        (found,) = Runtime(made, precision=precision)({"x": x}).values()
        close(found.astype(np.float64), x.astype(np.float64) @ weight.astype(np.float64).T, 1e-2)


def test_a_table_is_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from mil_ane_passes.runtime import numeric

    table, sizes = draw(1, 1000, 8), []
    convert = numeric.Precision.tensor

    def watched(self: Any, value: Any, *passing: bool) -> Any:
        sizes.append(np.size(value))
        return convert(self, value, *passing)

    made = program(lambda x: mb.gather(x=table, indices=x, axis=0), {"x": np.array([[3, -1]], np.int32)})
    monkeypatch.setattr(numeric.Precision, "tensor", watched)
    (found,) = Runtime(made)({"x": np.array([[3, -1]], np.int32)}).values()
    np.testing.assert_array_equal(found, table[[[3, -1]]])
    assert max(sizes) == 16
