"""Axes that may be shown as one: which of a shape's axes go together so that few are left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from itertools import pairwise, permutations
from math import prod

from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = [
    "Extents",
    "Groups",
    "decompose_permutation",
    "extents_from_shape",
    "group_axes",
    "plan_transposes",
    "shape_from_groups",
]

Extents = Sequence[int | None]
"Extents of a shape; None where one is open."
Groups = Sequence[Sequence[int]]
"Axes that are shown as one axis each, in order."
_OPEN_AXIS_SIZE = 1 << 30
"What an open axis counts for when the shortest two are merged."
_MAX_EXHAUSTIVE_AXES = 7
"Axes up to which every way by two transposes is looked at."


def extents_from_shape(shape: Sequence[object]) -> list[int | None]:
    """The shape as numbers, None for what is open."""
    return [None if is_symbolic(extent) else int(str(extent)) for extent in shape]


def group_axes(keys: Sequence[Hashable], sizes: Extents, most: int) -> list[list[int]]:
    """Neighbours with equal keys go together, the shortest first, until no more than `most` groups are left.

    An axis with the key None (of extent 1, which nothing is done along) goes with whatever stands beside it. There may
    be more groups than `most` where keys differ.
    """
    named: list[Hashable] = []
    groups: list[list[int]] = []
    for axis, key in enumerate(keys):
        if key is None and groups:
            groups[-1].append(axis)
        elif groups and named[-1] is None:
            groups[-1].append(axis)
            named[-1] = key
        else:
            groups.append([axis])
            named.append(key)
    while len(groups) > most:
        pairs = [at for at in range(len(groups) - 1) if named[at] == named[at + 1]]
        if not pairs:
            break
        _join_neighbors(groups, min(pairs, key=lambda at: _compute_size([*groups[at], *groups[at + 1]], sizes)))
        named = [_find_group_key(group, keys) for group in groups]
    return groups


def _find_group_key(group: Sequence[int], keys: Sequence[Hashable]) -> Hashable:
    """The key of a group: that of its axes which have one."""
    return next((keys[axis] for axis in group if keys[axis] is not None), None)


def _join_neighbors(groups: list[list[int]], at: int) -> None:
    groups[at:at + 2] = [[*groups[at], *groups[at + 1]]]


def _compute_size(axes: Sequence[int], sizes: Extents) -> int:
    return prod(_OPEN_AXIS_SIZE if sizes[axis] is None else int(sizes[axis] or 0) for axis in axes)


def shape_from_groups(groups: Groups, sizes: Extents) -> list[int] | None:
    """The extents of the groups, -1 for one that is open; None where more than one is open."""
    shape = [-1 if any(sizes[axis] is None for axis in group) else prod(int(sizes[axis] or 0) for axis in group)
             for group in groups]
    return None if shape.count(-1) > 1 else shape


def plan_transposes(perm: Sequence[int], sizes: Extents, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """The groups of a transpose's input that stay together, and in which order each transpose takes them.

    Each of the orders moves the result of the one before and, on merged axes, needs no rank above `most`.
    """
    groups = [[axis] for axis in range(len(perm)) if sizes[axis] != 1]
    places = {axis: place for place, axis in enumerate(axis for axis in perm if sizes[axis] != 1)}
    while len(groups) > most:
        pairs = [at for at in range(len(groups) - 1) if places[groups[at][-1]] + 1 == places[groups[at + 1][0]]]
        if not pairs:
            break
        _join_neighbors(groups, min(pairs, key=lambda at: _compute_size([*groups[at], *groups[at + 1]], sizes)))
    order = sorted(range(len(groups)), key=lambda at: places[groups[at][0]])
    return groups, [list(step) for step in decompose_permutation(tuple(order), most)]


@cache
def decompose_permutation(order: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    """Transposes that make `order` one after the other, each of `most` axes once what stays together is merged."""
    if _count_merged_axes(order) <= most:
        return (order,)
    if len(order) <= _MAX_EXHAUSTIVE_AXES:
        for first in permutations(range(len(order))):
            second = tuple(first.index(axis) for axis in order)
            if _count_merged_axes(first) <= most and _count_merged_axes(second) <= most:
                return first, second
    steps, now = [], list(range(len(order)))
    for place in range(len(order)):
        at, run = now.index(order[place]), 1
        while place + run < len(order) and at + run < len(now) and now[at + run] == order[place + run]:
            run += 1
        if at != place:
            step = [*range(place), *range(at, at + run), *range(place, at), *range(at + run, len(now))]
            steps.append(tuple(step))
            now = [now[axis] for axis in step]
    return tuple(steps)


def _count_merged_axes(order: Sequence[int]) -> int:
    """How many axes a transpose has once those that stay neighbours are one."""
    return 1 + sum(after != before + 1 for before, after in pairwise(order))
