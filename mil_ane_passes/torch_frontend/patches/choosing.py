"""`where` of numbers, and ops on bools and ints without a lowering in coremltools: `x | y`, `x ^ y`, `x & 3`, `x << 2`.

coremltools infers the type of a select from its two values alone, which is wrong if the condition has the largest
shape. Here a value is first broadcast to the shape of a flexible condition. `masked_fill` of a larger mask has that
fault, too.
A bitwise op of bools is the logical op. Of ints, `& (2^k - 1)` is the remainder by 2^k, and a shift is a product or a
floored quotient by a power of two: exact in two's complement. Other bit patterns have no lowering.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    has_static_shape,
    is_constant,
    name_result,
    promote_operands,
    to_python,
    to_tensor,
)

PATCH = Patch(code="TORCH107",
              title="`where` of numbers, `x | y`, `x ^ y`, `x & 3` and shifts are not implemented",
              upstream=("none known",))


@PATCH.op("where", "where.self", "where.scalarself", "where_scalarself", "where.scalarother")
def where(context: Any, node: Any) -> None:
    """Lower where(condition, self, other); where(condition) is coremltools'."""
    if len(node.inputs) + len(node.kwinputs or {}) == 1:
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping["where"](context, node)
        return
    inputs = bind_arguments(context, node, "condition self other")
    condition = cast_to(to_tensor(inputs.condition), types.bool)
    _add_choice(context, node, condition, *promote_operands(inputs.self, inputs.other))


@PATCH.op("masked_fill")
def masked_fill(context: Any, node: Any) -> None:
    """Lower masked_fill(self, mask, value) of a mask that is larger than self; all others are coremltools' own."""
    inputs = bind_arguments(context, node, "self mask value")
    mask, x = to_tensor(inputs.mask), inputs.self
    if _covers_shape(mask, x):
        ops.masked_fill(context, node)
        return
    _add_choice(context, node, cast_to(mask, types.bool), cast_to(to_tensor(inputs.value), x.dtype), x)


def _add_choice(context: Any, node: Any, condition: Var, first: Var, second: Var) -> None:
    """Add the elements of `first` where `condition` holds, and of `second` elsewhere, as the result of `node`."""
    if first.dtype == types.bool:
        add_result(context, node, name_result(_select_bools(condition, first, second), node))
        return
    operands = [condition, first, second]
    if all(map(has_static_shape, operands)) and len({operand.shape for operand in operands}) > 1:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
        operands = [_expand_to_shape(operand, shape) for operand in operands]
    condition, first, second = operands
    if not _covers_shape(condition, first, second):
        first = _fill_shape_of(condition, first)
    add_result(context, node, mb.select(cond=condition, a=first, b=second, name=node.name))


def _covers_shape(condition: Var, *chosen: Var) -> bool:
    """Return whether the shapes of `chosen` alone are that of the result."""
    sizes = list(zip_longest(*(reversed(var.shape) for var in chosen), fillvalue=1))
    return condition.rank <= len(sizes) and all(
        size == 1 or any(own != 1 for own in others) for size, others in zip(reversed(condition.shape), sizes))


def _fill_shape_of(condition: Var, x: Var) -> Var:
    """Broadcast `x` to the flexible shape of `condition`."""
    number = types.nptype_from_builtin(x.dtype)
    if x.rank == 0 and x.val is not None:
        return mb.fill(shape=mb.shape(x=condition), value=number(x.val))
    return mb.add(x=mb.fill(shape=mb.shape(x=condition), value=number(0)), y=x)


def _select_bools(condition: Var, first: Var, second: Var) -> Var:
    kept = mb.logical_and(x=mb.logical_not(x=condition), y=second)
    return mb.logical_or(x=mb.logical_and(x=condition, y=first), y=kept)


def _expand_to_shape(x: Var, shape: tuple[int, ...]) -> Var:
    from ..lowering import broadcast_to

    if x.val is not None:
        return mb.const(val=np.broadcast_to(x.val, shape).copy())
    return broadcast_to(x, list(shape))


@PATCH.op("bitwise_and", "bitwise_or", "bitwise_xor", "and", "or", "xor")
def lower_bitwise(context: Any, node: Any) -> None:
    """Lower bitwise_and(self, other) and similar ops."""
    inputs = bind_arguments(context, node, "self other")
    kind = node.kind.strip("_").removeprefix("bitwise_").partition(".")[0]
    if kind == "and" and (mask := _mask_constant(inputs.self, inputs.other)) is not None:
        add_result(context, node, mb.cast(x=mask, dtype="int32", name=node.name))
        return
    x, y = promote_operands(inputs.self, inputs.other)
    if x.dtype == types.bool:
        logical = {"and": mb.logical_and, "or": mb.logical_or, "xor": mb.logical_xor}[kind]
        add_result(context, node, logical(x=x, y=y, name=node.name))
        return
    if kind != "and":
        raise _make_bitwise_error(node, inputs, f"'{kind}' of ints has no lowering")
    x, y = (y, x) if is_constant(x) and not is_constant(y) else (x, y)
    mask = np.unique(np.asarray(to_python(y, node, "other") if is_constant(y) else -1, dtype=np.int64))
    if np.any(mask < 0) or np.any(mask & (mask + 1)) or np.any(mask > 2**30 - 1):
        raise _make_bitwise_error(node, inputs, "'and' of ints is supported for constant masks 2^k - 1 only")
    add_result(context, node, mb.mod(x=x, y=mb.add(x=y, y=np.int32(1)), name=node.name))


def _mask_constant(first: Any, second: Any) -> Var | None:
    """Return the last bits of constant integers where a bool is true, as of a triangle of bytes; None of others."""
    for mask, number in ((first, second), (second, first)):
        if isinstance(mask, Var) and isinstance(number, Var) and mask.dtype == types.bool and (
                types.is_int(number.dtype) and number.val is not None):
            return mb.logical_and(x=mask, y=np.asarray(number.val) & 1 == 1)
    return None


def _make_bitwise_error(node: Any, inputs: Any, what: str) -> NotConverted:
    """Make the error for a bitwise op; a bool beside another type may be a mask that the model declares as numbers."""
    dtypes = [to_tensor(each).dtype for each in (inputs.self, inputs.other)]
    if dtypes.count(types.bool) != 1:
        return NotConverted.at(node, what, "write mask.bool() for masks, and arithmetic for numbers")
    kind = what.partition(" ")[0]
    first, second = map(types.builtin_to_string, dtypes)
    number = second if dtypes[0] == types.bool else first
    return NotConverted.at(node, f"{kind} of {first} and {second}",
                           f"if the {number} operand is a mask, write mask.bool(), else arithmetic")


@PATCH.op("lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift")
def lower_shift(context: Any, node: Any) -> None:
    """Lower __lshift__(self, other), __rshift__(self, other): times, or floored quotient by, 2^other."""
    inputs = bind_arguments(context, node, "self other")
    amount = np.asarray(to_python(inputs.other, node, "other"))
    if inputs.self.dtype == types.bool or np.any(amount < 0) or np.any(amount > 30):
        raise NotConverted.at(node, "shifts bools, or by less than 0 or more than 30 bits", "use arithmetic")
    left = "lshift" in node.kind or "left" in node.kind
    factor = (1 << amount.astype(np.int64)).astype(np.int32)
    if types.is_float(inputs.self.dtype):
        raise NotConverted.at(node, "shifts floats", "multiply by a power of two")
    result = (mb.mul if left else mb.floor_div)(x=inputs.self, y=factor if factor.ndim else factor[()])
    add_result(context, node, name_result(result, node))
