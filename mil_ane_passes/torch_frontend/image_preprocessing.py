"""Image preprocessing by Core ML before the torch model: a scale, a bias, and a transpose for channels-last models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import coremltools as ct
import numpy as np

__all__ = ["ImagePreprocessing"]

Array = np.ndarray[Any, Any]


class ImagePreprocessing:
    """Converts the feeds of a converted model to those of its torch model; `inputs` is the argument of `ct.convert`."""

    def __init__(self, inputs: Any) -> None:
        args = inputs if isinstance(inputs, list | tuple) else [inputs]
        self._images = {place: each for place, each in enumerate(args) if isinstance(each, ct.ImageType)}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: _preprocess_image(self._images[place], value) if place in self._images else value
                for place, (name, value) in enumerate(feeds.items())}


def _preprocess_image(image: ct.ImageType, pixels: Array) -> Array:
    scaled = pixels.astype(np.float32) * np.float32(image.scale)
    scaled = scaled + np.asarray(image.bias, np.float32).reshape(-1, 1, 1)
    return scaled if image.channel_first is not False else np.moveaxis(scaled, -3, -1)
