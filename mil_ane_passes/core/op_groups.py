"""Ops that belong together, one list for each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil import Operation, Var

__all__ = ["group_by_shared_values", "list_groups", "merge_groups"]


def merge_groups(groups: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    """The groups of two ops become one: the smaller moves into the larger, so that all joins together stay cheap."""
    small, large = sorted((groups[one], groups[other]), key=len)
    if small is not large:
        large.extend(small)
        for op in small:
            groups[op] = large


def list_groups(groups: Mapping[Operation, list[Operation]]) -> list[list[Operation]]:
    """Each group once, in the order of the first op of each; their ops in the order of `groups`."""
    order = {op: place for place, op in enumerate(groups)}
    return [sorted(members, key=order.__getitem__) for members in {id(each): each for each in groups.values()}.values()]


def group_by_shared_values(values: Mapping[Operation, Iterable[Var]]) -> list[list[Operation]]:
    """Ops that have values in common, directly or by others, from the values of each op."""
    groups: dict[Operation, list[Operation]] = {}
    holder: dict[Var, Operation] = {}
    for op, own in values.items():
        groups[op] = [op]
        for var in own:
            merge_groups(groups, holder.setdefault(var, op), op)
    return list_groups(groups)
