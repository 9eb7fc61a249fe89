"""Writing of inferred results into a function: sizes where the file has none, and consts in place of folded ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.backend.mil import helper
from coremltools.converters.mil.mil import Block as HostBlock
from coremltools.converters.mil.mil import Function as HostFunction
from coremltools.converters.mil.mil import Operation, Var, types

from ..package import wire
from ..package.op_exporter import Exporter, serialize_message
from ..package.origin import Origin
from ..package.weight_plan import WeightPlan
from .fix_shape_folding import FoldPlan
from .fix_shape_inference import get_sizes, list_file_ops
from .fix_shape_inputs import fix_type_sizes, get_declared_shape, has_flexible_size
from .program_parts import OP_OUTPUTS, Block, Function, Op, ValueDeclaration

__all__ = ["WriteResult", "write_function"]


@dataclass
class WriteResult:
    """The changes made: the number of values that got sizes, the types of the ops that became consts or were removed,
    and the values that stay flexible.

    `rounded` counts the consts that another machine may compute to other bits.
    """

    sized: int = 0
    consts: list[str] = field(default_factory=list)
    rounded: int = 0
    dropped: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def write_function(
    function: Function, host: HostFunction, fates: FoldPlan, version: int, plan: WeightPlan
) -> WriteResult:
    """Edit `function`, whose pymil form is `host`. New weights are added to `plan`."""
    writer = _Writer(fates, Exporter(version, plan, lambda block: b""))
    writer.block(function.block, host)
    writer.written.rounded = len(fates.rounded)
    return writer.written


class _Writer:
    def __init__(self, fates: FoldPlan, export: Exporter) -> None:
        self._fates, self._export = fates, export
        self.written = WriteResult()

    def block(self, block: Block, host: HostBlock) -> None:
        ops: list[Op] = []
        for place, op, origin in list_file_ops(host):
            parts = block.ops[place : place + len(origin.parts)]
            if op in self._fates.values:
                ops.extend(self._const(op, origin, var, parts[0]) for var in self._fates.values[op])
                self.written.consts.append(op.op_type)
            elif op in self._fates.kept:
                ops.extend(self._typed(part, op, held.outputs)
                           for part, held in zip(parts, origin.parts, strict=True))
            elif op.op_type != "const":
                self.written.dropped.append(op.op_type)
        if len(ops) != len(block.ops) or any(a is not b for a, b in zip(ops, block.ops)):
            block.ops = ops

    def _const(self, op: Operation, origin: Origin, var: Var, part: Op) -> Op:
        declared = part.message.outputs[origin.parts[0].outputs.index(op.outputs.index(var))]
        made = proto.MIL_pb2.Operation(type="const")
        made.attributes["name"].CopyFrom(helper.create_scalar_value(declared.name))
        # coremltools' `select` holds a scalar as an array without dimensions, which its exporter rejects.
        scalar = None if types.is_tensor(var.sym_type) else np.asarray(var.val)[()]
        value = self._export.get_milproto_value(var) if scalar is None else helper.create_scalar_value(scalar)
        made.attributes["val"].CopyFrom(value)
        made.outputs.add(name=declared.name, type=fix_type_sizes(declared.type, var.shape))
        return Op(serialize_message(made))

    def _typed(self, part: Op, op: Operation, outputs: tuple[int, ...]) -> Op:
        typed = [self._declared(data, op.outputs[index])
                 for data, index in zip(wire.get_payloads(part.data, OP_OUTPUTS), outputs, strict=True)]
        data = wire.replace_fields(part.data, OP_OUTPUTS, typed)
        made = part if data is part.data else Op(data)
        if not op.blocks:
            return made
        blocks = made.blocks
        for block, host in zip(blocks, op.blocks, strict=True):
            inputs = [ValueDeclaration(self._declared(each.data, var))
                      for each, var in zip(block.inputs, host.inputs, strict=True)]
            if [each.data for each in inputs] != [each.data for each in block.inputs]:
                block.inputs = inputs
            self.block(block, host)
        return made.with_blocks(blocks)

    def _declared(self, data: bytes, var: Var) -> bytes:
        """Return the declaration of a value with the sizes that are known now."""
        declared: Any = ValueDeclaration(data).message
        if not has_flexible_size(declared.type):
            return data
        then, now = get_declared_shape(declared.type), get_sizes(var.sym_type)
        if now is None or (then is not None and len(then) != len(now)) or (then is None and None in now):
            self.written.open.append(declared.name)
            return data
        made = fix_type_sizes(declared.type, now)
        if has_flexible_size(made):
            self.written.open.append(declared.name)
        if made == declared.type:
            return data
        self.written.sized += 1
        return wire.replace_fields(data, 2, [serialize_message(made)])
