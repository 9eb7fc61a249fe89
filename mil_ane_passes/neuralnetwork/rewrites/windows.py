"""Poolings and upsamplings beyond what the ANE of 2020 supported as chains of smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...passes.contract import Exactness
from ..layer_rewriting import Replacement, Result, rewrite_layer
from ..layer_rules import MAX_POOL_SIDE, MAX_POOL_STRIDE, MAX_UPSAMPLING, get_layer_rules
from ..network_view import NetworkView, make_layer

_MAX_STEPS = 8
"The most layers of a chain: each is a pass over its input."

Step = tuple[int, int, int, int]
"Window, stride, and padding before and after, of one pooling along one axis."


@rewrite_layer("pooling", fixes="NN108", exactness=Exactness.ROUNDING, preset="full")
def replace_pooling(layer: Any, view: NetworkView) -> Result:
    """Replace a pooling over all elements by a global one, and other large ones by chains of smaller poolings."""
    if get_layer_rules()["NN108"].find(layer, view) is None:
        return None
    params, shape = layer.pooling, view.get_fixed_shape(layer.input[0])
    window = [int(each) for each in params.kernelSize] or [3, 3]
    strides = [int(each) for each in params.stride] or [1, 1]
    kind = params.PoolingType.Name(params.type)
    if (params.WhichOneof("PoolingPaddingType") or "valid") != "valid":
        return "its padding is of the form 'same' or 'includeLastPixel'; a chain needs amounts"
    pads = [(int(each.startEdgeSize), int(each.endEdgeSize)) for each in params.valid.paddingAmounts.borderAmounts]
    pads = pads or [(0, 0), (0, 0)]
    if shape is not None and len(shape) >= 4 and tuple(window) == shape[-2:] and not any(map(any, pads)):
        made = make_layer("pooling", layer.name, layer.input, layer.output, view, layer)
        made.pooling.type, made.pooling.globalPooling = params.type, True
        return Replacement([made], f"classic global pooling ({kind.lower()})")
    if kind == "L2":
        return "root sums of squares are not a chain of smaller ones"
    plan = _plan_max if kind == "MAX" else _plan_mean
    planned = [plan(*each) for each in zip(window, strides, pads)]
    wrong = next((each for each in planned if isinstance(each, str)), None)
    if wrong is not None:
        return wrong
    if max(map(len, planned)) > _MAX_STEPS:
        return f"a chain of {max(map(len, planned))} poolings; expected at most {_MAX_STEPS}"
    steps = _align_steps([each for each in planned if not isinstance(each, str)])
    layers = _make_chain(layer, view, "pooling", len(steps))
    for made, (high, wide) in zip(layers, steps):
        made.pooling.type = params.type
        made.pooling.kernelSize.extend((high[0], wide[0]))
        made.pooling.stride.extend((high[1], wide[1]))
        made.pooling.avgPoolExcludePadding = params.avgPoolExcludePadding
        made.pooling.valid.SetInParent()
        for _, _, before, behind in (high, wide):
            made.pooling.valid.paddingAmounts.borderAmounts.add(startEdgeSize=before, endEdgeSize=behind)
    exactness = Exactness.BITWISE if kind == "MAX" else None
    return Replacement(layers, f"chain of {len(steps)} poolings", exactness)


def _plan_max(window: int, stride: int, pads: tuple[int, int]) -> list[Step] | str:
    """Return the steps of a maximum along one axis: windows that add up, the strides in the last ones."""
    strides = _factor_into_twos(stride)
    if strides is None:
        return f"a stride of {stride} is not a power of two, so no chain of strides up to {MAX_POOL_STRIDE} makes it"
    if window > _MAX_STEPS * (MAX_POOL_SIDE - 1):
        return f"a window of {window} needs a chain of more than {_MAX_STEPS} poolings"
    sizes = []
    while window > MAX_POOL_SIDE:
        sizes.append(MAX_POOL_SIDE)
        window -= MAX_POOL_SIDE - 1
    sizes.append(window)
    if max(pads) >= sizes[0]:
        return f"a padding of {max(pads)} is wider than the first window of a chain"
    steps = [(size, 1, *(pads if at == 0 else (0, 0))) for at, size in enumerate(sizes)]
    last = steps[-1]
    steps[-1] = (last[0], strides[0], last[2], last[3])
    return [*steps, *((1, each, 0, 0) for each in strides[1:])]


def _plan_mean(window: int, stride: int, pads: tuple[int, int]) -> list[Step] | str:
    """Return the steps of a mean along one axis: only windows side by side are means of smaller windows."""
    if window <= MAX_POOL_SIDE and stride <= MAX_POOL_STRIDE:
        return [(window, stride, *pads)]
    factors = _factor_into_twos(window)
    if window != stride or factors is None or any(pads):
        return (f"a mean of {window} elements with stride {stride}: only unpadded windows side by side, of a power of "
                "two, are means of smaller ones")
    return [(each, each, 0, 0) for each in factors]


def _factor_into_twos(number: int) -> list[int] | None:
    """Return factors of at most two whose product is the number; None for other numbers than powers of two."""
    if number < 1 or number & (number - 1):
        return None
    return [2] * (number.bit_length() - 1) or [1]


def _align_steps(planned: Sequence[list[Step]]) -> list[tuple[Step, Step]]:
    """Pair the steps of both axes; the shorter chain is filled up with windows of one element at its end."""
    count = max(map(len, planned))
    high, wide = ([*steps, *[(1, 1, 0, 0)] * (count - len(steps))] for steps in planned)
    return list(zip(high, wide))


@rewrite_layer("upsample", fixes="NN109", preset="full")
def replace_upsampling(layer: Any, view: NetworkView) -> Result:
    """Replace an upsampling by nearest neighbours by a chain of upsamplings by two."""
    if get_layer_rules()["NN109"].find(layer, view) is None:
        return None
    params = layer.upsample
    if params.mode != params.NN:
        return f"a linear interpolation twice by {MAX_UPSAMPLING} is not one by {MAX_UPSAMPLING ** 2}"
    found = [float(each) for each in (params.scalingFactor or params.fractionalScalingFactor)]
    factors = [_factor_into_twos(int(each)) if each == int(each) else None for each in found]
    if any(each is None for each in factors):
        return f"factors of {', '.join(f'{each:g}' for each in found)}: only powers of two are chains of twos"
    high, wide = (each or [1] for each in factors)
    count = max(len(high), len(wide))
    if count > _MAX_STEPS:
        return f"a chain of {count} upsamplings; expected at most {_MAX_STEPS}"
    layers = _make_chain(layer, view, "upsample", count)
    for at, made in enumerate(layers):
        made.upsample.mode = params.mode
        made.upsample.scalingFactor.extend(steps[at] if at < len(steps) else 1 for steps in (high, wide))
    return Replacement(layers, f"chain of {count} upsamplings")


def _make_chain(layer: Any, view: NetworkView, kind: str, count: int) -> list[Any]:
    """Make `count` layers of a kind, in sequence, from the layer's input to its output."""
    layers, source = [], layer.input[0]
    for at in range(count):
        last = at == count - 1
        name = layer.name if last else view.make_name(f"{layer.name}_{at}")
        target = layer.output[0] if last else view.make_name(f"{layer.output[0]}_{at}")
        layers.append(make_layer(kind, name, [source], [target], view, layer))
        source = target
    return layers
