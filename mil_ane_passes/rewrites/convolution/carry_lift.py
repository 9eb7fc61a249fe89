"""Keep an entire 1-D region in the layout of its lifted ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.large_values import group_by_shared_values
from ...ir.query import get_const_value, get_consumers, get_itemsize, get_static_shape, is_const, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import make_example, make_weight
from ...passes.layout import compute_padded_bytes, format_bytes
from ...utils.text_format import format_count
from ._conv_1d_lifting import (
    BINARY_OPS,
    HEIGHT,
    UNARY_OPS,
    WIDTH,
    build_lifted_conv,
    find_dummy_axis,
    find_lift_obstacle,
    insert_dummy_axis,
    insert_numbers,
    remove_dummy_axis,
)

_CONV_OPS = ("conv", "conv_transpose")
_NEUTRAL_SLICE_PARAMETERS: dict[str, Any] = {"begin": 0, "end": 1, "stride": 1, "begin_mask": True, "end_mask": True,
                                             "squeeze_mask": False, "size": 1}
"Parameters of a slice at the dummy axis, which keep it as it is."
_LiftedValues = Callable[[Var], Var]
"Returns the rank-4 form of a value."
_ObstacleFinder = Callable[[Operation, int], "str | None"]
_CarriedBuilder = Callable[[RewriteBuilder, Operation, _LiftedValues, int], Any]


class CarryLift(BlockRewrite):
    """Keep the dummy axis of lifted ops in the ops between them, so that a region is expanded and squeezed once.

    why     Each lifted op (a 1-D op computed as a 2-D one with a dummy axis) expands its input and squeezes its output.
            If only elementwise ops are between two of them, these layout ops cancel, because elementwise ops give the
            same results with the dummy axis.
    when    Between lifted ops: element-wise ops, activations, binary ops with a const or with another lifted value
            (residual adds), batch_norm, pad and slices with constant parameters, concat, split, and 1-D convs that were
            not lifted themselves; all of rank 3. One operand that is not lifted (a mask) gets an expand_dims of its
            own. Only where the region ends up with fewer layout ops than it had.
    exact   bitwise: each op works element by element, or on the other axes only.
    cost    a dummy last axis makes rows of one element, which are padded to 64 bytes: 32 times their size in fp16, also
            for the values in between. One on axis 2 costs nothing.

    before
        %0: fp16[1, 4, 8, 1] = relu(x=%x)
        %1: fp16[1, 4, 8] = squeeze(x=%0, axes=[-1])
        %2: fp16[1, 4, 8] = leaky_relu(x=%1, alpha=0.125)
        %3: fp16[1, 4, 8, 1] = expand_dims(x=%2, axes=[-1])
        %y: fp16[1, 4, 8, 1] = relu(x=%3)
    after
        %0: fp16[1, 4, 8, 1] = relu(x=%x)
        %1: fp16[1, 4, 8, 1] = leaky_relu(x=%0, alpha=0.125)
        %y: fp16[1, 4, 8, 1] = relu(x=%1)
    """

    code, slug = "ANE102", "lift-inside-region"
    roots = ("expand_dims",)
    stage = "layout"
    after = ("lift_conv_transpose_1d", "lift_conv_1d", "cancel_lift_pairs")
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        cite_apple_authoring_rules("avoid reshape and transpose between ops: each is a pass over the data"),
    )

    most_padded: int = 1 << 20
    """Maximum bytes that the padded rows of one region add. A region with a last axis of one takes 32 times the bytes,
    and the gains of other rewrites may hide this increase from the prediction."""

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for at in (3, 2):
            for region in _iterate_lift_regions(block, at):
                yield self._match_region(region)

    def _match_region(self, region: _LiftRegion) -> Hit | Miss:
        first, ops = region.ops[0], format_count(len(region.ops), "op")
        if region.after >= region.before:
            return Miss(first, f"carrying {ops} would leave {region.after} layout ops where there are "
                               f"{region.before}", near=region.after > region.before)
        added = _count_padding_bytes(region)
        if added > self.most_padded:
            return Miss(first, f"{ops} carried with a last axis of one would add {format_bytes(added)} of padded "
                               f"rows, more than {format_bytes(self.most_padded)} (most_padded)")
        return Hit(first, region=region, note=f"{ops} carried with the dummy axis: {region.after} layout "
                                              f"ops instead of {region.before}")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        region: _LiftRegion = hit.region
        axis = _get_axis_option(region.at)
        lifted: dict[Var, Var] = {}

        def lift_value(var: Var) -> Var:
            if var not in lifted:
                lifted[var] = insert_dummy_axis(mb, var, axis)
            return lifted[var]

        replaced: dict[Var, Var] = {}
        members = set(region.ops)
        for op in region.ops:
            with mb.at(op):
                lifted.update(zip(op.outputs, _build_carried_op(mb, op, lift_value, region.at)))
                for var in op.outputs:
                    if _is_needed_without_axis(var, members, mb.block, region.at):
                        replaced[var] = remove_dummy_axis(mb, lifted[var], axis)
        for var in region.values:
            for reader in get_consumers(var):
                is_own = var in lifted and reader is lifted[var].op
                if _is_dummy_axis_expansion(reader, mb.block, region.at) and not is_own:
                    replaced[reader.outputs[0]] = lift_value(var)
        return replaced

    def examples(self) -> Iterable[Example]:
        yield _make_chain_example("activation", _apply_leaky_relu)
        yield _make_chain_example("scale per channel", lambda v: Builder.mul(x=v, y=make_weight(1, 4, 1)))
        yield _make_chain_example("scale along the length", lambda v: Builder.mul(x=make_weight(8), y=v))
        yield _make_chain_example("scalar", lambda v: Builder.add(x=v, y=np.float16(0.5)))
        yield _make_chain_example("residual", lambda v: Builder.add(x=Builder.relu(x=v), y=v))
        yield _make_chain_example("replicate pad and slice", lambda v: Builder.slice_by_index(
            x=Builder.pad(x=v, pad=[2, 1], mode="replicate", constant_val=np.float16(0)),
            begin=[0, 0, 1], end=[0, 0, -2], begin_mask=[True, True, False], end_mask=[True, True, False]))
        yield _make_chain_example("constant pad", lambda v: Builder.pad(
            x=v, pad=[0, 0, 1, 1, 2, 0], constant_val=np.float16(0.5)))
        yield _make_chain_example("concat", lambda v: Builder.concat(values=[v, Builder.relu(x=v)], axis=-2))
        yield _make_chain_example("gated split", lambda v: Builder.mul(**dict(zip(
            "xy", Builder.split(x=v, num_splits=2, axis=1)))))
        yield make_example("two ways in", _build_fork, x=(1, 4, 8))
        yield _make_chain_example("conv between", lambda v: Builder.conv(x=v, weight=make_weight(4, 4, 3)))
        yield _make_chain_example(
            "large", _apply_leaky_relu, x=(1, 4, 8000, 1),
            reason="1 op carried with a last axis of one would add 1.98 MB of padded rows, more than 1.05 MB "
                   "(most_padded)")
        yield _make_chain_example("on axis 2", lambda v: Builder.mul(x=v, y=make_weight(4, 1)), x=(1, 4, 1, 8))
        yield _make_chain_example("softmax ends the region", lambda v: Builder.softmax(x=v, axis=-1), reason="")
        yield make_example("every value is returned", _build_returned_values, x=(1, 4, 8, 1),
                           reason="carrying 3 ops would leave 3 layout ops where there are 2")


def _iterate_lift_regions(block: Block, at: int) -> Iterator[_LiftRegion]:
    """Yield the regions of one block for one position of the dummy axis.

    The time is linear in the block's ops and their operands.
    """
    kept = _find_ops_between_lifts(block, at)
    for region in _group_connected_ops(kept, at):
        for var in region.values:
            squeezed = _is_squeezed(var, at)
            expansions = [each for each in get_consumers(var) if _is_dummy_axis_expansion(each, block, at)]
            region.before += squeezed + len(expansions)
            if squeezed or var.op in kept:
                region.after += _is_needed_without_axis(var, kept, block, at)
            else:
                region.after += 1  # a value from outside: one expand_dims for all its users
        yield region


@dataclass
class _LiftRegion:
    """Ops connected by values that have, or could have, the dummy axis at position `at`.

    `ops` is in block order; `values` are all rank-3 values they read (except consts) or compute. `before` and `after`
    count the squeeze and expand_dims ops on those values, as they are and with `ops` carried.
    """

    at: int
    ops: list[Operation] = field(default_factory=list)
    values: dict[Var, None] = field(default_factory=dict)
    before: int = 0
    after: int = 0


def _find_ops_between_lifts(block: Block, at: int) -> dict[Operation, None]:
    """Find ops that have the dummy axis on all operands but one at most, and whose result leads to an op that needs it.

    The one operand (a mask, a scale that is computed) gets an expand_dims of its own, which costs no more than to end
    the region there.
    """
    able: dict[Operation, list[Var]] = {}
    wide: set[Var] = set()
    for op in block.operations:
        operands = _collect_main_inputs(op)
        if operands and _find_carry_obstacle(op, at) is None:
            able[op] = operands
        elif find_dummy_axis(op) == at:
            wide.add(op.outputs[0] if op.op_type == "squeeze" else op.x)
    wide.update(_find_values_worth_expanding(able, block, at))
    candidates = []
    for op, operands in able.items():
        bare = {var for var in operands if var not in wide}
        if not bare or (len(bare) == 1 and len(set(operands)) > 1):
            candidates.append(op)
            wide.update(op.outputs)
    kept: dict[Operation, None] = {}
    for op in reversed(candidates):
        readers = [reader for var in op.outputs for reader in get_consumers(var)]
        if any(reader in kept or _is_dummy_axis_expansion(reader, block, at) for reader in readers):
            kept[op] = None
    return dict.fromkeys(reversed(kept))


def _collect_main_inputs(op: Operation) -> list[Var]:
    """Return the values that need the dummy axis for `op` to be carried; consts are not among them."""
    if is_opaque(op):
        return []
    if op.op_type in BINARY_OPS:
        return [var for var in (op.x, op.y) if not is_const(var) and var.rank]
    if op.op_type == "concat":
        return [var for var in op.values if not is_const(var)]
    return [op.x] if op.op_type in _CARRIED_OPS else []


def _carry_unary(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    return rebuild_op(mb, op, x=lift(op.x))


def _carry_binary(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    """Carry an op of two operands.

    A const operand gets the dummy axis, too, counted from the end to keep its broadcast.
    """

    def get_operand(var: Var) -> Var:
        if var.rank == 0:
            return var
        if not is_const(var):
            return lift(var)
        shape = tuple(var.shape)
        cut = len(shape) if at == 3 else len(shape) - 1
        return mb.reshaped(var, (*shape[:cut], 1, *shape[cut:]))

    return rebuild_op(mb, op, x=get_operand(op.x), y=get_operand(op.y))


def _find_conv_obstacle(op: Operation, at: int) -> str | None:
    return find_lift_obstacle(op, _get_axis_option(at))


def _get_axis_option(at: int) -> int:
    """Return the value of the option `axis` of the lifts for a dummy axis at position `at`."""
    return HEIGHT if at == 3 else WIDTH


def _carry_conv(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    return build_lifted_conv(mb, op, lift(op.x), _get_axis_option(at))


def _find_pad_obstacle(op: Operation, at: int) -> str | None:
    if get_const_value(op.pad) is None:
        return "pad is not constant"
    full = _expand_pad_to_rank_3(op)
    if get_const_value(op.mode) != "constant" and any(full[:4]):
        return f"pad of mode {get_const_value(op.mode)} affects more than the last axis"
    return None


def _expand_pad_to_rank_3(op: Operation) -> list[int]:
    pad: list[int] = get_const_value(op.pad)
    return [0] * (6 - len(pad)) + pad


def _carry_pad(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    pad = insert_numbers(_expand_pad_to_rank_3(op), 2 * at, [0, 0])
    while len(pad) > 2 and not any(pad[:2]):  # reflect and replicate support the last two axes only
        pad = pad[2:]
    return rebuild_op(mb, op, x=lift(op.x), pad=pad)


def _find_slice_obstacle(op: Operation, at: int) -> str | None:
    for name in _NEUTRAL_SLICE_PARAMETERS:
        var = op.inputs.get(name)
        if var is not None and get_const_value(var) is None:
            return f"{name} is not constant"
    if any(get_const_value(op.inputs.get("squeeze_mask"), [])):
        return "the slice drops an axis"
    return None


def _carry_slice(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    changed = {name: np.insert(np.asarray(var.val), at, _NEUTRAL_SLICE_PARAMETERS[name])
               for name, var in op.inputs.items() if name in _NEUTRAL_SLICE_PARAMETERS}
    return rebuild_op(mb, op, x=lift(op.x), **changed)


def _find_concat_obstacle(op: Operation, at: int) -> str | None:
    return "one of the values is constant" if any(is_const(var) for var in op.values) else None


def _carry_concat(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Var:
    axis = int(get_const_value(op.axis)) % 3
    return rebuild_op(mb, op, values=[lift(var) for var in op.values], axis=axis + (axis >= at))


def _find_split_obstacle(op: Operation, at: int) -> str | None:
    return "axis is not constant" if get_const_value(op.axis) is None else None


def _carry_split(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> Any:
    axis = int(get_const_value(op.axis)) % 3
    return mb.split(**{**op.inputs, "x": lift(op.x), "axis": axis + (axis >= at)})


_CARRIED_OPS: dict[str, tuple[_ObstacleFinder | None, _CarriedBuilder]] = {
    **dict.fromkeys(UNARY_OPS, (None, _carry_unary)),
    **dict.fromkeys(BINARY_OPS, (None, _carry_binary)),
    **dict.fromkeys(_CONV_OPS, (_find_conv_obstacle, _carry_conv)),
    "pad": (_find_pad_obstacle, _carry_pad),
    "slice_by_index": (_find_slice_obstacle, _carry_slice),
    "slice_by_size": (_find_slice_obstacle, _carry_slice),
    "concat": (_find_concat_obstacle, _carry_concat),
    "split": (_find_split_obstacle, _carry_split),
}


def _find_carry_obstacle(op: Operation, at: int) -> str | None:
    """Return why `op` cannot be carried with the dummy axis at position `at` (2 or 3), or None when it can."""
    if op.op_type not in _CARRIED_OPS or is_opaque(op):
        return f"{op.op_type} is not known to be equivalent with a dummy axis"
    if any(var.rank != 3 for var in [*_collect_main_inputs(op), *op.outputs]) or not _collect_main_inputs(op):
        return "not every value has rank 3"
    find_obstacle, _ = _CARRIED_OPS[op.op_type]
    return find_obstacle(op, at) if find_obstacle is not None else None


def _find_values_worth_expanding(able: dict[Operation, list[Var]], block: Block, at: int) -> Iterator[Var]:
    """Find values that several chains of ops lead from to expand_dims only.

    One expand_dims before the chains replaces those after them.
    """
    leading: set[Operation] = set()
    for op in reversed(able):
        readers = [reader for var in op.outputs for reader in get_consumers(var)]
        narrow = any(var.consuming_blocks for var in op.outputs)
        if (
            readers
            and not narrow
            and all(reader in leading or _is_dummy_axis_expansion(reader, block, at) for reader in readers)
        ):
            leading.add(op)
    entries = Counter(operands[0] for op, operands in able.items() if op in leading and len(set(operands)) == 1)
    return (var for var, count in entries.items() if count > 1)


def _is_dummy_axis_expansion(op: Operation, block: Block, at: int) -> bool:
    """Return whether `op` is an expand_dims that adds the dummy axis, in `block` or in one nested in it."""
    if op.op_type != "expand_dims" or find_dummy_axis(op) != at:
        return False
    inner = op.enclosing_block
    while inner is not block and inner is not None and inner.outer_op is not None:
        inner = inner.outer_op.enclosing_block
    return inner is block


def _group_connected_ops(kept: dict[Operation, None], at: int) -> list[_LiftRegion]:
    """Group the ops `kept` by the values they share."""
    values = {op: [*_collect_main_inputs(op), *op.outputs] for op in kept}
    return [
        _LiftRegion(at, ops, dict.fromkeys(var for op in ops for var in values[op]))
        for ops in group_by_shared_values(values)
    ]


def _is_squeezed(var: Var, at: int) -> bool:
    return var.op is not None and var.op.op_type == "squeeze" and find_dummy_axis(var.op) == at


def _is_needed_without_axis(var: Var, members: Container[Operation], block: Block, at: int) -> bool:
    """Return whether an op besides `members` and the region's expand_dims uses `var`, which it needs without the
    axis."""
    return bool(var.consuming_blocks) or any(
        reader not in members and not _is_dummy_axis_expansion(reader, block, at) for reader in get_consumers(var))


def _count_padding_bytes(region: _LiftRegion) -> int:
    """Count the bytes of padded rows that carrying adds, as outputs get the dummy axis as their last one."""
    if region.at != 3:
        return 0
    total = 0
    for var in (var for op in region.ops for var in op.outputs):
        shape, size = get_static_shape(var), get_itemsize(var)
        if shape is not None:
            total += compute_padded_bytes((*shape, 1), size) - compute_padded_bytes(shape, size)
    return total


def _build_carried_op(mb: RewriteBuilder, op: Operation, lift: _LiftedValues, at: int) -> list[Var]:
    """Build the outputs of `op` with the dummy axis at position `at`.

    `lift` returns the rank-4 form of each of its `_collect_main_inputs`.
    """
    _, build = _CARRIED_OPS[op.op_type]
    made = build(mb, op, lift, at)
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _make_chain_example(
    name: str, between: Callable[[Var], Var], x: tuple[int, ...] = (1, 4, 8, 1), reason: str | None = None
) -> Example:
    """Make an example of `between` on a value that is squeezed before it and expanded after it."""
    axis = -1 if x[-1] == 1 else 2

    def build_body(x: Var) -> Var:
        middle = between(Builder.squeeze(x=Builder.relu(x=x), axes=[axis]))
        built: Var = Builder.relu(x=Builder.expand_dims(x=middle, axes=[axis]), name="y")
        return built

    return make_example(name, build_body, reason=reason, x=x)


def _apply_leaky_relu(v: Var) -> Var:
    built: Var = Builder.leaky_relu(x=v, alpha=np.float16(0.125))
    return built


def _build_fork(x: Var) -> Var:
    """Build two ops on one input, each expanded afterwards: one expand_dims before both is enough."""
    ends = [Builder.expand_dims(x=op(x=x), axes=[-1]) for op in (Builder.relu, Builder.sigmoid)]
    total: Var = Builder.add(x=ends[0], y=ends[1], name="y")
    return total


def _build_returned_values(x: Var) -> list[Var]:
    """Build a chain of three values, each of which is an output of the function as well."""
    value = Builder.squeeze(x=Builder.relu(x=x), axes=[-1])
    values = []
    for number in range(3):
        value = Builder.sigmoid(x=value, name=f"tap{number}")
        values.append(value)
    return [*values, Builder.relu(x=Builder.expand_dims(x=value, axes=[-1]), name="y")]
