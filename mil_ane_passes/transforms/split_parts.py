"""Splitting of a package into several packages that run one after the other, with few crossing bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from coremltools.converters.mil.mil import Function, Var

from ..ir.constants import get_blob_ref
from ..ir.query import count_stored_bytes, is_symbolic, iterate_nested_ops
from ..passes.layout import format_bytes
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import format_count
from .contract import MAX_PARTS, Draft, EditRecord, Transform
from .names import collect_names
from .split_at import FunctionGraph, SplitAt, plan_crossing

__all__ = ["SplitIntoParts"]

_MAX_PLACES = 600
"""Most positions of cuts that are compared; the narrowest are kept.

The search takes time and memory quadratic in their number. A layer has about as many positions as weights, so 600 are
enough for 60 layers with ten weights each.
"""
_NARROW_RATIO = 2.0
"""Largest ratio of the crossing bytes of a cut between layers to those of the narrowest cut.

A value that several layers read, such as a mask, may cross in addition. Values inside a layer are 3 to 4 times as wide,
so cuts inside layers are excluded.
"""
_BALANCE = 1.1
"Largest ratio of the largest part to that of the most balanced cuts: 10 % more weights allow much narrower cuts."
_MIN_WEIGHT_BYTES = 1024
"Constants of fewer bytes are not counted as weights: they are sizes, axes and epsilons."
_VIEWS = frozenset({"slice_by_index", "slice_by_size", "reshape", "transpose", "squeeze", "expand_dims", "identity"})
"Ops that select or reshape a part of an input, such as the cache of a layer; each part of the model repeats them."
_ASSUMED_SIZE = 64
"Assumed size of a flexible dimension in comparisons of crossing bytes; only the ratio to other values matters."
Float = np.float64


@dataclass(frozen=True)
class SplitIntoParts(Transform):
    """Cuts every function, or only `function`, into `count` parts, or into the fewest parts of at most `max_bytes` of
    weights each.

    Weights are counted as stored. The largest part is at most a tenth larger than in the most balanced cuts; of all
    such cuts, those with the fewest crossing bytes are chosen. Cuts are between layers, which are the narrowest
    positions, unless there are too few of these. All functions are cut after the same values, which are chosen in the
    default function. The weights of all functions count; a weight that several functions read counts once. One of
    `count` and `max_bytes` is None.
    """

    count: int | None = None
    max_bytes: int | None = None
    function: str | None = None
    named: str = "split_parts"
    "The option for `count`, for errors."

    def __post_init__(self) -> None:
        if self.count is not None and not (isinstance(self.count, int | np.integer) and 2 <= self.count <= MAX_PARTS):
            raise InputError(f"{self._asked}: expected a number of parts from 2 to {MAX_PARTS}")

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the parts in the order in which they run. Raises InputError if such cuts are not possible."""
        functions = draft.select_functions(self.function)
        if not functions:
            raise InputError(f"{draft.where}: found no function; expected one that can be cut into parts")
        name = draft.program.default_function_name  # not the first function, as their order differs between runs
        name, function = (name, functions[name]) if name in functions else next(iter(sorted(functions.items())))
        places = _CutPlaces(function, [each for each in functions.values() if each is not function])
        cuts = self._choose(places)
        if not cuts:
            draft.done.append(EditRecord(
                self._option, name, "", f"one part: its weights take {format_bytes(places.count_bytes(0, None))}",
                changed=False))
            return [draft]
        before, parts, rest, crossed = list(draft.done), [], draft, set[str]()
        for cut in cuts:
            values = places.list_values(cut)
            named = [each for each in values if each not in crossed]
            first, rest = SplitAt(named, self.function, self._asked).apply(rest)
            parts.append(first)
            crossed.update(values)
        parts.append(rest)
        for number, part in enumerate(parts, 1):
            nbytes = _count_weight_bytes(part.program.functions.values())
            if nbytes > (math.inf if self.max_bytes is None else self.max_bytes):
                one = "" if self.named == "parts" else (  # `adapt` has no option for a function
                    f", or {format_option('function')}, which cuts one and leaves the others out")
                raise InputError(f"{self._asked}: part {number} of {len(parts)} would have {format_bytes(nbytes)} of "
                                 f"weights in its functions; expected a larger size{one}")
            note = self._describe(part.program.functions[name], number, len(parts), nbytes)
            before.append(EditRecord(self._option, name, "", note))
            part.part = str(number)
        for part in parts:
            part.done = list(before)
        return parts

    @property
    def _option(self) -> str:
        return "--split-parts" if self.count is not None else "--max-part-size"

    @property
    def _asked(self) -> str:
        if self.count is not None:
            return format_option_values(self.named, str(self.count))
        return format_option_values("max_part_size", str(self.max_bytes))

    def _choose(self, places: _CutPlaces) -> list[int]:
        """Return the cuts among `places`, in order; an empty list if one part is enough."""
        most = self.max_bytes
        if most is not None and places.count_bytes(0, None) <= most:
            return []
        for among in (places.select_narrow(), places):
            for count in range(2, min(MAX_PARTS, len(among.found) + 1) + 1) if most is not None else [self.count or 2]:
                smallest = among.find_smallest_maximum(count)
                if smallest <= (math.inf if most is None else most) and math.isfinite(smallest):
                    return among.find_cuts(count, smallest * _BALANCE if most is None else most)
        raise InputError(f"{self._asked}: "
                         f"{places.explain_shortage() if most is None else places.explain_excess(most)}")

    def _describe(self, function: Function, number: int, count: int, nbytes: int) -> str:
        ops = sum(op.op_type != "const" for op in iterate_nested_ops(function))
        return (f"part {number} of {count} has {format_count(ops, 'op')} and {format_bytes(nbytes)} of weights, takes "
                f"{', '.join(function.inputs)} and gives {', '.join(var.name for var in function.outputs)}")


