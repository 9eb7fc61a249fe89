"""Feeds at which values that are computed from floats are just below and just above the constants that only one of two
programs compares them with, and at which indices that are computed from floats read the rows in which tables differ.

Few draws lie between a threshold of 0.25 and one of 0.27, so that two programs with these thresholds would pass as
equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.query import get_const_value, get_flat_inputs, get_type_info, iterate_nested_ops
from ..utils.errors import AnePassesError
from .adversarial_feeds import FLOAT_THRESHOLDS, Domain
from .execution import Plan
from .feeds import find_image_inputs, get_symbol_sizes, list_shape_choices, make_feeds, make_state
from .input_domains import infer_input_domains
from .interval_propagation import ANY_VALUE
from .lookup_feeds import find_differing_lookups, list_needed_ops

__all__ = ["build_float_threshold_plans"]

Array = np.ndarray[Any, Any]
_Threshold = tuple[str, float]
_Move = Callable[[Array, float], Array]

_COMPARISONS = frozenset(("equal", "floor_div", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum",
                          "mod", "not_equal"))
_PARAMETERS = {"clamped_relu": ("beta",), "clip": ("alpha", "beta"), "threshold": ("alpha",),
               "thresholded_relu": ("alpha",)}
_MAX_NUMBERS = 8
"If a constant has more numbers, only its ends are thresholds."
_MAX_THRESHOLDS = 4
"The most thresholds of a function to search feeds for: two runs each."
_MAX_OPS = 256
"The most ops between inputs and a comparison: they are computed some 80 times for each threshold."
_MAX_ELEMENTS = 1 << 24
"The most elements of weights and values that they read: a computation takes some 10 ms."
_STEPS = tuple(mantissa * 10.0 ** exponent for exponent in range(-2, 5) for mantissa in (1, 3))
_MAX_HALVINGS, _DISTANCE = 40, 1e-4
"A value counts as near a threshold at this fraction of its magnitude: a smaller change of a threshold is not found."
_SPACING = 8
_MOVES: tuple[tuple[_Move, tuple[float, ...]], ...] = (
    (lambda drawn, step: drawn + step, (*(-step for step in reversed(_STEPS)), 0.0, *_STEPS)),
    (lambda drawn, step: drawn * step, (0.0, *_STEPS)),
    (lambda drawn, step: drawn + step * (np.arange(drawn.size) % _SPACING == 0).reshape(drawn.shape), (0.0, *_STEPS)),
)
"""How the draws of all float inputs are moved, and by how much: together in one direction, which moves means and what
increases with them; away from zero, which moves norms; and one element in a few, which moves normalized values."""


def build_float_threshold_plans(
    before: Program, after: Program, describe: Callable[[str], Any], domain: Domain = Domain()
) -> list[Plan]:
    """Make runs of each function in which a value is just below and just above each constant that only one of the
    programs compares it with, and an index at a row in which a table differs. Floats stay within `domain`."""
    made: list[Plan] = []
    for name, function in before.functions.items():
        programs = before, after
        thresholds = [list(_iterate_thresholds(program.functions[name])) for program in programs]
        counts = [Counter(key for key, _ in each) for each in thresholds]
        wanted = [(program, dict(reversed(own))[key], key[1])  # of a threshold in several places, the first
                  for program, own, more in zip(programs, thresholds, (counts[0] - counts[1], counts[1] - counts[0]))
                  for key in more]
        draw = _Draw(function, describe(name), domain)
        lookups = find_differing_lookups(
            before, after, name, lambda indices: draw.list_cheap_ops(before, name, indices) is not None)
        wanted = [(before, lookup.indices, float(rows[0])) for lookup, rows in lookups] + wanted
        searches = ((program, ops, var, number) for program, var, number in wanted
                    if (ops := draw.list_cheap_ops(program, name, var)) is not None)
        for program, ops, var, number in islice(searches, _MAX_THRESHOLDS):
            for step, move in _search_crossing(program, name, ops, var, number, draw):
                feeds, state = draw.move(move, step)
                made.append(Plan(name, f"{FLOAT_THRESHOLDS} {len(made)}", feeds, state, typed=False,
                                 adversarial=FLOAT_THRESHOLDS))
    return made


def _iterate_thresholds(function: Function) -> Iterator[tuple[_Threshold, Var]]:
    """Yield each constant that a value of the function's own block is compared with, also in nested blocks."""
    for op in iterate_nested_ops(function):
        for var, constant in _list_operands(op):
            if var.val is None and (var.op is None or var.op.enclosing_block is function):
                numbers = np.unique(np.asarray(constant, np.float64))
                numbers = numbers[np.isfinite(numbers)]
                for number in (numbers if numbers.size <= _MAX_NUMBERS else numbers[[0, -1]]).tolist():
                    yield (op.op_type, number), var


