"""Compute counts of bools in fp16 instead of int32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import (
    DATA_MOVEMENT_OPS,
    get_const_value,
    get_consumers,
    get_flat_inputs,
    get_type_info,
    is_const,
    is_opaque,
)
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...rules.dtypes import Int32Ops
from ...utils.text_format import add_article, format_count

_MAX_EXACT_INTEGER = 2048
"Magnitude up to which fp16 represents all integers."
_COMPARISON_OPS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})
_DATA_INPUTS = ("x", "y", "a", "b", "values")
"Inputs with operands; the other inputs are parameters."
_SELECTING_OPS = DATA_MOVEMENT_OPS | {"reduce_max", "reduce_min"}
"Ops whose results are elements of their inputs."
_END_DTYPES = (types.fp16, types.fp32, types.bool)
"Dtypes of the casts that end a chain."
_IntegerRange = tuple[int, int]
"""The smallest and the largest integer that a value may have."""


class IntCasts(BlockRewrite):
    """Compute in fp16 instead of int32 where bools are counted, added or cast.

    why     int32 is unsupported on the ANE, even a cast to it; bool and fp16 are supported. A comparison that is cast
            to int32 and then to fp16, or a mask that is summed in int32, costs two transitions.
    when    A chain of int32 ops in one block that starts at bools and constants, moves, adds, multiplies, compares or
            sums them, and ends in floats or bools, if all integers are at most 2048, the largest range that fp16
            represents exactly.
    exact   bitwise: fp16 represents each of these integers, and none of them is a negative zero.
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
        for members in _find_int32_chains(block):
            if len(members) < 2 or not any(map(_is_cast_from_bool, members)):
                continue
            obstacle = _find_fp16_obstacle(members)
            if obstacle is not None:
                yield Miss(members[0], obstacle)
                continue
            yield Hit(
                members[0],
                note=f"{format_count(len(members), 'op')} on integers that fp16 represents exactly",
                members=members,
                covers=members,
            )

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        halves, replaced = dict[Var, Var](), dict[Var, Var]()
        for op in hit.members:
            output = op.outputs[0]
            with mb.at(op):
                if _is_cast_from_bool(op):
                    halves[output] = mb.cast(x=halves.get(op.x, op.x), dtype="fp16")
                elif op.op_type != "cast":
                    clone = clone_op(op, _bind_fp16_inputs(mb, op, halves))
                    halves.update(zip(op.outputs, mb.insert(infer_outputs(clone, op))))
                elif output.dtype != types.fp16:
                    halves[output] = mb.cast(x=halves[op.x], dtype=op.dtype.val)
                elif output.consuming_blocks and halves[op.x] in replaced.values():
                    halves[output] = mb.identity(x=halves[op.x])  # one value cannot be two outputs
                else:
                    halves[output] = halves[op.x]
            if op.op_type in _COMPARISON_OPS or (op.op_type == "cast" and not _is_cast_from_bool(op)):
                replaced[output] = halves[output]
        return replaced

    def examples(self) -> Iterable[Example]:
        yield _make_count_example("bool through int32", lambda i: i)
        yield _make_count_example("a count", lambda i: Builder.reduce_sum(x=i, axes=[0]))
        yield _make_count_example("the others", lambda i: Builder.sub(x=np.int32(1), y=i))
        yield _make_count_example("at least two", lambda i: Builder.cast(
            x=Builder.greater_equal(x=Builder.reduce_sum(x=i, axes=[0], keep_dims=True), y=np.int32(2)), dtype="int32"))
        yield _make_count_example("far", lambda i: Builder.mul(x=i, y=np.int32(3000), name="far"),
                                  reason="'far' may reach 3000, and fp16 is exact up to 2048")
        yield _make_count_example("negative", lambda i: Builder.mul(x=i, y=np.int32(-1)),
                                  reason="a product with negative numbers may be -0.0")
        yield make_example("given integers", _build_masked_integers, reason="'i' may be any integer", dtype=types.int32,
                           i=(2, 3))
        yield make_example(
            "returned",
            lambda x: Builder.cast(
                x=Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32"), dtype="int16", name="y"
            ),
            reason="a cast in it",
            x=(2, 3),
        )
        yield make_example("read by a loop", _build_counted_loop, reason="'steps' is read by a nested block", x=(2, 3))
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _is_cast_from_bool(op: Operation) -> bool:
    return op.op_type == "cast" and bool(op.x.dtype == types.bool)


def _find_int32_chains(block: Block) -> Iterable[list[Operation]]:
    """Find the groups of ops connected by int32 values, each in program order, including single ops."""
    groups: dict[Operation, list[Operation]] = {}
    for op in block.operations:
        if op.op_type == "const" or not any(map(_is_computed_int32, [*op.outputs, *get_flat_inputs(op)])):
            continue
        groups[op] = [op]
        for var in get_flat_inputs(op):
            if var.op in groups and _is_computed_int32(var):
                merge_groups(groups, var.op, op)
    return list_groups(groups)


def _is_computed_int32(var: Var) -> bool:
    """Return whether `var` is int32 and not a constant."""
    return not is_const(var) and not types.is_list(var.sym_type) and get_type_info(var).dtype == types.int32


