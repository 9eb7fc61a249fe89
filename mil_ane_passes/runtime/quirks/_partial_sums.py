"""Partial sums of convolutions and matrix products, computed only for elements that may overflow. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..op_inputs import OpInputs
from ..ops.conv import compute_pads, find_conv_transpose_window
from ._operands import ReplacedInputs, compute_sum_start

__all__ = ["insert_overflows", "sum_magnitudes"]

#: products in memory at once, 32 MB of float64: a bound for any machine, and large enough for vectorized kernels
_MAX_PRODUCTS_AT_ONCE = 1 << 22
#: Products that are summed as one block. An output is examined product by product only if a block may bring it over the
#: limit; the shorter the blocks, the fewer the outputs.
_PRODUCTS_PER_BLOCK = 24
#: factor for the rounding of a sum of magnitudes: one percent covers about a hundred thousand float32 terms
_ROUNDING_SLACK = 1.01


class _Products(NamedTuple):
    """The products that each output sums: `left` and `right`, indexed by the output's position, multiplied elementwise.

    The outputs are reshaped to `shape`. The leading axes of `left` are the output axes `left_axes`, and the leading
    axes of `right` are the output axes `right_axes`. The other axes, at least one, are summed in row-major order.
    """

    shape: tuple[int, ...]
    left: torch.Tensor
    right: torch.Tensor
    left_axes: tuple[int, ...]
    right_axes: tuple[int, ...]

    def count_terms(self) -> int:
        """Return the number of products that each output sums."""
        return math.prod(self.left.shape[len(self.left_axes) :])

    def iterate_blocks(self) -> Iterator[_Products]:
        """Split the sums into consecutive blocks.

        Each has as many products as `_PRODUCTS_PER_BLOCK` and `_MAX_PRODUCTS_AT_ONCE` allow.
        """
        axis, other = len(self.left_axes), len(self.right_axes)
        extent = self.left.shape[axis]
        rows = max(math.prod(self.left.shape[:axis]), math.prod(self.right.shape[:other]), 1)
        size = max(1, min(_PRODUCTS_PER_BLOCK, _MAX_PRODUCTS_AT_ONCE // rows) * extent // max(1, self.count_terms()))
        for first in range(0, extent, size):
            length = min(size, extent - first)
            left, right = self.left.narrow(axis, first, length), self.right.narrow(other, first, length)
            yield self._replace(left=left.double(), right=right.double())

    def compute_sums(self) -> torch.Tensor:
        """Compute all sums."""
        summed = range(len(self.shape), len(self.shape) + self.left.dim() - len(self.left_axes))
        return torch.einsum(
            self.left, [*self.left_axes, *summed], self.right, [*self.right_axes, *summed], list(range(len(self.shape)))
        )


def insert_overflows(y: torch.Tensor, inputs: OpInputs, limit: float) -> torch.Tensor:
    """Replace each element of `y` of which a partial sum reaches `limit` by an infinity.

    The infinity has the sign of the first such sum. The cost is one more run of the op, on magnitudes. If its result is
    inconclusive, the cost is two more runs in float64, and time linear in the products of the inconclusive blocks.
    Memory is bounded, except for copies of operands and results.
    """
    start = compute_sum_start(inputs, y)
    places = (~(sum_magnitudes(inputs, start) * _ROUNDING_SLACK < limit)).flatten().nonzero().squeeze(1)
    if not places.numel():
        return y
    products = _PRODUCT_BUILDERS[inputs.op.op_type](inputs, y)
    start, sign = start.flatten().double(), torch.zeros(y.numel(), dtype=torch.float64)
    if places.numel() * products.count_terms() <= _MAX_PRODUCTS_AT_ONCE:
        sign[places] = _find_first_overflow(products, places, start[places], limit)
    else:
        _find_overflows_by_block(products, start, limit, sign)
    sign = sign.reshape(y.shape).to(y.dtype)
    return torch.where(sign == 0, y, sign * math.inf)


def _find_overflows_by_block(products: _Products, sums: torch.Tensor, limit: float, sign: torch.Tensor) -> None:
    """Fill `sign` with the results of `_find_first_overflow`; a block is examined only for outputs that may overflow.

    `sums` is the start of the sums.
    """
    for block in products.iterate_blocks():
        magnitude = block._replace(left=block.left.abs(), right=block.right.abs()).compute_sums().flatten()
        doubt = ~(sums.abs() + _ROUNDING_SLACK * magnitude < limit) & (sign == 0) & ~sums.isnan()
        for places in doubt.nonzero().squeeze(1).split(max(1, _MAX_PRODUCTS_AT_ONCE // max(1, block.count_terms()))):
            sign[places] = _find_first_overflow(block, places, sums[places], limit)
        sums = sums + block.compute_sums().flatten()


def sum_magnitudes(inputs: OpInputs, start: torch.Tensor) -> torch.Tensor:
    """Sum, for each element, the magnitudes of its products and its `start`: no partial sum exceeds this.

    Raises MemoryLimitReached if this needs more memory than the limit leaves beside the live values of the run.
    """
    names = {"linear": ("x", "weight"), "matmul": ("x", "y"), "einsum": ("values",)}
    operands = {name: inputs[name] for name in names.get(inputs.op.op_type, ("x", "weight"))}
    nbytes = sum(each.nbytes for value in operands.values() for each in (value if isinstance(value, list) else [value]))
    # the op's result, `start`, its magnitudes, and the sums
    inputs.machine.live.require_room(inputs.op, nbytes + 4 * start.nbytes)
    magnitudes: dict[str, Any] = {"bias": None} | {
        name: [each.abs() for each in value] if isinstance(value, list) else value.abs()
        for name, value in operands.items()}
    sums: torch.Tensor = inputs.machine.kernels[inputs.op.op_type](inputs.op, ReplacedInputs(inputs, magnitudes))
    return sums.add_(start.abs())


def _find_first_overflow(products: _Products, places: torch.Tensor, start: torch.Tensor, limit: float) -> torch.Tensor:
    """Return, for each flat output index in `places`, the sign of the first partial sum that reaches `limit`, or 0."""
    index = torch.unravel_index(places, products.shape)
    left = products.left[tuple(index[axis] for axis in products.left_axes)].flatten(1).double()
    right = products.right[tuple(index[axis] for axis in products.right_axes)].flatten(1).double()
    sums = torch.cat([start[:, None], left.mul_(right)], dim=1).cumsum_(1)
    too_large = sums.abs() >= limit
    first = too_large.to(torch.uint8).argmax(1, keepdim=True)
    return (sums.gather(1, first).sign() * too_large.gather(1, first)).squeeze(1)


def _make_linear_products(inputs: OpInputs, y: torch.Tensor) -> _Products:
    weight = inputs["weight"]
    x = inputs["x"].reshape(-1, weight.shape[1])
    return _Products((x.shape[0], weight.shape[0]), x, weight, (0,), (1,))


def _make_matmul_products(inputs: OpInputs, y: torch.Tensor) -> _Products:
    left, right = inputs["x"], inputs["y"]
    left = left[None] if left.dim() == 1 else left.mT if inputs.value("transpose_x") else left
    right = right if inputs.value("transpose_y") else right.mT
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:])
    axes = tuple(range(len(batch)))
    rows, columns = len(batch), len(batch) + 1
    return _Products((*batch, left.shape[-2], right.shape[-2]), left, right, (*axes, rows), (*axes, columns))


def _make_einsum_products(inputs: OpInputs, y: torch.Tensor) -> _Products:
    """Make the products of the two equations of the op.

    Both contract the last axis of the first operand with the third-last axis of the second.
    """
    left, right = inputs["values"]
    right = right.movedim(-3, -1)
    rank = y.dim()
    left = left.expand(*y.shape[:-1], left.shape[-1])
    right = right.expand(*y.shape[:-3], *y.shape[-2:], right.shape[-1])
    return _Products(tuple(y.shape), left, right, tuple(range(rank - 1)), (*range(rank - 3), rank - 2, rank - 1))


def _make_conv_products(inputs: OpInputs, y: torch.Tensor) -> _Products:
    x, weight = inputs["x"], inputs["weight"]
    strides, dilations = inputs.values("strides"), inputs.values("dilations")
    reach = [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilations)]
    pads = compute_pads(inputs, list(x.shape[2:]), reach, strides)
    return _make_window_products(_pad_spatial(x, pads), weight, y, strides, dilations, inputs.value("groups"))


def _make_conv_transpose_products(inputs: OpInputs, y: torch.Tensor) -> _Products:
    """Make the products of the equivalent convolution: zeros between the elements of the input, the kernel flipped."""
    x, weight, groups = inputs["x"], inputs["weight"], inputs.value("groups")
    strides, dilations = inputs.values("strides"), inputs.values("dilations")
    rank = x.dim() - 2
    spread = x.new_zeros(*x.shape[:2], *((extent - 1) * step + 1 for extent, step in zip(x.shape[2:], strides)))
    places = (..., *(slice(None, None, step) for step in strides))
    spread[places] = x
    reach = [(size - 1) * step for size, step in zip(weight.shape[2:], dilations)]
    full = [extent + more for extent, more in zip(spread.shape[2:], reach)]
    same = [extent * step for extent, step in zip(x.shape[2:], strides)]
    starts, _ = find_conv_transpose_window(inputs, full, same)
    pads = [(reach[axis] - starts[axis], starts[axis] + y.shape[2 + axis] - spread.shape[2 + axis])
            for axis in range(rank)]
    turned = weight.flip(list(range(2, rank + 2))).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return _make_window_products(_pad_spatial(spread, pads), turned, y, [1] * rank, dilations, groups)


def _pad_spatial(x: torch.Tensor, pads: list[tuple[int, int]]) -> torch.Tensor:
    return functional.pad(x, [amount for pair in reversed(pads) for amount in pair]).contiguous()


def _make_window_products(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, strides: list[int], dilations: list[int], groups: int
) -> _Products:
    """Make the products of a convolution of the padded `x`; the windows of the input are views, not copies."""
    each = weight.shape[1]
    size = (x.shape[0], groups, *y.shape[2:], each, *weight.shape[2:])
    steps = [step * stride for step, stride in zip(x.stride()[2:], strides)]
    taps = [step * dilation for step, dilation in zip(x.stride()[2:], dilations)]
    windows = x.as_strided(size, (x.stride(0), each * x.stride(1), *steps, x.stride(1), *taps))
    shape = (x.shape[0], groups, weight.shape[0] // groups, *y.shape[2:])
    return _Products(shape, windows, weight.unflatten(0, (groups, -1)), (0, 1, *range(3, len(shape))), (1, 2))


_PRODUCT_BUILDERS: dict[str, Callable[[OpInputs, torch.Tensor], _Products]] = {
    "conv": _make_conv_products,
    "conv_transpose": _make_conv_transpose_products,
    "einsum": _make_einsum_products,
    "linear": _make_linear_products,
    "matmul": _make_matmul_products,
}
