"""Seeded random inputs for a function: valid names, shapes and dtypes, and values in the domain of each input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import Function, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_consumers, get_static_shape, get_type_info
from ..runtime.feeds import get_numpy_dtype
from ..utils.errors import InputError
from ..utils.text_format import format_count
from .input_domains import choose_integer_range, infer_input_domains
from .interval_propagation import Interval

__all__ = [
    "ShapeChoice",
    "count_computed_elements",
    "find_compared_values",
    "find_image_inputs",
    "find_pixel_inputs",
    "get_symbol_sizes",
    "list_shape_choices",
    "list_size_choices",
    "make_feeds",
    "make_state",
    "place_at_end",
]

_FREE_SIZE = 16
"Default extent of a symbolic dimension without a declared range: small, so that runs are fast."
_SECOND_FREE_SIZE = 41
"A second extent of such a dimension: larger and odd, because rewrites may hold only for even sizes."
_SMALL_SIZES = (1, 2, 7)
"Sizes for which rewrites may fail that assume more than one step, pairs, or multiples of a power of two."
_LONG_SIZE, _MAX_CHEAP_ELEMENTS = 257, 1 << 20
"A size above the usual powers of two. It is tested if a run computes at most `_MAX_CHEAP_ELEMENTS` elements."
_MAX_RANGE_ELEMENTS = 1 << 18
"Most elements of an input at the upper end of its range. A range may end at millions, which would take hours to run."
_FREE_INTEGER_COUNT = 8
"Integers without an upper bound are drawn below this number: small ones are valid as sizes, counts and positions."
_MOVES = frozenset({"cast", "expand_dims", "identity", "reshape", "squeeze", "tile", "transpose"})
"Ops whose results have the elements of their operand."
_FLOAT16_IMAGE = proto.FeatureTypes_pb2.ImageFeatureType.GRAYSCALE_FLOAT16


@dataclass(frozen=True)
class ShapeChoice:
    """One set of concrete input shapes; `label` names its origin (default, smallest, enumerated 2, ...)."""

    label: str
    shapes: dict[str, tuple[int, ...]]


def list_shape_choices(function: Function, description: Any = None) -> list[ShapeChoice]:
    """List the shapes to try: the default, every enumerated one, and both ends of ranges; one entry if all are fixed.

    `description` is the function's `ModelDescription` or `FunctionDescription` proto, None for a program in memory.
    """
    features = {feature.name: feature.type for feature in description.input} if description is not None else {}
    offers = {name: _list_valid_shapes(var, features.get(name)) for name, var in function.inputs.items()
              if not types.is_state(var.sym_type)}
    labels = list(dict.fromkeys(label for offer in offers.values() for label in offer))
    choices: list[ShapeChoice] = []
    for label in labels:
        shapes = {name: offer.get(label, offer["default"]) for name, offer in offers.items()}
        shapes = _unify_symbol_sizes(function, shapes)
        if all(choice.shapes != shapes for choice in choices):
            choices.append(ShapeChoice(label, shapes))
    return choices or [ShapeChoice("default", {})]


def list_size_choices(function: Function, description: Any = None, largest: float = math.inf) -> list[ShapeChoice]:
    """List shapes with small, even and odd sizes of symbolic dimensions, within the ranges that `description` declares.

    A long size and the `largest` size that an option allows are added if a run with them is cheap. Dimensions of
    enumerated shapes and of images have only the sizes of `list_shape_choices`.
    """
    features = {feature.name: feature.type for feature in description.input} if description is not None else {}
    tensors = {name: var for name, var in function.inputs.items() if not types.is_state(var.sym_type)}
    known = [choice.shapes for choice in list_shape_choices(function, description)]
    choices: list[ShapeChoice] = []
    for size in (*_SMALL_SIZES, _LONG_SIZE) if math.isinf(largest) else (*_SMALL_SIZES, _LONG_SIZE, int(largest)):
        shapes = {
            name: _choose_sized_shape(var, features.get(name), size, known[0].get(name))
            for name, var in tensors.items()
        }
        shapes = _unify_symbol_sizes(function, shapes)
        if size not in _SMALL_SIZES and count_computed_elements(function, shapes) > _MAX_CHEAP_ELEMENTS:
            continue
        if shapes not in [*known, *(choice.shapes for choice in choices)]:
            choices.append(ShapeChoice(f"size {size}", shapes))
    return choices


def count_computed_elements(function: Function, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Count the elements that the ops of `function` compute for inputs of these shapes.

    The result is infinite if a size is dynamic, and for functions with nested blocks.
    """
    sizes = get_symbol_sizes(function, dict(shapes))
    total = 0.0
    for op in function.operations:
        if op.blocks:
            return math.inf
        for var in op.outputs if op.op_type != "const" else ():
            kind = get_type_info(var)
            if kind.is_tensor:
                total += math.prod(_resolve_extent(dim, sizes) for dim in (
                    var.shape if kind.shape is None else kind.shape))
    return total


