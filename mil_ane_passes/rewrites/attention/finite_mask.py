"""Make infinite masks finite before a softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_consumers, get_type_info, is_const, is_opaque, iterate_ops_inside_out
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Severity, Vendor
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import make_example, make_weight
from ...utils.errors import InputError

_MAX_MASK_SUM, _MIN_MASK_MARGIN = 62500.0, 1000.0
"Maximum sum of masks in fp16, with headroom for scores; minimum margin of a mask below every score it masks."
_UNDERFLOW = 745.0
"exp of anything below minus this number is 0 in every precision."
_SPREAD, _MAX_INPUT = 10.0, 30.0
"""For inputs up to M, at most `_MAX_INPUT`, scores lie within `_SPREAD` M^2 of each other. Where elements of queries
and keys are M in size, their product over the root of their length deviates by M^2 whatever the length, and two of them
lie within 10 M^2, which is 7 deviations of their difference. At `value=-1e4` the largest M is 30."""
_MAX_VALUE = 60000.0
"Largest magnitude of `value`, so that adding a score does not overflow."
_MAX_SEARCHED_BYTES = 1 << 16
"""Largest size in bytes of a const that is searched for infinities although it does not reach a softmax.

The search only serves the report of the reason.
"""
_FP16_MAX = 65504.0
"The largest finite number of fp16; a mask of that magnitude, infinite or not, leaves no headroom for a score."
_MIN_MASK_FACTOR = 1000.0
"Minimum constant factor for which a product counts as a mask: its other factor then selects positions, not magnitudes."
_MOVING_OPS = (
    "cast", "clip", "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index", "slice_by_size", "tile",
    "split", "gather", "gather_along_axis", "gather_nd", "reverse", "identity", "band_part",
)
_CARRIED_INPUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_MOVING_OPS, ("x",)),
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum"), ("x", "y")),
    "real_div": ("x",),
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
_INTEGER_PRESERVING_INPUTS = {**_CARRIED_INPUTS, **dict.fromkeys(("abs", "relu", "square"), ("x",))}
"Ops that turn integers into integers, except for a division, with the inputs concerned."
_ROUNDING_OPS = ("round", "floor", "ceil", "sign")
_MAX_VALUES_VISITED = 64
"Maximum number of values to visit to infer whether a factor has only integers."
_MASKED_INPUTS = {"softmax": "x", "scaled_dot_product_attention": "attn_mask"}
"Ops that suppress masked elements, and the input with the mask."
_MAX_SCORE = 4000.0
"Largest score in the examples: beyond it, a masked score could exceed one that is not masked."
_ROWS, _KEYS = 3, 8
"Rows and keys of the examples."
_MINUS_INF = np.float16(-np.inf)


class FiniteMask(BlockRewrite):
    """Replace -inf, and values beyond fp16, in additive masks by a finite number with the same effect.

    why     The ANE treats infinities as ordinary numbers in a softmax. In fp16 a mask of -1e9 or finfo(float32).min
            becomes -inf on any machine; 0 * -inf in (1 - mask) * -inf is NaN, and so is the softmax of a row of -inf.
    when    A const with magnitudes of 65504 or more is added, multiplied, selected, filled in or gathered, in fp16 or
            before a cast to it, and all users of the result end in a softmax (or the mask of an attention op). Such
            elements become `value`; if a finite mask reaches the same softmax, they become lower than that mask, within
            the range of fp16. Skipped: masks with other users (a test for -inf, a maximum, an output), masks whose
            softmax is tested for NaN, masks scaled by computed numbers that are not integers, and bounds of scores.
    exact   rounding, in effect: a masked weight is exactly 0 before and after. Only an entirely masked row changes: NaN
            becomes the softmax of its scores, or equal weights if the mask replaced them, as for finite masks. Verified
            for inputs up to 30 (at -1e3 up to 5): larger queries and keys may have scores that exceed the mask. Apple
            writes -1e4 (ml-ane-transformers) and -4e4 (coreai-models).
    cost    none at run time; a const with other users is stored in addition to the new one.

    before
        %0: bool[2, 1, 8] = greater(x=%m, y=0.0)
        %1: fp16[2, 1, 8] = cast(x=%0, dtype=fp16)
        %2: fp16[2, 1, 8] = sub(x=1.0, y=%1)
        %3: fp16[2, 1, 8] = mul(x=%2, y=-inf)
        %4: fp16[2, 3, 8] = add(x=%x, y=%3)
        %y: fp16[2, 3, 8] = softmax(x=%4)
    after
        %0: bool[2, 1, 8] = greater(x=%m, y=0.0)
        %1: fp16[2, 1, 8] = cast(x=%0, dtype=fp16)
        %2: fp16[2, 1, 8] = sub(x=1.0, y=%1)
        %3: fp16[2, 1, 8] = mul(x=%2, y=-10000.0)
        %4: fp16[2, 3, 8] = add(x=%x, y=%3)
        %y: fp16[2, 3, 8] = softmax(x=%4)
    """

    code, slug = "ANE310", "infinite-mask"
    severity = Severity.WRONG
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = ("none if the scores of a row are within 8000 of each other (at value=-1e4), because a masked weight is "
             "then 0 in every precision; an entirely masked row: an fp16 score beside -1e4 is rounded to a multiple "
             "of 8")
    preset = "safe"
    fixes_nonfinite = True
    within = (0.0, _MAX_INPUT)  # range of a model's inputs; less where a hit's mask is smaller
    evidence = (
        cite_apple_authoring_rules("the ANE does not handle minus infinity in softmax correctly; masks use -40000"),
        Vendor("attention masks for the ANE are -1e4 for masked positions",
               source="https://github.com/apple/ml-ane-transformers", date="2022"),
        Community("the exponent field of all ones is read as an ordinary one: infinity is 2**16, NaN 1.5 * 2**16",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6"),
        Community("a mask of -1e9 is minus infinity in fp16: NaN on the CPU, another value on the ANE",
                  source="https://github.com/cactus-compute/cactus/pull/734"),
    )

    value: float = -1e4
    "The value that replaces a masked score or is added to it: -60000 to -1000."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not -_MAX_VALUE <= self.value <= -_MIN_MASK_MARGIN:
            raise InputError(f"finite_mask: option 'value' is {self.value:g}; expected -60000 to -1000")
        if not _has_softmax(block):
            return
        flow = None
        for op in block.operations:
            is_carrier = op.op_type in _CARRIED_INPUTS and not is_opaque(op) and len(op.outputs) == 1
            if is_carrier and _can_hold_mask(op):
                flow = flow or _MaskFlow(block)  # expensive, so only if there may be a mask
                match = self._match_op(op, flow)
                if match is not None:
                    yield match

    def _match_op(self, op: Operation, flow: _MaskFlow) -> Hit | Miss | None:
        destination = flow.find_destination(op.outputs[0])
        infinite = [
            (name, var)
            for name, var in _iterate_float_constants(op)
            if (not destination.reason or _count_const_bytes(var) <= _MAX_SEARCHED_BYTES) and flow.is_beyond_fp16(var)
        ]
        if op.op_type == "minimum":  # an upper bound, which masks nothing, would clip scores
            infinite = [(name, var) for name, var in infinite if np.min(var.val) <= -_FP16_MAX]
        if not infinite or op.op_type == "maximum":  # the larger of a value and minus infinity is the value
            return None
        if destination.reason:
            return Miss(op, f"an infinite constant, but {destination.reason}")
        if not destination.half:
            return Miss(op, "the mask and its softmax are fp32, which represents such values")
        if (factor := _find_non_binary_factor(op)) is not None:
            return Miss(op, f"the infinite constant is scaled by '{factor.name}', which may not be a 0/1 mask")
        return self._match_level(op, infinite, destination)

    def _match_level(self, op: Operation, infinite: list[tuple[str, Var]], destination: _MaskDestination) -> Hit | Miss:
        """Match the level that replaces the `infinite` constants: below every score and, summed up, within fp16."""
        level, factor, finite = self._choose_level(destination), destination.factor, destination.finite
        margin = level * factor - finite
        if margin < _MIN_MASK_MARGIN:
            beside = f", beside a finite mask of {-finite:g}" if finite >= _MIN_MASK_MARGIN else ""
            return Miss(op, f"the mask is scaled by {factor:g} on its way{beside}: {-level * factor:g} would not mask "
                            f"every score, and fp16 has no lower values")
        total = max(destination.copies, 1.0) * level + finite
        if total > _MAX_MASK_SUM:
            return Miss(op, f"masks on the way to the same softmax would add up to {-total:g}, which leaves no "
                            f"headroom for scores in fp16; value={self.value:g} is too large for that many masks")
        largest_input = min(_MAX_INPUT, math.sqrt((margin - _UNDERFLOW) / _SPREAD))
        return Hit(op, infinite=infinite, level=level, within=(0.0, largest_input),
                   note=f"what is infinite in fp16 becomes {-level:g}")

    def _choose_level(self, destination: _MaskDestination) -> float:
        """Choose the mask's magnitude: that of `value`, or larger than the finite masks added to it, to outrank
        them."""
        level, factor, finite = abs(self.value), destination.factor, destination.finite
        if level * factor - finite >= _MIN_MASK_MARGIN:
            return level
        return min((finite + level) / factor, (_MAX_MASK_SUM - finite) / max(destination.copies, 1.0))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        op, level = hit.op, hit.level
        above = op.op_type != "minimum"

        def make_finite(var: Var) -> Any:
            return mb.once((var, level, above), lambda: mb.const(
                val=_replace_infinities(var.val, level, above), name=f"{var.name}_finite"))

        finite: dict[Var, Var] = {var: make_finite(var) for _, var in hit.infinite}
        inputs: dict[str, Any] = {}
        for name in {name for name, _ in hit.infinite}:
            bound = op.inputs[name]
            if isinstance(bound, (list, tuple)):
                inputs[name] = [finite.get(each, each) for each in bound]
            else:
                inputs[name] = finite[bound]
        return {op.outputs[0]: rebuild_op(mb, op, **inputs)}

    def examples(self) -> Iterable[Example]:
        yield _make_softmax_example("product", _add_padding_mask)
        for name, mask in _REWRITTEN_EXAMPLES.items():
            yield _make_softmax_example(name, mask)
        yield make_example("attention op", _build_masked_attention, within=40.0, opset=ct.target.iOS18, x=(2, _KEYS, 4),
                           m=(2, 1, _KEYS))
        yield _make_softmax_example("another value", _add_padding_mask, options={"value": -4e4})
        yield _make_softmax_example("below a finite mask", _add_infinite_and_finite_mask)
        yield from _iterate_unchanged_examples()
        yield _make_softmax_example(
            "two of -40000", _add_causal_and_padding_mask, options={"value": -4e4},
            reason="masks on the way to the same softmax would add up to -80000, which leaves no headroom for scores "
                   "in fp16; value=-40000 is too large for that many masks")


def _has_softmax(block: Block) -> bool:
    """Return whether `block` or a nested block has an op in which a mask ends."""
    return any(op.op_type in _MASKED_INPUTS or any(map(_has_softmax, op.blocks)) for op in block.operations)


def _can_hold_mask(op: Operation) -> bool:
    """Return whether a const of `op` is beyond fp16, or so large that it is read only where it reaches a softmax."""
    return any(
        _count_const_bytes(var) > _MAX_SEARCHED_BYTES or _summarize_const(np.asarray(var.val)).beyond
        for _, var in _iterate_float_constants(op)
    )


def _iterate_float_constants(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the floating-point consts whose elements become elements of the result, each with its input name."""
    for name in _CARRIED_INPUTS[op.op_type]:
        bound = op.inputs.get(name)
        for var in bound if isinstance(bound, (list, tuple)) else [bound]:
            if is_const(var) and types.is_float(var.dtype):
                yield name, var


