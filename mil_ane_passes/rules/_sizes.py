"""What rules about sizes share: values that are tensors, and ops joined by those values that are too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from coremltools.converters.mil.mil import Block, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.query import is_const
from ..core.targets import GENERATIONS, Generation, parse_target

__all__ = ["among", "islands", "known", "spatial", "tensors"]


def tensors(op: Operation) -> Iterator[Var]:
    """The tensors that `op` computes from and makes: no parameters, no weights, no lists, no states."""
    for given in op.inputs.values():
        for var in given if isinstance(given, (list, tuple)) else (given,):
            if var is not None and not is_const(var) and types.is_tensor(var.sym_type):
                yield var
    for var in op.outputs:
        if types.is_tensor(var.sym_type):
            yield var


def islands(block: Block, large: Callable[[Var], bool]) -> list[tuple[list[Operation], Var]]:
    """Ops of `block` that read or make a value that is too `large`, joined where they share one; with the first such.

    Linear: of two groups the smaller moves.
    """
    group: dict[Operation, list[Operation]] = {}
    met: dict[Var, list[Operation] | None] = {}
    first: dict[int, Var] = {}
    for op in block.operations:
        if op.op_type == "const" or op.op_type.startswith("constexpr_"):
            continue
        for var in tensors(op):
            if var not in met:
                met[var] = [] if large(var) else None
            holders = met[var]
            if holders is None:
                continue
            group.setdefault(op, [op])
            first.setdefault(id(op), var)
            if holders:
                _join(group, holders[0], op)
            holders.append(op)
    found = {id(members): members for members in group.values()}
    order = {op: place for place, op in enumerate(block.operations)}
    return [(ops, first[id(ops[0])]) for ops in (sorted(members, key=order.__getitem__) for members in found.values())]


def _join(group: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    large, small = sorted((group[one], group[other]), key=len, reverse=True)
    if large is not small:
        large.extend(small)
        for op in small:
            group[op] = large


def known(extents: Sequence[object]) -> tuple[int, ...] | None:
    """Extents as numbers, or None where one is symbolic."""
    return None if any(is_symbolic(extent) for extent in extents) else tuple(int(str(extent)) for extent in extents)


def spatial(op: Operation) -> tuple[int, ...] | None:
    """The kernel of a conv or conv_transpose, or of a pool; None where it is not known before the model runs."""
    if op.op_type in ("conv", "conv_transpose"):
        return known(op.weight.shape[2:])
    sizes = op.kernel_sizes.val
    return None if sizes is None else tuple(int(size) for size in sizes)


def among(generations: Sequence[Generation], *chips: str) -> tuple[Generation, ...]:
    """Those of `generations` that one of `chips` belongs to."""
    wanted = {parse_target(chip)[0] for chip in chips}
    return tuple(one for one in GENERATIONS if one in wanted and one in generations)