def _find_fp16_obstacle(members: Collection[Operation]) -> str | None:
    """Return why the chain cannot be computed in fp16, or None where every integer of it is exact in fp16."""
    own = set(members)
    ranges: dict[Var, _IntegerRange] = {}
    for op in members:
        for var in op.outputs:
            if _is_computed_int32(var) and (var.consuming_blocks or not get_consumers(var)):
                return f"its integers are the output '{var.name}'"
            if _is_computed_int32(var) and not own.issuperset(get_consumers(var)):
                return f"'{var.name}' is read by a nested block"
        bounds = _compute_range(op, ranges)
        if isinstance(bounds, str):
            return bounds
        largest = _find_magnitude(bounds)
        if largest > _MAX_EXACT_INTEGER:
            return f"'{op.outputs[0].name}' may reach {largest}, and fp16 is exact up to {_MAX_EXACT_INTEGER}"
        ranges.update(dict.fromkeys(op.outputs, bounds))
    return None


def _compute_range(op: Operation, ranges: Mapping[Var, _IntegerRange]) -> _IntegerRange | str:
    """Return the least and the largest integer of the result of `op`, or why they are not known.

    For ops that end a chain it is the range of the operand that reaches furthest.
    """
    op_type = op.op_type
    if _is_cast_from_bool(op):
        return 0, 1
    if is_opaque(op) or (op_type == "gather" and not is_const(op.indices)):
        return f"{add_article(op_type)} in it"
    operands = [var for name in _DATA_INPUTS for var in _list_vars(op.inputs.get(name))]
    unbounded = next((var for var in operands if _is_computed_int32(var) and var not in ranges), None)
    if unbounded is not None:
        return f"'{unbounded.name}' may be any integer"
    bounds = [ranges[var] if var in ranges else _read_const_range(var) for var in operands]
    if op_type in _COMPARISON_OPS or (op_type == "cast" and op.outputs[0].dtype in _END_DTYPES):
        return max(bounds, key=_find_magnitude)
    if op_type in _SELECTING_OPS:
        return min(low for low, _ in bounds), max(high for _, high in bounds)
    return _RANGE_ARITHMETIC[op_type](op, bounds) if op_type in _RANGE_ARITHMETIC else f"{add_article(op_type)} in it"


def _find_magnitude(bounds: _IntegerRange) -> int:
    return max(map(abs, bounds))


def _list_vars(bound: Var | tuple[Var, ...] | list[Var] | None) -> list[Var]:
    if bound is None:
        return []
    return list(bound) if isinstance(bound, (list, tuple)) else [bound]


def _read_const_range(var: Var) -> _IntegerRange:
    values = np.asarray(var.val) if is_const(var) else np.zeros(1)
    return (int(values.min()), int(values.max())) if values.size else (0, 0)


def _multiply_ranges(op: Operation, ranges: list[_IntegerRange]) -> _IntegerRange | str:
    (low_x, high_x), (low_y, high_y) = ranges
    if min(low_x, low_y) < 0:
        return "a product with negative numbers may be -0.0"
    return low_x * low_y, high_x * high_y


def _sum_range(op: Operation, ranges: list[_IntegerRange]) -> _IntegerRange | str:
    axes = get_const_value(op.inputs.get("axes"))
    sizes = [op.x.shape[axis] for axis in (range(op.x.rank) if axes is None else axes)]
    if any(map(is_symbolic, sizes)):
        return "the number of summands is dynamic"
    count = math.prod(map(int, sizes))
    return ranges[0][0] * count, ranges[0][1] * count


_RANGE_ARITHMETIC: dict[str, Callable[[Operation, list[_IntegerRange]], _IntegerRange | str]] = {
    "add": lambda op, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "sub": lambda op, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "maximum": lambda op, r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "minimum": lambda op, r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "abs": lambda op, r: (0, max(map(abs, r[0]))),
    "mul": _multiply_ranges,
    "reduce_sum": _sum_range,
}
"The range of an op's result from those of its operands, or why it is not known."


def _bind_fp16_inputs(mb: RewriteBuilder, op: Operation, halves: dict[Var, Var]) -> dict[str, Any]:
    """Return the numeric inputs of `op`, in fp16."""
    def convert_input(var: Var) -> Any:
        if not is_const(var) or var.dtype != types.int32:
            return halves.get(var, var)
        return mb.once(
            ("half", var), lambda: mb.const(val=np.asarray(var.val).astype(np.float16)[()], name=f"{var.name}_fp16"))

    bound = {name: op.inputs[name] for name in (*_DATA_INPUTS, "cond") if name in op.inputs}
    return {name: tuple(map(convert_input, var)) if isinstance(var, (list, tuple)) else convert_input(var)
            for name, var in bound.items()}


def _make_count_example(name: str, compute: Callable[[Var], Var], **settings: Any) -> Example:
    """Make an example of `compute` on the int32 numbers that bools are cast to, cast to fp16."""
    def build_body(x: Var) -> Any:
        numbers = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32")
        return Builder.cast(x=compute(numbers), dtype="fp16", name="y")

    return make_example(name, build_body, x=(2, 3), **settings)


def _build_counted_loop(x: Var) -> Any:
    positive = Builder.cast(x=Builder.greater(x=Builder.reduce_max(x=x), y=np.float16(0)), dtype="int32")
    steps = Builder.add(x=positive, y=np.int32(1), name="steps")
    _, doubled = Builder.while_loop(
        _cond=lambda step, _: Builder.less(x=step, y=steps), loop_vars=(np.int32(0), x),
        _body=lambda step, y: (Builder.add(x=step, y=np.int32(1)), Builder.add(x=y, y=y)))
    return Builder.identity(x=doubled, name="y")


def _build_masked_integers(i: Var) -> Any:
    mask = Builder.cast(x=Builder.greater(x=i, y=np.int32(0)), dtype="int32")
    return Builder.cast(x=Builder.mul(x=i, y=mask), dtype="fp16", name="y")
