"""`InstanceNorm(track_running_stats=True)` in eval mode: normalizes by the running statistics, as torch does.

coremltools uses the statistics of the input instead: other values, silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result, bind_arguments, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH167", severity=Severity.WRONG,
              title="`instance_norm` ignores running statistics, silently", upstream=("none known",))


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
