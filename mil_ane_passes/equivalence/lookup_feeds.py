"""Feeds that read the rows in which constant tables of two programs differ.

Draws reach few rows of a large table, so that a table in which one row differs would pass as equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.constants import is_stored_alike
from ..ir.query import get_const_value, get_flat_inputs, is_compressed, is_const_or_compressed
from ..utils.errors import AnePassesError
from .adversarial_feeds import ROWS
from .execution import Plan
from .feeds import get_symbol_sizes, list_shape_choices, make_feeds, make_state
from .input_domains import limit_input_domains
from .interval_propagation import Interval

__all__ = ["IdUse", "build_table_row_plans", "find_differing_lookups", "find_id_uses", "list_needed_ops"]

Array = np.ndarray[Any, Any]

_ROWS_AT_ONCE = 1024
"Rows of tables that are compared at a time, in float64: a table may be as large as memory."
_MAX_INDEX_OPS, _MAX_INDICES = 64, 1 << 16
"The most ops that compute the indices of a lookup from inputs, and elements of each: they are computed many times."
_MAX_RUNS, _MAX_SEARCH_RUNS = 4, 1 << 13
"The most runs of a function, and the most computations of indices in which ids are searched."
_MAX_TABLE_OPS = 16
"The most ops between constants and a table that is computed from them."
_TABLE_OPS = frozenset((
    "add", "cast", "concat", "cos", "expand_dims", "gather", "identity", "mul", "pad", "real_div", "reshape", "reverse",
    "sin", "slice_by_index", "slice_by_size", "split", "squeeze", "stack", "sub", "tile", "transpose"))
"Ops by which tables are computed from constants."
_FLAG_MOVEMENTS = frozenset(("cast", "expand_dims", "identity", "reshape", "squeeze"))
"Ops between one-hot flags and the product that looks up a row by them."


class _Lookup(NamedTuple):
    """A constant table, compressed or not, from which computed indices select rows along `axis`.

    Each index reads `window` rows. `element` is the only element of the flat `indices` that does; None for all.
    """

    table: Var
    axis: int
    indices: Var
    window: int = 1
    element: int | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the table with its rows on the first axis."""
        shape = tuple(self.table.shape)
        return (shape[self.axis], *shape[:self.axis], *shape[self.axis + 1:])


def build_table_row_plans(
    before: Program, after: Program, describe: Callable[[str], Any], ranges: Mapping[str, Interval] | None = None
) -> list[Plan]:
    """Make a run for each function in which lookups by ids read the rows in which tables of the two programs differ."""
    made = []
    for name, function in before.functions.items():
        found = find_differing_lookups(before, after, name)
        if found:
            description = describe(name)
            choice = list_shape_choices(function, description)[0]
            feeds = make_feeds(function, choice, 0, description)
            domains = limit_input_domains(function, get_symbol_sizes(function, choice.shapes), ranges)
            programs = [_IndexProgram(before, name, lookup.indices, feeds) for lookup, _ in found]
            wanted: dict[str, list[tuple[Array, IdUse]]] = {}
            for (lookup, rows), program in zip(found, programs):
                for use in program.find_uses(lookup.element):
                    wanted.setdefault(use.name, []).append((rows, use))
            chosen = {each: _choose_ids(feeds[each], uses, domains[each]) for each, uses in wanted.items()}
            runs = [feeds | chosen] * bool(chosen)
            for (lookup, rows), program in zip(found, programs):
                if not chosen or not program.reads_any(rows, chosen, lookup.element):
                    runs += program.search_ids(rows, domains, lookup.element)
            made += [Plan(name, f"{ROWS} {number}" if number else ROWS, each, make_state(function, 0), typed=False,
                          adversarial=ROWS) for number, each in enumerate(runs[:_MAX_RUNS])]
    return made


