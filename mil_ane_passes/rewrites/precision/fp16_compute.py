"""Convert the ops of an fp32 model to fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.clone import clone_program
from ...ir.query import get_consumers, get_flat_inputs, is_computed_in_fp16, is_const, is_opaque, iterate_nested_ops
from ...ir.value_ranges import MeasuredRanges, Range
from ...passes.contract import Community, Exactness, Example, Hit, Miss, ProgramRewrite, Vendor
from ...passes.examples import make_example, make_weight
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

_MAX_TRIAL_RUNS = 64
"Maximum number of runs of the entire model in the search for ops that must stay in fp32."
_INFINITY_SAFE_OPS = frozenset({
    "add", "sub", "maximum", "minimum", "select", "softmax", "cast", "concat", "expand_dims", "fill", "gather",
    "gather_along_axis", "gather_nd", "identity", "pad", "reshape", "scaled_dot_product_attention", "slice_by_index",
    "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
"Ops in which a mask's large negative number may become minus infinity: none of them computes 0 * inf."
_UNDERFLOW_SAFE_OPS = frozenset({"add", "sub", "maximum", "minimum"})
"Ops in which a constant that fp16 flushes to 0 has no effect next to the other operand."
_ACCUMULATOR_LIMIT = 32768
"Magnitude from which a partial sum is reported to overflow."
_FP16_LIMIT_TEXT = f"the fp16 maximum is {FP16_MAX:.0f}"
_RESULT = "its result"


class Fp16Compute(ProgramRewrite):
    """Convert fp32 ops to fp16, except for values that fp16 cannot represent.

    why     The ANE computes in fp16; fp32 ops run on the CPU or GPU. Weights take half the size.
    when    A program that computes in fp32. Inputs, outputs and states keep their types; integers are unchanged. An op
            stays in fp32 if a constant or a measured value exceeds or underflows fp16, or if the output error would
            exceed `max_error`; each one is listed with its values. Without runs only constants are checked. A function
            that computes partly in fp16 is skipped, unless mixed=true.
    exact   approximate: every value is rounded to 11 bits. The largest error of the runs is reported (of integers, such
            as the classes of an argmax, the share that changes), and the equivalence check holds the result to
            `max_error`.
    cost    a cast between fp16 and fp32 ops. The search runs the model on the feeds up to 64 times; ops that were not
            tried by then stay in fp32.

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
        Community("an fp32 input gets a cast, and the other ops run in fp16 on the ANE", chip="M4", os="macOS 27.0.1",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"),
    )

    max_error: float = 1e-2
    "Maximum accepted output error, relative to an output's largest value in the runs."
    keep: str = ""
    "Op types and value names that stay in fp32, separated by +."
    wide_sums: bool = False
    "Keep ops in fp32 whose partial sums may exceed 32768, where accumulators of the ANE are reported to overflow."
    mixed: bool = False
    "Convert the ops left in fp32 in a function that computes partly in fp16."

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        if not 0 <= self.max_error < 1:
            raise InputError(f"fp16_compute: max_error is {self.max_error:g}; expected a share of the outputs, 0 or "
                             "more and below 1")
        constants = Fp16Constants()
        ops = _list_ops(program)
        reasons = self._find_fp32_reasons(program, ops, constants)
        trial = _Fp16Trial(program, constants)
        candidates = [number for number, reason in reasons.items() if not reason]
        for number in trial.find_unsupported_ops(candidates) if candidates else ():
            reasons[number] = f"kept fp32: coremltools does not let this {ops[number].op_type} read fp16"
        chosen = [number for number in candidates if not reasons[number]]
        error = None
        if isinstance(self.measured, MeasuredRanges) and chosen:
            search = self._make_search(chosen, trial, self.measured)
            chosen, error = search.accepted, search.error
            for number, rejected_error in search.rejected.items():
                reasons[number] = _describe_error(rejected_error, self.max_error)
            reasons |= dict.fromkeys(search.untried_ops, f"not tried: the search is limited to {_MAX_TRIAL_RUNS} runs")
        kept = [(ops[number], reason) for number, reason in reasons.items() if reason]
        for number in chosen:
            note = "fp32 -> fp16" if number != chosen[0] else _format_summary(len(chosen), len(kept), error)
            yield Hit(ops[number], note=note, constants=constants, moves=self.max_error)
        for op, reason in kept:
            yield Miss(op, reason)

    def _find_fp32_reasons(
        self, program: Program, ops: Sequence[Operation], constants: Fp16Constants
    ) -> dict[int, str]:
        """Return the ops that might go to fp16, by number, each with the reason why it stays in fp32, if any."""
        kept_names = self._parse_kept_names(ops)
        numbers = {op: number for number, op in enumerate(ops)}
        reasons: dict[int, str] = {}
        for function in program.functions.values():
            own_ops = list(iterate_nested_ops(function))
            is_mixed = not self.mixed and any(map(is_computed_in_fp16, own_ops))
            candidates = [
                op for op in own_ops if is_fp32_computation(op) and not (is_mixed and _is_fp32_by_constants(op))]
            if not candidates:  # entering a function walks over all of it
                continue
            with function:  # the inputs that an op accepts depend on the opset of the current function
                for op in candidates:
                    if can_read_fp16(op):
                        reasons[numbers[op]] = self._find_fp32_reason(op, kept_names, constants, is_mixed)
                    elif not _is_fp32_by_constants(op):  # which computes in fp16: its parameters are fp32 by definition
                        reasons[numbers[op]] = f"kept fp32: no fp16 for {op.op_type} in {function.opset_version.name}"
        return reasons

    def _parse_kept_names(self, ops: Iterable[Operation]) -> frozenset[str]:
        """Return the op types and values of `keep`. Raises InputError for a name that is neither."""
        names = frozenset(filter(None, (name.strip() for name in self.keep.split("+"))))
        known = {name for op in ops for name in (op.op_type, *(var.name for var in op.outputs))} if names else set()
        for name in sorted(names - known):
            raise InputError(
                f"fp16_compute: keep: no op of type '{name}' and no value of that name{suggest_nearest(name, known)}"
            )
        return names

    def _find_fp32_reason(
        self, op: Operation, kept_names: frozenset[str], constants: Fp16Constants, is_mixed: bool
    ) -> str:
        """Return why `op` stays in fp32, "" when it need not."""
        if is_mixed:
            return "fp32 beside ops in fp16, as it was converted; mixed=true converts it, too"
        if op.op_type in kept_names or kept_names.intersection(var.name for var in op.outputs):
            return "kept fp32: requested by name"
        loss = _describe_constant_loss(op, constants)
        if loss is None and self.measured:
            loss = _describe_value_loss(op, self.measured, self.wide_sums)
        return f"kept fp32: {loss}" if loss else ""

    def _make_search(self, chosen: Sequence[int], trial: _Fp16Trial, measured: MeasuredRanges) -> PrecisionSearch:
        return PrecisionSearch(chosen, lambda some: measured.error(trial.make_program(some)), self.max_error,
                               _MAX_TRIAL_RUNS)

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        convert_to_fp16(program, _add_compressed_weights(hit.op for hit in hits), hits[0].constants)

    def examples(self) -> Iterable[Example]:
        yield _make_fp32_example("linear and relu", _build_linear, within=8.0)
        yield _make_fp32_example(
            "weights shared with what stays", _build_shared_weight, within=8.0, options={"keep": "matmul"})
        yield _make_fp32_example("integers beside", _build_argmax_use, within=8.0)
        yield _make_fp32_example("constants only", _build_linear, within=8.0, measured=False)
        yield _make_fp32_example("requested by name", _build_linear, options={"keep": "linear + relu"},
                                 reason="kept fp32: requested by name")
        yield _make_fp32_example(
            "a value beyond fp16", lambda x: Builder.square(x=Builder.mul(x=x, y=np.float32(200)), name="y"),
            options={"keep": "mul"}, reason="kept fp32: its result reaches 6.8e+04, the fp16 maximum is 65504")
        yield _make_fp32_example(
            "a constant beyond fp16", lambda x: Builder.mul(x=x, y=np.float32(1e5), name="y"),
            reason="kept fp32: its y has 1e+05, the fp16 maximum is 65504")
        yield _make_fp32_example(
            "a constant below fp16", lambda x: Builder.mul(x=x, y=np.float32(1e-9), name="y"),
            reason="kept fp32: the largest value of its y is 1e-09, below the fp16 minimum (6.0e-08)")
        yield _make_fp32_example(
            "partly in fp16", _build_mixed_precision,
            reason="fp32 beside ops in fp16, as it was converted; mixed=true converts it, too")
        yield _make_fp32_example("all in fp16", lambda x: _build_linear(x, np.float16), dtype=types.fp16, reason="")


