"""Find comparisons that test for NaN, an infinity or the sign of a zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.query import is_const
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program, make_example

_FP32_REASON = "computed in fp32, where NaN and infinities are what they should be, but not on the ANE"


class NanLogic(Rule):
    """A question for NaN, an infinity or a negative zero gets another answer on the ANE.

    why     The engine reads an infinity as 65536 and the usual NaN as 98304, numbers like others: NaN is equal to
            itself, adding to it gives plus infinity, and a negative zero comes out as a positive one. Code that tests
            for such values (isnan, nan_to_num, `x != x`, `abs(x) == inf`, the sign of `1 / x`) silently does not fire.
    when    In fp16: a value compared with itself (equal, not_equal, and the ordered comparisons); a comparison with a
            constant that holds an infinity or NaN; a select whose branch is a constant with NaN; a comparison of
            `c / x` with zero (MIL's inverse adds an epsilon, so its sign tells nothing of a zero anywhere). What
            makes NaN without asking for it is not looked for.
    fix     Keep such values from arising (a mask of -10000, a clip before a log or a division), and compare with finite
            limits; or make the test outside the model.
    """

    code, slug = "ANE319", "nan-and-signed-zero-logic"
    roots = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "select")
    advice = "Keep NaN and infinities from arising, and compare with finite limits; or test outside the model."
    evidence = (
        Community("an infinity is read as 2**16, the NaN 0x7E00 as 1.5 * 2**16; NaN + 1 is plus infinity; a sum "
                  "of products that is -0 comes out +0",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6",
                  date="2026-10-02"),
        Community("Core ML's atan2, which asks for zeros and signs, gives 0 for pi where the imaginary part is 0: "
                  "heard as clicks; which unit ran it is not stated",
                  source="https://github.com/FluidInference/FluidAudio/pull/700", date="2026-06-14"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "select":
            return _match_select(op)
        if not types.is_float(op.x.dtype):
            return Miss(op, "compares integers", near=False)
        asks = _describe_special_comparison(op)
        if asks is None:
            return Miss(op, "compares numbers", near=False)
        return Miss(op, _FP32_REASON) if op.x.dtype != types.fp16 else Hit(op, note=asks)

    def examples(self) -> Iterable[Example]:
        yield Example("isnan", lambda: _build_select(lambda x: Builder.not_equal(x=x, y=x)))
        yield Example("is a number", lambda: _build_select(lambda x: Builder.equal(x=x, y=x)))
        yield Example("isinf", lambda: _build_select(lambda x: Builder.equal(
            x=Builder.abs(x=x), y=np.float16(np.inf))))
        yield Example("below infinity", lambda: _build_select(lambda x: Builder.less(x=x, y=np.float16(np.inf))))
        yield Example("sign of zero", lambda: _build_select(lambda x: Builder.less(
            x=Builder.real_div(x=np.float16(1), y=x), y=np.float16(0))))
        yield Example("NaN put in", lambda: _build_select(lambda x: Builder.greater(x=x, y=np.float16(0)), np.nan))
        yield Example(
            "fp32", lambda: _build_select(lambda x: Builder.not_equal(x=x, y=x), 0, np.float32), reason=_FP32_REASON
        )
        yield Example("two numbers", lambda: _build_select(lambda x: Builder.greater(x=x, y=np.float16(0.5))),
                      reason="compares numbers")
        yield make_example(
            "integers",
            lambda x: Builder.cast(x=Builder.equal(x=x, y=x), dtype="fp16", name="y"),
            reason="compares integers",
            dtype=types.int32,
            x=(2, 3),
        )


def _describe_special_comparison(op: Operation) -> str | None:
    """Describe a test that the ANE cannot evaluate; None for an ordinary comparison."""
    if op.x is op.y:
        return "compares a value with itself, which asks for NaN"
    for one, other in ((op.x, op.y), (op.y, op.x)):
        if _has_element_where(one, np.isnan):
            return "compares with NaN"
        if _has_element_where(one, np.isinf):
            return "compares with an infinity, which the ANE reads as 65536"
        if _is_zero(one) and _is_quotient(other):
            return "compares a quotient with zero, which asks for the sign of a zero or an infinity where it is one"
    return None


def _match_select(op: Operation) -> Hit | Miss:
    if not any(_has_element_where(branch, np.isnan) for branch in (op.a, op.b)):
        return Miss(op, "no branch is a constant with NaN", near=False)
    if op.outputs[0].dtype != types.fp16:
        return Miss(op, _FP32_REASON)
    return Hit(op, note="puts in NaN, which the ANE reads as a large number")


def _read_constant(var: Var) -> np.ndarray[Any, Any] | None:
    """Return the elements of a constant, or the one that a fill repeats; None for other values."""
    if var.op is not None and var.op.op_type in ("fill", "fill_like"):
        var = var.op.value
    return np.asarray(var.val) if is_const(var) and types.is_float(var.dtype) else None


def _has_element_where(var: Var, kind: Callable[..., Any]) -> bool:
    constant = _read_constant(var)
    return constant is not None and bool(np.any(kind(constant)))


def _is_zero(var: Var) -> bool:
    constant = _read_constant(var)
    return constant is not None and not np.any(constant)


def _is_quotient(var: Var) -> bool:
    """Return whether `var` is a constant divided by a value: its sign is that of the divisor, zeros included."""
    op = var.op
    return (
        op is not None
        and op.op_type == "real_div"
        and _read_constant(op.x) is not None
        and _read_constant(op.y) is None
    )


def _build_select(test: Callable[[Var], Var], other: float = 0.0, dtype: type = np.float16) -> Program:
    kind = types.fp16 if dtype is np.float16 else types.fp32
    return build_program(lambda x: Builder.select(cond=test(x), a=dtype(other), b=x, name="y"), dtype=kind, x=(2, 3))