def find_differing_lookups(
    before: Program, after: Program, function: str, accepts: Callable[[Var], bool] = lambda indices: True
) -> list[tuple[_Lookup, Array]]:
    """Return each lookup in a constant table that differs in the other program, with the indices that read its rows.

    `accepts` returns whether to consider a lookup by its indices; the tables of others are not read.
    """
    lookups = [_number_lookups(program.functions[function]) for program in (before, after)]
    found = []
    for place, old in lookups[0].items():
        new = lookups[1].get(place)
        if new is None or not accepts(old.indices) or (old.axis == new.axis and _is_made_alike(old.table, new.table)):
            continue
        try:
            dense = [_read_table(program, function, lookup) for program, lookup in ((before, old), (after, new))]
        except AnePassesError:
            continue  # neither can a run read it, which the report then says
        if (rows := _find_differing_rows(*dense)).size:
            found.append((old, np.minimum(rows, len(dense[0]) - old.window)))
    return found


def _number_lookups(function: Function) -> dict[tuple[tuple[int, ...], int], _Lookup]:
    """Return the lookups of a function, identified as in the other program, in which their names may differ.

    The key is the shape of the table with its rows first, and a number among the lookups of this shape.
    """
    found: dict[tuple[tuple[int, ...], int], _Lookup] = {}
    counts: dict[tuple[int, ...], int] = {}
    for op in function.operations:
        for lookup in _iterate_lookups(op):
            shape = lookup.row_shape
            counts[shape] = counts.get(shape, 0) + 1
            found[shape, counts[shape]] = lookup
    return found


def _iterate_lookups(op: Operation) -> Iterator[_Lookup]:
    """Yield the lookups in constant tables that an op does."""
    if op.op_type in ("gather", "gather_along_axis"):
        axis = get_const_value(op.axis)
        if op.x.rank and axis is not None and _is_lookup(op.x, op.indices):
            yield _Lookup(op.x, int(axis) % op.x.rank, op.indices)
    elif op.op_type == "gather_nd":
        if op.indices.shape[-1] == 1 and not get_const_value(op.inputs.get("batch_dims"), 0) and _is_lookup(
                op.x, op.indices):
            yield _Lookup(op.x, 0, op.indices)
    elif op.op_type in ("slice_by_size", "slice_by_index"):
        if _is_lookup(op.x, op.begin):
            yield from _iterate_slices(op)
    elif op.op_type in ("matmul", "linear"):
        yield from _iterate_products(op)


def _is_lookup(table: Var, indices: Var) -> bool:
    return _is_table(table) and not is_const_or_compressed(indices)


def _is_table(var: Var) -> bool:
    """Return whether `var` is a constant, compressed or not, or computed from constants by a few ops."""
    return _list_table_ops(var) is not None


def _list_table_ops(var: Var) -> list[Operation] | None:
    """Return the ops of the function that compute a table from constants; None if they do not."""
    pending, needed = [var], dict[Operation, None]()
    while pending:
        each = pending.pop()
        if each.op is None or len(needed) > _MAX_TABLE_OPS:
            return None
        if is_const_or_compressed(each) or each.op in needed:
            continue
        if each.op.op_type not in _TABLE_OPS:
            return None
        needed[each.op] = None
        pending.extend(get_flat_inputs(each.op))
    block = var.op.enclosing_block
    return [op for op in block.operations if op in needed] if needed else []


def _iterate_slices(op: Operation) -> Iterator[_Lookup]:
    """Yield a lookup for each axis on which a slice is shorter than the table."""
    rank = op.x.rank
    squeezed, unread = (np.atleast_1d(get_const_value(op.inputs.get(f"{name}_mask"), [False] * rank))
                        for name in ("squeeze", "begin"))
    strides = np.atleast_1d(get_const_value(op.inputs.get("stride"), [1] * rank))
    sizes = iter(op.outputs[0].shape)
    for axis in range(rank):
        size = 1 if squeezed[axis] else next(sizes)
        window = size if isinstance(size, int) else 1
        if 0 < window < op.x.shape[axis] and not unread[axis] and strides[axis] == 1:
            yield _Lookup(op.x, axis, op.begin, window, axis)


