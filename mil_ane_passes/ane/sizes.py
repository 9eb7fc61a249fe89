"""Elements and bytes that an op reads and makes, from declared types alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil import Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.var import ListVar

from ..ir.query import get_itemsize, get_type_info, is_symbolic
from ..ir.shape_inference import infer_fixed_sizes

__all__ = ["Sizes", "has_symbolic_shape", "iterate_inputs", "make_program_sizes"]


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
    """Counts of elements and bytes, at the default shapes of flexible inputs.

    `inferred` are the sizes that follow from these shapes. In other values, a symbol counts as `extent`: the default of
    a flexible input, if the model has one, and else 1, which Core ML's own estimates use for a dimension that depends
    on values. A computed shape (a reshape's) gives every dimension a symbol of its own, also the fixed ones. Therefore
    at most `free` symbols of one tensor count, from the last axis on; the others are 1. Lists, states and strings count
    nothing.
    """

    extent: int = 1
    free: int = 1
    "Number of flexible dimensions of one input."
    inferred: Mapping[Var, tuple[int, ...]] = field(default_factory=dict)

    def shape(self, var: Var | None) -> tuple[int, ...]:
        """Return the extents; () for a value that is not a tensor."""
        if var is None:
            return ()
        extents = _get_extents(var)
        if all(type(extent) is int for extent in extents):
            return tuple(extents)
        if var in self.inferred:
            return self.inferred[var]
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


def make_program_sizes(program: Program, package: Any) -> dict[str, Sizes]:
    """Make the sizes of each function by name; `package` is the package of the program, or None."""
    return {name: _make_sizes(function, package.description(name) if package is not None else None)
            for name, function in program.functions.items()}


def _make_sizes(function: Function, description: Any) -> Sizes:
    """Make sizes at the default shapes of flexible inputs.

    The defaults are those in `description` (a package's, of this function), or those with which coremltools converts
    the function.
    """
    defaults = {name: shape for name, shape in _iterate_default_shapes(function, description)
                if name in function.inputs and has_symbolic_shape(function.inputs[name])}
    if not defaults:
        return Sizes()
    found, free, entire = [1], 1, {}
    for name, default in defaults.items():
        shape = list(function.inputs[name].shape)
        mine = [given for given, extent in zip(reversed(default), reversed(shape)) if is_symbolic(extent)]
        found, free = found + mine, max(free, len(mine))
        shape[max(0, len(shape) - len(default)):] = default
        if len(shape) == function.inputs[name].rank and not any(map(is_symbolic, shape)):
            entire[name] = tuple(map(int, shape))
    return Sizes(max(found), free, infer_fixed_sizes(function, entire))


def _iterate_default_shapes(function: Function, description: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the default shape of each input; of an image in a package, its last two sizes."""
    if description is None:
        for given in getattr(function, "input_types", ()):
            shape = getattr(given.shape, "default", ())
            if given.name and shape and not any(map(is_symbolic, shape)):
                yield given.name, tuple(map(int, shape))
        return
    for feature in description.input:
        kind = feature.type
        if kind.multiArrayType.shape:
            yield feature.name, tuple(map(int, kind.multiArrayType.shape))
        elif kind.HasField("imageType"):
            yield feature.name, (kind.imageType.height, kind.imageType.width)