def _count_const_bytes(var: Var) -> int:
    """Count the bytes of a const without reading them."""
    return int(np.prod(var.shape, dtype=object)) * int(np.dtype(types.nptype_from_builtin(var.dtype)).itemsize)


def _find_non_binary_factor(op: Operation) -> Var | None:
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


def _iterate_operands(op: Operation) -> Iterable[Var]:
    for name in _INTEGER_PRESERVING_INPUTS[op.op_type]:
        bound = op.inputs.get(name)
        if bound is not None:
            yield from bound if isinstance(bound, (list, tuple)) else [bound]


def _replace_infinities(values: Any, level: float, above: bool) -> Any:
    """Replace values beyond fp16 by `level` with their sign; without `above`, replace only negative ones."""
    values = np.asarray(values)
    beyond = (np.abs(values) if above else -values) >= _FP16_MAX
    changed = np.where(beyond, np.copysign(values.dtype.type(level), values), values)
    return changed.astype(values.dtype)[()]


@dataclass(frozen=True)
class _MaskDestination:
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

    def merge(self, other: _MaskDestination) -> _MaskDestination:
        """Combine both destinations, for a value with two readers."""
        if self.reason or other.reason:
            return self if self.reason else other
        return _MaskDestination("", min(self.factor, other.factor), self.half or other.half,
                               max(self.copies, other.copies), max(self.finite, other.finite))


