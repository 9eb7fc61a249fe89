"""Ops whose results on the ANE differ from their definition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.bounds import bound_magnitude, get_measured_range
from ..ir.query import get_const_value, get_consumers, is_const
from ..passes.contract import FP32_UNSUPPORTED_REASON, Community, Example, Hit, Miss, Rule, Severity
from ..passes.evidence import cite_ane_compiler, cite_m4_study, cite_surgery_tip
from ..passes.examples import build_program, make_example, make_weight

_MIN_MISROUNDED = 1024.0
"Magnitude from which the ANE rounds wrongly: all fp16 numbers are integers there, and 0.5 cannot be added."
_FP32_REASON = "computed in fp32, where NaN and infinities are correct, but not on the ANE"
_SCALE_OPS = ("mul", "real_div")


class LargeAngle(Rule):
    """The sine or cosine of a large angle is inaccurate in fp16: angles from 64 on are 1/16 apart, from 1024 on 1.

    why     An fp16 angle of magnitude a has a resolution of a / 2048 at best; a phase accumulated over a signal, or a
            frequency times a position, soon loses all information about the phase. The ANE computes sine by a table
            over a quarter of a period, which cannot restore it. M1 and M2 are reported to have no sine at all.
    when    sin or cos in fp16, unless the program bounds the angle by `beyond` (a mod, a clip, `x - c * round(x / c)`)
            or it stays within this bound on your feeds.
    fix     Reduce the angle before it is large: accumulate phases modulo one turn, compute frequency times position
            modulo 2 pi in fp32 in the caller, or use a constant table of sines. A reduction of the fp16 angle is too
            late. ane::fp16_compute keeps such an op in fp32 if the feeds show the loss.
    """

    code, slug = "ANE317", "sin-cos-large-argument"
    severity = Severity.WRONG
    roots = ("sin", "cos")
    advice = "Reduce the angle to one turn before it is large, in fp32 or in the caller."
    measures = True
    evidence = (
        Community(
            "sine within 6.3e-4; 33 table points over a quarter period, the rest by symmetry; how arguments are "
            "reduced is not stated",
            source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md",
            chip="M6",
            date="2026-10-05",
        ),
        cite_m4_study("sin and cos are accepted"),
        cite_ane_compiler(
            "sin and cos are native from the M3 generation on and rejected on M1 and M2, where a polynomial replaces "
            "them"
        ),
        cite_surgery_tip(
            "a model with a single sin or cos layer does not run on the ANE: contradicts the M4 list, unless the "
            "reason is the cost of such a small model"
        ),
        Community(
            "a vocoder's sine of an accumulated phase in the thousands is noise once the phase is rounded (bfloat16, "
            "another machine, the same arithmetic)",
            source="https://github.com/tenstorrent/tt-xla/issues/5332",
            chip="n150 (no Apple chip)",
            date="2026-06-22",
        ),
    )

    beyond: float = 100.0
    "Magnitude in radians from which an angle counts as large; fp16 angles are 1/16 apart there."

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, which resolves such angles, but not on the ANE")
        bound, found = bound_magnitude(op.x), get_measured_range(self.measured, op.x)
        if bound is not None and bound <= self.beyond:
            return Miss(op, f"the program keeps the angle within {bound:.4g}")
        if found is None:
            return Hit(op, note=f"the program does not keep the angle within {self.beyond:g}, where fp16 angles are "
                                f"{_compute_fp16_spacing(self.beyond):g} apart")
        if found.largest <= self.beyond and found.finite:
            return Miss(op, f"the angle reaches {found.largest:.4g} in the measured runs, within {self.beyond:g}")
        return Hit(op, note=f"the angle reaches {found.largest:.4g} in the measured runs, where fp16 angles are "
                            f"{_compute_fp16_spacing(found.largest):g} apart")

    def examples(self) -> Iterable[Example]:
        yield Example("anything", lambda: _build_sine(lambda x: x), measured=False)
        yield Example(
            "large on the feeds", lambda: _build_sine(lambda x: Builder.mul(x=x, y=np.float16(100))), scale=30.0
        )
        yield make_example("cosine", lambda x: Builder.cos(x=x, name="y"), measured=False, x=(4, 8))
        yield Example("small on the feeds", lambda: _build_sine(lambda x: x),
                      reason="the angle reaches 2.324 in the measured runs, within 100")
        yield Example("mod", lambda: _build_sine(lambda x: Builder.mod(x=x, y=np.float16(6.28))),
                      reason="the program keeps the angle within 6.281")
        yield Example("reduced", lambda: _build_sine(_reduce_angle), reason="the program keeps the angle within 6.281")
        yield Example("fp32", lambda: _build_sine(lambda x: x, types.fp32),
                      reason="computed in fp32, which resolves such angles, but not on the ANE")


def _compute_fp16_spacing(magnitude: float) -> float:
    """Compute the distance between fp16 numbers of this magnitude."""
    return float(np.spacing(np.float16(min(magnitude, 65504.0))))


def _reduce_angle(x: Var) -> Var:
    turns = Builder.round(x=Builder.mul(x=x, y=np.float16(1 / 6.28)))
    result: Var = Builder.sub(x=x, y=Builder.mul(x=turns, y=np.float16(6.28)))
    return result


def _build_sine(angle: Callable[[Var], Var], dtype: object = types.fp16) -> Program:
    return build_program(lambda x: Builder.sin(x=angle(x), name="y"), dtype=dtype, x=(4, 8))


class LargeRound(Rule):
    """Rounding in fp16 adds a half from 1024 on: round(1024) is 1025 on the ANE.

    why     The ANE adds 0.5 and truncates. From 1024 on, fp16 cannot represent halves: the sum is rounded up to the
            next number, although every fp16 number of that magnitude is an integer already. Below, ties round away from
            zero (round(0.5) is 1), but to even in MIL.
    when    round in fp16, unless the program bounds its operand below 1024 (a clip, a sigmoid, a constant range) or it
            stays below on your feeds. Ties are not checked, because no bound excludes them.
    fix     Keep the operand below 1024, or use `where(abs(x) < 1024, round(x), x)` in the model, which is exact because
            large numbers are integers. Reported for programs that bypass Core ML; predicted for Core ML.
    """

    code, slug = "ANE318", "round-beyond-1024"
    severity = Severity.WRONG
    roots = ("round",)
    advice = "Keep the operand below 1024, or select the operand itself from there on, which is an integer already."
    measures = True
    evidence = (
        Community(
            "round(1024) gives 1025, round(1025) 1026, round(-2047) -2048: a half is added where fp16 has none; "
            "select(|x| < 1024, round(x), x) fixes it; ties go away from zero (not through Core ML)",
            source="https://github.com/sbryngelson/ANEForge/pull/116",
            date="2026-07-23",
        ),
        cite_ane_compiler(
            "round is native on all chips, M1 probed; no limit is stated: contradicts the report on 1024", chip="M1"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        bound, found = bound_magnitude(op.x), get_measured_range(self.measured, op.x)
        if bound is not None and bound < _MIN_MISROUNDED:
            return Miss(op, f"the program keeps the operand within {bound:g}")
        if found is None:
            return Hit(op, note="wrong if the operand reaches 1024, which the program does not exclude; ties round "
                                "away from zero")
        if found.largest < _MIN_MISROUNDED and found.finite:
            return Miss(op, f"the operand reaches {found.largest:.4g} in the measured runs, below 1024")
        return Hit(op, note=f"the operand reaches {found.largest:.4g} in the measured runs; from 1024 on fp16 cannot "
                            f"represent the added 0.5")

    def examples(self) -> Iterable[Example]:
        yield Example("anything", lambda: _build_round(lambda x: x), measured=False)
        yield Example("large on the feeds", lambda: _build_round(lambda x: Builder.mul(x=x, y=np.float16(255))),
                      scale=100.0)
        yield Example("small on the feeds", lambda: _build_round(lambda x: x),
                      reason="the operand reaches 2.324 in the measured runs, below 1024")
        yield Example("clipped", lambda: _build_round(lambda x: Builder.clip(
            x=x, alpha=np.float16(-128), beta=np.float16(127))), reason="the program keeps the operand within 128")
        yield Example("of a sigmoid", lambda: _build_round(lambda x: Builder.mul(
            x=Builder.sigmoid(x=x), y=np.float16(255))), reason="the program keeps the operand within 255")
        yield Example("fp32", lambda: _build_round(lambda x: x, types.fp32), reason=FP32_UNSUPPORTED_REASON)


def _build_round(operand: Callable[[Var], Var], dtype: object = types.fp16) -> Program:
    return build_program(lambda x: Builder.round(x=operand(x), name="y"), dtype=dtype, x=(4, 8))


class NanLogic(Rule):
    """A test for NaN, infinity or negative zero has a different result on the ANE.

    why     The ANE reads infinity as 65536 and the usual NaN as 98304, as ordinary numbers: NaN equals itself, NaN + 1
            is plus infinity, and a negative zero becomes positive. Tests for such values (isnan, nan_to_num, `x != x`,
            `abs(x) == inf`, the sign of `1 / x`) silently return false.
    when    In fp16: a value compared with itself (equal, not_equal, and the ordered comparisons); a comparison with a
            constant that contains infinity or NaN; a select whose branch is a constant with NaN; a comparison of `c /
            x` with zero (MIL's inverse adds an epsilon, so its sign does not depend on that of a zero on any unit). Ops
            that merely produce NaN are not reported.
    fix     Avoid such values (a mask of -10000, a clip before a log or a division), and compare with finite limits; or
            test in the caller.
    """

    code, slug = "ANE319", "nan-and-signed-zero-logic"
    severity = Severity.WRONG
    roots = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "select")
    advice = "Avoid NaN and infinities, and compare with finite limits; or test in the caller."
    evidence = (
        Community("an infinity is read as 2**16, the NaN 0x7E00 as 1.5 * 2**16; NaN + 1 is plus infinity; a sum of "
                  "products that is -0 becomes +0",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6",
                  date="2026-10-02"),
        Community("Core ML's atan2, which tests for zeros and signs, returns 0 instead of pi if the imaginary part is "
                  "0: audible as clicks; the compute unit is not stated",
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
        yield Example("NaN inserted", lambda: _build_select(lambda x: Builder.greater(x=x, y=np.float16(0)), np.nan))
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
        return "compares a value with itself, a test for NaN"
    for one, other in ((op.x, op.y), (op.y, op.x)):
        if _has_element_where(one, np.isnan):
            return "compares with NaN"
        if _has_element_where(one, np.isinf):
            return "compares with an infinity, which the ANE reads as 65536"
        if _is_zero(one) and _is_quotient(other):
            return "compares a quotient with zero, a test for the sign of a zero or an infinity"
    return None


def _match_select(op: Operation) -> Hit | Miss:
    if not any(_has_element_where(branch, np.isnan) for branch in (op.a, op.b)):
        return Miss(op, "no branch is a constant with NaN", near=False)
    if op.outputs[0].dtype != types.fp16:
        return Miss(op, _FP32_REASON)
    return Hit(op, note="inserts NaN, which the ANE reads as a large number")


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


class HardswishRank2(Rule):
    """A linear layer of rank 2 followed by a hard swish is reported to be wrong on the ANE.

    why     One report with a script: the classifier of MobileNetV3 differs by 0.2 on the Neural Engine (4 % of the
            norm), that of MobileNetV2, with a ReLU instead, by 0.003; with the matrix reshaped to rank 4, (1, 1, m, n),
            it was correct. Reported for Core AI, another front end of the same engine; predicted for Core ML. Another
            report finds errors of MobileNetV3 with Core ML on an M4, on the ANE or the GPU (it does not state which),
            and names no op.
    when    linear or matmul in fp16 with a result x of rank 2, followed by x * clip(x + 3, 0, 6) / 6, in any form that
            coremltools generates.
    fix     ane::hard_swish_rank_4 reshapes x to rank 4 before the layer and back after the hard swish (the same
            values). In the source: Linear and Hardswish at rank 4, or a 1x1 conv.
    """

    code, slug = "ANE321", "hardswish-rank-2"
    severity = Severity.WRONG
    roots = ("sigmoid_hard", "relu6", "clip")
    confidence = "medium"
    advice = "Compute the linear layer and the hard swish at rank 4: expand_dims before, squeeze after."
    evidence = (
        Community("rank-2 matmul into hard swish, fp16 on the Neural Engine: error 0.199; as (1, 1, m, n) it is "
                  "correct (Core AI)", source="https://github.com/apple/coreai-torch/issues/51", date="2026-07-23"),
        Community("MobileNetV3 is 0.19 to 0.26 off with all units allowed (ANE or GPU), 0.064 to 0.086 on the CPU",
                  source="https://github.com/apple/coremltools/issues/2625", chip="M4", date="2026-07-27"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        found = find_hard_swish(op)
        if found is None:
            return Miss(op, "no hard swish", near=False)
        layer = found.layer
        if layer is None:
            return Miss(op, "the hard swish does not follow a linear layer", near=False)
        if found.x.rank != 2:
            return Miss(op, f"a hard swish of a linear layer at rank {found.x.rank}; rank 2 was wrong", near=False)
        if found.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        return Hit(op, note=f"the hard swish of a {layer.op_type} of rank 2 ({'x'.join(map(str, found.x.shape))})",
                   covers=(layer, op), found=found)

    def examples(self) -> Iterable[Example]:
        yield Example("a classifier", lambda: _build_hard_swish(2, True))
        yield Example("written out", lambda: _build_hard_swish(2, False))
        yield Example("rank 4", lambda: _build_hard_swish(4, True),
                      reason="a hard swish of a linear layer at rank 4; rank 2 was wrong")
        yield Example("fp32", lambda: _build_hard_swish(2, True, np.float32), reason=FP32_UNSUPPORTED_REASON)
        yield make_example(
            "hard sigmoid",
            lambda x: Builder.sigmoid_hard(
                x=Builder.linear(x=x, weight=make_weight(4, 8)), alpha=np.float16(1 / 6), beta=np.float16(0.5), name="y"
            ),
            reason="no hard swish",
            x=(2, 8),
        )
        yield make_example("another clip", _build_other_clip, reason="no hard swish", x=(2, 8))


@dataclass(frozen=True)
class HardSwish:
    """A hard swish of `x`, and the linear layer, if any, that computes `x`.

    `ops` are the ops from the layer (or the first op that reads `x`) to the product x * gate(x), in order.
    """

    x: Var
    layer: Operation | None
    ops: tuple[Operation, ...]


def find_hard_swish(op: Operation) -> HardSwish | None:
    """Find the hard swish of which `op` (sigmoid_hard, relu6 or clip) is the gate, x * gate(x); None if it is not."""
    path = [op]
    if op.op_type == "sigmoid_hard":
        x = op.x
        source = x.op.x if x.op is not None and x.op.op_type == "thresholded_relu" else x
        path = [x.op, op] if source is not x else path
    else:
        added = op.x.op
        if added is None or added.op_type != "add" or (
                op.op_type == "clip" and (get_const_value(op.alpha), get_const_value(op.beta)) != (0.0, 6.0)):
            return None
        source = x = added.y if _is_three(added.x) else added.x if _is_three(added.y) else None
        if x is None:
            return None
        path = [added, op]
    scales = [each for each in get_consumers(op.outputs[0]) if each.op_type in _SCALE_OPS]
    gates = {op.outputs[0], *(each.outputs[0] for each in scales)}
    products = [each for var in dict.fromkeys((x, source)) for each in get_consumers(var)
                if each.op_type == "mul" and (each.x in gates or each.y in gates)]
    if not products:
        return None
    before, layer = [], source.op
    if layer is not None and layer.op_type == "add" and (is_const(layer.x) or is_const(layer.y)):
        before, layer = [layer], (layer.y if is_const(layer.x) else layer.x).op
    if layer is None or layer.op_type not in ("linear", "matmul"):
        before, layer = [], None
    used = [each for each in scales if each not in products and any(each.outputs[0] in (one.x, one.y)
                                                                   for one in products)]
    first = [layer] if layer is not None else []
    return HardSwish(source, layer, tuple(dict.fromkeys([*first, *before, *path, *used, *products])))


def _is_three(var: Var) -> bool:
    return bool(is_const(var) and np.size(var.val) == 1 and float(np.reshape(var.val, ())) == 3.0)


def _build_other_clip(x: Var) -> Var:
    made = Builder.linear(x=x, weight=make_weight(4, 8))
    gate = Builder.clip(x=Builder.add(x=made, y=np.float16(3)), alpha=np.float16(-6), beta=np.float16(6))
    result: Var = Builder.mul(x=made, y=gate, name="y")
    return result


def _build_hard_swish(rank: int, fused: bool, dtype: type = np.float16) -> Program:
    def build_body(x: Var) -> Var:
        made = Builder.linear(x=x, weight=make_weight(4, 8).astype(dtype)) if rank == 2 else \
            Builder.matmul(x=x, y=make_weight(8, 4).astype(dtype))
        if fused:
            kept = Builder.thresholded_relu(x=made, alpha=dtype(-3))
            gate = Builder.sigmoid_hard(x=kept, alpha=dtype(1 / 6), beta=dtype(0.5))
            result: Var = Builder.mul(x=kept, y=gate, name="y")
            return result
        gate = Builder.relu6(x=Builder.add(x=made, y=dtype(3)))
        result = Builder.mul(x=made, y=Builder.mul(x=gate, y=dtype(1 / 6)), name="y")
        return result

    return build_program(build_body, dtype=types.fp16 if dtype is np.float16 else types.fp32,
                         x=(2, 8) if rank == 2 else (1, 1, 2, 8))
