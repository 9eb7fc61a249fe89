"""`x[:, idx] = v`, `x[mask] = v`, index_put with any mix of indices, and `accumulate`.

coremltools supports a None among the indices only for single positions, only one mask at the front, and no accumulation
with a whole axis; masks of a flexible size fail. See `index_assignment.assign_at_indices` for the lowering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..index_assignment import assign_at_indices
from ..lowering import (
    add_result,
    bind_arguments,
    broadcast_to,
    cast_to,
    get_dims,
    name_result,
    to_python,
    to_size_vector,
    to_tensor,
)
from ..probes import find_fault

PATCH = Patch(
    code="TORCH121",
    title="assignment at indices and masks fails for most mixes of indices",
    upstream=(
        "https://github.com/apple/coremltools/issues/1678",
        "https://github.com/apple/coremltools/issues/2188",
    ),
)


@PATCH.probe
def probe() -> str | None:
    import torch

    def write(x: Any) -> Any:
        return torch.ops.aten.index_put(x, [None, torch.tensor([0, 2])], torch.tensor(0.))

    return find_fault(write, torch.arange(12.).reshape(3, 4))


@PATCH.op("index_put", "_unsafe_index_put", "_index_put_impl", "index_put.hacked_twin")
def index_put(context: Any, node: Any) -> None:
    """Lower index_put(self, indices, values, accumulate)"""
    inputs = bind_arguments(context, node, "self indices values accumulate=False")
    x = inputs.self
    indices = _to_index_tensors(inputs.indices, node)
    values = to_tensor(inputs.values)
    accumulate = bool(to_python(inputs.accumulate, node, "accumulate"))
    if not any(index is not None for index in indices):
        entire = broadcast_to(cast_to(values, x.dtype), get_dims(x))
        new = mb.add(x=x, y=entire) if accumulate else entire
    elif any(index is not None and 0 in index.shape for index in indices):
        new = x
    elif accumulate and x.dtype == types.bool:
        raise NotConverted.at(node, "accumulates into bools", "use logical_or")
    else:
        new = assign_at_indices(x, indices, values, accumulate)
    add_result(context, node, name_result(new, node, x, inputs.values, *indices))


@PATCH.op("masked_scatter")
def masked_scatter(context: Any, node: Any) -> None:
    """Lower masked_scatter(self, mask, source): the n-th element the mask picks is the n-th of source."""
    inputs = bind_arguments(context, node, "self mask source")
    x, source = inputs.self, cast_to(inputs.source, inputs.self.dtype)
    mask = broadcast_to(cast_to(inputs.mask, types.bool), get_dims(x))
    picked = mb.reshape(x=cast_to(mask, types.int32), shape=[-1])
    place = mb.maximum(x=mb.sub(x=mb.cumsum(x=picked, axis=0), y=np.int32(1)), y=np.int32(0))
    values = mb.gather(x=mb.reshape(x=source, shape=[-1]), indices=place, axis=0)
    new = mb.select(cond=mask, a=mb.reshape(x=values, shape=to_size_vector(get_dims(x))), b=x)
    add_result(context, node, name_result(new, node, x))


def _to_index_tensors(given: Any, node: Any) -> list[Var | None]:
    """Convert the indices to Vars; lists of numbers, as torch.export may write them, become tensors."""
    indices = []
    for index in given if isinstance(given, list) else [given]:
        index = to_tensor(index) if index is not None else None
        if index is not None and index.dtype not in (types.bool, types.int32):
            index = cast_to(index, types.int32)
        indices.append(index)
    return indices
