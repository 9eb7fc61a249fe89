"""Convolutions of values without a batch, with a computed bias, and with any `output_padding`.

An exported convolution of (C, L) keeps these axes, where a trace adds a batch: coremltools rejects it, or reads C as
the batch. It cannot infer the type of a transposed convolution with a computed bias, and before iOS17 a bias has to be
constant: computed ones are added afterwards.
torch extends the output by `output_padding` at the end and crops `padding` from both ends. coremltools pads the input
by the difference instead, which adds a stride for each element: the output is silently too large. Without any padding,
and in 3-D, it is rejected. Here the input is padded until the output is long enough, and the output is cropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var
from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    is_constant,
    lower_without_batch,
    name_result,
    promote_operands,
    to_python,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH173", severity=Severity.WRONG,
              title="`output_padding` above `padding` makes transposed convolutions too large, or is rejected; "
                    "exported ones without a batch and computed biases are rejected or wrong, and scripted "
                    "`ConvTranspose2d` is not implemented",
              upstream=("none known",))

_GENERAL = "input weight bias stride padding dilation transposed output_padding groups"
_TRANSPOSED = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"


@PATCH.probe
def probe() -> str | None:
    import torch

    def model(x: Any) -> Any:
        return torch.nn.functional.conv_transpose2d(
            x, torch.ones(1, 1, 2, 3), stride=(2, 3), padding=(1, 0), output_padding=1)

    return find_fault(model, torch.ones(1, 1, 3, 4))


@PATCH.op("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "_convolution_mode")
def plain_convolution(context: Any, node: Any) -> None:
    """Lower conv1d to conv3d of exported programs and scripts, and those with padding="same" of traces."""
    inputs = bind_arguments(context, node, "input weight bias=None")
    if inputs.input.rank == inputs.weight.rank - 1:
        lower_without_batch(context, node, plain_convolution)
        return
    if not is_constant(inputs.bias) and not _allows_computed_parameters():
        _add_bias_afterwards(context, node, inputs.bias, plain_convolution)
        return
    lower = ops._convolution_mode if node.kind == "_convolution_mode" else ops._convolution
    lower(context, node)


@PATCH.op("_convolution", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose2d.input",
          "conv_transpose3d", "conv_transpose3d.input")
def convolution(context: Any, node: Any) -> None:
    """Lower convolution(..., transposed, output_padding, groups) and conv_transpose1d to 3d."""
    transposed = node.kind.startswith("conv_transpose")
    inputs = bind_arguments(context, node, _TRANSPOSED if transposed else _GENERAL)
    if inputs.input.rank == inputs.weight.rank - 1:
        lower_without_batch(context, node, convolution)
        return
    transposed = transposed or bool(to_python(inputs.transposed, node, "transposed"))
    if not is_constant(inputs.bias) and (transposed or not _allows_computed_parameters()):
        _add_bias_afterwards(context, node, inputs.bias, convolution)
        return
    if transposed and not is_constant(inputs.weight) and not _allows_computed_parameters():
        raise NotConverted.at(node, "the weight is computed, expected a constant before iOS17: convert with "
                                    "minimum_deployment_target=ct.target.iOS17")
    constants = (inputs.weight, inputs.bias, inputs.stride, inputs.padding, inputs.output_padding)
    if (not transposed or inputs.input.rank != inputs.weight.rank
            or not all(map(is_constant, constants))):
        ops._convolution(context, node)
        return
    count = inputs.weight.rank - 2
    strides, pads, added, dilations = (
        np.broadcast_to(np.asarray(to_python(getattr(inputs, name), node, name), np.int32), count)
        for name in ("stride", "padding", "output_padding", "dilation"))
    if not added.any() or count < 3 and (added <= pads).all():
        ops._convolution(context, node)
        return
    x, weight = promote_operands(inputs.input, inputs.weight)
    longer = -(-np.maximum(added - pads, 0) // strides)
    if longer.any():
        x = mb.pad(x=x, pad=np.array([0, 0, 0, 0, *(each for more in longer for each in (0, more))], np.int32),
                   mode="constant", constant_val=0.0)
    bias = {} if inputs.bias is None else {"bias": cast_to(inputs.bias, weight.dtype)}
    full = mb.conv_transpose(x=x, weight=weight, strides=strides, dilations=dilations, pad_type="valid",
                             groups=int(to_python(inputs.groups, node, "groups")), **bias)
    add_result(context, node, name_result(_crop_spatial_axes(full, pads, pads - added + strides * longer), node))


def _allows_computed_parameters() -> bool:
    """Return whether the bias of a convolution, and the weight of a transposed one, need not be constants."""
    return bool(is_current_opset_version_compatible_with(ct.target.iOS17))


def _add_bias_afterwards(context: Any, node: Any, bias: Var, lower: Callable[[Any, Any], None]) -> None:
    """Lower a convolution by `lower` without its bias, and add the computed `bias` to its channels."""
    plain = copy.copy(node)
    plain.inputs = [None if place == 2 else name for place, name in enumerate(node.inputs)]
    plain.kwinputs = {name: value for name, value in (node.kwinputs or {}).items() if name != "bias"}
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        unset = f"{node.name}_no_bias"
        context.add(None, torch_name=unset)
        plain.inputs = [unset if name is None else name for name in plain.inputs]
    lower(context, plain)
    y = context[node.name]
    added = cast_to(mb.expand_dims(x=bias, axes=list(range(1, y.rank - 1))), y.dtype)
    context.add(mb.add(x=y, y=added), torch_name=node.name, override=True)


def _crop_spatial_axes(x: Var, before: Any, after: Any) -> Var:
    """Crop the axes after the channels."""
    if not before.any() and not after.any():
        return x
    result: Var = mb.slice_by_index(
        x=x, begin=[0, 0, *before], end=[0, 0, *-after], begin_mask=[True, True, *(before == 0)],
        end_mask=[True, True, *(after == 0)])
    return result