class _CutPlaces:
    """The positions at which a function can be cut, with the crossing bytes and the weights between positions.

    `found` are indices in the list of ops: a cut is after the op. Between two ops that read weights, only the narrowest
    position is kept.
    """

    def __init__(self, function: Function, others: Sequence[Function] = ()) -> None:
        self._function = function
        self._graph = FunctionGraph(function)
        if self._graph.refusal:
            raise InputError(f"the function '{function.name}' cannot be cut: {self._graph.refusal}")
        self._names = collect_names(function)
        self._views = self._find_views()
        self._last = self._find_last_readers()
        self._weights = list(self._iterate_weight_reads(others))
        self._torn: dict[int, str] = self._find_torn_states()
        self.found, self._crossing = self._find_places()
        self._bytes = self._measure_segments()

    def count_bytes(self, start: int, end: int | None) -> int:
        """Count the bytes of weights that the ops between two cuts read; `end` is None for the end of the function."""
        row = 0 if start == 0 else self.found.index(start) + 1
        column = len(self.found) + 1 if end is None else self.found.index(end) + 1
        return int(self._bytes[row, column])

    def list_values(self, place: int) -> list[str]:
        """List the values after which the cut at `place` is made: crossing values, and outputs computed before it.

        Values from which others of them are computed are not listed, as they cross anyway if they are needed.
        """
        graph, listed, required = self._graph, list[str](), set[int]()
        for at in range(place, -1, -1):
            if graph.constant[at] or at in self._views or at in required:
                continue
            named = [var.name for var in graph.ops[at].outputs
                     if self._last.get(var, -1) > place or var in graph.outputs]
            if named:
                listed += named
                required |= graph.collect_required([at])
        return listed[::-1]

    def select_narrow(self) -> _CutPlaces:
        """Return only the positions at which at most twice as many bytes cross as at the narrowest one."""
        limit = _NARROW_RATIO * min(self._crossing, default=0.0)
        kept = [number for number, width in enumerate(self._crossing) if width <= limit]
        made = copy.copy(self)
        made.found, made._crossing = [self.found[each] for each in kept], [self._crossing[each] for each in kept]
        made._bytes = made._measure_segments()
        return made

    def find_smallest_maximum(self, count: int) -> float:
        """Find the smallest possible size of the largest of `count` parts, in bytes."""
        return float(self._run_dynamic_program(count, np.maximum, self._bytes)[0][-1])

    def find_cuts(self, count: int, most: float) -> list[int]:
        """Find the cuts into `count` parts of at most `most` bytes at which the fewest bytes cross.

        Of equally narrow cuts, those with the most even parts are chosen: the squares of the parts' fractions are added
        to the cost, in total less than one byte.
        """
        whole = max(float(self._bytes[0, -1]), 1.0)
        price = np.append(np.asarray([0.0, *self._crossing]), 0.0)[None, :] + (self._bytes / whole) ** 2
        price = np.where(self._bytes <= most, price, np.inf)
        _, chosen = self._run_dynamic_program(count, np.add, price)
        cuts, at = [], len(self.found) + 1
        for step in reversed(chosen[1:]):
            at = int(step[at])
            cuts.append(self.found[at - 1])
        return cuts[::-1]

    def explain_shortage(self) -> str:
        """Explain why there are no more positions for cuts."""
        states = sorted(set(self._torn.values()))
        why = f"; states are used on both sides of others: {', '.join(states)}" if states else ""
        if not self.found:
            expected = f"them as inputs and outputs, by {format_option('state_to_io')}" if states else (
                f"two ops that read weights of {format_bytes(_MIN_WEIGHT_BYTES)} or more, between which all values can "
                "be inputs and outputs")
            return f"there is no place at which the function can be cut{why}; expected {expected}"
        return (f"the function can be cut at {format_count(len(self.found), 'place')} only{why}; expected at most "
                f"{len(self.found) + 1} parts")

    def explain_excess(self, most: int) -> str:
        """Explain why no cuts make each part small enough."""
        steps = [int(self._bytes[row, row + 1]) for row in range(len(self.found) + 1)]
        largest = max(steps)
        if largest <= most:
            return f"more than {MAX_PARTS} parts would be needed"
        row = steps.index(largest)
        start = 0 if row == 0 else self.found[row - 1] + 1
        end = self.found[row] if row < len(self.found) else len(self._graph.ops) - 1
        named = next((self._graph.ops[at].name for at, _, _ in self._weights if start <= at <= end), "")
        states = sorted(set(self._torn.values()))
        why = f"; the states {', '.join(states)} allow no cut between" if states else ""
        return (f"the ops around '{named}' alone, between which it cannot be cut, have {format_bytes(largest)} of "
                f"weights{why}; expected at least that")

    def _find_views(self) -> set[int]:
        """Find the indices of ops that only select or reshape parts of inputs."""
        graph, found = self._graph, set[int]()
        for place, op in enumerate(graph.ops):
            if op.op_type in _VIEWS and all(var in graph.inputs or graph.maker.get(var) in found or (
                    var in graph.maker and graph.constant[graph.maker[var]]) for var in graph.reads[place]):
                found.add(place)
        return found - {place for place in found if graph.constant[place]}

    def _find_last_readers(self) -> dict[Var, int]:
        return {var: place for place, read in enumerate(self._graph.reads) if not self._graph.constant[place]
                for var in read}

    def _iterate_weight_reads(self, others: Iterable[Function]) -> Iterator[tuple[int, int, int]]:
        """Yield for each use of a weight the index of the op, the index of the previous use (-1: none), and the bytes.

        A weight that several ops read counts once in each part that reads it. A use by an op of another function counts
        at the op of this function with an output of the same name; without such an op, at the last one before it.
        """
        reads = list(_iterate_weights(self._graph))
        places = {var.name: place for var, place in self._graph.maker.items()}
        for graph in map(FunctionGraph, others):
            at, located = 0, list[int]()
            for op in graph.ops:
                at = next((places[var.name] for var in op.outputs if var.name in places), at)
                located.append(at)
            reads += [(located[place], weight, nbytes) for place, weight, nbytes in _iterate_weights(graph)]
        previous = dict[Hashable, int]()
        for place, weight, nbytes in sorted(reads, key=lambda read: read[0]):
            yield place, previous.get(weight, -1), nbytes
            previous[weight] = place

    def _find_torn_states(self) -> dict[int, str]:
        """Return the positions before and after which a state is used, with its name: a state must be in one part."""
        return {place: state.name for state, users in self._graph.state_users.items() if users
                for place in range(users[0], users[-1])}

    def _find_places(self) -> tuple[list[int], list[float]]:
        """Return the narrowest position between two uses of weights, in order, and the crossing bytes at each.

        A part without weights is useless, so there is no position before the first use or after the last one.
        """
        reading = {place for place, _, _ in self._weights}
        best: list[tuple[float, int]] = []
        here: tuple[float, int] | None = None
        begun = False
        for place, width in self._iterate_widths():
            if place in reading:
                if here is not None:
                    best.append(here)
                here, begun = None, True
            if begun and width is not None and (here is None or width < here[0]):
                here = (width, place)
        kept = sorted(sorted(best)[:_MAX_PLACES], key=lambda pair: pair[1])
        return [place for _, place in kept], [width for width, _ in kept]

    def _iterate_widths(self) -> Iterator[tuple[int, float | None]]:
        """Yield each position after an op that computes, with its crossing bytes (None if no cut is possible)."""
        graph = self._graph
        width, stuck, leaves = 0.0, 0, dict[int, list[tuple[float, int]]]()
        unread = set(graph.inputs)
        for place, op in enumerate(graph.ops):
            if graph.constant[place] or place in self._views:
                continue
            given = unread & graph.reads[place]  # inputs that both parts need are inputs of both
            unread -= given
            for var in (*given, *op.outputs):
                last = self._last.get(var, -1)
                if last > place:
                    nbytes = self._count_crossing_bytes(var)
                    entry = (0.0, 1) if nbytes is None else (nbytes, 0)
                    leaves.setdefault(last, []).append(entry)
                    width, stuck = width + entry[0], stuck + entry[1]
            for nbytes, one in leaves.pop(place, []):
                width, stuck = width - nbytes, stuck - one
            yield place, width if not stuck and width > 0 and place not in self._torn else None

    def _count_crossing_bytes(self, var: Var) -> float | None:
        """Count the bytes of a value that crosses; None if it cannot be an input and output."""
        planned = plan_crossing(self._function, var, set(self._names))
        if isinstance(planned, str):
            return None
        sizes = [_ASSUMED_SIZE if is_symbolic(size) else int(size) for size in var.shape]
        return float(math.prod(sizes) * (2 if planned.dtype == "fp16" else 4))

    def _measure_segments(self) -> np.ndarray[tuple[int, int], np.dtype[Float]]:
        """Return the bytes of weights from each cut (row, 0: the start) to each later one (the last: the end)."""
        ends = np.asarray([-1, *self.found, len(self._graph.ops)])
        place, before, nbytes = np.asarray(self._weights, np.int64).reshape(-1, 3).T
        column = np.searchsorted(ends, place)
        sizes = np.full((len(ends), len(ends)), np.inf)
        for row in range(len(ends) - 1):
            first = (before <= ends[row]) & (place > ends[row])  # the first use in a part that starts here
            added = np.bincount(column[first], nbytes[first], len(ends))
            sizes[row, row + 1:] = np.cumsum(added)[row + 1:]
        return sizes

    def _run_dynamic_program(
        self, count: int, join: np.ufunc, price: np.ndarray[tuple[int, int], np.dtype[Float]]
    ) -> tuple[np.ndarray[tuple[int], np.dtype[Float]], list[np.ndarray[tuple[int], np.dtype[np.int64]]]]:
        """Return the least cost of `count` segments up to each position, and for each step the start positions."""
        least = np.full(price.shape[0], np.inf)
        least[0] = 0.0
        chosen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for _ in range(count):
            every = join(least[:, None], price)
            chosen.append(every.argmin(axis=0))
            least = every.min(axis=0)
        return least, chosen


