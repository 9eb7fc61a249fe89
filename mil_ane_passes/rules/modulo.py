"""Find mod."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ._unsupported_ops import M1_TO_M5, make_unsupported_hit


class Modulo(Rule):
    """mod is unsupported on the ANE.

    why     Core ML on an M4 rejects it, and so does the ANE's compiler on M1 to M5 when asked without Core ML.
    when    Any mod of numbers. floor_div is supported on an M4.
    fix     x - y * floor(x / y): the same in exact arithmetic; in fp16 a quotient that rounds up to a whole number
            gives a remainder that is off by y. `ane::modulo_by_floor` takes a constant y in pieces: the same bits.
    """

    code, slug = "ANE203", "modulo"
    roots = ("mod",)
    refuses, confidence = True, "high"
    advice = "Write x - y * floor(x / y): same algebra; where x / y rounds to a whole number it is off by y."
    evidence = (
        cite_m4_study("mod is unsupported; floor_div, floor, mul and sub are accepted"),
        cite_private_route("mod has no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.outputs[0].dtype):
            return Miss(op, "computes on integers", near=False)
        return make_unsupported_hit(
            self, op, "mod is unsupported on the ANE; it is x - y * floor(x / y)", seen=M1_TO_M5
        )

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
