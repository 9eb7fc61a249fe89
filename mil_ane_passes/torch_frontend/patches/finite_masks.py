"""Masks of huge finite numbers stay finite in fp16: `softmax(x + (1 - m) * finfo(float32).min)` is not NaN.

coremltools' cast to fp16 turns a const of -1e38 or below into -inf, and 0 * -inf is NaN; an op with a smaller const
beyond fp16's range (-1e9) stays in fp32, and its result becomes -inf when it is cast for the next op. A completely
masked row is then all -inf, and its softmax NaN, where torch returns finite numbers. coremltools 9.1.dev1 turns the
const into -65504; adding a score below -16 or a second mask gives -inf, too.

No number above 65504 exists in fp16, so here a finite one becomes +-30000 (29000 below 1e30, which keeps the order of
masks): far beyond any score, and two masks may be added to each other or to a score without overflow. Consts of 1e9 and
more become this number in ops that move, add, select or compare numbers. A product with a const of 2e12 or more is
beyond 65504 for every fp16 number except 0: it becomes sign(x) * +-30000, which is exactly 0 for 0. In all other ops
the const and the op stay in fp32, as in coremltools, and results beyond 65504 become +-30000 when they are cast. Bounds
(`clip`, `maximum`, `minimum`) and infinities, including coremltools' replacement 3.4e38 for one, are left to
coremltools, or stay infinite where it turns the replacement into 65504. Numbers within the range of fp16 are not
changed, and neither is anything outside coremltools' fp16 pass.

The pass ane::finite_mask (ANE310) uses -1e4 for masks that only softmaxes read: six of those can be added in fp16. Here
any op may read the const, comparisons too, and torch's own sum of such a mask and a score is the mask alone: +-30000 is
the closest to it in fp16 that leaves room for two. The pass does not change such a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from numpy.typing import NDArray

from ...ir.query import get_flat_inputs
from ...passes.severity import Severity
from ..contract import Patch

_PASS_MODULE = "coremltools.converters.mil.mil.passes.defs.quantization"
#: the largest number of fp16
_FP16_MAX = 65504.0
#: the smallest const that is treated as a mask, in ops that move, add, select or compare numbers
_MIN_MASK_VALUE = 1e9
#: the product with this factor is beyond 65504 even for 2**-24, the smallest positive number of fp16
_MIN_OVERFLOWING_FACTOR = 2e12
_INFINITY_STAND_IN = np.float32(3.4e38)
_MASK_PRESERVING_OPS = frozenset((
    "add", "band_part", "concat", "equal", "expand_dims", "fill", "fill_like", "gather", "gather_along_axis",
    "gather_nd", "greater", "greater_equal", "identity", "less", "less_equal", "not_equal", "pad", "reshape", "reverse",
    "scatter", "scatter_along_axis", "scatter_nd", "select", "slice_by_index", "slice_by_size", "slice_update", "split",
    "squeeze", "stack", "sub", "tile", "transpose"))
_BOUND_OPS = frozenset(("clip", "maximum", "minimum"))

PATCH = Patch(code="TORCH114", severity=Severity.WRONG,
              title="finite masks such as finfo(float32).min become -inf in fp16, and NaN in a product or softmax",
              upstream=("https://github.com/apple/coremltools/pull/2669",))


@PATCH.probe
def probe() -> str | None:
    import torch
    from coremltools.converters.mil.mil.passes.defs.quantization import add_fp16_cast

    from ..probes import convert_to_mil, trace_function

    x = torch.ones(2)
    program = convert_to_mil(trace_function(lambda x: x * torch.finfo(torch.float32).min, x), x)
    add_fp16_cast().apply(program)
    product, = program.find_ops(op_type="mul")
    values = [operand.val for operand in (product.x, product.y) if operand.val is not None]
    # coremltools 9.1 makes +-65504 of it, to which no score of that sign can be added.
    return None if (np.abs(values) <= _FP16_MAX / 2).all() else "silently miscompiled"


@PATCH.replace_function(_PASS_MODULE, "FP16ComputePrecision.fp16_overflow")
def fp16_overflow(host: Callable[[Any], bool], op: Any) -> bool:
    """Return whether the op has to stay in fp32 because of one of its consts."""
    if op.op_type in _BOUND_OPS:
        return host(op)
    sizes = [np.abs(var.val)[_is_finite_overflow(var.val)] for var in get_flat_inputs(op) if _is_fp32_const(var)]
    smallest = min((size.min() for size in sizes if size.size), default=None)
    if smallest is None or (op.op_type in _MASK_PRESERVING_OPS and smallest >= _MIN_MASK_VALUE):
        return False
    return not (op.op_type == "mul" and _find_overflowing_factor(op) is not None)


@PATCH.replace_function(_PASS_MODULE, "CastTypeQuantization.transform_op")
def transform_op(host: Callable[[Any, Any], None], graph_pass: Any, op: Any) -> None:
    """Transform an op to fp16 as coremltools does, with finite operands."""
    if graph_pass.target_dtype == "fp16" and op.op_type not in _BOUND_OPS:
        changed = {param: _make_operand_finite(graph_pass, op, operand) for param, operand in op.inputs.items()}
        factor = _find_overflowing_factor(op) if op.op_type == "mul" else None
        sign = None
        if factor is not None:
            other = "y" if op.x is factor else "x"
            changed[other] = sign = mb.sign(x=changed[other], before_op=op)
        changed = {param: operand for param, operand in changed.items() if operand is not op.inputs[param]}
        if changed:
            op.set_inputs(**changed)
        if sign is not None:
            host(graph_pass, sign.op)
    host(graph_pass, op)


def _make_operand_finite(graph_pass: Any, op: Any, operand: Any) -> Any:
    if isinstance(operand, list | tuple):
        finite = [_make_operand_finite(graph_pass, op, one) for one in operand]
        return operand if all(one is other for one, other in zip(finite, operand, strict=True)) else tuple(finite)
    if _is_fp32_const(operand):
        if _is_finite_overflow(operand.val).any():
            return mb.const(val=_make_const_finite(operand.val), before_op=op)
        stands_in = np.abs(operand.val) == _INFINITY_STAND_IN
        if hasattr(graph_pass, "_check_overflow_to_inf") and stands_in.any():  # coremltools 9.1 makes it 65504
            infinite = np.where(stands_in, np.sign(operand.val) * np.inf, operand.val).astype(np.float32)[()]
            return mb.const(val=infinite, before_op=op)
        return operand
    if not _is_kept_in_fp32(graph_pass, operand):
        return operand
    cache = graph_pass.current_cache_vars()
    key = f"{operand.name}_finite"
    if key not in cache:
        cache[key] = _saturate_overflow(operand, op)
    return cache[key]


def _make_const_finite(value: Any) -> Any:
    """Replace finite numbers beyond fp16's range by 29000 or 30000 with their sign."""
    mask = np.sign(value) * np.where(np.abs(value) < 1e30, 29000.0, 30000.0)
    return np.where(_is_finite_overflow(value), mask, value).astype(np.float32)[()]


