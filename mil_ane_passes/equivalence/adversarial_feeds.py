"""Adversarial feeds: values and sizes at which two programs that agree on normal draws most often differ.

A run combines several patterns (rows of an input differ in scale, and single elements are extreme), so few runs are
needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.query import get_flat_inputs, is_compressed, is_const, is_const_or_compressed
from ..utils.errors import AnePassesError
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
    "INDICES",
    "SPECIAL",
    "TIES",
    "WIDE",
    "WIDE_AND_TIES",
    "Domain",
    "build_adversarial_plans",
    "build_table_row_plans",
    "describe_samples",
]

Array = np.ndarray[Any, Any]

WIDE, SPECIAL, TIES, INDICES, SIZES = "wide range", "NaN and infinities", "ties", "indices", "sizes"
ROWS = "rows of tables that differ"
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
    ROWS: "ids of the rows in which tables of the two programs differ most",
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
_ROW_SCALES = (30.0, 1e-3, 1.0)
"Scales of the rows of wide-range feeds: large, small and ordinary rows, so that sums over rows mix magnitudes."


_ROWS_AT_ONCE = 1024
"Rows of tables that are compared at a time, in float64: a table may be as large as memory."
_MAX_INDEX_OPS, _MAX_INDICES = 64, 1 << 16
"""Most ops that compute the indices of a lookup from inputs, and most elements of each result.