def _list_ops(program: Program) -> list[Operation]:
    """List all ops, in an order that a clone of the program shares."""
    return [op for function in program.functions.values() for op in iterate_nested_ops(function)]


def _is_fp32_by_constants(op: Operation) -> bool:
    """Return whether the only fp32 of `op` is constants beside fp16, such as an epsilon or a slope.

    coremltools' conversion to fp16 produces such ops, so that they are not left over in fp32.
    """
    return not any(map(is_fp32, op.outputs)) and all(is_const(var) for var in get_flat_inputs(op) if is_fp32(var))


def _describe_constant_loss(op: Operation, constants: Fp16Constants) -> str | None:
    """Describe which constant of `op` fp16 cannot represent; None when it can represent all."""
    for name, var in iterate_fp16_operands(op):
        if not is_const(var):
            continue
        summary = constants.summarize(var)
        if summary.largest > FP16_MAX:
            return f"its {name} has {summary.largest:.3g}, {_FP16_LIMIT_TEXT}"
        if summary.beyond and op.op_type not in _INFINITY_SAFE_OPS:
            return f"its {name} would be infinite in fp16, and 0 times it NaN"
        if summary.is_below_fp16 and name != "epsilon" and op.op_type not in _UNDERFLOW_SAFE_OPS:
            return (f"the largest value of its {name} is {summary.largest:.3g}, below the fp16 minimum "
                    f"({FP16_MIN_SUBNORMAL:.1e})")
    return None


