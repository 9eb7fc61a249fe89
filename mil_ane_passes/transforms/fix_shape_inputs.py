"""Shapes that an input may have, by the program and the model description, and both with a fixed shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .fix_shape_requests import Shape, format_shape, make_request_error

__all__ = ["check_shape", "fix_feature_shape", "fix_type_sizes", "get_declared_shape", "has_flexible_size"]

Sizes = Sequence[int | None]


def get_declared_shape(declared: Any) -> tuple[int | None, ...] | None:
    """Return the sizes in a ValueType proto, None for flexible ones.

    Returns None for what is not a tensor or has unknown rank.
    """
    kind = declared.WhichOneof("type")
    if kind == "stateType":
        return get_declared_shape(declared.stateType.wrappedType)
    if kind != "tensorType" or declared.tensorType.rank < 0:
        return None
    dimensions = declared.tensorType.dimensions
    if any(each.unknown.variadic for each in dimensions):
        return None
    return tuple(int(each.constant.size) if each.WhichOneof("dimension") == "constant" else None
                 for each in dimensions)


def has_flexible_size(declared: Any) -> bool:
    """Return whether a ValueType proto is a tensor with a flexible size."""
    kind = declared.WhichOneof("type")
    if kind == "stateType":
        return has_flexible_size(declared.stateType.wrappedType)
    return kind == "tensorType" and any(each.WhichOneof("dimension") != "constant"
                                        for each in declared.tensorType.dimensions)


def fix_type_sizes(declared: Any, shape: Sizes) -> Any:
    """Return a copy of a ValueType proto with missing sizes taken from `shape`, which may lack some, too."""
    made = type(declared).FromString(declared.SerializeToString())
    inner = made.stateType.wrappedType if made.WhichOneof("type") == "stateType" else made
    tensor = inner.tensorType
    if get_declared_shape(declared) is None:
        tensor.rank = len(shape)
        del tensor.dimensions[:]
        for _ in shape:
            tensor.dimensions.add().unknown.variadic = False
    for dimension, size in zip(tensor.dimensions, shape, strict=True):
        if dimension.WhichOneof("dimension") != "constant" and size is not None:
            dimension.constant.size = size
    return made


def check_shape(name: str, shape: Shape, declared: Any, feature: Any) -> bool:
    """Return whether there is anything to fix.

    `declared` is the input's ValueType, `feature` its FeatureDescription or None.

    Raises InputError where the input cannot have the shape.
    """
    sizes = get_declared_shape(declared)
    if sizes is None:
        raise make_request_error(f"'{name}' is no array with a number of dimensions; its shape cannot be fixed")
    if feature is not None and not sizes and shape == (1,):
        return False  # Core ML presents a scalar as an array of one element
    if len(shape) != len(sizes):
        raise make_request_error(f"{format_shape(shape)} has {len(shape)} dimensions; '{name}' has {len(sizes)}: "
                                 f"{_describe_allowed(sizes, feature)}")
    allowed = _read_flexibility(feature, sizes)
    fits = all(size is None or size == wanted for size, wanted in zip(sizes, shape))
    if None not in sizes and allowed is None:
        if fits:
            return False
        raise make_request_error(
            f"the shape of '{name}' is {format_shape(sizes)} already and not flexible; expected that "
            "or an input that is flexible; convert the source model again for another shape"
        )
    if not fits or (allowed is not None and not allowed.holds(shape)):
        raise make_request_error(f"{format_shape(shape)} is not among the shapes of '{name}'; expected one of "
                                 f"{_describe_allowed(sizes, feature)}; convert the source model again for others")
    return True


class _EnumeratedShapes:
    """Enumerated shapes that an input may have."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(dict.fromkeys(shapes))

    def holds(self, shape: Shape) -> bool:
        return shape in self.shapes

    def __str__(self) -> str:
        more = f" and {len(self.shapes) - 8} more" if len(self.shapes) > 8 else ""
        return ", ".join(map(format_shape, self.shapes[:8])) + more


class _ShapeRange:
    """A range for each dimension; a negative upper bound means unbounded."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges

    def holds(self, shape: Shape) -> bool:
        return len(shape) == len(self.ranges) and all(
            low <= size and (high < 0 or size <= high) for size, (low, high) in zip(shape, self.ranges))

    def __str__(self) -> str:
        each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in self.ranges]
        return f"({', '.join(each)})"


def _describe_allowed(sizes: Sizes, feature: Any) -> str:
    return str(_read_flexibility(feature, sizes) or format_shape(sizes))


def _read_flexibility(feature: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    """Return the shapes that the description allows; None if it adds nothing to the program's declaration."""
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        return _read_array_flexibility(feature.type.multiArrayType, sizes)
    if kind == "stateType":
        return _read_array_flexibility(feature.type.stateType.arrayType, sizes)
    if kind == "imageType" and len(sizes) >= 2:
        return _read_image_flexibility(feature.type.imageType, sizes)
    return None


def _read_array_flexibility(array: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _EnumeratedShapes([tuple(map(int, one.shape)) for one in array.enumeratedShapes.shapes])
    if kind == "shapeRange":
        return _ShapeRange([_read_bounds(one) for one in array.shapeRange.sizeRanges])
    return _EnumeratedShapes([tuple(map(int, array.shape))]) if array.shape and None in sizes else None


def _read_image_flexibility(image: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    kind = image.WhichOneof("SizeFlexibility")
    before = tuple(size or 1 for size in sizes[:-2])
    if kind == "enumeratedSizes":
        return _EnumeratedShapes([(*before, int(one.height), int(one.width)) for one in image.enumeratedSizes.sizes])
    if kind == "imageSizeRange":
        sides = (_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange))
        return _ShapeRange([*((size, size) for size in before), *sides])
    return _EnumeratedShapes([(*before, int(image.height), int(image.width))]) if None in sizes else None


def _read_bounds(one: Any) -> tuple[int, int]:
    return int(one.lowerBound), int(one.upperBound)


def fix_feature_shape(feature: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return a FeatureDescription fixed to its shape in `shapes`; the same object if nothing changes."""
    shape = shapes.get(feature.name)
    kind = feature.type.WhichOneof("Type")
    if not shape or kind not in ("multiArrayType", "stateType", "imageType"):
        return feature
    made = type(feature)()
    made.CopyFrom(feature)
    if kind == "imageType":
        made.type.imageType.height, made.type.imageType.width = shape[-2:]
        made.type.imageType.ClearField("enumeratedSizes")
        made.type.imageType.ClearField("imageSizeRange")
    else:
        array = made.type.multiArrayType if kind == "multiArrayType" else made.type.stateType.arrayType
        array.shape[:] = list(shape)
        array.ClearField("enumeratedShapes")
        array.ClearField("shapeRange")
    return feature if made == feature else made