@dataclass(frozen=True)
class _MaskSum:
    """The masks that may be added up in one element of a value; the names are those of `_MaskDestination`."""

    copies: float = 0.0
    finite: float = 0.0


@dataclass(frozen=True)
class _ConstSummary:
    """The magnitudes in a const: `beyond` if any is beyond fp16, `largest` and `smallest` of the rest."""

    beyond: bool
    largest: float
    smallest: float


class _MaskFlow:
    """The destinations of the floating-point values that `block` and its nested blocks compute; linear in their ops."""

    def __init__(self, block: Block) -> None:
        self._ops = list(iterate_ops_inside_out(block))
        self._summaries: dict[Var, _ConstSummary] = {}
        self._destinations: dict[Var, _MaskDestination] = {}
        self._compute_destinations(self._make_destination)
        self._mask_sums: dict[Var, _MaskSum] = {}
        for op in self._ops:
            if op.op_type in _CARRIED_INPUTS and not is_opaque(op) and not self.find_destination(op.outputs[0]).reason:
                self._mask_sums.update(dict.fromkeys(op.outputs, self._compute_mask_sum(op)))
        self._compute_destinations(self._make_counted_destination)

    def find_destination(self, var: Var) -> _MaskDestination:
        """Return the destination of `var`; a value added after the block was analysed belongs to another block."""
        return self._destinations.get(var, _MaskDestination(f"'{var.name}' is computed elsewhere"))

    def is_beyond_fp16(self, var: Var) -> bool:
        """Return whether the const has numbers that fp16 cannot represent, or that are nearly its largest."""
        return self._get_summary(var).beyond

    def _compute_destinations(self, make_end: Callable[[Var], _MaskDestination]) -> None:
        """Compute every value's destination from those of the values computed from it, last op first.

        `make_end` makes the destination of a value that a softmax reads.
        """
        for op in reversed(self._ops):
            for var in op.outputs:
                if get_type_info(var).is_tensor or types.is_scalar(var.sym_type):
                    self._destinations[var] = self._compute_destination(var, make_end)

    def _compute_destination(self, var: Var, make_end: Callable[[Var], _MaskDestination]) -> _MaskDestination:
        if var.consuming_blocks:
            return _MaskDestination(f"'{var.name}' is also an output")
        readers = get_consumers(var)
        if not readers:
            return _MaskDestination(f"nothing reads '{var.name}'")
        destination = self._follow_reader(readers[0], var, make_end)
        for reader in readers[1:]:
            if destination.reason:
                break
            destination = destination.merge(self._follow_reader(reader, var, make_end))
        return replace(destination, half=destination.half or get_type_info(var).dtype == types.fp16)

    def _follow_reader(
        self, op: Operation, var: Var, make_end: Callable[[Var], _MaskDestination]
    ) -> _MaskDestination:
        """Return the destination of `var` through one of its readers."""
        parameters = {name for name, bound in op.inputs.items() if bound is var or _binds_var(bound, var)}
        if not is_opaque(op) and parameters == {_MASKED_INPUTS.get(op.op_type)}:
            test = _find_nan_test(op.outputs[0])
            return make_end(var) if test is None else _MaskDestination(
                f"{test.op_type} '{test.outputs[0].name}' detects entirely masked rows by NaN")
        carried = () if is_opaque(op) else _CARRIED_INPUTS.get(op.op_type, ())
        if carried and parameters <= {*carried} and types.is_float(op.outputs[0].dtype):
            return self._follow_carrier(op, var)
        return _MaskDestination(
            f"reaches {op.op_type} '{op.outputs[0].name if op.outputs else op.name}', which is not a softmax"
        )

    def _follow_carrier(self, op: Operation, var: Var) -> _MaskDestination:
        destination = self.find_destination(op.outputs[0])
        for output in op.outputs[1:]:
            destination = destination.merge(self.find_destination(output))
        if destination.reason or op.op_type not in ("mul", "real_div"):
            return destination
        other = op.y if op.x is var else op.x
        if not is_const(other):
            return _MaskDestination(f"is scaled by a computed value in {op.op_type} '{op.outputs[0].name}'")
        summary = self._get_summary(other)
        factor = summary.smallest if op.op_type == "mul" else 1 / max(summary.largest, 1.0)
        return replace(destination, factor=destination.factor * min(1.0, factor))

    def _make_destination(self, var: Var) -> _MaskDestination:
        return _MaskDestination(half=get_type_info(var).dtype == types.fp16)

    def _make_counted_destination(self, var: Var) -> _MaskDestination:
        masks = self._mask_sums.get(var, _MaskSum())
        return replace(self._make_destination(var), copies=masks.copies, finite=masks.finite)

    def _compute_mask_sum(self, op: Operation) -> _MaskSum:
        """Compute the masks in the result of an op: sums add them, selections take the larger, factors scale them."""
        operands = [self._get_mask_sum(var) for var in _iterate_operands(op)]
        if op.op_type in ("add", "sub") and not _is_outside_band(op):
            return _MaskSum(sum(each.copies for each in operands), sum(each.finite for each in operands))
        if op.op_type == "mul":
            return self._multiply_mask_sum(op)
        return _MaskSum(max(each.copies for each in operands), max(each.finite for each in operands))

    def _multiply_mask_sum(self, op: Operation) -> _MaskSum:
        const, other = (op.x, op.y) if is_const(op.x) else (op.y, op.x)
        if not is_const(const):
            return _MaskSum()
        summary, masks = self._get_summary(const), self._get_mask_sum(other)
        own = summary.largest if summary.largest >= _MIN_MASK_FACTOR else 0.0
        if summary.beyond:  # times a 0/1 mask, not times another mask
            return _MaskSum(max(masks.copies * _FP16_MAX, 1.0), own)
        factor = max(1.0, summary.largest)
        return _MaskSum(masks.copies * factor, max(masks.finite * factor, own))

    def _get_mask_sum(self, var: Var) -> _MaskSum:
        if not is_const(var):
            return self._mask_sums.get(var, _MaskSum())
        summary = self._get_summary(var)
        return _MaskSum(float(summary.beyond), summary.largest)

    def _get_summary(self, var: Var) -> _ConstSummary:
        if var not in self._summaries:
            self._summaries[var] = _summarize_const(np.asarray(var.val))
        return self._summaries[var]


