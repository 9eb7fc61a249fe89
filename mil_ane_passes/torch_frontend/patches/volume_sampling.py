"""`grid_sample` of volumes (rank 5): a sum of gathers; by bicubic interpolation: an error with a workaround.

Core ML's `resample` has two spatial axes, and coremltools lowers samples of images (rank 4) to it. Here a volume is a
table of N * D * H * W rows of C channels. Nearest is one gather of rows, and trilinear the sum of the eight corners
around each point, with weights that are products of one weight for each axis. Both interpolations, all paddings and
flexible sizes are supported, from iOS15 on: learned 3-D tables of colors, bilateral grids, warps of features. In fp16
models the coordinates stay in fp32, because fp16 has no fractions above 1024 and few above 64, and the row indices are
computed in int32. Gathers with computed indices run without the Neural Engine (ANE214).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    Size,
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    make_prefix,
    make_range,
    to_python,
    to_size_vector,
    to_tensor,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH179",
              title="`grid_sample` of volumes (rank 5) is not implemented, and by bicubic interpolation fails without "
                    "advice",
              upstream=("none known",))

_VOLUME_RANK = 5
_NEAREST, _BICUBIC = 1, 2
"torch's numbers of these interpolations, after bilinear."
_ZEROS, _REFLECTION = 0, 2
"torch's numbers of these paddings, with border between them."
_COORDINATES = "volume_coordinates"
"The prefix of the names of ops that compute coordinates: they stay in fp32."


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x, grid: torch.nn.functional.grid_sample(x, grid, align_corners=False),
                      torch.arange(8.0).reshape(1, 1, 2, 2, 2), torch.full((1, 2, 2, 2, 3), 0.25))


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.quantization", "FP16ComputePrecision.is_valid_op")
def is_valid_op(host: Callable[..., bool], self: Any, op: Operation) -> bool:
    """Return whether the op may become fp16."""
    return not op.name.startswith(_COORDINATES) and host(self, op)


@PATCH.op("grid_sampler", "grid_sampler_3d")
def sample_grid(context: Any, node: Any) -> None:
    """Lower grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)."""
    if context[node.inputs[0]].rank == _VOLUME_RANK:
        add_result(context, node, _sample_volume(context, node))
        return
    mode = node.inputs[2]
    if to_python(context[mode] if isinstance(mode, str) else mode, node, "interpolation_mode") == _BICUBIC:
        raise NotConverted.at(node, "interpolates by mode 'bicubic', which Core ML's resample does not have",
                              "use mode='bilinear' or 'nearest', or sample outside of the model")
    ops.grid_sampler(context, node)


def _sample_volume(context: Any, node: Any) -> Var:
    """Build the samples of a volume [N, C, D, H, W] at a grid [N, D', H', W', 3] of (x, y, z)."""
    inputs = bind_arguments(context, node, "input grid interpolation_mode padding_mode align_corners")
    mode = to_python(inputs.interpolation_mode, node, "interpolation_mode")
    padding = to_python(inputs.padding_mode, node, "padding_mode")
    align_corners = bool(to_python(inputs.align_corners, node, "align_corners"))
    x, grid = inputs.input, inputs.grid
    count, channels, *extents = get_dims(x)
    batch, *places, _ = get_dims(grid)
    batch = count if isinstance(count, int) else batch
    sizes = extents[::-1]  # a grid has (x, y, z), a volume (z, y, x)
    rows = mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 3, 4, 1]), shape=to_size_vector([-1, channels]))
    coordinates = _Coordinates(make_prefix(context, _COORDINATES), sizes)
    points = coordinates.locate(mb.reshape(
        x=grid, shape=to_size_vector([batch, -1, 3]), name=coordinates.make_name("grid")), padding, align_corners)
    first_rows = _find_first_rows(batch, sizes)
    if mode == _NEAREST:
        # half to even, as torch rounds
        index = cast_to(mb.round(x=points, name=coordinates.make_name("nearest")), types.int32)
        kept, is_inside = _keep_inside(index, sizes)
        found = _gather_rows(rows, _split_columns(_scale_by_strides(kept, sizes)), first_rows)
        if padding == _ZEROS:
            inside = mb.reduce_min(x=cast_to(is_inside, types.int32), axes=[2], keep_dims=True)
            found = mb.mul(x=found, y=cast_to(inside, x.dtype))
    else:
        found = _sum_corners(rows, points, coordinates, sizes, first_rows, padding == _ZEROS)
    found = mb.transpose(x=found, perm=[0, 2, 1])
    result: Var = mb.reshape(x=found, shape=to_size_vector([batch, channels, *places]), name=node.name)
    return result


