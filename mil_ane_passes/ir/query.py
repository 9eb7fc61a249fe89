"""Queries about ops and vars, without side effects, for use in rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic, is_symbolic

__all__ = [
    "DATA_MOVEMENT_OPS",
    "OPAQUE",
    "TypeInfo",
    "count_ops",
    "count_stored_bytes",
    "get_const_value",
    "get_consumers",
    "get_contradiction",
    "get_flat_inputs",
    "get_function",
    "get_function_name",
    "get_itemsize",
    "get_pipeline_functions",
    "get_reshape_extents",
    "get_static_shape",
    "get_type_info",
    "is_all_zero",
    "is_compressed",
    "is_computed_in_fp16",
    "is_const",
    "is_const_or_compressed",
    "is_default",
    "is_opaque",
    "is_symbolic",
    "is_used",
    "iterate_blocks",
    "iterate_nested_ops",
    "iterate_ops",
    "iterate_ops_inside_out",
    "iterate_weights",
    "lacks_fp16",
    "plain_type",
    "wraps_negatives",
]

DATA_MOVEMENT_OPS = frozenset({
    "concat", "expand_dims", "gather", "identity", "reshape", "reverse", "select", "slice_by_index", "slice_by_size",
    "split", "squeeze", "stack", "tile", "transpose",
})
"Ops that compute nothing: their results are elements of their inputs, with the same bits."

OPAQUE = " (opaque)"
"Suffix of the type of an op that coremltools defines, but whose inputs in the file it rejects."

_PRECISION_NEUTRAL_OPS = frozenset({"cast", "const", "identity", "read_state", "coreml_update_state"})
"Ops whose dtype does not indicate the precision in which a program computes."


def is_const(var: Var | None) -> bool:
    """Return whether `var` is the output of a const op (compressed weights, `constexpr_*`, are not)."""
    return var is not None and var.op is not None and var.op.op_type == "const"


def is_compressed(var: Var | None) -> bool:
    """Return whether `var` is the output of a `constexpr_*` op: a weight that is stored compressed."""
    return var is not None and var.op is not None and var.op.op_type.startswith("constexpr_")


def get_const_value(var: Var | None, default: Any = None) -> Any:
    """Return the value of a parameter as Python numbers, or `default` if the input is absent or not constant."""
    if var is None or var.val is None:
        return default
    return var.val.tolist() if isinstance(var.val, (np.ndarray, np.generic)) else var.val


def is_all_zero(var: Var | None) -> bool:
    """Return whether `var` is a const whose elements are all zero (of either sign)."""
    return is_const(var) and var is not None and not np.any(var.val)


class TypeInfo(NamedTuple):
    """Cached dtype and shape of a type: pymil derives them on each access, which would be most of the cost of a rule.

    For a state, `dtype` and `shape` are those of its tensor. A scalar has the shape (). `shape` is None if a dimension
    is symbolic.
    """

    dtype: Any
    shape: tuple[int, ...] | None
    is_tensor: bool


@functools.lru_cache(maxsize=1 << 16)
def _get_cached_type_info(sym_type: Any) -> TypeInfo:
    inner = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    if not types.is_tensor(inner):
        return TypeInfo(inner, (), False)
    extents = inner.get_shape()
    shape = None if any_symbolic(extents) else tuple(int(extent) for extent in extents)
    return TypeInfo(inner.get_primitive(), shape, types.is_tensor(sym_type))


def get_type_info(var: Var) -> TypeInfo:
    """Return the cached type info of `var`. The cache does not grow much: pymil keeps one object per type anyway."""
    return _get_cached_type_info(var.sym_type)


def get_static_shape(var: Var) -> tuple[int, ...] | None:
    """Return the shape; None if a dimension is symbolic."""
    return _get_cached_type_info(var.sym_type).shape


def is_opaque(op: Operation) -> bool:
    """Return whether the loader could not interpret `op` (newer opset, custom layer): it is kept, but rules skip it."""
    return bool(getattr(op, "opaque", False))


def get_contradiction(op: Operation) -> str:
    """Return coremltools' error on an opaque op of a type that it defines; "" for other ops."""
    return str(getattr(op, "contradiction", ""))


def plain_type(op: Operation) -> str:
    """Return the op's type as stored in the file."""
    return str(op.op_type).removesuffix(OPAQUE)


def get_itemsize(var: Var) -> int:
    """Return the bytes per element."""
    return _get_dtype_itemsize(_get_cached_type_info(var.sym_type).dtype)


@functools.cache
def _get_dtype_itemsize(dtype: Any) -> int:
    return int(np.dtype(types.nptype_from_builtin(dtype)).itemsize)


