"""Where masks go: which values end in a softmax and nowhere else, and what masks add up to on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types

from ..core.query import consumers, is_const, is_opaque, kind_of

__all__ = ["BEYOND", "CARRIERS", "Fate", "Flow", "constants", "finite", "graded", "may_mask", "read_bytes", "softmaxes"]

BEYOND = 65504.0
"The largest number of fp16: what is as large, infinite or not, has no room for a score beside it."
_LARGE = 1000.0
"A constant factor from here on is taken for a mask: what it multiplies says where, not how much."

_X = ("x",)
CARRIERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cast", "clip", "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index",
                     "slice_by_size", "tile", "split", "gather", "gather_along_axis", "gather_nd", "reverse",
                     "identity", "band_part"), _X),
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum"), ("x", "y")),
    "real_div": _X, "pad": ("x", "constant_val"), "select": ("a", "b"), "concat": ("values",), "stack": ("values",),
    "fill": ("value",), "fill_like": ("value",), "slice_update": ("x", "update"),
    **dict.fromkeys(("scatter", "scatter_along_axis", "scatter_nd"), ("data", "updates")),
}
"Ops whose result holds what some of their inputs hold, moved, chosen, scaled or with something added: these inputs."
_WHOLE = {**CARRIERS, "abs": _X, "relu": _X, "square": _X}
"Ops that make whole numbers of whole numbers, but for a division."
_ROUNDED = ("round", "floor", "ceil", "sign")
_WALKED = 64
"How many values are looked at to tell whether a factor is whole."


_SINKS = {"softmax": "x", "scaled_dot_product_attention": "attn_mask"}
"Ops that silence what is masked, and the input that holds the mask."


@dataclass(frozen=True)
class Fate:
    """What becomes of a value. A `reason` says why it does not end in softmaxes alone; else the numbers hold.

    `factor` is the smallest constant that a mask is multiplied by on the way, `half` whether fp16 holds it anywhere,
    `copies` how many infinite masks a softmax may find added up in one place, each counted with its factor, and
    `finite` what the finite masks there add up to.
    """

    reason: str = ""
    factor: float = 1.0
    half: bool = False
    copies: float = 0.0
    finite: float = 0.0

    def also(self, other: Fate) -> Fate:
        """Both, for a value with two readers."""
        if self.reason or other.reason:
            return self if self.reason else other
        return Fate("", min(self.factor, other.factor), self.half or other.half,
                    max(self.copies, other.copies), max(self.finite, other.finite))


@dataclass(frozen=True)
class _Load:
    """What masks there may be in one element of a value; the names are those of `Fate`."""

    copies: float = 0.0
    finite: float = 0.0


@dataclass(frozen=True)
class _Scan:
    """What is in a const: `beyond` fp16 or not, the `largest` and `smallest` magnitude of the rest."""

    beyond: bool
    largest: float
    smallest: float


class Flow:
    """The fates of the floating-point values that `block` and the blocks in it compute; linear in their ops."""

    def __init__(self, block: Block) -> None:
        self._ops = list(_in_order(block))
        self._scans: dict[Var, _Scan] = {}
        self._fates: dict[Var, Fate] = {}
        self._sweep(self._sink)
        self._loads: dict[Var, _Load] = {}
        for op in self._ops:
            if op.op_type in CARRIERS and not is_opaque(op) and not self.fate(op.outputs[0]).reason:
                self._loads.update(dict.fromkeys(op.outputs, self._load(op)))
        self._sweep(self._loaded_sink)

    def fate(self, var: Var) -> Fate:
        """A value that was not there when the block was looked at is another block's."""
        return self._fates.get(var, Fate(f"'{var.name}' is computed elsewhere"))

    def beyond(self, var: Var) -> bool:
        """Whether the const holds numbers that fp16 cannot hold, or only just."""
        return self._scan(var).beyond

    def _sweep(self, sink: Callable[[Var], Fate]) -> None:
        """Every value's fate, from those of what is computed from it, last op first."""
        for op in reversed(self._ops):
            for var in op.outputs:
                if kind_of(var).is_tensor or types.is_scalar(var.sym_type):
                    self._fates[var] = self._of(var, sink)

    def _of(self, var: Var, sink: Callable[[Var], Fate]) -> Fate:
        if var.consuming_blocks:
            return Fate(f"'{var.name}' is an output as well")
        readers = consumers(var)
        fate = self._through(readers[0], var, sink) if readers else Fate(f"nothing reads '{var.name}'")
        for reader in readers[1:]:
            if fate.reason:
                break
            fate = fate.also(self._through(reader, var, sink))
        return replace(fate, half=fate.half or kind_of(var).dtype == types.fp16)

    def _through(self, op: Operation, var: Var, sink: Callable[[Var], Fate]) -> Fate:
        """What becomes of `var` in one of the ops that read it."""
        as_what = {name for name, bound in op.inputs.items() if bound is var or _is_among(var, bound)}
        if not is_opaque(op):
            if as_what == {_SINKS.get(op.op_type)}:
                test = _test_for_nan(op.outputs[0])
                return sink(var) if test is None else Fate(
                    f"{test.op_type} '{test.outputs[0].name}' tells by NaN which rows are masked throughout")
            if op.op_type in CARRIERS and as_what <= {*CARRIERS[op.op_type]} and types.is_float(op.outputs[0].dtype):
                return self._carried(op, var)
        return Fate(f"reaches {op.op_type} '{op.outputs[0].name if op.outputs else op.name}', which is no softmax")

    def _carried(self, op: Operation, var: Var) -> Fate:
        fate = self.fate(op.outputs[0])
        for out in op.outputs[1:]:
            fate = fate.also(self.fate(out))
        if fate.reason or op.op_type not in ("mul", "real_div"):
            return fate
        other = op.y if op.x is var else op.x
        if not is_const(other):
            return Fate(f"is scaled by a computed value in {op.op_type} '{op.outputs[0].name}'")
        scan = self._scan(other)
        return replace(fate, factor=fate.factor * min(
            1.0, scan.smallest if op.op_type == "mul" else 1 / max(scan.largest, 1.0)))

    def _sink(self, var: Var) -> Fate:
        return Fate(half=kind_of(var).dtype == types.fp16)

    def _loaded_sink(self, var: Var) -> Fate:
        load = self._loads.get(var, _Load())
        return replace(self._sink(var), copies=load.copies, finite=load.finite)

    def _load(self, op: Operation) -> _Load:
        """The masks in the result of an op: sums add them up, choices take the larger, factors enlarge them."""
        loads = [self._held(var) for var in _operands(op)]
        if op.op_type in ("add", "sub") and not _outside_band(op):
            return _Load(sum(load.copies for load in loads), sum(load.finite for load in loads))
        if op.op_type == "mul":
            return self._product(op)
        return _Load(max(load.copies for load in loads), max(load.finite for load in loads))

    def _product(self, op: Operation) -> _Load:
        const, other = (op.x, op.y) if is_const(op.x) else (op.y, op.x)
        if not is_const(const):
            return _Load()
        scan, load = self._scan(const), self._held(other)
        own = scan.largest if scan.largest >= _LARGE else 0.0
        if scan.beyond:  # times a mask of 0 and 1, not times another mask
            return _Load(max(load.copies * BEYOND, 1.0), own)
        by = max(1.0, scan.largest)
        return _Load(load.copies * by, max(load.finite * by, own))

    def _held(self, var: Var) -> _Load:
        if not is_const(var):
            return self._loads.get(var, _Load())
        scan = self._scan(var)
        return _Load(float(scan.beyond), scan.largest)

    def _scan(self, var: Var) -> _Scan:
        if var not in self._scans:
            self._scans[var] = _scan(np.asarray(var.val))
        return self._scans[var]