def _count_weight_bytes(functions: Iterable[Function]) -> int:
    """Count the bytes of the weights that the ops of `functions` read; each weight counts once."""
    return sum({weight: nbytes for each in functions for _, weight, nbytes in _iterate_weights(FunctionGraph(each))
                }.values())


def _iterate_weights(graph: FunctionGraph) -> Iterator[tuple[int, Hashable, int]]:
    """Yield for each use of a weight the index of the op, a key that identifies the weight, and the bytes."""
    stored = dict[int, tuple[Hashable, int]]()
    for place, op in enumerate(graph.ops):
        if graph.constant[place]:
            if op.op_type == "const":
                var = op.outputs[0]
                stored[place] = get_blob_ref(var) or id(var), count_stored_bytes(var)
            continue
        for source in sorted(_find_consts(graph, place)):
            weight, nbytes = stored.get(source, (None, 0))
            if nbytes >= _MIN_WEIGHT_BYTES:
                yield place, weight, nbytes
        for var in (inner.outputs[0] for block in op.blocks for inner in iterate_nested_ops(block)
                    if inner.op_type == "const"):
            if (nbytes := count_stored_bytes(var)) >= _MIN_WEIGHT_BYTES:
                yield place, get_blob_ref(var) or id(var), nbytes


def _find_consts(graph: FunctionGraph, place: int) -> set[int]:
    """Find the indices of the constants that the op at `place` reads, also through ops on constants."""
    found = set[int]()
    pending = [graph.maker[var] for var in graph.reads[place] if var in graph.maker]
    while pending:
        source = pending.pop()
        if source not in found and graph.constant[source]:
            found.add(source)
            pending += [graph.maker[var] for var in graph.reads[source] if var in graph.maker]
    return found
