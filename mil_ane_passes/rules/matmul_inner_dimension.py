"""Find products over a dimension that is too long."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane.limits import collect_evidence, find_exceeded_limit, find_limit
from ..ir.query import get_const_value, is_compressed, is_const
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.examples import make_example
from ._sizes import select_generations


class MatmulInnerDimension(Rule):
    """A matmul sums over more elements than the ANE's kernel memory holds.

    why     Core ML says on an M4 that two bytes for each element of the inner dimension must fit 65536. By a private
            route 16384 is the end on M1 and M2.
    when    matmul of two values that are computed. With a constant operand, and for linear, it was not measured.
    fix     Split the inner dimension: slices of both operands, a matmul each, and adds (rounded otherwise).
    """

    code, slug = "ANE224", "matmul-inner-dimension"
    roots = ("matmul", "linear")
    refuses, confidence = True, "medium"
    advice = "Split the inner dimension into products that are added (rounded otherwise)."
    evidence = collect_evidence("matmul-inner")

    def match(self, op: Operation) -> Hit | Miss:
        rows = op.op_type == "matmul" and get_const_value(op.transpose_x, False) and op.x.rank > 1
        inner = op.x.shape[-2 if rows else -1] if op.x.rank else 1
        if is_symbolic(inner):
            return Miss(op, "the inner dimension is symbolic", near=False)
        inner, looked_at = int(inner), tuple(self.generations)
        long = find_exceeded_limit("matmul-inner", inner, looked_at)
        if long is None:
            most = find_limit("matmul-inner", looked_at)
            at_limit = most is not None and most.most == inner
            return Miss(op, f"inner dimension {inner}, the limit is {inner}" if at_limit else "fits", near=at_limit)
        note = f"inner dimension {inner} {long.words}"
        if op.op_type == "linear" or any(is_const(var) or is_compressed(var) for var in (op.x, op.y)):
            return Hit(op, note=f"{note}; measured for two computed operands, not for a constant one", sure=False)
        later = select_generations(looked_at, "m4", "m6")
        message = f"Error: the output channel of input A ({2 * inner} kB) can not fit the Kmem (65536 kB)"
        fails_on_m4 = find_exceeded_limit("matmul-inner", inner, later) is not None and bool(
            select_generations(looked_at, "m4")
        )
        return Hit(op, note=note, sure=long.sure, message=message if fails_on_m4 else None)

    def examples(self) -> Iterable[Example]:
        yield make_example("over 32768", lambda x, z: Builder.matmul(x=x, y=z, name="y"), x=(2, 32769), z=(32769, 2))
        yield make_example(
            "transposed", lambda x, z: Builder.matmul(x=x, y=z, transpose_x=True, name="y"), x=(40000, 2), z=(40000, 2)
        )
        yield make_example("on an M1", lambda x, z: Builder.matmul(x=x, y=z, name="y"), x=(2, 16385), z=(16385, 2))
        yield make_example(
            "at the limit",
            lambda x, z: Builder.matmul(x=x, y=z, name="y"),
            reason="inner dimension 16384, the limit is 16384",
            x=(2, 16384),
            z=(16384, 2),
        )
        yield make_example("small", lambda x, z: Builder.matmul(x=x, y=z, name="y"), reason="fits", x=(2, 3), z=(3, 2))
        yield make_example(
            "symbolic",
            lambda x, z: Builder.matmul(x=x, y=z, transpose_x=True, name="y"),
            reason="the inner dimension is symbolic",
            x=(None, 2),
            z=(4, 2),
        )
