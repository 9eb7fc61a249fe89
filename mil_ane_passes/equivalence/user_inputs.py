"""User-supplied inputs: samples of feeds, ranges of values, or both, and the runs that they define."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Program, Var, types

from ..runtime.feeds import get_numpy_dtype
from ..utils.errors import InputError, suggest_nearest
from ..utils.text_format import add_article
from .execution import USER_FEEDS_LABEL, Plan, build_plans
from .feeds import find_pixel_inputs, list_shape_choices, make_feeds, make_state

__all__ = ["Feeds", "Ranges", "UserInputs", "parse_ranges"]

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]
Feeds = Mapping[str, Array] | Iterable[Mapping[str, Array]]
"One sample or several, each a mapping from input name to array."
Ranges = Mapping[str, Sequence[float]]
"The lowest and the highest value of each input, by name."

_RANDOM_SAMPLES = 4
"Random draws within ranges, in addition to both ends: two from the entire interval, and two from its ends only."

_LARGEST_PIXEL = 255
"Pixels are bytes, except those of GRAYSCALE_FLOAT16 images, which may be any float."


@dataclass(frozen=True)
class UserInputs:
    """Samples of feeds for the default function, and (low, high) for inputs by name, both ends included."""

    feeds: Sequence[Mapping[str, Array]] = ()
    ranges: Mapping[str, Interval] = field(default_factory=dict)

    @classmethod
    def of(cls, feeds: Feeds | None, ranges: Ranges | None) -> UserInputs:
        """Build from the arguments of users: one sample or several, ranges as pairs.

        Raises InputError for invalid ranges.
        """
        samples = () if feeds is None else (feeds,) if isinstance(feeds, Mapping) else _to_samples(feeds)
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise InputError(f"feeds: found {add_article(type(sample).__name__)}; expected a mapping from input "
                                 "name to array, or a list of such mappings")
        if ranges is not None and not isinstance(ranges, Mapping):
            raise InputError(f"ranges: found {add_article(type(ranges).__name__)}; expected a mapping from input name "
                             "to (low, high)")
        return cls(samples, {name: _parse_interval(name, ends) for name, ends in (ranges or {}).items()})

    def __bool__(self) -> bool:
        return bool(self.feeds or self.ranges)

    def plans(self, program: Program, describe: Callable[[str], Any]) -> list[Plan]:
        """Make one run for each sample, and runs over the ranges for each function and shape to test.

        Raises InputError for feeds that do not fit the function, and for ranges of unknown inputs or of numbers that an
        input's dtype cannot represent.
        """
        made: list[Plan] = []
        for number, sample in enumerate(self.feeds, 1):
            label = USER_FEEDS_LABEL if len(self.feeds) == 1 else f"{USER_FEEDS_LABEL} {number}"
            made += [Plan(plan.function, label, plan.feeds, plan.state, asked=True)
                     for plan in build_plans(program, 1, describe, sample)]
        if self.ranges:
            self._check_ranges(program, describe)
            for name, function in program.functions.items():
                made += self._iterate_range_plans(name, function, describe(name))
        return made

    def _check_ranges(self, program: Program, describe: Callable[[str], Any]) -> None:
        known = list(dict.fromkeys(name for function in program.functions.values() for name in function.inputs))
        for name in self.ranges:
            if name not in known:
                raise InputError(
                    f"ranges: no input '{name}'; expected {', '.join(known)}{suggest_nearest(name, known)}"
                )
        for function_name, function in program.functions.items():
            images = find_pixel_inputs(describe(function_name))
            for name in set(self.ranges) & set(function.inputs):
                _check_representable(name, self.ranges[name], function.inputs[name], name in images)

    def _iterate_range_plans(self, name: str, function: Function, description: Any) -> Iterator[Plan]:
        if not set(self.ranges) & set(function.inputs):
            return
        images = find_pixel_inputs(description)
        for choice in list_shape_choices(function, description):
            for number in range(2 + _RANDOM_SAMPLES):
                feeds = make_feeds(function, choice, number, description)
                random = np.random.default_rng(number)
                state = make_state(function, number)
                for each, ends in self.ranges.items():
                    drawn = feeds if each in feeds else state
                    if each in drawn:
                        drawn[each] = _sample_within(random, function.inputs[each], drawn[each].shape, ends, number,
                                                     each in images)
                label = f"ranges, draw {number}, {choice.label} shapes"
                yield Plan(name, label, feeds, state, asked=choice.label == "default")


def _sample_within(
    random: np.random.Generator, var: Var, shape: tuple[int, ...], ends: Interval, number: int, image: bool
) -> Array:
    """Make draw `number`: all elements at the low end (0), all at the high end (1), then random elements.

    Random draws alternate between uniform numbers from the interval and a mix of both ends. Elements of integer inputs
    and of images are integers.
    """
    low, high = ends
    dtype = get_numpy_dtype(var)
    if number < 2:
        drawn = np.full(shape, ends[number])
    elif number % 2:
        drawn = random.choice([low, high], shape)
    else:
        drawn = random.uniform(low, high, shape)
    if image or dtype.kind != "f":
        drawn = np.rint(drawn).clip(math.ceil(low), math.floor(high))
    return np.asarray(drawn).astype(dtype)


def _to_samples(feeds: Any) -> tuple[Any, ...]:
    return tuple(feeds) if isinstance(feeds, Iterable) else (feeds,)


def _check_representable(name: str, ends: Interval, var: Var, image: bool) -> None:
    """Raise InputError if the pixels of an image, or the dtype of the input `var`, cannot represent the interval."""
    low, high = ends
    dtype, called = get_numpy_dtype(var), types.builtin_to_string(var.dtype)
    if image:
        dtype, called = np.dtype(np.uint8), "pixels"
        if low < 0 or high > _LARGEST_PIXEL:
            raise InputError(f"ranges: '{name}' is {low:g} to {high:g}; it is an image, whose pixels are 0 to "
                             f"{_LARGEST_PIXEL}; expected a range of pixels, before the model scales them")
    entire = dtype.kind != "f"
    held: Any = np.finfo(dtype) if not entire else np.iinfo(np.uint8 if dtype.kind == "b" else dtype)
    lowest, highest = (0.0, 1.0) if dtype.kind == "b" else (float(held.min), float(held.max))
    if low < lowest or high > highest:
        raise InputError(f"ranges: '{name}' is {low:g} to {high:g}; {called} holds {lowest:g} to {highest:g}")
    if entire and math.ceil(low) > math.floor(high):
        raise InputError(f"ranges: '{name}' is {low:g} to {high:g}; expected an interval with an integer for {called}")


def _parse_interval(name: str, ends: Any) -> Interval:
    try:
        low, high = (float(end) for end in ends)
    except (TypeError, ValueError):
        raise InputError(f"ranges: '{name}' is {ends!r}; expected a pair (low, high)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InputError(f"ranges: '{name}' is {low:g} to {high:g}; expected two finite numbers, the lower one first")
    return low, high


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def parse_ranges(text: str | None) -> dict[str, Interval]:
    """Parse ranges such as `'image=0:1,ids=0:30000'`. Raises InputError with the expected format."""
    found: dict[str, Interval] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, ends = part.rpartition("=")
        low, colon, high = ends.partition(":")
        if not (equals and colon and name.strip() and _is_number(low) and _is_number(high)):
            raise InputError(f"ranges: '{part.strip()}'; expected NAME=LOW:HIGH, several separated by commas")
        name, interval = name.strip(), _parse_interval(name.strip(), (low, high))
        if found.get(name, interval) != interval:
            both = " and ".join(f"{ends[0]:g} to {ends[1]:g}" for ends in (found[name], interval))
            raise InputError(f"ranges: '{name}' has two ranges, {both}; expected one for each input")
        found[name] = interval
    if text is not None and not found:
        raise InputError(f"ranges: found {text!r}; expected NAME=LOW:HIGH, several separated by commas")
    return found