def _iterate_products(op: Operation) -> Iterator[_Lookup]:
    """Yield the lookup if `op` is a product of a table with one-hot flags: 1 at the selected row, 0 elsewhere."""
    is_linear = op.op_type == "linear"
    table = op.weight if is_linear else op.y
    if table.rank != 2 or not _is_table(table) or (not is_linear and get_const_value(op.transpose_x, False)):
        return
    axis = 1 if is_linear or get_const_value(op.transpose_y, False) else 0
    flags = op.x.op
    while flags is not None and flags.op_type in _FLAG_MOVEMENTS:
        flags = flags.x.op
    if flags is None:
        return
    if flags.op_type == "one_hot" and not is_const_or_compressed(flags.indices):
        yield _Lookup(table, axis, flags.indices)
    elif flags.op_type == "equal":
        for places, indices in ((flags.x, flags.y), (flags.y, flags.x)):
            if places.val is not None and not is_const_or_compressed(indices) and np.array_equal(
                    np.ravel(places.val), np.arange(table.shape[axis])):
                yield _Lookup(table, axis, indices)


class IdUse(NamedTuple):
    """The dependence of a lookup's indices on one input: `base` + `step` * (the input's element number `element`).

    These are three arrays of equal length, with an entry for each index that depends on the input.
    """

    name: str
    base: Array
    step: Array
    element: Array


def find_id_uses(program: Program, function: str, indices: Var, feeds: Mapping[str, Array]) -> list[IdUse]:
    """Return how `indices` depend on each input; empty if they cannot be computed, or only by too many ops."""
    return _IndexProgram(program, function, indices, feeds).find_uses()


class _IndexProgram:
    """The ops that compute the indices of a lookup, run on `feeds` with other values for single inputs.

    It has no inputs if the ops are too many, have blocks or compute large tensors: then nothing is run.
    """

    def __init__(self, program: Program, function: str, indices: Var, feeds: Mapping[str, Array]) -> None:
        self._program, self._function, self._indices, self._feeds = program, function, indices, feeds
        ops = list_needed_ops(indices)
        self._ops = ops or []
        read = {indices, *(each for op in self._ops for each in get_flat_inputs(op))}
        self._inputs = [] if ops is None else [
            name for name, var in program.functions[function].inputs.items() if name in feeds and var in read]
        self._runtime: Any = None
        self._count: int | None = None

    def _compute(self, values: Mapping[str, Array]) -> Array:
        """Return the flat indices for these values of inputs.

        Raises AnePassesError if they cannot be computed, or if their number depends on values, as with non_zero.
        """
        from ..runtime import Runtime

        if self._runtime is None:
            self._runtime = Runtime(self._program, function=self._function, precision="float64")
        found = self._runtime.compute(self._indices, self._ops, {**self._feeds, **values})
        indices = np.asarray(found, np.int64).reshape(-1)
        if self._count not in (None, indices.size):
            raise AnePassesError(f"'{self._indices.name}' has {self._count} or {indices.size} elements")
        self._count = indices.size
        return indices

    def find_uses(self, only: int | None = None) -> list[IdUse]:
        """Return how the indices depend on each input, determined by computing them at values of 0 and 1.

        `only` is the number of the only index to consider. Each index is assumed to depend on one element of the input,
        whose number is found bit by bit, in log2(n) runs for n elements; one run for each element would take n. If the
        assumption is wrong, the ids chosen are no worse than sampled ones.
        """
        found = []
        try:
            for name in self._inputs:
                numbers = np.arange(self._feeds[name].size)
                base = self._compute_at(name, np.zeros_like(numbers))
                step = self._compute_at(name, np.ones_like(numbers)) - base
                element = np.zeros_like(base)
                for bit in range(int(numbers[-1:].max(initial=0)).bit_length()):
                    element |= (self._compute_at(name, numbers >> bit & 1) != base).astype(np.int64) << bit
                reads = (step != 0) & (element < numbers.size)
                places = np.flatnonzero(reads if only is None else reads & (np.arange(reads.size) == only))
                if places.size:
                    found.append(IdUse(name, base[places], step[places], element[places]))
        except AnePassesError:
            pass  # the indices cannot be computed at these values; the uses found so far hold
        return found

    def _compute_at(self, name: str, values: Array) -> Array:
        """Return the indices with these flat values for the input `name`."""
        fed = self._feeds[name]
        return self._compute({name: values.astype(fed.dtype).reshape(fed.shape)})

    def reads_any(self, rows: Array, values: Mapping[str, Array], only: int | None = None) -> bool:
        """Return whether the lookup reads one of `rows` for these values; False if the indices cannot be computed."""
        if not self._inputs:
            return False
        try:
            found = self._compute(values)
        except AnePassesError:
            return False
        return bool(np.isin(found if only is None else found[only], rows).any())

    def search_ids(
        self, rows: Array, domains: Mapping[str, Interval], only: int | None = None
    ) -> list[dict[str, Array]]:
        """Search feeds for which the lookup reads one of `rows`, for indices that are a map or a hash of ids.

        Each run tries as many ids as the input has elements. Returns the first feeds found, or none.
        """
        if sum(value.size for value in self._feeds.values()) > _MAX_INDICES:
            return []
        for name in self._inputs:
            fed = self._feeds[name]
            if fed.dtype.kind not in "iu" or not fed.size:
                continue
            low = math.ceil(max(domains[name][0], 0))
            high = min(domains[name][1], low + fed.size * _MAX_SEARCH_RUNS - 1, np.iinfo(fed.dtype).max)
            for first in range(low, math.floor(high) + 1, fed.size):
                ids = np.minimum(first + np.arange(fed.size), high).astype(fed.dtype).reshape(fed.shape)
                if self.reads_any(rows, {name: ids}, only):
                    return [{**self._feeds, name: ids}]
        return []


