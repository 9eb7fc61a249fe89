"""What a package and a program say of an input whose shape is not fixed, in words."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic, is_symbolic

__all__ = ["extents"]

_MOST = 4
"Shapes a note lists."


def extents(feature: Any, var: Var) -> str | None:
    """`is ranged: (1, 3, 64..512, 64..), by default (1, 3, 128, 128)`, or None where the shape is fixed.

    `feature` is the input's description in the package, None where there is none.
    """
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        found = _array(feature.type.multiArrayType)
    elif kind == "imageType":
        found = _image(feature.type.imageType)
    else:
        found = None
    if found is None and types.is_tensor(var.sym_type) and any_symbolic(var.shape):
        shape = ", ".join("?" if is_symbolic(extent) else str(extent) for extent in var.shape)
        return f"has no fixed shape: ({shape}), ranged or enumerated"
    return found


def _array(array: Any) -> str | None:
    default = [int(extent) for extent in array.shape]
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _enumerated([[int(extent) for extent in one.shape] for one in array.enumeratedShapes.shapes], default)
    if kind == "shapeRange":
        return _ranged([_range(one) for one in array.shapeRange.sizeRanges], default)
    return None


def _image(image: Any) -> str | None:
    default = [int(image.height), int(image.width)]
    kind = image.WhichOneof("SizeFlexibility")
    if kind == "enumeratedSizes":
        return _enumerated([[int(one.height), int(one.width)] for one in image.enumeratedSizes.sizes], default)
    if kind == "imageSizeRange":
        return _ranged([_range(image.imageSizeRange.heightRange), _range(image.imageSizeRange.widthRange)], default)
    return None


def _enumerated(shapes: list[list[int]], default: list[int]) -> str | None:
    distinct = list(dict.fromkeys(tuple(shape) for shape in shapes))
    if len(distinct) < 2:
        return None
    more = f" and {len(distinct) - _MOST} more" if len(distinct) > _MOST else ""
    return f"has {len(distinct)} shapes: {', '.join(map(_text, distinct[:_MOST]))}{more}, by default {_text(default)}"


def _ranged(ranges: list[tuple[int, int]], default: list[int]) -> str | None:
    if all(low == high for low, high in ranges):
        return None
    each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in ranges]
    return f"is ranged: ({', '.join(each)}), by default {_text(default)}"


def _range(one: Any) -> tuple[int, int]:
    """Lower and upper bound; the upper one is negative where there is none."""
    return int(one.lowerBound), int(one.upperBound)


def _text(shape: Any) -> str:
    return f"({', '.join(map(str, shape))})"
