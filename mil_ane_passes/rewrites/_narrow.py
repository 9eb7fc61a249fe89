"""Ops that compute in fp32, made to compute in fp16 where they stand: they keep their names, and casts stand only where
fp16 and fp32 meet. Which inputs of an op may be fp16 is the host's knowledge (`FP16ComputePrecision`)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

from ..core.build import Names, RewriteBuilder
from ..core.consts import array_const
from ..core.edit import BlockEditor
from ..core.inference import inferred_types
from ..core.query import flat_inputs, is_const, is_opaque, kind_of, within
from ._halves import Halves

__all__ = ["Scope", "computes", "is_fp32", "narrow", "narrowable", "operands"]

Scope = ChainMap[Var, Var]

_HOST = FP16ComputePrecision()
_ANY_FLOAT = frozenset({"cast", "shape"})
"Ops that read fp16 as well as fp32 and give the same."
_FIXED = FP16ComputePrecision._UNSUPPORTED_FP16_OPS | {"const", "classify", "shape"}
_HOST_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"What the host's checks raise for inputs that an op does not take."


def is_fp32(var: Any) -> bool:
    """Whether `var` is a number or a tensor of fp32."""
    return isinstance(var, Var) and kind_of(var).dtype == types.fp32 and not types.is_state(var.sym_type)


def operands(op: Operation) -> Iterator[tuple[str, Var]]:
    """The fp32 values `op` may read in fp16, each with its parameter. The op's function has to be the current one."""
    for name, bound in op.inputs.items():
        given = list(bound) if isinstance(bound, (list, tuple)) else [bound]
        if any(map(is_fp32, given)) and _HOST.should_cast_parameter(op, name):
            yield from ((name, var) for var in given if is_fp32(var))


def computes(op: Operation) -> bool:
    """Whether `op` computes with fp32: it might do so with fp16."""
    if is_opaque(op) or op.op_type in _FIXED or op.op_type.startswith("constexpr_"):
        return False
    if any(not types.is_list(var.sym_type) and var.val is not None for var in op.outputs):
        return False  # known when the model was converted: others may rely on the value
    return any(map(is_fp32, flat_inputs(op)))


def narrowable(op: Operation) -> bool:
    """Whether the host says that `op` may read fp16, and what it makes of it. The op's function is the current one."""
    return next(operands(op), None) is not None


def narrow(program: Program, chosen: Collection[Operation], halves: Halves) -> set[Operation]:
    """Let the ops `chosen` compute in fp16, in place; inputs, outputs, states and all other ops keep their types.

    Returns those of `chosen` that the host does not let read fp16; they stay as they are.
    """
    refused: set[Operation] = set()
    for function in program.functions.values():
        _Function(function, chosen, halves, refused).go()
    return refused


