"""Pad last axes to a multiple of 64 at the start of a region, and slice at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.large_values import group_by_shared_values
from ...ir.query import get_const_value, get_consumers, get_itemsize, is_const, is_opaque, is_symbolic
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import make_example, make_weight
from ...passes.layout import compute_padded_bytes, format_bytes
from ...utils.text_format import format_count

_UNBOUNDED = float("inf")
"Reach of a padding that may contain infinities or NaN."
_SHRINKING_OPS = ("abs", "atan", "cast", "gelu", "identity", "relu", "relu6", "silu", "sin", "softsign", "tanh",
                  "thresholded_relu")
"|f(x)| <= |x|."
_UNIT_BOUNDED_OPS = ("cos", "sigmoid", "sigmoid_hard", "sign")
"|f(x)| <= 1."
_ZERO_PRESERVING_OPS = ("asin", "atanh", "ceil", "elu", "erf", "floor", "leaky_relu", "round", "sinh", "sqrt",
                        "square", "tan")
"f(0) = 0; elsewhere a small input may give a large or undefined value."
_SMALL_AT_ZERO_OPS = ("acos", "cosh", "exp", "exp2", "softplus")
"|f(0)| < 2; elsewhere as for `_ZERO_PRESERVING_OPS`."
_OTHER_UNARY_OPS = ("batch_norm", "clamped_relu", "clip", "inverse", "linear_activation", "log", "prelu", "rsqrt",
                    "scaled_tanh", "softplus_parametric", "threshold")
_UNARY_OPS = (*_SHRINKING_OPS, *_UNIT_BOUNDED_OPS, *_ZERO_PRESERVING_OPS, *_SMALL_AT_ZERO_OPS, *_OTHER_UNARY_OPS)
_DIVISION_OPS = ("real_div", "floor_div", "mod", "pow")
_BINARY_OPS = ("add", "sub", "mul", "maximum", "minimum", *_DIVISION_OPS)
_REDUCTION_OPS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
_PadFunction = Callable[[Var], Var]
"Returns the padded form of a value."
_MAX_FINITE_REACH = 16384.0
"Largest magnitude of a padding that counts as finite in fp16, sums included."
_SUM_OPS = ("reduce_sum", "reduce_l1_norm", "reduce_l2_norm", "reduce_sum_square")
_POWERS_OF_TWO = np.exp2(np.arange(8)).astype(np.float16)


class PadLastAxis(BlockRewrite):
    """Pad the last axis of regions to a multiple of 64.

    why     One source advises to pad the last axis to a multiple of 64, as "suggestions on bigger neural nets"; no gain
            is published. According to Apple and the author of a driver rows are aligned to 64 bytes, 32 fp16 numbers,
            in any case: padding never reduces the memory of a buffer, and increases it if 64 numbers take more such
            blocks than the row (600 -> 640). A documented gain exists for a longer last axis.
    when    By name only. fp16 rows of static extent above 1, if no row takes more bytes than before (`min_gain`), and
            regions of at least `min_ops` ops per pad and slice. A region contains ops that work element by element or
            on other axes, matmul and linear (also over the last axis, if one padding is zero and the other known to be
            finite), and sums over rows that end in zeros. All other ops end a region. A softmax, norm or mean over the
            last axis would need a mask for the padding: it costs a pass over the data, like the slice, and a softmax
            would need -inf, which the ANE treats as an ordinary number.
    exact   rounding, and bitwise where no sum is formed: padding elements never mix with others. A sum gets exact zeros
            as additional terms, and its terms may be added in a different order.
    cost    a pass over the data for each pad and slice; bytes of new constants up to `max_bytes` for one op.

    before
        %0: fp16[2, 3, 50] = add(x=%x, y=0.5)
        %1: fp16[2, 3, 50] = tanh(x=%0)
        %2: fp16[2, 3, 50] = mul(x=%1, y=%0)
        %y: fp16[2, 3, 50] = relu(x=%2)
    after
        %0: fp16[2, 3, 64] = pad(x=%x, pad=[0, 14])
        %1: fp16[2, 3, 64] = add(x=%0, y=0.5)
        %2: fp16[2, 3, 64] = tanh(x=%1)
        %3: fp16[2, 3, 64] = mul(x=%2, y=%1)
        %4: fp16[2, 3, 64] = relu(x=%3)
        %y: fp16[2, 3, 50] = slice_by_size(x=%4, begin=[0, 0, 0], size=[-1, -1, 50])
    """

    code, slug = "ANE104", "last-axis-not-multiple-of-64"
    stage = "layout"
    exactness = Exactness.ROUNDING
    bound = ("the rounding of one sum with zeros as additional terms, added in a different order; at fp16 the error "
             "against double precision was the same before and after (2.6e-4 for a perceptron, 1.7e-3 for attention)")
    preset = "named"
    evidence = (
        Community(
            "pad the last axis to a multiple of 64: not a requirement, suggestions on bigger nets",
            source="coreml102: Model Surgery Tips (an author of eiln/ane)",
            chip="M1",
        ),
        cite_apple_authoring_rules(
            "the last axis of inputs and outputs is aligned to 64 bytes; values between may tolerate smaller "
            "widths (contradicts it: 32 numbers of fp16, and the padding is there anyway)"
        ),
        Community(
            "row and plane strides are multiples of 64 bytes (a driver for Linux)",
            source="eiln/ane libane/ane.c",
            chip="M1",
        ),
        cite_apple_authoring_rules("the ANE does not handle minus infinity in softmax correctly"),
    )

    multiple: int = 64
    "Last axes are padded to a multiple of this number."
    unit: Literal["elements", "bytes"] = "elements"
    "Unit of `multiple`: 64 elements of fp16 are 128 bytes."
    min_gain: float = 0.0
    "Minimum share of a row's bytes that is saved. Padding saves no bytes: 0 allows no growth, -0.1 a tenth."
    min_ops: int = 2
    "Minimum number of ops of a region for each pad and each slice at its ends."
    max_bytes: int = 1 << 20
    "Maximum bytes of padded constants for one op."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        rows = _RowPadding(self.multiple, self.unit, self.min_gain)
        too_large: dict[Operation, int] = {}
        for region in _iterate_padded_regions(block, rows, self.max_bytes, too_large):
            first, ops = next(iter(region.steps)), len(region.steps)
            if not region.sliced_values and not any(not step.padded_outputs for step in region.steps.values()):
                yield Miss(first, "the region has no users", near=False)
            elif ops < self.min_ops * region.moves:
                pads = format_count(len(region.padded_values), "pad")
                slices = format_count(len(region.sliced_values), "slice")
                yield Miss(first, f"{format_count(ops, 'op')} on padded rows for {pads} and {slices}, "
                                  f"fewer than min_ops {self.min_ops} for each")
            else:
                exact = all(step.exact for step in region.steps.values())
                yield Hit(first, region=region, rows=rows, exactness=Exactness.BITWISE if exact else None,
                          note=_describe_region(region, rows))
        for op, count in too_large.items():
            yield Miss(op, f"its constants would take {format_bytes(count)} padded, more than max_bytes "
                           f"{self.max_bytes}")
        for width, op in rows.unpadded.items():
            yield Miss(op, rows.reason(width))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        region: _PaddedRegion = hit.region
        padded: dict[Var, Var] = {}
        replaced: dict[Var, Var] = {}

        def pad_value(var: Var) -> Var:
            if var not in padded:
                missing = (hit.rows.extent(var) or 0) - int(var.shape[-1])
                padded[var] = mb.pad(x=var, pad=[0, missing], mode="constant", constant_val=np.float16(0))
            return padded[var]

        for op, step in region.steps.items():
            with mb.at(op):
                built = step.build(mb, pad_value)
                outputs = list(built) if isinstance(built, (list, tuple)) else [built]
                _rebind_to_slices(outputs[0].op, replaced)
                if not step.padded_outputs:
                    replaced.update(zip(op.outputs, outputs))
                    continue
                padded.update(zip(op.outputs, outputs))
                for var in step.padded_outputs:
                    if var in region.sliced_values:
                        replaced[var] = _remove_padding(mb, padded[var], var)
        return replaced

    def examples(self) -> Iterable[Example]:
        between = _make_example_between_activations
        scores: Any = {"q": (2, 3, 8), "k": (2, 7, 8)}
        yield _make_activations_example("activations", 50)
        yield make_example("hidden width of a perceptron", _build_perceptron, x=(2, 3, 8))
        yield make_example("scores of queries and keys", _build_attention_scores, options={"multiple": 32}, **scores)
        yield between("a conv of one along the last axis", _build_conv, (1, 4, 2, 50))
        yield between("a sum over zeros",
                      lambda v: Builder.reduce_sum(x=Builder.tanh(x=v), axes=[-1], keep_dims=True))
        yield between("halves joined again", _swap_halves, (8, 4, 8), options={"multiple": 32})
        yield between("rows in a different order", _reorder_rows, (2, 3, 8), options={"multiple": 32})
        yield between("a softmax of another axis", lambda v: Builder.softmax(x=v, axis=1))
        yield between("selected by a constant", lambda v: Builder.select(
            cond=make_weight(8) > 0, a=v, b=np.float16(-2)), (2, 3, 8), options={"multiple": 32})
        yield between("infinities in the padding", lambda v: Builder.mul(
            x=Builder.log(x=v, epsilon=np.float16(0)), y=Builder.real_div(x=v, y=_POWERS_OF_TWO)),
            (2, 3, 8), options={"multiple": 32})
        yield _make_activations_example("by bytes", 20, options={"unit": "bytes"})
        yield _make_activations_example("a row may grow", 20, options={"min_gain": -1.0})
        yield between("two regions around a softmax", lambda v: Builder.tanh(
            x=Builder.exp(x=Builder.softmax(x=v, axis=-1))), options={"min_ops": 1})
        yield make_example("a region behind another", partial(_build_attention_scores, behind=True),
                           options={"multiple": 32, "min_ops": 1}, **scores)
        yield make_example("read as it is, too", _build_self_product, options={"min_ops": 1, "multiple": 32},
                           x=(2, 8, 8))
        yield _make_activations_example("a multiple already", 128, reason="")
        yield _make_activations_example("a row would grow", 20, reason=(
            "a row of 20 padded to 64 takes 128 B in place of 64 B: gain -1, below min_gain 0"))
        yield make_example("a pad and a slice for one op", lambda x: Builder.tanh(x=x, name="y"), x=(2, 50),
                           reason="1 op on padded rows for 1 pad and 1 slice, fewer than min_ops 2 for each")
        yield make_example("symbolic", lambda x: Builder.tanh(x=x, name="y"), x=(2, None),
                           reason="the last axis is symbolic: the amount of padding is unknown")
        yield make_example("large constants", _build_perceptron, options={"max_bytes": 1000}, x=(2, 3, 8),
                           reason="its constants would take 1.28 kB padded, more than max_bytes 1000")


@dataclass
class _RowPadding:
    """The extents that are padded: to a multiple of `multiple` elements or bytes (`unit`).

    Rows are padded where the gain in bytes is at least `min_gain`. `unpadded` has the first op that computes rows of an
    extent for which that fails.
    """

    multiple: int
    unit: Literal["elements", "bytes"]
    min_gain: float
    unpadded: dict[int, Operation] = field(default_factory=dict)
    "Keyed by extent; 0 is a symbolic one."
    reaches: dict[Var, float] = field(default_factory=dict)
    "The largest magnitude in the padding of each value that is computed padded."

    def get_reach(self, var: Var) -> float:
        """Return the largest magnitude in the padding of `var`; a value that is not computed padded gets zeros."""
        return self.reaches.get(var, 0.0)

    def extent(self, var: Var) -> int | None:
        """Return the extent to which the last axis of `var` is padded; None where it is not padded."""
        if not types.is_tensor(var.sym_type) or var.dtype != types.fp16 or not var.rank or is_symbolic(var.shape[-1]):
            return None
        width = int(var.shape[-1])
        wide = self.rounded(width, get_itemsize(var))
        return wide if width > 1 and wide > width and self.compute_gain(width, wide) >= self.min_gain else None

    def rounded(self, width: int, size: int) -> int:
        step = self.multiple if self.unit == "elements" else max(1, self.multiple // size)
        return -(-width // step) * step

    @staticmethod
    def compute_gain(width: int, wide: int) -> float:
        """Compute the share of a row's bytes that padding `width` fp16 numbers to `wide` saves; negative for a loss."""
        return 1 - compute_padded_bytes((wide,), 2) / compute_padded_bytes((width,), 2)

    def note_unpadded(self, op: Operation) -> None:
        """Record `op` where the rows it computes are not padded because of their bytes or of a symbolic extent."""
        for var in op.outputs:
            if not types.is_tensor(var.sym_type) or var.dtype != types.fp16 or not var.rank:
                continue
            if is_symbolic(var.shape[-1]):
                self.unpadded.setdefault(0, op)
            elif int(var.shape[-1]) > 1 and self.extent(var) is None:
                width = int(var.shape[-1])
                if self.rounded(width, get_itemsize(var)) > width:
                    self.unpadded.setdefault(width, op)

    def reason(self, width: int) -> str:
        """Return why rows of `width` are not padded."""
        if not width:
            return "the last axis is symbolic: the amount of padding is unknown"
        wide = self.rounded(width, 2)
        before, after = (format_bytes(compute_padded_bytes((each,), 2)) for each in (width, wide))
        return (f"a row of {width} padded to {wide} takes {after} in place of {before}: gain "
                f"{self.compute_gain(width, wide):.3g}, below min_gain {self.min_gain:g}")

    def pad_const(self, mb: RewriteBuilder, const: Var, axes: Mapping[int, int], fill: float = 0) -> Var:
        """Pad const `const` with `fill` after each axis of `axes` (from the end) to its new extent, once for all
        users."""
        amounts = [(0, axes.get(at - const.rank, int(extent)) - int(extent)) for at, extent in enumerate(const.shape)]
        what = "_".join(f"{-axis}_to_{wide}" for axis, wide in axes.items())
        return mb.weight(const, f"{what}_{fill:g}" if fill else what,
                         lambda: np.pad(np.asarray(const.val), amounts, constant_values=fill))

    def count_padded_bytes(self, var: Var, axes: Mapping[int, int]) -> int:
        """Count the bytes of const `var` as `pad_const` makes it; 0 where it is not a const."""
        extents = [axes.get(at - var.rank, extent) for at, extent in enumerate(var.shape)]
        return prod(extents) * get_itemsize(var) if is_const(var) else 0