def _describe_value_loss(op: Operation, measured: Mapping[Var, Range], wide_sums: bool) -> str | None:
    """Describe which value that `op` reads or computes fp16 cannot represent; None when it can represent all.

    With `wide_sums`, partial sums beyond 32768 count as lost, too.
    """
    values = [*iterate_fp16_operands(op), *((_RESULT, var) for var in op.outputs if is_fp32(var))]
    for name, var in values:
        if var not in measured or is_const(var):
            continue
        largest, partial = measured[var].largest, measured[var].partial
        if FP16_MAX < largest < INFINITY_THRESHOLD:
            return f"{name} reaches {largest:.3g}, {_FP16_LIMIT_TEXT}"
        if largest >= INFINITY_THRESHOLD and op.op_type not in _INFINITY_SAFE_OPS:
            return f"{name} would be infinite in fp16 ({largest:.3g}), and 0 times it NaN"
        if name == _RESULT and 0 < largest < FP16_MIN_SUBNORMAL:
            return f"the largest value of {name} is {largest:.3g}, below the fp16 minimum ({FP16_MIN_SUBNORMAL:.1e})"
        if wide_sums and partial is not None and partial > _ACCUMULATOR_LIMIT:
            return f"its partial sums may reach {partial:.3g}, beyond 32768"
    return None


class _Fp16Trial:
    """Trial conversions of the program with some of its ops in fp16, on a clone each time."""

    def __init__(self, program: Program, constants: Fp16Constants) -> None:
        self._program, self._constants = program, constants

    def make_program(self, numbers: Iterable[int]) -> Program:
        return self._convert_ops(numbers)[0]

    def find_unsupported_ops(self, numbers: Sequence[int]) -> list[int]:
        """Return the ops among `numbers` that coremltools does not let read fp16."""
        return self._convert_ops(numbers)[1]

    def _convert_ops(self, numbers: Iterable[int]) -> tuple[Program, list[int]]:
        clone = clone_program(self._program)
        ops = _list_ops(clone)
        chosen = _add_compressed_weights(ops[number] for number in numbers)
        unsupported = convert_to_fp16(clone, chosen, self._constants)
        return clone, [number for number in numbers if ops[number] in unsupported]


