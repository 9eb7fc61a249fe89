"""Programs for errors that no example of the rewrite reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, Var

from mil_ane_passes.passes.examples import build_program, make_weight

__all__ = ["DIRECTED_PROGRAMS"]


def _make_conv(x: tuple[int, ...], kernel: tuple[int, ...], **how: Any) -> Program:
    return build_program(lambda x: mb.conv(x=x, weight=make_weight(*kernel), name="y", **how), x=x)


def _make_conv_transpose(x: tuple[int, ...], kernel: tuple[int, ...], **how: Any) -> Program:
    return build_program(lambda x: mb.conv_transpose(x=x, weight=make_weight(*kernel), name="y", **how), x=x)


def _make_avg_pool(x: tuple[int, ...], sizes: list[int], **how: Any) -> Program:
    return build_program(lambda x: mb.avg_pool(x=x, kernel_sizes=sizes, name="y", **how), x=x)


def _make_cumsum(*x: int | None, axis: int = -1, **how: bool) -> Program:
    return build_program(lambda x: mb.cumsum(x=x, axis=axis, name="y", **how), x=x)


def _make_lstm(steps: int, **how: Any) -> Program:
    return build_program(
        lambda x, h, c: mb.lstm(
            x=x,
            initial_h=h,
            initial_c=c,
            weight_ih=make_weight(32, 8),
            weight_hh=make_weight(32, 8)[::-1],
            output_sequence=True,
            name="y",
            **how,
        ),
        x=(steps, 1, 8),
        h=(1, 8),
        c=(1, 8),
    )


def _make_bidirectional_lstm() -> Program:
    state = (np.arange(16, dtype=np.float16) / 16).reshape(1, 16)
    return build_program(lambda x: mb.lstm(
        x=x, initial_h=state, initial_c=-state, weight_ih=make_weight(32, 8), weight_hh=make_weight(32, 8),
        weight_ih_back=make_weight(32, 8), weight_hh_back=make_weight(32, 8)[::-1], direction="bidirectional",
        output_sequence=True, name="y"), x=(3, 1, 8))


def _make_gather(places: list[int], extent: int = 6) -> Program:
    return build_program(
        lambda x: mb.gather(x=x, indices=np.array(places, np.int32), axis=1, name="y"), x=(2, extent, 3)
    )


def _make_scatter(places: list[int], mode: str) -> Program:
    return build_program(lambda x, z: mb.scatter(
        data=x, indices=np.array(places, np.int32), updates=z, axis=0, mode=mode, name="y"),
        x=(7, 3), z=(len(places), 3))


def _make_slice(less: int) -> Program:
    def body(x: Var) -> Var:
        size = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
        end = mb.concat(values=[np.int32(0), mb.sub(x=size, y=np.int32(less))], axis=0)
        made: Var = mb.slice_by_index(x=x, begin=[0, 0], end=end, end_mask=[True, False], name="y")
        return made

    return build_program(body, x=(4, None))


def _make_padded_max_pool(pad: list[int]) -> Program:
    def body(x: Var) -> Var:
        padded = mb.pad(x=x, pad=pad, mode="constant", constant_val=np.float16(-np.inf))
        made: Var = mb.max_pool(x=padded, kernel_sizes=[3, 3], strides=[2, 2], pad_type="valid", name="y")
        return made

    return build_program(body, x=(1, 2, 7, 8))


def _norm_behind_conv() -> Program:
    """Rows of neighbours that hardly differ: their variances are as small as the epsilon that is raised."""
    return build_program(lambda x: mb.layer_norm(
        x=mb.conv(x=x, weight=make_weight(1, 1, 1, 3, 1), bias=np.array([0.055], np.float16), strides=[5, 1, 7],
                  pad_type="custom", pad=[2, 1, 1, 2, 3, 0], dilations=[1, 1, 2]),
        axes=[4], epsilon=np.float32(1e-12), name="y"), x=(3, 1, 7, 8, 7))


def _beside_a_norm(body: Callable[..., Var]) -> Program:
    """Something whose epsilon has to stay beside a norm whose epsilon is raised."""
    def both(x: Var) -> list[Var]:
        return [mb.layer_norm(x=x, axes=[-1], epsilon=np.float32(1e-12), name="norm"), body(x)]

    return build_program(both, x=(2, 4, 8))


def _of_another(x: Var) -> Var:
    root = mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True), epsilon=np.float32(1e-12))
    made: Var = mb.mul(x=mb.cos(x=x), y=root, name="y")
    return made


def _root_behind_relu(x: Var) -> Var:
    made: Var = mb.rsqrt(x=mb.relu(x=mb.linear(x=x, weight=make_weight(8, 8))), epsilon=np.float32(1e-12), name="y")
    return made


def _logarithm(x: Var) -> Var:
    made: Var = mb.log(x=mb.square(x=x), epsilon=np.float32(1e-10), name="y")
    return made


def _crop_then_mod() -> Program:
    """A box off the elements, amplified and wrapped round."""
    def body(x: Var) -> Var:
        y = mb.crop_resize(x=x, boxes=np.array([[0.59, 2.21, 2.54, 2.61]], np.float32),
                           box_indices=np.zeros(1, np.int32), target_height=6, target_width=3,
                           sampling_mode="OFFSET_CORNERS")
        made: Var = mb.mod(x=mb.mul(x=y, y=np.float16(10)), y=np.float16(4), name="y")
        return made

    return build_program(body, x=(1, 1, 4, 4))


DIRECTED_PROGRAMS: dict[str, Callable[[], Program]] = {
    "transposed_same": lambda: _make_conv_transpose(
        (1, 2, 5, 6), (2, 3, 4, 5), strides=[1, 2], pad_type="same_lower", output_shape=[1, 3, 5, 12]
    ),
    "transposed_bias_from_zero": lambda: _make_conv_transpose(
        (1, 2, 5), (2, 3, 4), bias=np.array([0, 1, 2], np.float16)
    ),
    "strided_seven_by_five": lambda: _make_conv((1, 2, 20, 22), (3, 2, 7, 7), strides=[5, 5]),
    "strided_uneven_pads": lambda: _make_conv(
        (1, 2, 20, 22), (3, 2, 5, 5), strides=[5, 5], pad_type="custom", pad=[1, 3, 0, 2]
    ),
    "strided_same_lower": lambda: _make_conv((1, 2, 21, 22), (3, 2, 6, 6), strides=[5, 5], pad_type="same_lower"),
    "dilated_uneven_pads": lambda: _make_conv(
        (1, 2, 12, 13), (3, 2, 3, 3), dilations=[2, 3], pad_type="custom", pad=[1, 3, 0, 2]
    ),
    "wide_dilated": lambda: _make_conv((1, 2, 4, 80), (3, 2, 2, 17), dilations=[1, 2]),
    "wide_with_bias": lambda: _make_conv((1, 2, 4, 40), (3, 2, 2, 17), bias=np.array([1, 2, 3], np.float16)),
    "wide_folded": lambda: _make_conv((1, 2, 60), (3, 2, 36)),
    "averaged_unaligned": lambda: _make_avg_pool((1, 2, 90), [40], strides=[16], pad_type="valid"),
    "averaged_uneven_pads": lambda: _make_avg_pool((1, 2, 90), [40], strides=[16], pad_type="custom", pad=[3, 9]),
    "sum_reverse_long": lambda: _make_cumsum(2, 100, reverse=True),
    "sum_reverse_exclusive": lambda: _make_cumsum(2, 100, reverse=True, exclusive=True),
    "sum_exclusive_last": lambda: _make_cumsum(2, 12, exclusive=True),
    "sum_unaligned": lambda: _make_cumsum(2, 97),
    "sum_flexible": lambda: _make_cumsum(2, None),
    "sum_flexible_reverse": lambda: _make_cumsum(2, None, reverse=True),
    "lstm_peephole": lambda: _make_lstm(3, peephole=make_weight(24)),
    "lstm_clipped": lambda: _make_lstm(3, clip=np.float16(0.25)),
    "lstm_long": lambda: _make_lstm(24),
    "lstm_both_ways": _make_bidirectional_lstm,
    "pool_uneven_pads": lambda: _make_padded_max_pool([0, 2, 1, 2]),
    "gather_partial_reverse": lambda: _make_gather([4, 3, 2]),
    "gather_repeated": lambda: _make_gather([1, 1, 1, 2, 2, 2, 3, 3, 3]),
    "gather_negative": lambda: _make_gather([-1, 0, -4]),
    "scatter_negative": lambda: _make_scatter([-1, 2, -3], "update"),
    "scatter_sub": lambda: _make_scatter([1, 2, 3], "sub"),
    "scatter_unsorted": lambda: _make_scatter([5, 0, 3], "update"),
    "norm_behind_conv": _norm_behind_conv,
    "norm_of_another": lambda: _beside_a_norm(_of_another),
    "root_behind_relu": lambda: _beside_a_norm(_root_behind_relu),
    "logarithm": lambda: _beside_a_norm(_logarithm),
    "crop_then_mod": _crop_then_mod,
    "slice_less_two": lambda: _make_slice(2),
    "crop_width_first": lambda: build_program(
        lambda x: mb.crop_resize(
            x=x,
            boxes=np.array([[1, 0, 5, 3], [0.5, 1.25, 4, 3]], np.float32),
            box_indices=np.zeros(2, np.int32),
            target_height=3,
            target_width=4,
            box_coordinate_mode="CORNERS_WIDTH_FIRST",
            sampling_mode="ALIGN_CORNERS",
            name="y",
        ),
        x=(1, 2, 6, 7),
    ),
}
"By name."