def may_mask(op: Operation, small: int) -> bool:
    """Whether a const of `op` is beyond fp16, or larger than `small` bytes: then it shows when its fate is known."""
    return any(read_bytes(var) > small or _scan(np.asarray(var.val)).beyond for _, var in constants(op))


def constants(op: Operation) -> Iterator[tuple[str, Var]]:
    """The floating-point consts whose elements become elements of the result, each with the input it is bound to."""
    for name in CARRIERS[op.op_type]:
        bound = op.inputs.get(name)
        for var in bound if isinstance(bound, (list, tuple)) else [bound]:
            if is_const(var) and types.is_float(var.dtype):
                yield name, var


def graded(op: Operation) -> Var | None:
    """What a constant mask is multiplied with or divided by in `op`, where that may be another number than 0 or 1.

    What goes into a softmax with nothing added are scores.
    """
    if op.op_type not in ("mul", "real_div"):
        return None
    factor: Var = op.y if is_const(op.x) else op.x
    scores = any(reader.op_type == "softmax" for reader in consumers(op.outputs[0]))
    return None if op.op_type == "mul" and not scores and _is_whole(factor) else factor


def _is_whole(factor: Var) -> bool:
    """Whether `factor` holds whole numbers alone, as masks do. The model's inputs are taken at their word."""
    pending, seen = [factor], set[Var]()
    while pending and len(seen) < _WALKED:
        var = pending.pop()
        seen.add(var)
        if not types.is_float(var.dtype) or var.op is None or var.op.op_type in _ROUNDED:
            continue
        if is_const(var):
            if not np.array_equal(var.val, np.round(var.val)):
                return False
        elif var.op.op_type in _WHOLE and var.op.op_type != "real_div" and not is_opaque(var.op):
            pending += [each for each in _operands(var.op) if each not in seen]
        else:
            return False
    return not pending


