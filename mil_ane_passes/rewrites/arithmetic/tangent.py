"""Compute tan from sin and cos."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit, Miss
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import make_op_example
from ...passes.targets import Gate, format_generations
from ._elementary_functions import LOOKUP_TABLE_EVIDENCE, ElementaryRewrite


class Tangent(ElementaryRewrite):
    """Compute tan as sin / cos; tan is unsupported on the ANE.

    why     Core ML on an M4 rejects tan, and so does the ANE's compiler on M1 to M5 when queried without Core ML. sin
            and cos are supported from M3 on; before, they are unsupported as well.
    when    tan of fp16 values, if all chips of the target (with `always`: one of them) are M3 or newer.
    exact   rounding: sin x / cos x; no fp16 number is near enough to a pole to make the cosine zero. Over all fp16
            numbers the result is within 1.64 units in the last place (relative 1.1e-3 of what is not subnormal).
            Infinities give NaN, as before. These numbers count rounding only: near the poles an error of the device's
            cosine is amplified.
    cost    three ops for one.

    before
        %y: fp16[2, 8] = tan(x=%x)
    after
        %0: fp16[2, 8] = sin(x=%x)
        %1: fp16[2, 8] = cos(x=%x)
        %y: fp16[2, 8] = real_div(x=%0, y=%1)
    """

    bound = "1.64 units in the last place over all fp16 numbers"
    roots = ("tan",)
    forms = {"tan": ("sin(x) / cos(x)", 1.64)}
    targets = Gate(first="m3")
    evidence = (
        *ElementaryRewrite.evidence, LOOKUP_TABLE_EVIDENCE,
        cite_ane_compiler("sin and cos are native from M3 on; M1 and M2 reject them, measured", "M1 and M2"),
    )

    always: bool = False
    "Rewrite even if a chip of the target does not support sin and cos."
    max_error: float = 4.0
    "Maximum accepted error in units in the last place; it is off by 1.64."

    def match(self, op: Operation) -> Hit | Miss:
        match = super().match(op)
        older = [each for each in self.generations if not self.targets.includes(each)]
        if isinstance(match, Hit) and older and not self.always:
            return Miss(
                op,
                f"sin and cos are unsupported on {format_generations(older)}, too; choose a newer target, or "
                f"always=true",
            )
        return match

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        result: Var = mb.real_div(x=mb.sin(x=hit.op.x), y=mb.cos(x=hit.op.x))
        return result

    def examples(self) -> Iterable[Example]:
        always = {"always": True}
        yield make_op_example("op", "tan", (2, 8), options=always)
        yield make_op_example("large angles", "tan", (2, 8), options=always, scale=1000.0)
        yield make_op_example("flexible, for iOS15", "tan", (None, 3), opset=ct.target.iOS15, options=always)
        yield make_op_example("older chips, too", "tan", (2, 8), reason=(
            "sin and cos are unsupported on A12, A13, M1 and M2, too; choose a newer target, or always=true"))
        yield make_op_example("fp32", "tan", (2, 8), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("not good enough", "tan", (2, 8), options={"max_error": 1.0},
                              reason="off by up to 1.64 units in the last place, max_error=1")
