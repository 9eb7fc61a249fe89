"""`layer_norm` with a bias alone, or whose weight or bias is computed, as by a network that predicts another's scale.

MIL's norm needs constants, so the scale and the offset are separate ops; a constant bias needs a weight, which is one.
It needs only the number of normalized axes, not their sizes, which `x.shape[1:]` of a script leaves to the input.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..lowering import bind_arguments, cast_to, is_constant
from ..probes import find_fault

PATCH = Patch(code="TORCH189", title="`layer_norm` with a bias alone, or a computed weight or bias, is rejected",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.nn.functional.layer_norm(x, (3,), x[0] * 2, x[1]),
                      torch.arange(6.0).reshape(2, 3)) or find_fault(
        lambda x: torch.nn.functional.layer_norm(x, (3,), None, torch.ones(3)), torch.arange(6.0).reshape(2, 3))


@PATCH.op("layer_norm", "native_layer_norm")
def layer_norm(context: Any, node: Any) -> None:
    """Lower layer_norm(input, normalized_shape, weight, bias, eps); with constants it is coremltools' own."""
    inputs = bind_arguments(context, node, "input normalized_shape weight=None bias=None")
    sizes = inputs.normalized_shape
    plain = copy.copy(node)
    plain.inputs = list(node.inputs)
    if is_constant(inputs.weight) and is_constant(inputs.bias) and is_constant(sizes):
        if inputs.weight is None and inputs.bias is not None:
            plain.inputs[2] = f"{node.name}_weight"
            context.add(mb.const(val=np.ones_like(inputs.bias.val)), torch_name=plain.inputs[2])
        ops.layer_norm(context, plain)
        return
    unset = None
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        unset = f"{node.name}_unset"
        context.add(None, torch_name=unset)
        if not is_constant(sizes):
            plain.inputs[1] = f"{node.name}_axes"
            count = sizes.shape[0] if isinstance(sizes, Var) else len(sizes)
            context.add(mb.const(val=np.ones(count, np.int32)), torch_name=plain.inputs[1])
    plain.inputs[2:4] = [unset] * len(plain.inputs[2:4])
    plain.kwinputs = {name: value for name, value in (node.kwinputs or {}).items() if name not in ("weight", "bias")}
    ops.layer_norm(context, plain)
    found = context[node.name]
    y = found[0] if isinstance(found, tuple) else found
    if inputs.weight is not None:
        y = mb.mul(x=y, y=cast_to(inputs.weight, y.dtype))
    if inputs.bias is not None:
        y = mb.add(x=y, y=cast_to(inputs.bias, y.dtype))
    context.add((y, *found[1:]) if isinstance(found, tuple) else y, torch_name=node.name, override=True)