def _iterate_padded_regions(
    block: Block, rows: _RowPadding, max_bytes: int, too_large: dict[Operation, int]
) -> Iterator[_PaddedRegion]:
    """Yield the regions of one block; linear in its ops.

    `too_large` collects the ops whose constants would exceed `max_bytes`.
    """
    steps: dict[Operation, _PaddedStep] = {}
    for op in block.operations:
        step = None if op.op_type == "const" else _plan_padded_op(op, rows)
        if step is None:
            if op.op_type != "const":
                rows.note_unpadded(op)
        elif step.constants > max_bytes:
            too_large[op] = step.constants
        else:
            steps[op] = step
            rows.reaches.update(dict.fromkeys(step.padded_outputs, step.reach))
    for members in group_by_shared_values({op: step.values for op, step in steps.items()}):
        region = _PaddedRegion({op: steps[op] for op in members})
        made = {var for op in members for var in steps[op].padded_outputs}
        region.padded_values = [var for var in region.values if var not in made]
        region.sliced_values = [var for var in region.values if var in made and _is_needed_unpadded(var, region.steps)]
        yield region


@dataclass
class _PaddedRegion:
    """Ops connected by padded values: `steps` in block order.

    `padded_values` are padded where they enter, `sliced_values` sliced where they leave.
    """

    steps: dict[Operation, _PaddedStep] = field(default_factory=dict)
    padded_values: list[Var] = field(default_factory=list)
    sliced_values: list[Var] = field(default_factory=list)

    @property
    def moves(self) -> int:
        return len(self.padded_values) + len(self.sliced_values)

    @property
    def values(self) -> list[Var]:
        """All padded values, except consts."""
        return list(dict.fromkeys(var for step in self.steps.values() for var in step.values))


