"""The inputs and outputs of a model as its description declares them, and their identifiers in an ML Program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil.passes.defs.preprocess import NameSanitizer
from coremltools.proto import FeatureTypes_pb2

from ..utils.errors import InputError
from ..utils.text_format import escape_text

__all__ = ["Feature", "make_identifiers", "read_features"]

_CHANNELS = {"GRAYSCALE": "gray", "RGB": "RGB", "BGR": "BGR", "GRAYSCALE_FLOAT16": "gray"}
_MAX_RANK, _MAX_SIZE = 5, 2**31 - 1


@dataclass(frozen=True)
class Feature:
    """One declared input or output.

    `shape` has None for flexible dimensions; that of an image is [1, channels, height, width], and that of an output
    may be empty: it was not declared. `proto` is the FeatureDescription.
    """

    name: str
    proto: Any = field(repr=False)
    shape: tuple[int | None, ...] = ()
    is_int: bool = False
    image: str | None = None
    is_label: bool = False
    is_dictionary: bool = False

    @property
    def channels(self) -> str:
        """The channels of an image: "gray", "RGB" or "BGR"."""
        return _CHANNELS[self.image or "RGB"]


def read_features(features: Iterable[Any], where: str) -> tuple[Feature, ...]:
    """Read the inputs or outputs of a ModelDescription. Raises InputError for types that networks do not have."""
    found = tuple(_read_feature(each, where) for each in features)
    for name, count in Counter(each.name for each in found).items():
        if count > 1:
            raise InputError(f"{where}: {count} inputs or outputs are called '{escape_text(name)}'; expected one: use "
                             f"a fresh copy of the model")
    return found


def _read_feature(proto: Any, where: str) -> Feature:
    kind = proto.type.WhichOneof("Type")
    name = proto.name
    if kind == "multiArrayType":
        array = proto.type.multiArrayType
        is_int = array.dataType == FeatureTypes_pb2.ArrayFeatureType.INT32
        return Feature(name, proto, _read_array_shape(array, name, where), is_int)
    if kind == "imageType":
        image = proto.type.imageType
        spaces = FeatureTypes_pb2.ImageFeatureType.ColorSpace
        color = spaces.Name(image.colorSpace) if image.colorSpace in spaces.values() else str(image.colorSpace)
        if color not in _CHANNELS:
            raise InputError(f"{where}: the image '{escape_text(name)}' has color space {color}; expected RGB, BGR or "
                             "grayscale: use a fresh copy of the model")
        channels = 1 if _CHANNELS[color] == "gray" else 3
        sizes = _read_image_size(image)
        if any(each is not None and not 0 < each <= _MAX_SIZE for each in sizes):
            raise InputError(f"{where}: the image '{escape_text(name)}' is declared with {sizes[1]} x {sizes[0]} "
                             f"pixels; "
                             "expected at least 1 x 1: use a fresh copy of the model")
        return Feature(name, proto, (1, channels, *sizes), image=color)
    if kind in ("stringType", "int64Type"):
        return Feature(name, proto, is_label=True)
    if kind == "dictionaryType":
        return Feature(name, proto, is_dictionary=True)
    raise InputError(
        f"{where}: '{escape_text(name)}' is of type {kind}; expected an array, an image, or a classifier's "
        "label and probabilities"
    )


def _read_array_shape(array: Any, name: str, where: str) -> tuple[int | None, ...]:
    shape: list[int | None] = [int(each) for each in array.shape]
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "shapeRange":
        ranges = array.shapeRange.sizeRanges
        shape = [int(each.lowerBound) if each.lowerBound == each.upperBound else None for each in ranges] or shape
    elif kind == "enumeratedShapes":
        listed = [tuple(int(each) for each in one.shape) for one in array.enumeratedShapes.shapes]
        listed = [one for one in listed if len(one) == len(listed[0])]
        if listed:
            shape = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*listed)]
    if len(shape) > _MAX_RANK or any(each is not None and not 0 < each <= _MAX_SIZE for each in shape):
        raise InputError(f"{where}: '{escape_text(name)}' is declared with {len(shape)} sizes "
                         f"({tuple(array.shape)[:2 * _MAX_RANK]}); expected up to {_MAX_RANK} of at least 1: use a "
                         f"fresh copy of the model")
    return tuple(shape)


def _read_image_size(image: Any) -> tuple[int | None, int | None]:
    """Return height and width; None for one that may vary."""
    kind = image.WhichOneof("SizeFlexibility")
    if kind == "imageSizeRange":
        ranges = (image.imageSizeRange.heightRange, image.imageSizeRange.widthRange)
        height, width = (int(each.lowerBound) if each.lowerBound == each.upperBound else None for each in ranges)
        return height, width
    if kind == "enumeratedSizes":
        sizes = [(int(each.height), int(each.width)) for each in image.enumeratedSizes.sizes]
        sizes.append((int(image.height), int(image.width)))
        heights, widths = ({each[at] for each in sizes} for at in (0, 1))
        return (heights.pop() if len(heights) == 1 else None), (widths.pop() if len(widths) == 1 else None)
    return int(image.height), int(image.width)


def make_identifiers(names: Sequence[str]) -> dict[str, str]:
    """Return identifiers for names as coremltools makes them: letters, digits and _ only, no reserved word, unique."""
    sanitizer = NameSanitizer()
    return {name: sanitizer.sanitize_name(name) for name in dict.fromkeys(names)}
