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

    why     Core ML on an M4 rejects them, and so does the ANE's compiler on M1 to M5 when asked without Core ML. The
            op runs on the CPU, with two transitions where it stands between ops on the ANE.
    when    Any of the six on numbers. Its neighbours sin, cos and atan are supported on an M4.
    fix     Write it with exp, tanh, log, sin, cos, atan and a division: the note says how. The algebra is the same,
            the roundings of fp16 are not: 1.6 to 3.3 units in the last place. log((1 + x) / (1 - x)) / 2 loses small x;
            `ane::inverse_tanh` has a longer form that does not.
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

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when asked without Core ML.
    when    Any mod of numbers. floor_div is supported on an M4.
    fix     x - y * floor(x / y): the same in exact arithmetic; in fp16 a quotient that rounds up to a whole number
            gives a remainder that is off by y. `ane::modulo_by_floor` takes a constant y in pieces: the same bits.
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

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when asked without Core ML. The
            other reductions are taken.
    when    Any reduce_prod of numbers, whatever the axes.
    fix     Few elements: slice them and multiply, in the order in which the product was taken. Many, all positive:
            exp of the reduce_sum of log, an approximation in fp16.
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
    """cumsum is unsupported on the ANE, and what stands beside a cheap one may leave with it.

    why     Reported on the CPU for static and flexible shapes alike, with the cheap op behind it drawn along; refused
            by Core ML on an M4. The ANE itself can do it, but not from MIL's op.
    when    Any cumsum of numbers, whatever axis, direction and length.
    fix     ane::triangle_cumsum: convs with ones, or a matmul with a constant triangle of ones (upper for the last
            axis, lower with reverse, without its diagonal with exclusive). The same sums in another order; they must
            stay below 32768 in fp16. A length that is known only at run time needs a bound.
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
    """A tensor of one number is filled while the model runs.

    why     fill and fill_like were reported on the CPU only, chip not stated. Sources disagree: the ANE's compiler
            takes both when asked without Core ML, and on an M4 fill_like is accepted; fill was not tried there.
    when    Any fill of numbers; any fill_like of numbers on generations before the M4.
    fix     ane::constant_fill: a constant, of one element where what reads it broadcasts, and for a size known at run
            time zeros of that size and the number: the same bits. coremltools' const_elimination folds a fill whose
            shape is known at conversion, a fill_like never.
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
    """A range of numbers is counted out while the model runs.

    why     range_1d runs on the CPU only, and on the GPU neither; so it was reported without the chip's name, measured
            on an M4, and seen on an M1 without Core ML.
    when    Any range_1d, of integers or of fp16, with fixed bounds or computed ones.
    fix     ane::constant_range: with fixed bounds a constant holds the same bits; where the end is the length of an
            axis, a constant of the longest range is cut to it. With an end that is computed otherwise, the longest
            range and a mask (a comparison with the bound as fp16) where the shorter one was read.
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

    why     Core ML on an M4 rejects both, and so does the ANE's compiler on M1 to M5 when asked without Core ML. In
            GPT models on an M1 Pro the band_part of the causal mask was what left the ANE.
    when    Any one_hot, any band_part.
    fix     ane::constant_band_part selects by a constant mask: the same bits, whatever lies outside the band.
            ane::one_hot_compare compares the indices, cast to fp16 at the edge (exact up to 2048), with a constant
            range; better still, pass the indices in as fp16, or the one-hot rows themselves.
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
    """The model draws random numbers.

    why     Core ML on an M4 rejects random_normal. The ANE's compiler, asked without Core ML, supports no random op on
            any generation but random_uniform, and that on M3 and later only; Core ML was not asked about it.
    when    random_normal, random_uniform, random_bernoulli and random_categorical.
    fix     Draw outside and pass the numbers in as an input: any seed can then be repeated, too. Noise that may be the
            same in every run is a constant.
    no fix  What is drawn cannot be said by other ops: numbers that are drawn beforehand are another model.
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

    why     Core ML on an M4 rejects it, and it runs on no GPU either; the ANE's compiler, asked without Core ML, has
            no form of it.
    when    Any sliding_windows.
    fix     Windows that do not overlap are a reshape; those that begin at multiples of the stride are rows of one,
            joined. Few windows: a slice each, and a stack. The same bits.
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

    why     Apple's own comments in coremltools say it falls off the ANE. Core ML on an M4 rejects it, the ANE's
            compiler on M1 to M5 has no form of it, and those who moved caches by scatter found it rejected.
    when    scatter, scatter_nd and scatter_along_axis, with constant or computed indices.
    fix     A fixed window: slice_update (iOS18), or slices and a concat: the same bits. Chosen places: blend
            x * (1 - m) + v * m with a mask that is an input or a constant: exact where values are finite. Constant
            indices: a gather with the inverse ones.
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

    why     Core ML on an M4 rejects it, and it runs on no GPU either. The hardware has it from M2 on (asked without
            Core ML), not on an M1.
    when    Any crop_resize, with constant or computed boxes.
    fix     Constant boxes: a slice_by_index and a resize_bilinear for each where the corners are elements, else slices
            that are mixed with constant weights, and a concat. Computed boxes: crop outside, or use resample with
            coordinates that are an input.
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

    why     Said by a maintainer of coremltools, measured on an M4, and so for all generations when the ANE's compiler
            is asked without Core ML. They run on the CPU.
    when    Any lstm, gru or rnn; the note has the number of steps.
    fix     A sequence of fixed length: `ane::unroll_lstm`, `ane::unroll_gru` and `ane::unroll_rnn` write it out into
            linear, sigmoid and tanh, which are taken; the roundings differ and add up over the steps. A very long one:
            keep the convolutions and linears before and after it together, so that it costs two transitions
            and no more, or split the model there.
    """

    code, slug = "ANE217", "recurrent"

    def examples(self) -> Iterable[Example]:
        yield make_example("rnn", _build_rnn, x=(5, 1, 4), h=(1, 3))
        yield make_example("lstm", _build_lstm, x=(5, 1, 4), h=(1, 3), c=(1, 3))
        yield make_example("gru", _build_gru, x=(None, 1, 4), h=(1, 3))
        yield make_example(
            "one step, written out",
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
    """affine, resample and reflecting pads need a unit that the ANE has from M2 on.

    why     By a private route M1 rejects affine ("affine transform is not supported on this architecture") and
            resample, and does resizing and reflecting pads by other means, some modes of which fail. Through Core ML
            only an M4 was measured, which accepts them all.
    when    Chips up to M1: affine, resample; pad with mode reflect, which is not known. Resizing is not reported: it
            is said to work there, rounded otherwise.
    fix     A fixed integer enlargement is a conv_transpose; a reflecting pad is slices, reverse and concat (the same
            bits); sampling grids have to stay outside the model.
    no fix  Sampling at places that are computed needs a gather, which is unsupported as well.
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
    """A logical op on masks may not run on the ANE: the sources contradict each other.

    why     Core ML accepts logical_and on an M4. By a private route logical_and, logical_or and logical_xor are
            supported on no chip, which at least for the first is not so. Nothing else was measured.
    when    logical_or and logical_xor; logical_and when another chip than M4 is looked at. Never known.
    fix     On masks of 0 and 1 in fp16: and is mul or minimum, or is maximum, xor is abs of the difference (the same
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
    """sin and cos are not taken by the ANE of M1 and M2.

    why     By a private route both are native from M3 on, and M1 and M2 refuse them. A model with a lone sin is
            reported not to run on the ANE, chip not stated, which its small size explains as well. An M4 accepts both.
    when    sin and cos of numbers, on chips up to M2. A13 and before were not measured.
    fix     Where the angles are constants (positions, frequencies), put the values into the model: the same bits.
            Otherwise a polynomial after the angle is brought into one turn (close, not equal).
    no fix  No ops that M1 takes make the same values; a polynomial is another function, of a dozen ops for each.
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
    def body(n: Var) -> Var:
        counted = Builder.range_1d(start=np.int32(0), end=Builder.squeeze(x=n), step=np.int32(1))
        result: Var = Builder.cast(x=counted, dtype="fp16", name="y")
        return result

    return build_program(body, dtype=types.int32, n=(1,))


def _build_noise() -> Program:
    def body(x: Var) -> Var:
        noise = Builder.random_normal(shape=[2, 3], mean=np.float16(0), stddev=np.float16(1), seed=1)
        result: Var = Builder.add(x=x, y=noise, name="y")
        return result

    return build_program(body, x=(2, 3))


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
