"""Images in the layout a program expects: `(1, channels, height, width)`, the model's channel order, pixels 0..255.

Scale and bias are not handled here: coremltools writes them into an ML Program as ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools import proto

from ..utils.errors import InputError

__all__ = ["array_from_image", "array_from_planes", "image_from_array", "is_image", "is_pixels", "pixels_from_array"]

_Image = proto.FeatureTypes_pb2.ImageFeatureType
_RGB, _BGR = int(_Image.RGB), int(_Image.BGR)
_MODES = {_RGB: "RGB", _BGR: "RGB", int(_Image.GRAYSCALE): "L", int(_Image.GRAYSCALE_FLOAT16): "F"}


def is_image(value: object) -> bool:
    """Return whether `value` is a `PIL.Image.Image`, without importing Pillow."""
    return any(f"{base.__module__}.{base.__qualname__}" == "PIL.Image.Image" for base in type(value).__mro__)


def is_pixels(value: object) -> bool:
    """Return whether `value` has the form image libraries use: uint8 of shape (height, width) or (height, width, 3)."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and (
        value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 3))


def array_from_image(who: str, value: Any, colour: int) -> np.ndarray[Any, Any]:
    """Convert a PIL image, or uint8 pixels (height, width[, 3]) in RGB order, to float32 (1, channels, height, width).

    `colour` is the description's `ImageFeatureType.ColorSpace`. Raises InputError when the image has another mode.
    """
    mode = _find_mode(who, colour)
    pixels = np.asarray(value)
    found = value.mode if is_image(value) else ("L" if pixels.ndim == 2 else "RGB")
    if found != mode and not (found == "L" and mode == "F" and not is_image(value)):
        raise InputError(f"{who}: found an image of mode '{found}', expected '{mode}'; convert it with "
                         f"image.convert('{mode}')")
    pixels = pixels.astype(np.float32)
    if pixels.ndim == 2:
        return pixels[None, None]
    planes = pixels.transpose(2, 0, 1)[None]
    return np.ascontiguousarray(planes[:, ::-1] if colour == _BGR else planes)


def array_from_planes(who: str, array: np.ndarray[Any, Any], colour: int) -> np.ndarray[Any, Any]:
    """Convert uint8 of shape ([1,] channels, height, width), values from 0 to 255, to float32 of rank 4.

    Channels are in the order of the model, as those of floats, which are returned unchanged. Raises InputError for
    arrays with the channels last, and for other dtypes.
    """
    channels = 3 if colour in (_RGB, _BGR) else 1
    form = "(height, width, 3)" if channels == 3 else "(height, width)"
    if array.ndim in (3, 4) and array.shape[-1] == channels != array.shape[-3]:
        height, width = array.shape[-3:-1]
        order = ", channels in the order BGR" if colour == _BGR else ""
        pixels = "0" if channels == 3 else "0, ..., 0"
        advice = "array.transpose(2, 0, 1)[None]" if array.ndim == 3 else "array.transpose(0, 3, 1, 2)" + (
            f", or pass array[{pixels}], pixels {form}" if array.dtype == np.uint8 else "")
        raise InputError(f"{who}: found shape {array.shape}, with the channels last; expected (1, {channels}, "
                         f"{height}, {width}){order}: transpose it with {advice}")
    if array.dtype == np.uint8:
        return (array[None] if array.ndim == 3 else array).astype(np.float32)
    if array.dtype.kind != "f":
        raise InputError(f"{who}: found dtype {array.dtype}; expected a PIL image, uint8 pixels {form}, or (1, "
                         f"{channels}, height, width) with values from 0 to 255, uint8 or float")
    return array


def _find_mode(who: str, colour: int) -> str:
    """Return the mode of PIL images in this colour layout. Raises InputError, with `who`, for an unknown layout."""
    if colour not in _MODES:
        raise InputError(f"{who}: the model's colour layout {colour} is not known; expected RGB, BGR or GRAYSCALE")
    return _MODES[colour]


def pixels_from_array(array: np.ndarray[Any, Any], colour: int) -> np.ndarray[Any, Any]:
    """Convert values of shape (1, channels, height, width) to the pixels of an image.

    Returns uint8 (height, width[, 3]) in RGB order, or float32 (height, width) for a float16 greyscale image. Values
    are rounded to the nearest pixel and limited to 0..255 (what Core ML does with fractions is not documented). Raises
    InputError for an unknown colour layout.
    """
    mode = _find_mode("image", colour)
    planes = array.reshape(array.shape[-3:]).astype(np.float32)
    if mode == "F":
        return np.ascontiguousarray(planes[0])
    pixels = np.clip(np.rint(np.nan_to_num(planes)), 0, 255).astype(np.uint8)
    if mode == "L":
        return np.ascontiguousarray(pixels[0])
    return np.ascontiguousarray((pixels[::-1] if colour == _BGR else pixels).transpose(1, 2, 0))


def image_from_array(array: np.ndarray[Any, Any], colour: int) -> Any:
    """Convert a result of shape (1, channels, height, width) to a PIL image of the described colour layout.

    Raises InputError when Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("an image output needs Pillow, which is not installed: pip install pillow") from error
    return Image.fromarray(pixels_from_array(array, colour))
