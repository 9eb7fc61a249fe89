"""Union-find for groups of ops, with one list per group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil import Operation, Var

__all__ = ["group_by_shared_values", "list_groups", "merge_groups"]


def merge_groups(groups: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    """Merge the groups of two ops.

    The smaller one moves into the larger, which keeps the total cost of all merges low.
    """
    small, large = sorted((groups[one], groups[other]), key=len)
    if small is not large:
        large.extend(small)
        for op in small:
            groups[op] = large


def list_groups(groups: Mapping[Operation, list[Operation]]) -> list[list[Operation]]:
    """List each group once, in the order of the first op of each; their ops are in the order of `groups`."""
    order = {op: place for place, op in enumerate(groups)}
    return [sorted(members, key=order.__getitem__) for members in {id(each): each for each in groups.values()}.values()]


def group_by_shared_values(values: Mapping[Operation, Iterable[Var]]) -> list[list[Operation]]:
    """Group ops that share values, directly or through other ops, from the values of each op."""
    groups: dict[Operation, list[Operation]] = {}
    holder: dict[Var, Operation] = {}
    for op, own in values.items():
        groups[op] = [op]
        for var in own:
            merge_groups(groups, holder.setdefault(var, op), op)
    return list_groups(groups)
