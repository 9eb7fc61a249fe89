"""Groups of ops connected by values that exceed a size limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from .query import get_flat_inputs, get_type_info, is_const

__all__ = ["Shape", "group_by_shared_values", "group_ops_by_large_values", "list_groups", "merge_groups"]


Shape = Sequence[object]


def group_ops_by_large_values(block: Block, large: Callable[[Shape], bool]) -> list[tuple[list[Operation], Var]]:
    """Group the ops of `block` that read or make a value for whose shape `large` is true.

    Ops that share such a value are in one group. Each group is returned with its first such value. Consts and weights
    are not counted as values. The cost is nearly linear in the number of ops: merging two groups moves the smaller one,
    and most models have no such value.
    """
    judged = {var: large(_get_shape(var)) for var in _iterate_block_values(block)}
    if isinstance(block, Function) and not any(judged.values()):
        return []
    held: dict[Operation, list[Var]] = {}
    for op in block.operations:
        if op.op_type == "const" or op.op_type.startswith("constexpr_"):
            continue
        for var in (*get_flat_inputs(op), *op.outputs):
            if var not in judged:
                judged[var] = not is_const(var) and large(_get_shape(var))
            if judged[var]:
                held.setdefault(op, []).append(var)
    return [(ops, held[ops[0]][0]) for ops in group_by_shared_values(held)]


def _iterate_block_values(block: Block) -> Iterator[Var]:
    """Yield the inputs of a block and the values computed in it."""
    yield from block.inputs.values() if isinstance(block, Function) else block.inputs
    for op in block.operations:
        if op.op_type != "const":
            yield from op.outputs


def _get_shape(var: Var) -> Shape:
    kind = get_type_info(var)
    if not kind.is_tensor:
        return ()
    return var.shape if kind.shape is None else kind.shape


def merge_groups(groups: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    """Merge the groups of two ops.

    The smaller group is appended to the larger one, so n merges cost O(n log n) in total.
    """
    small, large = sorted((groups[one], groups[other]), key=len)
    if small is not large:
        large.extend(small)
        for op in small:
            groups[op] = large


def list_groups(groups: Mapping[Operation, list[Operation]]) -> list[list[Operation]]:
    """List each group once, in the order of their first ops; the ops of a group are in the order of `groups`."""
    order = {op: place for place, op in enumerate(groups)}
    return [sorted(members, key=order.__getitem__) for members in {id(each): each for each in groups.values()}.values()]


def group_by_shared_values(values: Mapping[Operation, Iterable[Var]]) -> list[list[Operation]]:
    """Group ops that share values, directly or through other ops; `values` maps each op to its values."""
    groups: dict[Operation, list[Operation]] = {}
    holder: dict[Var, Operation] = {}
    for op, own in values.items():
        groups[op] = [op]
        for var in own:
            merge_groups(groups, holder.setdefault(var, op), op)
    return list_groups(groups)