def _binds_var(bound: Any, var: Var) -> bool:
    return isinstance(bound, (list, tuple)) and any(each is var for each in bound)


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


def _summarize_const(values: np.ndarray[Any, Any]) -> _ConstSummary:
    if not values.size:
        return _ConstSummary(False, 0.0, 0.0)
    low, high = float(np.min(values)), float(np.max(values))
    if max(abs(low), abs(high)) < _FP16_MAX and low != high:
        return _ConstSummary(False, max(abs(low), abs(high)), float(np.min(np.abs(values))))
    sizes = np.abs(values)
    rest = sizes[sizes < _FP16_MAX]
    beyond = bool(np.any(sizes >= _FP16_MAX))
    return _ConstSummary(beyond, float(np.max(rest, initial=0.0)), float(np.min(rest, initial=_FP16_MAX)))


def _make_softmax_example(name: str, mask: Callable[[Var, Var], Var], **settings: Any) -> Example:
    """Make an example of a softmax of `mask` of scores x and of m, a number per key that is positive for visible keys.
    """
    return make_example(name, lambda x, m: Builder.softmax(x=mask(x, m), axis=-1, name="y"), within=_MAX_SCORE,
                        x=(2, _ROWS, _KEYS), m=(2, 1, _KEYS), **settings)


