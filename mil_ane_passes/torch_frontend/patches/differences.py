"""`torch.diff`: each element minus the previous one, n times, along one dimension.

Each step is two slices and a subtraction, so flexible sizes are supported. The difference of bools is `not_equal`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, name_result, normalize_axis, result_type, to_python

PATCH = Patch(code="TORCH109",
              title="`diff` is not implemented", upstream=("none known",))


@PATCH.op("diff")
def diff(context: Any, node: Any) -> None:
    """Lower diff(self, n=1, dim=-1, prepend=None, append=None)."""
    inputs = bind_arguments(context, node, "self n=1 dim=-1 prepend=None append=None")
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), inputs.self.rank)
    times = to_python(inputs.n, node, "n")
    if times == 0:  # torch then leaves out what is put before and after
        add_result(context, node, mb.identity(x=inputs.self, name=node.name))
        return
    parts = [part for part in (inputs.prepend, inputs.self, inputs.append) if part is not None]
    dtype = result_type(*parts)
    x = mb.concat(values=[cast_to(part, dtype) for part in parts], axis=axis) if len(parts) > 1 else inputs.self
    size = x.shape[axis]
    if isinstance(size, int | np.integer) and size <= times:
        raise NotConverted.at(node, f"{times} differences of {size} elements leave none")
    for _ in range(times):
        x = _subtract_values(_slice_axis(x, axis, 1, None), _slice_axis(x, axis, 0, -1))
    add_result(context, node, name_result(x, node))


def _subtract_values(later: Var, earlier: Var) -> Var:
    if later.dtype == types.bool:
        return mb.logical_xor(x=later, y=earlier)
    return mb.sub(x=later, y=earlier)


def _slice_axis(x: Var, axis: int, start: int, end: int | None) -> Var:
    begins = [start if place == axis else 0 for place in range(x.rank)]
    ends = [end or 0 if place == axis else 0 for place in range(x.rank)]
    entire = [place != axis or end is None for place in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=entire)