def _resolve_extent(dim: Any, sizes: Mapping[Any, int]) -> float:
    found = dim.subs(dict(sizes)) if is_symbolic(dim) else dim
    return float(found) if getattr(found, "is_number", True) else math.inf


def _choose_sized_shape(var: Var, feature: Any, size: int, default: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of an input with symbolic dimensions of `size`, or of the nearest size in their ranges."""
    if feature is None:
        return tuple(size if is_symbolic(dim) else int(dim) for dim in var.shape)
    ranges = feature.multiArrayType.shapeRange.sizeRanges if feature.HasField("multiArrayType") else ()
    if len(ranges) != var.rank:
        return default or tuple(int(dim) for dim in var.shape)
    return tuple(max(1, int(each.lowerBound), min(size, int(each.upperBound)) if each.upperBound > 0 else size)
                 for each in ranges)


def find_image_inputs(description: Any) -> set[str]:
    """Return the names of the inputs that are images."""
    if description is None:
        return set()
    return {feature.name for feature in description.input if feature.type.HasField("imageType")}


def find_pixel_inputs(description: Any) -> set[str]:
    """Return the names of the inputs that are images of bytes; the floats of a float16 image are not limited."""
    if description is None:
        return set()
    return {feature.name for feature in description.input
            if feature.type.HasField("imageType") and feature.type.imageType.colorSpace != _FLOAT16_IMAGE}


def make_feeds(
    function: Function, choice: ShapeChoice, seed: int, description: Any = None, hides_rows: bool = True
) -> dict[str, Any]:
    """Make feeds for `function` at `choice`: normal draws for floats, pixels for images, integers in their range.

    A float that is used as an integer (it is cast to an integer index) is drawn as an integer. Without `hides_rows`,
    masks of zeros and ones have a one in each row.
    """
    random = np.random.default_rng(seed)
    images = find_image_inputs(description)
    required = infer_input_domains(function, get_symbol_sizes(function, choice.shapes))
    return {name: _sample_input(random, function.inputs[name], shape, seed, required[name], name in images,
                                hides_rows)
            for name, shape in choice.shapes.items()}


def find_compared_values(function: Function) -> dict[str, int]:
    """Return, for each integer input, the constant with which the function compares its elements for equality, if any.

    It is the id of padding, from which the function makes a mask, or a value of a mask; random draws from a vocabulary
    hardly contain it.
    """
    found: dict[str, int] = {}
    for name, start in function.inputs.items():
        pending = [start] if types.is_tensor(start.sym_type) and types.is_int(start.dtype) else []
        seen = set(pending)
        while pending and name not in found:
            var = pending.pop()
            for op in get_consumers(var):
                other = op.inputs.get("y" if op.inputs.get("x") is var else "x")
                if op.op_type in ("equal", "not_equal") and isinstance(other, Var) and other.val is not None and (
                        np.size(other.val) == 1):
                    found.setdefault(name, int(np.ravel(other.val)[0]))
                elif op.op_type in _MOVES:
                    pending += [each for each in op.outputs if each not in seen]
                    seen.update(op.outputs)
    return found


def place_at_end(values: Any, number: Any) -> Any:
    """Return the integers `values` with `number` in the last third of the last axis, but not in its first element."""
    size = values.shape[-1] if values.ndim else 0
    return np.where(np.arange(size) >= size - max(1, size // 3), number, values).astype(values.dtype) if size > 1 else (
        values)


def _sample_input(
    random: np.random.Generator, var: Var, shape: tuple[int, ...], seed: int, required: Interval, image: bool,
    hides_rows: bool,
) -> Any:
    dtype = get_numpy_dtype(var)
    if image:
        return random.integers(0, 256, shape).astype(dtype)
    if var.dtype == types.bool:  # a single flag alternates from draw to draw, so few draws contain both values
        one = int(np.prod(shape)) == 1
        return np.full(shape, seed % 2 == 0) if one else _sample_flags(
            random, shape, seed, hides_rows).astype(bool)
    if types.is_float(var.dtype):
        if math.isinf(required[1]):
            return random.standard_normal(shape).astype(dtype)
        lowest, highest = -_find_exact_integer_limit(dtype), _find_exact_integer_limit(dtype)
    else:
        lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    first, last = choose_integer_range(required, lowest, highest, _FREE_INTEGER_COUNT)
    if (first, last) == (0, 1):
        return _sample_flags(random, shape, seed, hides_rows).astype(dtype)
    return random.integers(first, last, shape, endpoint=True).astype(dtype)


def _sample_flags(random: np.random.Generator, shape: tuple[int, ...], seed: int, hides_rows: bool) -> Any:
    """Draw zeros and ones; in every third draw one row is all zeros, like a mask that excludes every element.

    Without `hides_rows`, each row of several elements has a one.
    """
    drawn = random.integers(0, 2, shape)
    if not hides_rows and drawn.ndim and drawn.shape[-1] > 1:
        drawn[..., 0] |= ~np.any(drawn, axis=-1)
    elif hides_rows and seed % 3 == 2 and drawn.size and drawn.ndim:
        drawn.reshape(-1, shape[-1])[int(random.integers(drawn.size // shape[-1]))] = 0
    return drawn


def _find_exact_integer_limit(dtype: np.dtype[Any]) -> int:
    """Return the largest n such that every integer up to n is exactly representable in the float dtype."""
    return 1 << (np.finfo(dtype).nmant + 1)


def get_symbol_sizes(function: Function, shapes: dict[str, tuple[int, ...]]) -> dict[Any, int]:
    """Return the extent of each symbol when the inputs have these shapes."""
    return {dim: extent for name, shape in shapes.items() for dim, extent in zip(function.inputs[name].shape, shape)
            if is_symbolic(dim)}


def _list_valid_shapes(var: Var, feature: Any) -> dict[str, tuple[int, ...]]:
    """Return `_list_shapes`; raises InputError for a shape that no array can have (a negative size)."""
    offers = _list_shapes(var, feature)
    for label, shape in offers.items():
        if len(shape) != var.rank or min(shape, default=1) < 0:
            raise InputError(
                f"input '{var.name}': its description allows the shape {tuple(map(int, shape))} ({label}); expected "
                f"{format_count(var.rank, 'size')} of 0 or more; the package is damaged: use a fresh copy")
    return offers


def _list_shapes(var: Var, feature: Any) -> dict[str, tuple[int, ...]]:
    fixed = get_static_shape(var)
    if fixed is not None:
        return {"default": fixed}
    free, longer = (
        tuple(size if is_symbolic(d) else int(d) for d in var.shape) for size in (_FREE_SIZE, _SECOND_FREE_SIZE)
    )
    if feature is not None and feature.HasField("imageType") and var.rank == 4:
        return _list_image_shapes(free, feature.imageType)
    if feature is None or not feature.HasField("multiArrayType"):
        return {"default": free, "longer": longer}
    array = feature.multiArrayType
    offers = {"default": tuple(array.shape) if len(array.shape) == var.rank else free}
    if array.HasField("enumeratedShapes"):
        for number, shape in enumerate(array.enumeratedShapes.shapes):
            offers[f"enumerated {number}"] = tuple(shape.shape)
    if array.HasField("shapeRange"):
        sizes = array.shapeRange.sizeRanges
        if len(sizes) == var.rank:
            offers["smallest"] = tuple(max(1, int(size.lowerBound)) for size in sizes)
            _add_largest_shape(offers, [int(size.upperBound) for size in sizes])
    return offers


def _list_image_shapes(free: tuple[int, ...], image: Any) -> dict[str, tuple[int, ...]]:
    """List the sizes of a flexible image of shape (batch, channels, height, width)."""

    def sized(height: int, width: int) -> tuple[int, ...]:
        return (*free[:2], int(height), int(width))

    offers = {"default": sized(image.height, image.width)}
    for number, size in enumerate(image.enumeratedSizes.sizes):
        offers[f"enumerated {number}"] = sized(size.height, size.width)
    if image.HasField("imageSizeRange"):
        height, width = image.imageSizeRange.heightRange, image.imageSizeRange.widthRange
        offers["smallest"] = sized(max(1, height.lowerBound), max(1, width.lowerBound))
        _add_largest_shape(offers, [*free[:2], int(height.upperBound), int(width.upperBound)])
    return offers


def _add_largest_shape(offers: dict[str, tuple[int, ...]], upper: list[int]) -> None:
    """Add the upper end of a range. If it is open or too large to run, add the largest shape within the limits instead.
    """
    reached = [extent if extent > 0 else _MAX_RANGE_ELEMENTS for extent in upper]
    while int(np.prod(reached, dtype=object)) > _MAX_RANGE_ELEMENTS:
        ratios = [extent / max(least, 1) for extent, least in zip(reached, offers["default"])]
        widest = int(np.argmax(ratios))
        if ratios[widest] <= 1:
            break
        reached[widest] = max(offers["default"][widest], reached[widest] // 2)
    offers["largest" if reached == upper else "large (not the largest)"] = tuple(reached)


def make_state(function: Function, seed: int) -> dict[str, Any]:
    """Draw initial values of the states of `function` from a normal distribution: zeros would hide a wrong sign."""
    random = np.random.default_rng(seed + 1)
    return {name: random.standard_normal(var.shape).astype(get_numpy_dtype(var))
            for name, var in function.inputs.items() if types.is_state(var.sym_type)}


def _unify_symbol_sizes(function: Function, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Assign the size of the first input with a symbol to all inputs that share the symbol."""
    sizes: dict[Any, int] = {}
    result = {}
    for name, shape in shapes.items():
        dims = function.inputs[name].shape
        result[name] = tuple(
            sizes.setdefault(dim, extent) if is_symbolic(dim) else extent for dim, extent in zip(dims, shape))
    return result
