"""Comparison of what two packages declare about inputs and outputs: images, defaults and shapes.

Runs of the programs on the same numbers cannot see differences in these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import Function

from ..runtime.model_description import check_feature_shape
from ..utils.errors import InputError
from ..utils.option_spelling import format_option
from .feeds import list_shape_choices

__all__ = ["check_declarations", "list_image_notes"]

_COLOR_SPACES = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace


def check_declarations(
    owner: str, function: Function | None, before: Any, after: Any, fed: Collection[str] | None
) -> None:
    """Raise InputError if the same input of a user means different numbers for two functions or pipelines.

    `before` and `after` are their descriptions; `fed` names the inputs that the user feeds, None if all are sampled.
    Images must have the same order of channels, and optional inputs the same default. If shapes are sampled, the second
    `function` must accept all shapes that the first accepts.
    """
    for kind, old, new in _iterate_features(before, after):
        who = f"{kind} '{old.name}' of {owner}"
        layouts = [_get_color_space(each) for each in (old, new)]
        if None not in layouts and layouts[0] != layouts[1]:
            raise InputError(f"{who} is an image in the order {layouts[0]} in the first and {layouts[1]} in the "
                             "second, so the same image has different numbers; expected the same order")
        if kind == "input" and old.name not in (fed or ()):
            _check_default(who, old, new)
    if fed is None and function is not None:
        _check_accepted_shapes(owner, function, before, after)


def list_image_notes(owner: str, before: Any, after: Any) -> Iterator[str]:
    """Describe inputs and outputs that are images in only one of the two functions."""
    for kind, old, new in _iterate_features(before, after):
        images = [each.type.HasField("imageType") for each in (old, new)]
        if images[0] != images[1]:
            which = ("first", "second") if images[0] else ("second", "first")
            yield (f"{kind} '{old.name}' of {owner} is an image in the {which[0]} and an array in the "
                   f"{which[1]}: both were compared as numbers")


def _iterate_features(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield kind and descriptions of the inputs and outputs that both describe."""
    for kind in ("input", "output"):
        others = {feature.name: feature for feature in getattr(after, kind)}
        for feature in getattr(before, kind):
            if feature.name in others:
                yield kind, feature, others[feature.name]


def _get_color_space(feature: Any) -> str | None:
    """Return the order of an image's channels; None if the feature is not an image."""
    if not feature.type.HasField("imageType"):
        return None
    value = int(feature.type.imageType.colorSpace)
    return str(_COLOR_SPACES.Name(value)) if value in _COLOR_SPACES.values() else str(value)


def _check_default(who: str, before: Any, after: Any) -> None:
    """Raise InputError if an input that is optional in the first is required, or has another default, in the second."""
    if not before.type.isOptional or not before.type.HasField("multiArrayType"):
        return
    old, new = (_read_default(each) for each in (before, after))
    if new is not None and np.array_equal(old, new, equal_nan=True):
        return
    found = "has to be fed in the second" if new is None else f"{new:g} in the second"
    raise InputError(f"if it is left out, {who} is {old:g} in the first and {found}; expected the same default, or "
                     f"{format_option('feeds')} with this input")


def _read_default(feature: Any) -> Any:
    """Return the number that an input has if it is left out; None if it has to be fed."""
    if not feature.type.isOptional or not feature.type.HasField("multiArrayType"):
        return None
    array = feature.type.multiArrayType
    kind = array.WhichOneof("defaultOptionalValue")
    return float(getattr(array, kind)) if kind else 0.0


def _check_accepted_shapes(owner: str, function: Function, before: Any, after: Any) -> None:
    """Raise InputError for a shape to be run that the description of the second does not allow."""
    features = {feature.name: feature for feature in after.input}
    for choice in list_shape_choices(function, before):
        for each, shape in choice.shapes.items():
            if each not in features:
                continue
            try:
                check_feature_shape(f"input '{each}'", shape, features[each])
            except InputError as error:
                raise InputError(
                    f"input '{each}' of {owner} accepts the shape {shape} in the first, but not in the "
                    f"second: {error}; expected at least the same shapes, or {format_option('feeds')} of one that both "
                    "have") from error
