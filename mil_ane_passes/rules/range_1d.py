"""Find range_1d."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_xcode_notes
from ..passes.examples import build_program, make_example
from ._unsupported_ops import find_dynamic_inputs, make_unsupported_hit


class Range1d(Rule):
    """A range of numbers is counted out while the model runs.

    why     range_1d runs on the CPU only, and on the GPU neither; so it was reported without the chip's name, measured
            on an M4, and seen on an M1 without Core ML.
    when    Any range_1d, of integers or of fp16, with fixed bounds or computed ones.
    fix     ane::constant_range: with fixed bounds a constant holds the same bits; where the end is the length of an
            axis, a constant of the longest range is cut to it. With an end that is computed otherwise, the longest
            range and a mask (a comparison with the bound as fp16) where the shorter one was read.
    """

    code, slug = "ANE207", "range-1d"
    roots = ("range_1d",)
    refuses, confidence = True, "high"
    advice = "Put in a constant: with fixed bounds the same bits, else the longest range, cut to its length."
    evidence = (
        cite_m4_study("range_1d is unsupported, and runs on no GPU either"),
        cite_xcode_notes("range_1d runs on the CPU only"),
        cite_private_route("range_1d is rejected on M1", chip="M1"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        computed = find_dynamic_inputs(op, "start", "end", "step")
        message = "Failed to retrieve parameter start" if computed == ["end"] else None
        what = f"its {' and '.join(computed)} computed" if computed else "its bounds fixed"
        return make_unsupported_hit(self, op, f"range_1d is unsupported on the ANE ({what})", message=message)

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


def _build_dynamic_range() -> Program:
    def body(n: Var) -> Var:
        counted = Builder.range_1d(start=np.int32(0), end=Builder.squeeze(x=n), step=np.int32(1))
        result: Var = Builder.cast(x=counted, dtype="fp16", name="y")
        return result

    return build_program(body, dtype=types.int32, n=(1,))
