"""What ops with nested blocks give: the sizes that all ways through them have in common."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

import mil_ane_passes as ane

from .helpers import make, op_named, spec_of, write_spec


def chosen(path):
    """A package whose `cond` gives one row or all of two."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x):
        less = mb.less(x=mb.reduce_sum(x=x, axes=(0, 1), keep_dims=False), y=np.float32(0))
        y = mb.cond(pred=less, name="y", _true_fn=lambda: mb.relu(x=x, name="a"),
                    _false_fn=lambda: mb.tanh(x=x, name="b"))
        return mb.mul(x=y, y=np.float32(2), name="z")

    return make(path, program)


def sizes(path, name):
    return tuple(None if is_symbolic(size) else size
                 for size in op_named(ane.load(path).program, name).outputs[0].shape)


def test_a_size_that_differs_between_branches_is_not_known(tmp_path):
    path = chosen(tmp_path / "a.mlpackage")
    assert sizes(path, "z") == (2, 4)
    spec = spec_of(path)
    block = spec.mlProgram.functions["main"].block_specializations["CoreML5"]
    op = next(op for op in block.operations if op.type == "cond")
    inner = op.blocks[0].operations
    relu = next(each for each in inner if each.type == "relu")
    sliced = inner.add()
    sliced.CopyFrom(relu)
    sliced.type = "slice_by_size"
    sliced.attributes["name"].immediateValue.tensor.strings.values[:] = ["cut"]
    sliced.outputs[0].name = "cut"
    sliced.outputs[0].type.tensorType.dimensions[0].constant.size = 1
    sliced.inputs["x"].arguments[0].name = "a"
    for key, value in (("begin", [0, 0]), ("size", [1, 4])):
        given = sliced.inputs[key].arguments.add().value
        given.type.tensorType.dataType, given.type.tensorType.rank = 23, 1  # int32
        given.type.tensorType.dimensions.add().constant.size = 2
        given.immediateValue.tensor.ints.values.extend(value)
    op.blocks[0].outputs[:] = ["cut"]
    for made in (op.outputs[0], next(op for op in block.operations if op.outputs[0].name == "z").outputs[0]):
        made.type.tensorType.dimensions[0].unknown.variadic = False
    write_spec(path, spec)
    assert sizes(path, "cut") == (1, 4)
    assert sizes(path, "y") == sizes(path, "z") == (None, 4)


def test_a_loop_that_may_not_run_gives_what_went_in(tmp_path):
    """The body gives one size always, what goes in has none that is known."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4))])
    def program(x):
        rows = mb.non_zero(x=x, name="rows")
        first = mb.cast(x=rows, dtype="fp32")
        _, y = mb.while_loop(
            _cond=lambda i, y: mb.less(x=i, y=np.float32(3)),
            _body=lambda i, y: (mb.add(x=i, y=np.float32(1)), mb.concat(values=(y, y), axis=0, name="twice")),
            loop_vars=(np.float32(0), first), name="loop")
        return mb.relu(x=y, name="z")

    path = make(tmp_path / "a.mlpackage", program)
    assert sizes(path, "z")[0] is None
