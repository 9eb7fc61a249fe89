"""`GroupNorm` of a flexible number of rows or images, and of volumes with flexible sizes.

coremltools uses a list of the first sizes as a shape, which fails if one of them is symbolic ("Cannot add const [is0,
2, 4]"), and gives volumes the rank 6. Here each group is one row of [N, groups, elements].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...ir.query import is_symbolic
from ..contract import Patch
from ..lowering import add_result, bind_arguments, get_dims, name_result, to_python, to_size_vector
from ..probes import find_fault

PATCH = Patch(code="TORCH187", title="`GroupNorm` of a flexible number of rows or images is not implemented",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    normalize = torch.nn.functional.group_norm
    return find_fault(lambda x: normalize(x[x[:, 0].argmax():], 2), torch.eye(4)) or find_fault(
        lambda x: normalize(x[:, :x.shape[0] * 2], 2, torch.ones(4)), torch.eye(4)[:2], flexible=(0,)) or find_fault(
        lambda x: normalize(x, 2), torch.arange(16.0).reshape(1, 2, 2, 2, 2), flexible=(0,))


@PATCH.op("group_norm")
def group_norm(context: Any, node: Any) -> None:
    """Lower group_norm(input, num_groups, weight=None, bias=None, eps=1e-05, cudnn_enabled=True)."""
    inputs = bind_arguments(context, node, "input num_groups weight=None bias=None eps=1e-05")
    x: Var = inputs.input
    is_volume = x.rank == 5 and any(map(is_symbolic, x.shape))
    if not (any(map(is_symbolic, x.shape[:2])) or is_volume):
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping["group_norm"](context, node)
        return
    sizes, groups = get_dims(x), int(to_python(inputs.num_groups, node, "num_groups"))
    if inputs.weight is not None:  # has one element for each channel, also where their number is computed
        sizes[1] = int(inputs.weight.shape[0])
    rows = mb.reshape(x=x, shape=to_size_vector([sizes[0], groups, -1]))
    centered = mb.sub(x=rows, y=mb.reduce_mean(x=rows, axes=[2], keep_dims=True))
    variance = mb.reduce_mean(x=mb.square(x=centered), axes=[2], keep_dims=True)
    eps = np.float32(to_python(inputs.eps, node, "eps"))
    normal = mb.real_div(x=centered, y=mb.sqrt(x=mb.add(x=variance, y=eps)))
    result = mb.reshape(x=normal, shape=to_size_vector(sizes))
    for parameter, combine in ((inputs.weight, mb.mul), (inputs.bias, mb.add)):
        if parameter is not None:
            result = combine(x=result, y=mb.reshape(x=parameter, shape=[1, -1, *[1] * (x.rank - 2)]))
    add_result(context, node, name_result(result, node))