These ops run about log2(n) times for an input of n elements, so they must be cheap.
"""


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
            made.append(Plan(name, kind, sampler.feeds(kind, number), make_state(function, number), typed=typed,
                             adversarial=kind))
        for choice in list_size_choices(function, description, domain.largest_size) if small_sizes else ():
            feeds = make_feeds(function, choice, 0, description)
            clipped = {each: domain.clip(each, value).astype(value.dtype) if value.dtype.kind == "f" else value
                       for each, value in feeds.items()}
            made.append(Plan(name, choice.label, clipped, make_state(function, 0), typed=False, adversarial=SIZES))
    return made


def build_table_row_plans(before: Program, after: Program, describe: Callable[[str], Any]) -> list[Plan]:
    """Make a run for each function with differing tables: its ids look up the rows that differ.

    Normal draws read few rows of a large table, so a difference in a single row would not be found.
    """
    made = []
    for name, function in before.functions.items():
        found = _find_differing_lookups(before, after, name)
        if found:
            description = describe(name)
            choice = list_shape_choices(function, description)[0]
            feeds = make_feeds(function, choice, 0, description)
            domains = infer_input_domains(function, get_symbol_sizes(function, choice.shapes))
            wanted: dict[str, list[tuple[Array, _IdUse]]] = {}
            for indices, rows in found:
                for use in _find_id_uses(before, name, indices, feeds):
                    wanted.setdefault(use.name, []).append((rows, use))
            chosen = {each: _choose_ids(feeds[each], uses, domains[each]) for each, uses in wanted.items()}
            if chosen:
                made.append(Plan(name, ROWS, feeds | chosen, make_state(function, 0), typed=False, adversarial=ROWS))
    return made


def _find_differing_lookups(before: Program, after: Program, function: str) -> list[tuple[Var, Array]]:
    """Return, for each lookup in a constant table that differs between the programs, its indices and the differing
    rows."""
    tables = [dict(_iterate_tables(program.functions[function])) for program in (before, after)]
    found = []
    for place, (old, indices) in tables[0].items():
        new, _ = tables[1].get(place, (None, None))
        if new is None or (is_compressed(old) and _is_stored_alike(old, new)):
            continue
        try:
            dense = [_read_table(program, function, var, place.axis) for program, var in ((before, old), (after, new))]
        except AnePassesError:
            continue  # a run cannot read it either, and its report states the error
        if (rows := _find_differing_rows(*dense)).size:
            found.append((indices, rows))
    return found


class _TablePlace(NamedTuple):
    """The identity of a table in a function: shape, axis of the rows, and number among the tables with these two.

    Names cannot identify it, because they may differ in the other program.
    """

    shape: tuple[int, ...]
    axis: int
    number: int


class _IdUse(NamedTuple):
    """The dependence of a lookup's indices on one input: an index is `base` + `step` * (input element `element`).

    The three arrays have one entry for each index that depends on the input.
    """

    name: str
    base: Array
    step: Array
    element: Array


def _find_id_uses(program: Program, function: str, indices: Var, feeds: Mapping[str, Array]) -> list[_IdUse]:
    """Determine the dependence of `indices` on each input by computing them for inputs of 0 and 1.

    Returns an empty list if this needs too much computation, or if the indices cannot be computed.

    A run with a single 1 would show which indices depend on this element, but an input of n elements would need n runs.
    We assume that each index depends on one element. The number of this element is then found bit by bit in log2(n)
    runs. If the assumption is wrong, the ids are no worse than sampled ones.
    """
    from ..runtime import Runtime

    ops = _list_needed_ops(indices)
    if ops is None:
        return []
    read = {indices, *(each for op in ops for each in get_flat_inputs(op))}
    names = [name for name, var in program.functions[function].inputs.items() if name in feeds and var in read]
    found = []
    try:
        runtime = Runtime(program, function=function, precision="float64")
        for name in names:
            def compute(bits: Array, name: str = name) -> Array:
                value = bits.reshape(feeds[name].shape).astype(feeds[name].dtype)
                return np.asarray(runtime.compute(indices, ops, {**feeds, name: value}), np.int64).reshape(-1)

            numbers = np.arange(feeds[name].size)
            base = compute(np.zeros_like(numbers))
            step = compute(np.ones_like(numbers)) - base
            element = np.zeros_like(base)
            for bit in range(int(numbers[-1:].max(initial=0)).bit_length()):
                element |= (compute(numbers >> bit & 1) != base).astype(np.int64) << bit
            places = np.flatnonzero((step != 0) & (element < numbers.size))
            if places.size:
                found.append(_IdUse(name, base[places], step[places], element[places]))
    except AnePassesError:
        pass  # the indices cannot be computed for these values; the next input is tried
    return found


def _list_needed_ops(var: Var) -> list[Operation] | None:
    """Return the ops of the function that compute `var`, in program order.

    Returns None if they are too expensive for indices: too many ops, ops with blocks, or too many elements.
    """
    needed: set[Operation] = set()
    pending = [var]
    while pending:
        op = pending.pop().op
        if op is None or op in needed or is_const_or_compressed(op.outputs[0]):
            continue
        if len(needed) == _MAX_INDEX_OPS or op.blocks or any(each.rank and math.prod(
                size if isinstance(size, int) else 1 for size in each.shape) > _MAX_INDICES for each in op.outputs):
            return None
        needed.add(op)
        pending.extend(get_flat_inputs(op))
    block = var.op.enclosing_block if var.op is not None else None
    return [op for op in block.operations if op in needed] if block is not None else []


def _choose_ids(drawn: Array, wanted: Sequence[tuple[Array, _IdUse]], domain: Interval) -> Array:
    """Return `drawn` with ids replaced by ones that look up the wanted rows; ids that cannot do so are unchanged.

    `wanted` has the rows of each table together with the dependence of the lookup on the ids.
    """
    ids = drawn.reshape(-1).copy()
    readers: dict[int, set[tuple[int, int, int]]] = {}
    for number, (_, use) in enumerate(wanted):
        for base, step, element in zip(use.base.tolist(), use.step.tolist(), use.element.tolist()):
            readers.setdefault(element, set()).add((number, base, step))
    alike: dict[frozenset[tuple[int, int, int]], list[int]] = {}
    for element, places in readers.items():
        alike.setdefault(frozenset(places), []).append(element)
    for same, elements in alike.items():
        hits = [(wanted[number][0] - base, step) for number, base, step in sorted(same)]
        able = np.concatenate([gaps[gaps % step == 0] // step for gaps, step in hits])
        able = able[(able >= max(domain[0], 0)) & (able <= domain[1])]
        if able.size:
            ids[elements] = np.resize(able, len(elements))
    return ids.reshape(drawn.shape)


def _iterate_tables(function: Function) -> Iterator[tuple[_TablePlace, tuple[Var, Var]]]:
    """Yield each constant table, compressed or not, that is read at computed indices, with its lookup's indices."""
    counts: dict[Any, int] = {}
    for op in function.operations:
        if op.op_type != "gather" or not is_const_or_compressed(op.x) or op.axis is None or op.axis.val is None:
            continue
        if op.x.rank and not is_const(op.indices):
            shape, axis = tuple(op.x.shape), int(op.axis.val) % op.x.rank
            counts[shape, axis] = counts.get((shape, axis), 0) + 1
            yield _TablePlace(shape, axis, counts[shape, axis]), (op.x, op.indices)


