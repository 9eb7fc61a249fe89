"""Find shapes that are computed while the model runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ane.op_support import find_dynamic_inputs
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_surgery_tip
from ..passes.examples import build_program, make_example
from ._split_points import describe_split_points, find_split_points
from ._unsupported_ops import make_unsupported_hit

_SHAPE_INPUTS = {"reshape": "shape", "tile": "reps", "pad": "pad", "resize": "shape"}
"Ops with the shape of their output, or a parameter of it, as an input."


class DataDependentShape(Rule):
    """The shape of an output depends on values, which the ANE cannot plan for.

    why     The ANE runs what is laid out when the model is compiled. non_zero is unsupported by Core ML on an M4, and
            runs on no GPU either; asked without Core ML the ANE's compiler names the shape as the reason. For a
            reshape, tile, pad or resize by computed numbers that is predicted: nobody reported one.
    when    Any non_zero; reshape, tile, pad and resize whose shape, repetitions or widths are no constant.
    fix     Fix the shapes (ct.TensorType with fixed numbers, or one function for each size), and fold what is then
            known. Select with a mask in place of picking out the elements that are not zero.
    no fix  The ANE runs fixed shapes only, and here the data say how large a result is.
    """

    code, slug = "ANE210", "data-dependent-shape"
    roots = ("non_zero", *_SHAPE_INPUTS)
    refuses, confidence = True, "high"
    advice = ("Fix the shapes, so that sizes fold to constants; use a mask in place of picking out elements, or cut "
              "the model there (edit --split-at).")
    evidence = (
        cite_m4_study("non_zero is unsupported, and runs on no GPU either"),
        cite_private_route(
            "non_zero has no form on any generation, as its shape depends on the data; shapes are static"
        ),
        cite_surgery_tip("layers whose shapes are dynamic do not run on the ANE"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "non_zero":
            note = "non_zero makes as many rows as there are elements that are not zero"
            return make_unsupported_hit(self, op, f"{note}{describe_split_points(op)}", split_at=find_split_points(op))
        given = _SHAPE_INPUTS[op.op_type]
        if not find_dynamic_inputs(op, given):
            return Miss(op, f"its {given} is a constant", near=False)
        are = "are" if given == "reps" else "is"
        return Hit(op, sure=False, note=f"the {given} of a {op.op_type} {are} computed in the model; no such op was "
                                        "measured")

    def examples(self) -> Iterable[Example]:
        yield make_example("non_zero", lambda x: Builder.non_zero(x=x, name="y"), x=(2, 3))
        yield Example("size from a shape", _build_flatten)
        yield make_example(
            "fixed size",
            lambda x: Builder.reshape(x=x, shape=[3, -1], name="y"),
            reason="its shape is a constant",
            x=(2, 3),
        )
        yield make_example(
            "mask",
            lambda x: Builder.select(cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=np.float16(0), name="y"),
            reason="",
            x=(2, 3),
        )


def _build_flatten() -> Program:
    def body(x: Var) -> Var:
        extent = Builder.gather(x=Builder.shape(x=x), indices=np.int32(0), axis=0)
        size = Builder.concat(values=[Builder.expand_dims(x=extent, axes=[0]), np.array([-1], np.int32)], axis=0)
        result: Var = Builder.reshape(x=x, shape=size, name="y")
        return result

    return build_program(body, dtype=types.fp16, x=(None, 3, 4))
