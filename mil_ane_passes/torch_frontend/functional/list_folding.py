"""Lists and dicts of known elements in a torch graph: their lengths, elements and members, and those that only grow."""

from __future__ import annotations

from typing import Any

from .emitter import get_schema, read_constant
from .in_place_ops import find_written_arguments

__all__ = ["CHANGING_OPS", "fold_lists", "fold_tuples"]

CHANGING_OPS = frozenset(f"aten::{name}" for name in (
    "append", "extend", "add_", "insert", "_set_item", "pop", "Delete", "reverse", "clear"))
"Ops that change a list in place, if it is their first operand."


def fold_tuples(graph: Any) -> None:
    """Replace the parts of a tuple that the graph has made by their values; types are not propagated through tuples."""
    for node in graph.findAllNodes("prim::TupleUnpack", True):
        built = next(node.inputs()).node()
        if built.kind() == "prim::TupleConstruct":
            for output, value in zip(list(node.outputs()), list(built.inputs()), strict=True):
                output.replaceAllUsesWith(value)
    for node in graph.findAllNodes("prim::TupleIndex", True):
        built, place = next(node.inputs()).node(), read_constant(list(node.inputs())[1])
        if built.kind() == "prim::TupleConstruct" and isinstance(place, int):
            node.output().replaceAllUsesWith(list(built.inputs())[place])


def fold_lists(graph: Any) -> None:
    """Replace expressions of known lists and literals by their values.

    That is: `a + b`, `[n] * k`, `a[i:j]`, `len(a)`, `a[i]`, `n in a`, `all(a)`, `any(a)`, `min(a)`, `max(a)` of known
    lists, `d["key"]` of dict literals, `x is x`, lists that change and dicts that grow, the parts of a tuple that the
    graph has made, and those of `unbind`, `split` and `chunk` along an axis of known size.
    """
    for kind in ("aten::unbind", "aten::chunk", "aten::split", "aten::split_with_sizes"):
        for node in graph.findAllNodes(kind, True):
            _expand_parts(graph, node)
    fold_tuples(graph)
    for node in graph.findAllNodes("prim::ListConstruct", True):
        _follow_changes(graph, node)
    for node in graph.findAllNodes("prim::DictConstruct", True):
        _merge_items(graph, node)
    for kind, fold in (
        ("aten::len", _fold_length),
        ("aten::__getitem__", _fold_item),
        ("aten::__contains__", _fold_membership),
        ("aten::all", _fold_quantifier),
        ("aten::any", _fold_quantifier),
        ("prim::min", _fold_extreme),
        ("prim::max", _fold_extreme),
        ("aten::add", _fold_list),
        ("aten::mul", _fold_list),
        ("aten::slice", _fold_list),
        ("aten::list", _fold_list),
        ("aten::copy", _fold_list),
        ("aten::__is__", _fold_identity),
        ("aten::__isnot__", _fold_identity),
    ):
        for node in graph.findAllNodes(kind, True):
            found = fold(graph, node)
            if found is not None:
                node.output().replaceAllUsesWith(found)


def _expand_parts(graph: Any, node: Any) -> None:
    """Replace a list of parts that is counted or indexed, as a loop over it does, by a list of selects or slices."""
    held, *arguments = node.inputs()
    values, sizes = [read_constant(value) for value in arguments], held.type().sizes()
    axis = values[-1]
    if not isinstance(axis, int) or sizes is None or not -len(sizes) <= axis < len(sizes) or sizes[axis] is None:
        return
    if not any(use.user.kind() in ("aten::len", "aten::__getitem__") for use in node.output().uses()):
        return
    bounds = _find_bounds(node.kind(), sizes[axis], values[0])
    if bounds is None:
        return
    with graph.insert_point_guard(node):
        ends = [[graph.insertConstant(end) for end in pair] for pair in bounds]
        one = graph.insertConstant(1)
    parts = [graph.create("aten::select", [held, arguments[-1], start], 1) if node.kind() == "aten::unbind" else
             graph.create("aten::slice", [held, arguments[-1], start, end, one], 1) for start, end in ends]
    built = graph.create("prim::ListConstruct", [part.output() for part in parts], 1)
    built.output().setType(node.output().type())
    for each in (*parts, built):
        each.insertBefore(node)
        each.copyMetadata(node)
    node.output().replaceAllUsesWith(built.output())
    node.destroy()


