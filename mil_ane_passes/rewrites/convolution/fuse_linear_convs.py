"""Fuse convs and linears that are separated by linear arithmetic only.

compose: a conv of kernel 1 before or after another conv, or two linears, become one with the product of the weights.
after: a scale and a shift of each channel after a conv or linear go into its weight and bias.
before: the same in front of one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_itemsize,
    get_static_shape,
    is_all_zero,
    is_compressed,
    is_const,
    is_opaque,
)
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_weight
from ...passes.layout import format_bytes
from .._weights import has_uniform_readers
from ._conv_geometry import resolve_conv_pads

_PRODUCTS = ("conv", "linear")
_BINARY_OPS = ("mul", "add", "sub", "real_div")
_MOVEMENT_OPS = ("reshape", "transpose", "expand_dims", "squeeze")
"Ops that a scale common to all elements passes through."
_FP16_MAX, _FP16_SMALLEST_NORMAL, _FP16_UNIT = 65504.0, 2.0**-14, 2.0**-11
"The largest number, the smallest that has all its bits, and the share by which rounding changes one that has."
_MAX_CANCELLED_SHIFT = 4.0
"""Largest shift, in units of what is added to, that is moved into the bias from in front of a product: the products of
x and those of the shift are summed apart there, and cancel."""
_MAX_COMPOSED_MACS = 1 << 33
"Products of two weights for which no more multiplications are needed are composed: some tenths of a second."
_ROWS_PER_CHUNK = 1 << 24
"Elements of a weight that are computed in float64 at a time."
Array = np.ndarray[Any, Any]


class FuseLinearConvs(Rewrite):
    """Fuse consecutive convs, linears and scales without a nonlinearity into one conv or linear.

    why     Each conv reads its weights and writes its result, and a scale or shift is a pass over the values.
            coremltools folds scales, batch_norm and added constants after a conv, and constants added after a linear,
            while it converts; it leaves scales and batch_norm after a linear, everything in front of a conv or linear,
            and convs that follow one another (the quant_conv of an autoencoder after its last 3x3).
    when    fp16; the value between has no other users, and all users of the weight are rewritten alike. compose: two
            convs or two linears, if one conv has kernel 1 without stride and padding, groups are equal, and neither
            multiplications nor weights increase; the inner bias must be zero if the outer conv pads. after: a mul, add,
            sub or real_div by a constant for each channel or all of them, or a batch_norm, after a conv or linear; a
            factor that is one number may follow reshapes and transposes of the result. before: the same in front of a
            conv or linear, also through a reflecting or repeating pad; a shift only if nothing is padded with zeros.
            Skipped: compressed weights, which would have to be decompressed, and powers of two that
            ane::bounded_accumulation adds to a product.
    exact   rounding: weight and bias are computed in float64 and rounded once, so each weight is off by up to half a
            unit in the last place, whereas the value between is no longer rounded. As |A B| <= |A| |B|, rounding the
            weights moves a result by no more than rounding the value between did, if weights are above 2^-14, where
            fp16 has its full precision; below, both errors are compared. Skipped if rounding the weights has the larger
            error, or if a weight or bias exceeds fp16.
    cost    none: fewer ops, MACs and weights. A bias is added where there was none.

    before
        %0: fp16[1, 8, 6, 6] = conv(x=%x, weight=<fp16[8, 4, 3, 3]>, pad_type=same)
        %y: fp16[1, 2, 6, 6] = conv(x=%0, weight=<fp16[2, 8, 1, 1]>)
    after
        %y: fp16[1, 2, 6, 6] = conv(x=%x, weight=<fp16[2, 4, 3, 3]>, pad_type=same)
    """

    code, slug = "ANE601", "linear-ops-in-a-row"
    stage = "numerics"
    after = ("scaled_rms_norm", "representable_epsilon", "split_conv_transpose_bias")
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place of each weight, which moves results by 2^-11 of the largest if signs are "
             "mixed; 2^-9 is allowed")
    preset = "full"
    moves = 2.0**-9
    moves_of = "result"
    keeps_nonfinite = False
    repeats = True
    severity, confidence = Severity.SUGGESTION, "medium"
    roots = (*_PRODUCTS, *_BINARY_OPS, "batch_norm", "squeeze")
    evidence = (
        Community("time of a chain of convs is the number of multiplications over a rate, or of weight bytes over a "
                  "rate: 103 slopes within 4 % (median)", chip="M6", os="macOS 27.0.1", date="2026",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/05_compute"),
        Community("against a gain from scales alone: eight elementwise ops after a conv cost next to nothing",
                  chip="M6", os="macOS 27.0.1", date="2026",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/05_compute"),
        cite_m4_study("the segmenter charges every op for the bytes that it reads and writes"),
    )

    max_bytes: int = 1 << 26
    "Maximum bytes of a weight that is stored again to fold a scale or shift."

    def match(self, op: Operation) -> Hit | Miss:
        fold = _find_fold(op)
        if fold is None:
            return Miss(op, "no constant scale or shift next to a stored conv or linear, and no two consecutive "
                            "ones", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        reason = _find_obstacle(fold)
        size = math.prod(map(int, fold.product.weight.shape)) * get_itemsize(fold.product.weight)
        if not reason and fold.inner is None and size > self.max_bytes:
            reason = (f"a weight of {format_bytes(size)} would be stored again to save one op, above "
                      f"max_bytes={self.max_bytes}")
        if not reason and fold.inner is not None:
            work = math.prod(map(int, fold.product.weight.shape)) * math.prod(map(int, fold.inner.weight.shape[1:]))
            if work > _MAX_COMPOSED_MACS:
                reason = f"composing both weights takes {work:.2g} multiplications, above {_MAX_COMPOSED_MACS:.2g}"
        if reason:
            return Miss(op, reason)
        rounded = _find_rounding(fold)
        if isinstance(rounded, str):
            return Miss(op, rounded)
        return Hit(op, note=fold.note, fold=fold, moves=self.moves if rounded else 0.0)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return _build_fused_op(mb, hit.fold)

    def examples(self) -> Iterable[Example]:
        yield from _iterate_composed_examples()
        yield from _iterate_affine_examples()
        yield from _iterate_near_misses()


@dataclass(frozen=True)
class _Affine:
    """y = scale * x + shift, each for all channels (one element) or one for each, in float64.

    `gone` are the values that it computes.
    """

    x: Var
    scale: Array
    shift: Array
    gone: tuple[Var, ...] = ()

    @property
    def is_uniform(self) -> bool:
        return bool(self.scale.size == 1)


@dataclass(frozen=True)
class _Fold:
    """A fold at the op `root`, whose result is replaced.

    `product` is the conv or linear that gets a new weight, `inner` the one that is composed with it. `between` are the
    ops from the product to `root` (after), or the pad in front of the product (before). `gone` are the values that
    disappear.
    """

    form: Literal["compose", "after", "before"]
    root: Operation
    product: Operation
    gone: tuple[Var, ...]
    inner: Operation | None = None
    affine: _Affine | None = None
    between: tuple[Operation, ...] = ()

    @property
    def note(self) -> str:
        if self.inner is not None:
            return f"{_describe_product(self.inner)} and {_describe_product(self.product)} as one"
        if self.form == "after":
            return f"{self.root.op_type} after {_describe_product(self.product)}"
        return f"a scale or shift in front of {_describe_product(self.product)}"

    @property
    def products(self) -> list[Operation]:
        return [self.product] if self.inner is None else [self.product, self.inner]

    @property
    def label(self) -> str:
        """Identifies what the new weight and bias are made of: small constants by value, weights by name."""
        digest = hashlib.sha256()
        for op in self.products:
            digest.update(f"{op.op_type} {op.weight.name} {get_const_value(op.inputs.get('groups'), 1)}".encode())
            if op.bias is not None and not is_all_zero(op.bias):
                digest.update(np.ascontiguousarray(op.bias.val).tobytes())
        for value in () if self.affine is None else (self.affine.scale, self.affine.shift):
            digest.update(np.ascontiguousarray(value).tobytes())
        return f"{self.form}_{digest.hexdigest()[:8]}"


def _describe_product(op: Operation) -> str:
    return f"{op.op_type} {'x'.join(map(str, op.weight.shape))}"


def _find_fold(op: Operation) -> _Fold | None:
    """Find what could be folded at `op`, by its structure alone."""
    if is_opaque(op) or not op.outputs:
        return None
    if op.op_type in _PRODUCTS:
        return _find_fold_at_product(op)
    found = _find_product_behind(op)
    if found is None:
        return None
    product, between = found
    affine = _read_uniform_scale(op) if between else _read_affine(op, _get_channel_axis(product, op.outputs[0]))
    if affine is None:
        return None
    gone = (product.outputs[0], *(each.outputs[0] for each in between), *affine.gone)
    return _Fold("after", op, product, tuple(var for var in gone if var is not op.outputs[0]), affine=affine,
                 between=between)


def _find_fold_at_product(op: Operation) -> _Fold | None:
    source = op.x.op
    if source is None or is_opaque(source):
        return None
    if source.op_type == op.op_type:
        return _Fold("compose", op, op, (op.x,), inner=source)
    between: tuple[Operation, ...] = ()
    if source.op_type == "pad" and op.op_type == "conv" and get_const_value(source.mode) in ("reflect", "replicate"):
        pad = get_const_value(source.pad)
        if pad is None or any(pad[:-2 * (op.x.rank - 2)]) or source.x.op is None:
            return None
        between, source = (source,), source.x.op
    affine = _read_affine(source, _get_channel_axis(op, source.outputs[0]))
    if affine is None:
        return None
    return _Fold("before", op, op, (*(each.outputs[0] for each in between), *affine.gone), affine=affine,
                 between=between)


def _find_product_behind(op: Operation) -> tuple[Operation, tuple[Operation, ...]] | None:
    """Find the conv or linear whose result `op` scales or shifts, and the ops of movement between them."""
    if op.op_type == "squeeze":
        norm = _find_wrapped_norm(op)
        source = None if norm is None else norm.x.op.x
    elif op.op_type in _BINARY_OPS:
        computed = [var for var in (op.x, op.y) if not is_const(var)]
        source = computed[0] if len(computed) == 1 else None
    else:
        source = op.x
    between: list[Operation] = []
    while source is not None and source.op is not None and source.op.op_type in _MOVEMENT_OPS:
        if op.op_type not in ("mul", "real_div") or is_opaque(source.op):
            return None
        between.insert(0, source.op)
        source = source.op.x
    product = None if source is None else source.op
    if product is None or product.op_type not in _PRODUCTS or is_opaque(product):
        return None
    return product, tuple(between)


def _find_wrapped_norm(op: Operation) -> Operation | None:
    """Return the batch_norm on [N, C, 1] that implements one on [N, C], whose result `op` squeezes."""
    norm = op.x.op
    if norm is None or norm.op_type != "batch_norm" or norm.x.rank != 3 or op.outputs[0].rank != 2:
        return None
    expand = norm.x.op
    if expand is None or expand.op_type != "expand_dims" or expand.x.rank != 2:
        return None
    ends = [[axis % 3 for axis in get_const_value(each.axes, [])] for each in (expand, op)]
    return norm if ends == [[2], [2]] else None


def _get_channel_axis(product: Operation, value: Var) -> int:
    """Return the axis of the channels of `value`, which is read or computed by `product`."""
    return 1 if product.op_type == "conv" else int(value.rank) - 1


def _read_affine(op: Operation, axis: int) -> _Affine | None:
    """Read `op` as a scale and a shift by constants of each channel, which lie on `axis`."""
    if is_opaque(op) or not op.outputs or op.outputs[0].dtype not in (types.fp16, types.fp32):
        return None
    if op.op_type == "squeeze":
        norm = _find_wrapped_norm(op)
        gone = () if norm is None else (norm.x, norm.outputs[0], op.outputs[0])
        return None if norm is None or axis != 1 else _read_batch_norm(norm, norm.x.op.x, gone)
    if op.op_type == "batch_norm":
        return _read_batch_norm(op, op.x, (op.outputs[0],)) if axis == 1 else None
    if op.op_type not in _BINARY_OPS or is_const(op.x) == is_const(op.y):
        return None
    x, constant = (op.y, op.x) if is_const(op.x) else (op.x, op.y)
    value = _read_channel_constant(constant, x, axis)
    if value is None:
        return None
    scale, shift = np.ones(1), np.zeros(1)
    if op.op_type == "mul":
        scale = value
    elif op.op_type == "add":
        shift = value
    elif op.op_type == "sub":
        scale, shift = (scale, -value) if constant is op.y else (-scale, value)
    elif constant is op.x or not np.all(value):
        return None
    else:
        scale = 1 / value
    return _Affine(x, scale, shift, (op.outputs[0],))


def _read_uniform_scale(op: Operation) -> _Affine | None:
    affine = _read_affine(op, op.outputs[0].rank - 1) if op.op_type in ("mul", "real_div") else None
    return affine if affine is not None and affine.is_uniform else None


def _read_channel_constant(constant: Var, x: Var, axis: int) -> Array | None:
    """Read a constant that has one element, or one for each channel of `x` on `axis`."""
    if constant.rank > x.rank or constant.dtype != x.dtype:
        return None
    shape = (*[1] * (x.rank - constant.rank), *constant.shape)
    if any(extent != 1 for at, extent in enumerate(shape) if at != axis):
        return None
    if shape[axis:axis + 1] not in ((1,), tuple(x.shape[axis:axis + 1])):
        return None
    return np.asarray(constant.val, np.float64).reshape(-1)


def _read_batch_norm(op: Operation, x: Var, gone: tuple[Var, ...]) -> _Affine | None:
    constants = [op.mean, op.variance, op.gamma, op.beta]
    if not all(var is None or is_const(var) for var in constants):
        return None
    mean, variance, gamma, beta = (None if var is None else np.asarray(var.val, np.float64) for var in constants)
    deviation = np.sqrt(np.asarray(variance) + float(op.epsilon.val))
    if not np.all(deviation > 0):
        return None
    scale = (1.0 if gamma is None else gamma) / deviation
    shift = (0.0 if beta is None else beta) - np.asarray(mean) * scale
    return _Affine(x, scale, shift, gone)


def _find_obstacle(fold: _Fold) -> str:
    """Return why `fold` is not done, or ""."""
    for op in fold.products:
        if is_compressed(op.weight):
            return f"the weight is compressed by {op.weight.op.op_type}: it would have to be decompressed"
        if not is_const(op.weight) or not (op.bias is None or is_const(op.bias)):
            return "the weight or bias is computed or compressed, not a plain constant"
    return _find_use_obstacle(fold) or _find_form_obstacle(fold) or _find_sharing_obstacle(fold)


def _find_use_obstacle(fold: _Fold) -> str:
    """Return which of the values that would disappear is needed elsewhere, or ""."""
    for var in fold.gone:
        if var.op.enclosing_block is not fold.root.enclosing_block:
            return "the two ops are in different blocks"
        if len(get_consumers(var)) > 1 or var.consuming_blocks:
            return f"the value between, '{var.name}', has other users"
    return ""


def _find_form_obstacle(fold: _Fold) -> str:
    """Return why the ops have no common form, or ""."""
    if fold.inner is not None:
        return _find_composition_obstacle(fold.inner, fold.product)
    assert fold.affine is not None
    if fold.affine.is_uniform and _is_bounding(fold):
        return ("a power of two next to a product keeps its partial sums below 32768 (ane::bounded_accumulation)")
    if fold.form == "before" and np.any(fold.affine.shift):
        return _find_shift_obstacle(fold.product, fold.affine)
    return ""


def _find_sharing_obstacle(fold: _Fold) -> str:
    """Return which weight others read in another way, or ""."""
    for op in fold.products:
        if op.weight.consuming_blocks:
            return "the weight is returned by a block"
        role = "inner" if op is fold.inner or fold.form == "after" else "outer"
        if not has_uniform_readers(op, fold.root.enclosing_block, partial(_describe_fold_of, fold.form, role)):
            return f"the weight '{op.weight.name}' has other users, so it would be stored twice"
    return ""


def _describe_fold_of(form: str, role: str, op: Operation) -> tuple[Any, ...]:
    """Describe the fold of `form` that replaces the weight of the conv or linear `op`; () if there is none."""
    fold = _find_fold(op) if role == "outer" else _find_fold_behind(op)
    if fold is None or fold.form != form or _find_use_obstacle(fold) or _find_form_obstacle(fold):
        return (id(op),)
    return (fold.label,)


def _find_fold_behind(op: Operation) -> _Fold | None:
    """Find the fold at one of the ops after `op`, which are read by one op each."""
    var = op.outputs[0]
    while var.op is op or var.op.op_type in (*_MOVEMENT_OPS, "batch_norm"):
        readers = get_consumers(var)
        if len(readers) != 1 or not readers[0].outputs:
            return None
        fold = _find_fold(readers[0])
        if fold is not None:
            return fold if op in fold.products else None
        var = readers[0].outputs[0]
    return None


def _find_composition_obstacle(inner: Operation, outer: Operation) -> str:
    if inner.op_type == "linear":
        return _compare_costs(inner, outer, 1.0)
    groups = [int(get_const_value(op.groups, 1)) for op in (inner, outer)]
    if groups[0] != groups[1]:
        return f"groups of {groups[0]} and {groups[1]} cannot be combined"
    point = _find_point_conv(inner, outer)
    if point is None:
        return "neither kernel is 1 without stride and padding"
    pads = resolve_conv_pads(outer)
    if isinstance(pads, str):
        return pads
    if point is inner and any(map(any, pads)) and inner.bias is not None and np.any(inner.bias.val):
        return "the outer conv pads with zeros around values that have a bias: the sums at the edge would differ"
    shapes = [get_static_shape(op.outputs[0]) for op in (inner, outer)]
    strides = math.prod(get_const_value(outer.strides, [1]))
    ratio = float(strides) if None in shapes else (
        math.prod((shapes[0] or (1, 1, 1))[2:]) / max(1, math.prod((shapes[1] or (1, 1, 1))[2:])))
    return _compare_costs(inner, outer, ratio)


def _find_point_conv(inner: Operation, outer: Operation) -> Operation | None:
    """Return which of two convs has kernel 1, no stride and no padding: the outer one if both have."""
    for op in (outer, inner):
        pads = resolve_conv_pads(op)
        if not isinstance(pads, str) and not any(map(any, pads)) and all(
                extent == 1 for extent in (*op.weight.shape[2:], *get_const_value(op.strides, [1]))):
            return op
    return None


def _compare_costs(inner: Operation, outer: Operation, ratio: float) -> str:
    """Return by how much one op would take more weights or MACs than both, or "".

    `ratio` is the number of results of `inner` for each of `outer`, channels aside.
    """
    kernels = [math.prod(op.weight.shape[2:]) for op in (inner, outer)]
    fused = int(outer.weight.shape[0]) * int(inner.weight.shape[1]) * max(kernels)
    sizes = [math.prod(map(int, op.weight.shape)) for op in (inner, outer)]
    if fused > sum(sizes):
        return f"one weight would have {fused / sum(sizes):.1f} times the elements of both"
    macs = sizes[0] * ratio + sizes[1]
    return f"one op would take {fused / macs:.1f} times the MACs of both" if fused > macs else ""


def _is_bounding(fold: _Fold) -> bool:
    """Return whether a common factor is one that keeps partial sums small: 2^k after a product, 2^-k in front."""
    assert fold.affine is not None
    factor = float(fold.affine.scale[0])
    if factor <= 0 or math.frexp(factor)[0] != 0.5 or np.any(fold.affine.shift):
        return False
    return factor > 1 if fold.form == "after" else factor < 1


def _find_shift_obstacle(product: Operation, affine: _Affine) -> str:
    if product.op_type == "conv":
        pads = resolve_conv_pads(product)
        if isinstance(pads, str):
            return pads
        if any(map(any, pads)):
            return "the conv pads with zeros around values that are shifted: the sums at the edge would differ"
    largest = float(np.abs(affine.shift).max())
    if largest > _MAX_CANCELLED_SHIFT:
        return (f"a shift of {largest:.4g} in front would be summed separately from x, above the limit of "
                f"{_MAX_CANCELLED_SHIFT:g}")
    return ""


def _find_rounding(fold: _Fold) -> bool | str:
    """Return whether the new weight or bias is rounded, or why fp16 does not hold them."""
    exact, least, most, worst = True, math.inf, 0.0, (0.0, 0.0)
    between = None if fold.inner is None else _bound_value_between(fold.product, fold.inner)
    done = 0
    for rows in _iterate_weight_rows(fold):
        flat = rows.reshape(len(rows), -1)
        largest = np.abs(flat).max(axis=1, initial=0.0)
        most = max(most, float(largest.max(initial=0.0)))
        least = min(least, float(largest[largest > 0].min(initial=math.inf)))
        moved = _sum_rounding_errors(flat)
        exact = exact and not moved.any()
        before = _FP16_UNIT * (np.abs(flat).sum(axis=1) if between is None else between[done:done + len(rows)])
        worst = max(worst[0], float(moved.max(initial=0.0))), max(worst[1], float(before.max(initial=0.0)))
        done += len(rows)
    bias = _compute_bias(fold)
    if bias is not None:
        exact = exact and _fits_fp16(bias)
        most = max(most, float(np.abs(bias).max()))
    if not most <= _FP16_MAX:
        return f"a weight or bias of {most:.4g} does not fit fp16"
    if least < _FP16_SMALLEST_NORMAL:
        return f"the largest weight of a channel would be {least:.4g}, and fp16 loses precision below 6.1e-05"
    if worst[0] > worst[1]:
        return (f"rounding the new weights would move results by up to {worst[0]:.2g} of the largest input, and "
                f"rounding the value between moves them by up to {worst[1]:.2g}: most are below 6.1e-05, where fp16 "
                f"loses precision")
    return not exact


def _bound_value_between(outer: Operation, inner: Operation) -> Array:
    """Bound the magnitude that reaches each result through the value between two products, of inputs up to 1."""
    groups = int(get_const_value(outer.inputs.get("groups"), 1))
    sums = np.abs(np.asarray(inner.weight.val, np.float64)).reshape(int(inner.weight.shape[0]), -1).sum(axis=1)
    weight = np.abs(np.asarray(outer.weight.val, np.float64))
    taps = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1).sum(axis=3)
    bound: Array = np.einsum("goi,gi->go", taps, sums.reshape(groups, -1)).reshape(-1)
    return bound


def _sum_rounding_errors(rows: Array) -> Array:
    """Sum what rounding to fp16 changes in each row: how far it moves a result of inputs up to 1."""
    with np.errstate(over="ignore", invalid="ignore"):
        moved: Array = np.abs(rows.astype(np.float16).astype(np.float64) - rows).sum(axis=1)
    return moved


def _fits_fp16(values: Array) -> bool:
    """Return whether fp16 holds all `values` as they are."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16), values))


