"""Writes inside `if` and loops: what a block writes to becomes one more result of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .aliases import Alias, Base
from .emit import is_tensor
from .writes import written_arguments

if TYPE_CHECKING:
    from .graph import Walk

__all__ = ["follow_if", "follow_loop"]


def follow_if(walk: Walk, node: Any, following: Any) -> None:
    """Each branch gives the new value of every outer tensor that either writes; `following` is the next node."""
    outer = walk.aliases.bases()
    before = {base: base.version for base in outer}
    values: list[dict[Base, Any]] = []
    spoiled: dict[Base, str] = {}
    shared: list[set[Base]] = [set() for _ in range(node.outputsSize())]
    for block in node.blocks():
        with walk.aliases.nested():
            walk.block(block, block.returnNode())
            values.append({base: base.value for base in outer if base.version != before[base]})
            spoiled.update({base: base.spoiled for base in outer if base.spoiled})
            for place, value in enumerate(block.outputs()):
                alias = walk.aliases.find(value)
                shared[place] |= {alias.base} & set(outer) if alias is not None else set()
    walk.emit.at(following, node)
    written = [base for base in outer if any(base in changed for changed in values)]
    for base in written:
        for block, changed in zip(node.blocks(), values, strict=True):
            block.registerOutput(changed.get(base, base.value))
        _becomes(walk, base, node, values)
    for base, why in spoiled.items():
        walk.aliases.spoil(base, why)
    _share(walk, node, shared)


def _becomes(walk: Walk, base: Base, node: Any, values: list[dict[Base, Any]]) -> None:
    output = node.addOutput()
    output.setType(next(changed[base] for changed in values if base in changed).type())
    kept = walk.aliases.when_written(base, output)
    walk.aliases.rebase(base, kept, node)


def follow_loop(walk: Walk, node: Any, following: Any) -> None:
    """Every outer tensor that the body writes is carried from one turn to the next."""
    body = next(node.blocks())
    carried = list(body.inputs())[1:]
    initial = list(node.inputs())[2:]
    roots = _written_roots(body)
    own = {value.unique(): place for place, value in enumerate(carried)}
    for value in roots:  # the loop variable is, on its first turn, the tensor it starts as
        if value.unique() in own and (start := walk.aliases.find(initial[own[value.unique()]])) is not None:
            walk.aliases.spoil(start.base, f"a loop writes to through its variable ('{node.kind()}')")
    outer = list(dict.fromkeys(
        walk.aliases.of(value).base for value in roots if value.unique() not in own and _is_outside(value, body)))
    for base in outer:
        node.addInput(base.value)
    returned: list[set[Base]] = [set() for _ in carried]
    everything = set(walk.aliases.bases())
    with walk.aliases.nested():
        for base in outer:
            parameter = body.addInputToBlock()
            parameter.setType(base.value.type())
            walk.aliases.rebase(base, parameter, node)
        walk.block(body, body.returnNode())
        for place, value in enumerate(list(body.outputs())[1:]):
            alias: Alias | None = walk.aliases.find(value)
            returned[place] |= {alias.base} & everything if alias is not None else set()
        spoiled = {base: base.spoiled for base in everything if base.spoiled}
        for base in outer:
            body.registerOutput(base.value)
    walk.emit.at(following, node)
    for base in outer:
        output = node.addOutput()
        output.setType(base.value.type())
        walk.aliases.rebase(base, walk.aliases.when_written(base, output), node)
    for base, why in spoiled.items():
        walk.aliases.spoil(base, why)
    _share(walk, node, returned)


def _share(walk: Walk, node: Any, shared: list[set[Base]]) -> None:
    """An output of a block that is, on some way, memory of an outer tensor."""
    for output, bases in zip(list(node.outputs()), shared, strict=False):
        if bases and is_tensor(output):
            walk.aliases.may_share(output, *(Alias(base, base.value) for base in bases))


def _written_roots(body: Any) -> list[Any]:
    """The values, followed back through the ops that made them, whose memory a block may write."""
    roots: dict[int, Any] = {}
    for node in body.nodes():
        for place in written_arguments(node):
            _roots(list(node.inputs())[place], body, roots)
        for block in node.blocks():
            for value in _written_roots(block):
                _roots(value, body, roots)
    return list(roots.values())


def _roots(value: Any, body: Any, roots: dict[int, Any]) -> None:
    """Follow a value back to where its memory may come from: a parameter of the block or something outside it."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        inside = not _is_outside(value, body)
        sources = [given for given in value.node().inputs() if _holds_tensors(given)] if inside else []
        waiting.extend(sources)
        if not sources and is_tensor(value):
            roots[value.unique()] = value


def _is_outside(value: Any, body: Any) -> bool:
    """Whether a value is defined outside of a block (its parameters and nested blocks count as inside)."""
    block = value.node().owningBlock()
    while block is not None:
        if block is body:
            return False
        owner = block.owningNode()
        block = owner.owningBlock() if owner is not None else None
    return True


def _holds_tensors(value: Any) -> bool:
    return is_tensor(value) or value.type().kind() in ("ListType", "TupleType")
