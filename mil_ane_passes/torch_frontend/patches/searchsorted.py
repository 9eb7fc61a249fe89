"""`searchsorted` of one sequence for values of another rank, and of values with a flexible last axis.

The place of a value in a sorted sequence is the number of elements below it (`right`: not above it), as in coremltools'
lowering, which requires equal ranks and tiles the sequence. A `sorter` only defines the order of the sequence, so it
does not change the count.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, name_result, promote_operands, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH184",
              title="`searchsorted` of one sequence for values of another rank is rejected", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x, values: torch.searchsorted(x, values), torch.tensor([1.0, 2.0, 3.0]),
                      torch.tensor([[1.5, 2.0, 9.0]]))


@PATCH.op("searchsorted")
def searchsorted(context: Any, node: Any) -> None:
    """Lower searchsorted(sorted_sequence, self, out_int32=False, right=False, side=None, sorter=None).

    The sequence has shape (..., M), the values (..., N) or, of a sequence (M,), any shape of rank 0 to 4.
    """
    inputs = bind_arguments(context, node, "sorted_sequence self out_int32=False right=False side=None sorter=None")
    sequence, values = promote_operands(inputs.sorted_sequence, inputs.self)
    if max(sequence.rank, values.rank) > 4:
        raise NotConverted.at(node, "supports ranks up to 4", "reshape it first")
    side = to_python(inputs.side, node, "side") if inputs.side is not None else None
    right = side == "right" or side is None and to_python(inputs.right, node, "right")
    if sequence.rank > 1:
        sequence = mb.expand_dims(x=sequence, axes=[-2])
    column = mb.expand_dims(x=values, axes=[values.rank]) if values.rank else values
    before = (mb.less_equal if right else mb.less)(x=sequence, y=column)
    counted = mb.reduce_sum(x=cast_to(before, types.int32), axes=[-1])
    add_result(context, node, name_result(counted, node))
