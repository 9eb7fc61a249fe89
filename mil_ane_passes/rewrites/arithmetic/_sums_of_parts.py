"""Products with a stored weight, split into sums along the inner dimension, and the estimated gain.

Rewrites use the latency model of a chip on which such splits were measured to be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.latency_parameters import find_chips
from ...ane.latency_terms import Chip, Work, compute_terms, describe_work
from ...ane.sizes import Sizes
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_static_shape, is_compressed, is_const
from ...ir.weight_cuts import cut_weight, find_cut_unit
from ...passes.contract import FP32_UNSUPPORTED_REASON
from ...passes.targets import Generation, parse_target
from .._weights import find_sharing_obstacle

__all__ = ["CHANNEL_STEP", "MIN_GAIN", "Parts", "StoredProduct", "build_sum_of_parts", "compute_work_of_parts",
           "estimate_gain", "find_form_obstacle", "find_gain_obstacle", "find_stored_product", "find_weight_obstacle"]

CHANNEL_STEP = 64
"Parts begin at multiples of this number of channels: two rows of 64 bytes."
MIN_GAIN = 0.1
"Minimum share of an op's time to save: the cost of the additional adds was measured on one chip only."
Parts = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class StoredProduct:
    """A conv, linear or matmul with a stored weight: its input `name`, and the axes that are summed over."""

    op: Operation
    name: str
    weight_axis: int
    x_axis: int

    @property
    def weight(self) -> Var:
        weight: Var = self.op.inputs[self.name]
        return weight

    @property
    def inner(self) -> int:
        """The number of channels that are summed over, without the taps of a conv."""
        return int(self.weight.shape[self.weight_axis])

    @property
    def has_taps(self) -> bool:
        """True if it is a conv with more than one tap."""
        return self.op.op_type == "conv" and any(extent != 1 for extent in self.weight.shape[2:])

    @property
    def work(self) -> Work:
        """The work by declared shapes; those of x and the output have to be known."""
        return describe_work(self.op, Sizes())


def find_stored_product(op: Operation) -> StoredProduct | str:
    """Describe `op` as a product with a stored weight, or return why it cannot be split into parts."""
    name = "y" if op.op_type == "matmul" else "weight"
    weight = op.inputs[name]
    if not (is_const(weight) or is_compressed(weight)) or is_const(op.x):
        return "no stored weight"
    if op.op_type == "conv":
        return StoredProduct(op, name, 1, 1) if get_const_value(op.groups, 1) == 1 else "the conv has groups"
    if op.op_type == "linear":
        return StoredProduct(op, name, 1, -1)
    if weight.rank != 2 or op.x.rank < 2:
        return "no stored matrix"
    turned = [bool(get_const_value(op.inputs.get(each), False)) for each in ("transpose_x", "transpose_y")]
    return StoredProduct(op, name, 1 if turned[1] else 0, -2 if turned[0] else -1)


def find_form_obstacle(product: StoredProduct) -> str:
    """Return why `product` is not split on the ANE, or why the gain is not known, or ""."""
    if product.op.x.dtype != types.fp16:
        return FP32_UNSUPPORTED_REASON
    if get_static_shape(product.op.x) is None or get_static_shape(product.op.outputs[0]) is None:
        return "the number of rows is dynamic, and for some numbers parts may be slower"
    return ""


def compute_work_of_parts(work: Work, inner: int, parts: Parts) -> Iterator[Work]:
    """Compute the work of each part of a product over `inner` channels."""
    for start, stop in parts:
        share = (stop - start) / inner
        yield replace(work, macs=work.macs * share, channels=stop - start, inner=round(work.inner * share),
                      weight_bytes=round(work.weight_bytes * share), dense_bytes=round(work.dense_bytes * share))


def estimate_gain(product: StoredProduct, parts: Parts, chip: Chip) -> float:
    """Estimate the share of the time of `product` on `chip` that its `parts` and their adds save."""
    work = product.work
    whole = compute_terms(work, chip).total_us
    spent = sum(compute_terms(each, chip).total_us for each in compute_work_of_parts(work, product.inner, parts))
    spent += (len(parts) - 1) * compute_terms(Work("pair", elements=work.elements), chip).total_us
    return 1 - spent / whole if whole else 0.0


def find_gain_obstacle(
    product: StoredProduct, parts: Parts, measured: str, generations: Sequence[Generation], against: str,
) -> str:
    """Return why `parts` are not made for `generations`, or "".

    They were measured to be faster on `measured` only, and the latency estimated for it has to decrease.

    Repeated streaming of weights, once for each tile, does not count if the tile size was not measured.
    """
    (chip,) = find_chips(measured)
    if "tile_bytes" not in chip.measured:
        chip = replace(chip, tile_bytes=math.inf)
    gain, passes = estimate_gain(product, parts, chip), compute_terms(product.work, chip).passes
    if gain < MIN_GAIN:
        streamed = "once" if passes <= 1 else f"{passes:.1f} times"
        return (f"weights are streamed {streamed}: {len(parts)} parts are estimated to "
                f"{'save' if gain >= 0 else 'add'} {abs(gain):.0%} of its time on {measured.upper()}, less than the "
                f"required {MIN_GAIN:.0%}")
    if list(generations) != list(parse_target(measured)):
        return (f"parts were measured to be faster on {measured.upper()} only{against}; choose that target, or "
                f"always=true")
    return ""


def find_weight_obstacle(
    product: StoredProduct, parts: Parts, find_parts: Callable[[Operation], Parts | None], most: int,
) -> str:
    """Return why the weight of `product` cannot be cut into `parts`, or ""; its other readers are judged, too."""
    unit = find_cut_unit(product.weight, product.weight_axis)
    if isinstance(unit, str):
        return unit
    if any(start % unit for start, _ in parts):
        return f"blocks of {unit} channels of the compressed weight are not aligned with parts"
    return find_sharing_obstacle(product.weight, product.op, partial(_is_cut_alike, product, parts, find_parts), most)


def _is_cut_alike(product: StoredProduct, parts: Parts, find_parts: Callable[[Operation], Parts | None],
                  other: Operation, weight: Var) -> bool:
    """Return whether `other` reads `weight` as its own weight, and is cut into the same parts."""
    if other.op_type not in ("conv", "linear", "matmul"):
        return False
    found = find_stored_product(other)
    return (not isinstance(found, str) and found.weight is weight and found.weight_axis == product.weight_axis
            and find_parts(other) == parts)


def build_sum_of_parts(mb: RewriteBuilder, product: StoredProduct, parts: Parts) -> Var:
    """Build a split of x, a product for each part, the first with the bias, and their sum."""
    op = product.op
    total: Any = None
    pieces = mb.split(x=op.x, split_sizes=[stop - start for start, stop in parts], axis=product.x_axis)
    for piece, (start, stop) in zip(pieces, parts, strict=True):
        changes: dict[str, Any] = {
            "x": piece, product.name: cut_weight(mb, product.weight, product.weight_axis, start, stop)}
        if total is not None and op.op_type == "conv":
            changes["bias"] = None
        if total is not None and op.op_type == "linear":
            changes["bias"] = mb.once(("no bias", op.outputs[0].shape[-1]), lambda: mb.const(
                val=np.zeros(op.weight.shape[0], np.float16), name="no_bias"))
        made = rebuild_op(mb, op, **changes)
        total = made if total is None else mb.add(x=total, y=made)
    result: Var = total
    return result
