"""`prelu` with one slope per channel after a linear layer, of any rank.

MIL's prelu supports different slopes for rank 4 only; coremltools lifts rank 2 to rank 3, which is unsupported. Exact
for every rank: prelu(x) = relu(x) - slope * relu(-x), with the slopes along axis 1. A single slope is `leaky_relu`.
Rank 4 with a constant number of channels remains MIL's own prelu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH129",
              title="per-channel PReLU is rejected for every rank except 4", upstream=(
        "https://github.com/apple/coremltools/issues/2002",
        "https://github.com/apple/coremltools/pull/2781",
    ))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.nn.functional.prelu(x, torch.tensor([0.1, 0.5])), torch.tensor([[1.0, -1.0]]))


@PATCH.op("prelu", "prelu_kernel")
def prelu(context: Any, node: Any) -> None:
    """Lower prelu(self, weight): `weight` has one slope, or one for each size of axis 1 of `self`."""
    inputs = bind_arguments(context, node, "self weight")
    x = to_tensor(inputs.self)
    slopes = cast_to(to_tensor(inputs.weight), x.dtype)
    if slopes.val is not None:
        values = np.unique(slopes.val)
        if values.size == 1:
            add_result(context, node, mb.leaky_relu(x=x, alpha=values[0], name=node.name))
            return
        if x.rank == 4:
            add_result(context, node, mb.prelu(x=x, alpha=slopes.val.reshape(-1), name=node.name))
            return
    below = mb.mul(x=mb.relu(x=mb.mul(x=x, y=_make_minus_one(x))), y=_reshape_along_channels(slopes, x.rank))
    add_result(context, node, mb.sub(x=mb.relu(x=x), y=below, name=node.name))


def _make_minus_one(x: Any) -> Any:
    return types.nptype_from_builtin(x.dtype)(-1)


def _reshape_along_channels(slopes: Any, rank: int) -> Any:
    """Reshape the slopes to broadcast along axis 1."""
    after = max(rank - 2, 0)
    if slopes.rank != 1:  # torch.export has them in the shape of the operand
        return slopes
    if slopes.val is not None:
        return slopes.val.reshape([-1] + [1] * after)
    return mb.expand_dims(x=slopes, axes=list(range(1, 1 + after))) if after else slopes