def _find_bounds(kind: str, size: int, how: Any) -> list[tuple[int, int]] | None:
    """Return the first index of each part along an axis of `size`, and the index after it; None if it is not known."""
    if kind == "aten::unbind":
        return [(number, number + 1) for number in range(size)]
    if kind == "aten::chunk" and isinstance(how, int) and how > 0:
        how = -(-size // how)
    if isinstance(how, int) and how > 0 and size > 0:
        return [(start, min(start + how, size)) for start in range(0, size, how)]
    if not isinstance(how, list) or not all(isinstance(each, int) for each in how):
        return None
    return [(sum(how[:place]), sum(how[:place + 1])) for place in range(len(how))]


def _follow_changes(graph: Any, node: Any) -> None:
    """Give each reader of a list that changes a literal of the elements that the list has there.

    That goes up to the first change that is not known or is in a nested block, and to where the list gets a second
    name, as in another list or a branch's result. What follows reads, and may change, a literal of the elements there.
    """
    held, block = node.output(), node.owningBlock()
    if not any(map(_is_change, held.uses())):
        return
    _use_changed_list(held)
    users: dict[Any, list[Any]] = {}
    for use in held.uses():
        users.setdefault(_find_node_in_block(use.user, block), []).append(use)
    elements, before, present = list(node.inputs()), node, None
    changes: list[Any] = []
    is_followed = True
    for user in sorted(users, key=_NodeOrder):
        changed = _change_elements(graph, user, held, elements)
        if changed is not None:
            elements, before, present = changed, user, None
            changes.append(user)
            continue
        is_followed = not any(_is_change(use) or _gives_second_name(use) for use in users[user])
        if not is_followed and not changes:
            return
        present = _insert_list(graph, before, elements, held.type()) if present is None else present
        if not is_followed:
            break
        for use in users[user]:
            use.user.replaceInput(use.offset, present)
    for change in changes:
        change.destroy()
    if present is not None:
        held.replaceAllUsesWith(present)
    node.destroy()


def _use_changed_list(held: Any) -> None:
    """Make the readers of the results of `append` and `+=`, which are the list itself, read the list."""
    waiting = list(held.uses())
    while waiting:
        use = waiting.pop()
        if use.offset == 0 and use.user.kind() in ("aten::append", "aten::add_", "aten::_set_item"):
            for output in use.user.outputs():
                waiting.extend(output.uses())
                output.replaceAllUsesWith(held)


def _find_node_in_block(node: Any, block: Any) -> Any:
    """Return the node of a block that is `node`, or contains it."""
    while node.owningBlock() != block:
        node = node.owningBlock().owningNode()
    return node


def _is_change(use: Any) -> bool:
    return use.offset in find_written_arguments(use.user)


def _gives_second_name(use: Any) -> bool:
    """Return whether a node, such as `append` to another list or a block's result, holds the list that it reads."""
    if use.user.kind() in ("aten::__getitem__", "aten::copy", "prim::ListUnpack"):
        return False
    schema = get_schema(use.user)
    arguments = [] if schema is None else schema.arguments
    return use.offset >= len(arguments) or arguments[use.offset].alias_info is not None


def _change_elements(graph: Any, node: Any, held: Any, elements: list[Any]) -> list[Any] | None:
    """Return the elements of a list `held` after a node that changes it; None if it does not, or to unknown ones.

    Readers of an element that `pop` removes read that element.
    """
    kind, inputs = node.kind(), list(node.inputs())
    if kind not in CHANGING_OPS or [value.unique() == held.unique() for value in inputs] != [
            place == 0 for place in range(len(inputs))]:
        return None
    changed = list(elements)
    if kind in ("aten::add_", "aten::extend"):
        added = _get_elements(graph, inputs[1])
        return None if added is None else changed + added
    if kind == "aten::append":
        changed.append(inputs[1])
    elif kind == "aten::reverse":
        changed.reverse()
    elif kind == "aten::clear":
        changed.clear()
    else:
        place = read_constant(inputs[1])
        if not isinstance(place, int) or kind != "aten::insert" and not -len(changed) <= place < len(changed):
            return None
        if kind == "aten::insert":
            changed.insert(place, inputs[2])
        elif kind == "aten::_set_item":
            changed[place] = inputs[2]
        else:
            removed = changed.pop(place)
            for output in node.outputs():
                output.replaceAllUsesWith(_to_value(graph, node, removed))
    return changed


def _insert_list(graph: Any, before: Any, elements: list[Any], kind: Any) -> Any:
    """Insert a literal of elements, each a graph value or a Python number, after a node, and return its value."""
    built = graph.create("prim::ListConstruct", [], 1)
    built.insertAfter(before)
    built.copyMetadata(before)
    for each in elements:
        built.addInput(_to_value(graph, built, each))
    built.output().setType(kind)
    return built.output()


def _to_value(graph: Any, node: Any, element: Any) -> Any:
    return _insert_constant(graph, node, element) if isinstance(element, bool | int | float | str) else element


def _merge_items(graph: Any, node: Any) -> None:
    """Merge a dict and the items that are set in it into one literal.

    Only items of known keys that are set in the same block can be merged, and only items are read before the last one.
    """
    users = sorted((use.user for use in node.output().uses() if use.user.owningBlock() == node.owningBlock()),
                   key=_NodeOrder)
    writes = [user for user in users if user.kind() == "aten::_set_item"]
    if not writes or any(not use.user.isAfter(writes[-1]) for use in node.output().uses() if use.user not in users):
        return
    given, steps = list(node.inputs()), users[:users.index(writes[-1]) + 1]
    items: dict[Any, tuple[Any, Any]] = {}
    read: list[tuple[Any, Any]] = []
    for key, value in [*zip(given[::2], given[1::2], strict=True), *(list(step.inputs())[1:] for step in writes)]:
        if read_constant(key) is None or value.unique() == node.output().unique():
            return
    for key, value in zip(given[::2], given[1::2], strict=True):
        items[read_constant(key)] = (key, value)
    for step in steps:
        key = list(step.inputs())[1] if step.kind() in ("aten::_set_item", "aten::__getitem__") else None
        known = None if key is None else read_constant(key)
        if step.kind() == "aten::_set_item":
            first = items[known][0] if known in items else key  # a key keeps its place
            items[known] = (first, list(step.inputs())[2])
        elif known in items:
            read.append((step, items[known][1]))
        else:
            return
    built = graph.create("prim::DictConstruct", [each for item in items.values() for each in item], 1)
    built.insertAfter(writes[-1])
    built.copyMetadata(node)
    built.output().setType(node.output().type())
    for step, value in read:
        step.output().replaceAllUsesWith(value)
    for step in steps:
        step.destroy()
    node.output().replaceAllUsesWith(built.output())
    node.destroy()


class _NodeOrder:
    """The sort key of nodes in a block: the order of execution."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def __lt__(self, other: _NodeOrder) -> bool:
        return bool(self.node.isBefore(other.node))


def _get_elements(graph: Any, value: Any) -> list[Any] | None:
    """Return the elements of a list, each a graph value or a Python number; None where they are not known."""
    may_change = any(map(_is_change, value.uses())) or _may_change_by_name(graph, value)
    return None if may_change else _find_made_elements(graph, value.node())


def _find_made_elements(graph: Any, node: Any) -> list[Any] | None:
    """Return the elements of the list that a node makes, before any change; None where they are not known."""
    kind, inputs = node.kind(), list(node.inputs())
    if node.outputsSize() != 1 or node.output().type().kind() != "ListType":
        return None
    if kind == "prim::ListConstruct":
        return inputs
    if kind == "prim::Constant":
        known = node.output().toIValue()
        return known if isinstance(known, list) else None
    if kind == "aten::size" and len(inputs) == 1:
        sizes: list[Any] | None = inputs[0].type().sizes()
        return sizes
    if kind in ("aten::list", "aten::copy"):
        return _get_elements(graph, inputs[0])
    if kind == "aten::mul":
        repeated, count = _get_elements(graph, inputs[0]), read_constant(inputs[1])
        return repeated * count if repeated is not None and isinstance(count, int) else None
    if kind == "aten::add":
        first, second = (_get_elements(graph, each) for each in inputs)
        return None if first is None or second is None else first + second
    if kind == "aten::slice":
        held, bounds = _get_elements(graph, inputs[0]), [read_constant(bound) for bound in inputs[1:]]
        fixed = all(bound.node().kind() == "prim::Constant" for bound in inputs[1:])
        return held[slice(*bounds)] if held is not None and fixed else None
    return None


def _may_change_by_name(graph: Any, value: Any) -> bool:
    """Return whether a list has a second name and a list of its kind is changed that is not a literal of the graph."""
    return any(map(_gives_second_name, value.uses())) and any(
        changed.node().kind() != "prim::ListConstruct" and str(changed.type()) == str(value.type())
        for kind in CHANGING_OPS for node in graph.findAllNodes(kind, True) for changed in [next(node.inputs())])


def _fold_list(graph: Any, node: Any) -> Any:
    """Fold a sum, repetition, slice or copy of known lists: coremltools computes them as of tensors."""
    elements = _find_made_elements(graph, node)
    return None if elements is None else _insert_list(graph, node, elements, node.output().type())


def _fold_length(graph: Any, node: Any) -> Any:
    held = next(node.inputs())
    elements = _get_elements(graph, held)
    if elements is None and held.node().kind() == "aten::size":
        rank = next(held.node().inputs()).type().dim()
        return None if rank is None else _insert_constant(graph, node, rank)
    return None if elements is None else _insert_constant(graph, node, len(elements))


def _fold_item(graph: Any, node: Any) -> Any:
    held, key = node.inputs()
    if held.node().kind() == "prim::DictConstruct":
        if all(use.user.kind() in ("aten::__getitem__", "prim::Return") for use in held.uses()):
            literal = list(held.node().inputs())
            keys = [read_constant(each) for each in literal[::2]]
            place = keys.index(read_constant(key)) if None not in keys and read_constant(key) in keys else None
            return None if place is None else literal[2 * place + 1]
        return None
    elements, place = _get_elements(graph, held), read_constant(key)
    if elements is None or not isinstance(place, int) or not -len(elements) <= place < len(elements):
        return None
    found = elements[place]
    return _insert_constant(graph, node, found) if isinstance(found, int | float | bool) else found


def _fold_membership(graph: Any, node: Any) -> Any:
    held, item = node.inputs()
    elements, known = _get_elements(graph, held), read_constant(item)
    if elements is None or known is None:
        return None
    values = [each if isinstance(each, int | float | str) else read_constant(each) for each in elements]
    return None if None in values else _insert_constant(graph, node, known in values)


def _fold_quantifier(graph: Any, node: Any) -> Any:
    """Fold `all` or `any` of a known list; return None for a tensor."""
    inputs = list(node.inputs())
    elements = _get_elements(graph, inputs[0]) if len(inputs) == 1 else None
    if elements is None:
        return None
    values = [each if isinstance(each, int | float) else read_constant(each) for each in elements]
    if not all(isinstance(value, int | float) for value in values):
        return None
    return _insert_constant(graph, node, all(values) if node.kind() == "aten::all" else any(values))


def _fold_extreme(graph: Any, node: Any) -> Any:
    """Fold `min` or `max` of a known list of numbers."""
    inputs = list(node.inputs())
    elements = _get_elements(graph, inputs[0]) if len(inputs) == 1 else None
    values = [each if isinstance(each, int | float) else read_constant(each) for each in elements or ()]
    if not values or not all(isinstance(value, int | float) for value in values):
        return None
    return _insert_constant(graph, node, min(values) if node.kind() == "prim::min" else max(values))


_MAKING_OPS = frozenset(f"aten::{name}" for name in (
    "add", "addmm", "bmm", "cat", "conv1d", "conv2d", "detach", "div", "embedding", "exp", "expand",
    "full_like", "gelu", "index_select", "layer_norm", "linear", "matmul", "mul", "neg", "ones_like", "permute", "relu",
    "rms_norm", "select", "sigmoid", "silu", "slice", "softmax", "stack", "sub", "tanh", "transpose",
    "unsqueeze", "view", "where", "zeros_like"))
"Ops whose result is always a tensor of its own, and never an operand."


def _fold_identity(graph: Any, node: Any) -> Any:
    """Fold `x is x` and `x is not x`, and those of two different values that are inputs or that an op has made."""
    first, second = map(_find_taken_value, node.inputs())
    same = first.unique() == second.unique()
    given = {value.unique() for value in graph.inputs()}
    apart = all(value.node().kind() in _MAKING_OPS or value.unique() in given for value in (first, second))
    return _insert_constant(graph, node, same == (node.kind() == "aten::__is__")) if same or apart else None


def _find_taken_value(value: Any) -> Any:
    """Return the value in the branch that is taken if `value` is the result of branches with a known condition."""
    while value.node().kind() == "prim::If":
        taken = read_constant(next(value.node().inputs()))
        if not isinstance(taken, bool):
            break
        place = [output.unique() for output in value.node().outputs()].index(value.unique())
        value = list(list(value.node().blocks())[0 if taken else 1].outputs())[place]
    return value


def _insert_constant(graph: Any, node: Any, value: Any) -> Any:
    with graph.insert_point_guard(node):
        return graph.insertConstant(value)
