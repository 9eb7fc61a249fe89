"""Op types that are unsupported on the ANE, or on that of some chips: pages and examples.

The facts (generations, Core ML's messages, sources, advice) are the rows of `ane/op_support.py` with the rule's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ..passes.contract import Example
from ..passes.examples import build_mask_program, build_program, make_example, make_weight
from ..passes.targets import Gate
from ._unsupported_ops import UnsupportedOps


class ElementaryFunctions(UnsupportedOps):
    """asin, acos, tan, sinh, cosh and atanh are unsupported on the ANE.

    why     Core ML on an M4 rejects them, and so does the ANE's compiler on M1 to M5 when queried without Core ML. The
            op runs on the CPU, with two transitions if it is between ops on the ANE.
    when    Any of the six on numbers. Its neighbours sin, cos and atan are supported on an M4.
    fix     Rewrite it with exp, tanh, log, sin, cos, atan and a division; the finding has the formula. The algebra is
            the same, fp16 rounding differs by 1.6 to 3.3 units in the last place. log((1 + x) / (1 - x)) / 2 is
            inaccurate for small x; `ane::inverse_tanh` has a longer form that is accurate.
    """

    code, slug = "ANE202", "elementary-function"

    def examples(self) -> Iterable[Example]:
        for kind in self.roots:
            yield Example(kind, partial(_build_unary_op, kind))
        yield make_example("in fp32", lambda x: Builder.tan(x=x, name="y"), dtype=types.fp32, x=(2,))
        yield make_example("atan", lambda x: Builder.atan(x=x, name="y"), reason="", x=(2, 3))
        yield make_example(
            "written out",
            lambda x: Builder.real_div(x=Builder.sin(x=x), y=Builder.add(x=Builder.cos(x=x), y=np.float16(0))),
            reason="",
            x=(2, 3),
        )


class Modulo(UnsupportedOps):
    """mod is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when queried without Core ML.
    when    Any mod of numbers. floor_div is supported on an M4.
    fix     x - y * floor(x / y): equal in exact arithmetic, but in fp16 the remainder is off by y if the quotient
            rounds up to an integer. `ane::modulo_by_floor` subtracts a constant y in steps: the same bits.
    """

    code, slug = "ANE203", "modulo"

    def examples(self) -> Iterable[Example]:
        yield make_example("by a number", lambda x: Builder.mod(x=x, y=np.float16(3), name="y"), x=(2, 3))
        yield make_example("by a value", lambda x, z: Builder.mod(x=x, y=z, name="y"), x=(2, 3), z=(1, 3))
        yield make_example(
            "written out",
            lambda x: Builder.sub(
                x=x, y=Builder.mul(x=Builder.floor(x=Builder.mul(x=x, y=np.float16(0.25))), y=np.float16(4)), name="y"
            ),
            reason="",
            x=(2, 3),
        )
        yield make_example(
            "of integers",
            lambda x: Builder.mod(x=x, y=np.int32(3), name="y"),
            reason="computes on integers",
            dtype=types.int32,
            x=(2, 3),
        )


class Product(UnsupportedOps):
    """reduce_prod is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when queried without Core ML. The
            other reductions are supported.
    when    Any reduce_prod of numbers, whatever the axes.
    fix     Few elements: slice and multiply them in the original order. Many positive elements: exp of the reduce_sum
            of log, an approximation in fp16.
    """

    code, slug = "ANE204", "product"

    def examples(self) -> Iterable[Example]:
        yield make_example("one axis", lambda x: Builder.reduce_prod(x=x, axes=[-1], name="y"), x=(2, 3))
        yield make_example("all", lambda x: Builder.reduce_prod(x=x, name="y"), x=(2, 3))
        yield make_example("sum", lambda x: Builder.reduce_sum(x=x, axes=[-1], name="y"), reason="", x=(2, 3))
        yield make_example(
            "of integers",
            lambda x: Builder.reduce_prod(x=x, axes=[0], name="y"),
            reason="computes on integers",
            dtype=types.int32,
            x=(2, 3),
        )


class Cumsum(UnsupportedOps):
    """cumsum is unsupported on the ANE, and neighbouring ops may fall back to the CPU with it.

    why     Reported on the CPU for static and flexible shapes, together with the cheap op after it; unsupported by Core
            ML on an M4. The hardware can compute it, but MIL's op is not mapped to it.
    when    Any cumsum of floats, for any axis, direction and length.
    fix     ane::triangle_cumsum: convs with ones, or a matmul with a constant triangle of ones (upper for the last
            axis, lower with reverse, without its diagonal with exclusive). The same sums in a different order; they
            must stay below 32768 in fp16. A dynamic length needs a bound.
    """

    code, slug = "ANE205", "cumsum"

    def examples(self) -> Iterable[Example]:
        yield make_example("last axis", lambda x: Builder.cumsum(x=x, axis=-1, name="y"), x=(2, 5))
        yield make_example(
            "backwards", lambda x: Builder.cumsum(x=x, axis=0, reverse=True, exclusive=True, name="y"), x=(4, 2)
        )
        yield make_example("flexible", lambda x: Builder.cumsum(x=x, axis=1, name="y"), x=(2, None))
        yield make_example("sum", lambda x: Builder.reduce_sum(x=x, axes=[-1], name="y"), reason="", x=(2, 5))
        yield make_example(
            "of integers",
            lambda x: Builder.cumsum(x=x, axis=0, name="y"),
            reason="computes on integers",
            dtype=types.int32,
            x=(4,),
        )


class Fills(UnsupportedOps):
    """fill and fill_like are computed at run time, and are unsupported on the ANE of some chips.

    why     fill and fill_like were reported on the CPU only, chip not stated. Sources disagree: the ANE's compiler
            supports both when queried without Core ML, and an M4 accepts fill_like; fill was not tried there.
    when    Any fill of floats; any fill_like of floats on generations before M4.
    fix     ane::constant_fill: a constant, with one element if all users broadcast, or for dynamic sizes a sum of zeros
            of that size and the value: the same bits. coremltools' const_elimination folds a fill with a constant
            shape, but not fill_like.
    """

    code, slug = "ANE206", "fill"
    confidence = "low"

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "fill", lambda x: Builder.add(x=x, y=Builder.fill(shape=[2, 3], value=np.float16(1)), name="y"), x=(2, 3)
        )
        yield make_example(
            "fill_like", lambda x: Builder.fill_like(ref_tensor=x, value=np.float16(1), name="y"), x=(2, None)
        )
        yield make_example(
            "integers",
            lambda x: Builder.fill_like(ref_tensor=x, value=np.int32(1), name="y"),
            reason="makes integers",
            x=(2, None),
        )
        yield make_example("constant", lambda x: Builder.add(x=x, y=np.float16(1), name="y"), reason="", x=(2, 3))


class Range1d(UnsupportedOps):
    """range_1d is unsupported on the ANE.

    why     range_1d runs on the CPU only, not even on the GPU: reported without the chip, measured on an M4, and
            observed on an M1 without Core ML.
    when    Any range_1d, of integers or of fp16, with fixed bounds or computed ones.
    fix     ane::constant_range: for constant bounds a constant (the same bits); if the end is the length of an axis, a
            slice of a constant with the longest range. For other computed ends, use the longest range and a mask (a
            comparison with the bound as fp16) at its users.
    """

    code, slug = "ANE207", "range-1d"

    def examples(self) -> Iterable[Example]:
        yield Example("computed bound", _build_dynamic_range)
        yield make_example(
            "fixed bounds",
            lambda x: Builder.add(
                x=x, y=Builder.range_1d(start=np.float16(0), end=np.float16(3), step=np.float16(1)), name="y"
            ),
            x=(2, 3),
        )
        yield make_example(
            "constant", lambda x: Builder.add(x=x, y=np.arange(3, dtype=np.float16), name="y"), reason="", x=(2, 3)
        )


class MasksAtRunTime(UnsupportedOps):
    """one_hot and band_part are unsupported on the ANE.

    why     Core ML on an M4 rejects both, and so does the ANE's compiler on M1 to M5 when queried without Core ML. In
            GPT models on an M1 Pro the band_part of the causal mask left the ANE.
    when    Any one_hot, any band_part.
    fix     ane::constant_band_part selects by a constant mask: the same bits for any values outside the band.
            ane::one_hot_compare compares the indices, cast to fp16 (exact up to 2048), with a constant range; it is
            better to pass the indices as fp16 inputs, or the one-hot rows themselves.
    """

    code, slug = "ANE208", "mask-at-run-time"

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "one_hot",
            lambda ids: Builder.one_hot(indices=ids, one_hot_vector_size=8, name="y"),
            dtype=types.int32,
            ids=(1, 4),
        )
        yield make_example("band_part", lambda x: Builder.band_part(x=x, lower=-1, upper=0, name="y"), x=(1, 4, 4))
        yield make_example(
            "constant mask",
            lambda x: Builder.mul(x=x, y=np.tril(np.ones((4, 4), np.float16)), name="y"),
            reason="",
            x=(1, 4, 4),
        )


class RandomNumbers(UnsupportedOps):
    """Ops that generate random numbers are unsupported on the ANE.

    why     Core ML on an M4 rejects random_normal. The ANE's compiler, queried without Core ML, supports random_uniform
            on M3 and later, and no other random op on any generation; Core ML was not tested with it.
    when    random_normal, random_uniform, random_bernoulli and random_categorical.
    fix     Generate the numbers in the caller and pass them as an input, which also makes seeds reproducible. Noise
            that may be the same in every run can be a constant.
    no fix  Random numbers cannot be computed by other ops, and numbers from the caller change the interface.
    """

    code, slug = "ANE209", "random-numbers"

    def examples(self) -> Iterable[Example]:
        yield Example("noise", _build_noise)
        yield make_example(
            "uniform",
            lambda x: Builder.add(
                x=x, y=Builder.random_uniform(shape=[2, 3], low=np.float16(0), high=np.float16(1), seed=1), name="y"
            ),
            x=(2, 3),
        )
        yield make_example(
            "noise as an input", lambda x, noise: Builder.add(x=x, y=noise, name="y"), reason="", x=(2, 3), noise=(2, 3)
        )


class SlidingWindows(UnsupportedOps):
    """sliding_windows is unsupported on the ANE.

    why     Core ML on an M4 rejects it, on the GPU, too; the ANE's compiler, queried without Core ML, has no
            equivalent.
    when    Any sliding_windows.
    fix     Windows without overlap: a reshape. Windows that are multiples of the stride: concatenated rows of a
            reshape. Few windows: one slice each, and a stack. The same bits.
    """

    code, slug = "ANE211", "sliding-windows"

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "overlapping", lambda x: Builder.sliding_windows(x=x, axis=2, size=4, stride=2, name="y"), x=(1, 3, 16)
        )
        yield make_example(
            "not overlapping", lambda x: Builder.sliding_windows(x=x, axis=1, size=4, stride=4, name="y"), x=(1, 16)
        )
        yield make_example(
            "reshape", lambda x: Builder.reshape(x=x, shape=[1, 3, 4, 4], name="y"), reason="", x=(1, 3, 16)
        )


class Scatter(UnsupportedOps):
    """scatter is unsupported on the ANE.

    why     According to Apple's comments in coremltools it falls off the ANE. Core ML on an M4 rejects it, the ANE's
            compiler on M1 to M5 has no equivalent, and cache updates by scatter were reported as unsupported.
    when    scatter, scatter_nd and scatter_along_axis, with constant or computed indices.
    fix     Fixed window: slice_update (iOS18), or slices and a concat (the same bits). Selected positions: blend x * (1
            - m) + v * m with a mask that is an input or a constant, which is exact if values are finite. Constant
            indices: a gather with the inverse indices.
    """

    code, slug = "ANE213", "scatter"

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "rows",
            lambda x, v: Builder.scatter(data=x, indices=np.array([2], np.int32), updates=v, axis=0, name="y"),
            x=(4, 3),
            v=(1, 3),
        )
        yield make_example(
            "places",
            lambda x, v: Builder.scatter_nd(data=x, indices=np.array([[0, 1], [2, 2]], np.int32), updates=v, name="y"),
            x=(4, 3),
            v=(2,),
        )
        yield make_example(
            "along an axis",
            lambda x, v: Builder.scatter_along_axis(
                data=x, indices=np.array([[0, 1, 2]], np.int32), updates=v, axis=0, name="y"
            ),
            x=(4, 3),
            v=(1, 3),
        )
        yield make_example(
            "a window",
            lambda x, v: Builder.slice_update(x=x, update=v, begin=[2, 0], end=[3, 3], name="y"),
            reason="",
            opset=ct.target.iOS18,
            x=(4, 3),
            v=(1, 3),
        )


class CropResize(UnsupportedOps):
    """crop_resize is unsupported on the ANE.

    why     Core ML on an M4 rejects it, on the GPU, too. The hardware supports it from M2 on (queried without Core ML),
            not on M1.
    when    Any crop_resize, with constant or computed boxes.
    fix     Constant boxes: for each box a slice_by_index and a resize_bilinear if the corners are at elements,
            otherwise slices blended with constant weights; then a concat. Computed boxes: crop in the caller, or use
            resample with coordinates as an input.
    """

    code, slug = "ANE216", "crop-resize"

    def examples(self) -> Iterable[Example]:
        yield make_example("one box", _build_crop_resize, x=(1, 3, 8, 8))
        yield make_example(
            "slice and resize",
            lambda x: Builder.resize_bilinear(
                x=Builder.slice_by_size(x=x, begin=[0, 0, 1, 1], size=[1, 3, 4, 4]),
                target_size_height=2,
                target_size_width=2,
                name="y",
            ),
            reason="",
            x=(1, 3, 8, 8),
        )


class Recurrent(UnsupportedOps):
    """lstm, gru and rnn are unsupported on the ANE.

    why     Stated by a maintainer of coremltools, measured on an M4, and true for all generations when the ANE's
            compiler is queried without Core ML. They run on the CPU.
    when    Any lstm, gru or rnn; the finding states the number of steps.
    fix     A sequence of fixed length: `ane::unroll_lstm`, `ane::unroll_gru` and `ane::unroll_rnn` unroll it into
            linear, sigmoid and tanh, which are supported; rounding differs and accumulates over the steps. For very
            long sequences: group the convolutions and linears before and after it, so that it costs only two
            transitions, or split the model there.
    """

    code, slug = "ANE217", "recurrent"

    def examples(self) -> Iterable[Example]:
        yield make_example("rnn", _build_rnn, x=(5, 1, 4), h=(1, 3))
        yield make_example("lstm", _build_lstm, x=(5, 1, 4), h=(1, 3), c=(1, 3))
        yield make_example("gru", _build_gru, x=(None, 1, 4), h=(1, 3))
        yield make_example(
            "one step, unrolled",
            lambda x, h: Builder.tanh(
                x=Builder.add(
                    x=Builder.linear(x=x, weight=make_weight(3, 4)), y=Builder.linear(x=h, weight=make_weight(3, 3))
                ),
                name="y",
            ),
            reason="",
            x=(1, 4),
            h=(1, 3),
        )


class TextureOps(UnsupportedOps):
    """affine, resample and reflecting pads need a hardware unit that the ANE has from M2 on.

    why     Without Core ML, the ANE's compiler rejects affine ("affine transform is not supported on this
            architecture") and resample for M1, and emulates resizing and reflecting pads, some modes of which fail.
            Through Core ML only an M4 was measured, which accepts all of them.
    when    Chips up to M1: affine, resample; pad with mode reflect, as unknown. Resizing is not reported: it is stated
            to work there, with different rounding.
    fix     Constant integer upscaling: a conv_transpose; reflecting pad: slices, reverse and concat (the same bits);
            sampling grids have to stay in the caller.
    no fix  Sampling at computed positions needs a gather, which is unsupported as well.
    """

    code, slug = "ANE231", "texture-op"
    targets = Gate(last="m1")
    confidence = "medium"

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "resample",
            lambda x, at: Builder.resample(
                x=x,
                coordinates=at,
                sampling_mode="bilinear",
                padding_mode="constant",
                padding_value=np.float16(0),
                coordinates_mode="normalized_minus_one_to_one",
                align_corners=True,
                name="y",
            ),
            x=(1, 2, 4, 4),
            at=(1, 3, 3, 2),
        )
        yield make_example("reflect", lambda x: Builder.pad(x=x, pad=[1, 1], mode="reflect", name="y"), x=(1, 2, 4, 4))
        yield make_example(
            "zeros",
            lambda x: Builder.pad(x=x, pad=[1, 1], mode="constant", constant_val=np.float16(0), name="y"),
            reason="pads with mode constant",
            x=(1, 2, 4, 4),
        )


class LogicalOps(UnsupportedOps):
    """A logical op on masks may be unsupported on the ANE; sources contradict each other.

    why     Core ML accepts logical_and on an M4. Without Core ML, the ANE's compiler rejects logical_and, logical_or
            and logical_xor for every chip, which is wrong at least for the first. Nothing else was measured.
    when    logical_or and logical_xor; logical_and if the target includes other chips than M4. Always reported as
            unknown.
    fix     Use fp16 masks of 0 and 1: mul or minimum for and, maximum for or, abs of the difference for xor (the same
            bits).
    """

    code, slug = "ANE237", "logical-op"
    confidence = "low"

    def examples(self) -> Iterable[Example]:
        yield Example("and", lambda: build_mask_program("logical_and"))
        yield Example("or", lambda: build_mask_program("logical_or"))
        yield Example("xor", lambda: build_mask_program("logical_xor"))
        yield make_example("product", lambda x, z: Builder.mul(x=x, y=z, name="y"), reason="", x=(2, 3), z=(2, 3))


class SinCos(UnsupportedOps):
    """sin and cos are unsupported on the ANE of M1 and M2.

    why     When the ANE's compiler is called without Core ML, both are native from M3 on, and rejected on M1 and M2. A
            model with a single sin is reported not to run on the ANE, chip not stated; its small size may be the
            reason. An M4 accepts both.
    when    sin and cos of floats, on chips up to M2. A13 and before were not measured.
    fix     If the angles are constant (positions, frequencies), store the values in the model: the same bits. Otherwise
            reduce the angle to one turn and use a polynomial (close, not equal).
    no fix  No ops that are supported on M1 compute the same values; a polynomial is a different function, and needs a
            dozen ops.
    """

    code, slug = "ANE238", "sin-cos-before-m3"
    targets = Gate(last="m2")
    confidence = "medium"

    def examples(self) -> Iterable[Example]:
        yield make_example("sin", lambda x: Builder.sin(x=x, name="y"), x=(2, 3))
        yield make_example("cos", lambda x: Builder.cos(x=x, name="y"), x=(None, 3))
        yield make_example("atan", lambda x: Builder.atan(x=x, name="y"), reason="", x=(2, 3))


def _build_unary_op(kind: str) -> Program:
    return build_program(lambda x: getattr(Builder, kind)(x=x, name="y"), x=(2, 3))


def _build_dynamic_range() -> Program:
    def build_body(n: Var) -> Var:
        counted = Builder.range_1d(start=np.int32(0), end=Builder.squeeze(x=n), step=np.int32(1))
        result: Var = Builder.cast(x=counted, dtype="fp16", name="y")
        return result

    return build_program(build_body, dtype=types.int32, n=(1,))


def _build_noise() -> Program:
    def build_body(x: Var) -> Var:
        noise = Builder.random_normal(shape=[2, 3], mean=np.float16(0), stddev=np.float16(1), seed=1)
        result: Var = Builder.add(x=x, y=noise, name="y")
        return result

    return build_program(build_body, x=(2, 3))


def _build_crop_resize(x: Var) -> Var:
    result: Var = Builder.crop_resize(
        x=x, boxes=np.array([[0, 0, 4, 4]], np.float16), box_indices=np.zeros(1, np.int32), target_height=2,
        target_width=2, box_coordinate_mode="CORNERS_HEIGHT_FIRST", name="y")
    return result


def _build_rnn(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.rnn(x=x, initial_h=h, weight_ih=make_weight(3, 4), weight_hh=make_weight(3, 3))
    return outputs[0]


def _build_lstm(x: Var, h: Var, c: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.lstm(x=x, initial_h=h, initial_c=c, weight_ih=make_weight(12, 4),
                                            weight_hh=make_weight(12, 3))
    return outputs[0]


def _build_gru(x: Var, h: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.gru(x=x, initial_h=h, weight_ih=make_weight(9, 4), weight_hh=make_weight(9, 3))
    return outputs[0]
