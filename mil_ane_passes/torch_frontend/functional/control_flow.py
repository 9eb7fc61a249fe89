"""Writes inside `if` and loops: a tensor that a block writes to becomes an additional result of the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import describe_node_location
from .aliases import Alias, Base
from .emitter import is_tensor, is_tensor_container, read_constant
from .in_place_ops import find_written_arguments
from .memory_sharing import find_memory_sources

if TYPE_CHECKING:
    from .functionalization import GraphWalk

__all__ = ["follow_if", "follow_loop"]


def follow_if(walk: GraphWalk, node: Any, following: Any) -> None:
    """Add the new value of every outer tensor that a branch writes to the results of all branches.

    `following` is the next node.
    """
    for block in node.blocks():
        _register_outer_tensors(walk, block)
    outer = walk.aliases.bases()
    before = {base: base.version for base in outer}
    values: list[dict[Base, Any]] = []
    spoiled: dict[Base, str] = {}
    shared: list[set[Base]] = [set() for _ in range(node.outputsSize())]
    for block in node.blocks():
        with walk.aliases.nested():
            walk.block(block, block.returnNode())
            values.append({base: base.value for base in outer if base.version != before[base]})
            spoiled.update({base: base.unknown_because for base in outer if base.unknown_because})
            for place, value in enumerate(block.outputs()):
                alias = walk.aliases.find(value)
                shared[place] |= {alias.base} & set(outer) if alias is not None else set()
    walk.emit.at(following, node)
    written = [base for base in outer if any(base in changed for changed in values)]
    for base in written:
        for block, changed in zip(node.blocks(), values, strict=True):
            block.registerOutput(changed.get(base, base.value))
        _add_written_output(walk, base, node, values)
    for base, why in spoiled.items():
        walk.aliases.mark_unknown(base, why)
    _mark_shared_outputs(walk, node, shared)


def _add_written_output(walk: GraphWalk, base: Base, node: Any, values: list[dict[Base, Any]]) -> None:
    output = node.addOutput()
    output.setType(next(changed[base] for changed in values if base in changed).type())
    kept = walk.aliases.on_write(base, output)
    walk.aliases.rebase(base, kept, node)


def follow_loop(walk: GraphWalk, node: Any, following: Any) -> None:
    """Carry every outer tensor that the body writes from one iteration to the next."""
    body = next(node.blocks())
    _register_outer_tensors(walk, body)
    fixed = _find_fixed_variables(walk, node, body)
    outer = _find_written_outer_bases(walk, node, body, fixed)
    for base in outer:
        node.addInput(base.value)
    begun = _find_initial_aliases(walk, node, body, fixed)
    everything = set(walk.aliases.bases())
    returned: list[set[Base]] = []
    with walk.aliases.nested():
        for variable, alias in fixed.values():
            walk.aliases.bind(variable, alias)
        for variable, sources in begun.values():
            walk.aliases.may_share(variable, *sources)
        for base in outer:
            parameter = body.addInputToBlock()
            parameter.setType(base.value.type())
            walk.aliases.rebase(base, parameter, node)
        walk.block(body, body.returnNode())
        for value in list(body.outputs())[1:]:
            held = walk.aliases.find(value)
            returned.append({held.base} & everything if held is not None else set())
        spoiled = {base: base.unknown_because for base in everything if base.unknown_because}
        for base in outer:
            body.registerOutput(base.value)
    walk.emit.at(following, node)
    results = list(node.outputs())
    for base in outer:
        output = node.addOutput()
        output.setType(base.value.type())
        walk.aliases.rebase(base, walk.aliases.on_write(base, output), node)
    for base, why in spoiled.items():
        walk.aliases.mark_unknown(base, why)
    for place, (_, sources) in begun.items() if not _has_first_iteration(node) else ():
        returned[place] |= {alias.base for alias in sources}
    _mark_shared_outputs(walk, node, [bases if place not in fixed else set() for place, bases in enumerate(returned)])
    for place, (_, alias) in fixed.items():
        walk.aliases.bind(results[place], alias)


def _find_fixed_variables(walk: GraphWalk, node: Any, body: Any) -> dict[int, tuple[Any, Alias]]:
    """Find the loop variables that are the same tensor in all iterations, and that tensor.

    `y += 1` in a loop is `y = add_(y, 1)`.
    """
    variables, results = list(body.inputs())[1:], list(body.outputs())[1:]
    initial = list(node.inputs())[2:]
    fixed = {}
    for place, (variable, result) in enumerate(zip(variables, results, strict=True)):
        changed = result.unique() != variable.unique()
        while result.unique() != variable.unique() and 0 in find_written_arguments(result.node()):
            result = next(result.node().inputs())
        if is_tensor(variable) and changed and result.unique() == variable.unique():
            fixed[place] = variable, walk.aliases.of(initial[place])
    return fixed


def _find_initial_aliases(walk: GraphWalk, node: Any, body: Any, fixed: dict[int, tuple[Any, Alias]],
                          ) -> dict[int, tuple[Any, list[Alias]]]:
    """Find the other tensor variables, and the outer tensors that each is, or is a view of, in some iteration."""
    variables, results = list(body.inputs())[1:], list(body.outputs())[1:]
    begun = {}
    for place, start in enumerate(list(node.inputs())[2:]):
        if place not in fixed and place < len(variables) and is_tensor(variables[place]):
            inputs = [value for value in find_memory_sources(results[place]) if _is_outside(value, body)]
            begun[place] = variables[place], [alias for one in (start, *inputs) for alias in walk.tensors_in(one)]
    return begun


def _find_variable_sources(place: int, body: Any, initial: list[Any]) -> list[Any]:
    """List the possible initial values of a variable in any iteration, when the body permutes its variables."""
    variables = {value.unique(): number for number, value in enumerate(list(body.inputs())[1:])}
    results, places, waiting = list(body.outputs())[1:], {place}, [place]
    while waiting:
        for value in find_memory_sources(results[waiting.pop()]):
            other = variables.get(value.unique())
            if other is not None and other not in places:
                places.add(other)
                waiting.append(other)
    return [initial[number] for number in sorted(places)]


def _has_first_iteration(node: Any) -> bool:
    """Return whether a loop certainly runs its first iteration."""
    count, condition = (read_constant(value) for value in list(node.inputs())[:2])
    return bool(count and count > 0 and condition)


def _find_written_outer_bases(walk: GraphWalk, node: Any, body: Any, fixed: dict[int, tuple[Any, Alias]]) -> list[Base]:
    """Find the outer tensors that a loop's body writes.

    An outer tensor written through a variable that changes from one iteration to the next becomes unknown.
    """
    variables = {value.unique(): place for place, value in enumerate(list(body.inputs())[1:])}
    initial = list(node.inputs())[2:]
    written = []
    for value in _find_written_roots(body):
        place = variables.get(value.unique())
        if place in fixed:
            written.append(fixed[place][1].base)
        elif place is None and _is_outside(value, body):
            written.extend(alias.base for alias in walk.tensors_in(value))
        elif place is not None:
            # in the first iteration the variable is its initial tensor; in later ones it is another tensor
            for start in _find_variable_sources(place, body, initial):
                for alias in walk.tensors_in(start):
                    walk.aliases.mark_unknown(
                        alias.base, f"{describe_node_location(node)} writes to through its variable"
                    )
    return list(dict.fromkeys(written))


def _register_outer_tensors(walk: GraphWalk, block: Any) -> None:
    """Register the outer tensors that a block writes or returns, before the block is followed."""
    for value in [*_find_written_roots(block), *block.outputs()]:
        if _is_outside(value, block):
            walk.tensors_in(value)
    for node in block.nodes():
        for inner in node.blocks():
            _register_outer_tensors(walk, inner)


def _mark_shared_outputs(walk: GraphWalk, node: Any, shared: list[set[Base]]) -> None:
    """Record the outputs that may share memory with an outer tensor on some path."""
    for output, bases in zip(list(node.outputs()), shared, strict=False):
        if bases and is_tensor(output):
            walk.aliases.may_share(output, *(Alias(base, base.value) for base in bases))


def _find_written_roots(body: Any) -> list[Any]:
    """Find the roots of all values whose memory a block may write."""
    roots: dict[int, Any] = {}
    for node in body.nodes():
        for place in find_written_arguments(node):
            _collect_roots(list(node.inputs())[place], body, roots)
        for block in node.blocks():
            for value in _find_written_roots(block):
                _collect_roots(value, body, roots)
    return list(roots.values())


def _collect_roots(value: Any, body: Any, roots: dict[int, Any]) -> None:
    """Follow a value back to the possible owners of its memory: parameters of the block or values outside it."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        inside = not _is_outside(value, body)
        sources = [inputs for inputs in value.node().inputs() if _has_tensors(inputs)] if inside else []
        waiting.extend(sources)
        if not sources and _has_tensors(value):
            roots[value.unique()] = value


def _is_outside(value: Any, body: Any) -> bool:
    """Return whether a value is defined outside of a block (its parameters and nested blocks count as inside)."""
    block = value.node().owningBlock()
    while block is not None:
        if block is body:
            return False
        owner = block.owningNode()
        block = owner.owningBlock() if owner is not None else None
    return True


def _has_tensors(value: Any) -> bool:
    return is_tensor(value) or is_tensor_container(value)
