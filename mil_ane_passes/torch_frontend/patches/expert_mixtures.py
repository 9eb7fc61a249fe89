"""Mixtures of experts of transformers: `_grouped_mm`, and `histc`, which counts the rows of each expert.

coremltools has neither. Core ML has no product whose groups depend on the data: here each row is put into the columns
of its expert, and one product with the stacked weights of all experts adds up the groups. This computes as much as all
experts for each row. Where there are no more rows than experts, as in a step of a decoder, the weights of each row's
expert are gathered instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, get_dims, make_range, name_result, to_python, to_tensor

PATCH = Patch(code="TORCH196",
              title="`histc` and the grouped products of mixtures of experts (`_grouped_mm`) are not implemented",
              upstream=("none known",))


@PATCH.op("histc")
def histc(context: Any, node: Any) -> None:
    """Lower histc(self, bins=100, min=0, max=0): one number of elements for each bin.

    Integers that are cast to floats are compared with the integer of each bin, where bins are that wide; others with
    the ends of the bins.
    """
    inputs = bind_arguments(context, node, "self bins=100 min=0 max=0")
    bins, low, high = (to_python(getattr(inputs, name), node, name) for name in ("bins", "min", "max"))
    if low == high:
        raise NotConverted.at(node, "counts between the extremes of its input", "pass min= and max=")
    x = mb.reshape(x=inputs.self, shape=[-1, 1])
    if _is_cast_integer(inputs.self) and high - low == bins - 1 and float(low).is_integer():
        counted = mb.equal(x=x, y=np.arange(low, high + 1, dtype=np.float32))
    else:
        ends = np.linspace(low, high, bins + 1, dtype=np.float32)
        above, below = mb.greater_equal(x=x, y=ends[:-1]), mb.less(x=x, y=ends[1:])
        last = mb.logical_and(x=mb.less_equal(x=x, y=ends[1:]), y=np.arange(bins) == bins - 1)
        counted = mb.logical_and(x=above, y=mb.logical_or(x=below, y=last))
    counts = mb.reduce_sum(x=mb.cast(x=counted, dtype="int32"), axes=[0])
    add_result(context, node, name_result(cast_to(counts, inputs.self.dtype), node))


def _is_cast_integer(x: Var) -> bool:
    return x.op is not None and x.op.op_type == "cast" and types.is_int(x.op.x.dtype)


@PATCH.op("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(context: Any, node: Any) -> None:
    """Lower _grouped_mm(self, mat2, offs, bias=None, out_dtype=None) of (N, K), (E, K, M) and E ends of groups."""
    inputs = bind_arguments(context, node, "self mat2 offs=None bias=None out_dtype=None")
    x, weights, ends = to_tensor(inputs.self), to_tensor(inputs.mat2), inputs.offs
    if (x.rank, weights.rank) != (2, 3) or ends is None:
        raise NotConverted.at(node, f"multiplies groups of ranks {x.rank} and {weights.rank}",
                              "give it rows of rank 2, weights of rank 3 and `offs`")
    (rows, features), (experts, _, results) = get_dims(x), weights.shape
    places = mb.expand_dims(x=to_tensor(make_range(rows), types.int32), axes=[1])
    after = mb.cast(x=mb.greater_equal(x=places, y=mb.expand_dims(x=ends, axes=[0])), dtype="int32")
    if isinstance(rows, int) and rows <= experts:
        own = mb.minimum(x=mb.reduce_sum(x=after, axes=[1]), y=np.int32(experts - 1))
        product = mb.matmul(x=mb.expand_dims(x=x, axes=[1]), y=mb.gather(x=weights, indices=own, axis=0))
        result = mb.squeeze(x=product, axes=[1])
    else:
        # 1 in the columns of experts whose group has not ended, minus the same of those whose group has not begun
        begun = mb.concat(values=[mb.add(x=mb.mul(x=places, y=np.int32(0)), y=np.int32(1)),
                                  mb.slice_by_index(x=after, begin=[0, 0], end=[0, -1], begin_mask=[True, True],
                                                    end_mask=[True, False])], axis=1)
        chosen = cast_to(mb.sub(x=begun, y=after), x.dtype)
        placed = mb.mul(x=mb.expand_dims(x=chosen, axes=[2]), y=mb.expand_dims(x=x, axes=[1]))
        result = mb.matmul(x=mb.reshape(x=placed, shape=[-1, experts * features]),
                           y=mb.reshape(x=weights, shape=[experts * features, results]))
    if inputs.bias is not None:
        result = mb.add(x=result, y=inputs.bias)
    add_result(context, node, name_result(result, node))
