"""Broadcastable layers of two values as the classic layers of Core ML 2, where the shapes allow what those broadcast.

Which shapes classic layers broadcast is in the comments of NeuralNetwork.proto, and in what coremltools' own converter
to this format uses (backend/nn/op_mapping.py, `_add_elementwise_binary`): the second value may lack, with sizes of 1,
all axes but [B], [C], [H, W], [C, H, W], [B, C] or [B, H, W] of the first, at ranks up to 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...passes.contract import Exactness
from ..layer_converter import get_layer_kind
from ..layer_rewriting import Replacement, Result, rewrite_layer
from ..network_view import Array, NetworkView, Shape, make_layer, read_floats, write_floats

_SUMS = ("", "B", "C", "HW", "CHW", "BC", "BHW", "BCHW")
"The axes that the second value of a classic Add or Multiply may have; its others are 1."
_EXTREMA = ("BC", "BCHW")
"Those of a classic Max or Min: the proto has no others among its examples."
_MAX_BROADCAST_RANK = 4
_CLASSIC = {"addBroadcastable": "add", "multiplyBroadcastable": "multiply", "maxBroadcastable": "max",
            "minBroadcastable": "min", "subtractBroadcastable": "add"}


@rewrite_layer("addBroadcastable", "multiplyBroadcastable", "maxBroadcastable", "minBroadcastable", fixes="NN101")
def replace_broadcastable(layer: Any, view: NetworkView) -> Result:
    """Replace broadcastable sums, products and extrema by classic layers, or by a scale or bias for a constant."""
    kind = _CLASSIC[get_layer_kind(layer)]
    if len(layer.input) != 2:
        return _explain_input_count(layer)
    for constant, other in (layer.input, layer.input[::-1]):
        numbers = view.get_constant(constant)
        if numbers is not None and other not in view.constants:
            return _combine_with_constant(layer, view, kind, other, constant, numbers)
    return _combine_values(layer, view, kind, list(layer.input))


@rewrite_layer("subtractBroadcastable", fixes="NN101")
def replace_subtract(layer: Any, view: NetworkView) -> Result:
    """Replace a difference by a negation (a linear activation with -1) and a classic sum."""
    if len(layer.input) != 2:
        return _explain_input_count(layer)
    first, second = layer.input
    numbers = view.get_constant(second)
    if numbers is not None and first not in view.constants:
        return _combine_with_constant(layer, view, "add", first, second, -numbers)
    if second in view.constants and numbers is None:
        return "its second input is a quantized constant, which is not changed"
    negated = view.make_name(f"{second}_negated")
    if (shape := view.get_shape(second)) is not None:
        view.shapes[negated] = shape
        view.symbols[negated] = view.symbols[second]
    turn = make_linear(layer, view, f"{layer.name}_negate", second, negated, -1.0, 0.0)
    numbers = view.get_constant(first)
    if numbers is not None and second not in view.constants:
        found = _combine_with_constant(layer, view, "add", negated, first, numbers)
    else:
        found = _combine_values(layer, view, "add", [first, negated])
    if not isinstance(found, Replacement):
        return found
    return Replacement([turn, *found.layers], f"negation and {found.note}")


@rewrite_layer("divideBroadcastable", fixes="NN101", exactness=Exactness.ROUNDING, moves=2.0**-23, preset="full")
def replace_divide(layer: Any, view: NetworkView) -> Result:
    """Replace a quotient with a constant divisor by a product with its reciprocal, which rounds once more."""
    if len(layer.input) != 2:
        return _explain_input_count(layer)
    first, second = layer.input
    numbers = view.get_constant(second)
    if numbers is None:
        return ("its divisor is computed, and the inverse of classic layers adds an epsilon to it"
                if second not in view.constants else "its divisor is a quantized constant, which is not changed")
    with np.errstate(all="ignore"):
        inverse = (np.float32(1) / numbers).astype(np.float32)
    smallest = np.finfo(np.float32).tiny
    if not (np.isfinite(inverse) & (np.abs(inverse) >= smallest)).all():
        return "the reciprocal of its divisor is zero, infinite or denormal"
    found = _combine_with_constant(layer, view, "multiply", first, second, inverse)
    powers = (np.frexp(numbers)[0] == np.copysign(np.float32(0.5), numbers)).all()
    if isinstance(found, Replacement) and powers:
        return Replacement(found.layers, f"{found.note}, exact for powers of two", Exactness.BITWISE)
    return found


@rewrite_layer("powBroadcastable", fixes="NN101")
def replace_power(layer: Any, view: NetworkView) -> Result:
    """Replace a power with a constant exponent of one number by a unary function."""
    if len(layer.input) != 2:
        return _explain_input_count(layer)
    base, exponent = layer.input
    numbers = view.get_constant(exponent)
    if numbers is None or numbers.size != 1:
        return ("its exponent is not a constant with one element, but the classic power has one exponent for all "
                "elements")
    reason = _explain_smaller_rank(view, base, numbers)
    if reason is not None:
        return reason
    made = make_layer("unary", layer.name, [base], layer.output, view, layer)
    made.unary.type, made.unary.alpha, made.unary.scale = made.unary.POWER, float(numbers.reshape(())), 1.0
    return Replacement([made], f"unary power of {float(numbers.reshape(())):g}")


@rewrite_layer("floorDivBroadcastable", "modBroadcastable", "whereBroadcastable", fixes="NN101", preset="full")
def keep_other_broadcastable(layer: Any, view: NetworkView) -> Result:
    """Skip broadcastable layers without a classic equivalent."""
    return f"there is no classic layer for {get_layer_kind(layer)}"


def _explain_input_count(layer: Any) -> str:
    return f"it has {len(layer.input)} inputs; classic forms are known for 2"


def make_linear(
    layer: Any, view: NetworkView, name: str, source: str, target: str, scale: float, shift: float
) -> Any:
    """Make the activation `scale * x + shift`."""
    made = make_layer("activation", name if name == layer.name else view.make_name(name), [source], [target], view,
                      layer)
    made.activation.linear.alpha, made.activation.linear.beta = scale, shift
    return made


def _combine_values(layer: Any, view: NetworkView, kind: str, names: list[str]) -> Result:
    """Make the classic layer of two values, that of the larger shape first."""
    shapes = [view.shapes[name] for name in names if name in view.shapes]
    if len(shapes) < len(names):
        return "the shape of an input is unknown"
    quantized = next((name for name in names if name in view.constants and view.get_constant(name) is None), None)
    if quantized is not None:
        return f"'{quantized}' is a quantized constant, which is not changed"
    if any(name in view.constants for name in names):
        return "both inputs are constants"
    if view.have_equal_shapes(*names):
        made = make_layer(kind, layer.name, names, layer.output, view, layer)
        return Replacement([made], f"classic {kind} of equal shapes")
    allowed = _EXTREMA if kind in ("max", "min") else _SUMS
    for large, small in (shapes, shapes[::-1]):
        axes = _find_broadcast_axes(large, small, allowed)
        if axes is not None:
            ordered = names if large is shapes[0] else names[::-1]
            made = make_layer(kind, layer.name, ordered, layer.output, view, layer)
            return Replacement([made], f"classic {kind}, which broadcasts {format_shape(small)} over "
                                       f"{format_shape(large)}")
    return (f"a classic {kind} does not broadcast {format_shape(shapes[0])} and {format_shape(shapes[1])} "
            f"(up to rank {_MAX_BROADCAST_RANK}; the smaller has the axes "
            f"{', '.join(each or 'none' for each in allowed)} of the larger, or 1)")


def _find_broadcast_axes(large: Shape, small: Shape, allowed: tuple[str, ...]) -> str | None:
    """Return the axes that `small` has of `large`, among those that classic layers allow; None where they do not."""
    rank = _MAX_BROADCAST_RANK
    if len(large) > rank or len(small) > rank or None in large or None in small:
        return None
    wide, thin = (dict(zip("BCHW", (1,) * (rank - len(shape)) + shape)) for shape in (large, small))
    for axes in allowed:
        if all(thin[axis] == (wide[axis] if axis in axes else 1) for axis in "BCHW") and len(small) <= len(large):
            return axes or "-"
    return None


def _combine_with_constant(
    layer: Any, view: NetworkView, kind: str, name: str, constant: str, numbers: Array
) -> Result:
    """Make the layer that combines a value with a constant that is stored in the layer itself."""
    reason = _explain_smaller_rank(view, name, numbers)
    if reason is not None:
        return reason
    if numbers.size == 1:
        return _combine_with_number(layer, view, kind, name, float(numbers.reshape(())))
    if kind in ("max", "min"):
        return f"a classic {kind} has no constant operand, and a classic constant is a value of rank 5"
    shape = view.get_shape(name)
    assert shape is not None
    stored = _find_stored_shape(shape, numbers.shape)
    if stored is None:
        return (f"a constant of shape {format_shape(numbers.shape)} beside {format_shape(shape)}: a scale or bias "
                "stores [C], [1, H, W] or [C, H, W], at rank 3 or more")
    data = getattr(view.constants[constant], get_layer_kind(view.constants[constant])).data
    made = make_layer("scale" if kind == "multiply" else "bias", layer.name, [name], layer.output, view, layer)
    params = made.scale.scale if kind == "multiply" else made.bias.bias
    (made.scale.shapeScale if kind == "multiply" else made.bias.shape).extend(stored)
    stored_numbers = read_floats(data)
    if stored_numbers is not None and np.array_equal(stored_numbers, numbers.ravel()):
        params.CopyFrom(data)
    else:
        write_floats(params, numbers.ravel(), data)
    return Replacement([made], f"{'scale' if kind == 'multiply' else 'bias'} of shape {format_shape(stored)}")


def _combine_with_number(layer: Any, view: NetworkView, kind: str, name: str, number: float) -> Result:
    target = layer.output[0]
    if kind in ("add", "multiply"):
        scale, shift = (1.0, number) if kind == "add" else (number, 0.0)
        return Replacement([make_linear(layer, view, layer.name, name, target, scale, shift)],
                           f"linear activation {scale:g} * x + {shift:g}")
    if kind == "max":
        return Replacement([_make_threshold(layer, view, layer.name, name, target, number)],
                           f"unary threshold at {number:g}")
    negated, clipped = view.make_name(f"{target}_negated"), view.make_name(f"{target}_clipped")
    view.shapes |= {each: view.shapes[name] for each in (negated, clipped)}
    return Replacement([
        make_linear(layer, view, f"{layer.name}_negate", name, negated, -1.0, 0.0),
        _make_threshold(layer, view, f"{layer.name}_clip", negated, clipped, -number),
        make_linear(layer, view, layer.name, clipped, target, -1.0, 0.0),
    ], f"unary threshold at {-number:g} between two negations")


def _make_threshold(layer: Any, view: NetworkView, name: str, source: str, target: str, number: float) -> Any:
    made = make_layer("unary", name if name == layer.name else view.make_name(name), [source], [target], view, layer)
    made.unary.type, made.unary.alpha, made.unary.scale = made.unary.THRESHOLD, number, 1.0
    return made


def _explain_smaller_rank(view: NetworkView, name: str, numbers: Array) -> str | None:
    """Return why the result would not have the shape of the value, which a layer with one input keeps; else None."""
    shape = view.get_shape(name)
    if shape is None:
        return "the shape of an input is unknown"
    if numbers.ndim > len(shape):
        return (f"its constant of shape {format_shape(numbers.shape)} has a larger rank than the value "
                f"{format_shape(shape)}")
    for size, own in zip(numbers.shape[::-1], shape[::-1]):
        if size not in (1, own):
            return f"its constant of shape {format_shape(numbers.shape)} enlarges the value {format_shape(shape)}"
    return None


def _find_stored_shape(shape: Shape, constant: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape in which a scale or bias stores a constant beside a value of `shape`; None if it does not."""
    padded = (1,) * (3 - len(constant)) + constant
    if len(shape) < 3 or any(size != 1 for size in padded[:-3]):
        return None
    channels, height, width = padded[-3:]
    if (height, width) == (1, 1):
        return (channels,)
    return (channels, height, width) if (height, width) == shape[-2:] and channels in (1, shape[-3]) else None


def format_shape(shape: Shape) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
