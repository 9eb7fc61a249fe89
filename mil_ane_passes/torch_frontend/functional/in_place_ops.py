"""In-place ops: the arguments they write, and their functional forms."""

from __future__ import annotations

from typing import Any

from ..errors import NotConverted
from .emitter import Emitter, get_schema

__all__ = ["METADATA_OPS", "emit_functional_op", "find_written_arguments"]

METADATA_OPS = {f"aten::{name}_": f"aten::{name}" for name in (
    "squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")}
"""In-place ops that change the shape or axes of a tensor, not its elements."""

_OPERATOR_NAMES = {"__iand__": "__and__", "__ior__": "__or__", "__ixor__": "__xor__", "__ilshift__": "__lshift__",
                   "__irshift__": "__rshift__"}
_RANDOM_OPS = frozenset((
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"))
_REALLOCATING_OPS = frozenset(("set_", "resize_", "resize_as_", "swap_"))
_DTYPE_PRESERVING_OPS = frozenset((
    "copy", "fill", "index_put", "masked_fill", "scatter", "clamp", "relu", "index_fill", "index_copy",
    "masked_scatter", "neg", "abs", "triu", "tril"))
"""Ops whose result always has the dtype of their first argument."""
_BOOLEAN_OPS = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "logical_and", "logical_or", "logical_xor", "logical_not"))
"""Ops whose functional form gives booleans, whatever the dtype of the tensor that the form in place writes to."""


def find_written_arguments(node: Any) -> list[int]:
    """Return the places of the inputs that the op writes, by its schema."""
    schema = get_schema(node)
    if schema is None:
        return []
    return [place for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write]


def emit_functional_op(emit: Emitter, node: Any, place: int, inputs: list[Any]) -> Any:
    """Emit the value of input `place` after the op, with its shape and dtype unchanged.

    `inputs` are the current inputs of the op. Raises NotConverted where torch has no functional form.
    """
    target = inputs[place]
    name = node.kind().removeprefix("aten::")
    if place > 0:  # out=
        result = emit.op(node.kind(), *inputs[:place], *inputs[place + 1:])
        return emit.op("aten::copy", target, result, False, like=target)
    if name in _RANDOM_OPS:
        raise NotConverted.at(node, "generates random numbers in place", "generate them with torch.randn, or in the "
                                                                         "caller")
    if name in _REALLOCATING_OPS:
        raise NotConverted.at(node, "changes the memory or size of a tensor in place", "make a new tensor")
    if name == "zero_":
        return emit.op("aten::fill", target, 0, like=target)
    functional = _OPERATOR_NAMES.get(name) or name.removesuffix("_")
    if functional == name or not _is_aten_operator(functional):
        raise NotConverted.at(node, "writes in place, and torch has no functional form of it")
    if functional in _BOOLEAN_OPS:
        return emit.op("aten::type_as", emit.op(f"aten::{functional}", *inputs), target, like=target)
    new = emit.op(f"aten::{functional}", *inputs, like=target)
    if functional in _DTYPE_PRESERVING_OPS or _has_one_dtype(inputs):
        return new
    return emit.op("aten::type_as", new, target, like=target)


def _is_aten_operator(name: str) -> bool:
    import torch

    return bool(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _has_one_dtype(inputs: list[Any]) -> bool:
    """Return whether all tensor inputs have one known dtype and no other input could promote it."""
    kinds = [args.type() for args in inputs if args.type().kind() == "TensorType"]
    dtypes = {kind.dtype() for kind in kinds}
    floats = any(args.type().kind() == "FloatType" for args in inputs)
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
    return dtype is not None and (dtype.is_floating_point or not floats)