def _is_stored_alike(old: Var, new: Var) -> bool:
    """Return whether two constants come from equal ops with equal stored numbers: then they need not be computed."""
    first, second = old.op, new.op
    if first.op_type != second.op_type or first.inputs.keys() != second.inputs.keys():
        return False
    if first.op_type == "const":
        return np.array_equal(old.val, new.val)
    return all(_is_stored_alike(var, second.inputs[name]) for name, var in first.inputs.items())


def _read_table(program: Program, function: str, var: Var, axis: int) -> Array:
    """Return a table as a run reads it, with its rows on the first axis; a compressed table is returned in fp32."""
    from ..runtime import Runtime

    dense = var.val if is_const(var) else Runtime(program, function=function).read_constant(var)
    return np.moveaxis(np.asarray(dense), axis, 0)


def _find_differing_rows(old: Array, new: Array) -> Array:
    """Return the indices of the rows in which two tables differ, the largest difference first."""
    if np.may_share_memory(old, new):
        return np.empty(0, np.int64)
    gaps = np.zeros(len(old))
    for begin in range(0, len(old), _ROWS_AT_ONCE):
        first, second = (np.asarray(each[begin:begin + _ROWS_AT_ONCE], np.float64) for each in (old, new))
        with np.errstate(invalid="ignore"):
            gap = np.where(first == second, 0.0, np.nan_to_num(np.abs(first - second), nan=np.inf))
        gap[np.isnan(first) & np.isnan(second)] = 0.0
        gaps[begin:begin + _ROWS_AT_ONCE] = gap.reshape(len(gap), -1).max(axis=1, initial=0.0)
    rows = np.argsort(-gaps, kind="stable")
    return rows[:int(np.count_nonzero(gaps))]


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

    def kinds(self) -> Iterator[str]:
        """Yield the kinds of adversarial feeds that apply to this function's inputs."""
        inputs = {name: self._function.inputs[name] for name in self._choice.shapes}
        if any(self._is_free_float(name, var) for name, var in inputs.items()):
            shapes = self._choice.shapes
            is_long = _MIN_LONG_RUN_ELEMENTS <= count_computed_elements(self._function, shapes) < math.inf
            yield from (WIDE_AND_TIES, SPECIAL) if is_long else (WIDE, SPECIAL, TIES)
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
            elif self._is_free_float(name, var) and kind != INDICES:
                feeds[name] = self._floats(name, kind, random, value)
            elif self._is_index(name, var) and kind in (WIDE, WIDE_AND_TIES, INDICES):
                feeds[name] = self._integers(name, kind, random, value)
        return feeds

    def _is_free_float(self, name: str, var: Var) -> bool:
        return types.is_float(var.dtype) and math.isinf(self._inside[name][1]) and name not in self._images

    def _is_index(self, name: str, var: Var) -> bool:
        """Return whether the input holds whole numbers that are neither flags nor pixels."""
        if name in self._images or var.dtype == types.bool or self._is_free_float(name, var):
            return False
        return self._inside[name] != (0, 1) or self._wrapping[name][0] < 0

    def _floats(self, name: str, kind: str, random: np.random.Generator, drawn: Array) -> Array:
        values = np.array(drawn, np.float64)
        if kind == WIDE_AND_TIES:
            wide, ties = (self._floats(name, each, random, drawn) for each in (WIDE, TIES))
            return np.where(np.arange(drawn.size).reshape(drawn.shape) < drawn.size // 2, wide, ties)
        if kind == WIDE:
            values = _set_extremes(random, _scale_rows(random, values), _EXTREMES)
        elif kind == TIES:
            values = _set_extremes_and_rows(random, np.round(values * 4) / 2, _TINY_VALUES)
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
