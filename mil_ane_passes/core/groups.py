"""Ops that belong together, one list for each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coremltools.converters.mil.mil import Operation, Var

__all__ = ["grouped", "join", "sharing"]


def join(groups: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    """The groups of two ops become one: the smaller moves into the larger, so that all joins together stay cheap."""
    small, large = sorted((groups[one], groups[other]), key=len)
    if small is not large:
        large.extend(small)
        for op in small:
            groups[op] = large


def grouped(groups: Mapping[Operation, list[Operation]]) -> list[list[Operation]]:
    """Each group once, in the order of the first op of each; their ops in the order of `groups`."""
    order = {op: place for place, op in enumerate(groups)}
    return [sorted(members, key=order.__getitem__) for members in {id(each): each for each in groups.values()}.values()]


def sharing(values: Mapping[Operation, Iterable[Var]]) -> list[list[Operation]]:
    """Ops that have values in common, directly or by others, from the values of each op."""
    groups: dict[Operation, list[Operation]] = {}
    holder: dict[Var, Operation] = {}
    for op, own in values.items():
        groups[op] = [op]
        for var in own:
            join(groups, holder.setdefault(var, op), op)
    return grouped(groups)
