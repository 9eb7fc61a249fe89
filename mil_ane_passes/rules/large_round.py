"""Find roundings of numbers that the ANE rounds wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.bounds import bound_magnitude, get_measured_range
from ..passes.contract import FP32_UNSUPPORTED_REASON, Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_private_route
from ..passes.examples import build_program

_MIN_MISROUNDED = 1024.0
"Magnitude from which the ANE rounds wrongly: fp16 numbers are integers there, and a half cannot be added."


class LargeRound(Rule):
    """Rounding in fp16 adds a half from 1024 on: round(1024) is 1025 on the ANE.

    why     The engine adds a half and cuts. From 1024 on fp16 has no halves left: the sum is rounded up to the next
            number and stays there, although every fp16 number of that size is whole already. Below, a tie goes away
            from zero (round(0.5) is 1), where MIL goes to the even neighbour.
    when    round in fp16, unless the program bounds its operand below 1024 (a clip, a sigmoid, a constant range behind
            it) or, with feeds, it was seen to stay below. Ties are not told apart: no bound rules them out.
    fix     Keep the operand below 1024, or write `where(abs(x) < 1024, round(x), x)` in the model, which is exact: the
            large numbers are whole. Reported for programs that do not pass through Core ML; predicted for those.
    """

    code, slug = "ANE318", "round-beyond-1024"
    roots = ("round",)
    advice = "Keep the operand below 1024, or select the operand itself from there on, which is whole already."
    measures = True
    evidence = (
        Community(
            "round(1024) gives 1025, round(1025) 1026, round(-2047) -2048: a half is added where fp16 has none; "
            "select(|x| < 1024, round(x), x) fixes it; ties go away from zero (private route, not Core ML)",
            source="https://github.com/sbryngelson/ANEForge/pull/116",
            date="2026-07-23",
        ),
        cite_private_route(
            "round is native on all chips, M1 probed; no limit is stated: at odds with the report on 1024", chip="M1"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        bound, found = bound_magnitude(op.x), get_measured_range(self.measured, op.x)
        if bound is not None and bound < _MIN_MISROUNDED:
            return Miss(op, f"the program keeps the operand within {bound:g}")
        if found is None:
            return Hit(op, note="right unless the operand reaches 1024, which nothing here rules out; ties go away "
                                "from zero")
        if found.largest < _MIN_MISROUNDED and found.finite:
            return Miss(op, f"the operand reaches {found.largest:.4g} in the runs at hand, below 1024")
        return Hit(op, note=f"the operand reaches {found.largest:.4g} in the runs at hand; from 1024 on a half is "
                            "added that fp16 cannot hold")

    def examples(self) -> Iterable[Example]:
        yield Example("anything", lambda: _build_round(lambda x: x), measured=False)
        yield Example("seen to be large", lambda: _build_round(lambda x: Builder.mul(x=x, y=np.float16(255))),
                      scale=100.0)
        yield Example("seen to be small", lambda: _build_round(lambda x: x),
                      reason="the operand reaches 2.324 in the runs at hand, below 1024")
        yield Example("clipped", lambda: _build_round(lambda x: Builder.clip(
            x=x, alpha=np.float16(-128), beta=np.float16(127))), reason="the program keeps the operand within 128")
        yield Example("of a sigmoid", lambda: _build_round(lambda x: Builder.mul(
            x=Builder.sigmoid(x=x), y=np.float16(255))), reason="the program keeps the operand within 255")
        yield Example("fp32", lambda: _build_round(lambda x: x, types.fp32), reason=FP32_UNSUPPORTED_REASON)


def _build_round(operand: Callable[[Var], Var], dtype: object = types.fp16) -> Program:
    return build_program(lambda x: Builder.round(x=operand(x), name="y"), dtype=dtype, x=(4, 8))