def _list_operands(op: Operation) -> list[tuple[Var, Any]]:
    """Return the operands that an op compares with constants, each with a constant."""
    if op.op_type in _COMPARISONS:
        pairs = (op.x, op.y), (op.y, op.x)
        return [(var, constant.val) for var, constant in pairs if constant.val is not None]
    found = [(op.x, get_const_value(op.inputs.get(name))) for name in _PARAMETERS.get(op.op_type, ())]
    return [(var, number) for var, number in found if number is not None]


class _Draw:
    """A draw of the inputs and states of a function. Those in `moved` are floats whose values are free."""

    def __init__(self, function: Function, description: Any, domain: Domain) -> None:
        choice = list_shape_choices(function, description)[0]
        self._feeds, self._state = make_feeds(function, choice, 0, description), make_state(function, 0)
        self._images, self._domain = find_image_inputs(description), domain
        domains = infer_input_domains(function, get_symbol_sizes(function, choice.shapes))
        self.moved = {name for name, var in function.inputs.items()
                      if types.is_float(get_type_info(var).dtype) and (
                          domains[name] == ANY_VALUE or name in self._images)}

    def move(self, move: _Move, step: float) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the feeds and the states with all floats moved by `step`, within the domain."""
        feeds, state = ({name: self._move_values(name, values, move, step) for name, values in each.items()}
                        for each in (self._feeds, self._state))
        return feeds, state

    def _move_values(self, name: str, drawn: Array, move: _Move, step: float) -> Array:
        if name not in self.moved:
            return drawn
        moved = self._domain.clip(name, move(drawn.astype(np.float64), step))
        if name in self._images:
            moved = moved.round().clip(0, 255)
        largest = np.finfo(drawn.dtype).max
        return np.asarray(moved.clip(-largest, largest).astype(drawn.dtype))

    def list_cheap_ops(self, program: Program, function: str, var: Var) -> list[Operation] | None:
        """Return the ops that compute `var` from moved inputs; None if it depends on none, or is costly to compute."""
        ops = list_needed_ops(var, _MAX_OPS)
        read = {var, *(each for op in ops or () for each in get_flat_inputs(op))}
        inputs = program.functions[function].inputs
        if ops is None or not any(inputs[name] in read for name in self.moved):
            return None
        elements = sum(math.prod(size for size in get_type_info(each).shape or () if isinstance(size, int))
                       for each in read if get_type_info(each).is_tensor)
        return ops if elements <= _MAX_ELEMENTS else None


def _search_crossing(
    program: Program, function: str, ops: Sequence[Operation], var: Var, number: float, draw: _Draw
) -> list[tuple[float, _Move]]:
    """Return two moves of the draw between which an element of `var` crosses `number`, close to it.

    Empty if no move reaches it, or if `ops`, which compute `var`, end with an error. Two draws for which `var` has
    different numbers of elements (the result of a `non_zero`) are not compared.
    """
    from ..runtime import Runtime

    runtime = Runtime(program, function=function, precision="float64", keeps_constants=True)

    def measure(move: _Move, step: float) -> Array:
        found = runtime.compute(var, ops, *draw.move(move, step))
        return np.asarray(found, np.float64).reshape(-1) - number

    try:
        for move, steps in _MOVES:
            values = [measure(move, step) for step in steps]
            for number_of_step in sorted(range(len(steps) - 1), key=lambda at: abs(steps[at])):
                pair = values[number_of_step:number_of_step + 2]
                if pair[0].size != pair[1].size:
                    continue
                crossing = np.flatnonzero(np.isfinite(pair).all(0) & ((pair[0] < 0) != (pair[1] < 0)))
                if crossing.size:
                    nearest = int(crossing[np.abs(pair[0][crossing]).argmin()])
                    ends = list(steps[number_of_step:number_of_step + 2])

                    def measure_nearest(step: float) -> float:
                        found = measure(move, step)
                        return float(found[nearest]) if found.size == pair[0].size else math.nan

                    return [(step, move) for step in _halve(ends, measure_nearest, abs(number) * _DISTANCE)]
    except AnePassesError:
        pass  # a run of the program reports it
    return []


def _halve(ends: Sequence[float], measure: Callable[[float], float], distance: float) -> Sequence[float]:
    """Return two steps between which the sign of `measure` changes, so close that it is below `distance` at both."""
    low, high = ends
    values = measure(low), measure(high)
    for _ in range(_MAX_HALVINGS):
        if max(map(abs, values)) <= distance:
            break
        middle = (low + high) / 2
        value = measure(middle)
        if not np.isfinite(value):
            break
        if (value < 0) == (values[0] < 0):
            low, values = middle, (value, values[1])
        else:
            high, values = middle, (values[0], value)
    return low, high
