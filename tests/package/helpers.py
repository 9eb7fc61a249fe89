"""Packages to test with, and looks at what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil.frontend.milproto.load import load as host_load
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, Program

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Draw float32 numbers that depend on nothing but the shape and the seed."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def make(path: Path, program: Program, target: Any = ct.target.iOS15, **options: Any) -> Path:
    """Converts a program and saves it as a package; in fp32 unless told, so that names stay as written."""
    options.setdefault("compute_precision", ct.precision.FLOAT32)
    model = ct.convert(
        program, convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True, **options
    )
    model.save(str(path))
    return path


def with_functions(path: Path, parts: Mapping[str, Path | str], default: str) -> Path:
    """Saves a package with several functions: the main functions of these packages under new names."""
    described = ct.utils.MultiFunctionDescriptor()
    for name, part in parts.items():
        described.add_function(str(part), "main", name)
    described.default_function_name = default
    ct.utils.save_multifunction(described, str(path))
    return path


def conv_program(target: Any = ct.target.iOS15, channels: int = 16) -> Program:
    weight = normal(channels, 8, 3, 3)

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 16, 16))], opset_version=target)
    def program(x):
        y = mb.conv(x=x, weight=weight, bias=np.ones(channels, np.float32), pad_type="same", name="conv")
        y = mb.relu(x=y, name="relu")
        y = mb.reshape(x=y, shape=(1, channels, 256), name="flat")
        return mb.softmax(x=y, axis=-1, name="out")

    return program


def linear_program(target: Any = ct.target.iOS16) -> Program:
    first, second = normal(128, 64), normal(64, 128)

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=target)
    def program(x):
        y = mb.relu(x=mb.linear(x=x, weight=first, name="first"), name="relu")
        return mb.linear(x=y, weight=second, name="second")

    return program


def spec_of(path: Path) -> Any:
    return proto.Model_pb2.Model.FromString((path / MODEL).read_bytes())


def write_spec(path: Path, spec: Any) -> None:
    (path / MODEL).write_bytes(spec.SerializeToString())


def main_block(spec: Any, function: str = "main") -> Any:
    found = spec.mlProgram.functions[function]
    return found.block_specializations[found.opset]


def proto_ops(path: Path, function: str = "main") -> dict[str, bytes]:
    """The bytes of each op by its first output's name, cut out of the file by an own scan."""
    data = (path / MODEL).read_bytes()
    functions = {_text(e, 1): _sub(e, 2) for e in _all(_sub(data, 502), 2)}
    body = functions[function]
    blocks = {_text(e, 1): _sub(e, 2) for e in _all(body, 3)}
    block = blocks[_text(body, 2)]
    ops = {}
    for index, op in enumerate(_all(block, 3)):
        outputs = _all(op, 3)
        ops[_text(outputs[0], 1) if outputs else f"{_text(op, 1)} {index}"] = op
    return ops


def _all(data: bytes, number: int) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            size, at = _varint(data, at)
            if tag >> 3 == number:
                found.append(data[at : at + size])
            at += size
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        else:
            at += 8 if tag & 7 == 1 else 4
    return found


def _sub(data: bytes, number: int) -> bytes:
    return _all(data, number)[-1]


def _text(data: bytes, number: int) -> str:
    return _sub(data, number).decode()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def tree(path: Path) -> dict[str, bytes]:
    """All files of a package."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def host_program(path: Path) -> Program:
    """The package as coremltools' own reader sees it."""
    spec = spec_of(path)
    return host_load(spec, spec.specificationVersion, str((path / WEIGHTS).parent))


def op_named(program: Program, output: str, function: str = "main") -> Operation:
    def search(block: Any) -> Any:
        for op in block.operations:
            if any(var.name == output for var in op.outputs):
                return op
            for inner in op.blocks:
                found = search(inner)
                if found is not None:
                    return found
        return None

    return search(program.functions[function])


def facts(program: Program) -> list[Any]:
    """What a program is, without the names of consts and the consts nothing uses."""
    found: list[Any] = []

    def value(var: Any) -> Any:
        if var.op is not None and var.op.op_type == "const":
            val = var.val
            return ("const", np.asarray(val).dtype.str, np.shape(val), np.asarray(val).tobytes())
        return var.name

    def block(b: Any) -> None:
        for op in b.operations:
            if op.op_type == "const":
                continue
            inputs = []
            for param, var in sorted(op.inputs.items()):
                if not param.startswith("_"):
                    inputs.append((param, [value(v) for v in (var if isinstance(var, (list, tuple)) else [var])]))
            found.append((op.op_type, inputs, [v.name for v in op.outputs]))
            for inner in op.blocks:
                block(inner)
        found.append([value(v) for v in b.outputs])

    for name, function in program.functions.items():
        found.append(
            (
                name,
                [
                    (n, [d if isinstance(d, int) else None for d in v.shape], v.dtype)
                    for n, v in function.inputs.items()
                ],
            )
        )
        block(function)
    return found


def replace(op: Operation, build: Any, name: str | None = None) -> Any:
    """Replaces `op` by what `build` makes before it, as the rewrite engine does."""
    block, old = op.enclosing_block, op.outputs[0]
    with block, mb.set_before_op(op):
        new = build()
    if name is not None:
        new.name = name
    block.replace_uses_of_var_after_op(anchor_op=op, old_var=old, new_var=new, force_replace=True)
    block.remove_ops([op])
    return new
