"""Replace the indices of nonzero elements by a constant if they are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import make_example, make_op_example
from ...rules.control_flow import DataDependentShape
from ._generated_constants import build_shared_const, describe_size_excess


class StaticNonZero(Rewrite):
    """Fold non_zero of a compile-time constant; non_zero of other values has no replacement.

    why     non_zero and ops on its rows run on the CPU only.
    when    x is constant with at least one nonzero element, because a constant without rows cannot be stored. Otherwise
            the number of rows depends on data, but ops on the ANE have static shapes: use a mask and select instead.
    exact   bitwise.
    cost    4 bytes per axis for each nonzero element.

    before
        %0: int32[3, 2] = non_zero(x=[[0.0, 3.0, 0.0], [1.0, 0.0, 2.0]])
        %1: fp16[3, 2] = cast(x=%0, dtype=fp16)
        %2: fp16 = reduce_sum(x=%1)
        %y: fp16[2, 3] = add(x=%x, y=%2)
    after
        %0: fp16[3, 2] = cast(x=[[0, 1], [1, 0], [1, 2]], dtype=fp16)
        %1: fp16 = reduce_sum(x=%0)
        %y: fp16[2, 3] = add(x=%x, y=%1)
    """

    fixes = (DataDependentShape,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("non_zero",)
    evidence = (
        cite_ane_compiler("non_zero has no equivalent on any generation: shapes are static"),
    )

    max_bytes: int = 1 << 20
    "Maximum bytes of one constant."

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.val is None:
            return Miss(op, "the number of rows depends on data: use a mask and select instead")
        rows = np.ascontiguousarray(np.argwhere(op.x.val), np.int32)
        if not rows.size:
            return Miss(op, "all elements are 0: a constant without rows cannot be stored")
        if rows.nbytes > self.max_bytes:
            return Miss(op, describe_size_excess(rows.nbytes, self.max_bytes))
        return Hit(op, note=f"{len(rows)} rows are known", rows=rows)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_shared_const(mb, ("rows", hit.rows.shape, hit.rows.tobytes()), lambda: hit.rows)

    def examples(self) -> Iterable[Example]:
        yield _make_constant_example("known", np.array([[0, 3, 0], [1, 0, 2]], np.float16))
        yield _make_constant_example("truth", np.array([True, False, True]))
        yield make_op_example(
            "known at run time only", "non_zero", (2, 3),
            reason="the number of rows depends on data: use a mask and select instead")
        yield _make_constant_example("none", np.zeros(3, np.float16),
                                     reason="all elements are 0: a constant without rows cannot be stored")


def _make_constant_example(name: str, values: np.ndarray[Any, Any], **settings: Any) -> Example:
    def build_body(x: Var) -> Any:
        total = Builder.reduce_sum(x=Builder.cast(x=Builder.non_zero(x=values), dtype="fp16"))
        return Builder.add(x=x, y=total, name="y")

    return make_example(name, build_body, x=(2, 3), **settings)
