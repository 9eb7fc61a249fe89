"""Which shapes an input may have, as the program and the description of the model say, and both with one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .fix_shape_requests import Shape, refused, said

__all__ = ["check_shape", "declared_shape", "described", "fixed_type", "is_open"]

Sizes = Sequence[int | None]


def declared_shape(declared: Any) -> tuple[int | None, ...] | None:
    """The sizes in a ValueType proto, None for those not fixed; None for what is no tensor or of unknown rank."""
    kind = declared.WhichOneof("type")
    if kind == "stateType":
        return declared_shape(declared.stateType.wrappedType)
    if kind != "tensorType" or declared.tensorType.rank < 0:
        return None
    dimensions = declared.tensorType.dimensions
    if any(each.unknown.variadic for each in dimensions):
        return None
    return tuple(int(each.constant.size) if each.WhichOneof("dimension") == "constant" else None
                 for each in dimensions)


def is_open(declared: Any) -> bool:
    """Whether a ValueType proto is that of a tensor with a size that is not fixed."""
    kind = declared.WhichOneof("type")
    if kind == "stateType":
        return is_open(declared.stateType.wrappedType)
    return kind == "tensorType" and any(each.WhichOneof("dimension") != "constant"
                                        for each in declared.tensorType.dimensions)


def fixed_type(declared: Any, shape: Sizes) -> Any:
    """A copy of a ValueType proto with the sizes it lacks taken from `shape`, which may lack some too."""
    made = type(declared).FromString(declared.SerializeToString())
    inner = made.stateType.wrappedType if made.WhichOneof("type") == "stateType" else made
    tensor = inner.tensorType
    if declared_shape(declared) is None:
        tensor.rank = len(shape)
        del tensor.dimensions[:]
        for _ in shape:
            tensor.dimensions.add().unknown.variadic = False
    for dimension, size in zip(tensor.dimensions, shape, strict=True):
        if dimension.WhichOneof("dimension") != "constant" and size is not None:
            dimension.constant.size = size
    return made


def check_shape(name: str, shape: Shape, declared: Any, feature: Any) -> bool:
    """Whether there is anything to fix. `declared` is the input's ValueType, `feature` its FeatureDescription or None.

    Raises InputError where the input cannot have the shape.
    """
    sizes = declared_shape(declared)
    if sizes is None:
        raise refused(f"'{name}' is no array with a number of dimensions; its shape cannot be fixed")
    if feature is not None and not sizes and shape == (1,):
        return False  # Core ML shows a number without dimensions as an array of one
    if len(shape) != len(sizes):
        raise refused(f"{said(shape)} has {len(shape)} dimensions; '{name}' has {len(sizes)}: "
                      f"{_allowed(sizes, feature)}")
    allowed = _flexibility(feature, sizes)
    fits = all(size is None or size == wanted for size, wanted in zip(sizes, shape))
    if None not in sizes and allowed is None:
        if fits:
            return False
        raise refused(f"the shape of '{name}' is {said(sizes)} already and not flexible; expected that "
                      "or an input that is flexible; convert the source model again for another shape")
    if not fits or (allowed is not None and not allowed.holds(shape)):
        raise refused(f"{said(shape)} is not among the shapes of '{name}'; expected one of "
                      f"{_allowed(sizes, feature)}; convert the source model again for others")
    return True


class _Listed:
    """Enumerated shapes."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(dict.fromkeys(shapes))

    def holds(self, shape: Shape) -> bool:
        return shape in self.shapes

    def __str__(self) -> str:
        more = f" and {len(self.shapes) - 8} more" if len(self.shapes) > 8 else ""
        return ", ".join(map(said, self.shapes[:8])) + more


class _Ranged:
    """A range for each dimension; an upper bound below zero is none."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges

    def holds(self, shape: Shape) -> bool:
        return len(shape) == len(self.ranges) and all(
            low <= size and (high < 0 or size <= high) for size, (low, high) in zip(shape, self.ranges))

    def __str__(self) -> str:
        each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in self.ranges]
        return f"({', '.join(each)})"


def _allowed(sizes: Sizes, feature: Any) -> str:
    return str(_flexibility(feature, sizes) or said(sizes))


def _flexibility(feature: Any, sizes: Sizes) -> _Listed | _Ranged | None:
    """What the description allows; None where it says nothing beyond what the program says."""
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        return _of_array(feature.type.multiArrayType, sizes)
    if kind == "stateType":
        return _of_array(feature.type.stateType.arrayType, sizes)
    if kind == "imageType" and len(sizes) >= 2:
        return _of_image(feature.type.imageType, sizes)
    return None


def _of_array(array: Any, sizes: Sizes) -> _Listed | _Ranged | None:
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _Listed([tuple(map(int, one.shape)) for one in array.enumeratedShapes.shapes])
    if kind == "shapeRange":
        return _Ranged([_bounds(one) for one in array.shapeRange.sizeRanges])
    return _Listed([tuple(map(int, array.shape))]) if array.shape and None in sizes else None


def _of_image(image: Any, sizes: Sizes) -> _Listed | _Ranged | None:
    kind = image.WhichOneof("SizeFlexibility")
    before = tuple(size or 1 for size in sizes[:-2])
    if kind == "enumeratedSizes":
        return _Listed([(*before, int(one.height), int(one.width)) for one in image.enumeratedSizes.sizes])
    if kind == "imageSizeRange":
        sides = (_bounds(image.imageSizeRange.heightRange), _bounds(image.imageSizeRange.widthRange))
        return _Ranged([*((size, size) for size in before), *sides])
    return _Listed([(*before, int(image.height), int(image.width))]) if None in sizes else None


def _bounds(one: Any) -> tuple[int, int]:
    return int(one.lowerBound), int(one.upperBound)


def described(feature: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """A FeatureDescription with the shape that `shapes` has for it, no other allowed; itself where nothing changes."""
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