def _make_causal_mask(low: float) -> Any:
    """Make a causal mask: 0 for the keys up to the row's own, `low` beyond."""
    return np.where(np.tri(_ROWS, _KEYS, dtype=bool), 0, low).astype(np.float16)


def _find_visible_keys(m: Var) -> Any:
    return Builder.greater(x=m, y=_make_zero(m))


def _find_hidden_keys(m: Var) -> Any:
    return Builder.less_equal(x=m, y=_make_zero(m))


def _make_zero(m: Var) -> Any:
    return types.nptype_from_builtin(m.dtype)(0)


def _build_padding_mask(m: Var, low: float = -np.inf, dtype: Any = np.float16) -> Any:
    """Build (1 - m) * low."""
    visible = Builder.cast(x=_find_visible_keys(m), dtype="fp16" if dtype is np.float16 else "fp32")
    return Builder.mul(x=Builder.sub(x=dtype(1), y=visible), y=dtype(low))


def _add_padding_mask(x: Var, m: Var) -> Any:
    return Builder.add(x=x, y=_build_padding_mask(m))


def _fill_hidden_keys(x: Var, m: Var) -> Any:
    """Build masked_fill."""
    return Builder.select(cond=_find_hidden_keys(m), a=_MINUS_INF, b=x)


def _select_visible_keys(x: Var, m: Var) -> Any:
    """Build where."""
    return Builder.select(cond=_find_visible_keys(m), a=x, b=np.full((1, _ROWS, _KEYS), _MINUS_INF))


