"""Lifting of a 1-D convolution to a 2-D one with a dummy axis."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Operation, Var

from ...ane.limits import LIMITS
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.compressed_weights import explain_axis_obstacle, insert_unit_axis
from ...ir.query import get_const_value, get_itemsize, get_static_shape, is_opaque
from ...passes.layout import compute_padded_bytes, format_bytes

__all__ = [
    "BINARY_OPS",
    "HEIGHT",
    "UNARY_OPS",
    "WIDTH",
    "build_lifted_conv",
    "choose_dummy_axis",
    "describe_lift_cost",
    "find_dummy_axis",
    "find_lift_obstacle",
    "insert_dummy_axis",
    "insert_numbers",
    "lift_conv",
    "remove_dummy_axis",
]

HEIGHT, WIDTH = -1, 2
"Values of the option `axis`, the position of the dummy axis: -1 lays the kernel on the height, 2 on the width."
UNARY_OPS = (
    "abs", "acos", "asin", "atan", "atanh", "ceil", "clip", "cos", "cosh", "erf", "exp", "exp2", "floor", "inverse",
    "log", "logical_not", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threshold", "cast",
    "identity", "clamped_relu", "elu", "gelu", "leaky_relu", "linear_activation", "prelu", "relu", "relu6",
    "scaled_tanh", "sigmoid", "sigmoid_hard", "silu", "softplus", "softplus_parametric", "softsign",
    "thresholded_relu", "batch_norm",
)
"Ops that work element by element, or with parameters per channel (axis 1, which no dummy axis moves)."
BINARY_OPS = ("add", "sub", "mul", "real_div", "floor_div", "maximum", "minimum", "mod", "pow")
_MAX_KERNEL_WIDTH = min(bound.most for bound in LIMITS["conv-kernel-width"])
"Widest kernel that is supported on every ANE generation."


def _find_dummy_axis_position(axis: int) -> int:
    """Return the position of the dummy axis, counted from the front of the rank-4 tensor."""
    return 3 if axis == HEIGHT else 2


def find_dummy_axis(op: Operation) -> int | None:
    """Return the one axis (2 or 3, of 4) that a squeeze drops from rank 4 or an expand_dims adds to rank 3."""
    if op.op_type not in ("squeeze", "expand_dims") or is_opaque(op) or op.axes is None:
        return None
    wide = op.x if op.op_type == "squeeze" else op.outputs[0]
    axes = get_const_value(op.axes)
    if wide.rank != 4 or axes is None or len(axes) != 1:
        return None
    at = int(axes[0]) % 4
    return at if at in (2, 3) else None


def choose_dummy_axis(op: Operation, axis: int | str) -> int:
    """Return `axis`, or for "auto" the axis by which a lifted conv or conv_transpose is fastest.

    That is the width, which keeps the long axis last, where every ANE generation supports the kernel there: rows of
    one element are padded 32 times, and leave 31 of 32 lanes idle, which is more than a kernel 9 to 15 wide costs. A
    conv_transpose with a bias has its kernel on the height, the only form whose numbers were verified.
    """
    if isinstance(axis, int):
        return axis
    has_bias = op.op_type == "conv_transpose" and op.bias is not None
    return HEIGHT if has_bias or _get_kernel_extent(op) > _MAX_KERNEL_WIDTH else WIDTH


def _get_kernel_extent(op: Operation) -> int:
    """Return how many elements the kernel of a rank-3 conv or conv_transpose covers."""
    return (int(op.weight.shape[2]) - 1) * int(get_const_value(op.dilations, [1])[0]) + 1


def find_lift_obstacle(op: Operation, axis: int) -> str | None:
    """Return why a rank-3 conv or conv_transpose cannot be lifted with the dummy axis at `axis`, or None."""
    if op.op_type == "conv_transpose" and op.output_shape is not None and op.output_shape.val is None:
        return "output_shape is not constant"
    reason = explain_axis_obstacle(op.weight)
    if reason:
        return reason
    extent = _get_kernel_extent(op)
    if axis == WIDTH and extent > _MAX_KERNEL_WIDTH:
        return (f"kernel covers {extent} on the width, above {_MAX_KERNEL_WIDTH}; use axis=-1 (the height)")
    return None


def insert_dummy_axis(mb: RewriteBuilder, x: Var, axis: int) -> Var:
    """Return rank-3 `x` with the dummy axis: the value it was squeezed from, or one expand_dims for all its users."""
    at = _find_dummy_axis_position(axis)
    if x.op is not None and x.op.op_type == "squeeze" and find_dummy_axis(x.op) == at:
        return x.op.x

    def build_expand_dims() -> Any:
        with mb.at(mb.find_insertion_point(x), x.name):
            return mb.expand_dims(x=x, axes=[axis])

    lifted: Var = mb.once(("lifted", x, at), build_expand_dims)
    return lifted


def remove_dummy_axis(mb: RewriteBuilder, y: Var, axis: int) -> Var:
    """Remove the dummy axis from rank-4 `y`."""
    squeezed: Var = mb.squeeze(x=y, axes=[axis])
    return squeezed


def lift_conv(mb: RewriteBuilder, op: Operation, axis: int) -> Var:
    """Lift `op`: insert the dummy axis into x, rebuild the op at rank 4, and remove the axis from the result."""
    return remove_dummy_axis(mb, build_lifted_conv(mb, op, insert_dummy_axis(mb, op.x, axis), axis), axis)


def build_lifted_conv(mb: RewriteBuilder, op: Operation, x: Var, axis: int) -> Var:
    """Rebuild `op` (conv or conv_transpose of rank 3) on rank-4 `x`.

    Every parameter gets its neutral element at the dummy axis: kernel 1, stride 1, dilation 1, no padding. Thus each
    output is the same sum of the same products. Weights and bias keep their bytes.
    """
    at = _find_dummy_axis_position(axis) - 2
    inputs: dict[str, Any] = {"x": x, "weight": insert_unit_axis(mb, op.weight, at + 2)}
    for name, bound in op.inputs.items():
        if name in ("strides", "dilations"):
            inputs[name] = insert_numbers(get_const_value(bound), at, [1])
        elif name == "pad":
            inputs[name] = insert_numbers(get_const_value(bound), 2 * at, [0, 0])
        elif name == "output_shape":
            inputs[name] = insert_numbers(get_const_value(bound), at + 2, [1])
        elif name not in inputs:
            inputs[name] = bound
    return rebuild_op(mb, op, **inputs)


def describe_lift_cost(op: Operation, axis: int) -> str:
    """Describe the buffer cost of the lift by the 64-byte row rule, with numbers where the shapes are known."""
    where = f"kernel on the {'height' if axis == HEIGHT else 'width'}"
    costs = []
    for name, var in (("in", op.x), ("out", op.outputs[0])):
        shape, size = get_static_shape(var), get_itemsize(var)
        if shape is None:
            return f"{where}; buffers depend on symbolic dimensions"
        lifted = insert_numbers(list(shape), _find_dummy_axis_position(axis), [1])
        before, after = (format_bytes(compute_padded_bytes(each, size)) for each in (shape, lifted))
        costs.append(f"{name} {after} instead of {before}")
    return f"{where}; padded buffers (computed, 64-byte rows): {', '.join(costs)}"


def insert_numbers(numbers: list[int], at: int, extra: list[int]) -> list[int]:
    """Insert `extra` into `numbers` before position `at`."""
    return [*numbers[:at], *extra, *numbers[at:]]
