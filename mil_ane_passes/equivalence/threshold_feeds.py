"""Feeds at the constants that integers of two programs are compared with.

Unrestricted integers are drawn below 8. With these draws alone, a mask that ends at another position, or another value
beyond a limit, would pass as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.query import iterate_nested_ops
from .adversarial_feeds import THRESHOLDS
from .execution import Plan
from .feeds import count_computed_elements, get_symbol_sizes, list_shape_choices, make_feeds, make_state
from .input_domains import limit_input_domains
from .interval_propagation import Interval
from .lookup_feeds import find_id_uses

__all__ = ["build_threshold_plans"]

Array = np.ndarray[Any, Any]
_Key = tuple[str, tuple[int, ...]]

_COMPARISONS = frozenset(("equal", "floor_div", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum",
                          "mod", "not_equal", "real_div"))
_LARGEST = {"int8": 127, "uint8": 255, "int16": 32767, "uint16": 65535}
"The largest integers of narrow dtypes: they act as thresholds of casts."
_MAX_THRESHOLDS = 8
"If a constant has more numbers, such as a range of positions, only its ends are thresholds."
_MAX_EXACT, _MAX_STEPS = 1 << 24, 1000
"""Integers beyond the first are not exact where a program computes them in fp32; beyond the second, loops and tensors
of computed sizes may take too long."""
_MAX_COMMON = 8
"Integers up to this are drawn anyway; they are thresholds only where the two programs differ in these."
_MAX_RUNS, _MAX_LONG_RUNS, _LONG_RUN = 6, 2, 1 << 22
"The most runs for an input of one element, and for a function that computes so many elements."


def build_threshold_plans(
    before: Program, after: Program, describe: Callable[[str], Any], ranges: Mapping[str, Interval] | None = None
) -> list[Plan]:
    """Make runs of each function in which values computed from integer inputs are at, below and above thresholds.

    Thresholds are the constants that these values are compared with; those of only one of the programs come first.
    """
    made = []
    for name, function in before.functions.items():
        inputs = [each for each, var in function.inputs.items() if types.is_tensor(var.sym_type)
                  and types.is_int(var.dtype)]
        if not inputs:
            continue
        description = describe(name)
        choice = list_shape_choices(function, description)[0]
        feeds = make_feeds(function, choice, 0, description)
        domains = limit_input_domains(function, get_symbol_sizes(function, choice.shapes), ranges)
        wanted = _find_values(before, after, name, feeds)
        count = count_computed_elements(function, choice.shapes)
        largest = _MAX_STEPS if math.isinf(count) else _MAX_EXACT
        chosen = {each: _select_allowed(wanted.get(each, []), domains[each], feeds[each], largest) for each in inputs}
        most = _MAX_LONG_RUNS if _LONG_RUN <= count < math.inf else _MAX_RUNS
        runs = max((math.ceil(len(values) / max(1, feeds[each].size)) for each, values in chosen.items()), default=0)
        for number in range(min(runs, most)):
            fed = {each: _place(feeds[each], values, number) for each, values in chosen.items() if values}
            made.append(Plan(name, f"{THRESHOLDS} {number}", {**feeds, **fed}, make_state(function, 0), typed=False,
                             adversarial=THRESHOLDS))
    return made


def _find_values(before: Program, after: Program, function: str, feeds: Mapping[str, Array]) -> dict[str, list[int]]:
    """Return for each input the values at which a comparison changes its result, most relevant first."""
    programs = before, after
    keys = [dict(_iterate_comparisons(program.functions[function])) for program in programs]
    found: dict[str, list[int]] = {}
    for is_common in (False, True):
        for program, own, other in zip(programs, keys, reversed(keys)):
            for key, var in own.items():
                if (key in other) != is_common or (is_common and program is after):
                    continue
                for use in find_id_uses(program, function, var, feeds):
                    values = _solve(key[1], use.base, use.step)
                    found.setdefault(use.name, []).extend(
                        value for value in values if not is_common or value > _MAX_COMMON)
    return found


def _iterate_comparisons(function: Function) -> Iterator[tuple[_Key, Var]]:
    """Yield a key for each comparison with constants, and the compared value, one of the function's own block.

    Comparisons in nested blocks are included.
    """
    for op in iterate_nested_ops(function):
        for var, constant in _list_operands(op):
            if var.val is None and (var.op is None or var.op.enclosing_block is function):
                if numbers := _list_thresholds(constant):
                    yield (op.op_type, numbers), var


def _list_operands(op: Operation) -> list[tuple[Var, Any]]:
    """Return the operands that an op compares with constants, each with its constants."""
    if op.op_type in _COMPARISONS:
        pairs = (op.x, op.y), (op.y, op.x)
        return [(var, constant.val) for var, constant in pairs if constant.val is not None]
    if op.op_type == "clip":
        return [(op.x, [each.val for each in (op.alpha, op.beta) if each is not None and each.val is not None])]
    if op.op_type == "cast" and op.dtype.val in _LARGEST:
        return [(op.x, _LARGEST[op.dtype.val])]
    return []


def _list_thresholds(constant: Any) -> tuple[int, ...]:
    """Return the integers around the numbers of a constant; of many numbers only around the least and the largest."""
    numbers = np.asarray(constant, np.float64).reshape(-1)
    numbers = np.unique(numbers[np.isfinite(numbers) & (np.abs(numbers) < _MAX_EXACT)])
    if numbers.size > _MAX_THRESHOLDS:
        numbers = numbers[[0, -1]]
    return tuple(sorted({int(each) for number in numbers for each in (math.floor(number), math.ceil(number))}))


def _solve(numbers: tuple[int, ...], base: Array, step: Array) -> Iterator[int]:
    """Yield the values of an input for which a place is at, above or below one of `numbers`."""
    for first, factor in sorted({*zip(base.tolist(), step.tolist())})[:_MAX_THRESHOLDS]:
        for number in numbers:
            for near in (number, number + 1, number - 1):
                if (near - first) % factor == 0:
                    yield (near - first) // factor


def _select_allowed(values: list[int], domain: Interval, drawn: Array, largest: int) -> list[int]:
    """Return the values that an input may have, each once. Negative ones are left to the draws of indices."""
    low, high = max(domain[0], 0), min(domain[1], np.iinfo(drawn.dtype).max, largest)
    return [value for value in dict.fromkeys(values) if low <= value <= high]


def _place(drawn: Array, values: list[int], number: int) -> Array:
    """Return an input in run `number` that has the next of `values` as its elements."""
    turns = np.arange(drawn.size) + number * drawn.size
    return np.array(values)[turns % len(values)].astype(drawn.dtype).reshape(drawn.shape)
