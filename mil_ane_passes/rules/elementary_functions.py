"""Find elementary functions that are unsupported on the ANE."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example
from ._unsupported_ops import M1_TO_M5, make_unsupported_hit

_EXPANSIONS = {
    "asin": "2 * atan(x / (1 + sqrt((1 - x) * (1 + x))))",
    "acos": "4 * atan(sqrt((1 - x) / 2) / (1 + sqrt((1 + x) / 2)))",
    "tan": "sin(x) / cos(x)",
    "sinh": "tanh(x) * cosh(x)",
    "cosh": "u + 1 / (4 * u) with u = exp(|x|) / 2",
    "atanh": "log((1 + x) / (1 - x)) / 2, inexact near 0",
}
"Expansions into supported functions: equal in exact arithmetic, rounded differently in fp16."


class ElementaryFunctions(Rule):
    """asin, acos, tan, sinh, cosh and atanh are unsupported on the ANE.

    why     Core ML on an M4 rejects them, and so does the ANE's compiler on M1 to M5 when asked without Core ML. The
            op runs on the CPU, with two transitions where it stands between ops on the ANE.
    when    Any of the six on numbers. Its neighbours sin, cos and atan are supported on an M4.
    fix     Write it with exp, tanh, log, sin, cos, atan and a division: the note says how. The algebra is the same,
            the roundings of fp16 are not: 1.6 to 3.3 units in the last place. log((1 + x) / (1 - x)) / 2 loses small x;
            `ane::inverse_tanh` has a longer form that does not.
    """

    code, slug = "ANE202", "elementary-function"
    roots = tuple(_EXPANSIONS)
    refuses, confidence = True, "high"
    advice = "Write it with functions that are taken, as the reason says: same algebra, other roundings."
    evidence = (
        cite_m4_study(
            "asin, acos, tan, sinh, cosh and atanh are unsupported; atan, sin, cos, exp and log are accepted"
        ),
        cite_private_route("asin, acos, tan, sinh, cosh and atanh have no form on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        return make_unsupported_hit(
            self, op, f"{op.op_type} is unsupported on the ANE; it is {_EXPANSIONS[op.op_type]}", seen=M1_TO_M5
        )

    def examples(self) -> Iterable[Example]:
        for kind in _EXPANSIONS:
            yield Example(kind, partial(_build_unary_op, kind))
        yield make_example("in fp32", lambda x: Builder.tan(x=x, name="y"), dtype=types.fp32, x=(2,))
        yield make_example("atan", lambda x: Builder.atan(x=x, name="y"), reason="", x=(2, 3))
        yield make_example(
            "written out",
            lambda x: Builder.real_div(x=Builder.sin(x=x), y=Builder.add(x=Builder.cos(x=x), y=np.float16(0))),
            reason="",
            x=(2, 3),
        )


def _build_unary_op(kind: str) -> Program:
    return build_program(lambda x: getattr(Builder, kind)(x=x, name="y"), x=(2, 3))
