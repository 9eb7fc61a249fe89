"""Integer ops: the ops that compute on integers, their connected groups, and the readers of their results."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil import Block, Function, ListVar, Operation, Var, types

from ..ane.op_support import find_dynamic_inputs
from ..ir.large_values import list_groups, merge_groups
from ..ir.query import get_consumers, get_flat_inputs, get_type_info, is_const, is_opaque

__all__ = ["check_integer_support", "describe_readers", "find_integer_types", "group_integer_ops"]

_OPS_WITH_OWN_RULE = frozenset({
    "one_hot", "band_part", "argsort", "reduce_argmax", "reduce_argmin", "non_maximum_suppression", "topk", "range_1d",
    "non_zero", "sliding_windows", "crop_resize", "scatter", "scatter_nd", "scatter_along_axis", "lstm", "gru",
    "rnn", "cond", "while_loop", "make_list", "list_gather", "list_length", "list_read", "list_scatter", "list_write",
    "random_normal", "random_uniform", "random_bernoulli", "random_categorical", "classify", "custom_layer",
})
"Ops that leave the ANE for any dtype: rules of their own report them."
_POSITION_OR_SIZE_INPUTS = {
    "gather": ("indices",), "gather_nd": ("indices",), "gather_along_axis": ("indices",), "reshape": ("shape",),
    "tile": ("reps",), "pad": ("pad",), "resize": ("shape",), "slice_by_index": ("begin", "end", "stride"),
    "slice_by_size": ("begin", "size"), "fill": ("shape",), "slice_update": ("begin", "end", "stride"),
    "torch_tensor_assign": ("begin", "end", "stride"),
}
"Inputs that are positions or sizes: where one is dynamic, a rule of its own reports it."
_NARROW_INTEGER_TYPES = frozenset({types.int8, types.uint8, types.int16, types.uint16})
_INPUT_ROLES = {"indices": "the indices of", "begin": "the place of", "end": "the place of", "size": "the size of",
                "shape": "the shape of", "reps": "the shape of", "pad": "the shape of"}
_MAX_READERS_EXAMINED, _MAX_READERS_NAMED = 64, 3
"Most readers that are examined, and most that are named."


def check_integer_support(op: Operation) -> bool | None:
    """Return True where integers make `op` unsupported on the ANE, False where that is a guess, else None."""
    if (
        (op.op_type in _OPS_WITH_OWN_RULE and not _is_topk_of_int32(op))
        or op.op_type.startswith("const")
        or op.blocks
        or is_opaque(op)
    ):
        return None
    kinds = find_integer_types(op)
    if not kinds:
        return None
    if find_dynamic_inputs(op, *_POSITION_OR_SIZE_INPUTS.get(op.op_type, ())):
        return True if any(out.dtype == types.int32 for out in op.outputs) else None
    if types.int32 in kinds:
        return True
    if kinds - _NARROW_INTEGER_TYPES:
        return False
    if op.op_type != "cast":
        return None
    return bool(op.outputs[0].dtype == types.int8 and types.is_float(op.x.dtype))


def _is_topk_of_int32(op: Operation) -> bool:
    """Return whether `op` is a topk of int32, which is unsupported; a topk of other dtypes is supported."""
    return op.op_type == "topk" and bool(op.x.dtype == types.int32)


def find_integer_types(op: Operation) -> set[type]:
    """Return the integer types of the outputs of `op`, and of its inputs that are not constants."""
    return {
        get_type_info(var).dtype
        for var in (*op.outputs, *get_flat_inputs(op))
        if _is_integer_var(var) and not is_const(var)
    }


def _is_integer_var(var: Var) -> bool:
    return not isinstance(var, ListVar) and _is_integer_type(get_type_info(var).dtype)


@functools.cache
def _is_integer_type(dtype: type) -> bool:
    """Return whether `dtype` is an integer type; cached, as coremltools computes it anew for each call."""
    return bool(types.is_int(dtype))


def group_integer_ops(block: Block, found: Mapping[Operation, object]) -> Iterable[list[Operation]]:
    """Group ops connected by integer values, in program order; each group has at least one op of `found`."""
    group: dict[Operation, list[Operation]] = {}
    for op in block.operations:
        if op not in found and (op.op_type == "const" or not any(_is_integer_var(out) for out in op.outputs)):
            continue
        group[op] = [op]
        for var in get_flat_inputs(op):
            if var.op in group and (_is_integer_var(var) or (op in found and var.op in found)):
                merge_groups(group, var.op, op)
    return [members for members in list_groups(group) if any(op in found for op in members)]


def describe_readers(members: list[Operation]) -> str:
    """Describe the readers of a group's results; "" where it has no reader."""
    inside, found, looked = set(members), dict[str, None](), 0
    for var in (out for op in reversed(members) for out in op.outputs):
        if looked >= _MAX_READERS_EXAMINED:
            break
        if var.consuming_blocks:
            found[f"{_describe_block_output(var)} '{var.name}'"] = None
        for reader in get_consumers(var):
            looked += 1
            if reader not in inside and looked <= _MAX_READERS_EXAMINED:
                found[f"{_describe_input_role(var, reader)} {reader.op_type} '{_get_op_name(reader)}'"] = None
    named = list(found)
    more = f" and {len(named) - _MAX_READERS_NAMED} more" if len(named) > _MAX_READERS_NAMED else ""
    return ", ".join(named[:_MAX_READERS_NAMED]) + more


def _describe_block_output(var: Var) -> str:
    """Describe the block that returns `var`."""
    block = var.consuming_blocks[0]
    return "the output" if isinstance(block, Function) else f"the {block.outer_op.op_type}'s"


def _describe_input_role(var: Var, reader: Operation) -> str:
    given = next((name for name, value in reader.inputs.items() if value is var), "")
    return _INPUT_ROLES.get(given, "an input of")


def _get_op_name(op: Operation) -> str:
    return str(op.outputs[0].name if op.outputs else op.name)