def _add_causal_mask(x: Var, m: Var) -> Any:
    return Builder.add(x=x, y=_make_causal_mask(-np.inf))


def _add_causal_and_padding_mask(x: Var, m: Var) -> Any:
    return Builder.add(x=_add_causal_mask(x, m), y=_build_padding_mask(m))


def _add_infinite_and_finite_mask(x: Var, m: Var) -> Any:
    return Builder.add(x=_add_causal_mask(x, m), y=_build_padding_mask(m, -1e4))


def _add_fp32_mask(x: Var, m: Var) -> Any:
    """Add a mask that is computed in fp32 and cast: minus infinity at run time."""
    return Builder.add(x=x, y=Builder.cast(x=_build_padding_mask(m, -1e9, np.float32), dtype="fp16"))


def _concat_masked_half(x: Var, m: Var) -> Any:
    left, right = Builder.split(x=x, num_splits=2, axis=-1)
    masked = Builder.fill_like(ref_tensor=right, value=_MINUS_INF)
    return Builder.concat(values=[Builder.add(x=left, y=right), masked], axis=-1)


def _add_gathered_mask(x: Var, m: Var) -> Any:
    rows = Builder.cast(x=Builder.greater(x=Builder.reduce_max(x=x, axes=[0, 2]), y=np.float16(0)), dtype="int32")
    return Builder.add(x=x, y=Builder.gather(x=_make_causal_mask(-np.inf), indices=rows, axis=0))


def _add_band_part_mask(x: Var, m: Var) -> Any:
    """Add a causal mask as torch.triu computes it at run time: inf - inf inside the band."""
    shape = Builder.slice_by_index(x=Builder.shape(x=x), begin=[1], end=[3])
    full = Builder.fill(shape=shape, value=_MINUS_INF)
    return Builder.add(x=x, y=Builder.sub(x=full, y=Builder.band_part(x=full, lower=-1, upper=0)))


def _build_masked_attention(x: Var, m: Var) -> Any:
    """Build an attention whose scores are products of inputs, so that inputs have to be smaller."""
    return Builder.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=_build_padding_mask(m), name="y")