def _saturate_overflow(x: Var, op: Any) -> Var:
    beyond = mb.greater(x=mb.abs(x=x, before_op=op), y=np.float32(_FP16_MAX), before_op=op)
    mask = mb.mul(x=mb.sign(x=x, before_op=op), y=np.float32(30000), before_op=op)
    return mb.select(cond=beyond, a=mask, b=x, before_op=op)


def _is_kept_in_fp32(graph_pass: Any, var: Any) -> bool:
    """Return whether this Var is the result of an op that stays in fp32 because of one of its consts."""
    return (isinstance(var, Var) and var.op is not None and var.val is None
            and var.is_tensor_or_scalar_of(dtype="fp32") and var.op.op_type not in _BOUND_OPS
            and graph_pass.fp16_overflow(var.op))


def _find_overflowing_factor(op: Any) -> Any:
    """Return the const factor whose product is beyond fp16's range for every fp16 number except 0, or None."""
    for var in (op.x, op.y):
        if _is_fp32_const(var) and bool(
            np.all(_is_finite_overflow(var.val) & (np.abs(var.val) >= _MIN_OVERFLOWING_FACTOR))
        ):
            return var
    return None


def _is_fp32_const(var: Any) -> bool:
    return isinstance(var, Var) and var.op is not None and var.op.op_type == "const" \
        and var.is_tensor_or_scalar_of(dtype="fp32") and types.is_float(var.dtype)


def _is_finite_overflow(value: Any) -> NDArray[np.bool_]:
    size = np.abs(np.asarray(value))
    return np.asarray((size > _FP16_MAX) & np.isfinite(size) & (size != _INFINITY_STAND_IN))
