"""`for i in range(1, n)` and `range(0, n, 2)` in scripts.

TorchScript counts every loop from 0 and computes the number of iterations and the index from it, by two ops without a
lowering in coremltools: iterations = max(0, ceil((stop - start) / step)), index = start + iteration · step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from ..contract import Patch
from ..lowering import add_result, bind_arguments, is_constant, to_python, to_tensor

PATCH = Patch(code="TORCH125",
              title="loops over `range(start, stop, step)` in scripts are not implemented", upstream=("none known",))


@PATCH.op("__range_length")
def range_length(context: Any, node: Any) -> None:
    """Lower __range_length(lo, hi, step): ints."""
    inputs = bind_arguments(context, node, "lo hi step")
    bounds = [inputs.lo, inputs.hi, inputs.step]
    if is_constant(bounds):
        start, stop, step = (int(to_python(bound, node, "range")) for bound in bounds)
        add_result(context, node, mb.const(val=np.int32(len(range(start, stop, step))), name=node.name))
        return
    start, stop, step = (to_tensor(bound) for bound in bounds)
    turns = mb.sub(x=np.int32(0), y=mb.floor_div(x=mb.sub(x=start, y=stop), y=step))
    add_result(context, node, mb.maximum(x=turns, y=np.int32(0), name=node.name))


@PATCH.op("__derive_index")
def derive_index(context: Any, node: Any) -> None:
    """Lower __derive_index(index, start, step): ints."""
    inputs = bind_arguments(context, node, "index start step")
    step = mb.mul(x=to_tensor(inputs.index), y=to_tensor(inputs.step))
    add_result(context, node, mb.add(x=to_tensor(inputs.start), y=step, name=node.name))