_REWRITTEN_EXAMPLES: dict[str, Callable[[Var, Var], Any]] = {
    "masked_fill": _fill_hidden_keys,
    "where": _select_visible_keys,
    "causal": _add_causal_mask,
    "lowest number of fp16": lambda x, m: Builder.add(x=x, y=_make_causal_mask(-_FP16_MAX)),
    "causal and padding": _add_causal_and_padding_mask,
    "in fp32 and cast": _add_fp32_mask,
    "part of a concat": _concat_masked_half,
    "table": _add_gathered_mask,
    "subtracted": lambda x, m: Builder.sub(x=x, y=_build_padding_mask(m, np.inf)),
    "triangle at run time": _add_band_part_mask,
}
"Masks of scores that are rewritten."


def _iterate_unchanged_examples() -> Iterator[Example]:
    """Yield the examples that are not rewritten, with the reasons."""
    yield _make_softmax_example("a lower bound", lambda x, m: Builder.maximum(x=x, y=_MINUS_INF), reason="")
    yield _make_softmax_example("an upper bound", lambda x, m: Builder.minimum(x=x, y=np.float16(_FP16_MAX)), reason="")
    yield _make_softmax_example(
        "times a slope", _scale_mask_by_slope,
        reason="the infinite constant is scaled by 'slope', which may not be a 0/1 mask")
    yield make_example(
        "hard choice", lambda x: Builder.softmax(x=Builder.mul(x=x, y=np.float16(_FP16_MAX)), name="y"), x=(4, 8),
        reason="the infinite constant is scaled by 'x', which may not be a 0/1 mask")
    yield make_example(
        "tested for NaN", _build_nan_test, x=(4, 4),
        reason="an infinite constant, but not_equal 'empty' detects entirely masked rows by NaN")
    yield _make_softmax_example("in range", lambda x, m: Builder.add(x=x, y=_build_padding_mask(m, -100.0)), reason="")
    yield _make_softmax_example(
        "fp32", lambda x, m: Builder.add(x=x, y=_build_padding_mask(m, -1e9, np.float32)), dtype=types.fp32,
        reason="the mask and its softmax are fp32, which represents such values")
    yield _make_softmax_example(
        "no softmax", _add_infinite_weights,
        reason="an infinite constant, but reaches relu 'passed', which is not a softmax")
    yield _make_softmax_example(
        "another reader", _read_masked_twice,
        reason="an infinite constant, but reaches reduce_max 'highest', which is not a softmax")
    yield make_example(
        "output", _return_masked, x=(_ROWS, _KEYS), reason="an infinite constant, but 'masked' is also an output")
    yield _make_softmax_example(
        "scaled down", lambda x, m: Builder.mul(x=_fill_hidden_keys(x, m), y=np.float16(1 / 64)),
        reason="the mask is scaled by 0.015625 on its way: -976.562 would not mask every score, and fp16 has no lower "
               "values")
    yield _make_softmax_example(
        "scaled by a computed value", lambda x, m: Builder.mul(x=_fill_hidden_keys(x, m), y=m, name="scaled"),
        reason="an infinite constant, but is scaled by a computed value in mul 'scaled'")


def _scale_mask_by_slope(x: Var, m: Var) -> Any:
    return Builder.add(x=x, y=Builder.mul(x=Builder.sigmoid(x=m, name="slope"), y=_make_causal_mask(-np.inf)))


def _build_nan_test(x: Var) -> Any:
    weights = Builder.softmax(x=Builder.add(x=x, y=np.tril(np.full((4, 4), _MINUS_INF))))
    is_nan = Builder.not_equal(x=weights, y=weights, name="empty")
    return Builder.select(cond=is_nan, a=np.float16(0), b=weights, name="y")


def _add_infinite_weights(x: Var, m: Var) -> Any:
    weights = np.where(make_weight(_KEYS) > 0, _MINUS_INF, make_weight(_KEYS))
    return Builder.relu(x=Builder.add(x=x, y=weights), name="passed")


def _read_masked_twice(x: Var, m: Var) -> Any:
    masked = _fill_hidden_keys(x, m)
    return Builder.sub(x=masked, y=Builder.reduce_max(x=masked, axes=[-1], keep_dims=True, name="highest"))


def _return_masked(x: Var) -> list[Var]:
    masked = Builder.add(x=x, y=_make_causal_mask(-np.inf), name="masked")
    return [masked, Builder.softmax(x=masked, axis=-1, name="y")]
