"""Convert a model that was converted to compute in fp32 to compute in fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.clone import clone_program
from ...ir.query import get_consumers, get_flat_inputs, is_computed_in_fp16, is_const, is_opaque, iterate_nested_ops
from ...ir.value_ranges import MeasuredRanges, Range
from ...passes.contract import Community, Exactness, Example, Hit, Miss, ProgramRewrite, Vendor
from ...passes.examples import build_program, make_weight
from ...rules.dtypes import Fp32ComputeLeft
from ...utils.errors import InputError, suggest_nearest
from ._fp16_conversion import (
    FP16_MAX,
    FP16_MIN_SUBNORMAL,
    INFINITY_THRESHOLD,
    Fp16Constants,
    can_read_fp16,
    convert_to_fp16,
    is_fp32,
    is_fp32_computation,
    iterate_fp16_operands,
)

__all__ = [
    "PrecisionDecision",
    "PrecisionOptions",
    "PrecisionSearch",
    "add_compressed_weights",
    "choose_fp16_ops",
    "describe_constant_loss",
    "describe_value_loss",
]

_MAX_TRIAL_RUNS = 64
"Runs of the entire model after which the search for ops that must stay in fp32 ends."
_INFINITY_SAFE_OPS = frozenset({
    "add", "sub", "maximum", "minimum", "select", "softmax", "cast", "concat", "expand_dims", "fill", "gather",
    "gather_along_axis", "gather_nd", "identity", "pad", "reshape", "scaled_dot_product_attention", "slice_by_index",
    "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
"Ops in which a mask's large negative number may become minus infinity: none of them computes 0 * inf."
_UNDERFLOW_SAFE_OPS = frozenset({"add", "sub", "maximum", "minimum"})
_FP16_LIMIT_TEXT = f"fp16 ends at {FP16_MAX:.0f}"


class Fp16Compute(ProgramRewrite):
    """Compute in fp16 what a model computes in fp32, except where fp16 cannot hold the values.

    why     The ANE computes in fp16: what is in fp32 runs on the CPU or the GPU. Weights take half the room.
    when    A program that computes in fp32. Inputs, outputs and states keep their types; integers are not touched.
            An op stays in fp32 when a constant or a value seen in the runs is beyond fp16, or below it, or when the
            outputs lose more than `max_error` with it; each is listed with its numbers. Without runs only constants
            are judged. A function that computes in fp16 in part is left as it was made, unless mixed=true.
    exact   approximate: every value is rounded to 11 bits. The largest error of the runs is reported (of integers, such
            as the classes of an argmax, the share that changes), and the equivalence check holds the result to
            `max_error`.
    cost    a cast wherever fp16 and fp32 meet. To find what has to stay the model is run on the feeds up to 64
            times; what was not tried by then stays in fp32.

    before
        %0: fp32[1, 4] = linear(x=%x, weight=<fp32[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %y: fp32[1, 4] = relu(x=%0)
    after
        %0: fp16[1, 8] = cast(x=%x, dtype=fp16)
        %1: fp16[1, 4] = linear(x=%0, weight=<fp16[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %2: fp16[1, 4] = relu(x=%1)
        %y: fp32[1, 4] = cast(x=%2, dtype=fp32)
    """

    fixes = (Fp32ComputeLeft,)
    stage = "precision"
    exactness = Exactness.APPROXIMATE
    bound = "max_error (1e-2) of an output's largest value, in the runs measured"
    preset = "named"
    measures = True
    accepts_sampled = True
    moves = 1e-2
    evidence = (
        Vendor("the ANE does not support fp32; such ops run elsewhere",
               source="https://github.com/apple/ml-stable-diffusion"),
        Vendor("a model typed in fp32 does not use the Neural Engine, which computes in fp16",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        Community("an fp32 input gets a cast, and the rest goes on in fp16 on the ANE", chip="M4", os="macOS 27.0.1",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"),
    )

    max_error: float = 1e-2
    "The largest accepted output error, as a share of an output's largest value in the runs."
    keep: str = ""
    "Op types and names of values, with + between them, that stay in fp32."
    wide_sums: bool = False
    "Keep ops in fp32 whose partial sums may exceed 32768, where accumulators of the ANE are reported to overflow."
    mixed: bool = False
    "Convert the ops left in fp32 in a function that computes partly in fp16."

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        kept = frozenset(filter(None, (name.strip() for name in self.keep.split("+"))))
        decision = choose_fp16_ops(
            program, PrecisionOptions(self.max_error, kept, self.wide_sums, self.mixed), self.measured
        )
        for op in decision.taken:
            note = "fp32 -> fp16" if op is not decision.taken[0] else _format_summary(decision)
            yield Hit(op, note=note, halves=decision.halves, moves=self.max_error)
        for op, reason in decision.kept:
            yield Miss(op, reason)

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        convert_to_fp16(program, add_compressed_weights(hit.op for hit in hits), hits[0].halves)

    def examples(self) -> Iterable[Example]:
        yield Example("linear and relu", _build_linear, within=8.0)
        yield Example("weights shared with what stays", _build_shared_weight, within=8.0, options={"keep": "matmul"})
        yield Example("integers beside", _build_argmax_use, within=8.0)
        yield Example("constants only", _build_linear, within=8.0, measured=False)
        yield Example("asked for by name", _build_linear, options={"keep": "linear + relu"},
                      reason="kept fp32: asked for by name")
        yield Example(
            "a value beyond fp16",
            _build_large_square,
            reason="kept fp32: its result reaches 6.8e+04, fp16 ends at 65504",
            options={"keep": "mul"},
        )
        yield Example("a constant beyond fp16", lambda: _build_scaled(1e5),
                      reason="kept fp32: its y holds 1e+05, fp16 ends at 65504")
        yield Example("a constant below fp16", lambda: _build_scaled(1e-9),
                      reason="kept fp32: its y ends at 1e-09, below what fp16 holds (6.0e-08)")
        yield Example(
            "partly in fp16",
            _build_mixed_precision,
            reason="fp32 beside ops in fp16, kept so by whoever converted the model; mixed=true converts it too",
        )
        yield Example("all in fp16", lambda: _build_linear(types.fp16), reason="")


def _format_summary(decision: PrecisionDecision) -> str:
    count, every = len(decision.taken), len(decision.taken) + len(decision.kept)
    if decision.error is None:
        return f"{count} of {every} ops in fp16; nothing was run, so only constants were judged"
    return (f"{count} of {every} ops in fp16; largest error in the runs {decision.error:.1e} of an output's largest "
            "value")


def _build_linear(dtype: Any = types.fp32) -> Program:
    held = types.nptype_from_builtin(dtype)

    def body(x: Any) -> Any:
        y = Builder.linear(x=x, weight=make_weight(4, 8, dtype=held), bias=make_weight(4, dtype=held))
        return Builder.relu(x=y, name="y")

    return build_program(body, dtype=dtype, x=(1, 8))


def _build_shared_weight() -> Program:
    def body(x: Any) -> Any:
        kernel = Builder.const(val=make_weight(8, 8, dtype=np.float32))
        return Builder.matmul(x=Builder.tanh(x=Builder.linear(x=x, weight=kernel)), y=kernel, name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


def _build_argmax_use() -> Program:
    def body(x: Any) -> Any:
        best = Builder.add(x=Builder.reduce_argmax(x=Builder.relu(x=x), axis=-1, keep_dims=True), y=np.int32(1))
        return Builder.add(x=Builder.tanh(x=x), y=Builder.cast(x=best, dtype="fp32"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


def _build_large_square() -> Program:
    return build_program(lambda x: Builder.square(x=Builder.mul(x=x, y=np.float32(200)), name="y"), dtype=types.fp32,
                         x=(1, 8))


def _build_scaled(factor: float) -> Program:
    return build_program(lambda x: Builder.mul(x=x, y=np.float32(factor), name="y"), dtype=types.fp32, x=(1, 8))


def _build_mixed_precision() -> Program:
    def body(x: Any) -> Any:
        half = Builder.relu(x=Builder.cast(x=x, dtype="fp16"))
        return Builder.tanh(x=Builder.cast(x=half, dtype="fp32"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


@dataclass(frozen=True)
class PrecisionOptions:
    """The options that the user requested."""

    max_error: float
    keep: frozenset[str]
    wide_sums: bool
    mixed: bool


@dataclass
class PrecisionDecision:
    """The ops that go to fp16, the reasons of those that stay in fp32, and the output error, if known."""

    taken: list[Operation] = field(default_factory=list)
    kept: list[tuple[Operation, str]] = field(default_factory=list)
    error: float | None = None
    halves: Fp16Constants = field(default_factory=Fp16Constants)


def choose_fp16_ops(
    program: Program, wish: PrecisionOptions, measured: Mapping[Var, Range] | None
) -> PrecisionDecision:
    """Judge every op by itself, then all together by the output error in the runs."""
    if not 0 <= wish.max_error < 1:
        raise InputError(f"fp16_compute: max_error is {wish.max_error:g}; expected a share of the outputs, 0 or more "
                         "and below 1")
    decision = PrecisionDecision()
    ops = _list_ops(program)
    _check_names(wish.keep, ops)
    reasons = _judge_ops(program, ops, wish, measured, decision.halves)
    left = [number for number, reason in reasons.items() if not reason]
    attempt = _Fp16Trial(program, decision.halves)
    for number in attempt.refused(left) if left else ():
        reasons[number] = f"kept fp32: coremltools does not let this {ops[number].op_type} read fp16"
    left = [number for number in left if not reasons[number]]
    if isinstance(measured, MeasuredRanges) and left:
        seen = measured
        search = PrecisionSearch(left, lambda some: seen.error(attempt.program(some)), wish.max_error, _MAX_TRIAL_RUNS)
        decision.error = search.error
        for number, error in search.refused.items():
            reasons[number] = _describe_error(error, wish.max_error)
        reasons |= dict.fromkeys(search.untried_ops, f"not tried: the search ends after {_MAX_TRIAL_RUNS} runs")
        left = search.taken
    decision.taken = [ops[number] for number in left]
    decision.kept = [(ops[number], reason) for number, reason in reasons.items() if reason]
    return decision


def _describe_error(error: float, most: float) -> str:
    if math.isinf(error):
        return "with it in fp16 an output loses numbers (infinite, NaN, or all zeros), or a label changes"
    return (f"with it in fp16 the outputs are off by {error:.1e} of their largest value (of integers, that share "
            f"changes), more than {most:g}")


def add_compressed_weights(chosen: Iterable[Operation]) -> set[Operation]:
    """Return the ops `chosen` together with the compressed weights that only they read."""
    found = set(chosen)
    pending = [op for each in found for op in _collect_compressed_weights(each)]
    while pending:
        op = pending.pop()
        made = op.outputs[0]
        if op not in found and not made.consuming_blocks and all(reader in found for reader in get_consumers(made)):
            found.add(op)
            pending += _collect_compressed_weights(op)
    return found


def _collect_compressed_weights(op: Operation) -> list[Operation]:
    made = [var.op for var in op.get_flattened_inputs() if is_fp32(var) and var.op is not None]
    return [each for each in made if each.op_type.startswith("constexpr_") and not is_opaque(each)]


def _list_ops(program: Program) -> list[Operation]:
    """List all ops, in an order that a clone of the program shares."""
    return [op for function in program.functions.values() for op in iterate_nested_ops(function)]


def _check_names(names: Collection[str], ops: Iterable[Operation]) -> None:
    """Raise InputError for a name that is neither an op type nor the name of a value."""
    known = {name for op in ops for name in (op.op_type, *(var.name for var in op.outputs))} if names else set()
    for name in sorted(set(names) - known):
        raise InputError(
            f"fp16_compute: keep: no op of type '{name}' and no value of that name{suggest_nearest(name, known)}"
        )


def _judge_ops(
    program: Program,
    ops: Sequence[Operation],
    wish: PrecisionOptions,
    measured: Mapping[Var, Range] | None,
    halves: Fp16Constants,
) -> dict[int, str]:
    """Return the ops that might go to fp16, by number, each with the reason why it stays in fp32, if any."""
    numbers = {op: number for number, op in enumerate(ops)}
    found: dict[int, str] = {}
    for function in program.functions.values():
        own = list(iterate_nested_ops(function))
        mixed = not wish.mixed and any(map(is_computed_in_fp16, own))
        candidates = [op for op in own if is_fp32_computation(op) and not (mixed and _is_fp32_by_constants(op))]
        if not candidates:  # entering a function walks over all of it
            continue
        with function:  # the inputs that an op accepts depend on the opset of the current function
            for op in candidates:
                found[numbers[op]] = _find_fp32_reason(op, wish, measured, halves, mixed) or (
                    "" if can_read_fp16(op) else
                    f"kept fp32: no fp16 for {op.op_type} in {function.opset_version.name}")
    return found


def _is_fp32_by_constants(op: Operation) -> bool:
    """Return whether the only fp32 of `op` is constants beside fp16, such as an epsilon or a slope.

    coremltools' conversion to fp16 produces such ops, so that they are not left over in fp32.
    """
    return not any(map(is_fp32, op.outputs)) and all(is_const(var) for var in get_flat_inputs(op) if is_fp32(var))


def _find_fp32_reason(
    op: Operation, wish: PrecisionOptions, measured: Mapping[Var, Range] | None, halves: Fp16Constants, mixed: bool
) -> str:
    """Return why `op` stays in fp32, "" when it need not."""
    if mixed:
        return "fp32 beside ops in fp16, kept so by whoever converted the model; mixed=true converts it too"
    if op.op_type in wish.keep or wish.keep.intersection(var.name for var in op.outputs):
        return "kept fp32: asked for by name"
    lost = describe_constant_loss(op, halves) or (
        describe_value_loss(op, measured, wish.wide_sums) if measured else None
    )
    return f"kept fp32: {lost}" if lost else ""


class _Fp16Trial:
    """Trial runs of the program with some of its ops in fp16, on a clone each time."""

    def __init__(self, program: Program, halves: Fp16Constants) -> None:
        self._program, self._halves = program, halves

    def program(self, some: Iterable[int]) -> Program:
        return self._made(some)[0]

    def refused(self, some: Iterable[int]) -> list[int]:
        """Return the ops among `some` that coremltools does not let read fp16."""
        return self._made(some)[1]

    def _made(self, some: Iterable[int]) -> tuple[Program, list[int]]:
        twin = clone_program(self._program)
        ops = _list_ops(twin)
        refused = convert_to_fp16(twin, add_compressed_weights(ops[number] for number in some), self._halves)
        return twin, [number for number in some if ops[number] in refused]


def describe_constant_loss(op: Operation, halves: Fp16Constants) -> str | None:
    """Describe which constant of `op` fp16 cannot represent; None when it can represent all."""
    for name, var in iterate_fp16_operands(op):
        if not is_const(var):
            continue
        extent = halves.extent(var)
        if extent.largest > FP16_MAX:
            return f"its {name} holds {extent.largest:.3g}, {_FP16_LIMIT_TEXT}"
        if extent.beyond and op.op_type not in _INFINITY_SAFE_OPS:
            return f"its {name} would be infinite in fp16, and 0 times it NaN"
        if extent.is_below_fp16 and name != "epsilon" and op.op_type not in _UNDERFLOW_SAFE_OPS:
            return f"its {name} ends at {extent.largest:.3g}, below what fp16 holds ({FP16_MIN_SUBNORMAL:.1e})"
    return None


def describe_value_loss(op: Operation, seen: Mapping[Var, Range], sums: bool) -> str | None:
    """Describe which value that `op` reads or computes fp16 cannot represent; None when it can represent all.

    With `sums`, partial sums beyond 32768 count as lost, too.
    """
    for name, found in _iterate_value_ranges(op, seen):
        if FP16_MAX < found.largest < INFINITY_THRESHOLD:
            return f"{name} reaches {found.largest:.3g}, {_FP16_LIMIT_TEXT}"
        if found.largest >= INFINITY_THRESHOLD and op.op_type not in _INFINITY_SAFE_OPS:
            return f"{name} would be infinite in fp16 ({found.largest:.3g}), and 0 times it NaN"
        if name == "its result" and 0 < found.largest < FP16_MIN_SUBNORMAL:
            return f"{name} ends at {found.largest:.3g}, below what fp16 holds ({FP16_MIN_SUBNORMAL:.1e})"
        if sums and found.partial is not None and found.partial > 32768:
            return f"its partial sums may reach {found.partial:.3g}, beyond 32768"
    return None


def _iterate_value_ranges(op: Operation, seen: Mapping[Var, Range]) -> Iterator[tuple[str, Range]]:
    values = [*iterate_fp16_operands(op), *(("its result", var) for var in op.outputs if is_fp32(var))]
    yield from ((name, seen[var]) for name, var in values if var in seen and not is_const(var))


class PrecisionSearch:
    """A search for the largest part of `ops` that can be in fp16 together with an output error of at most `most`.

    `error` measures the output error for some of the ops. A set that exceeds it is tried in halves, down to single ops.
    After `trials` runs the ops that have not been tried stay out.
    """

    def __init__(self, ops: Sequence[int], error: Callable[[Sequence[int]], float], most: float, trials: int) -> None:
        self._error, self._most, self._left = error, most, trials
        self.taken: list[int] = []
        self.error = 0.0
        "Output error with the ops `taken`."
        self.refused: dict[int, float] = {}
        "Output error with one op more, by op."
        self.untried_ops: list[int] = []
        self._try_ops(list(ops))

    def _try_ops(self, ops: list[int]) -> None:
        if not ops:
            return
        if not self._left:
            self.untried_ops += ops
            return
        self._left -= 1
        wanted = sorted([*self.taken, *ops])
        error = self._error(wanted)
        if error <= self._most:
            self.taken, self.error = wanted, error
        elif len(ops) == 1:
            self.refused[ops[0]] = error
        else:
            half = len(ops) // 2
            self._try_ops(ops[:half])
            self._try_ops(ops[half:])
