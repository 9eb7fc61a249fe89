"""Adversarial feeds: values and sizes at which two programs that agree on normal draws most often differ.

A run combines several patterns (rows of an input differ in scale, and single elements are extreme), so few runs are
needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Program, Var, types

from ..ir.query import iterate_nested_ops
from .execution import Plan
from .feeds import (
    ShapeChoice,
    count_computed_elements,
    find_image_inputs,
    get_symbol_sizes,
    list_shape_choices,
    list_size_choices,
    make_feeds,
    make_state,
)
from .input_domains import infer_input_domains
from .interval_propagation import ANY_VALUE, Interval

__all__ = [
    "FLOAT_THRESHOLDS",
    "INDICES",
    "LARGE",
    "LOW",
    "ROWS",
    "SPECIAL",
    "THRESHOLDS",
    "TIES",
    "WIDE",
    "WIDE_AND_TIES",
    "ZEROS",
    "Domain",
    "build_adversarial_plans",
    "describe_samples",
    "oppose_feeds",
    "tie_feeds",
]

Array = np.ndarray[Any, Any]

WIDE, SPECIAL, TIES, INDICES, SIZES = "wide range", "NaN and infinities", "ties", "indices", "sizes"
LOW, ZEROS, LARGE = "far below zero", "zeros", "large numbers"
ROWS, THRESHOLDS, FLOAT_THRESHOLDS = "rows of tables that differ", "thresholds", "thresholds of floats"
WIDE_AND_TIES = "wide range and ties"
"One run instead of two, for functions with long runs: wide range in the first half of each input, ties in the rest."
_MIN_LONG_RUN_ELEMENTS = 1 << 22
"Number of computed elements from which a run counts as long; it then tests two kinds of feeds at once."
_DESCRIPTIONS = {
    WIDE: "normal draws x 30 and x 0.001, some elements +-65504 and +-300, first and last rows of tables",
    SPECIAL: "some elements NaN, inf, -inf, -0 and 0",
    TIES: "multiples of 0.5 with zeros of both signs, some elements +-6e-8 and +-1e-4, rows of zeros, of one number "
    "and one-hot",
    WIDE_AND_TIES: "in one half of each input normal draws x 30 and x 0.001, some elements +-65504 and +-300, in the "
                   "other "
    "multiples of 0.5, some elements +-6e-8 and +-1e-4, rows of zeros, of one number and one-hot",
    LOW: "one in four channels, images or rows below -20000",
    ZEROS: "all floats 0, which a branch may take for false",
    ROWS: "ids of the rows in which tables of the two programs differ most",
    THRESHOLDS: "integers at, above and below the constants that they are compared with",
    FLOAT_THRESHOLDS: "floats just below and above the constants that only one of the programs compares them with",
    INDICES: "indices from -n to n - 1, other integers negative and up to 1000",
}
"Description of each kind of feeds in the report."

_EXTREMES = (65504.0, -65504.0, 300.0, -300.0)
"fp16's largest magnitude, and one at which sigmoid, tanh and exp saturate."
_TINY_VALUES = (6e-8, -6e-8, 5e-5, -1e-4)
"fp16's smallest magnitude, and some of the size of epsilons. Rounding would hide them in sums with larger numbers."
_SPECIAL_VALUES = (math.nan, math.inf, -math.inf, -0.0, 0.0)
_INTEGER_EXTREMES = (-100, 1000, -1, 9, 100, -8, 8, 0)
"Integers for inputs without bounds: negative ones, and ones larger than those of normal draws."
_ELEMENTS_PER_EXTREME = 32
"One of this many elements is extreme: a result that depends on few elements must stay comparable."
_MAX_EXTREMES = 16
"At most this many elements are extreme: in a network with a large receptive field, more would affect every output."
_LOW_VALUE, _LOW_SHARE = -20000.0, 4
"""One in four channels, images or rows of an input lies below this value. A max pool window that contains no other
values shows a finite number in place of minus infinity, such as a pad of zeros."""
_OPPOSED_SCALE, _OPPOSED_SHARE = 8.0, 4
"Least size of large numbers in opposed feeds; one in four of their channels and one in four integers is negative."
_ROW_SCALES = (30.0, 1e-3, 1.0)
"Scales of the rows of wide-range feeds: large, small and ordinary rows, so that sums over rows mix magnitudes."


@dataclass(frozen=True)
class Domain:
    """The domain in which two programs must agree: float inputs are 0 or have magnitudes from `low` to `high`.

    `ranges` are the user's intervals of inputs by name; these inputs contain neither NaN nor infinity. `largest_size`
    is the largest size of symbolic dimensions without a declared range.
    """

    low: float = 0.0
    high: float = math.inf
    ranges: Mapping[str, Interval] | None = None
    largest_size: float = math.inf

    def clip(self, name: str, values: Array) -> Array:
        """Clip `values` to the domain."""
        low, high = (self.ranges or {}).get(name, ANY_VALUE)
        sizes = np.abs(values)
        inside = np.where((sizes > self.high) & np.isfinite(values), np.copysign(self.high, values), values)
        inside = np.where((sizes < self.low) & (values != 0), np.copysign(self.low, values), inside)
        return np.asarray(inside.clip(low, high))

    def allows_special_values(self, name: str) -> bool:
        return name not in (self.ranges or {})


def build_adversarial_plans(
    program: Program, describe: Callable[[str], Any], domain: Domain = Domain(), small_sizes: bool = True,
    typed: bool = False,
) -> list[Plan]:
    """Make one run of each kind of adversarial feeds at every function's default shapes.

    Without `typed`, these run only at float64. If dimensions are symbolic, a run of normal draws at float64 is added
    for each of a few sizes. A run that the program before cannot execute is dropped without a note, because the model
    need not support our feeds.
    """
    made = []
    for name, function in program.functions.items():
        description = describe(name)
        default = list_shape_choices(function, description)[0]
        sampler = _Sampler(function, default, description, domain)
        for number, kind in enumerate(sampler.kinds()):
            # Rounding is relative to the numbers nearby, which are large there.
            made.append(Plan(name, kind, sampler.feeds(kind, number), make_state(function, number),
                             typed=typed and kind != LOW, adversarial=kind))
        for choice in list_size_choices(function, description, domain.largest_size) if small_sizes else ():
            feeds = make_feeds(function, choice, 0, description)
            clipped = {each: domain.clip(each, value).astype(value.dtype) if value.dtype.kind == "f" else value
                       for each, value in feeds.items()}
            made.append(Plan(name, choice.label, clipped, make_state(function, 0), typed=False, adversarial=SIZES))
    return made


def oppose_feeds(
    function: Function, choice: ShapeChoice, feeds: Mapping[str, Any], number: int, description: Any = None
) -> dict[str, Any]:
    """Return the feeds with larger floats, channels of one sign, and some negative integers.

    A channel is an index of the last axis, or of axis 1 for every second odd `number`. The extreme of a channel of one
    sign shows padding that is compared with it; large scores of attention show masks that hide too little. Indices are
    negative where the function accepts that, and then count from the end.
    """
    found = dict(feeds)
    sizes = get_symbol_sizes(function, choice.shapes)
    inside, wrapping = (infer_input_domains(function, sizes, negative=each) for each in (False, True))
    free = _list_free_floats(function, inside, description)
    images = find_image_inputs(description)
    for name, value in feeds.items():
        low, high = inside[name]
        if name in free and np.ndim(value):
            axis = 1 if number // 2 % 2 and value.ndim > 2 else value.ndim - 1
            channels = np.arange(value.shape[axis]).reshape([-1] + [1] * (value.ndim - 1 - axis)) % _OPPOSED_SHARE
            large = (np.abs(value) + 1) * _OPPOSED_SCALE
            mixed = np.where(channels == 1, -large, value * _OPPOSED_SCALE)
            found[name] = np.where(channels == 0, large, mixed).astype(value.dtype)
        if name in free or name in images or function.inputs[name].dtype == types.bool or not np.ndim(value):
            continue
        places = np.arange(value.size).reshape(value.shape) % _OPPOSED_SHARE
        if inside[name] == ANY_VALUE:
            found[name] = np.where(places == 1, -value - 1, value).astype(value.dtype)
        elif wrapping[name][0] <= -(high + 1) < low:
            found[name] = np.where(places == 1, value - (high + 1), value).astype(value.dtype)
    return found


def tie_feeds(
    function: Function, choice: ShapeChoice, feeds: Mapping[str, Any], number: int, description: Any = None
) -> dict[str, Any]:
    """Return the feeds with floats of which many are equal, as those of TIES, but without negative zeros."""
    random = np.random.default_rng((number, 7))
    inside = infer_input_domains(function, get_symbol_sizes(function, choice.shapes))
    free = _list_free_floats(function, inside, description)
    return {name: _make_ties(random, np.asarray(value, np.float64)).astype(value.dtype) + value.dtype.type(0)
            if name in free else value for name, value in feeds.items()}


def _list_free_floats(function: Function, inside: Mapping[str, Interval], description: Any) -> set[str]:
    """Return the names of float inputs without bounds that are not images."""
    return {name for name, var in function.inputs.items() if types.is_tensor(var.sym_type) and types.is_float(var.dtype)
            and math.isinf(inside[name][1])} - find_image_inputs(description)


def _make_ties(random: np.random.Generator, values: Array) -> Array:
    """Return the values rounded to multiples of 0.5, with tiny ones and with rows of one number."""
    return _set_extremes_and_rows(random, np.round(values * 4) / 2, _TINY_VALUES)


def describe_samples(plans: Sequence[Plan]) -> list[str]:
    """Describe the feeds of these runs, one entry for each kind."""
    normal = sum(not plan.adversarial for plan in plans)
    sizes = dict.fromkeys(plan.label.removeprefix("size ") for plan in plans if plan.adversarial == SIZES)
    kinds = dict.fromkeys(plan.adversarial for plan in plans)
    return [*[f"normal draws: {normal} runs"] * bool(normal),
            *(f"{kind}: {_DESCRIPTIONS[kind]}" for kind in kinds if kind in _DESCRIPTIONS),
            *[f"sizes {', '.join(sizes)}: in place of symbolic dimensions"] * bool(sizes)]


class _Sampler:
    """Makes adversarial feeds of one function at one choice of shapes."""

    def __init__(self, function: Function, choice: ShapeChoice, description: Any, domain: Domain) -> None:
        self._function, self._choice, self._description, self._domain = function, choice, description, domain
        sizes = get_symbol_sizes(function, choice.shapes)
        self._inside = infer_input_domains(function, sizes)
        self._wrapping = infer_input_domains(function, sizes, negative=True)
        self._images = find_image_inputs(description)
        self._free_floats = _list_free_floats(function, self._inside, description)

    def kinds(self) -> Iterator[str]:
        """Yield the kinds of adversarial feeds that apply to this function's inputs."""
        inputs = {name: self._function.inputs[name] for name in self._choice.shapes}
        if not self._free_floats.isdisjoint(inputs):
            shapes = self._choice.shapes
            is_long = _MIN_LONG_RUN_ELEMENTS <= count_computed_elements(self._function, shapes) < math.inf
            yield from (WIDE_AND_TIES, SPECIAL) if is_long else (WIDE, SPECIAL, TIES)
            op_types = {op.op_type for op in iterate_nested_ops(self._function)}
            if "max_pool" in op_types:
                yield LOW
            if "cond" in op_types:
                yield ZEROS
        elif any(self._is_index(name, var) or name in self._images for name, var in inputs.items()):
            yield WIDE
        if any(self._is_index(name, var) for name, var in inputs.items()):
            yield INDICES

    def feeds(self, kind: str, seed: int) -> dict[str, Array]:
        """Make feeds of `kind`; inputs to which it does not apply are normal draws."""
        random = np.random.default_rng((seed, 7))
        feeds = make_feeds(self._function, self._choice, seed, self._description)
        for name, value in feeds.items():
            var = self._function.inputs[name]
            if name in self._images:
                if kind in (WIDE, WIDE_AND_TIES):
                    feeds[name] = random.choice([0, 255], value.shape).astype(value.dtype)
            elif name in self._free_floats and kind != INDICES:
                feeds[name] = self._floats(name, kind, random, value)
            elif self._is_index(name, var) and kind in (WIDE, WIDE_AND_TIES, INDICES):
                feeds[name] = self._integers(name, kind, random, value)
        return feeds

    def _is_index(self, name: str, var: Var) -> bool:
        """Return whether the input holds whole numbers that are neither flags nor pixels."""
        if name in self._images or var.dtype == types.bool or name in self._free_floats:
            return False
        return self._inside[name] != (0, 1) or self._wrapping[name][0] < 0

    def _floats(self, name: str, kind: str, random: np.random.Generator, drawn: Array) -> Array:
        values = np.array(drawn, np.float64)
        if kind == WIDE_AND_TIES:
            wide, ties = (self._floats(name, each, random, drawn) for each in (WIDE, TIES))
            return np.where(np.arange(drawn.size).reshape(drawn.shape) < drawn.size // 2, wide, ties)
        if kind == WIDE:
            values = _set_extremes(random, _scale_rows(random, values), _EXTREMES)
        elif kind == LOW:
            values = _lower_slab(values)
        elif kind == ZEROS:
            values = np.zeros_like(values)
        elif kind == TIES:
            values = _make_ties(random, values)
        elif self._domain.allows_special_values(name):
            return _set_extremes(random, self._domain.clip(name, values), _SPECIAL_VALUES).astype(drawn.dtype)
        return self._domain.clip(name, values).astype(drawn.dtype)

    def _integers(self, name: str, kind: str, random: np.random.Generator, drawn: Array) -> Array:
        held = np.iinfo(drawn.dtype) if drawn.dtype.kind in "iu" else np.iinfo(np.int16)
        user_range = (self._domain.ranges or {}).get(name)
        low, high = user_range or (self._wrapping if kind == INDICES else self._inside)[name]
        if math.isinf(high):  # nothing bounds it from above
            extra = _INTEGER_EXTREMES if kind == INDICES else ()
            values = _set_extremes(random, drawn.astype(np.float64), extra, share=1)
            return values.clip(max(low, held.min), held.max).astype(drawn.dtype)
        first = math.ceil(max(low if kind == INDICES or user_range else max(low, 0), held.min))
        last = max(first, math.floor(min(high, held.max)))
        values = np.asarray(random.integers(first, last, drawn.shape, endpoint=True), np.float64)
        ends = (last, first) if kind in (WIDE, WIDE_AND_TIES) else (first, -1 if first < 0 <= last else last, last)
        return _set_extremes(random, values, ends, share=2).astype(drawn.dtype)


def _scale_rows(random: np.random.Generator, values: Array) -> Array:
    """Scale the rows differently; if there is only one row, scale its elements differently."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim and values.size else values
    shape = (len(rows), 1) if rows.ndim == 2 and len(rows) > 1 else rows.shape
    count = int(np.prod(shape))
    scales = np.resize(np.array(_ROW_SCALES), count)
    return np.asarray(rows * random.permutation(scales).reshape(shape)).reshape(values.shape)


def _lower_slab(values: Array) -> Array:
    """Return `values` with the last indices of their first axis of four or more, but the last axis, far below zero."""
    axis = next((axis for axis, size in enumerate(values.shape[:-1]) if size >= _LOW_SHARE), None)
    if axis is None:
        return values
    low = np.moveaxis(values.copy(), axis, 0)
    count = len(low) // _LOW_SHARE
    low[-count:] = _LOW_VALUE * (1 + np.abs(low[-count:]) / 100)
    return np.moveaxis(low, 0, axis)


def _set_extremes(
    random: np.random.Generator, values: Array, extremes: Sequence[float], share: int = _ELEMENTS_PER_EXTREME
) -> Array:
    """Return `values` with a few elements, spread over the array, set to `extremes` in turn.

    A small array has fewer extreme elements than there are `extremes`.
    """
    if not values.size or not extremes:
        return values
    room = max(1, values.size // min(2, share))
    count = min(room, _MAX_EXTREMES, max(len(extremes), values.size // share))
    flat = values.reshape(-1).copy()
    stretch = values.size / count  # one in each section of the array, so that they are spread evenly over the rows
    for number in range(count):
        at = int(number * stretch + random.integers(max(1, int(stretch))))
        flat[min(at, values.size - 1)] = extremes[number % len(extremes)]
    return flat.reshape(values.shape)


def _set_extremes_and_rows(random: np.random.Generator, values: Array, extremes: Sequence[float]) -> Array:
    """Return `values` with a few elements set to `extremes`, and some of the last rows replaced.

    The replaced rows are zeros (such as padding), copies of one number, and one-hot. An array of fewer than four rows
    keeps all of its rows.
    """
    if values.ndim < 2 or not values.size or values.size // values.shape[-1] < 4:
        return _set_extremes(random, values, extremes)
    rows = values.reshape(-1, values.shape[-1]).copy()
    kept = len(rows) - (3 if len(rows) > 4 else 2)
    rows[:kept] = _set_extremes(random, rows[:kept], extremes)
    rows[kept:] = 0.0
    rows[-2] = 1.5
    rows[-1, len(rows[-1]) // 2] = 1.0
    return rows.reshape(values.shape)
