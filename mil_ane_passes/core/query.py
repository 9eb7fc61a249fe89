"""Small pure questions about ops and vars, for rules to read like sentences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic, is_symbolic

__all__ = [
    "OPAQUE",
    "TypeInfo",
    "contradiction",
    "count_ops",
    "get_const_value",
    "get_consumers",
    "get_flat_inputs",
    "get_function_name",
    "get_itemsize",
    "get_pipeline_functions",
    "get_static_shape",
    "get_type_info",
    "is_all_zero",
    "is_compressed",
    "is_computed_in_fp16",
    "is_const",
    "is_default",
    "is_opaque",
    "is_symbolic",
    "is_used",
    "iterate_blocks",
    "iterate_nested_ops",
    "iterate_ops",
    "plain_type",
    "weights",
]

OPAQUE = " (opaque)"
"What follows the type of an op that coremltools knows but does not accept as it stands in the file."

_PRECISION_NEUTRAL_OPS = frozenset({"cast", "const", "identity", "read_state", "coreml_update_state"})
"Ops that say nothing about the precision in which a program computes."


def is_const(var: Var | None) -> bool:
    """Whether `var` is the output of a const op (compressed weights, `constexpr_*`, are not)."""
    return var is not None and var.op is not None and var.op.op_type == "const"


def is_compressed(var: Var | None) -> bool:
    """Whether `var` is the output of a `constexpr_*` op: a weight that is stored compressed."""
    return var is not None and var.op is not None and var.op.op_type.startswith("constexpr_")


def get_const_value(var: Var | None, default: Any = None) -> Any:
    """The value of a small parameter as Python numbers, or `default` where the input is absent or not constant."""
    if var is None or var.val is None:
        return default
    return var.val.tolist() if isinstance(var.val, (np.ndarray, np.generic)) else var.val


def is_all_zero(var: Var | None) -> bool:
    """Whether `var` is a const whose elements are all zero (of either sign)."""
    return is_const(var) and var is not None and not np.any(var.val)


class TypeInfo(NamedTuple):
    """What a type says of its values: pymil derives it anew at each question, which is most of the cost of a rule.

    `dtype` and `shape` are those of the tensor, or of the one in a state; a scalar has shape (); `shape` is None where
    a dimension is symbolic.
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
    """Dtype, static shape and whether it is a tensor, from a cache: pymil keeps one type for each of them anyway."""
    return _get_cached_type_info(var.sym_type)


def get_static_shape(var: Var) -> tuple[int, ...] | None:
    """The shape, or None when a dimension is symbolic."""
    return _get_cached_type_info(var.sym_type).shape


def is_opaque(op: Operation) -> bool:
    """Whether the loader could not make out `op` (newer opset, custom layer): it is kept, and no rule sees it."""
    return bool(getattr(op, "opaque", False))


def contradiction(op: Operation) -> str:
    """What coremltools says against an opaque op of a type that it knows; "" for other ops."""
    return str(getattr(op, "contradiction", ""))


def plain_type(op: Operation) -> str:
    """The op's type as the file has it."""
    return str(op.op_type).removesuffix(OPAQUE)


def get_itemsize(var: Var) -> int:
    """Bytes per element."""
    return _get_dtype_itemsize(_get_cached_type_info(var.sym_type).dtype)


@functools.cache
def _get_dtype_itemsize(dtype: Any) -> int:
    return int(np.dtype(types.nptype_from_builtin(dtype)).itemsize)


def get_flat_inputs(op: Operation) -> list[Var]:
    """All vars an op reads, tuples opened, internal ones included."""
    return list(op.get_flattened_inputs())


def get_consumers(var: Var) -> list[Operation]:
    """The ops that read `var`, each once, in the order in which they were attached; removed ops are left out."""
    return [op for op in dict.fromkeys(var.child_ops) if op.enclosing_block is not None]


def is_used(var: Var) -> bool:
    """Whether anything reads `var`: an op or a block that returns it."""
    return bool(var.consuming_blocks) or bool(get_consumers(var))


def is_default(op: Operation, parameter: str) -> bool:
    """Whether an input says what MIL assumes when it is absent, as its own dtype holds that."""
    var = op.inputs[parameter]
    if not isinstance(var, Var) or not is_const(var) or types.is_list(var.sym_type) or np.size(var.val) > 16:
        return False
    default = dict(op.default_inputs().items()).get(parameter)
    held, assumed = np.asarray(var.val), np.asarray(default)
    if held.dtype.kind == assumed.dtype.kind == "f":
        assumed = assumed.astype(held.dtype)
    return default is not None and np.array_equal(assumed, held)


def iterate_blocks(program: Program) -> Iterator[tuple[str, Block]]:
    """(function name, block) for every function and nested block, outer blocks first."""
    for name, function in program.functions.items():
        pending: list[Block] = [function]
        while pending:
            block = pending.pop()
            yield name, block
            pending.extend(inner for op in block.operations for inner in op.blocks)


def iterate_ops(program: Program) -> Iterator[tuple[str, Operation]]:
    """(function name, op) for every op of every block."""
    for name, block in iterate_blocks(program):
        for op in block.operations:
            yield name, op


def weights(program: Program) -> Iterator[Any]:
    """The arrays that the consts of a program hold."""
    values = (var.val for _, op in iterate_ops(program) if op.op_type == "const" for var in op.outputs)
    return (value for value in values if isinstance(value, np.ndarray))


def iterate_nested_ops(block: Block) -> Iterator[Operation]:
    """The ops of a block and of the blocks in them, each before those in it."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from iterate_nested_ops(inner)


def is_computed_in_fp16(op: Operation) -> bool:
    """Whether `op` says that its model computes in fp16: it makes fp16, and neither stores nor only hands it on."""
    if op.op_type in _PRECISION_NEUTRAL_OPS or op.op_type.startswith("constexpr_"):
        return False
    return any(get_type_info(var).dtype == types.fp16 and not types.is_state(var.sym_type) for var in op.outputs)


def get_function_name(program: Program, op: Operation) -> str:
    """The name of the function that `op` stands in."""
    block = op.enclosing_block
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return next((name for name, function in program.functions.items() if function is block),
                str(program.default_function_name))


def get_pipeline_functions(program: Program) -> tuple[str, ...]:
    """Of a pipeline the functions that run one after the other; of any other program none."""
    return getattr(program, "chain", ())


def count_ops(program: Program) -> int:
    """Ops that compute something: consts are not counted."""
    return sum(op.op_type != "const" for _, op in iterate_ops(program))
