"""Upsample images in steps of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_2020_layer_list, cite_m4_study
from ...passes.examples import make_example
from ...passes.targets import Gate
from ...rules.resizing import OldUpsampling
from .._target_gate import skip_if_supported

_NEAREST_OPS = ("upsample_nearest_neighbor", "resize_nearest_neighbor")
_LINEAR_OPS = ("upsample_bilinear", "resize_bilinear")


class SplitUpsampling(Rewrite):
    """Split nearest-neighbour upsampling into steps by two; odd factors stack copies of the image.

    why     According to a log of Core ML of 2020 only a factor of 2 is supported; the newest chip at that time was A13.
            An M4 supports all modes and factors: targets with newer chips are not changed.
    when    upsample_nearest_neighbor, resize_nearest_neighbor and resize (nearest, default sampling) of fp16 values by
            integer factors, one of them above 2. All chips of the target (with `always`: one of them) are A13 or older.
    exact   bitwise: each element is copied. For an integer factor f output i is element floor(i / f), with and without
            half-pixel centres. Steps by two compose to the same index, and stacking f copies of each element gives the
            same order. Linear interpolation is skipped: twice by 2 differs from once by 4. As a depthwise
            conv_transpose it would need new weights and different rounding, and its support on old chips was not
            measured.
    cost    the intermediate images: a third of the result's bytes. An odd factor stacks copies along an additional
            axis; for the width this is the last axis, with rows as short as the factor.

    before
        %y: fp16[1, 2, 16, 16] = upsample_nearest_neighbor(x=%x, scale_factor_height=4, scale_factor_width=4)
    after
        %0: fp16[1, 2, 8, 8] = upsample_nearest_neighbor(x=%x, scale_factor_height=2, scale_factor_width=2)
        %y: fp16[1, 2, 16, 16] = upsample_nearest_neighbor(x=%0, scale_factor_height=2, scale_factor_width=2)
    """

    fixes = (OldUpsampling,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = (*_NEAREST_OPS, *_LINEAR_OPS, "resize")
    targets = Gate(last="a13")
    evidence = (
        *collect_evidence("upsampling"),
        cite_2020_layer_list("upsampling by more than 2 is among the layers that leave the ANE, parts of the list are "
                             "guesses"),
        cite_m4_study("contradicts it for M4: all upsampling modes and scales are accepted"),
    )

    always: bool = False
    "Rewrite even if a chip of the target supports all factors."
    max_parts: int = 16
    "Maximum number of copies of the image for an odd factor."

    def match(self, op: Operation) -> Hit | Miss:
        factors = _compute_factors(op)
        if factors is None:
            return Miss(op, "not an image of static size", near=False)
        size = " x ".join(f"{factor:g}" for factor in factors)
        bound = find_limit("upsampling", self.generations)
        most = bound.most if bound else 2  # a factor of 2 is supported everywhere
        if all(factor in (1, most) for factor in factors) or max(factors) < 1:
            return Miss(op, f"by {size}", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        supported = skip_if_supported(self, op, self.always)
        if supported is not None:
            return supported
        if _is_linear(op):
            return Miss(op, f"linear interpolation by {size}: twice by 2 differs from once by 4")
        if any(factor != int(factor) for factor in factors) or not _is_plain_upsampling(op, factors):
            return Miss(op, f"by {size}, and the repetitions of elements differ")
        odd = [int(factor) // (int(factor) & -int(factor)) for factor in factors]  # without its powers of two
        if max(odd) > 1 and (op.x.rank > 4 or sum(map(is_symbolic, op.x.shape)) > 1):
            return Miss(op, f"by {size}: no dimension is left to stack copies")
        if max(odd) > self.max_parts:
            return Miss(op, f"by {size}: {max(odd)} copies, max_parts={self.max_parts}")
        return Hit(op, note=f"by {size}, in steps of 2", odd=odd, twos=[int(f) // o for f, o in zip(factors, odd)])

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.op.x
        for axis, copies in zip((x.rank - 2, x.rank - 1), hit.odd):
            if copies > 1:
                x = _repeat_elements(mb, x, axis, copies)
        height, width = hit.twos
        while max(height, width) > 1:
            x = mb.upsample_nearest_neighbor(x=x, scale_factor_height=min(height, 2), scale_factor_width=min(width, 2))
            height, width = max(height // 2, 1), max(width // 2, 1)
        return x

    def examples(self) -> Iterable[Example]:
        example = partial(make_example, options={"always": True}, x=(1, 2, 4, 4))
        resized = partial(make_example, options={"always": True}, x=(1, 2, 2, 4))
        yield example("by 4", _make_upsampling(4, 4))
        yield example("by 8 and 1", _make_upsampling(8, 1))
        yield example("by 3 and 6, for iOS15", _make_upsampling(3.0, 6.0), opset=ct.target.iOS15)
        yield example("to a size", lambda x: Builder.resize_nearest_neighbor(
            x=x, target_size_height=8, target_size_width=20, name="y"), x=(2, 3, 2, 4))
        yield resized("resize", _make_resize("NEAREST_NEIGHBOR"))
        yield resized("linear", _make_resize("LINEAR"),
                      reason="linear interpolation by 4 x 4: twice by 2 differs from once by 4")
        yield example("taken", _make_upsampling(4, 4), options=None, reason=(
            "supported on M1, M2, M3, M4, A18, M5 and M6; choose an older target, or always=true"))
        yield example("by 1.5", _make_upsampling(1.5, 4.0),
                      reason="by 1.5 x 4, and the repetitions of elements differ")
        yield example("by 2", _make_upsampling(2, 2), reason="by 2 x 2")


def _compute_factors(op: Operation) -> list[float] | None:
    """Return the factors of height and width; None for rank below 2, and for a dynamic size."""
    if op.x.rank < 2:  # resize accepts rank 1, too
        return None
    extents = [*op.x.shape[-2:], *op.outputs[0].shape[-2:]]
    if any(map(is_symbolic, extents)):
        return None
    return [int(extents[axis + 2]) / int(extents[axis]) for axis in range(2)]


def _is_linear(op: Operation) -> bool:
    """Return whether the op interpolates linearly."""
    if op.op_type == "resize":
        return bool(get_const_value(op.interpolation_mode) != "NEAREST_NEIGHBOR")
    return op.op_type in _LINEAR_OPS


def _is_plain_upsampling(op: Operation, factors: list[float]) -> bool:
    """Return whether the factors are exactly the op's parameters, and no other axis is resized."""
    if op.op_type == "upsample_nearest_neighbor":
        scales = get_const_value(op.scale_factor_height, 1), get_const_value(op.scale_factor_width, 1)
        return [float(scale) for scale in scales] == factors
    if op.op_type == "resize":
        return bool(get_const_value(op.sampling_mode) == "DEFAULT" and op.x.shape[:-2] == op.outputs[0].shape[:-2])
    return True


def _repeat_elements(mb: RewriteBuilder, x: Var, axis: int, times: int) -> Var:
    """Repeat each element of `axis` of `x` `times` times in a row."""
    stacked = mb.stack(values=[x] * times, axis=axis + 1)
    shape = [-1 if is_symbolic(extent) else int(extent) * (times if number == axis else 1)
             for number, extent in enumerate(x.shape)]
    merged: Var = mb.reshape(x=stacked, shape=shape)
    return merged


def _make_upsampling(height: float, width: float) -> Callable[[Var], Var]:
    return lambda x: Builder.upsample_nearest_neighbor(
        x=x, scale_factor_height=height, scale_factor_width=width, name="y")


def _make_resize(mode: str) -> Callable[[Var], Var]:
    return lambda x: Builder.resize(
        x=x, shape=[8, 16], resized_dims=np.uint32(2), interpolation_mode=mode, name="y")