def count_stored_bytes(var: Var) -> int:
    """Count the bytes of a constant as stored (half a byte for an int4); 0 if it is not numeric."""
    kind = get_type_info(var)
    if not kind.is_tensor or kind.shape is None or not (types.is_float(kind.dtype) or types.is_int(kind.dtype)):
        return 0
    return -(-math.prod(kind.shape) * int(kind.dtype.get_bitwidth()) // 8)


def get_flat_inputs(op: Operation) -> list[Var]:
    """Return all vars that an op reads, including internal ones, with tuples flattened."""
    return list(op.get_flattened_inputs())


def get_consumers(var: Var) -> list[Operation]:
    """Return the ops that read `var`, each once, in the order in which they were attached; removed ops are skipped."""
    return [op for op in dict.fromkeys(var.child_ops) if op.enclosing_block is not None]


def is_used(var: Var) -> bool:
    """Return whether `var` has a user: an op, or a block that returns it."""
    return bool(var.consuming_blocks) or bool(get_consumers(var))


def is_default(op: Operation, parameter: str) -> bool:
    """Return whether an input equals the default that MIL assumes when it is absent, rounded to the input's dtype."""
    var = op.inputs[parameter]
    if not isinstance(var, Var) or not is_const(var) or types.is_list(var.sym_type) or np.size(var.val) > 16:
        return False
    default = dict(op.default_inputs().items()).get(parameter)
    held, assumed = np.asarray(var.val), np.asarray(default)
    if held.dtype.kind == assumed.dtype.kind == "f":
        assumed = assumed.astype(held.dtype)
    return default is not None and np.array_equal(assumed, held)


def iterate_blocks(program: Program) -> Iterator[tuple[str, Block]]:
    """Yield (function name, block) for every function and nested block, outer blocks first."""
    for name, function in program.functions.items():
        pending: list[Block] = [function]
        while pending:
            block = pending.pop()
            yield name, block
            pending.extend(inner for op in block.operations for inner in op.blocks)


def iterate_ops(program: Program) -> Iterator[tuple[str, Operation]]:
    """Yield (function name, op) for every op of every block."""
    for name, block in iterate_blocks(program):
        for op in block.operations:
            yield name, op


def iterate_weights(program: Program) -> Iterator[Any]:
    """Yield the array of each const of a program."""
    values = (var.val for _, op in iterate_ops(program) if op.op_type == "const" for var in op.outputs)
    return (value for value in values if isinstance(value, np.ndarray))


def iterate_nested_ops(block: Block) -> Iterator[Operation]:
    """Yield the ops of a block and of its nested blocks, each op before those nested in it."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from iterate_nested_ops(inner)


def iterate_ops_inside_out(block: Block) -> Iterator[Operation]:
    """Yield the ops of a block and of its nested blocks, nested ones before the op that contains them."""
    for op in block.operations:
        for inner in op.blocks:
            yield from iterate_ops_inside_out(inner)
        yield op


def get_reshape_extents(shape: Iterable[Any]) -> list[int]:
    """Return a shape as `reshape` reads it; -1 for a symbolic extent."""
    return [-1 if is_symbolic(extent) else int(extent) for extent in shape]


def describe_constant_sizes(op: Operation) -> str:
    """Describe why `op` cannot have operands of these sizes, if it is a reshape to constant sizes; "" for others."""
    if op.op_type != "reshape" or not is_const(op.shape):  # computed sizes may be inferred, and have values, too
        return ""
    return (f"; the sizes {tuple(map(int, op.shape.val))} are constants: a trace fixes the number of tokens (or "
            "another size) of its example where the module does not compute with it; trace with several tokens, not "
            'one, with sizes that are read from x.shape, and models of transformers with attn_implementation="eager"')


def is_const_or_compressed(var: Var) -> bool:
    """Return whether `var` is a const or a compressed weight."""
    return var.op is not None and var.op.op_type.startswith("const")


def is_computed_in_fp16(op: Operation) -> bool:
    """Return whether `op` is evidence that its model computes in fp16.

    It must produce fp16, and must not be a cast, identity, const, state op or weight.
    """
    if op.op_type in _PRECISION_NEUTRAL_OPS or op.op_type.startswith("constexpr_"):
        return False
    return any(get_type_info(var).dtype == types.fp16 and not types.is_state(var.sym_type) for var in op.outputs)


def lacks_fp16(op: Operation) -> bool:
    """Return whether the op is defined for fp32 only in its opset, as recurrent layers before iOS17."""
    accepted = [dtype for domain in getattr(op, "type_domains", {}).values() for dtype in domain]
    return types.fp32 in accepted and types.fp16 not in accepted


def get_function(op: Operation) -> Function:
    """Return the function that contains `op`, also in a nested block."""
    block = op.enclosing_block
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return block


def get_function_name(program: Program, op: Operation) -> str:
    """Return the name of the function that contains `op`."""
    block = get_function(op)
    return next((name for name, function in program.functions.items() if function is block),
                str(program.default_function_name))


def get_pipeline_functions(program: Program) -> tuple[str, ...]:
    """Return the functions of a pipeline in the order in which they run; empty for any other program."""
    return getattr(program, "chain", ())


def count_ops(program: Program) -> int:
    """Count the ops that compute something; consts are not counted."""
    return sum(op.op_type != "const" for _, op in iterate_ops(program))


def wraps_negatives(op: Operation) -> bool:
    """Return whether `op` is `select(i >= 0, i, i + size)`: it counts indices below 0 from the end."""
    if op.op_type != "select" or op.cond.op is None or op.cond.op.op_type != "greater_equal":
        return False
    asked = op.cond.op
    return asked.x is op.a and asked.y.val is not None and not np.any(asked.y.val)
