"""Memory sharing: the values whose memory an op's result may be, by the op's kind and schema alone."""

from __future__ import annotations

from typing import Any

from .emitter import get_schema, is_tensor, is_tensor_container
from .layout import MAY_COPY
from .split_views import SPLIT_VIEWS

__all__ = ["find_memory_sources", "may_share_memory", "shares_memory_by_schema"]

_MAY_SHARE_OPS = frozenset((
    "aten::einsum", "aten::broadcast_tensors", "aten::meshgrid", "aten::atleast_1d", "aten::atleast_2d",
    "aten::atleast_3d", "aten::pixel_shuffle", "aten::pixel_unshuffle"))


def may_share_memory(node: Any) -> bool:
    """Return whether an op may return memory of an argument although its schema does not declare it."""
    if node.kind() == "aten::einsum":  # of one operand it is a permutation, of several a product
        operands = list(node.inputs())[1].node()
        return bool(operands.kind() != "prim::ListConstruct" or operands.inputsSize() == 1)
    return node.kind() in _MAY_SHARE_OPS


def shares_memory_by_schema(node: Any) -> bool:
    """Return whether the schema declares an output as memory of an input.

    True without a schema, since it is unknown.
    """
    schema = get_schema(node)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def find_memory_sources(value: Any) -> list[Any]:
    """Find the values at the ends of the chains of views that lead to `value`.

    These are parameters of blocks and fresh tensors.
    """
    ends, waiting, seen = [], [value], set()
    while waiting:
        value = waiting.pop()
        if value.unique() not in seen:
            seen.add(value.unique())
            sources = _find_sources(value)
            waiting.extend(sources)
            if not sources:
                ends.append(value)
    return ends


def _find_sources(value: Any) -> list[Any]:
    node = value.node()
    kind = node.kind()
    if kind in ("prim::Param", "prim::GetAttr", "prim::Constant"):
        return []
    inputs = [*node.inputs(), *(output for block in node.blocks() for output in block.outputs())]
    shares = may_share_memory(node) or kind in MAY_COPY or kind in SPLIT_VIEWS or node.kind().startswith("prim::")
    if (
        not shares
        and not shares_memory_by_schema(node)
        and not is_tensor_container(value)
        and not any(map(is_tensor_container, inputs))
    ):
        return []
    return [one for one in inputs if is_tensor(one) or is_tensor_container(one)]
