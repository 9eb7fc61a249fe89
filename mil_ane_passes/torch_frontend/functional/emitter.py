"""The emitter of torch graph nodes: inserts each before the current node, with its source location."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

__all__ = ["Emitter", "get_schema", "is_tensor", "is_tensor_container", "read_constant", "read_constant_argument"]


class Emitter:
    """Inserts new nodes before `cursor`; they inherit the module path and source line of `source`."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.cursor: Any = None
        self.source: Any = None

    def at(self, node: Any, source: Any) -> None:
        """Insert before `node` from now on; new nodes inherit the location of `source`."""
        self.cursor, self.source = node, source

    def op(self, kind: str, *inputs: Any, like: Any = None) -> Any:
        """Insert a node and return its output.

        Python values become constants. The type of the output is that of the value `like`, if any.
        """
        node = self.graph.create(kind, [self._get_value(args) for args in inputs], 1)
        self._insert_node(node)
        output = node.output()
        if like is not None:
            output.setType(like.type())
        return output

    def sizes(self, value: Any) -> Any:
        """Emit the sizes of a tensor as an int list."""
        return self._emit_int("aten::size", "List[int]", value)

    def size(self, value: Any, dim: int) -> Any:
        """Emit one size of a tensor."""
        return self._emit_int("aten::size", "int", value, dim)

    def arithmetic(self, kind: str, *operands: Any) -> Any:
        """Emit `aten::add`, `aten::floordiv`, ... of ints; Python ints give a Python int."""
        if all(isinstance(operand, int) for operand in operands):
            return _INT_OPERATIONS[kind](*operands)
        return self._emit_int(kind, "int", *operands)

    def copy_node(self, node: Any, first: Any) -> Any:
        """Insert a copy of a node with `first` as its first input, and return its output."""
        clone = self.graph.create(node.kind(), [first, *list(node.inputs())[1:]], 1)
        self._insert_node(clone)
        clone.output().setType(node.output().type())
        return clone.output()

    def _insert_node(self, node: Any) -> None:
        node.insertBefore(self.cursor)
        if self.source is not None:
            node.copyMetadata(self.source)

    def _emit_int(self, kind: str, name: str, *inputs: Any) -> Any:
        import torch

        output = self.op(kind, *inputs)
        integer = torch._C.IntType.get()
        output.setType(torch._C.ListType(integer) if name == "List[int]" else integer)
        return output

    def _get_value(self, given: Any) -> Any:
        import torch

        if isinstance(given, torch._C.Value):
            return given
        with self.graph.insert_point_guard(self.cursor):
            if isinstance(given, Sequence) and not isinstance(given, str):
                return self.graph.insertConstant(list(given))
            return self.graph.insertConstant(given)


_INT_OPERATIONS = {
    "aten::add": lambda a, b: a + b, "aten::sub": lambda a, b: a - b, "aten::mul": lambda a, b: a * b,
    "aten::floordiv": lambda a, b: a // b,
}


def read_constant(value: Any) -> Any:
    """Return the Python value of a constant, or a list for a list of constants; None for other values."""
    node = value.node()
    if node.kind() == "prim::Constant":
        return value.toIValue()
    if node.kind() == "prim::ListConstruct":
        return [read_constant(item) for item in node.inputs()]
    return None


def read_constant_argument(node: Any, name: str) -> Any:
    """Return the Python value of the argument that the schema calls `name`; None where it is not constant."""
    schema = get_schema(node)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return read_constant(list(node.inputs())[names.index(name)]) if name in names else None


def is_tensor(value: Any) -> bool:
    """Return whether a graph value is a tensor (or an optional one)."""
    kind = value.type()
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return bool(kind.kind() == "TensorType")


def is_tensor_container(value: Any) -> bool:
    """Return whether a graph value is a list, tuple or dict with tensors anywhere in it."""
    return value.type().kind() in _CONTAINER_TYPES and _has_tensor_type(value.type())


_CONTAINER_TYPES = ("ListType", "TupleType", "DictType")


def _has_tensor_type(kind: Any) -> bool:
    if kind.kind() == "TupleType":
        return any(map(_has_tensor_type, kind.elements()))
    if kind.kind() == "DictType":
        return _has_tensor_type(kind.getValueType())
    if kind.kind() in ("ListType", "OptionalType"):
        return _has_tensor_type(kind.getElementType())
    return bool(kind.kind() == "TensorType")


def get_schema(node: Any) -> Any:
    """Return the operator schema that the node resolves to, or None for control flow and unknown operators."""
    text = node.schema()
    return None if text == "(no schema)" or not text else _parse_schema(text)


@functools.cache
def _parse_schema(text: str) -> Any:
    import torch

    return torch._C.parse_schema(text)
