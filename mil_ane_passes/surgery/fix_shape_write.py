"""Puts what was inferred into a function: sizes where the file has none, values in the place of ops that make them."""

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
from ..package.export import Exporter, message
from ..package.origin import Origin
from ..package.plan import WeightPlan
from .fix_shape_fold import Fates
from .fix_shape_infer import in_file, sizes_of
from .fix_shape_inputs import declared_shape, fixed_type, is_open
from .parts import OP_OUTPUTS, Block, Declared, Function, Op

__all__ = ["Written", "write"]


@dataclass
class Written:
    """What was done: how many values got sizes, the types of the ops that became consts (and how many of the consts
    another machine may compute to other bits) or went, what stays open."""

    sized: int = 0
    consts: list[str] = field(default_factory=list)
    rounded: int = 0
    dropped: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)


def write(function: Function, host: HostFunction, fates: Fates, version: int, plan: WeightPlan) -> Written:
    """Edits `function`, which `host` is as a pymil program's. New weights are added to `plan`."""
    writer = _Writer(fates, Exporter(version, plan, lambda block: b""))
    writer.block(function.block, host)
    writer.written.rounded = len(fates.rounded)
    return writer.written


class _Writer:
    def __init__(self, fates: Fates, export: Exporter) -> None:
        self._fates, self._export = fates, export
        self.written = Written()

    def block(self, block: Block, host: HostBlock) -> None:
        ops: list[Op] = []
        for place, op, origin in in_file(host):
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
        # The host's `select` holds a scalar as an array without dimensions, which its exporter does not take.
        scalar = None if types.is_tensor(var.sym_type) else np.asarray(var.val)[()]
        value = self._export.get_milproto_value(var) if scalar is None else helper.create_scalar_value(scalar)
        made.attributes["val"].CopyFrom(value)
        made.outputs.add(name=declared.name, type=fixed_type(declared.type, var.shape))
        return Op(message(made))

    def _typed(self, part: Op, op: Operation, outputs: tuple[int, ...]) -> Op:
        typed = [self._declared(data, op.outputs[index])
                 for data, index in zip(wire.payloads(part.data, OP_OUTPUTS), outputs, strict=True)]
        data = wire.replace(part.data, OP_OUTPUTS, typed)
        made = part if data is part.data else Op(data)
        if not op.blocks:
            return made
        blocks = made.blocks
        for block, host in zip(blocks, op.blocks, strict=True):
            inputs = [Declared(self._declared(each.data, var))
                      for each, var in zip(block.inputs, host.inputs, strict=True)]
            if [each.data for each in inputs] != [each.data for each in block.inputs]:
                block.inputs = inputs
            self.block(block, host)
        return made.with_blocks(blocks)

    def _declared(self, data: bytes, var: Var) -> bytes:
        """The declaration of a value with the sizes that are known now."""
        declared: Any = Declared(data).message
        if not is_open(declared.type):
            return data
        then, now = declared_shape(declared.type), sizes_of(var.sym_type)
        if now is None or (then is not None and len(then) != len(now)) or (then is None and None in now):
            self.written.open.append(declared.name)
            return data
        made = fixed_type(declared.type, now)
        if is_open(made):
            self.written.open.append(declared.name)
        if made == declared.type:
            return data
        self.written.sized += 1
        return wire.replace(data, 2, [message(made)])