def finite(values: Any, level: float, above: bool = True) -> Any:
    """`values` with `level`, of their sign, for those that are beyond fp16; unless `above`, for the negative ones."""
    values = np.asarray(values)
    beyond = (np.abs(values) if above else -values) >= BEYOND
    changed = np.where(beyond, np.copysign(values.dtype.type(level), values), values)
    return changed.astype(values.dtype)[()]


def softmaxes(block: Block) -> bool:
    """Whether `block` or one in it has an op that ends a mask's way."""
    return any(op.op_type in _SINKS or any(map(softmaxes, op.blocks)) for op in block.operations)


def read_bytes(var: Var) -> int:
    """Bytes of a const, without reading them."""
    return int(np.prod(var.shape, dtype=object)) * int(np.dtype(types.nptype_from_builtin(var.dtype)).itemsize)


def _scan(values: np.ndarray[Any, Any]) -> _Scan:
    if not values.size:
        return _Scan(False, 0.0, 0.0)
    low, high = float(np.min(values)), float(np.max(values))
    if max(abs(low), abs(high)) < BEYOND and low != high:
        return _Scan(False, max(abs(low), abs(high)), float(np.min(np.abs(values))))
    sizes = np.abs(values)
    rest = sizes[sizes < BEYOND]
    beyond = bool(np.any(sizes >= BEYOND))
    return _Scan(beyond, float(np.max(rest, initial=0.0)), float(np.min(rest, initial=BEYOND)))


def _operands(op: Operation) -> Iterable[Var]:
    for name in _WHOLE[op.op_type]:
        bound = op.inputs.get(name)
        yield from bound if isinstance(bound, (list, tuple)) else [] if bound is None else [bound]


def _test_for_nan(var: Var) -> Operation | None:
    """The op that compares `var` with itself, as `nan_to_num` does, if any; also behind a cast."""
    for reader in consumers(var):
        if reader.op_type in ("equal", "not_equal") and reader.x is reader.y:
            return reader
        behind = _test_for_nan(reader.outputs[0]) if reader.op_type == "cast" else None
        if behind is not None:
            return behind
    return None


def _outside_band(op: Operation) -> bool:
    """Whether this is x - band_part(x): what is outside the band."""
    band = op.y.op
    return op.op_type == "sub" and band is not None and band.op_type == "band_part" and band.x is op.x


def _is_among(var: Var, bound: Any) -> bool:
    return isinstance(bound, (list, tuple)) and any(each is var for each in bound)


def _in_order(block: Block) -> Iterator[Operation]:
    """Every op; those of nested blocks stand before the op that holds them, after all that they read."""
    for op in block.operations:
        for inner in op.blocks:
            yield from _in_order(inner)
        yield op
