"""Declarations of inputs in a model description beyond their types: allowed shapes, images and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..utils.errors import InputError
from ..utils.npz import StoredArray
from .feeds import to_array, to_feed_dict
from .images import array_from_image, array_from_planes, is_image, is_pixels

__all__ = ["apply_description", "check_feature_shape", "get_array_dtype"]

_NUMPY_DTYPES = {0x10010: np.float16, 0x10020: np.float32, 0x10040: np.float64, 0x20020: np.int32, 0x20008: np.int8}
"numpy dtypes by number of ArrayDataType: int8 has a name only from coremltools 9.0 on."
_MAX_LISTED_SHAPES = 6
"Number of enumerated shapes that an error lists: more would make the message hard to read."


def apply_description(description: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Convert images to the layout that the program expects, and add defaults of optional inputs missing from `feeds`.

    `description` is a `ModelDescription` or `FunctionDescription` proto. Raises InputError when a shape is outside the
    enumerated or ranged set that the description allows, or when an image has another size or mode than described.
    """
    ready = to_feed_dict(feeds)
    for feature in description.input:
        if feature.name in ready:
            ready[feature.name] = _apply_feature(feature, ready[feature.name])
        elif feature.type.isOptional and feature.type.HasField("multiArrayType"):
            ready[feature.name] = _make_default(feature.type.multiArrayType)
    return ready


def get_array_dtype(array: Any) -> Any:
    """Return the numpy dtype of an `ArrayFeatureType` proto, None when it declares none."""
    return _NUMPY_DTYPES.get(array.dataType)


def _apply_feature(feature: Any, value: Any) -> Any:
    who = f"feed '{feature.name}'"
    if feature.type.HasField("imageType"):
        image = feature.type.imageType
        seen = is_image(value) or is_pixels(value)
        array: Any = array_from_image(who, value, image.colorSpace) if seen else array_from_planes(
            who, to_array(who, value), image.colorSpace)
        check_feature_shape(who, array.shape, feature)
        return array
    if is_image(value):
        raise InputError(f"{who}: found an image, expected an array: this input of the model is not an image")
    array = value if isinstance(value, StoredArray) else to_array(who, value)  # checked before it is read
    check_feature_shape(who, array.shape, feature)
    return array


def check_feature_shape(who: str, found: Sequence[int], feature: Any) -> None:
    """Check the shape of an array against what the description of an input allows. Raises InputError outside it."""
    if feature.type.HasField("imageType"):
        if len(found) >= 2:
            _check_image_size(who, found[-2:], feature.type.imageType)
    elif feature.type.HasField("multiArrayType"):
        _check_shape(who, found, feature.type.multiArrayType)


def _check_shape(who: str, found: Sequence[int], array: Any) -> None:
    """Check the shape against the enumerated set, or against the range of each axis."""
    if array.HasField("enumeratedShapes"):
        allowed = [tuple(int(extent) for extent in shape.shape) for shape in array.enumeratedShapes.shapes]
        if tuple(found) not in allowed:
            raise InputError(f"{who}: found shape {tuple(found)}, expected one of {_format_shapes(allowed)}")
    elif array.HasField("shapeRange") and len(array.shapeRange.sizeRanges) == len(found):
        for axis, (extent, allowed_range) in enumerate(zip(found, array.shapeRange.sizeRanges)):
            _check_extent(f"{who} (shape {tuple(found)})", f"axis {axis}", extent, allowed_range)


def _check_image_size(who: str, found: Sequence[int], image: Any) -> None:
    height, width = (int(extent) for extent in found)
    if image.HasField("enumeratedSizes"):
        allowed = [(int(size.height), int(size.width)) for size in image.enumeratedSizes.sizes]
        allowed.append((int(image.height), int(image.width)))
        if (height, width) not in allowed:
            sizes = _format_shapes(dict.fromkeys(allowed))
            raise InputError(f"{who}: found an image of height {height}, width {width}, expected one of {sizes}")
    elif image.HasField("imageSizeRange"):
        _check_extent(who, "the image's height", height, image.imageSizeRange.heightRange)
        _check_extent(who, "the image's width", width, image.imageSizeRange.widthRange)
    elif (height, width) != (int(image.height), int(image.width)):
        raise InputError(f"{who}: found an image of height {height}, width {width}, expected height {image.height}, "
                         f"width {image.width}; resize it first")


def _check_extent(who: str, what: str, found: int, allowed: Any) -> None:
    """Check one extent against a `SizeRange` proto; there is no upper bound if the proto's is not positive."""
    low, high = int(allowed.lowerBound), int(allowed.upperBound)
    if found < low or (0 < high < found):
        upper = str(high) if high > 0 else "unbounded"
        raise InputError(f"{who}: found {found} for {what}, expected {low} to {upper}")


def _format_shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    every = list(shapes)
    text = ", ".join(str(shape) for shape in every[:_MAX_LISTED_SHAPES])
    return f"{text} and {len(every) - _MAX_LISTED_SHAPES} more" if len(every) > _MAX_LISTED_SHAPES else text


def _make_default(array: Any) -> np.ndarray[Any, Any]:
    """Make the value that Core ML uses for an optional input that is not fed: the declared default, else zeros."""
    kind = array.WhichOneof("defaultOptionalValue")
    value = getattr(array, kind) if kind else 0
    return np.full(tuple(array.shape), value, dtype=get_array_dtype(array) or np.float32)