def list_needed_ops(var: Var, most: int = _MAX_INDEX_OPS) -> list[Operation] | None:
    """Return the ops of the function that compute `var`, in their order; None where they are too expensive to run many
    times: more than `most`, with blocks, with lists, or of many elements."""
    needed: set[Operation] = set()
    pending = [var]
    while pending:
        op = pending.pop().op
        if op is None or op in needed or is_const_or_compressed(op.outputs[0]):
            continue
        if len(needed) == most or op.blocks or any(types.is_list(each.sym_type) or each.rank and math.prod(
                size if isinstance(size, int) else 1 for size in each.shape) > _MAX_INDICES for each in op.outputs):
            return None
        needed.add(op)
        pending.extend(get_flat_inputs(op))
    block = var.op.enclosing_block if var.op is not None else None
    return [op for op in block.operations if op in needed] if block is not None else []


def _choose_ids(drawn: Array, wanted: Sequence[tuple[Array, IdUse]], domain: Interval) -> Array:
    """Return ids that read the `wanted` rows of tables; drawn ids at positions that cannot read any of these."""
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


def _is_made_alike(old: Var, new: Var) -> bool:
    """Return whether two tables are made by the same ops of equal numbers, so that they need not be computed."""
    if is_stored_alike(old, new):
        return True
    first, second = old.op, new.op
    if is_const_or_compressed(old) or first.op_type != second.op_type or first.inputs.keys() != second.inputs.keys():
        return False
    pairs = list(zip(get_flat_inputs(first), get_flat_inputs(second)))
    same_output = first.outputs.index(old) == second.outputs.index(new)
    return same_output and len(get_flat_inputs(first)) == len(get_flat_inputs(second)) and all(
        _is_made_alike(*pair) for pair in pairs)


def _read_table(program: Program, function: str, lookup: _Lookup) -> Array:
    """Return a table with its rows on the first axis, as a run reads it; one that is computed in fp32."""
    from ..runtime import Runtime

    table = lookup.table
    if is_compressed(table) or table.val is None:
        runtime = Runtime(program, function=function)
        dense = runtime.read_constant(table, _list_table_ops(table) or ())
    else:
        dense = table.val
    return np.moveaxis(np.asarray(dense), lookup.axis, 0)


def _find_differing_rows(old: Array, new: Array) -> Array:
    """Return the rows in which two tables differ, those with the largest difference first."""
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
