"""Elements and bytes that an op reads and makes, from declared types alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Function, Operation, Var, types
from coremltools.converters.mil.mil.var import ListVar

from ..ir.query import get_itemsize, get_type_info, is_symbolic

__all__ = ["Sizes", "has_symbolic_shape", "iterate_inputs", "make_sizes"]


def iterate_inputs(op: Operation) -> Iterator[Var]:
    """Yield each input of `op`, once for each time it is read, with tuples flattened."""
    for given in op.inputs.values():
        if given is not None:
            yield from given if isinstance(given, (list, tuple)) else (given,)


def _get_extents(var: Var) -> Sequence[Any]:
    return () if isinstance(var, ListVar) else tuple(var.shape)


def has_symbolic_shape(var: Var) -> bool:
    """Return whether a dimension of `var` is symbolic."""
    return get_type_info(var).shape is None


@dataclass(frozen=True)
class Sizes:
    """Counts of elements and bytes; a symbol in a dimension counts as `extent`.

    `extent` is the default of a flexible input, if the model has one, and else 1, which Core ML's own estimates use
    for a dimension that depends on values. A computed shape (a reshape's) gives every dimension a symbol of its own,
    also the fixed ones. Therefore at most `free` symbols of one tensor count, from the last axis on; the others are 1.
    Lists, states and strings count nothing.
    """

    extent: int = 1
    free: int = 1
    "Number of flexible dimensions of one input."

    def shape(self, var: Var | None) -> tuple[int, ...]:
        """Return the extents; () for a value that is not a tensor."""
        if var is None:
            return ()
        extents = _get_extents(var)
        if all(type(extent) is int for extent in extents):
            return tuple(extents)
        symbols = dict.fromkeys(extent for extent in extents[::-1] if type(extent) is not int and is_symbolic(extent))
        counted = frozenset(list(symbols)[:self.free])
        return tuple(1 if extent in symbols and extent not in counted else self._resolve_dimension(extent)
                     for extent in extents)

    def elements(self, var: Var | None) -> int:
        if var is None:
            return 0
        known = get_type_info(var)
        if known.is_tensor and known.shape and not types.is_str(known.dtype):
            return math.prod(known.shape)
        shape = self.shape(var)
        if not shape and (not (types.is_scalar(var.sym_type) or types.is_tensor(var.sym_type))
                          or types.is_str(var.dtype)):
            return 0
        return math.prod(shape)

    def bytes(self, var: Var | None) -> int:
        count = self.elements(var)
        return count * get_itemsize(var) if var is not None and count else 0

    def moved(self, op: Operation) -> int:
        """Count the bytes of all inputs, small parameters included, and of the first output."""
        return sum(map(self.bytes, iterate_inputs(op))) + sum(map(self.bytes, op.outputs[:1]))

    def _resolve_dimension(self, extent: Any) -> int:
        if not is_symbolic(extent):
            return int(extent)
        if extent.is_Symbol:
            return self.extent
        found = extent.subs(dict.fromkeys(extent.free_symbols, self.extent))
        return max(1, int(found)) if found.is_number else self.extent


def make_sizes(function: Function, description: Any) -> Sizes:
    """Make sizes at the default shapes of flexible inputs in `description` (a package's, of this function).

    Symbols have no names in a package, so all count as the largest default of any flexible dimension, and a tensor has
    no more of them than an input.
    """
    features = {feature.name: feature for feature in description.input} if description is not None else {}
    found, free = [1], 1
    for name, var in function.inputs.items():
        if name not in features or not has_symbolic_shape(var):
            continue
        kind = features[name].type
        default = tuple(kind.multiArrayType.shape) or (kind.imageType.height, kind.imageType.width)
        mine = [int(given) for given, extent in zip(reversed(default), reversed(var.shape)) if is_symbolic(extent)]
        found, free = found + mine, max(free, len(mine))
    return Sizes(max(found), free)
