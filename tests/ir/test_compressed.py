"""A compressed weight with one more axis is the same numbers under a longer shape, and still compressed."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.type_mapping import nptype_from_builtin
from coremltools.optimize import _utils as optimize_utils

from mil_ane_passes.ir.builder import RewriteBuilder, UniqueNames
from mil_ane_passes.ir.compressed_weights import explain_axis_obstacle, insert_unit_axis
from mil_ane_passes.ir.constants import unpack_elements
from mil_ane_passes.ir.query import is_compressed, iterate_ops
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.passes.test_engine import check

SHAPE = (4, 6, 8)
RANDOM = np.random.default_rng(0)
INTS = RANDOM.integers(-8, 8, SHAPE)
KEPT = RANDOM.integers(0, 2, SHAPE)
COUNT = int(KEPT.sum())
REALS = RANDOM.standard_normal(64).astype(np.float16)


def as_type(values, dtype):
    return np.asarray(values).astype(nptype_from_builtin(dtype))


def packed(values, bits):
    stream = ((np.asarray(values).ravel()[:, None] >> np.arange(bits)) & 1).astype(np.uint8).ravel()
    return np.packbits(stream, bitorder="little")


def shape():
    return np.array(SHAPE, np.uint32)


def affine(axis, scalar=False):
    zero, scale = np.int8(2), np.float16(0.5)
    if not scalar:
        zero, scale = np.arange(SHAPE[axis]).astype(np.int8), np.abs(REALS[: SHAPE[axis]]) + np.float16(0.1)
    return mb.constexpr_affine_dequantize(quantized_data=INTS.astype(np.int8), zero_point=zero, scale=scale, axis=axis)


def blockwise(data=INTS, blocks=(2, 3, 1), dtype=types.int4, offset=True):
    scale = REALS[: int(np.prod(blocks))].reshape(blocks)
    shift = as_type(np.arange(scale.size).reshape(blocks) % 5, dtype) if offset else None
    return mb.constexpr_blockwise_shift_scale(data=as_type(data, dtype), scale=scale, offset=shift)


def lut(groups, vector=1, axis=None):
    indices = list(SHAPE)
    if axis is not None:
        indices[axis] //= vector
    table = np.resize(REALS, (*groups, 4, vector))
    return mb.constexpr_lut_to_dense(
        indices=as_type(INTS.ravel()[: np.prod(indices)].reshape(indices) % 4, types.uint2), lut=table, vector_axis=axis
    )


def sparse_lut():
    made = mb.constexpr_lut_to_sparse(
        indices_mask=as_type(KEPT, types.uint1),
        lut=np.resize(REALS, (4, 1, 1, 4, 1)),
        indices_nonzero_data=as_type(np.arange(COUNT) % 4, types.uint2),
    )
    return mb.constexpr_sparse_to_dense(mask=made[0], nonzero_data=made[1])


def sparse_blockwise():
    made = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=as_type(KEPT, types.uint1),
        nonzero_data=(np.arange(COUNT) % 100).astype(np.int8),
        scale=np.resize(REALS, (4, 1, 2)),
    )
    return mb.constexpr_sparse_to_dense(mask=made[0], nonzero_data=made[1])


def lut_of_quantized():
    """The values of the palette are quantized themselves, one constexpr in another."""
    table = mb.constexpr_blockwise_shift_scale(
        data=(np.arange(16) - 8).astype(np.int8).reshape(4, 1, 1, 4, 1), scale=np.resize(REALS, (4, 1, 1, 1, 1))
    )
    return mb.constexpr_lut_to_dense(indices=as_type(INTS % 4, types.uint2), lut=table)


IOS16 = {
    "affine 0": lambda: affine(0),
    "affine 1": lambda: affine(1),
    "affine 2": lambda: affine(2),
    "affine -1": lambda: affine(-1),
    "affine -3": lambda: affine(-3),
    "affine scalar": lambda: affine(0, scalar=True),
    "lut": lambda: mb.constexpr_lut_to_dense(indices=packed(INTS % 4, 2), lut=REALS[:4], shape=shape()),
    "sparse": lambda: mb.constexpr_sparse_to_dense(
        nonzero_data=REALS[np.arange(COUNT) % 64], mask=packed(KEPT, 1), shape=shape()
    ),
    "cast": lambda: mb.constexpr_cast(source_val=np.resize(REALS, SHAPE), output_dtype="fp32"),
}
IOS18 = {
    "blockwise": blockwise,
    "blockwise no offset": lambda: blockwise(offset=False),
    "per tensor": lambda: blockwise(blocks=(1, 1, 1)),
    "per element": lambda: blockwise(blocks=(4, 2, 8), dtype=types.int8),
    "lut": lambda: lut((1, 1, 1)),
    "grouped lut": lambda: lut((2, 3, 1)),
    "vector lut 0": lambda: lut((1, 1, 1), 2, 0),
    "vector lut 1": lambda: lut((1, 1, 2), 2, 1),
    "vector lut 2": lambda: lut((1, 1, 1), 4, 2),
    "vector lut -1": lambda: lut((1, 1, 1), 4, -1),
    "vector lut -2": lambda: lut((1, 1, 1), 2, -2),
    "sparse": lambda: mb.constexpr_sparse_to_dense(
        nonzero_data=REALS[np.arange(COUNT) % 64], mask=as_type(KEPT, types.uint1)
    ),
    "sparse lut": sparse_lut,
    "sparse blockwise": sparse_blockwise,
    "lut of quantized": lut_of_quantized,
}
FORMS = [
    pytest.param(form, opset, id=f"{opset.name} {name}")
    for opset, table in ((ct.target.iOS16, IOS16), (ct.target.iOS18, IOS18))
    for name, form in table.items()
]


def lifted(form, opset, axis, times=1):
    """A program that returns the weight and its longer form, and the two vars."""

    def body(x):
        inner = form()
        return [mb.identity(x=inner, name="flat"), mb.relu(x=x)]

    prog = build_program(body, opset=opset, x=(1,))
    block = prog.functions["main"]
    flat = next(op for op in block.operations if op.op_type == "identity")
    with block:
        builder = RewriteBuilder(block, UniqueNames(block))
        with builder.at(flat):
            longer = [insert_unit_axis(builder, flat.x, axis) for _ in range(times)]
            result = builder.identity(x=longer[0], name="long")
    block.set_outputs([*block.outputs, result])
    return prog, flat.x, longer


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_the_same_numbers_under_a_longer_shape(form, opset, axis):
    prog, before, (after, *_) = lifted(form, opset, axis)
    expected = (*SHAPE[:axis], 1, *SHAPE[axis:])
    assert is_compressed(after) and after.op.op_type == before.op.op_type
    assert after.shape == expected and after.dtype == before.dtype
    outputs = Runtime(prog, precision="float32")({"x": np.ones(1, np.float16)})
    assert np.any(outputs["flat"])
    np.testing.assert_array_equal(outputs["long"], outputs["flat"].reshape(expected))
    check(prog)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(("form", "opset"), [each for each in FORMS if each.id != "iOS18 lut of quantized"])
def test_the_host_materialises_the_same_numbers(form, opset, axis):
    """(It cannot materialise a palette that is quantized itself.)"""
    _, before, (after, *_) = lifted(form, opset, axis)
    old, new = (np.asarray(var.op.materialized_val_inference()) for var in (before, after))
    np.testing.assert_array_equal(new, old.reshape((*SHAPE[:axis], 1, *SHAPE[axis:])))


@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_the_packed_data_is_shared(form, opset):
    """Nothing larger than a parameter has bytes of its own."""
    _, before, (after, *_) = lifted(form, opset, 2)

    def arrays(var):
        for bound in var.op.inputs.values():
            yield from arrays(bound) if is_compressed(bound) else [np.asarray(bound.val)]

    for old, new in zip(arrays(before), arrays(after), strict=True):
        assert old.size < 8 or np.shares_memory(old, new)


@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_asked_twice_it_is_made_once(form, opset):
    prog, before, (first, second) = lifted(form, opset, 1, times=2)
    assert first is second
    made = Counter(op.op_type for _, op in iterate_ops(prog) if op.op_type.startswith("constexpr_"))
    assert made[before.op.op_type] == 2


def test_a_plain_const_becomes_a_view_and_a_computed_value_an_expand_dims():
    prog, before, (after,) = lifted(lambda: mb.const(val=make_weight(*SHAPE)), ct.target.iOS17, 3)
    assert after.op.op_type == "const" and np.shares_memory(after.val, before.val)
    prog, before, (after,) = lifted(lambda: mb.random_normal(shape=SHAPE), ct.target.iOS17, 1)
    assert after.op.op_type == "expand_dims" and after.shape == (4, 1, 6, 8)
    check(prog)


def test_a_form_nobody_knows_is_left_alone(monkeypatch):
    _, before, _ = lifted(lambda: affine(0), ct.target.iOS16, 1)
    assert explain_axis_obstacle(before) is None
    from mil_ane_passes.ir import compressed_weights

    monkeypatch.setattr(compressed_weights, "_KNOWN_INPUTS", compressed_weights._KNOWN_INPUTS - {"zero_point"})
    assert explain_axis_obstacle(before) == (
        "weight is compressed by constexpr_affine_dequantize with an unknown input 'zero_point'"
    )


@pytest.mark.parametrize("dtype", [types.int4, types.uint1, types.uint2, types.uint3, types.uint4, types.uint6],
                         ids=types.builtin_to_string)
@pytest.mark.parametrize("count", [0, 1, 13, (1 << 18) + 5])
def test_elements_are_unpacked_as_coremltools_does(dtype, count):
    bits = dtype.get_bitwidth()
    packed = np.random.default_rng(count).integers(0, 256, -(-count * bits // 8), np.uint8)
    found = unpack_elements(packed, dtype, count)
    expected = optimize_utils.restore_elements_from_packed_bits(packed, bits, count, not dtype.is_unsigned())
    assert found.dtype == nptype_from_builtin(dtype)
    np.testing.assert_array_equal(found, expected)
