"""`cummax` and `cummin`: the largest number so far, and its index, in log2(n) steps of slices.

After a step of length s each position contains the maximum of 2s elements. The index of the running maximum is the last
one at which the maximum is equal to the element itself; it is a running maximum too. NaN is not supported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_results, bind_arguments, cast_to, normalize_axis, to_python
from ..slice_assignment import scan_axis

PATCH = Patch(code="TORCH137",
              title="`cummax` and `cummin` are not implemented", upstream=("none known",))


@PATCH.op("cummax", "cummin")
def lower_cummax_cummin(context: Any, node: Any) -> None:
    """Lower cummax(self, dim) -> values, indices."""
    inputs = bind_arguments(context, node, "self dim")
    x = cast_to(inputs.self, types.int32) if inputs.self.dtype == types.bool else inputs.self
    if x.rank == 0:
        add_results(context, node, [inputs.self, mb.const(val=np.int32(0))])
        return
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    if not isinstance(x.shape[axis], int | np.integer):
        raise NotConverted.at(node, "needs a dimension of static size", "fix the size")
    values = scan_axis(x, axis, mb.maximum if node.kind == "cummax" else mb.minimum)
    own = cast_to(mb.equal(x=values, y=x), types.int32)
    places = np.arange(x.shape[axis], dtype=np.int32).reshape([-1] + [1] * (x.rank - 1 - axis))
    indices = scan_axis(mb.mul(x=own, y=places), axis, mb.maximum)
    add_results(context, node, [cast_to(values, inputs.self.dtype), indices])
