"""Inlining of blocks into the block around them: moved once, or copied once a step with constants folded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic
from coremltools.converters.mil.mil.utils import CacheDoublyLinkedList

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs, map_inputs
from ...ir.query import is_const, is_opaque
from ..constants._compile_time_constants import Float64Values, is_compile_time_constant

__all__ = ["BlockCopier", "can_replace_value", "make_replacement_outputs"]

_LOSSLESS_CASTS = frozenset({(types.fp16, types.fp32), *((small, types.int32) for small in (
    types.int8, types.uint8, types.int16, types.uint16)), (types.int8, types.int16), (types.uint8, types.uint16)})
"Pairs of dtypes of which the second can represent every value of the first."
_MAX_FOLDED_BYTES = 1 << 12
"Largest size in bytes of a compile-time constant that a copy stores as a const."


def can_replace_value(new: Var, old: Var) -> bool:
    """Return whether `new` can replace `old`: the types are compatible, and the same dimensions are symbolic."""
    if not types.is_compatible_type(new.sym_type, old.sym_type):
        return False
    if not (types.is_tensor(new.sym_type) and types.is_tensor(old.sym_type)):
        return True
    return all(is_symbolic(one) == is_symbolic(other) for one, other in zip(new.shape, old.shape))


def make_replacement_outputs(mb: RewriteBuilder, op: Operation, made: Sequence[Var]) -> list[Var]:
    """Return `made` as replacements of the outputs of `op`.

    An output of the model that is a const, or the same value as another output, gets an identity.
    """
    found: list[Var] = []
    for var, old in zip(made, op.outputs):
        returned = any(isinstance(block, Function) for block in old.consuming_blocks)
        found.append(mb.identity(x=var) if returned and (is_const(var) or var in found) else var)
    return found


class BlockCopier:
    """Copies of the ops of blocks in the block that `mb` builds in; compile-time constants are not computed.

    A const of the block, and a compressed weight, is moved out and serves all copies. An op with the same inputs as in
    an earlier copy is not built again, and a branch that is always executed is copied without its cond.
    """

    def __init__(self, mb: RewriteBuilder) -> None:
        self._mb = mb
        self._made: dict[Any, list[Var]] = {}
        self._values = Float64Values()
        self._consts: dict[Any, Var] = {}

    def step(self, block: Block, given: Sequence[Var]) -> list[Var]:
        """Return the outputs of `block` for its inputs `given`; `real` materializes those that are constants."""
        env = dict(zip(block.inputs, given))
        self._ops(block, env, None)
        return [env.get(var, var) for var in block.outputs]

    def real(self, var: Var) -> Var:
        """Return `var`, or a const with its known value where `var` is in no block."""
        if var.op is None or var.op.enclosing_block is not None:
            return var
        value = np.asarray(var.val)
        key = (var.sym_type, value.tobytes())
        if key not in self._consts:
            self._consts[key] = self._mb.const(val=var.val, name=var.name)
        return self._consts[key]

    def _ops(self, block: Block, env: dict[Var, Var], into: Block | None) -> None:
        for op in list(block.operations):
            pred = env.get(op.pred, op.pred).val if op.op_type == "cond" else None
            if op.op_type.startswith("const"):
                if op.enclosing_block is not self._mb.block:
                    self._mb.moved(op)
            elif pred is not None:
                taken = op.blocks[0 if pred else 1]
                self._ops(taken, env, into)
                env.update(zip(op.outputs, [env.get(var, var) for var in taken.outputs]))
            else:
                env.update(zip(op.outputs, self._copy(op, env, into)))

    def _copy(self, op: Operation, env: Mapping[Var, Var], into: Block | None) -> list[Var]:
        bound = map_inputs(op, env)
        key = (op, *_iterate_bound_vars(bound))
        if key in self._made:
            return self._made[key]
        if (narrow := _find_value_before_widening(op, bound)) is not None:
            return [narrow]
        twin = clone_op(op, bound)
        for block in op.blocks:
            twin.blocks.append(self._nested(block, twin, env))
        if not is_compile_time_constant(
            infer_outputs(twin, op), _MAX_FOLDED_BYTES
        ) or not self._values.are_exact_in_float64(twin):
            self._insert_copy(twin, into)
        made = list(twin.outputs)
        if into is None and not op.blocks:
            self._made[key] = made
        return made

    def _nested(self, block: Block, outer: Operation, env: Mapping[Var, Var]) -> Block:
        own = copy.copy(block)
        own.outer_op, own.operations = outer, CacheDoublyLinkedList()
        own._internal_vars, own._outputs = set(), []
        own._block_inputs = tuple(map(self._copy_input, block.inputs))
        inner = {**env, **dict(zip(block.inputs, own.inputs))}
        self._ops(block, inner, own)
        own.set_outputs([self.real(inner.get(var, var)) for var in block.outputs])
        return own

    def _copy_input(self, var: Var) -> Var:
        own = copy.copy(var)
        own._child_ops, own.consuming_blocks = [], []
        own.name = self._mb.make_unique_name(var.name)
        return own

    def _insert_copy(self, twin: Operation, into: Block | None) -> None:
        for name, given in twin.inputs.items():
            now = tuple(map(self.real, given)) if isinstance(given, (list, tuple)) else self.real(given)
            twin._input_vars[name] = now
            setattr(twin, name, now)
        self._mb.insert(twin, into)


def _find_value_before_widening(op: Operation, bound: Mapping[str, Any]) -> Var | None:
    """Return the value before a lossless widening cast that `op`, a cast, undoes; None where there is no such cast.

    A loop that keeps its state in a wider type has both casts between two steps.
    """
    wide = bound["x"].op if op.op_type == "cast" else None
    if wide is None or wide.op_type != "cast" or is_opaque(wide):
        return None
    narrow: Var = wide.x
    exact = (narrow.dtype, wide.outputs[0].dtype) in _LOSSLESS_CASTS
    return narrow if exact and can_replace_value(narrow, op.outputs[0]) else None


def _iterate_bound_vars(bound: Mapping[str, Any]) -> Iterator[Var]:
    for given in bound.values():
        yield from given if isinstance(given, (list, tuple)) else [given]
