"""The rules' examples with one axis as long as a hostile or a careless package may declare it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import Builder, Program, types

from mil_ane_passes.passes.contract import Rule
from mil_ane_passes.passes.examples import build_program

WIDENING_FACTOR = 1 << 26
_MAX_EXTENT = (1 << 31) - 1
"What an int32 of a program holds: sizes stand in its parameters, too."
_INTEGER_KINDS = ("ints", "longInts")


def convert_program(program: Program) -> Any | None:
    """The spec and weights folder of a program as it is, None where coremltools does not write it."""
    if any(types.is_tensor(var.sym_type) and var.rank > 5 for op in program.functions["main"].operations
           for var in op.outputs):
        return None
    return ct.convert(program, convert_to="mlprogram", pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True,
                      minimum_deployment_target=program.functions["main"].opset_version)


def iterate_examples(rule: type[Rule]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The name, the options and the converted model of each example of `rule`."""
    for example in rule().examples():
        model = convert_program(example.build())
        if model is not None:
            yield example.name, dict(example.options), model


def iterate_hostile_scatters() -> Iterator[tuple[str, Program]]:
    """Programs whose constants say little of how large their values are; `scatter_nd` and windows of `slice_update`."""
    update = np.ones((2, 3), np.float16)
    for rows in (1 << 28, 1 << 30):
        yield f"scatter_nd into {rows}", build_program(lambda x: Builder.scatter_nd(
            data=x, indices=np.array([[1], [7]], np.int32), updates=update, mode="update", name="y"), x=(rows, 3))
        yield f"half of {rows}", build_program(lambda x, rows=rows: Builder.slice_update(
            x=x, update=Builder.slice_by_index(x=x, begin=[0, 0], end=[rows // 2, 3]), begin=[0, 0],
            end=[rows // 2, 3], name="y"), opset=ct.target.iOS18, x=(rows, 3))


def make_range_model(count: int) -> tuple[Any, Any]:
    """The model of a `range_1d` of `count` numbers, 0.6 KB whatever the count."""
    few = 97
    model = convert_program(build_program(lambda x: [Builder.relu(x=x), Builder.range_1d(
        start=np.int32(0), end=np.int32(few), step=np.int32(1), name="y")], x=(2, 3)))
    return model, widen_model(model.get_spec(), few, to=count)


def make_relu_model(count: int) -> tuple[Any, Any]:
    """The model of a relu of `count` elements."""
    model = convert_program(build_program(lambda x: Builder.relu(x=x, name="y"), x=(7,)))
    return model, widen_model(model.get_spec(), 7, to=count)


def collect_extents(spec: Any) -> list[int]:
    """The different extents of the axes of the model's inputs, of those that are known."""
    inputs = spec.mlProgram.functions["main"].inputs
    return sorted({size.constant.size for each in inputs for size in each.type.tensorType.dimensions
                   if size.WhichOneof("dimension") == "constant"})


def widen_model(spec: Any, extent: int, to: int | None = None) -> Any:
    """A copy of the model whose axes of `extent` are `to` long, or `WIDENING_FACTOR` times as long: in types and inline
    integers.

    What lies in weight files stays, and so do constants with such an axis: of those a package holds every element.
    """
    made = proto.Model_pb2.Model()
    made.CopyFrom(spec)
    long = min(extent * WIDENING_FACTOR, _MAX_EXTENT) if to is None else to
    function = made.mlProgram.functions["main"]
    for declared in function.inputs:
        _widen_type(declared.type, extent, long)
    for block in function.block_specializations.values():
        _widen_block(block, extent, long)
    for feature in (*made.description.input, *made.description.output):
        shape = feature.type.multiArrayType.shape
        shape[:] = [long if size == extent else size for size in shape]
    return made


def _widen_block(block: Any, extent: int, long: int) -> None:
    for op in block.operations:
        if op.type == "const":
            _widen_integers(op.attributes["val"], extent, long)
            continue
        if op.type.startswith("constexpr_"):
            continue
        for output in op.outputs:
            _widen_type(output.type, extent, long)
        for bound in op.inputs.values():
            for argument in bound.arguments:
                if argument.WhichOneof("binding") == "value":
                    _widen_integers(argument.value, extent, long)
        for inner in op.blocks:
            for declared in inner.inputs:
                _widen_type(declared.type, extent, long)
            _widen_block(inner, extent, long)


def _widen_type(declared: Any, extent: int, long: int) -> None:
    kind = declared.WhichOneof("type")
    if kind == "stateType":
        _widen_type(declared.stateType.wrappedType, extent, long)
    elif kind == "tensorType":
        for size in declared.tensorType.dimensions:
            if size.WhichOneof("dimension") == "constant" and size.constant.size == extent:
                size.constant.size = long


def _widen_integers(value: Any, extent: int, long: int) -> None:
    held = value.immediateValue.tensor
    kind = held.WhichOneof("value")
    if kind in _INTEGER_KINDS:
        values = getattr(held, kind).values
        if long > _MAX_EXTENT:
            return
        values[:] = [long if each == extent else each for each in values]


def write_package(folder: Path, model: Any, spec: Any) -> Path:
    """The package of `model` in `folder` with `spec` in place of its own."""
    path = folder / "widened.mlpackage"
    if not path.exists():
        model.save(str(path))
    (path / "Data/com.apple.CoreML/model.mlmodel").write_bytes(spec.SerializeToString())
    return path


@contextmanager
def limit_memory(more: int) -> Iterator[None]:
    """This process gets `addend` bytes of addresses, and a MemoryError for what it asks beyond them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