def _iterate_weight_rows(fold: _Fold) -> Iterator[Array]:
    """Yield the new weight in float64, some output channels at a time."""
    weight = np.asarray(fold.product.weight.val)
    groups = int(get_const_value(fold.product.groups, 1)) if fold.product.op_type == "conv" else 1
    count = len(weight)
    step = count // groups
    if groups == 1:
        step = max(1, _ROWS_PER_CHUNK // max(1, weight.size // max(1, count)))
    inner = None if fold.inner is None else np.asarray(fold.inner.weight.val, np.float64)
    for start in range(0, count, step):
        rows = weight[start:start + step].astype(np.float64)
        if inner is not None:
            size = len(inner) // groups
            first = start // (count // groups) * size
            yield _compose_weights(rows, inner[first:first + size])
            continue
        assert fold.affine is not None
        scale = fold.affine.scale
        if fold.form == "after":
            part = scale if scale.size == 1 else scale[start:start + step]
            yield rows * part.reshape(-1, *[1] * (rows.ndim - 1))
        else:
            size = weight.shape[1]
            first = start // (count // groups) * size
            part = scale if scale.size == 1 else scale[first:first + size]
            yield rows * part.reshape(1, -1, *[1] * (rows.ndim - 2))


def _compose_weights(outer: Array, inner: Array) -> Array:
    """Multiply the weights [O, M, ...] and [M, I, ...] of one group, one of which has a kernel of 1."""
    kernel = outer.shape[2:] if math.prod(inner.shape[2:]) == 1 else inner.shape[2:]
    if math.prod(inner.shape[2:]) == 1:
        made = np.tensordot(outer, inner.reshape(inner.shape[:2]), axes=(1, 0))  # [O, ..., I]
        return np.moveaxis(made, -1, 1).reshape(len(outer), inner.shape[1], *kernel)
    return np.tensordot(outer.reshape(outer.shape[:2]), inner, axes=(1, 0))


def _compute_bias(fold: _Fold) -> Array | None:
    """Compute the new bias in float64; None where there is none."""
    count = int(fold.product.weight.shape[0])
    own = None if fold.product.bias is None else np.asarray(fold.product.bias.val, np.float64)
    if fold.form == "after":
        assert fold.affine is not None
        if own is None and not np.any(fold.affine.shift):
            return None
        return np.broadcast_to((0.0 if own is None else own) * fold.affine.scale + fold.affine.shift, (count,))
    bias = None if fold.inner is None else fold.inner.bias
    vector = fold.affine.shift if fold.affine is not None else None if bias is None else np.asarray(
        bias.val, np.float64)
    if vector is None or not np.any(vector):
        return own
    weight = np.asarray(fold.product.weight.val, np.float64)
    groups = int(get_const_value(fold.product.inputs.get("groups"), 1))
    taps = weight.reshape(groups, count // groups, weight.shape[1], -1).sum(axis=3)
    channels = np.broadcast_to(vector, (weight.shape[1] * groups,)).reshape(groups, -1)
    moved: Array = np.einsum("goi,gi->go", taps, channels).reshape(-1)
    return moved if own is None else own + moved


def _build_fused_op(mb: RewriteBuilder, fold: _Fold) -> Var:
    source = fold.product.weight
    label = fold.label
    weight = mb.weight(source, label, lambda: np.concatenate(
        [rows.astype(np.float16) for rows in _iterate_weight_rows(fold)]))
    value = _compute_bias(fold)
    changes: dict[str, Any] = {"weight": weight}
    if value is not None:
        changes["bias"] = mb.weight(source, f"{label}_bias", lambda: value.astype(np.float16))
    if fold.inner is not None:
        if fold.product.op_type == "conv" and _find_point_conv(fold.inner, fold.product) is fold.product:
            return rebuild_op(mb, fold.inner, **{"bias": None, **changes})
        return rebuild_op(mb, fold.product, x=fold.inner.x, **changes)
    assert fold.affine is not None
    if fold.form == "after":
        made = rebuild_op(mb, fold.product, **changes)
        for op in fold.between:
            made = rebuild_op(mb, op, x=made)
        return made
    x = fold.affine.x
    for op in fold.between:
        x = rebuild_op(mb, op, x=x)
    return rebuild_op(mb, fold.product, x=x, **changes)


def _make_chain_example(
    name: str, shape: tuple[int | None, ...], *steps: Callable[[Var], Var], reason: str | None = None, **settings: Any
) -> Example:
    """Make an example of `steps` one after the other."""
    def build_body(x: Var) -> Var:
        for step in steps:
            x = step(x)
        x.name = x.op.name = "y"
        return x

    return make_example(name, build_body, reason=reason, within=16.0, x=shape, **settings)


def _conv_op(*weight: int, bias: bool = False, **settings: Any) -> Callable[[Var], Var]:
    extra = {"bias": make_weight(weight[0])} if bias else {}
    return lambda x: Builder.conv(x=x, weight=make_weight(*weight), **extra, **settings)


def _linear_op(*weight: int) -> Callable[[Var], Var]:
    return lambda x: Builder.linear(x=x, weight=make_weight(*weight), bias=make_weight(weight[0]))


def _const_op(kind: str, *shape: int, add: float = 1.5, **settings: Any) -> Callable[[Var], Var]:
    """Return an op with a constant of `shape` whose elements are around `add`."""
    return lambda x: getattr(Builder, kind)(x=x, y=make_weight(*shape) + np.float16(add), **settings)


def _norm_op(channels: int) -> Callable[[Var], Var]:
    parameters = {name: make_weight(channels) + np.float16(more)
                  for name, more in (("mean", 0), ("variance", 1.5), ("gamma", 1), ("beta", 0.25))}
    return lambda x: Builder.batch_norm(x=x, **parameters)


def _norm_of_rows(x: Var) -> Var:
    normed: Var = Builder.squeeze(x=_norm_op(4)(Builder.expand_dims(x=x, axes=[-1])), axes=[-1])
    return normed


def _iterate_composed_examples() -> Iterator[Example]:
    yield _make_chain_example("3x3 and 1x1", (1, 4, 6, 6), _conv_op(8, 4, 3, 3, pad_type="same"), _conv_op(2, 8, 1, 1))
    yield _make_chain_example("strided, dilated", (1, 4, 9, 9), _conv_op(8, 4, 3, 3, bias=True, strides=[2, 1],
                              dilations=[1, 2], pad_type="custom", pad=[1, 0, 2, 1]), _conv_op(4, 8, 1, 1, bias=True))
    yield _make_chain_example("1x1 and 3x3", (2, 2, 6, 6), _conv_op(4, 2, 1, 1), _conv_op(
        8, 4, 3, 3, bias=True, strides=[2, 2], pad_type="same"))
    yield _make_chain_example("bias without padding", (1, 2, 9), _conv_op(4, 2, 1, bias=True), _conv_op(8, 4, 3))
    yield _make_chain_example("groups", (1, 8, 9), _conv_op(8, 4, 3, groups=2, bias=True), _conv_op(
        4, 4, 1, groups=2, bias=True))
    yield _make_chain_example("linears", (2, 3, 4), _linear_op(8, 4), _linear_op(4, 8))


def _iterate_affine_examples() -> Iterator[Example]:
    yield _make_chain_example("scale of a linear", (2, 4), _linear_op(6, 4), _const_op("mul", 1, 6))
    yield _make_chain_example("scale of heads", (2, 3, 4), _linear_op(6, 4), lambda x: Builder.transpose(
        x=Builder.reshape(x=x, shape=[2, 3, 2, 3]), perm=[0, 2, 1, 3]), lambda x: Builder.mul(x=x, y=np.float16(0.3)))
    yield _make_chain_example("quotient", (1, 4, 5, 5), _conv_op(6, 4, 3, 3, bias=True), _const_op("real_div", 6, 1, 1))
    yield _make_chain_example("added", (1, 4, 5), _conv_op(6, 4, 3), _const_op("add", 1, 6, 1))
    yield _make_chain_example("subtracted from", (2, 4), _linear_op(6, 4), lambda x: Builder.sub(x=make_weight(6), y=x))
    yield _make_chain_example("norm behind a linear", (2, 6), _linear_op(4, 6), _norm_of_rows)
    yield _make_chain_example("norm in front of a linear", (2, 4), _norm_of_rows, _linear_op(6, 4))
    yield _make_chain_example("norm in front of a conv", (1, 4, 5, 5), _norm_op(4), _conv_op(6, 2, 3, 3, groups=2))
    yield _make_chain_example("scale before padding", (1, 4, 5, 5), _const_op("mul", 4, 1, 1), _conv_op(
        6, 4, 3, 3, bias=True, pad_type="same"))
    yield _make_chain_example("norm before reflection", (1, 4, 7), _norm_op(4), lambda x: Builder.pad(
        x=x, pad=[2, 2], mode="reflect", constant_val=types.nptype_from_builtin(x.dtype)(0)), _conv_op(6, 4, 5))


def _iterate_near_misses() -> Iterator[Example]:
    yield _make_chain_example("wider between", (1, 8, 6, 6), _conv_op(2, 8, 1, 1), _conv_op(8, 2, 1, 1),
                              reason="one weight would have 2.0 times the elements of both")
    yield _make_chain_example("separable", (1, 8, 6, 6), _conv_op(8, 1, 3, 3, groups=8), _conv_op(8, 8, 1, 1),
                              reason="groups of 8 and 1 cannot be combined")
    yield _make_chain_example("two of 3x3", (1, 4, 9, 9), _conv_op(4, 4, 3, 3),
                              _conv_op(4, 4, 3, 3), reason="neither kernel is 1 without stride and padding")
    yield _make_chain_example(
        "bias and padding", (1, 4, 6, 6), _conv_op(4, 4, 1, 1, bias=True), _conv_op(4, 4, 3, 3, pad_type="same"),
        reason="the outer conv pads with zeros around values that have a bias: the sums at the edge would differ")
    yield _make_chain_example(
        "shift and padding", (1, 4, 6, 6), _norm_op(4), _conv_op(4, 4, 3, 3, pad_type="same"),
        reason="the conv pads with zeros around values that are shifted: the sums at the edge would differ")
    yield _make_chain_example(
        "small weights beside a large one", (2, 64), lambda x: Builder.linear(
            x=x, weight=np.asarray([[1.0, *[0.013] * 63]] * 2, np.float16)),
        lambda x: Builder.mul(x=x, y=np.float16(1e-4)), reason=(
            "rounding the new weights would move results by up to 7e-07 of the largest input, and rounding the value "
            "between moves them by up to 8.9e-08: most are below 6.1e-05, where fp16 loses precision"))
    yield _make_chain_example("large shift", (2, 4), _const_op("sub", 4, add=100), _linear_op(6, 4), reason=(
        "a shift of 100.6 in front would be summed separately from x, above the limit of 4"))
    yield _make_chain_example("bounded", (2, 4), _linear_op(6, 4), lambda x: Builder.mul(x=x, y=np.float16(8)), reason=(
        "a power of two next to a product keeps its partial sums below 32768 (ane::bounded_accumulation)"))
    yield _make_chain_example("large weight", (2, 4), _linear_op(6, 4), _const_op("mul", 6), options={"max_bytes": 40},
                              reason="a weight of 48 B would be stored again to save one op, above max_bytes=40")
    yield _make_chain_example("overflow", (2, 4), lambda x: Builder.linear(
        x=x, weight=make_weight(6, 4) * np.float16(8)), lambda x: Builder.mul(x=x, y=np.float16(6e4)), reason=(
            "a weight or bias of 3.3e+05 does not fit fp16"))
    yield _make_chain_example("fp32", (2, 4), lambda x: Builder.linear(x=x, weight=make_weight(6, 4, dtype=np.float32)),
                              lambda x: Builder.mul(x=x, y=np.float32(0.5)), reason=FP32_UNSUPPORTED_REASON,
                              dtype=types.fp32)
