"""Split a conv whose palettized weight has several tables or scales across its input channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_compressed, is_const
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example, make_weight
from .._weights import has_uniform_readers

_PACKED_INPUTS = {"constexpr_lut_to_dense": "indices", "constexpr_blockwise_shift_scale": "data"}
"The iOS18 forms that can be split, and the input with the weight's own shape; other inputs have one entry a block."


class SplitGroupedPalettizedConv(Rewrite):
    """Split a palettized conv into one conv per group of input channels with its own tables or scales.

    why     A conv with palettized weights and two scales for each output channel, one for each half of the input
            channels, applied the wrong ones on the ANE; two convs with one scale per output channel were correct.
    when    weight from iOS18's constexpr_lut_to_dense, with or without a constexpr_blockwise_shift_scale after it,
            whose tables or scales change along the input channels: one conv per block, and adds. With groups > 1 and
            any tables: one conv per group, and a concat. The report covers scales only; for lookup tables and convs
            with groups > 1 the fault is predicted.
    exact   rounding: the sum over the input channels is rounded once for each part. With groups bitwise.
    cost    one conv for each block, a split of the input, and adds (with groups one concat); the weights stay
            palettized and take no more bytes.

    before
        %0: fp16[4, 8, 1, 1] = constexpr_lut_to_dense(indices=<uint4[4, 8, 1, 1]>, lut=<fp16[1, 2, 1, 1, 16, 1]>)
        %y: fp16[1, 4, 5, 6] = conv(x=%x, weight=%0)
    after
        %0: fp16[4, 4, 1, 1] = constexpr_lut_to_dense(indices=<uint4[4, 4, 1, 1]>, lut=<fp16[1, 1, 1, 1, 16, 1]>)
        %1: fp16[4, 4, 1, 1] = constexpr_lut_to_dense(indices=<uint4[4, 4, 1, 1]>, lut=<fp16[1, 1, 1, 1, 16, 1]>)
        %2: fp16[1, 4, 5, 6], %3: fp16[1, 4, 5, 6] = split(x=%x, num_splits=2, axis=1)
        %4: fp16[1, 4, 5, 6] = conv(x=%2, weight=%1)
        %5: fp16[1, 4, 5, 6] = conv(x=%3, weight=%0)
        %y: fp16[1, 4, 5, 6] = add(x=%4, y=%5)
    """

    code, slug = "ANE401", "grouped-palettized-conv"
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "each part's sum is rounded, and each add; a part that overflows fp16 although the sum does not is infinite"
    preset = "named"
    roots = ("conv",)
    evidence = (
        Community("conv [64, 64, 1, 1] with int4 lookup-table weights and scales [64, 2, 1, 1]: 1921 of 4096 outputs "
                  "wrong, as if the first 64 scales of the flat array were one for each output; two convs of 32 input "
                  "channels are correct (Core AI)", source="https://github.com/apple/coreai-torch/issues/93",
                  chip="M5 Pro", os="macOS 27.0", date="2026-09"),
    )

    max_groups: int = 32
    "Maximum number of convs; a conv with more groups is not rewritten."

    def match(self, op: Operation) -> Hit | Miss:
        table = op.weight
        if is_compressed(table) and table.op.op_type == "constexpr_blockwise_shift_scale":
            table = table.op.data
        if not is_compressed(table) or table.op.op_type != "constexpr_lut_to_dense":
            return Miss(op, "weight is not palettized", near=False)
        if "shape" in table.op.inputs:
            return Miss(op, "one lookup table for the entire weight", near=False)
        groups, blocks = get_const_value(op.groups, 1), _count_table_blocks(op.weight, 1)
        if blocks == 1 and (groups == 1 or _count_table_blocks(op.weight, 0) == 1):
            return Miss(op, "no separate table or scale for any group of input channels", near=False)
        axis, count = (1, blocks) if groups == 1 else (0, groups)
        if count > self.max_groups:
            return Miss(op, f"{count} parts, above max_groups={self.max_groups}")
        reason = _find_split_obstacle(op.weight, axis, count) or _find_sharing_obstacle(op, table)
        if reason:
            return Miss(op, reason)
        if axis == 0 and op.bias is not None and not is_const(op.bias):
            return Miss(op, "bias is not a plain const, so it cannot be divided among the groups")
        exactness = Exactness.BITWISE if axis == 0 else None
        return Hit(op, note=f"split into {count} convs", exactness=exactness, axis=axis, count=count)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, axis, count = hit.op, hit.axis, hit.count
        sums: list[Var] = []
        for number, x in enumerate(mb.split(x=op.x, num_splits=count, axis=1)):
            changes: dict[str, Any] = {
                "x": x,
                "weight": _slice_weight_part(mb, op.weight, axis, number, count),
                "groups": 1,
            }
            if op.bias is not None:  # a group has its own part of the bias; of a sum, the first term has it
                own = _slice_weight_part(mb, op.bias, 0, number, count) if axis == 0 else op.bias
                changes["bias"] = own if axis == 0 or number == 0 else None
            sums.append(rebuild_op(mb, op, **changes))
        if axis == 0:
            joined: Var = mb.concat(values=sums, axis=1)
            return joined
        total = sums[0]
        for term in sums[1:]:
            total = mb.add(x=total, y=term)
        return total

    def examples(self) -> Iterable[Example]:
        example = _make_palettized_example
        yield example("two tables", (4, 8, 1, 1), lut=(1, 2), within=1000)
        yield example("scales", (4, 8, 3, 1), scale=(4, 2), bias=True, within=1000)
        yield example("groups", (4, 2, 3, 1), lut=(2, 1), groups=2, bias=True)
        yield example("fewer tables than groups", (8, 2, 1, 1), lut=(2, 1), groups=4)
        yield example("groups and blocks", (4, 4, 1, 1), lut=(2, 2), groups=2, within=1000)
        yield example("too many", (4, 4, 1, 1), lut=(1, 4), options={"max_groups": 3},
                      reason="4 parts, above max_groups=3")
        yield example("by output channel", (4, 4, 1, 1), lut=(4, 1),
                      reason="no separate table or scale for any group of input channels")
        yield example("tables across groups", (6, 2, 1, 1), lut=(2, 1), groups=3,
                      reason="2 tables and 3 parts are not aligned")
        yield make_example("plain", lambda x: Builder.conv(x=x, weight=make_weight(4, 4, 1, 1)),
                           reason="weight is not palettized", x=(1, 4, 5, 6))


def _count_table_blocks(var: Var, axis: int) -> int:
    """Count the blocks along `axis` with a table or scale of their own."""
    blocks = 1
    while is_compressed(var):
        blocks = max(blocks, *(bound.shape[axis] for bound in _collect_tables(var).values()))
        var = var.op.inputs[_PACKED_INPUTS[var.op.op_type]]
    return blocks


def _collect_tables(var: Var) -> dict[str, Var]:
    return {name: bound for name, bound in var.op.inputs.items() if name in ("lut", "scale", "offset")}


def _find_split_obstacle(var: Var, axis: int, count: int) -> str | None:
    """Return why `var` cannot be cut into `count` equal parts along `axis`, or None when it can."""
    if is_const(var):
        uneven = f"{var.shape[axis]} channels cannot be split into {count} equal parts"
        return None if var.shape[axis] % count == 0 else uneven
    if not is_compressed(var) or var.op.op_type not in _PACKED_INPUTS:
        return f"weight is made by {'an unknown op' if var.op is None else var.op.op_type}, which cannot be split"
    for bound in _collect_tables(var).values():
        if not is_const(bound):
            return "a lookup table or scale is itself compressed"
        if bound.shape[axis] % count and count % bound.shape[axis]:
            return f"{bound.shape[axis]} tables and {count} parts are not aligned"
    return _find_split_obstacle(var.op.inputs[_PACKED_INPUTS[var.op.op_type]], axis, count)


def _find_sharing_obstacle(op: Operation, table: Var) -> str | None:
    """Return why the parts would be stored beside the entire weight, or None.

    All readers of the weight must be split the same way.
    """
    alike = has_uniform_readers(op, op.enclosing_block, lambda other: get_const_value(other.groups, 1))
    if alike and not op.weight.consuming_blocks and (table is op.weight or len(get_consumers(table)) == 1):
        return None
    return "weight has other users, so its parts would be stored in addition"


def _slice_weight_part(mb: RewriteBuilder, var: Var, axis: int, number: int, count: int) -> Var:
    """Return part `number` of `count`: its packed data and its tables; a single table is shared by all parts."""
    if is_const(var):
        extent = int(var.shape[axis]) // count
        return _slice_const(mb, var, axis, number * extent, (number + 1) * extent)

    def build_slice() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            inputs = dict(var.op.inputs)
            packed = _PACKED_INPUTS[var.op.op_type]
            inputs[packed] = _slice_weight_part(mb, inputs[packed], axis, number, count)
            for name, bound in _collect_tables(var).items():
                first = number * bound.shape[axis] // count
                inputs[name] = _slice_const(mb, bound, axis, first, first + max(bound.shape[axis] // count, 1))
            return getattr(mb, var.op.op_type)(**inputs)

    made: Var = mb.once(("part", var, axis, number, count), build_slice)
    return made


def _slice_const(mb: RewriteBuilder, var: Var, axis: int, start: int, stop: int) -> Var:
    """Return elements `start` to `stop` of a const along `axis`, as one const for all users."""
    if (start, stop) == (0, var.shape[axis]):
        return var
    return mb.weight(var, f"{axis}_{start}_{stop}", lambda: np.take(np.asarray(var.val), range(start, stop), axis))


def _make_palettized_example(
    name: str,
    shape: tuple[int, ...],
    *,
    lut: tuple[int, int] = (1, 1),
    scale: tuple[int, int] | None = None,
    groups: int = 1,
    bias: bool = False,
    **expected: Any,
) -> Example:
    """Make an example of a conv whose weight has `lut` tables, and `scale` scales, by output and input channels."""
    indices = (np.arange(np.prod(shape)) * 5 % 16).reshape(shape).astype(types.np_uint4_dtype)

    def build_body(x: Var) -> Var:
        dense = Builder.constexpr_lut_to_dense(indices=indices, lut=make_weight(*lut, 1, 1, 16, 1))
        if scale is not None:
            dense = Builder.constexpr_blockwise_shift_scale(data=dense, scale=make_weight(*scale, 1, 1) + np.float16(2))
        parameters = {"bias": make_weight(shape[0])} if bias else {}
        built: Var = Builder.conv(x=x, weight=dense, groups=groups, name="y", **parameters)
        return built

    return make_example(name, build_body, opset=ct.target.iOS18, x=(1, shape[1] * groups, 5, 6), **expected)
