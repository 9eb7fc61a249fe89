"""Values that are too large in some way, and the ops joined by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from .groups import sharing
from .query import flat_inputs, is_const, kind_of

__all__ = ["Shape", "islands"]

Shape = Sequence[object]


def islands(block: Block, large: Callable[[Shape], bool]) -> list[tuple[list[Operation], Var]]:
    """Ops of `block` that read or make a value whose shape is too `large`, joined where they share one; the first such.

    Parameters and weights are no values here. Linear: of two groups the smaller moves. Nearly always there is none.
    """
    judged = {var: large(_shape(var)) for var in _own(block)}
    if isinstance(block, Function) and not any(judged.values()):
        return []
    held: dict[Operation, list[Var]] = {}
    for op in block.operations:
        if op.op_type == "const" or op.op_type.startswith("constexpr_"):
            continue
        for var in (*flat_inputs(op), *op.outputs):
            if var not in judged:
                judged[var] = not is_const(var) and large(_shape(var))
            if judged[var]:
                held.setdefault(op, []).append(var)
    return [(ops, held[ops[0]][0]) for ops in sharing(held)]


def _own(block: Block) -> Iterator[Var]:
    """The values that enter a block or are made in it."""
    yield from block.inputs.values() if isinstance(block, Function) else block.inputs
    for op in block.operations:
        if op.op_type != "const":
            yield from op.outputs


def _shape(var: Var) -> Shape:
    kind = kind_of(var)
    if not kind.is_tensor:
        return ()
    return var.shape if kind.shape is None else kind.shape
