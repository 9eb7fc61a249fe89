"""`InstanceNorm(track_running_stats=True)` in eval mode: normalizes by the running statistics, as torch does.

coremltools uses the statistics of the input instead: other values, silently. A batch norm by the statistics of its
input, `F.batch_norm(..., training=True)`, is not implemented if it is exported.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, add_results, bind_arguments, cast_to, get_dims, is_constant, to_python, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH167", severity=Severity.WRONG,
              title="`instance_norm` ignores running statistics, silently; an exported `batch_norm` by the statistics "
                    "of its input is not implemented", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    def normalized(x: Any) -> Any:
        return torch.instance_norm(x, None, None, torch.ones(2), torch.ones(2) * 4, False, 0.1, 1e-5, False)

    return find_fault(normalized, torch.arange(8.).reshape(1, 2, 2, 2))


@PATCH.op("instance_norm")
def instance_norm(context: Any, node: Any) -> None:
    """Lower instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
    cudnn_enabled).
    """
    inputs = bind_arguments(context, node, "input weight bias running_mean running_var use_input_stats momentum eps")
    if to_python(inputs.use_input_stats, node, "use_input_stats"):
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping["instance_norm"](context, node)
        return
    # coremltools' fuse_conv_batchnorm reads gamma and beta, which an instance norm can lack.
    channels = inputs.running_mean.shape[0]
    gamma = np.ones(channels, np.float32) if inputs.weight is None else inputs.weight
    beta = np.zeros(channels, np.float32) if inputs.bias is None else inputs.bias
    add_result(context, node, mb.batch_norm(x=inputs.input, mean=inputs.running_mean, variance=inputs.running_var,
                                            gamma=gamma, beta=beta, epsilon=to_python(inputs.eps, node, "eps"),
                                            name=node.name))


@PATCH.op("_native_batch_norm_legit_functional")
def batch_norm_by_input(context: Any, node: Any) -> None:
    """Lower _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, training, momentum,
    eps) of mode training -> result, mean, inverse deviation, and both running statistics after this step.
    """
    inputs = bind_arguments(context, node, "input weight bias running_mean running_var training momentum eps")
    if not to_python(inputs.training, node, "training"):
        raise NotConverted.at(node, "normalizes by running statistics and returns new ones", "call .eval() first")
    x, momentum, eps = inputs.input, to_python(inputs.momentum, node, "momentum"), to_python(inputs.eps, node, "eps")
    axes = [axis for axis in range(x.rank) if axis != 1]
    mean = mb.reduce_mean(x=x, axes=axes, keep_dims=True)
    centered = mb.sub(x=x, y=mean)
    variance = mb.reduce_mean(x=mb.square(x=centered), axes=axes, keep_dims=True)
    inverse = mb.rsqrt(x=variance, epsilon=np.float32(eps))
    result = mb.mul(x=centered, y=inverse)
    sizes = [-1, *[1] * (x.rank - 2)]
    if inputs.weight is not None:
        result = mb.mul(x=result, y=mb.reshape(x=inputs.weight, shape=sizes))
    if inputs.bias is not None:
        result = mb.add(x=result, y=mb.reshape(x=inputs.bias, shape=sizes))
    mean, inverse, variance = (mb.squeeze(x=each, axes=axes) for each in (mean, inverse, variance))
    count = cast_to(to_tensor(_multiply_sizes([get_dims(x)[axis] for axis in axes])), x.dtype)
    sample_variance = mb.mul(x=variance, y=mb.real_div(x=count, y=mb.sub(x=count, y=np.float32(1))))
    running = [mb.add(x=mb.mul(x=before, y=np.float32(1 - momentum)), y=mb.mul(x=now, y=np.float32(momentum)))
               for before, now in ((inputs.running_mean, mean), (inputs.running_var, sample_variance))]
    add_results(context, node, [result, mean, inverse, *running])


def _multiply_sizes(sizes: Sequence[Any]) -> Any:
    return functools.reduce(lambda one, other: one * other if is_constant([one, other]) else mb.mul(x=one, y=other),
                            sizes)
