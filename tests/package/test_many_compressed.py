"""Packages with thousands of compressed weights load in memory and time that grow as their number does."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools import proto
from coremltools.converters.mil.mil import Builder

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.package import load
from mil_ane_passes.passes.examples import build_program
from tests.package.helpers import MODEL, make, spec_of

MANY = 1500


def chained(path, constant: bool):
    """A package that adds `MANY` compressed numbers to its input, or to one another first."""
    def body(x):
        weight = Builder.constexpr_affine_dequantize(quantized_data=np.ones((2, 3), np.int8), zero_point=np.int8(0),
                                                     scale=np.float32(0.5), axis=0, name="weight")
        return Builder.add(x=x, y=Builder.add(x=weight, y=weight, name="sum"), name="y")

    import coremltools as ct
    from coremltools.converters.mil.mil import types

    make(path, build_program(body, opset=ct.target.iOS16, dtype=types.fp32, x=(2, 3)), ct.target.iOS16,
         pass_pipeline=ct.PassPipeline.EMPTY)
    spec = spec_of(path)
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    ops = {op.outputs[0].name: op for op in block.operations}
    weight, last = ops["weight"], ops["y"]
    del block.operations[:]
    block.operations.extend(op for name, op in ops.items() if name not in ("weight", "sum", "y"))
    total = "weight_0" if constant else "x"
    for number in range(MANY):
        one = _copied(block, weight, f"weight_{number}")
        if one.outputs[0].name != total:
            added = _copied(block, ops["sum"], f"sum_{number}")
            _bind(added, x=total, y=one.outputs[0].name)
            total = added.outputs[0].name
    final = _copied(block, last, "y")
    _bind(final, x="x", y=total)
    (path / MODEL).write_bytes(spec.SerializeToString())
    return path


def _copied(block, op, name: str):
    made = proto.MIL_pb2.Operation()
    made.CopyFrom(op)
    made.outputs[0].name = name
    made.attributes["name"].immediateValue.tensor.strings.values[:] = [name]
    block.operations.append(made)
    return block.operations[-1]


def _bind(op, **names: str) -> None:
    for key, name in names.items():
        op.inputs[key].arguments[0].name = name


@pytest.mark.slow
def test_what_is_noted_of_compressed_weights_grows_as_they_do(tmp_path):
    for constant in (False, True):
        found = load(chained(tmp_path / f"{constant}.mlpackage", constant)).program
        values = [var for _, op in iterate_ops(found) for var in op.outputs]
        noted = [len(var.nonreplaceable_vars_upstream) for var in values]
        assert sum(op.op_type.startswith("constexpr_") for _, op in iterate_ops(found)) == MANY
        assert sum(noted) < 10 * len(values)
        assert all(var.nonreplaceable_vars_upstream == {var} for var in values
                   if var.op.op_type.startswith("constexpr_"))
        if constant:  # coremltools may not fold what is made of compressed weights
            assert all(var.nonreplaceable_vars_upstream for var in values if var.name.startswith("sum_"))
