"""The functionalization pass: walks a torch graph once and makes every in-place write functional."""

from __future__ import annotations

from typing import Any

from ..errors import NotConverted
from . import control_flow
from .aliases import Alias, Aliases, Base
from .attributes import get_attribute_path, hoist_attributes
from .emitter import Emitter, get_schema, is_tensor, is_tensor_container, read_constant
from .in_place_ops import METADATA_OPS, emit_functional_op, find_written_arguments
from .layout import MAY_COPY, RESHAPES, shares_memory
from .memory_sharing import may_share_memory, shares_memory_by_schema
from .split_views import CONSTANT_CHUNK, SPLIT_VIEWS, make_part_step
from .views import VIEWS, IdentityView

__all__ = ["LOSE_ATTRIBUTE", "UPDATE_ATTRIBUTE", "GraphWalk", "functionalize_graph"]

UPDATE_ATTRIBUTE = "mil_ane::update_attribute"
"""The node for a write to a buffer of the module: its inputs are the buffer before the write, and the new value."""
LOSE_ATTRIBUTE = "mil_ane::lose_attribute"
"""The node for a buffer of the module (its input) whose value after the call is unknown."""

_CONTAINER_NODES = ("prim::ListConstruct", "prim::TupleConstruct")
_UNPACK_NODES = ("prim::ListUnpack", "prim::TupleUnpack", "aten::__getitem__")
_OTHER_WRITES = frozenset((*METADATA_OPS, "prim::SetAttr"))
_LIST_GROWING_OPS = frozenset(("aten::append", "aten::insert", "aten::extend", "aten::_set_item"))


def functionalize_graph(graph: Any) -> Any:
    """Rewrite `graph` (a torch._C.Graph, inlined) in place so that no op writes to its arguments; return it.

    Writes to a module's own tensors become nodes of kind `UPDATE_ATTRIBUTE`. Raises NotConverted, with module path and
    source line, for writes that cannot be followed.
    """
    hoist_attributes(graph)
    GraphWalk(graph).run()
    return graph