def _add_compressed_weights(chosen: Iterable[Operation]) -> set[Operation]:
    """Return the ops `chosen` together with the compressed weights that only they read."""
    converted = set(chosen)
    pending = [weight for op in converted for weight in _collect_compressed_weights(op)]
    while pending:
        weight = pending.pop()
        var = weight.outputs[0]
        if weight not in converted and not var.consuming_blocks and converted.issuperset(get_consumers(var)):
            converted.add(weight)
            pending += _collect_compressed_weights(weight)
    return converted


def _collect_compressed_weights(op: Operation) -> list[Operation]:
    sources = [var.op for var in op.get_flattened_inputs() if is_fp32(var) and var.op is not None]
    return [each for each in sources if each.op_type.startswith("constexpr_") and not is_opaque(each)]


class PrecisionSearch:
    """A search for the largest part of `ops` that can be in fp16 together with an output error of at most `max_error`.

    `measure_error` measures the output error for some of the ops. A set that exceeds the error is tried in halves, down
    to single ops. After `max_runs` runs the ops that have not been tried stay out.
    """

    def __init__(
        self, ops: Sequence[int], measure_error: Callable[[Sequence[int]], float], max_error: float, max_runs: int
    ) -> None:
        self._measure_error, self._max_error, self._runs_left = measure_error, max_error, max_runs
        self.accepted: list[int] = []
        self.error = 0.0
        "Output error with the ops `accepted`."
        self.rejected: dict[int, float] = {}
        "Output error with one op more, by op."
        self.untried_ops: list[int] = []
        self._try_ops(list(ops))

    def _try_ops(self, ops: list[int]) -> None:
        if not ops:
            return
        if not self._runs_left:
            self.untried_ops += ops
            return
        self._runs_left -= 1
        together = sorted([*self.accepted, *ops])
        error = self._measure_error(together)
        if error <= self._max_error:
            self.accepted, self.error = together, error
        elif len(ops) == 1:
            self.rejected[ops[0]] = error
        else:
            middle = len(ops) // 2
            self._try_ops(ops[:middle])
            self._try_ops(ops[middle:])


def _describe_error(error: float, max_error: float) -> str:
    if math.isinf(error):
        return "with it in fp16 an output loses numbers (infinite, NaN, or all zeros), or a label changes"
    return (f"with it in fp16 the outputs are off by {error:.1e} of their largest value (of integers, that share "
            f"changes), more than {max_error:g}")


def _format_summary(chosen: int, kept: int, error: float | None) -> str:
    summary = f"{chosen} of {chosen + kept} ops in fp16; "
    if error is None:
        return f"{summary}without runs only constants were checked"
    return f"{summary}largest error in the runs {error:.1e} of an output's largest value"


def _make_fp32_example(name: str, body: Callable[[Var], Any], dtype: Any = types.fp32, **settings: Any) -> Example:
    return make_example(name, body, dtype=dtype, x=(1, 8), **settings)


def _build_linear(x: Var, dtype: Any = np.float32) -> Any:
    y = Builder.linear(x=x, weight=make_weight(4, 8, dtype=dtype), bias=make_weight(4, dtype=dtype))
    return Builder.relu(x=y, name="y")


def _build_shared_weight(x: Var) -> Any:
    weight = Builder.const(val=make_weight(8, 8, dtype=np.float32))
    return Builder.matmul(x=Builder.tanh(x=Builder.linear(x=x, weight=weight)), y=weight, name="y")


def _build_argmax_use(x: Var) -> Any:
    index = Builder.add(x=Builder.reduce_argmax(x=Builder.relu(x=x), axis=-1, keep_dims=True), y=np.int32(1))
    return Builder.add(x=Builder.tanh(x=x), y=Builder.cast(x=index, dtype="fp32"), name="y")


def _build_mixed_precision(x: Var) -> Any:
    half = Builder.relu(x=Builder.cast(x=x, dtype="fp16"))
    return Builder.tanh(x=Builder.cast(x=half, dtype="fp32"), name="y")
