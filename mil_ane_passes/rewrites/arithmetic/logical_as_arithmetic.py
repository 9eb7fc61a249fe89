"""Compute masks as numbers 0 and 1 if support of logical ops is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_mask_program
from ...passes.targets import Gate
from ...rules.unsupported_ops import LogicalOps

_M4_ONLY = Gate(first="m4", last="m4")
_MAX_CONST_ELEMENTS = 32768
"Maximum elements of a constant mask that is stored as numbers, in 65536 bytes; a larger one is cast at run time."
_ARITHMETIC_OPS = {"logical_and": "mul", "logical_or": "maximum", "logical_xor": "sub"}
"Ops on 0 and 1 that give 0 exactly where the result is false; the difference of xor is squared, as it may be -1."


class LogicalAsArithmetic(Rewrite):
    """Compute masks as numbers 0 and 1 if support of logical ops is unknown.

    why     Sources contradict each other: Core ML accepts logical_and on an M4; without Core ML, the ANE's compiler
            rejects logical_and, logical_or and logical_xor for every chip. The replacements are supported according to
            all sources.
    when    logical_or and logical_xor; logical_and if the target does not include M4.
    exact   bitwise, in fp16 0 and 1: x and y is x * y, x or y is maximum(x, y), x xor y is (x - y) * (x - y). The
            result is true where that is not 0.
    cost    two casts (none for a constant of up to 32768 elements), one op (xor: two) and a comparison for one op on
            bools of half the size.

    before
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %1: bool[2, 3] = greater(x=%z, y=0.0)
        %2: bool[2, 3] = logical_or(x=%0, y=%1)
        %y: fp16[2, 3] = cast(x=%2, dtype=fp16)
    after
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %1: bool[2, 3] = greater(x=%z, y=0.0)
        %2: fp16[2, 3] = cast(x=%0, dtype=fp16)
        %3: fp16[2, 3] = cast(x=%1, dtype=fp16)
        %4: fp16[2, 3] = maximum(x=%2, y=%3)
        %5: bool[2, 3] = not_equal(x=%4, y=0.0)
        %y: fp16[2, 3] = cast(x=%5, dtype=fp16)
    """

    fixes = (LogicalOps,)
    stage = "decompose"
    preset = "full"
    roots = tuple(_ARITHMETIC_OPS)
    evidence = (
        cite_m4_study("logical_and is accepted; mul, maximum, sub, not_equal and casts of bool are, too"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "logical_and" and any(map(_M4_ONLY.includes, self.generations)):
            return Miss(op, "logical_and is accepted on M4; choose another target")
        return Hit(op, note=f"{op.op_type} as {_ARITHMETIC_OPS[op.op_type]} of 0 and 1")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op

        def convert_to_number(var: Var) -> Any:
            if var.val is not None and np.size(var.val) <= _MAX_CONST_ELEMENTS:
                return mb.once(("number", var), lambda: mb.const(val=np.asarray(var.val, np.float16)))
            return mb.once(("number", var), lambda: mb.cast(x=var, dtype="fp16"))

        number = getattr(mb, _ARITHMETIC_OPS[op.op_type])(x=convert_to_number(op.x), y=convert_to_number(op.y))
        if op.op_type == "logical_xor":
            number = mb.mul(x=number, y=number)
        result: Var = mb.not_equal(x=number, y=np.float16(0))
        return result

    def examples(self) -> Iterable[Example]:
        yield Example("or", lambda: build_mask_program("logical_or"))
        yield Example("xor", lambda: build_mask_program("logical_xor"))
        yield Example(
            "and",
            lambda: build_mask_program("logical_and"),
            reason="logical_and is accepted on M4; choose another target",
        )
