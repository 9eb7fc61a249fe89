"""Flow of masks: the values that end in a softmax and nowhere else, and the sums of masks on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types

from ...ir.query import get_consumers, get_type_info, is_const, is_opaque

__all__ = [
    "CARRIED_INPUTS",
    "FP16_MAX",
    "MaskDestination",
    "MaskFlow",
    "can_hold_mask",
    "count_const_bytes",
    "find_non_binary_factor",
    "has_softmax",
    "iterate_float_constants",
    "replace_infinities",
]

FP16_MAX = 65504.0
"The largest finite number of fp16; a mask of that magnitude, infinite or not, leaves no room for a score."
_MIN_MASK_FACTOR = 1000.0
"Constant factor from which a product counts as a mask: its other factor then selects positions, not magnitudes."

_X_INPUT = ("x",)
CARRIED_INPUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "cast",
            "clip",
            "expand_dims",
            "squeeze",
            "reshape",
            "transpose",
            "slice_by_index",
            "slice_by_size",
            "tile",
            "split",
            "gather",
            "gather_along_axis",
            "gather_nd",
            "reverse",
            "identity",
            "band_part",
        ),
        _X_INPUT,
    ),
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum"), ("x", "y")),
    "real_div": _X_INPUT,
    "pad": ("x", "constant_val"),
    "select": ("a", "b"),
    "concat": ("values",),
    "stack": ("values",),
    "fill": ("value",),
    "fill_like": ("value",),
    "slice_update": ("x", "update"),
    **dict.fromkeys(("scatter", "scatter_along_axis", "scatter_nd"), ("data", "updates")),
}
"Ops that move, select, scale or add to elements of some of their inputs, with these inputs."
_INTEGER_PRESERVING_INPUTS = {**CARRIED_INPUTS, "abs": _X_INPUT, "relu": _X_INPUT, "square": _X_INPUT}
"Ops that turn integers into integers, except for a division, with the inputs concerned."
_ROUNDING_OPS = ("round", "floor", "ceil", "sign")
_MAX_VALUES_VISITED = 64
"Most values that are visited to infer whether a factor has only integers."


_MASKED_INPUTS = {"softmax": "x", "scaled_dot_product_attention": "attn_mask"}
"Ops that suppress masked elements, and the input with the mask."


@dataclass(frozen=True)
class MaskDestination:
    """The destination of a value.

    A `reason` is why it does not end in softmaxes alone; otherwise the numbers are valid. `factor` is the smallest
    constant that a mask is multiplied by on the way, and `half` whether a value on the way is fp16. `copies` is how
    many infinite masks may be added up in one element of a softmax, each counted with its factor, and `finite` the sum
    of the finite masks there.
    """

    reason: str = ""
    factor: float = 1.0
    half: bool = False
    copies: float = 0.0
    finite: float = 0.0

    def also(self, other: MaskDestination) -> MaskDestination:
        """Combine both destinations, for a value with two readers."""
        if self.reason or other.reason:
            return self if self.reason else other
        return MaskDestination("", min(self.factor, other.factor), self.half or other.half,
                               max(self.copies, other.copies), max(self.finite, other.finite))


@dataclass(frozen=True)
class _MaskSum:
    """The masks that may be added up in one element of a value; the names are those of `MaskDestination`."""

    copies: float = 0.0
    finite: float = 0.0


@dataclass(frozen=True)
class _ConstSummary:
    """The magnitudes in a const: `beyond` if any is beyond fp16, `largest` and `smallest` of the rest."""

    beyond: bool
    largest: float
    smallest: float


class MaskFlow:
    """The destinations of the floating-point values that `block` and its nested blocks compute; linear in their ops."""

    def __init__(self, block: Block) -> None:
        self._ops = list(_iterate_nested_ops(block))
        self._summaries: dict[Var, _ConstSummary] = {}
        self._fates: dict[Var, MaskDestination] = {}
        self._compute_destinations(self._make_destination)
        self._mask_sums: dict[Var, _MaskSum] = {}
        for op in self._ops:
            if op.op_type in CARRIED_INPUTS and not is_opaque(op) and not self.find_destination(op.outputs[0]).reason:
                self._mask_sums.update(dict.fromkeys(op.outputs, self._compute_mask_sum(op)))
        self._compute_destinations(self._make_counted_destination)

    def find_destination(self, var: Var) -> MaskDestination:
        """Return the destination of `var`; a value added after the block was analysed belongs to another block."""
        return self._fates.get(var, MaskDestination(f"'{var.name}' is computed elsewhere"))

    def beyond(self, var: Var) -> bool:
        """Return whether the const has numbers that fp16 cannot represent, or that are nearly its largest."""
        return self._get_summary(var).beyond

    def _compute_destinations(self, sink: Callable[[Var], MaskDestination]) -> None:
        """Compute every value's destination from those of the values computed from it, last op first."""
        for op in reversed(self._ops):
            for var in op.outputs:
                if get_type_info(var).is_tensor or types.is_scalar(var.sym_type):
                    self._fates[var] = self._of(var, sink)

    def _of(self, var: Var, sink: Callable[[Var], MaskDestination]) -> MaskDestination:
        if var.consuming_blocks:
            return MaskDestination(f"'{var.name}' is an output as well")
        readers = get_consumers(var)
        fate = self._follow_reader(readers[0], var, sink) if readers else MaskDestination(f"nothing reads '{var.name}'")
        for reader in readers[1:]:
            if fate.reason:
                break
            fate = fate.also(self._follow_reader(reader, var, sink))
        return replace(fate, half=fate.half or get_type_info(var).dtype == types.fp16)

    def _follow_reader(self, op: Operation, var: Var, sink: Callable[[Var], MaskDestination]) -> MaskDestination:
        """Return the destination of `var` through one of its readers."""
        as_what = {name for name, bound in op.inputs.items() if bound is var or _is_among(var, bound)}
        if not is_opaque(op):
            if as_what == {_MASKED_INPUTS.get(op.op_type)}:
                test = _find_nan_test(op.outputs[0])
                return sink(var) if test is None else MaskDestination(
                    f"{test.op_type} '{test.outputs[0].name}' tells by NaN which rows are masked throughout")
            if (
                op.op_type in CARRIED_INPUTS
                and as_what <= {*CARRIED_INPUTS[op.op_type]}
                and types.is_float(op.outputs[0].dtype)
            ):
                return self._follow_carrier(op, var)
        return MaskDestination(
            f"reaches {op.op_type} '{op.outputs[0].name if op.outputs else op.name}', which is no softmax"
        )

    def _follow_carrier(self, op: Operation, var: Var) -> MaskDestination:
        fate = self.find_destination(op.outputs[0])
        for out in op.outputs[1:]:
            fate = fate.also(self.find_destination(out))
        if fate.reason or op.op_type not in ("mul", "real_div"):
            return fate
        other = op.y if op.x is var else op.x
        if not is_const(other):
            return MaskDestination(f"is scaled by a computed value in {op.op_type} '{op.outputs[0].name}'")
        scan = self._get_summary(other)
        return replace(fate, factor=fate.factor * min(
            1.0, scan.smallest if op.op_type == "mul" else 1 / max(scan.largest, 1.0)))

    def _make_destination(self, var: Var) -> MaskDestination:
        return MaskDestination(half=get_type_info(var).dtype == types.fp16)

    def _make_counted_destination(self, var: Var) -> MaskDestination:
        load = self._mask_sums.get(var, _MaskSum())
        return replace(self._make_destination(var), copies=load.copies, finite=load.finite)

    def _compute_mask_sum(self, op: Operation) -> _MaskSum:
        """Compute the masks in the result of an op: sums add them, selections take the larger, factors scale them."""
        loads = [self._held(var) for var in _iterate_operands(op)]
        if op.op_type in ("add", "sub") and not _is_outside_band(op):
            return _MaskSum(sum(load.copies for load in loads), sum(load.finite for load in loads))
        if op.op_type == "mul":
            return self._multiply_mask_sum(op)
        return _MaskSum(max(load.copies for load in loads), max(load.finite for load in loads))

    def _multiply_mask_sum(self, op: Operation) -> _MaskSum:
        const, other = (op.x, op.y) if is_const(op.x) else (op.y, op.x)
        if not is_const(const):
            return _MaskSum()
        scan, load = self._get_summary(const), self._held(other)
        own = scan.largest if scan.largest >= _MIN_MASK_FACTOR else 0.0
        if scan.beyond:  # times a mask of 0 and 1, not times another mask
            return _MaskSum(max(load.copies * FP16_MAX, 1.0), own)
        by = max(1.0, scan.largest)
        return _MaskSum(load.copies * by, max(load.finite * by, own))

    def _held(self, var: Var) -> _MaskSum:
        if not is_const(var):
            return self._mask_sums.get(var, _MaskSum())
        scan = self._get_summary(var)
        return _MaskSum(float(scan.beyond), scan.largest)

    def _get_summary(self, var: Var) -> _ConstSummary:
        if var not in self._summaries:
            self._summaries[var] = _summarize_const(np.asarray(var.val))
        return self._summaries[var]


