"""Sizes of a crossing value of flexible shape, inferred from the shapes that the inputs may have.

coremltools infers the shapes for the corners of the inputs' ranges, for their middles and their defaults. Results for
sizes in between are assumed to lie between these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from coremltools.converters.mil.mil import Block as HostBlock

from .document import Document
from .fix_shape_inference import get_sizes, infer_function
from .fix_shape_inputs import fix_type_sizes, get_declared_shape
from .program_parts import Function, ValueDeclaration

__all__ = ["FlexibleSizes", "infer_crossing_sizes"]

Shape = tuple[int, ...]
_MAX_CORNER_DIMENSIONS = 3
"The most ranged dimensions for which all corners are tried: their number is 2 to the power of it."
_MIN_VERSION_MANY_ENUMERATED = 9
"The specification version (iOS 18) from which several inputs may list their shapes."
_UNBOUNDED_STEP = 97
"The distance above the smallest size at which an unbounded dimension is tried."


@dataclass(frozen=True)
class FlexibleSizes:
    """The shapes a value can have: those `listed` or, if empty, between `low` and `high` (-1: unbounded)."""

    default: Shape
    low: Shape
    high: Shape
    listed: tuple[Shape, ...] = ()

    def put(self, array: Any) -> None:
        """Describe the shapes in `array`, an ArrayFeatureType."""
        array.shape[:] = self.default
        if self.listed:
            for shape in self.listed:
                array.enumeratedShapes.shapes.add().shape[:] = shape
            return
        for low, high in zip(self.low, self.high, strict=True):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


@dataclass(frozen=True)
class _FlexibleInput:
    """The shapes that the description allows for one input of flexible shape."""

    name: str
    default: Shape
    listed: tuple[Shape, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def open(self) -> list[int]:
        """The dimensions that are a range."""
        return [axis for axis, (low, high) in enumerate(self.ranges) if low != high]

    @property
    def unbounded_axes(self) -> dict[int, bool]:
        """The dimensions without an upper bound."""
        return {axis: True for axis, (_, high) in enumerate(self.ranges) if high < 0}

    def at(self, ends: Mapping[int, bool] | None) -> Shape:
        """Return the shape with each open dimension at its upper (True) or lower end; the middle if `ends` is None."""
        shape = []
        for axis, (low, high) in enumerate(self.ranges):
            top = high if high >= 0 else low + _UNBOUNDED_STEP
            shape.append((low + top) // 2 if ends is None else (top if ends.get(axis, False) else low))
        return tuple(shape)


def infer_crossing_sizes(
    document: Document, function: Function, values: Sequence[str], alone: bool
) -> dict[str, FlexibleSizes] | str:
    """Infer the shapes of each of `values`, or return why they are unknown.

    `function` has only the ops that compute them. `alone`: no other input of the second part has a flexible shape.
    """
    inputs = _find_flexible_inputs(document, function)
    if isinstance(inputs, str):
        return inputs
    unknown = f"the sizes of '{values[0]}' do not follow from the shapes of the inputs: no input can take them all"
    if not inputs:
        return unknown
    aligned, mixed = _sample_input_shapes(inputs)
    found = [_infer_sizes(document, function, sample, values) for sample in aligned]
    for name in values:
        if any(each[name] is None for each in found):
            return unknown.replace(values[0], name)
    found += [each for each in (_infer_sizes(document, function, sample, values) for sample in mixed)
              if None not in each.values()]
    may_list = all(each.listed for each in inputs) and (alone or document.version >= _MIN_VERSION_MANY_ENUMERATED)
    ends: list[dict[str, Shape | None]] = []
    if any(each.unbounded_axes for each in inputs):
        low = {each.name: each.at({}) for each in inputs}
        further = {each.name: each.at(each.unbounded_axes) for each in inputs}
        ends = [_infer_sizes(document, function, sample, values) for sample in (low, further)]
    may_list = may_list and len(inputs) == 1
    return {name: _join_shapes([each[name] or () for each in found], may_list, [end[name] for end in ends])
            for name in values}


def _join_shapes(shapes: Sequence[Shape], may_list: bool, ends: Sequence[Shape | None]) -> FlexibleSizes:
    """Combine `shapes`, the first of which is the default.

    Dimensions that differ between the two `ends` grow with an unbounded input, so they are unbounded.
    """
    low = tuple(map(min, zip(*shapes, strict=True)))
    high = tuple(map(max, zip(*shapes, strict=True)))
    listed = tuple(dict.fromkeys(shapes)) if may_list else ()
    if ends:
        first, second = ends[0] or low, ends[1] or high
        high = tuple(top if a == b else -1 for top, a, b in zip(high, first, second, strict=True))
    return FlexibleSizes(shapes[0], low, high, listed if len(listed) > 1 else ())


def _sample_input_shapes(inputs: Sequence[_FlexibleInput]) -> tuple[list[dict[str, Shape]], list[dict[str, Shape]]]:
    """Return shapes to try: those with all inputs at the same end, which fit together, and others, which may not."""
    aligned = [{each.name: each.default for each in inputs}]
    most = max(len(each.listed) for each in inputs)
    for number in range(most):
        aligned.append({each.name: each.listed[number % len(each.listed)] if each.listed else each.default
                        for each in inputs})
    for end in (False, True, None):
        aligned.append({each.name: each.default if each.listed else
                        each.at(None if end is None else dict.fromkeys(each.open, end)) for each in inputs})
    places = [(each.name, axis) for each in inputs if not each.listed for axis in each.open]
    mixed = []
    if 1 < len(places) <= _MAX_CORNER_DIMENSIONS:
        for ends in product((False, True), repeat=len(places)):
            chosen = dict(zip(places, ends, strict=True))
            mixed.append({each.name: each.default if each.listed else
                          each.at({axis: chosen[each.name, axis] for axis in each.open}) for each in inputs})
    unique = list({tuple(sorted(sample.items())): sample for sample in aligned}.values())
    return unique, [sample for sample in mixed if sample not in unique]


def _infer_sizes(
    document: Document, function: Function, sample: Mapping[str, Shape], values: Sequence[str]
) -> dict[str, Shape | None]:
    twin = function.copy(function.name)
    twin.inputs = [ValueDeclaration.of_type(each.name, fix_type_sizes(each.message.type, sample[each.name]))
                   if each.name in sample else each for each in twin.inputs]
    known = _collect_sizes(infer_function(document, twin))
    return {name: known.get(name) for name in values}


def _collect_sizes(block: HostBlock) -> dict[str, Shape | None]:
    found: dict[str, Shape | None] = {}
    for op in block.operations:
        for var in op.outputs:
            known = get_sizes(var.sym_type)
            whole = () if known is None else tuple(size for size in known if size is not None)
            found[var.name] = whole if known is not None and len(whole) == len(known) else None
    return found


def _find_flexible_inputs(document: Document, function: Function) -> list[_FlexibleInput] | str:
    features = {feature.name: feature.message.type for section in document.description.of(function.name)
                for feature in section.features("input")}
    found = []
    for each in function.inputs:
        shape = get_declared_shape(each.message.type)
        if shape is not None and None not in shape:
            continue
        one = _read_allowed_shapes(each.name, features.get(each.name), shape)
        if one is None:
            return f"the description does not say which shapes the input '{each.name}' can have"
        found.append(one)
    return found


def _read_allowed_shapes(name: str, feature: Any, shape: Sequence[int | None] | None) -> _FlexibleInput | None:
    kind = feature.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        array = feature.multiArrayType
        listed = tuple(tuple(map(int, one.shape)) for one in array.enumeratedShapes.shapes)
        ranges = tuple(map(_read_bounds, array.shapeRange.sizeRanges))
        default = tuple(map(int, array.shape))
    elif kind == "imageType" and shape is not None and None not in shape[:-2]:
        image = feature.imageType
        front = tuple(size or 1 for size in shape[:-2])
        listed = tuple((*front, int(one.height), int(one.width)) for one in image.enumeratedSizes.sizes)
        sides = [_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange)]
        ranges = (*((size, size) for size in front), *sides) if image.HasField("imageSizeRange") else ()
        default = (*front, int(image.height), int(image.width))
    else:
        return None
    ranges = ranges or tuple((size, size) for size in default)
    fits = shape is not None and {len(default), len(ranges), *map(len, listed)} == {len(shape)}
    return _FlexibleInput(name, default, listed, ranges) if fits else None


def _read_bounds(one: Any) -> tuple[int, int]:
    return int(one.lowerBound), int(one.upperBound)
