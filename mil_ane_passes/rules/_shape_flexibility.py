"""Descriptions of an input whose shape is not fixed, from the package and the program."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic, is_symbolic

__all__ = ["describe_flexible_shape"]

_MAX_SHAPES_LISTED = 4
"Most shapes that a note lists."


def describe_flexible_shape(feature: Any, var: Var) -> str | None:
    """Describe a flexible shape, or return None for a fixed one.

    An example is `is ranged: (1, 3, 64..512, 64..), by default (1, 3, 128, 128)`. `feature` is the input's description
    in the package, or None.
    """
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        found = _describe_array_shape(feature.type.multiArrayType)
    elif kind == "imageType":
        found = _describe_image_size(feature.type.imageType)
    else:
        found = None
    if found is None and types.is_tensor(var.sym_type) and any_symbolic(var.shape):
        shape = ", ".join("?" if is_symbolic(extent) else str(extent) for extent in var.shape)
        return f"has no fixed shape: ({shape}), ranged or enumerated"
    return found


def _describe_array_shape(array: Any) -> str | None:
    default = [int(extent) for extent in array.shape]
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _describe_enumerated(
            [[int(extent) for extent in one.shape] for one in array.enumeratedShapes.shapes], default
        )
    if kind == "shapeRange":
        return _describe_ranged([_read_bounds(one) for one in array.shapeRange.sizeRanges], default)
    return None


def _describe_image_size(image: Any) -> str | None:
    default = [int(image.height), int(image.width)]
    kind = image.WhichOneof("SizeFlexibility")
    if kind == "enumeratedSizes":
        return _describe_enumerated([[int(one.height), int(one.width)] for one in image.enumeratedSizes.sizes], default)
    if kind == "imageSizeRange":
        return _describe_ranged(
            [_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange)], default
        )
    return None


def _describe_enumerated(shapes: list[list[int]], default: list[int]) -> str | None:
    distinct = list(dict.fromkeys(tuple(shape) for shape in shapes))
    if len(distinct) < 2:
        return None
    more = f" and {len(distinct) - _MAX_SHAPES_LISTED} more" if len(distinct) > _MAX_SHAPES_LISTED else ""
    listed = ", ".join(map(_format_shape, distinct[:_MAX_SHAPES_LISTED]))
    return f"has {len(distinct)} shapes: {listed}{more}, by default {_format_shape(default)}"


def _describe_ranged(ranges: list[tuple[int, int]], default: list[int]) -> str | None:
    if all(low == high for low, high in ranges):
        return None
    each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in ranges]
    return f"is ranged: ({', '.join(each)}), by default {_format_shape(default)}"


def _read_bounds(one: Any) -> tuple[int, int]:
    """Return the lower and upper bound; a negative upper bound means unbounded."""
    return int(one.lowerBound), int(one.upperBound)


def _format_shape(shape: Any) -> str:
    return f"({', '.join(map(str, shape))})"