def can_hold_mask(op: Operation, small: int) -> bool:
    """Return whether a const of `op` is beyond fp16 or larger than `small` bytes, and may turn out to be a mask."""
    return any(
        count_const_bytes(var) > small or _summarize_const(np.asarray(var.val)).beyond
        for _, var in iterate_float_constants(op)
    )


def iterate_float_constants(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the floating-point consts whose elements become elements of the result, each with its input name."""
    for name in CARRIED_INPUTS[op.op_type]:
        bound = op.inputs.get(name)
        for var in bound if isinstance(bound, (list, tuple)) else [bound]:
            if is_const(var) and types.is_float(var.dtype):
                yield name, var


def find_non_binary_factor(op: Operation) -> Var | None:
    """Return the factor or divisor of a constant mask in `op` if it may be a number other than 0 and 1, else None.

    A product that a softmax reads without anything added is a score.
    """
    if op.op_type not in ("mul", "real_div"):
        return None
    factor: Var = op.y if is_const(op.x) else op.x
    scores = any(reader.op_type == "softmax" for reader in get_consumers(op.outputs[0]))
    return None if op.op_type == "mul" and not scores and _has_only_integers(factor) else factor


def _has_only_integers(factor: Var) -> bool:
    """Return whether `factor` has only integers, as masks do. The model's inputs are assumed to be as declared."""
    pending, seen = [factor], set[Var]()
    while pending and len(seen) < _MAX_VALUES_VISITED:
        var = pending.pop()
        seen.add(var)
        if not types.is_float(var.dtype) or var.op is None or var.op.op_type in _ROUNDING_OPS:
            continue
        if is_const(var):
            if not np.array_equal(var.val, np.round(var.val)):
                return False
        elif var.op.op_type in _INTEGER_PRESERVING_INPUTS and var.op.op_type != "real_div" and not is_opaque(var.op):
            pending += [each for each in _iterate_operands(var.op) if each not in seen]
        else:
            return False
    return not pending


def replace_infinities(values: Any, level: float, above: bool = True) -> Any:
    """Replace values beyond fp16 by `level` with their sign; without `above`, replace only negative ones."""
    values = np.asarray(values)
    beyond = (np.abs(values) if above else -values) >= FP16_MAX
    changed = np.where(beyond, np.copysign(values.dtype.type(level), values), values)
    return changed.astype(values.dtype)[()]


def has_softmax(block: Block) -> bool:
    """Return whether `block` or a nested block has an op in which a mask ends."""
    return any(op.op_type in _MASKED_INPUTS or any(map(has_softmax, op.blocks)) for op in block.operations)


def count_const_bytes(var: Var) -> int:
    """Count the bytes of a const without reading them."""
    return int(np.prod(var.shape, dtype=object)) * int(np.dtype(types.nptype_from_builtin(var.dtype)).itemsize)


def _summarize_const(values: np.ndarray[Any, Any]) -> _ConstSummary:
    if not values.size:
        return _ConstSummary(False, 0.0, 0.0)
    low, high = float(np.min(values)), float(np.max(values))
    if max(abs(low), abs(high)) < FP16_MAX and low != high:
        return _ConstSummary(False, max(abs(low), abs(high)), float(np.min(np.abs(values))))
    sizes = np.abs(values)
    rest = sizes[sizes < FP16_MAX]
    beyond = bool(np.any(sizes >= FP16_MAX))
    return _ConstSummary(beyond, float(np.max(rest, initial=0.0)), float(np.min(rest, initial=FP16_MAX)))


def _iterate_operands(op: Operation) -> Iterable[Var]:
    for name in _INTEGER_PRESERVING_INPUTS[op.op_type]:
        bound = op.inputs.get(name)
        yield from bound if isinstance(bound, (list, tuple)) else [] if bound is None else [bound]


def _find_nan_test(var: Var) -> Operation | None:
    """Find the op that compares `var` with itself, as `nan_to_num` does, also after a cast; None if not found."""
    for reader in get_consumers(var):
        if reader.op_type in ("equal", "not_equal") and reader.x is reader.y:
            return reader
        behind = _find_nan_test(reader.outputs[0]) if reader.op_type == "cast" else None
        if behind is not None:
            return behind
    return None


def _is_outside_band(op: Operation) -> bool:
    """Return whether `op` is x - band_part(x): the elements outside the band."""
    band = op.y.op
    return op.op_type == "sub" and band is not None and band.op_type == "band_part" and band.x is op.x


def _is_among(var: Var, bound: Any) -> bool:
    return isinstance(bound, (list, tuple)) and any(each is var for each in bound)


def _iterate_nested_ops(block: Block) -> Iterator[Operation]:
    """Yield every op; the ops of nested blocks come before the op that contains them, after all that they read."""
    for op in block.operations:
        for inner in op.blocks:
            yield from _iterate_nested_ops(inner)
        yield op
