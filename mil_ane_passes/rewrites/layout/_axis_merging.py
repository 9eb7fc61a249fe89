"""Merging of axes: which axes of a shape can become one axis, so that few are left."""

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
"Extents of a shape; None for an unknown extent."
Groups = Sequence[Sequence[int]]
"Groups of axes that become one axis each, in order."
_OPEN_AXIS_SIZE = 1 << 30
"Size that stands in for an unknown extent when the two shortest groups are merged."
_MAX_EXHAUSTIVE_AXES = 7
"Number of axes up to which every decomposition into two transposes is tried."


def extents_from_shape(shape: Sequence[object]) -> list[int | None]:
    """Return the extents of a shape, None for each that is symbolic."""
    return [None if is_symbolic(extent) else int(str(extent)) for extent in shape]


def group_axes(keys: Sequence[Hashable], sizes: Extents, most: int) -> list[list[int]]:
    """Merge neighbouring axes with equal keys, the shortest first, until at most `most` groups are left.

    An axis with the key None (of extent 1, along which nothing is computed) joins its neighbour. More groups than
    `most` may be left where keys differ.
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
    """Return the key of a group: that of its axes which have one."""
    return next((keys[axis] for axis in group if keys[axis] is not None), None)


def _join_neighbors(groups: list[list[int]], at: int) -> None:
    groups[at:at + 2] = [[*groups[at], *groups[at + 1]]]


def _compute_size(axes: Sequence[int], sizes: Extents) -> int:
    return prod(_OPEN_AXIS_SIZE if sizes[axis] is None else int(sizes[axis] or 0) for axis in axes)


def shape_from_groups(groups: Groups, sizes: Extents) -> list[int] | None:
    """Return the extents of the groups, -1 for one unknown extent; None where more than one is unknown."""
    shape = [-1 if any(sizes[axis] is None for axis in group) else prod(int(sizes[axis] or 0) for axis in group)
             for group in groups]
    return None if shape.count(-1) > 1 else shape


def plan_transposes(perm: Sequence[int], sizes: Extents, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """Split a transpose into groups of input axes that stay together, and one order of the groups for each transpose.

    Each order permutes the result of the previous transpose. With merged axes, none needs a rank above `most`.
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
    """Return transposes that produce `order` when applied in sequence.

    Each has at most `most` axes once the axes that stay together are merged.
    """
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
    """Count the axes of a transpose once those that stay neighbours are merged."""
    return 1 + sum(after != before + 1 for before, after in pairwise(order))
