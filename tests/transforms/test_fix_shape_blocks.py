"""`--fix-shape` through branches and loops, beside weights that are compressed, and over drawn programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mil_ane_passes as ane
from tests.package.helpers import main_block, normal, op_named, proto_ops, spec_of, write_spec

from .test_fix_shape import RANGED, flexible, is_flexible, same_bits

ROWS = ct.Shape((ct.RangeDim(1, 12, default=3), 4))


def sizes(path: Path, name: str) -> tuple[str, ...]:
    return tuple(map(str, op_named(ane.load(path).program, name).outputs[0].shape))


def length_of(x: Any, axis: int) -> Any:
    return mb.gather(x=mb.shape(x=x), indices=axis, axis=0)


def branching(x: Any) -> Any:
    """A branch on the length, another on data; both compute shapes inside."""
    long = mb.greater(x=length_of(x, 0), y=5, name="long")
    first = mb.cond(pred=long, name="first",
                    _true_fn=lambda: mb.relu(x=mb.reshape(x=x, shape=mb.concat(
                        values=(mb.expand_dims(x=length_of(x, 0), axes=[0]), np.int32([4])), axis=0)), name="a"),
                    _false_fn=lambda: mb.tanh(x=x, name="b"))
    positive = mb.greater(x=mb.reduce_sum(x=x, axes=(0, 1), keep_dims=False), y=np.float32(0), name="positive")
    return mb.cond(pred=positive, name="out",
                   _true_fn=lambda: mb.add(x=first, y=mb.cast(x=length_of(first, 0), dtype="fp32"), name="c"),
                   _false_fn=lambda: mb.mul(x=first, y=np.float32(2), name="d"))


def looping(x: Any) -> Any:
    """As many steps as rows; what is carried keeps its shape, and inside the loop it is flattened and shaped back."""
    def body(i: Any, y: Any) -> Any:
        flat = mb.reshape(x=y, shape=np.int32([-1]), name="flat")
        count = mb.concat(values=(mb.expand_dims(x=length_of(y, 0), axes=[0]), np.int32([4])), axis=0, name="count")
        back = mb.reshape(x=mb.add(x=flat, y=np.float32(1)), shape=count, name="back")
        return mb.add(x=i, y=1), mb.mul(x=back, y=x, name="next")

    _, y = mb.while_loop(_cond=lambda i, y: mb.less(x=i, y=length_of(x, 0)), _body=body, loop_vars=(0, x), name="loop")
    return mb.relu(x=y, name="out")


def growing(x: Any) -> Any:
    """What is carried becomes longer."""
    def body(i: Any, y: Any) -> Any:
        return mb.add(x=i, y=1), mb.concat(values=(y, x), axis=0, name="longer")

    _, y = mb.while_loop(_cond=lambda i, y: mb.less(x=i, y=length_of(x, 0)), _body=body, loop_vars=(0, x), name="loop")
    return mb.relu(x=y, name="out")


@pytest.mark.parametrize("rows", [3, 9])
def test_branches(tmp_path, rows):
    source = flexible(tmp_path / "source.mlpackage", branching, {"x": ROWS})
    made = tmp_path / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=[f"x={rows},4"])
    for sign in (1, -1):
        same_bits(source, made, {"x": sign * np.abs(normal(rows, 4))})
    assert not is_flexible(made)
    kept = {op.op_type for op in ane.load(made).program.functions["main"].operations}
    assert "shape" not in kept and "cond" in kept


def test_a_loop_that_keeps_its_shapes(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", looping, {"x": ROWS})
    made = tmp_path / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=["x=5,4"])
    same_bits(source, made, {"x": normal(5, 4)})
    assert not is_flexible(made)
    assert sizes(made, "flat") == ("20",) and sizes(made, "out") == ("5", "4")
    assert op_named(ane.load(made).program, "count").op_type == "const"


def test_a_loop_that_grows_stays_flexible(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", growing, {"x": ROWS})
    spec = spec_of(source)
    op = next(op for op in main_block(spec).operations if op.type == "while_loop")
    carried = [op.blocks[0].inputs[1], op.blocks[1].inputs[1], op.outputs[1]]
    assert all(each.type.tensorType.dimensions[0].WhichOneof("dimension") == "unknown" for each in carried)
    made = tmp_path / "fixed.mlpackage"
    report = ane.edit(source, made, fix_shape=["x=5,4"])
    assert "keep a flexible shape" in str(report) and "longer" in str(report)
    same_bits(source, made, {"x": normal(5, 4)})


def test_compressed_weights_are_left_as_they_are(tmp_path):
    weight = np.random.default_rng(0).integers(-8, 8, (8, 4, 3)).astype(np.int8)

    def body(x):
        w = mb.constexpr_blockwise_shift_scale(data=weight, scale=np.full((8, 1, 1), 0.1, np.float32), name="w")
        y = mb.conv(x=x, weight=w, pad_type="same", name="conv")
        return mb.mul(x=y, y=mb.cast(x=length_of(y, 2), dtype="fp32"), name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED})
    made = tmp_path / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=["x=1,4,20"])
    assert proto_ops(source)["w"] == proto_ops(made)["w"]
    same_bits(source, made, {"x": normal(1, 4, 20)})


def test_an_op_the_host_does_not_know_keeps_its_type(tmp_path):
    source = flexible(tmp_path / "source.mlpackage", lambda x: mb.relu(x=mb.tanh(x=x, name="strange"), name="out"),
                      {"x": RANGED})
    spec = spec_of(source)
    next(op for op in main_block(spec).operations if op.type == "tanh").type = "apple_strange"
    write_spec(source, spec)
    report = ane.edit(source, tmp_path / "fixed.mlpackage", fix_shape=["x=1,4,20"])
    assert "2 values keep a flexible shape" in str(report) and "strange, out" in str(report)
    assert proto_ops(source)["strange"] == proto_ops(tmp_path / "fixed.mlpackage")["strange"]


def test_large_values_are_left_to_be_computed(tmp_path):
    """A value that no weight file holds and that is too large to be written into the model."""
    def body(x):
        steps = mb.range_1d(start=0, end=mb.mul(x=length_of(x, 2), y=8000, name="end"), step=1, name="steps")
        first = mb.cast(x=mb.slice_by_size(x=x, begin=[0, 0, 0], size=[1, 1, 1]), dtype="int32")
        found = mb.cast(x=mb.less(x=steps, y=mb.squeeze(x=first, axes=[0, 1])), dtype="fp32")
        return mb.reduce_sum(x=found, axes=[0], name="out")

    source = flexible(tmp_path / "source.mlpackage", body, {"x": RANGED}, ct.target.iOS17)
    made = tmp_path / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=["x=1,4,64"])
    same_bits(source, made, {"x": 10 + np.abs(normal(1, 4, 64))})
    kinds = {name: op_named(ane.load(made).program, name).op_type for name in ("steps", "end")}
    assert kinds == {"steps": "range_1d", "end": "const"}
    assert (made / "Data/com.apple.CoreML/model.mlmodel").stat().st_size < 100_000


UNARY = ("relu", "tanh", "abs", "flatten", "back", "padded", "sliced", "scaled", "halves", "masked", "tiled")


def step(kind: str, y: Any) -> Any:
    """One step that keeps rank 2 and 4 columns, most by way of the shape."""
    if hasattr(mb, kind):
        return getattr(mb, kind)(x=y)
    if kind == "padded":
        shape = mb.concat(values=(mb.expand_dims(x=length_of(y, 1), axes=[0]), np.int32([4])), axis=0)
        return mb.concat(values=(y, mb.fill(shape=shape, value=np.float32(0.25))), axis=0)
    rows = length_of(y, 0)
    if kind == "scaled":
        return mb.real_div(x=y, y=mb.cast(x=rows, dtype="fp32"))
    if kind == "masked":
        late = mb.greater(x=mb.range_1d(start=0, end=rows, step=1), y=2)
        return mb.mul(x=y, y=mb.expand_dims(x=mb.cast(x=late, dtype="fp32"), axes=[1]))
    if kind == "tiled":
        return mb.add(x=y, y=mb.tile(x=np.float32([[1, 2, 3, 4]]), reps=mb.concat(
            values=(mb.expand_dims(x=rows, axes=[0]), np.int32([1])), axis=0)))
    if kind == "sliced":
        end = mb.maximum(x=mb.sub(x=rows, y=1), y=1)
        return mb.slice_by_index(x=y, begin=[0, 0], end=mb.concat(
            values=(mb.expand_dims(x=end, axes=[0]), np.int32([4])), axis=0))
    if kind == "halves":
        half = mb.floor_div(x=mb.add(x=rows, y=1), y=2)
        return mb.slice_by_size(x=y, begin=[0, 0], size=mb.concat(
            values=(mb.expand_dims(x=half, axes=[0]), np.int32([4])), axis=0))
    wanted = mb.concat(values=(mb.expand_dims(x=rows, axes=[0]), np.int32([4])), axis=0)
    if kind == "flatten":
        return mb.reshape(x=mb.add(x=mb.reshape(x=y, shape=np.int32([-1])), y=np.float32(0.5)), shape=wanted)
    return mb.reshape(x=mb.transpose(x=y, perm=[1, 0]), shape=wanted)


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=st.lists(st.sampled_from(UNARY), min_size=1, max_size=6), rows=st.integers(1, 12), seed=st.integers(0, 9))
def test_drawn_programs_give_the_same_bits(tmp_path_factory, kinds, rows, seed):
    def body(x):
        for kind in kinds:
            x = step(kind, x)
        return mb.mul(x=x, y=np.float32(2), name="out")

    folder = tmp_path_factory.mktemp("drawn")
    source = flexible(folder / "source.mlpackage", body, {"x": ROWS})
    made = folder / "fixed.mlpackage"
    ane.edit(source, made, fix_shape=[f"x={rows},4"])
    same_bits(source, made, {"x": np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)})
    assert not is_flexible(made)
    kept = {op.op_type for op in ane.load(made).program.functions["main"].operations}
    assert not kept & {"shape", "range_1d", "gather", "fill"}
