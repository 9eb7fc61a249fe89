"""Find sliding_windows."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation

from ..ir.query import get_const_value
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ._unsupported_ops import M1_TO_M5, make_unsupported_hit


class SlidingWindows(Rule):
    """sliding_windows is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and it runs on no GPU either; the ANE's compiler, asked without Core ML, has
            no form of it.
    when    Any sliding_windows.
    fix     Windows that do not overlap are a reshape; those that begin at multiples of the stride are rows of one,
            joined. Few windows: a slice each, and a stack. The same bits.
    """

    code, slug = "ANE211", "sliding-windows"
    roots = ("sliding_windows",)
    refuses, confidence = True, "high"
    advice = "Reshape where windows do not overlap, else join slices (the same bits)."
    evidence = (
        cite_m4_study("sliding_windows is unsupported, and runs on no GPU either"),
        cite_private_route("sliding_windows has no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        size, step = get_const_value(op.size), get_const_value(op.stride, 1)
        shape = f"of {size} elements, {step} apart" if size is not None else "of a computed size"
        return make_unsupported_hit(self, op, f"sliding_windows is unsupported on the ANE ({shape})", seen=M1_TO_M5)

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
