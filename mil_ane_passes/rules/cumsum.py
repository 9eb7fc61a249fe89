"""Find cumsum."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_const_value
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_xcode_notes
from ..passes.examples import make_example
from ._unsupported_ops import make_unsupported_hit


class Cumsum(Rule):
    """cumsum is unsupported on the ANE, and what stands beside a cheap one may leave with it.

    why     Reported on the CPU for static and flexible shapes alike, with the cheap op behind it drawn along; refused
            by Core ML on an M4. The ANE itself can do it, but not from MIL's op.
    when    Any cumsum of numbers, whatever axis, direction and length.
    fix     ane::triangle_cumsum: convs with ones, or a matmul with a constant triangle of ones (upper for the last
            axis, lower with reverse, without its diagonal with exclusive). The same sums in another order; they must
            stay below 32768 in fp16. A length that is known only at run time needs a bound.
    """

    code, slug = "ANE205", "cumsum"
    roots = ("cumsum",)
    refuses, confidence = True, "high"
    advice = "Use convs with ones, or a matmul with a constant triangle of ones: the same sums in another order."
    evidence = (
        cite_m4_study("cumsum is unsupported"),
        cite_xcode_notes(
            "cumsum falls to the CPU whether or not the shape is fixed, and takes the simple ops behind it along"
        ),
        cite_private_route("MIL's cumsum is not implemented; the ANE does one reached by another way"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        axis = get_const_value(op.axis, 0)
        extent = op.x.shape[axis] if op.x.rank else 1
        length = "a length known only at run time" if is_symbolic(extent) else f"{int(extent)} elements"
        return make_unsupported_hit(self, op, f"cumsum is unsupported on the ANE (axis {axis}, {length})")

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