class GraphWalk:
    """The state of one pass over a graph."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.emit = Emitter(graph)
        self.aliases = Aliases()
        self.aliases.on_write = self._emit_update
        self.aliases.on_unknown = self._emit_attribute_loss
        self._parts: dict[int, tuple[Any, Alias]] = {}
        self._growing_lists: set[int] = set()
        self._held: dict[int, list[tuple[Alias, int]]] = {}
        "the possible tensors of lists that are not literals of the graph, each with the version of its base"

    def run(self) -> None:
        if _is_functional(self.graph):
            return
        self.block(self.graph, self.graph.return_node())
        _drop_unused_nodes(self.graph)
        assert _is_functional(self.graph), "a write was not functionalized"

    def block(self, block: Any, end: Any) -> None:
        """Follow the nodes of a block in order, then update the values it returns."""
        nodes = list(block.nodes())
        for node, following in zip(nodes, [*nodes[1:], end], strict=False):
            self.emit.at(node, node)
            self._propagate_aliases(node, following)
        self.emit.at(end, nodes[-1] if nodes else None)
        self.refresh(end)

    def refresh(self, node: Any) -> None:
        """Replace the inputs of a node by their current values."""
        for place, value in enumerate(list(node.inputs())):
            present = self._get_current_value(value, node)
            if present.unique() != value.unique():
                node.replaceInput(place, present)

    def _propagate_aliases(self, node: Any, following: Any) -> None:
        kind = node.kind()
        if kind == "prim::GetAttr" or kind == "prim::Constant":
            return
        inputs = list(node.inputs())
        if kind in _LIST_GROWING_OPS:
            self._follow_list_growth(node, inputs)
            return
        self.refresh(node)
        if kind in _CONTAINER_NODES:
            return
        if kind == "prim::If":
            control_flow.follow_if(self, node, following)
        elif kind == "prim::Loop":
            control_flow.follow_loop(self, node, following)
        elif kind == "prim::SetAttr":
            self._set_attribute(node, inputs[1])
        elif kind in _UNPACK_NODES:
            self._unpack_list(node, inputs[0])
        elif kind in METADATA_OPS:
            self._change_view(node, inputs[0])
        elif kind in ("aten::requires_grad_", "aten::detach_"):
            self.aliases.bind(node.output(), self.aliases.of(inputs[0]))
        elif written := _find_written_tensors(node):
            self._functionalize_write(node, inputs, written)
        else:
            self._record_aliases(node, inputs)

    def _record_aliases(self, node: Any, given: list[Any]) -> None:
        """Record the aliases of the outputs of an op.

        `given` are its inputs before they were replaced by current values.
        """
        kind = node.kind()
        if kind == CONSTANT_CHUNK:
            for index, output in enumerate(node.outputs()):
                self.aliases.view(output, self.aliases.of(given[0]), make_part_step(self.emit, node, index))
        elif kind in SPLIT_VIEWS and is_tensor(given[0]):
            self._parts[node.output().unique()] = (node, self.aliases.of(given[0]))
        elif kind in VIEWS and is_tensor(given[0]) and not _is_dtype_view(node):
            self.aliases.view(node.output(), self.aliases.of(given[0]), VIEWS[kind](self.emit, node))
        elif kind in MAY_COPY:
            self._follow_conditional_copy(node, given[0])
        elif may_share_memory(node) or shares_memory_by_schema(node) or _is_container_rebuild(node):
            sources = [alias for value in given for alias in self.tensors_in(value)]
            for output in node.outputs():
                if is_tensor(output) and sources:
                    self.aliases.may_share(output, *sources)
                elif is_tensor_container(output):
                    self._record_held_aliases(output, sources)

    def _follow_conditional_copy(self, node: Any, source: Any) -> None:
        shared = shares_memory(node)
        if shared is None:
            self.aliases.may_share(node.output(), self.aliases.of(source))
        elif shared:
            step = VIEWS["aten::view"] if node.kind() in RESHAPES else IdentityView
            self.aliases.view(node.output(), self.aliases.of(source), step(self.emit, node))

    def _functionalize_write(self, node: Any, given: list[Any], written: list[int]) -> None:
        if len(written) != 1 or not is_tensor(given[written[0]]):
            raise NotConverted.at(node, "writes to several tensors, or to a list", "use its functional form")
        target = self.aliases.of(given[written[0]])
        self.aliases.write(target, emit_functional_op(self.emit, node, written[0], list(node.inputs())), node)
        for output in node.outputs():
            self.aliases.bind(output, target)

    def _change_view(self, node: Any, source: Any) -> None:
        """Rebind a tensor to another view of the same memory, for squeeze_, unsqueeze_, transpose_ and similar ops."""
        value = self.emit.op(METADATA_OPS[node.kind()], *node.inputs())
        value.setType(node.output().type())
        before = self.aliases.of(source)
        self.aliases.view(value, before, VIEWS[METADATA_OPS[node.kind()]](self.emit, value.node()))
        after = self.aliases.of(value)
        for name in (source, node.output()):
            self.aliases.bind(name, after)

    def _unpack_list(self, node: Any, source: Any) -> None:
        """Bind the elements of a known list: parts of a tensor, or a list literal of the graph."""
        picks_one = node.kind() == "aten::__getitem__"
        indices = [read_constant(list(node.inputs())[1])] if picks_one else range(node.outputsSize())
        for index, output in zip(indices, node.outputs(), strict=True):
            if is_tensor(output):
                self._bind_element(output, source, index)

    def _bind_element(self, output: Any, source: Any, index: int | None) -> None:
        if source.unique() in self._held:
            self.aliases.may_share(output, *self.tensors_in(source))
        elif source.unique() in self._parts:
            maker, parent = self._parts[source.unique()]
            if index is not None and (index >= 0 or maker.kind() == "aten::unbind"):
                self.aliases.view(output, parent, make_part_step(self.emit, maker, index))
            else:
                self.aliases.may_share(output, parent)
        elif source.node().kind() in _CONTAINER_NODES:
            elements = list(source.node().inputs())
            if index is not None:
                self.aliases.bind(output, self.aliases.of(elements[index]))
            else:
                self.aliases.may_share(output, *map(self.aliases.of, elements))

    def tensors_in(self, value: Any) -> list[Alias]:
        """Return the aliases of a tensor, or of the tensors that a list may contain."""
        if is_tensor(value):
            return [self.aliases.of(value)]
        if not is_tensor_container(value):
            return []
        if value.unique() in self._parts:
            return [self._parts[value.unique()][1]]
        inner = list(value.node().inputs()) if value.node().kind() in _CONTAINER_NODES else []
        return [alias for item in inner for alias in self.tensors_in(item)] + [
            alias for alias, _ in self._held.get(value.unique(), ())]

    def _record_held_aliases(self, value: Any, aliases: list[Alias]) -> None:
        self._held.setdefault(value.unique(), []).extend((alias, alias.base.version) for alias in aliases)

    def _follow_list_growth(self, node: Any, given: list[Any]) -> None:
        """Record the tensors added to a growing list, with the values they have when they are added.

        A later write to one of them cannot be followed.
        """
        held, *added = given
        if held.unique() not in self._growing_lists:
            if self._get_current_value(held, node).unique() != held.unique():
                raise _make_late_write_error(node)
            self._growing_lists.add(held.unique())
            self._record_held_aliases(held, self.tensors_in(held))
        self.refresh(node)
        self._record_held_aliases(held, [alias for value in added for alias in self.tensors_in(value)])

    def _get_current_value(self, value: Any, reader: Any) -> Any:
        """Return the current value of `value`.

        A list or tuple literal of the graph is made again from current values.
        """
        alias = self.aliases.find(value)
        if alias is not None:
            return self.aliases.current(alias, reader)
        for held, version in self._held.get(value.unique(), ()):
            if held.base.version != version or held.base.unknown_because:
                raise _make_late_write_error(reader)
        maker = value.node()
        if value.unique() in self._parts:
            return self._get_current_parts(value, reader)
        if maker.kind() not in _CONTAINER_NODES or value.unique() in self._growing_lists:
            return value
        elements = list(maker.inputs())
        present = [self._get_current_value(element, reader) for element in elements]
        if all(one.unique() == other.unique() for one, other in zip(elements, present, strict=True)):
            return value
        again = self.emit.op(maker.kind(), *present)
        again.setType(value.type())
        return again

    def _get_current_parts(self, value: Any, reader: Any) -> Any:
        """Return the list of parts of a tensor, recomputed where the tensor was written since."""
        maker, parent = self._parts[value.unique()]
        before = next(maker.inputs())
        present = self.aliases.current(parent, reader)
        if present.unique() == before.unique():
            return value
        again = self.emit.copy_node(maker, present)
        self._parts[again.unique()] = (again.node(), parent)
        return again

    def _set_attribute(self, node: Any, value: Any) -> None:
        """Remove an assignment of the same tensor, as in `self.k += x`.

        Raises NotConverted for any other assignment.
        """
        alias = self.aliases.find(value)
        if alias is None or alias.parent is not None or not alias.base.attribute \
                or get_attribute_path(alias.base.origin) != (*get_attribute_path(next(node.inputs())), node.s("name")):
            raise NotConverted.at(node, f"assigns to the attribute '{node.s('name')}'",
                                  f"write into it, as in self.{node.s('name')}.copy_(...)")
        node.destroy()

    def _emit_attribute_loss(self, base: Base) -> None:
        if base.attribute:
            self.emit.op(LOSE_ATTRIBUTE, base.origin, like=base.origin)

    def _emit_update(self, base: Base, value: Any) -> Any:
        """Return the value of a base after a write; for a tensor of the module, at the top level, as an update node.

        Such a write persists after the call.
        """
        if not base.attribute or self.aliases.depth:
            return value
        return self.emit.op(UPDATE_ATTRIBUTE, base.origin, value, like=base.origin)


def _make_late_write_error(reader: Any) -> NotConverted:
    return NotConverted.at(reader, "reads a list with a tensor that was written after it was added",
                           "put a .clone() into the list")


def _is_dtype_view(node: Any) -> bool:
    """Return whether a view is view(dtype), which reinterprets the same bits."""
    schema = get_schema(node)
    return schema is not None and schema.overload_name == "dtype"


def _is_container_rebuild(node: Any) -> bool:
    """Return whether an op makes a list or dict of tensors from another: `a + b`, `a[1:]`, `list(a)`, `d.values()`."""
    return node.kind() not in _UNPACK_NODES and any(map(is_tensor_container, node.outputs()))


def _find_written_tensors(node: Any) -> list[int]:
    """Return the places of the inputs that an op writes, except lists of numbers."""
    inputs = list(node.inputs())
    return [
        place
        for place in find_written_arguments(node)
        if is_tensor(inputs[place]) or is_tensor_container(inputs[place])
    ]


def _is_functional(block: Any) -> bool:
    return all(
        (node.kind() in _LIST_GROWING_OPS or not _find_written_tensors(node))
        and node.kind() not in _OTHER_WRITES
        and all(map(_is_functional, node.blocks()))
        for node in block.nodes()
    )


def _drop_unused_nodes(block: Any) -> None:
    """Remove the ops that wrote, and the views and values that only they needed."""
    for node in reversed(list(block.nodes())):
        for inner in node.blocks():
            _drop_unused_nodes(inner)
        pure = node.kind().startswith("aten::") or node.kind() in ("prim::Constant", *_CONTAINER_NODES)
        if pure and not node.hasUses() and node.kind() not in _LIST_GROWING_OPS:
            node.destroy()
