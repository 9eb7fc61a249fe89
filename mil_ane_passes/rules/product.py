"""Find reduce_prod."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ._unsupported_ops import M1_TO_M5, make_unsupported_hit


class Product(Rule):
    """reduce_prod is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when asked without Core ML. The
            other reductions are taken.
    when    Any reduce_prod of numbers, whatever the axes.
    fix     Few elements: slice them and multiply, in the order in which the product was taken. Many, all positive:
            exp of the reduce_sum of log, an approximation in fp16.
    """

    code, slug = "ANE204", "product"
    roots = ("reduce_prod",)
    refuses, confidence = True, "high"
    advice = "Multiply slices of few elements (other roundings); of many positive x exp(reduce_sum(log(x)))."
    evidence = (
        cite_m4_study("reduce_prod is unsupported; the other reductions to numbers are accepted"),
        cite_private_route("reduce_prod has no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        return make_unsupported_hit(self, op, "reduce_prod is unsupported on the ANE", seen=M1_TO_M5)

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
