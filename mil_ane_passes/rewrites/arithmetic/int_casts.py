"""Count bools in fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import get_const_value, get_consumers, get_flat_inputs, get_type_info, is_const, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program, make_example
from ...rules.dtypes import Int32Ops
from ...utils.text_format import format_count

__all__ = ["COMPARISON_OPS", "DATA_INPUTS", "MAX_EXACT_INTEGER", "find_fp16_obstacle", "find_int32_chains"]

MAX_EXACT_INTEGER = 2048
"Magnitude up to which fp16 represents all integers."
COMPARISON_OPS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})
DATA_INPUTS = ("x", "y", "a", "b", "values")
"Inputs with the values that are computed with; the other inputs are parameters."
_DATA_MOVEMENT_OPS = frozenset({
    "concat", "expand_dims", "gather", "identity", "reduce_max", "reduce_min", "reshape", "reverse", "select",
    "slice_by_index", "slice_by_size", "split", "squeeze", "stack", "tile", "transpose",
})
IntegerRange = tuple[int, int]


class IntCasts(BlockRewrite):
    """Compute in fp16 what int32 is a detour for: truth values that are counted, added or cast on.

    why     int32 is unsupported on the ANE, not even a cast to it; truth values and fp16 it takes. A comparison that
            is cast to int32 and then to fp16, or a mask that is summed in int32, costs two transitions.
    when    A chain of ops on int32 in one block that begins at truth values and constants, moves, adds, multiplies,
            compares or sums them, and ends in floats or truth values, where no integer can be beyond 2048, up to which
            fp16 has all of them.
    exact   bitwise: fp16 holds each of these integers, and none of them is a negative zero.
    cost    none: half the bytes are moved.

    before
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %1: int32[2, 3] = cast(x=%0, dtype=int32)
        %y: fp16[2, 3] = cast(x=%1, dtype=fp16)
    after
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %y: fp16[2, 3] = cast(x=%0, dtype=fp16)
    """

    fixes = (Int32Ops,)
    stage = "precision"
    after = ("fp16_compute",)
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        cite_m4_study(
            "any arithmetic on int32 is unsupported, and so are casts between fp16 and int32; bool is accepted"
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for members in find_int32_chains(block):
            if len(members) < 2 or not any(op.op_type == "cast" and op.x.dtype == types.bool for op in members):
                continue
            wrong = find_fp16_obstacle(members)
            if wrong is not None:
                yield Miss(members[0], wrong)
                continue
            yield Hit(
                members[0],
                note=f"{format_count(len(members), 'op')} on integers that fp16 holds",
                members=members,
                covers=members,
            )

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        now, replaced = dict[Var, Var](), dict[Var, Var]()
        for op in hit.members:
            out = op.outputs[0]
            with mb.at(op):
                if op.op_type == "cast" and op.x.dtype == types.bool:
                    now[out] = mb.cast(x=now.get(op.x, op.x), dtype="fp16")
                elif op.op_type == "cast":
                    again = out.dtype == types.fp16 and out.consuming_blocks and now[op.x] in replaced.values()
                    now[out] = mb.identity(x=now[op.x]) if again else (
                        now[op.x] if out.dtype == types.fp16 else mb.cast(x=now[op.x], dtype=op.dtype.val))
                else:
                    now.update(
                        zip(op.outputs, mb.insert(infer_outputs(clone_op(op, _bind_fp16_inputs(mb, op, now)), op)))
                    )
            if op.op_type in COMPARISON_OPS or (op.op_type == "cast" and op.x.dtype != types.bool):
                replaced[out] = now[out]
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("truth by way of int32", lambda: _build_counted_bools(lambda i: i))
        yield Example("a count", lambda: _build_counted_bools(lambda i: Builder.reduce_sum(x=i, axes=[0])))
        yield Example("the others", lambda: _build_counted_bools(lambda i: Builder.sub(x=np.int32(1), y=i)))
        yield Example("at least two", lambda: _build_counted_bools(lambda i: Builder.cast(x=Builder.greater_equal(
            x=Builder.reduce_sum(x=i, axes=[0], keep_dims=True), y=np.int32(2)), dtype="int32")))
        yield Example("far", lambda: _build_counted_bools(lambda i: Builder.mul(x=i, y=np.int32(3000), name="far")),
                      reason="'far' may reach 3000, and fp16 counts up to 2048")
        yield Example("negative", lambda: _build_counted_bools(lambda i: Builder.mul(x=i, y=np.int32(-1))),
                      reason="a product with negative numbers may be -0.0")
        yield Example("given integers", _build_integer_input, reason="'i' may be any integer")
        yield make_example(
            "returned",
            lambda x: Builder.cast(
                x=Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32"), dtype="int16", name="y"
            ),
            reason="a cast in it",
            x=(2, 3),
        )
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _bind_fp16_inputs(mb: RewriteBuilder, op: Operation, now: dict[Var, Var]) -> dict[str, Any]:
    """Return the numeric inputs of `op`, in fp16."""
    def half(var: Var) -> Var:
        if not is_const(var) or var.dtype != types.int32:
            return now.get(var, var)
        made: Var = mb.once(("half", var), lambda: mb.const(val=np.asarray(var.val).astype(np.float16)[()],
                                                            name=f"{var.name}_fp16"))
        return made

    given = {name: op.inputs[name] for name in (*DATA_INPUTS, "cond") if name in op.inputs}
    return {name: tuple(map(half, var)) if isinstance(var, (list, tuple)) else half(var) for name, var in given.items()}


def _build_counted_bools(middle: Any) -> Program:
    def body(x: Var) -> Var:
        whole = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32")
        result: Var = Builder.cast(x=middle(whole), dtype="fp16", name="y")
        return result

    return build_program(body, x=(2, 3))


def _build_integer_input() -> Program:
    def body(i: Var) -> Var:
        seen = Builder.cast(x=Builder.greater(x=i, y=np.int32(0)), dtype="int32")
        result: Var = Builder.cast(x=Builder.mul(x=i, y=seen), dtype="fp16", name="y")
        return result

    return build_program(body, dtype=types.int32, i=(2, 3))


def _multiply_ranges(op: Operation, ranges: list[IntegerRange]) -> IntegerRange | str:
    (low, high), (other, most) = ranges
    return "a product with negative numbers may be -0.0" if min(low, other) < 0 else (low * other, high * most)


def _sum_range(op: Operation, ranges: list[IntegerRange]) -> IntegerRange | str:
    axes = get_const_value(op.inputs.get("axes"))
    sizes = [op.x.shape[axis] for axis in (range(op.x.rank) if axes is None else axes)]
    if any(map(is_symbolic, sizes)):
        return "it sums as many as the input is long"
    count = math.prod(map(int, sizes))
    return ranges[0][0] * count, ranges[0][1] * count


_RANGE_ARITHMETIC: dict[str, Callable[[Operation, list[IntegerRange]], IntegerRange | str]] = {
    "add": lambda op, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "sub": lambda op, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "maximum": lambda op, r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "minimum": lambda op, r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "abs": lambda op, r: (0, max(map(abs, r[0]))),
    "mul": _multiply_ranges, "reduce_sum": _sum_range,
}


def find_int32_chains(block: Block) -> Iterable[list[Operation]]:
    """Find the groups of ops connected by int32 values, each in program order, including single ops."""
    group: dict[Operation, list[Operation]] = {}
    for op in block.operations:
        if op.op_type == "const" or not any(map(is_computed_int32, [*op.outputs, *get_flat_inputs(op)])):
            continue
        group[op] = [op]
        for var in get_flat_inputs(op):
            if var.op in group and is_computed_int32(var):
                merge_groups(group, var.op, op)
    return list_groups(group)


def is_computed_int32(var: Var) -> bool:
    """Return whether `var` is int32 and not a constant."""
    return not is_const(var) and not types.is_list(var.sym_type) and get_type_info(var).dtype == types.int32


def find_fp16_obstacle(members: Iterable[Operation]) -> str | None:
    """Return why the chain cannot be computed in fp16, or None where every integer of it is exact in fp16."""
    ranges: dict[Var, IntegerRange] = {}
    for op in members:
        for var in op.outputs:
            if is_computed_int32(var) and (var.consuming_blocks or not get_consumers(var)):
                return f"its integers are the output '{var.name}'"
        found = _compute_range(op, ranges)
        if isinstance(found, str):
            return found
        if max(map(abs, found)) > MAX_EXACT_INTEGER:
            return f"'{op.outputs[0].name}' may reach {max(map(abs, found))}, and fp16 counts up to {MAX_EXACT_INTEGER}"
        ranges.update(dict.fromkeys(op.outputs, found))
    return None


def _compute_range(op: Operation, ranges: Mapping[Var, IntegerRange]) -> IntegerRange | str:
    kind = op.op_type
    if kind == "cast" and op.x.dtype == types.bool:
        return 0, 1
    if is_opaque(op) or (kind == "gather" and not is_const(op.indices)):
        return f"a {kind} in it"
    given = [var for name in DATA_INPUTS for var in _list_vars(op.inputs.get(name))]
    unknown = next((var for var in given if is_computed_int32(var) and var not in ranges), None)
    if unknown is not None:
        return f"'{unknown.name}' may be any integer"
    read = [ranges[var] if var in ranges else _read_const_range(var) for var in given]
    if kind in COMPARISON_OPS or (kind == "cast" and op.outputs[0].dtype in (types.fp16, types.fp32, types.bool)):
        return max(read, key=lambda each: max(map(abs, each)))
    if kind in _DATA_MOVEMENT_OPS:
        return min(low for low, _ in read), max(high for _, high in read)
    return _RANGE_ARITHMETIC[kind](op, read) if kind in _RANGE_ARITHMETIC else f"a {kind} in it"


def _list_vars(bound: Var | tuple[Var, ...] | list[Var] | None) -> list[Var]:
    return [] if bound is None else list(bound) if isinstance(bound, (list, tuple)) else [bound]


def _read_const_range(var: Var) -> IntegerRange:
    held = np.asarray(var.val) if is_const(var) else np.zeros(1)
    return (int(held.min()), int(held.max())) if held.size else (0, 0)