class _Coordinates:
    """Builds the ops that compute coordinates, with names that keep them in fp32."""

    def __init__(self, prefix: str, sizes: Sequence[Size]) -> None:
        self._prefix, self._sizes, self._numbers = prefix, sizes, itertools.count()

    def make_name(self, stem: str) -> str:
        return f"{self._prefix}{stem}_{next(self._numbers)}"

    def locate(self, grid: Var, padding: int, align_corners: bool) -> Var:
        """Build the position of each point along each axis, fp32 [N, points, 3] in elements, from -1 to the size.

        A position outside of the volume is moved into it; with padding zeros, to the element before the first or after
        the last, whose weight is 0.
        """
        size = self._make_size_vector()
        last = self._compute(mb.sub, size, np.float32(1))
        span = last if align_corners else size
        place = self._compute(mb.add, self._widen(grid), np.float32(1))
        # torch's order of the ops, so that ties of the nearest element are the same
        if align_corners:
            place = self._compute(mb.mul, self._compute(mb.mul, place, np.float32(0.5)), span)
        else:
            place = self._compute(mb.sub, self._compute(mb.mul, place, span), np.float32(1))
            place = self._compute(mb.mul, place, np.float32(0.5))
        if padding == _ZEROS:
            return self._clip(place, np.float32(-1), size)
        if padding == _REFLECTION:
            place = self._reflect(place, np.float32(0 if align_corners else -0.5), span)
        return self._clip(place, np.float32(0), last)

    def _reflect(self, place: Var, lowest: Any, span: Any) -> Var:
        """Build the reflected position: a triangle wave from `lowest` up by `span`, and down again.

        An axis of one element with aligned corners has a span of 0, and any value, which is then clipped to 0.
        """
        span = self._compute(mb.maximum, span, np.float32(1))
        period = self._compute(mb.mul, span, np.float32(2))
        distance = mb.abs(x=self._compute(mb.sub, place, lowest), name=self.make_name("distance"))
        turns = mb.floor(x=self._compute(mb.real_div, distance, period), name=self.make_name("turns"))
        rest = self._compute(mb.sub, distance, self._compute(mb.mul, turns, period))
        height = mb.abs(x=self._compute(mb.sub, rest, span), name=self.make_name("height"))
        return self._compute(mb.add, self._compute(mb.sub, span, height), lowest)

    def _clip(self, place: Var, lowest: Any, highest: Any) -> Var:
        return self._compute(mb.minimum, self._compute(mb.maximum, place, lowest), highest)

    def _widen(self, grid: Var) -> Var:
        return grid if grid.dtype == types.fp32 else mb.cast(x=grid, dtype="fp32", name=self.make_name("wide"))

    def _make_size_vector(self) -> Any:
        sizes = to_size_vector(self._sizes)
        return mb.cast(x=sizes, dtype="fp32", name=self.make_name("sizes")) if isinstance(sizes, Var) else (
            sizes.astype(np.float32))

    def _compute(self, build: Callable[..., Var], x: Any, y: Any) -> Any:
        """Build an op of two operands; its result is a constant if both are arrays."""
        return build(x=x, y=y, name=self.make_name("place"))

    def split(self, points: Var) -> tuple[Var, Var]:
        """Build the elements before the points, and the fractions of the distance to the next."""
        before = mb.floor(x=points, name=self.make_name("before"))
        return cast_to(before, types.int32), mb.sub(x=points, y=before, name=self.make_name("fraction"))


def _sum_corners(rows: Var, points: Var, coordinates: _Coordinates, sizes: Sequence[Size], first_rows: Any,
                 zeros: bool) -> Var:
    """Build the weighted sum of the eight corners around each point: [N, points, channels]."""
    before, fraction = coordinates.split(points)
    fraction = cast_to(fraction, rows.dtype)
    offsets, weights = [], []
    for index, weight in ((before, mb.sub(x=to_tensor(1.0, rows.dtype), y=fraction)),
                          (mb.add(x=before, y=np.int32(1)), fraction)):
        # a corner past the border has the weight 0 already, unless the padding is zeros
        kept, is_inside = _keep_inside(index, sizes)
        offsets.append(_split_columns(_scale_by_strides(kept, sizes)))
        weights.append(_split_columns(mb.mul(x=weight, y=cast_to(is_inside, rows.dtype)) if zeros else weight))
    total = None
    for z, y in itertools.product((0, 1), repeat=2):
        shared = mb.mul(x=weights[z][2], y=weights[y][1])
        for x in (0, 1):
            corner = _gather_rows(rows, [offsets[x][0], offsets[y][1], offsets[z][2]], first_rows)
            part = mb.mul(x=corner, y=mb.mul(x=shared, y=weights[x][0]))
            total = part if total is None else mb.add(x=total, y=part)
    return total


def _keep_inside(index: Var, sizes: Sequence[Size]) -> tuple[Var, Var]:
    """Build the index clamped to the volume along each axis, and a bool that is true where it was inside."""
    size = to_size_vector(sizes)
    last = mb.sub(x=size, y=np.int32(1)) if isinstance(size, Var) else size - np.int32(1)
    kept = mb.minimum(x=mb.maximum(x=index, y=np.int32(0)), y=last)
    return kept, mb.equal(x=kept, y=index)


def _scale_by_strides(index: Var, sizes: Sequence[Size]) -> Var:
    """Build the row offset of each index along its axis, from the first row of the volume."""
    strides = to_size_vector([1, sizes[0], _multiply_sizes(sizes[:2])])
    scaled: Var = mb.mul(x=index, y=strides)
    return scaled


def _multiply_sizes(sizes: Sequence[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        both = isinstance(product, int) and isinstance(size, int)
        product = product * size if both else mb.mul(x=product, y=size)
    return product


def _find_first_rows(batch: Size, sizes: Sequence[Size]) -> Var | None:
    """Build the index of the first row of each volume, [N, 1, 1]; None for a single volume."""
    if isinstance(batch, int) and batch == 1:
        return None
    return mb.reshape(x=mb.mul(x=make_range(batch), y=_multiply_sizes(sizes)), shape=[-1, 1, 1])


def _split_columns(x: Var) -> list[Var]:
    """Split [N, points, 3] into three of one column."""
    return list(mb.split(x=x, num_splits=3, axis=2))


def _gather_rows(rows: Var, offsets: Sequence[Var], first_rows: Var | None) -> Var:
    """Build the rows at the sum of the offsets, each [N, points, 1], as [N, points, channels]."""
    index = offsets[0]
    for offset in (*offsets[1:], *((first_rows,) if first_rows is not None else ())):
        index = mb.add(x=index, y=offset)
    found: Var = mb.gather(x=rows, indices=mb.squeeze(x=index, axes=[2]), axis=0)
    return found
