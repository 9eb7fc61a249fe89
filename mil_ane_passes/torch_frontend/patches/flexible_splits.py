"""`chunk` and `split` along an axis of flexible size, as slices.

coremltools divides the symbol, or passes a computed size to MIL's split. A chunk has ceil(size / chunks) elements, the
last one the rest; a slice with ends computed from the size is equivalent. The number of pieces of `split` is the number
that the trace unpacks. Constant sizes are left to coremltools, except those of a single piece, which it rejects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import bind_arguments, get_dims, is_constant, normalize_axis, to_python, to_size_vector, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH115",
              title="`chunk` and `split` along a flexible axis, and `split` into one piece are rejected",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x.chunk(2)[1], torch.arange(4.0), flexible=(0,))


@PATCH.op("constantchunk")
def constantchunk(context: Any, node: Any) -> None:
    """Lower ConstantChunk[chunks, dim](self), which has as many outputs as chunks."""
    x = context[node.inputs[0]]
    axis = normalize_axis(node.attr["dim"], x.rank)
    if node.attr["chunks"] == 1:
        context.add(mb.identity(x=x, name=node.outputs[0]), node.outputs[0])
        return
    if _has_known_size(x, axis):
        _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind](context, node)
        return
    size = get_dims(x)[axis]
    step = mb.floor_div(x=mb.add(x=size, y=node.attr["chunks"] - 1), y=node.attr["chunks"])
    for place, name in enumerate(node.outputs):
        end = None if place == len(node.outputs) - 1 else mb.mul(x=step, y=place + 1)
        context.add(_slice_axis(x, axis, 0 if place == 0 else mb.mul(x=step, y=place), end, name), name)


@PATCH.op("chunk")
def chunk(context: Any, node: Any) -> None:
    """Lower chunk(self, chunks, dim=0) to a list, as used by scripts that index it."""
    inputs = bind_arguments(context, node, "self chunks dim=0")
    x, chunks = inputs.self, to_python(inputs.chunks, node, "chunks")
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    size = get_dims(x)[axis]
    if not isinstance(size, int):
        raise NotConverted.at(node, "the number of pieces depends on a flexible size", "fix the size")
    step = -(-size // chunks)
    context.add([_slice_axis(x, axis, begin, min(begin + step, size), f"{node.name}_{place}")
                 for place, begin in enumerate(range(0, size, step))], node.name)


@PATCH.op("split", "split_with_sizes")
def split(context: Any, node: Any) -> None:
    """Lower split(self, split_size, dim=0), split_with_sizes(self, split_sizes, dim=0), and their `unsafe_` forms."""
    inputs = bind_arguments(context, node, "self split_size dim=0" if "split_sizes" not in (node.kwinputs or {})
                            else "self split_sizes dim=0")
    x, sizes = to_tensor(inputs.self), inputs.split_size if hasattr(inputs, "split_size") else inputs.split_sizes
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    if _has_known_size(x, axis) and is_constant(sizes) and np.ndim(
            one := to_python(sizes, node, "split_size")) == 0 and 0 < x.shape[axis] <= one:
        context.add([mb.identity(x=x, name=f"{node.name}_0")], node.name)
        return
    if _has_known_size(x, axis) and not isinstance(sizes, list):
        _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind.removeprefix("unsafe_")](context, node)
        return
    if (isinstance(sizes, Var) and sizes.rank == 0) or isinstance(sizes, int):
        is_known = not isinstance(sizes, Var) or is_constant(sizes)
        sizes = [to_python(sizes, node, "split_size") if is_known else sizes] * _count_pieces(node)
    elif isinstance(sizes, Var):
        sizes = to_python(sizes, node, "split_sizes")
    begin: Any = 0
    found = []
    for place, size in enumerate(sizes):
        size = int(size.val) if isinstance(size, Var) and size.val is not None else size
        end = begin + size if isinstance(begin, int) and isinstance(size, int) else mb.add(x=begin, y=size)
        found.append(_slice_axis(x, axis, begin, end, f"{node.name}_{place}"))
        begin = end
    context.add(found, node.name)


def _slice_axis(x: Var, axis: int, begin: Any, end: Any, name: str) -> Var:
    """Return x[begin:end] along an axis, up to its end where `end` is None."""
    others = [place != axis for place in range(x.rank)]
    begins = [0] * axis + [begin] + [0] * (x.rank - axis - 1)
    ends = [0] * axis + [0 if end is None else end] + [0] * (x.rank - axis - 1)
    return mb.slice_by_index(x=x, begin=to_size_vector(begins), end=to_size_vector(ends), begin_mask=others,
                             end_mask=[other or end is None for other in others], name=name)


def _count_pieces(node: Any) -> int:
    """Return how many pieces the graph unpacks, or, in an exported program, how many there are."""
    for other in getattr(node.parent, "nodes", ()):
        if other.kind == "listunpack" and node.name in other.inputs:
            return len(other.outputs)
    pieces = (node.meta or {}).get("val")
    if isinstance(pieces, list | tuple):
        return len(pieces)
    raise NotConverted.at(node, "the number of pieces depends on a flexible size", "unpack them, or fix the size")


def _has_known_size(x: Var, axis: int) -> bool:
    return isinstance(x.shape[axis], int | np.integer)
