"""Model files that ask for more than they hold, or say the same thing twice; made small, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coremltools import proto

from .helpers import MODEL

FLOAT, BOOL, INT = 11, 1, 23
OPSET = "CoreML7"


def package(path: Path, raw: bytes) -> Path:
    """A package of model file `raw`, without weights."""
    (path / MODEL).parent.mkdir(parents=True)
    (path / MODEL).write_bytes(raw)
    items = {"model": {"path": "com.apple.CoreML/model.mlmodel"}}
    (path / "Manifest.json").write_text(json.dumps({"rootModelIdentifier": "model", "itemInfoEntries": items}))
    return path


def tensor(declared: Any, *shape: int | None, dtype: int = FLOAT) -> None:
    """Declares `declared` a tensor; None is an unknown dimension."""
    declared.tensorType.dataType, declared.tensorType.rank = dtype, len(shape)
    for size in shape:
        dimension = declared.tensorType.dimensions.add()
        if size is None:
            dimension.unknown.SetInParent()
        else:
            dimension.constant.size = size


class Made:
    """A model with one function of one input `x` of four floats, which it gives back."""

    def __init__(self) -> None:
        self.model = proto.Model_pb2.Model()
        self.model.specificationVersion = 8
        self.function = self.model.mlProgram.functions["main"]
        self.function.opset = OPSET
        self.input("x", 4)
        self.block = self.function.block_specializations[OPSET]
        self.block.outputs.append("x")

    def input(self, name: str, *shape: int | None, dtype: int = FLOAT) -> None:
        declared = self.function.inputs.add()
        declared.name = name
        tensor(declared.type, *shape, dtype=dtype)

    def op(self, kind: str, output: str | None, shape: tuple[int | None, ...] | None = None, dtype: int = FLOAT, /,
           **inputs: str) -> Any:
        made = self.block.operations.add()
        made.type = kind
        for param, name in inputs.items():
            made.inputs[param].arguments.add().name = name
        if output is not None:
            declared = made.outputs.add()
            declared.name = output
            if shape is not None:
                tensor(declared.type, *shape, dtype=dtype)
        return made

    def const(self, name: str, shape: tuple[int, ...], values: list[Any], dtype: int = INT) -> Any:
        made = self.op("const", name, shape, dtype)
        value = made.attributes["val"]
        value.type.CopyFrom(made.outputs[0].type)
        held = {INT: "ints", FLOAT: "floats", BOOL: "bools"}[dtype]
        getattr(value.immediateValue.tensor, held).values.extend(values)
        return made

    def bytes(self) -> bytes:
        return bytes(self.model.SerializeToString())


def giant(kind: str, shape: tuple[int, ...], consts: dict[str, tuple[tuple[int, ...], list[Any], int]]) -> bytes:
    """An op that makes `shape` of a few constants."""
    made = Made()
    for name, (const_shape, values, dtype) in consts.items():
        made.const(f"its_{name}", const_shape, values, dtype)
    made.op(kind, "giant", shape, **{name: f"its_{name}" for name in consts})
    return made.bytes()


def several(build: Callable[[Made, int], object], count: int) -> bytes:
    made = Made()
    for number in range(count):
        build(made, number)
    return made.bytes()


def nested(depth: int) -> bytes:
    made = Made()
    block = made.block
    for _ in range(depth):
        op = block.operations.add()
        op.type = "custom"
        block = op.blocks.add()
    return made.bytes()