@dataclass(frozen=True)
class _PaddedStep:
    """One op on padded rows.

    `padded_inputs` are the values it reads padded, `padded_outputs` those it computes padded, `unpadded_inputs` those
    it reads without padding although they are rows as well. `reach` is the largest magnitude in the padding it
    produces: 0 for zeros, `_UNBOUNDED` where that is not known to be finite. `build` builds the op from its current
    inputs, as another region may have replaced a value named here. `constants` are the bytes of consts that it needs
    padded. With `exact` no sum is formed, so not even an order of roundings changes.
    """

    padded_inputs: tuple[Var, ...]
    padded_outputs: tuple[Var, ...]
    build: Callable[[RewriteBuilder, _PadFunction], Any]
    reach: float = _UNBOUNDED
    constants: int = 0
    exact: bool = True
    unpadded_inputs: tuple[Var, ...] = ()

    @property
    def values(self) -> tuple[Var, ...]:
        return *self.padded_inputs, *self.padded_outputs


def _plan_padded_op(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan how `op` is carried on padded rows; None where it cannot be carried."""
    if is_opaque(op) or op.blocks:
        return None
    if op.op_type in ("matmul", "linear"):
        return _plan_product(op, rows)
    plan = _PLANNERS.get(op.op_type)
    if plan is None or not all(rows.extent(var) for var in op.outputs):
        return _plan_row_sum(op, rows) if op.op_type.startswith("reduce_") else None
    step = plan(op, rows)
    if step is None or step.reach <= _MAX_FINITE_REACH:
        return step
    return replace(step, reach=_UNBOUNDED)


def _plan_product(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a matmul or linear: the summed axis may be padded on both sides, and so may the columns of the result.

    A padding that is summed over has to be exactly zero on one side and known to be finite on the other.
    """
    sides = _read_factors(op)
    if sides is None:
        return None
    x, y, inner_last, columns_at = sides
    inner = rows.extent(x) if inner_last and _can_sum_padding(x, y, columns_at, rows) else None
    has_padded_columns = is_const(y) or (columns_at == -1 and rows.extent(y) is not None)
    columns = rows.extent(op.outputs[0]) if has_padded_columns else None
    if inner is None and columns is None:
        return None
    padded = [*([x] if inner is not None else []), *([] if is_const(y) else [y])]
    axes = {axis: wide for axis, wide in ((-3 - columns_at, inner), (columns_at, columns)) if wide is not None}

    def build_op(mb: Any, pad: _PadFunction) -> Any:
        changed: dict[str, Any] = {"x": pad(op.x)} if inner is not None else {}
        name = "weight" if op.op_type == "linear" else "y"
        if is_const(y):
            changed[name] = rows.pad_const(mb, y, axes)
        else:
            changed[name] = pad(op.inputs[name])
        bias = op.inputs.get("bias")
        if bias is not None and columns is not None:
            changed["bias"] = rows.pad_const(mb, bias, {-1: columns})
        return rebuild_op(mb, op, **changed)

    outputs = tuple(op.outputs) if columns is not None else ()
    return _PaddedStep(tuple(dict.fromkeys(padded)), outputs, build_op, _UNBOUNDED, rows.count_padded_bytes(y, axes),
                       exact=False, unpadded_inputs=(x,) if inner is None else ())


def _read_factors(op: Operation) -> tuple[Var, Var, bool, int] | None:
    """Return both factors, whether the last axis of the first is summed over, and the axis of the second's columns."""
    if op.op_type == "linear":
        bias = op.inputs.get("bias")
        return (op.x, op.weight, True, -2) if is_const(op.weight) and (bias is None or is_const(bias)) else None
    if op.x.rank < 2 or op.y.rank < 2 or is_const(op.x) or _is_compressed_weight(op.x) or _is_compressed_weight(op.y):
        return None
    return op.x, op.y, not get_const_value(op.transpose_x, False), -2 if get_const_value(op.transpose_y, False) else -1


def _is_compressed_weight(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("constexpr_")


def _can_sum_padding(x: Var, y: Var, columns_at: int, rows: _RowPadding) -> bool:
    if x not in rows.reaches or rows.extent(x) is None:
        return False
    reach = rows.reaches[x]
    if is_const(y):
        return reach < _UNBOUNDED
    if columns_at == -1 or y not in rows.reaches:
        return False
    return max(reach, rows.reaches[y]) < _UNBOUNDED and 0 in (reach, rows.reaches[y])


def _plan_unary(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    if rows.extent(op.x) is None or (op.op_type in ("batch_norm", "prelu", "softplus_parametric") and op.x.rank < 3):
        return None
    reach = rows.get_reach(op.x)
    if op.op_type in _UNIT_BOUNDED_OPS and reach < _UNBOUNDED:
        return _plan_on_x(op, 1.0)
    if op.op_type in _SHRINKING_OPS:
        return _plan_on_x(op, reach)
    if reach == 0 and op.op_type in (*_ZERO_PRESERVING_OPS, *_SMALL_AT_ZERO_OPS):
        return _plan_on_x(op, 0.0 if op.op_type in _ZERO_PRESERVING_OPS else 2.0)
    return _plan_on_x(op, _UNBOUNDED)


def _plan_on_x(op: Operation, reach: float, *, exact: bool = True, **changes: Any) -> _PaddedStep:
    def build_op(mb: Any, pad: _PadFunction) -> Any:
        return rebuild_op(mb, op, x=pad(op.x), **changes)

    return _PaddedStep((op.x,), tuple(op.outputs), build_op, reach, exact=exact)


def _plan_binary(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    x = _read_operand(op.x, op, rows)
    y = _read_operand(op.y, op, rows, fill=1.0 if op.op_type in _DIVISION_OPS else 0.0)
    return _plan_operands(op, {"x": x, "y": y}, _combine_reaches(op, x, y), rows)


def _read_operand(
    var: Var, op: Operation, rows: _RowPadding, fill: float = 0.0
) -> _Operand | None:
    """Read an input of an elementwise op; None where it can be read neither padded nor unchanged."""
    if not var.rank or _to_fixed_extent(var.shape[-1]) == 1:
        return _Operand(var, _find_largest_magnitude(var))
    if _to_fixed_extent(var.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    if is_const(var):
        return _Operand(var, fill, wide, fill)
    if rows.extent(var) is None or _is_compressed_weight(var):
        return None
    return _Operand(var, rows.get_reach(var), wide)


@dataclass(frozen=True)
class _Operand:
    """An input of an elementwise op: read padded to `wide`, padded as a const with `fill`, or read unchanged (None)."""

    var: Var
    reach: float
    wide: int | None = None
    fill: float = 0.0

    @property
    def is_read_padded(self) -> bool:
        return self.wide is not None and not is_const(self.var)


def _to_fixed_extent(extent: Any) -> int | None:
    """Return a fixed extent as a number; None for a symbolic one."""
    return int(extent) if isinstance(extent, (int, np.integer)) else None


def _find_largest_magnitude(var: Var) -> float:
    """Return the largest magnitude of a const; `_UNBOUNDED` for a const that is not finite, and for a dynamic value."""
    if not is_const(var):
        return _UNBOUNDED
    found = float(np.max(np.abs(np.asarray(var.val, np.float64)), initial=0.0))
    return found if np.isfinite(found) else _UNBOUNDED


def _plan_operands(
    op: Operation, found: dict[str, _Operand | None], reach: float, rows: _RowPadding
) -> _PaddedStep | None:
    operands = {name: each for name, each in found.items() if each is not None}
    if len(operands) < len(found) or not any(each.wide for each in operands.values()):
        return None

    def build_op(mb: Any, pad: _PadFunction) -> Any:
        changed = {}
        for name, each in operands.items():
            if each.is_read_padded:
                changed[name] = pad(op.inputs[name])
            elif each.wide is not None:
                changed[name] = rows.pad_const(mb, each.var, {-1: each.wide}, each.fill)
        return rebuild_op(mb, op, **changed)

    padded = tuple(each.var for each in operands.values() if each.is_read_padded)
    constants = sum(rows.count_padded_bytes(each.var, {-1: each.wide}) for each in operands.values() if each.wide)
    return _PaddedStep(padded, tuple(op.outputs), build_op, reach, constants)


def _combine_reaches(op: Operation, x: _Operand | None, y: _Operand | None) -> float:
    one, other = (_UNBOUNDED if each is None else each.reach for each in (x, y))
    if _UNBOUNDED in (one, other):
        return _UNBOUNDED
    if op.op_type in ("add", "sub"):
        return one + other
    if op.op_type == "mul":
        return one * other
    if op.op_type in ("maximum", "minimum"):
        return max(one, other)
    padded_by_one = op.op_type == "real_div" and is_const(op.y) and op.y.rank and int(op.y.shape[-1]) > 1
    return one if padded_by_one else _UNBOUNDED


def _plan_reduce(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a reduction of other axes than the last."""
    axes = get_const_value(op.axes)
    if not axes or _has_last_axis(op.x, axes) or rows.extent(op.x) is None:
        return _plan_row_sum(op, rows)
    reach = rows.get_reach(op.x)
    return _plan_on_x(op, _UNBOUNDED if op.op_type == "reduce_sum" and reach else reach, exact=False)


def _has_last_axis(var: Var, axes: Iterable[int]) -> bool:
    """Return whether the last axis of `var` is among `axes`."""
    return any(axis % var.rank == var.rank - 1 for axis in axes)


def _plan_row_sum(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a sum over the last axis of rows that are padded with zeros."""
    axes = get_const_value(op.axes) if op.op_type in _SUM_OPS and op.inputs.get("axes") is not None else [-1]
    if op.op_type not in _SUM_OPS or rows.reaches.get(op.x) != 0 or not _has_last_axis(op.x, axes):
        return None
    return _PaddedStep((op.x,), (), lambda mb, pad: rebuild_op(mb, op, x=pad(op.x)), 0.0, exact=False)


def _plan_axis_change(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan an expand_dims or squeeze that keeps the last axis the last."""
    axes = get_const_value(op.axes)
    longer = op.x if op.op_type == "squeeze" else op.outputs[0]
    if axes is None or rows.extent(op.x) is None or _has_last_axis(longer, axes):
        return None
    return _plan_on_x(op, rows.get_reach(op.x))


def _plan_join(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a concat or stack on another axis than the last."""
    axis, wide = get_const_value(op.axis), rows.extent(op.outputs[0])
    if axis is None or _has_last_axis(op.outputs[0], [axis]) or wide is None:
        return None
    if any(map(_is_compressed_weight, op.values)):
        return None
    padded = tuple(dict.fromkeys(var for var in op.values if not is_const(var)))
    if any(rows.extent(var) is None for var in padded):
        return None

    def build_op(mb: Any, pad: _PadFunction) -> Any:
        return rebuild_op(mb, op, values=[
            rows.pad_const(mb, var, {-1: wide}) if is_const(var) else pad(var) for var in op.values])

    constants = sum(rows.count_padded_bytes(var, {-1: wide}) for var in op.values)
    return _PaddedStep(padded, tuple(op.outputs), build_op, max(rows.get_reach(var) for var in op.values), constants)


def _plan_select(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    operands = {name: _read_operand(op.inputs[name], op, rows) for name in ("cond", "a", "b")}
    values = [each.reach for name, each in operands.items() if each is not None and name != "cond"]
    return _plan_operands(op, operands, max(values, default=_UNBOUNDED), rows)


def _plan_transpose(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    perm = get_const_value(op.perm)
    return _plan_on_x(op, rows.get_reach(op.x)) if perm is not None and _has_last_axis(op.x, perm[-1:]) else None


def _plan_reshape(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a reshape that keeps the last extent: rows stay rows, as the elements keep their order."""
    shape = get_const_value(op.shape)
    if shape is None or rows.extent(op.x) is None or int(op.x.shape[-1]) != int(op.outputs[0].shape[-1]):
        return None
    wide = rows.extent(op.outputs[0])
    return _plan_on_x(op, rows.get_reach(op.x), shape=np.array([*shape[:-1], wide], np.int32))


def _plan_split(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    axis = get_const_value(op.axis)
    if axis is None or _has_last_axis(op.x, [axis]) or rows.extent(op.x) is None:
        return None
    return _PaddedStep((op.x,), tuple(op.outputs), lambda mb, pad: mb.split(**{**op.inputs, "x": pad(op.x)}),
                      rows.get_reach(op.x))


def _plan_slice(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a slice of other axes that keeps all of the last one."""
    names = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
    values = {name: get_const_value(op.inputs.get(name)) for name in names}
    if any(op.inputs.get(name) is not None and values[name] is None for name in names) or rows.extent(op.x) is None:
        return None
    width, last = int(op.x.shape[-1]), {name: each[-1] for name, each in values.items() if each is not None}
    from_front = last.get("begin_mask", False) or last["begin"] in (0, -width)
    to_end = last.get("end_mask", False) or last["end"] >= width
    if not from_front or not to_end or last.get("stride", 1) != 1 or last.get("squeeze_mask", False):
        return None
    masks: dict[str, Any] = {name: [*(values[name] or [False] * op.x.rank)[:-1], True]
                             for name in ("begin_mask", "end_mask")}
    return _plan_on_x(op, rows.get_reach(op.x), **masks)


def _plan_softmax(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a softmax of another axis: the elements of a row are independent."""
    axis = get_const_value(op.axis)
    if axis is None or _has_last_axis(op.x, [axis]):
        return None
    return _plan_on_x(op, 1.0 if rows.get_reach(op.x) < _UNBOUNDED else _UNBOUNDED, exact=False)


def _plan_conv(op: Operation, rows: _RowPadding) -> _PaddedStep | None:
    """Plan a conv that does not mix the last axis: a kernel of one there, stride one, no padding."""
    pad = get_const_value(op.inputs.get("pad"), [0, 0])[-2:] if get_const_value(op.pad_type) == "custom" else [0, 0]
    if int(op.weight.shape[-1]) != 1 or get_const_value(op.strides, [1])[-1] != 1 or any(pad):
        return None
    return _plan_on_x(op, _UNBOUNDED, exact=False)


_PLANNERS: dict[str, Callable[[Operation, _RowPadding], _PaddedStep | None]] = {
    **dict.fromkeys(_UNARY_OPS, _plan_unary),
    **dict.fromkeys(_BINARY_OPS, _plan_binary),
    **dict.fromkeys(_REDUCTION_OPS, _plan_reduce),
    **dict.fromkeys(("expand_dims", "squeeze"), _plan_axis_change),
    **dict.fromkeys(("concat", "stack"), _plan_join),
    "select": _plan_select,
    "transpose": _plan_transpose,
    "reshape": _plan_reshape,
    "split": _plan_split,
    "slice_by_index": _plan_slice,
    "softmax": _plan_softmax,
    "conv": _plan_conv,
}


def _is_needed_unpadded(var: Var, steps: dict[Operation, _PaddedStep]) -> bool:
    """Return whether anything reads `var` without padding."""
    return bool(var.consuming_blocks) or any(
        reader not in steps or var not in steps[reader].padded_inputs or var in steps[reader].unpadded_inputs
        for reader in get_consumers(var))


def _describe_region(region: _PaddedRegion, rows: _RowPadding) -> str:
    widths = dict.fromkeys((int(var.shape[-1]), rows.extent(var)) for var in region.values)
    each = ", ".join(f"{width} -> {wide}" for width, wide in widths)
    return (f"{len(region.steps)} ops with a last axis of {each}, by {len(region.padded_values)} pads and "
            f"{len(region.sliced_values)} slices")


def _rebind_to_slices(op: Operation, slices: dict[Var, Var]) -> None:
    """Let an op read the slices of values that its region computes padded and it reads without padding."""
    found = {name: slices[var] for name, var in op.inputs.items() if isinstance(var, Var) and var in slices}
    if found:
        op.set_inputs(**found)


def _remove_padding(mb: RewriteBuilder, wide: Var, var: Var) -> Var:
    """Slice padded `wide` to the last axis of `var`; all other axes are unchanged."""
    cut: Var = mb.slice_by_size(x=wide, begin=[0] * var.rank, size=[-1] * (var.rank - 1) + [int(var.shape[-1])])
    return cut


def _make_example_between_activations(
    name: str, op: Callable[[Var], Var], x: tuple[int, ...] = (2, 3, 50), **expected: Any
) -> Example:
    """Make an example of `op` after four activations and before one."""

    def build_body(x: Var) -> Var:
        for _ in range(2):
            x = Builder.relu(x=Builder.sin(x=x))
        built: Var = Builder.relu(x=op(x), name="y")
        return built

    return make_example(name, build_body, x=x, **expected)


def _make_activations_example(name: str, width: int, **expected: Any) -> Example:
    def build_body(x: Var) -> Var:
        added = Builder.add(x=x, y=np.float16(0.5))
        built: Var = Builder.relu(x=Builder.mul(x=Builder.tanh(x=added), y=added), name="y")
        return built

    return make_example(name, build_body, x=(2, 3, width), **expected)


def _build_perceptron(x: Var) -> Var:
    hidden = Builder.linear(x=x, weight=make_weight(50, 8), bias=make_weight(50))
    hidden = Builder.sigmoid(x=Builder.add(x=hidden, y=np.float16(1)))
    built: Var = Builder.linear(x=Builder.relu(x=hidden), weight=make_weight(10, 50), name="y")
    return built


def _build_attention_scores(q: Var, k: Var, behind: bool = False) -> Var:
    queries = Builder.tanh(x=Builder.sin(x=q))
    keys = Builder.add(x=Builder.tanh(x=k), y=make_weight(8))
    scores = Builder.matmul(x=queries, y=keys, transpose_y=True)
    if behind:
        scores = Builder.sin(x=Builder.tanh(x=Builder.sin(x=scores)))
    built: Var = Builder.softmax(x=scores, axis=-1, name="y")
    return built


def _build_conv(x: Var) -> Var:
    found: Var = Builder.conv(x=x, weight=make_weight(5, 4, 1, 1), bias=make_weight(5))
    return found


def _swap_halves(x: Var) -> Var:
    first, second = Builder.split(x=x, num_splits=2, axis=1)
    joined: Var = Builder.concat(values=[second, first, make_weight(8, 1, 8)], axis=1)
    return joined


def _reorder_rows(x: Var) -> Var:
    turned = Builder.transpose(x=x, perm=[1, 0, 2])
    long = Builder.reshape(x=Builder.expand_dims(x=turned, axes=[0]), shape=[1, -1, 8])
    rows: Var = Builder.slice_by_index(x=long, begin=[0, 1, 0], end=[1, 5, 0], end_mask=[False, False, True],
                                       squeeze_mask=[True, False, False])
    return rows


def _build_self_product(x: Var) -> Var:
    value = Builder.tanh(x=Builder.sin(x=x))
    built: Var = Builder.relu(x=Builder.matmul(x=value, y=value), name="y")
    return built