class _Function:
    """The conversion of one function. Two scopes say what is known under another type: the fp16 of an fp32 value, and
    the fp32 of a narrowed one."""

    def __init__(self, function: Function, chosen: Collection[Operation], halves: Halves, refused: set[Operation]
                 ) -> None:
        self._function, self._chosen, self._halves, self._refused = function, chosen, halves, refused
        self._names = Names(function)
        self._narrowed: set[Var] = set()
        self._loose: dict[Operation, None] = {}
        self._idle: list[Operation] = []

    def go(self) -> None:
        if not any(op in self._chosen for op in within(self._function)):
            return
        self._block(self._function, ChainMap(), ChainMap())
        for op in self._idle:  # not before: until all are seen, who reads a narrowed value is taken to want fp32
            self._drop(op)
        with BlockEditor() as editor:
            editor.remove_if_unused(self._loose)

    def _block(self, block: Block, half: Scope, full: Scope) -> None:
        with block:
            mb = RewriteBuilder(block, self._names)
            for op in list(block.operations):
                with mb.at(op):
                    if op in self._chosen and self._narrow(op, mb, half):
                        pass
                    elif op.op_type == "cast" and op.x in self._narrowed and op.outputs[0].dtype == types.fp16:
                        self._idle.append(op)
                    elif op.op_type not in _ANY_FLOAT:
                        self._widen(op, mb, full)
                    mb.adopt(op.scopes)
                for inner in op.blocks:
                    self._block(inner, half.new_child(), full.new_child())
            self._outputs(block, mb, full)

    def _narrow(self, op: Operation, mb: RewriteBuilder, half: Scope) -> bool:
        """Whether `op` computes in fp16 now."""
        old = op.inputs
        wanted = {name for name, _ in operands(op)}
        new = {name: tuple(self._half(var, mb, half, op) for var in bound) if isinstance(bound, (list, tuple))
               else self._half(bound, mb, half, op)
               for name, bound in old.items() if name in wanted}
        packed = op.op_type.startswith("constexpr_")  # whose data must not be read
        try:
            op.input_spec.validate_inputs(op.name, op.op_type, new if packed else {**old, **new})
            self._rebind(op, new)
            made = [_half_type(var) for var in op.outputs] if packed else inferred_types(op)
        except _HOST_ERRORS:
            self._refused.add(op)
            self._rebind(op, {name: old[name] for name in new})
            return False
        for var, kind in zip(op.outputs, made if isinstance(made, (list, tuple)) else [made]):
            if is_fp32(var) and _primitive(kind) == types.fp16:
                var._sym_type, var._sym_val = _half_type(var), None
                self._narrowed.add(var)
        return True

    def _half(self, var: Var, mb: RewriteBuilder, half: Scope, reader: Operation) -> Var:
        """`var` in fp16, for `reader`."""
        if not is_fp32(var):
            return var
        if var not in half:
            op = var.op
            if is_const(var):
                half[var] = self._const(var, mb, reader)
            elif op is not None and op.op_type == "cast" and op.x.dtype == types.fp16:
                half[var] = op.x
            elif op is not None and op.op_type == "cast":
                half[var] = mb.cast(x=op.x, dtype="fp16", name=f"{var.name}_to_fp16")
            else:
                half[var] = mb.cast(x=var, dtype="fp16", name=f"{var.name}_to_fp16")
        if var.op is not None:
            self._loose[var.op] = None
        return half[var]

    def _const(self, var: Var, mb: RewriteBuilder, reader: Operation) -> Var:
        value, name = self._halves.value(var), self._names.fresh(f"{var.name}_to_fp16")
        made: Var = (array_const(value, types.fp16, name, reader) if value.ndim
                     else Builder.const(val=np.float16(value), name=name, before_op=reader))
        mb.created.append(made.op)
        return made

    def _full(self, var: Var, mb: RewriteBuilder, full: Scope) -> Var:
        """A narrowed `var` in fp32, anything else as it is."""
        if var not in self._narrowed:
            return var
        if var not in full:
            full[var] = mb.cast(x=var, dtype="fp32", name=f"{var.name}_to_fp32")
        return full[var]

    def _widen(self, op: Operation, mb: RewriteBuilder, full: Scope) -> None:
        """`op`, which stays in fp32, reads what is fp16 now through casts."""
        new = {name: tuple(self._full(var, mb, full) for var in bound) if isinstance(bound, (list, tuple))
               else self._full(bound, mb, full)
               for name, bound in op.inputs.items()
               if any(var in self._narrowed for var in (bound if isinstance(bound, (list, tuple)) else [bound]))}
        self._rebind(op, new)

    def _drop(self, op: Operation) -> None:
        """A cast to fp16 of what is fp16 now goes, if there is another who can bear its name."""
        made, given = op.outputs[0], op.x
        if made.consuming_blocks and (given.consuming_blocks or given.op.enclosing_block is not op.enclosing_block):
            return
        name = made.name
        made.name = self._names.fresh(f"{name}_replaced") if made.consuming_blocks else name
        returned = bool(made.consuming_blocks)
        with BlockEditor() as editor:
            editor.replace(made, given)
            editor.remove_if_unused([op])
        if returned:
            given.name = name

    def _outputs(self, block: Block, mb: RewriteBuilder, full: Scope) -> None:
        """What the block returns keeps its type and, from a function, its name."""
        for var in dict.fromkeys(block.outputs):
            if var not in self._narrowed:
                continue
            name = var.name
            last = mb.cast(x=var, dtype="fp32", name=f"{name}_to_fp32")
            mb.adopt(var.op.scopes)
            if isinstance(block, Function):
                var.name = self._names.fresh(f"{name}_to_fp16")
                last.name = name
            block.set_outputs([last if each is var else each for each in block.outputs])

    @staticmethod
    def _rebind(op: Operation, new: dict[str, Any]) -> None:
        if new:
            op.set_inputs(no_check_var_types=True, **new)


def _primitive(kind: Any) -> Any:
    return kind.get_primitive() if types.is_tensor(kind) else kind


def _half_type(var: Var) -> Any:
    return types.tensor(types.fp16, var.shape) if types.is_tensor(var.sym_type) else types.fp16
