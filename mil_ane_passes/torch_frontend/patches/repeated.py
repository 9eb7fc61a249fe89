"""`repeat_interleave` by a constant number for each element or a computed one for all, and `embedding_bag` of bags of
constant sizes.

Both gather rows, which bags reduce to their sum, mean or maximum. `tile` to more axes than its
input has adds them in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    is_constant,
    make_range,
    normalize_axis,
    to_python,
    to_tensor,
)

PATCH = Patch(code="TORCH134",
              title="`repeat_interleave` by a tensor and `tile` to more axes are rejected; `embedding_bag` is not "
                    "implemented",
              upstream=("none known",))

_BAG_REDUCTIONS = (mb.reduce_sum, mb.reduce_mean, mb.reduce_max)


@PATCH.op("repeat_interleave", "repeat_interleave.self_tensor", "repeat_interleave.self_int")
def repeat_interleave(context: Any, node: Any) -> None:
    """Lower repeat_interleave(self, repeats, dim=None, *, output_size=None); a single number is coremltools'."""
    inputs = bind_arguments(context, node, "self repeats=None dim=None output_size=None")
    repeats = inputs.self if inputs.repeats is None else inputs.repeats
    if not is_constant(repeats):
        if inputs.repeats is None or repeats.rank:
            raise NotConverted.at(node, "the repeats are computed by the model",
                                  "make them a constant, or a single number")
        add_result(context, node, _repeat_elements(inputs.self, repeats, to_python(inputs.dim, node, "dim"), node))
        return
    counts = np.asarray(repeats.val if isinstance(repeats, Var) else repeats)
    if inputs.repeats is None:
        add_result(context, node, to_tensor(np.repeat(np.arange(counts.size), counts).astype(np.int32)))
        return
    x, dim = inputs.self, to_python(inputs.dim, node, "dim")
    if dim is None and counts.size > 1:
        x, dim = mb.reshape(x=x, shape=[-1]), 0
    axis = normalize_axis(dim or 0, x.rank)
    if counts.size == 1:
        _TORCH_OPS_REGISTRY.name_to_func_mapping["repeat_interleave"](context, node)
        return
    if not isinstance(x.shape[axis], int | np.integer):
        raise NotConverted.at(node, "repeats for each element of a flexible size", "fix the size")
    places = np.repeat(np.arange(int(x.shape[axis]), dtype=np.int32), counts)
    data = cast_to(x, types.int32) if x.dtype == types.bool else x
    add_result(context, node, cast_to(mb.gather(x=data, indices=places, axis=axis, name=node.name), x.dtype))


def _repeat_elements(x: Var, repeats: Var, dim: int | None, node: Any) -> Var:
    """Build `x` with each element along `dim` (None: of the flattened tensor) a computed number of times in a row."""
    x, axis = (mb.reshape(x=x, shape=[-1]), 0) if dim is None else (x, normalize_axis(dim, x.rank))
    repeats = cast_to(repeats, types.int32)
    places = mb.floor_div(x=make_range(mb.mul(x=get_dims(x)[axis], y=repeats)), y=repeats)
    data = cast_to(x, types.int32) if x.dtype == types.bool else x
    return cast_to(mb.gather(x=data, indices=places, axis=axis, name=node.name), x.dtype)


@PATCH.op("tile")
def tile(context: Any, node: Any) -> None:
    """Lower tile(self, dims); more dims than axes add axes in front."""
    inputs = bind_arguments(context, node, "self dims")
    dims = to_python(inputs.dims, node, "dims") if is_constant(inputs.dims) else []
    if len(dims) <= inputs.self.rank:
        ops.tile(context, node)
        return
    x = mb.expand_dims(x=inputs.self, axes=list(range(len(dims) - inputs.self.rank)))
    add_result(context, node, mb.tile(x=x, reps=dims, name=node.name))


@PATCH.op("embedding_bag", "embedding_bag.padding_idx")
def embedding_bag(context: Any, node: Any) -> None:
    """Lower embedding_bag(weight, indices, offsets, ..., mode: 0 sum, 1 mean, 2 max, ...): the bags alone."""
    inputs = bind_arguments(context, node, "weight indices offsets scale_grad_by_freq=False mode=0 sparse=False "
                                "per_sample_weights=None include_last_offset=False padding_idx=None")
    padding, size = to_python(inputs.padding_idx, node, "padding_idx"), inputs.indices.shape[0]
    if (
        not is_constant(inputs.offsets)
        or not isinstance(size, int | np.integer)
        or (padding is not None and padding >= 0)
    ):
        raise NotConverted.at(node, "needs bags of static sizes, without padding_idx", "sum an nn.Embedding instead")
    starts = [int(start) for start in np.ravel(to_python(inputs.offsets, node, "offsets"))]
    ends = (
        starts[1:] if to_python(inputs.include_last_offset, node, "include_last_offset") else [*starts[1:], int(size)]
    )
    reduce = _BAG_REDUCTIONS[to_python(inputs.mode, node, "mode")]
    rows = mb.gather(x=inputs.weight, indices=cast_to(to_tensor(inputs.indices), types.int32), axis=0)
    if inputs.per_sample_weights is not None:
        rows = mb.mul(x=rows, y=mb.expand_dims(x=inputs.per_sample_weights, axes=[1]))
    width = int(inputs.weight.shape[1])
    lengths = {end - start for start, end in zip(starts, ends, strict=False)}
    if len(lengths) == 1 and 0 not in lengths and starts[0] == 0 and ends[-1] == size:
        bags = reduce(x=mb.reshape(x=rows, shape=[len(ends), lengths.pop(), width]), axes=[1], keep_dims=False)
    else:
        parts = [_reduce_bag(rows, start, end, width, reduce) for start, end in zip(starts, ends, strict=False)]
        bags = mb.concat(values=parts, axis=0) if len(parts) > 1 else parts[0]
    if len(node.outputs) > 1:
        context.add(bags, torch_name=node.outputs[0])
    else:
        context.add((bags, None, None, None), torch_name=node.name)


def _reduce_bag(rows: Var, start: int, end: int, width: int, reduce: Callable[..., Var]) -> Var:
    """Reduce one bag of rows; an empty bag gives zeros."""
    if end == start:
        return to_tensor(np.zeros((1, width), np.float32), rows.dtype)
    return reduce(x=mb.slice_by_size(x=rows, begin=[start, 0], size=[end - start, width]), axes=[0], keep_dims=True)
