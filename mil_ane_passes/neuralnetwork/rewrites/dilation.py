"""Dilated convolutions as undilated ones on every d-th element, the phases of the input as a sequence."""

from __future__ import annotations

from typing import Any

from ...passes.contract import Exactness
from ..layer_rewriting import Replacement, Result, rewrite_layer
from ..layer_rules import get_layer_rules
from ..network_view import NetworkView, make_layer


@rewrite_layer("convolution", fixes="NN106", exactness=Exactness.ROUNDING, preset="named")
def undilate_convolution(layer: Any, view: NetworkView) -> Result:
    """Compute a dilated convolution without dilation, on the phases of its input.

    Two reshapes and a permute separate the phases. Output u * d + r is the sum over k of w[k] * x[(u + k) * d + r]: the
    same products, with the weights as they are stored. Four layers before and three after move the data, so it runs
    only by name.
    """
    if get_layer_rules()["NN106"].find(layer, view) is None:
        return None
    reason = _find_obstacle(layer, view)
    if reason is not None:
        return reason
    params, shape = layer.convolution, view.get_fixed_shape(layer.input[0])
    assert shape is not None
    kernel = [int(each) for each in params.kernelSize] or [3, 3]
    high, wide = (int(each) for each in params.dilationFactor)
    pads = [(int(each.startEdgeSize), int(each.endEdgeSize)) for each in params.valid.paddingAmounts.borderAmounts]
    pads = pads or [(0, 0), (0, 0)]
    channels, sizes = shape[-3], [size + sum(pad) for size, pad in zip(shape[-2:], pads)]
    ends = [size - (extent - 1) * step for size, extent, step in zip(sizes, kernel, (high, wide))]
    more = [-size % step for size, step in zip(sizes, (high, wide))]
    rows, columns = ((size + extra) // step for size, extra, step in zip(sizes, more, (high, wide)))
    made = _Chain(layer, view)
    made.pad([(pad[0], pad[1] + extra) for pad, extra in zip(pads, more)])
    made.split_axis(channels * rows, high, columns * wide)
    made.reshape([high, channels * rows, columns, wide])
    made.permute([3, 0, 1, 2])
    made.reshape([wide * high, channels, rows, columns])
    made.convolve()
    outputs, rows, columns = int(params.outputChannels), rows - kernel[0] + 1, columns - kernel[1] + 1
    made.reshape([wide, high, outputs * rows, columns])
    made.permute([1, 2, 3, 0])  # [high, outputs * rows, columns, wide]
    made.reshape([high, outputs * rows, 1, columns * wide])
    made.permute([2, 1, 0, 3])  # [1, outputs * rows, high, columns * wide]
    made.reshape([1, outputs, rows * high, columns * wide])
    made.crop([rows * high - ends[0], columns * wide - ends[1]])
    return Replacement(made.finish(), f"{high * wide} phases as a sequence, between {len(made.layers) - 1} layers that "
                                      "move data")


def _find_obstacle(layer: Any, view: NetworkView) -> str | None:
    """Return why a dilated convolution is not made of its phases; None where it is."""
    params, shape = layer.convolution, view.get_fixed_shape(layer.input[0])
    if not view.classic:
        return "the classic reshape and permute that separate its phases have rank 5, but this network has exact ranks"
    if len(layer.input) > 1:
        return "its weights are computed"
    if shape is None or shape[0] != 1:
        return "its input has a flexible size, or is a sequence already"
    if any(int(each) != 1 for each in params.stride):
        return f"it has strides {list(params.stride)}"
    if (params.WhichOneof("ConvolutionPaddingType") or "valid") != "valid":
        return "its padding is of the form 'same', whose amounts depend on the dilation"
    return None


class _Chain:
    """Layers in sequence, the last of which makes the output of `layer`."""

    def __init__(self, layer: Any, view: NetworkView) -> None:
        self._layer, self._view = layer, view
        self._source = layer.input[0]
        self.layers: list[Any] = []

    def _add_layer(self, kind: str) -> Any:
        number = len(self.layers)
        target = self._view.make_name(f"{self._layer.output[0]}_phases_{number}")
        made = make_layer(kind, self._view.make_name(f"{self._layer.name}_{kind}_{number}"), [self._source], [target],
                          self._view, self._layer)
        self._source = target
        self.layers.append(made)
        return made

    def pad(self, ends: list[tuple[int, int]]) -> None:
        if any(map(any, ends)):
            params = self._add_layer("padding").padding
            params.constant.value = 0.0
            for start, end in ends:
                params.paddingAmounts.borderAmounts.add(startEdgeSize=start, endEdgeSize=end)

    def split_axis(self, rows: int, step: int, columns: int) -> None:
        """Make [step, rows, 1, columns] of [1, C, H, W] with H = rows / C * step."""
        self.reshape([1, rows, step, columns])
        self.permute([2, 1, 0, 3])

    def reshape(self, shape: list[int]) -> None:
        self._add_layer("reshape").reshape.targetShape.extend(shape)

    def permute(self, axes: list[int]) -> None:
        self._add_layer("permute").permute.axis.extend(axes)

    def convolve(self) -> None:
        made = self._add_layer("convolution")
        made.convolution.CopyFrom(self._layer.convolution)
        made.name = self._layer.name
        del made.convolution.dilationFactor[:]
        made.convolution.dilationFactor.extend((1, 1))
        made.convolution.valid.Clear()
        made.convolution.valid.SetInParent()

    def crop(self, amounts: list[int]) -> None:
        if any(amounts):
            params = self._add_layer("crop").crop
            for end in amounts:
                params.cropAmounts.borderAmounts.add(startEdgeSize=0, endEdgeSize=end)

    def finish(self) -> list[Any]:
        """Return the layers; the last one makes the output of the layer that they replace."""
        self.layers[-1].output[0] = self._layer.output[0]
        return self.layers
