"""Ops that belong together, one list for each group."""

from __future__ import annotations

from coremltools.converters.mil.mil import Operation

__all__ = ["join"]


def join(groups: dict[Operation, list[Operation]], one: Operation, other: Operation) -> None:
    """The groups of two ops become one: the smaller moves into the larger, so that all joins together stay cheap."""
    small, large = sorted((groups[one], groups[other]), key=len)
    if small is not large:
        large.extend(small)
        for op in small:
            groups[op] = large
