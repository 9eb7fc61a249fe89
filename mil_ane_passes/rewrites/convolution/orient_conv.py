"""Swap height and width of a region of convs: kernels on the faster axis, the longer axis last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ane.latency_parameters import find_chips
from ...ane.latency_terms import Chip, compute_terms, describe_work
from ...ane.limits import find_exceeded_limit
from ...ane.sizes import Sizes
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.compressed_weights import explain_axis_obstacle
from ...ir.large_values import group_by_shared_values
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_itemsize,
    get_static_shape,
    is_all_zero,
    is_compressed,
    is_const,
    is_opaque,
)
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Severity
from ...passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...passes.layout import compute_padded_bytes, format_bytes
from ...passes.targets import Generation
from ...rules.convolution import ConvKernelSize, WideKernelSlow
from ...utils.text_format import format_count
from .._weights import find_reshape_obstacle, reshape_weight
from ._conv_1d_lifting import BINARY_OPS, UNARY_OPS

_SPATIAL_PARAMETERS = ("strides", "dilations", "kernel_sizes")
_CONV_OPS = ("conv", "conv_transpose")
_POOL_OPS = ("max_pool", "avg_pool")
_SLICE_OPS = ("slice_by_index", "slice_by_size")
_TURN = (0, 1, 3, 2)
_LEAST_GAIN = 0.03
"Minimum share of the convs' time to save on a measured chip: the error of the model for wide kernels."
_MOST_LOSS = 0.005
_LEAST_PADDING = 1 << 16
"Minimum bytes of padded rows to save if no conv becomes faster."
_ROW_WINDOW = 32
"Positions of a row that the ANE computes at a time; shorter rows leave lanes idle (seen on an M6)."
_KERNEL_TERMS = ("winograd", "wide_kernels")
"Parameters of a chip that depend on the axis of a kernel."


class OrientConv(BlockRewrite):
    """Swap height and width between transposes or dummy axes, so that kernels are on the faster axis.

    why     The axis of a kernel is arbitrary if the model adds the axis itself (audio and sensor models as Conv2d of
            kernel (k, 1)), or if transposes surround the convs. On an M6 it matters: 1x3 takes 7.9 us a layer where 3x1
            takes 12.1, as only a width of 3 is computed by Winograd's scheme; 1x9 on a map of 32x8 takes 777 us where
            9x1 on 8x32 takes 361, as a kernel 9 to 15 wide is stored with 2 (k + 1) taps. A last axis of one is padded
            32 times, on every chip.
    when    Ops on [N, C, H, W] of static size that are equivalent with both axes swapped: convs with a kernel of 1 on
            one axis, element-wise ops, pools, pads, slices, concats and reductions. Every value that enters comes from
            an expand_dims or a transpose, every one that leaves goes to a squeeze, a transpose, a reshape (if one axis
            is 1) or a reduction over that axis: these swap for free, so no op is added. Applied if a kernel becomes
            supported on the target; if the convs take 3 % less by the latency model on a chip of the target where
            kernel shapes were measured, and no more on the others; or if padded rows of one element disappear, and no
            conv becomes slower. Never if rows become shorter than 32.
    exact   bitwise: the same products in the same order; the weights are views of the same bytes.
    cost    none. On an M6 a map of 8x128 with 1x9 kernels ran 13 % slower as 128x8 with 9x1 (not rewritten); at 32x32
            there is no difference. Other chips were not measured, so only padding counts there. A conv_transpose with a
            bias keeps its kernel on the height: with a map of height 1 wrong numbers are reported
            (ane::lift_conv_transpose_1d).

    before
        %0: fp16[1, 4, 40, 1] = expand_dims(x=%x, axes=[-1])
        %1: fp16[1, 600, 40, 1] = conv(x=%0, weight=<fp16[600, 4, 3, 1]>, pad_type=same)
        %2: fp16[1, 600, 40, 1] = relu(x=%1)
        %y: fp16[1, 600, 40] = squeeze(x=%2, axes=[-1])
    after
        %0: fp16[1, 4, 1, 40] = expand_dims(x=%x, axes=[2])
        %1: fp16[1, 600, 1, 40] = conv(x=%0, weight=<fp16[600, 4, 1, 3]>, pad_type=same)
        %2: fp16[1, 600, 1, 40] = relu(x=%1)
        %y: fp16[1, 600, 40] = squeeze(x=%2, axes=[2])
    """

    code, slug = "ANE602", "kernel-on-the-slow-axis"
    fixes = (WideKernelSlow, ConvKernelSize)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    repeats = True
    severity, confidence = Severity.SUGGESTION, "medium"
    roots = ("conv",)
    evidence = (
        Community("256 channels at 32x32: a layer of 1x3 takes 7.89 us, of 3x1 12.07 us; 4x32: 1x9 17.0 us, 9x1 7.9 us",
                  chip="M6", os="macOS 27.0.1", date="2026",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/05_compute"),
        Community("12 layers of 256 channels, 1x9 on HxW against 9x1 on WxH: 32x8 777 and 361 us, 128x8 1186 and 823, "
                  "8x8 371 and 243; 8x32 366 and 370, 32x32 778 and 811; contradicts it: 8x128 778 and 895",
                  chip="M6", os="macOS 27.0.1", date="2026",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 kshape_run.txt"),
        cite_m4_study("conv kernels 1x16 are unsupported by the ANE, Kx1 up to 31 are supported"),
        cite_apple_authoring_rules("a last axis of one is padded to 64 bytes, 32 times the memory at fp16"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for region in _iterate_regions(block):
            first = next(op for op in region.ops if op.op_type in _CONV_OPS)
            reason = _find_boundary_obstacle(region)
            gain = _describe_gain(region, self.generations)
            if not gain:
                yield Miss(first, "swapping height and width improves neither kernels nor padding",
                           near=False)
            elif reason:
                yield Miss(first, reason)
            else:
                yield Hit(first, region=region, note=f"height and width of {format_count(len(region.ops), 'op')} "
                                                     f"swapped: {gain}", covers=region.convs)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return _build_turned_region(mb, hit.region)

    def examples(self) -> Iterable[Example]:
        yield _make_region_example("upright", _conv_op(600, 4, 3, 1, pad_type="same"), lambda x: Builder.relu(x=x))
        yield _make_region_example("bias, pad, scale", _pad_op(0, 0, 2, 2, 0, 0), _conv_op(
            600, 4, 5, 1, strides=[2, 1], bias=make_weight(600)), lambda x: Builder.mul(x=x, y=make_weight(600, 1, 1)),
            _conv_op(600, 1, 3, 1, groups=600, pad_type="custom", pad=[1, 1, 0, 0]), within=1000)
        yield _make_region_example(
            "pool and slice", _conv_op(600, 4, 3, 1), lambda x: Builder.max_pool(
                x=x, kernel_sizes=[2, 1], strides=[2, 1], pad_type="valid"),
            lambda x: Builder.concat(values=[x, Builder.tanh(x=x)], axis=-2),
            lambda x: Builder.slice_by_index(x=x, begin=[0, 0, 3, 0], end=[0, 0, -2, 0], stride=[1, 1, 2, 1],
                                             begin_mask=[True, True, False, True], end_mask=[True, True, False, True]))
        yield _make_region_example("too wide lying down", _conv_op(6, 4, 1, 20), at=2)
        yield make_example("between transposes", _build_between_transposes, x=(1, 16, 300, 8))
        yield _make_region_example("lying down", _conv_op(600, 4, 1, 3, pad_type="same"), at=2, reason=(
            "swapping height and width improves neither kernels nor padding"))
        yield _make_region_example("tall", _conv_op(600, 4, 20, 1), reason=(
            "swapping height and width improves neither kernels nor padding"))
        yield make_example(
            "no transposes", lambda x: Builder.conv(x=x, weight=make_weight(600, 4, 3, 1), name="y"),
            reason="'x' is an input of the function: it would need a transpose",
            x=(1, 4, 40, 1))
        yield _make_region_example(
            "read as it is", _conv_op(600, 4, 3, 1), lambda x: Builder.softmax(x=x, axis=1),
            reason="softmax reads a value directly: it would need a transpose")


@dataclass
class _Region:
    """Ops that are the same with height and width swapped, connected by values of rank 4, in block order.

    `inputs` are the values that enter, `readers` the ops outside that read what the region computes.
    """

    ops: list[Operation]
    inputs: dict[Var, None] = field(default_factory=dict)
    readers: dict[Operation, None] = field(default_factory=dict)

    @property
    def convs(self) -> list[Operation]:
        return [op for op in self.ops if op.op_type in _CONV_OPS]


def _iterate_regions(block: Block) -> Iterator[_Region]:
    """Yield the regions of `block` that have a conv with a kernel on one axis alone."""
    values: dict[Operation, list[Var]] = {}
    for op in block.operations:
        operands = _list_operands(op)
        if operands and all(get_static_shape(var) is not None and var.rank == 4 for var in (*operands, *op.outputs)) \
                and _find_op_obstacle(op) is None:
            values[op] = [*operands, *op.outputs]
    for ops in group_by_shared_values(values):
        if not any(op.op_type == "conv" and max(op.weight.shape[2:]) > 1 for op in ops):
            continue
        region, members = _Region(ops), set(ops)
        for op in ops:
            region.inputs.update(dict.fromkeys(var for var in _list_operands(op) if var.op not in members))
            for var in op.outputs:
                region.readers.update(dict.fromkeys(each for each in get_consumers(var) if each not in members))
        yield region


def _list_operands(op: Operation) -> list[Var]:
    """Return the computed values that `op` reads with height and width; [] if it is not one that may be swapped."""
    if is_opaque(op):
        return []
    if op.op_type in BINARY_OPS:
        return [var for var in (op.x, op.y) if not is_const(var) and var.rank]
    if op.op_type == "concat":
        return list(op.values)
    return [op.x] if op.op_type in _BUILDERS else []


def _find_op_obstacle(op: Operation) -> str | None:
    """Return why `op` is not the same with height and width swapped, or None."""
    if op.op_type in _CONV_OPS:
        return _find_conv_obstacle(op)
    if op.op_type in BINARY_OPS:
        constants = [var for var in (op.x, op.y) if is_const(var)]
        turned = all(max(var.shape[-2:-1] or (1,)) == 1 or var.shape[-1] == 1 for var in constants if var.rank)
        return None if turned else "a constant has both axes"
    if op.op_type in _POOL_OPS:
        return "its sums would be in a different order" if op.op_type == "avg_pool" and min(
            get_const_value(op.kernel_sizes)) > 1 else None
    if op.op_type == "concat":
        return "a constant is among the values" if any(is_const(var) for var in op.values) else None
    if op.op_type == "pad":
        pad = get_const_value(op.pad)
        beyond = pad is None or (get_const_value(op.mode) != "constant" and any(pad[:-4]))
        return "pad is not constant, or reaches beyond the last two axes" if beyond else None
    if op.op_type in _SLICE_OPS:
        fixed = all(var is None or get_const_value(var) is not None for name, var in op.inputs.items() if name != "x")
        return None if fixed and not any(get_const_value(op.inputs.get("squeeze_mask"), [])) else "it drops an axis"
    return None


def _find_conv_obstacle(op: Operation) -> str | None:
    if min(op.weight.shape[2:]) > 1:
        return "the kernel has both axes"
    if op.op_type == "conv_transpose" and op.bias is not None and not is_all_zero(op.bias):
        return "a conv_transpose with a bias stays in the form that was verified"
    if is_compressed(op.weight):
        return explain_axis_obstacle(op.weight) or find_reshape_obstacle(op.weight)
    return None if is_const(op.weight) else "the weight is computed"


def _find_boundary_obstacle(region: _Region) -> str:
    """Return which value would need a transpose, or ""."""
    members = set(region.ops)
    for var in region.inputs:
        if var.shape[2] == var.shape[3] == 1:
            continue
        source = var.op
        if source is None:
            return f"'{var.name}' is an input of the function: it would need a transpose"
        if source.enclosing_block is not region.ops[0].enclosing_block or not _can_enter(source):
            return f"'{var.name}' comes directly from {source.op_type}: it would need a transpose"
        if source.op_type == "transpose" and (var.consuming_blocks or not members.issuperset(get_consumers(var))):
            return f"'{var.name}' has other users: it would need a transpose"
    for op in region.ops:
        for var in op.outputs:
            if var.consuming_blocks and not var.shape[2] == var.shape[3] == 1:
                return f"'{var.name}' is returned: it would need a transpose"
    for reader in region.readers:
        reason = _find_exit_obstacle(reader, members, region.ops[0].enclosing_block)
        if reason:
            return reason
    return ""


def _can_enter(op: Operation) -> bool:
    """Return whether `op` can make its result with height and width swapped."""
    if op.op_type == "expand_dims":
        axes = get_const_value(op.axes, [])
        return op.x.rank == 3 and len(axes) == 1 and axes[0] % 4 in (2, 3)
    return op.op_type == "transpose" and get_const_value(op.perm) is not None


def _find_exit_obstacle(op: Operation, members: set[Operation], block: Block) -> str:
    """Return why `op`, which reads the region, cannot read it with height and width swapped, or ""."""
    read = [var for var in (op.inputs.get("x"), *(op.inputs.get("values") or ())) if var is not None]
    own = [var for var in read if var.op in members]
    if own and all(var.shape[2] == var.shape[3] == 1 for var in own):
        return ""
    words = f"{op.op_type} reads a value directly: it would need a transpose"
    if len(own) != 1 or op.enclosing_block is not block or op.inputs.get("x") is not own[0]:
        return words
    shape = own[0].shape
    if op.op_type == "squeeze":
        return "" if get_const_value(op.axes) is not None else words
    if op.op_type == "transpose":
        return "" if get_const_value(op.perm) is not None else words
    if op.op_type == "reshape":
        return "" if 1 in shape[2:] and get_const_value(op.shape) is not None else words
    if op.op_type in ("reduce_mean", "reduce_sum", "reduce_max", "reduce_min"):
        axes = [axis % 4 for axis in get_const_value(op.axes, range(4))]
        dropped = {2, 3} & set(axes)
        orderly = dropped and (len(dropped) == 1 or 1 in shape[2:])
        return "" if orderly and not get_const_value(op.keep_dims, True) else words
    return words


def _describe_gain(region: _Region, generations: Sequence[Generation]) -> str:
    """Describe what swapping brings on the target; "" if it brings nothing, or does harm."""
    refused = [sum(_count_refusals(op, turned, generations) for op in region.convs) for turned in (False, True)]
    if refused[1] < refused[0]:
        return f"{format_count(refused[0] - refused[1], 'kernel')} no longer too large for the target"
    if refused[1] > refused[0] or _shortens_rows(region):
        return ""
    chips = [chip for generation in generations for chip in find_chips(generation.chips[-1])]
    gains = {}
    for chip in chips:
        before, after = (_time_convs(region, chip, turned) for turned in (False, True))
        in_rows = [_time_convs(region, chip, turned, rows=True) for turned in (False, True)]
        if in_rows[1] > in_rows[0] * (1 + _MOST_LOSS):
            return ""
        if chip.measured.intersection(_KERNEL_TERMS) and before:
            gains[chip.name] = 1 - after / before
    best = max(gains, key=lambda name: gains[name], default="")
    if best and gains[best] >= _LEAST_GAIN:
        return f"its convs take {gains[best]:.0%} less on {best} (estimated)"
    padded = [_count_padded_bytes(region, turned) for turned in (False, True)]
    if padded[1] * 2 <= padded[0] and padded[0] - padded[1] >= _LEAST_PADDING:
        return f"padded buffers of {format_bytes(padded[1])} instead of {format_bytes(padded[0])}"
    return ""


def _count_refusals(op: Operation, turned: bool, generations: Sequence[Generation]) -> int:
    """Count the axes on which the kernel of `op` is too large for some of `generations`."""
    height, width = (int(extent) for extent in op.weight.shape[2:])
    if turned:
        height, width = width, height
    return sum(find_exceeded_limit(name, extent, tuple(generations)) is not None
               for name, extent in (("conv-kernel-height", height), ("conv-kernel-width", width)))


def _shortens_rows(region: _Region) -> bool:
    """Return whether rows would get shorter than the ANE computes at a time, and than they are."""
    shapes = [get_static_shape(op.outputs[0]) or (1, 1, 1, 1) for op in region.convs]
    return any(height < width and height < _ROW_WINDOW for *_, height, width in shapes) and not all(
        width < _ROW_WINDOW for *_, width in shapes)


def _time_convs(region: _Region, chip: Chip, turned: bool, rows: bool = False) -> float:
    """Compute the microseconds of the convs of `region` on `chip`.

    With `rows`, each row is charged in windows of 32 positions, as was seen on an M6 for maps narrower than that.
    """
    total = 0.0
    for op in region.convs:
        work = describe_work(op, Sizes())
        place = op.x if op.op_type == "conv_transpose" else op.outputs[0]
        width, extent = (int(op.weight.shape[2]), int(place.shape[2])) if turned else (
            int(op.weight.shape[3]), int(place.shape[3]))
        plain = all(step == 1 for name in ("strides", "dilations") for step in get_const_value(op.inputs[name]))
        work = replace(work, width=width, map_width=extent, winograd=(
            plain and width == 3 and work.groups == 1 and op.op_type == "conv"))
        if rows:
            padded = -(-extent // _ROW_WINDOW) * _ROW_WINDOW
            work = replace(work, positions=work.positions // extent * padded, map_width=padded,
                           macs=work.macs / extent * padded)
        total += compute_terms(work, chip).total_us
    return total


def _count_padded_bytes(region: _Region, turned: bool) -> int:
    total = 0
    for var in (*region.inputs, *(var for op in region.ops for var in op.outputs)):
        shape = get_static_shape(var) or ()
        total += compute_padded_bytes(tuple(shape[axis] for axis in _TURN) if turned else shape, get_itemsize(var))
    return total


def _build_turned_region(mb: RewriteBuilder, region: _Region) -> dict[Var, Var]:
    """Build the region with height and width swapped; returns what replaces the values that leave it."""
    turned: dict[Var, Var] = {}

    def turn_value(var: Var) -> Var:
        if var not in turned:
            turned[var] = _turn_input(mb, var)
        return turned[var]

    replaced: dict[Var, Var] = {}
    for op in region.ops:
        with mb.at(op):
            made = _BUILDERS[op.op_type](mb, op, turn_value)
        turned.update(zip(op.outputs, made if isinstance(made, (list, tuple)) else [made]))
        for var in op.outputs:
            if var.shape[2] == var.shape[3] == 1:  # the same either way
                replaced[var] = turned[var]
    for reader in region.readers:
        if reader.op_type in _EXITS and reader.inputs["x"] in turned and reader.inputs["x"] not in replaced:
            with mb.at(reader):
                replaced[reader.outputs[0]] = _EXITS[reader.op_type](mb, reader, turned[reader.inputs["x"]])
    return replaced


def _turn_input(mb: RewriteBuilder, var: Var) -> Var:
    """Return `var`, which enters the region, with height and width swapped."""
    if var.shape[2] == var.shape[3] == 1:
        return var
    source = var.op

    def build_transpose() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            if source.op_type == "expand_dims":
                return mb.expand_dims(x=source.x, axes=[_TURN[get_const_value(source.axes)[0] % 4]])
            perm = [axis % 4 for axis in get_const_value(source.perm)]
            turned = [perm[axis] for axis in _TURN]
            return source.x if turned == [0, 1, 2, 3] else mb.transpose(x=source.x, perm=turned)

    made: Var = mb.once(("turned", var), build_transpose)
    return made


_Turn = Callable[[Var], Var]


def _swap_groups(numbers: Iterable[Any], width: int = 1) -> list[Any]:
    """Swap the last two groups of `width` numbers."""
    held = list(numbers)
    return [*held[:-2 * width], *held[-width:], *held[-2 * width:-width]]


def _build_unary(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    return rebuild_op(mb, op, x=turn(op.x))


def _build_binary(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    def get_operand(var: Var) -> Var:
        if var.rank == 0:
            return var
        if not is_const(var):
            return turn(var)
        shape = (1, *var.shape) if var.rank == 1 else tuple(var.shape)
        return mb.reshaped(var, tuple(_swap_groups(shape)))

    return rebuild_op(mb, op, x=get_operand(op.x), y=get_operand(op.y))


def _build_spatial(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    """Build a conv or pool: its parameters of each spatial axis are swapped."""
    changes: dict[str, Any] = {name: _swap_groups(get_const_value(op.inputs[name])) for name in _SPATIAL_PARAMETERS
                               if op.inputs.get(name) is not None}
    if op.inputs.get("pad") is not None:
        changes["pad"] = _swap_groups(get_const_value(op.pad), 2)
    if op.op_type in _CONV_OPS:
        changes["weight"] = reshape_weight(mb, op.weight, tuple(_swap_groups(op.weight.shape)))
    if op.inputs.get("output_shape") is not None:
        changes["output_shape"] = _swap_groups(get_const_value(op.output_shape))
    return rebuild_op(mb, op, x=turn(op.x), **changes)


def _build_pad(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    pad: list[int] = get_const_value(op.pad)
    return rebuild_op(mb, op, x=turn(op.x), pad=_swap_groups([*[0] * (4 - len(pad)), *pad], 2))


def _build_slice(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    changes = {name: np.asarray(_swap_groups(np.asarray(var.val))) for name, var in op.inputs.items()
               if name != "x" and var is not None}
    return rebuild_op(mb, op, x=turn(op.x), **changes)


def _build_concat(mb: RewriteBuilder, op: Operation, turn: _Turn) -> Var:
    return rebuild_op(mb, op, values=[turn(var) for var in op.values], axis=_TURN[int(get_const_value(op.axis)) % 4])


def _build_squeeze(mb: RewriteBuilder, op: Operation, x: Var) -> Var:
    squeezed: Var = mb.squeeze(x=x, axes=sorted(_TURN[axis % 4] for axis in get_const_value(op.axes)))
    return squeezed


def _build_transpose(mb: RewriteBuilder, op: Operation, x: Var) -> Var:
    perm = [_TURN[axis % 4] for axis in get_const_value(op.perm)]
    turned: Var = x if perm == [0, 1, 2, 3] else mb.transpose(x=x, perm=perm)
    return turned


def _build_reshape(mb: RewriteBuilder, op: Operation, x: Var) -> Var:
    return rebuild_op(mb, op, x=x)


def _build_reduction(mb: RewriteBuilder, op: Operation, x: Var) -> Var:
    axes = get_const_value(op.axes, range(4))
    return rebuild_op(mb, op, x=x, axes=sorted(_TURN[axis % 4] for axis in axes))


_BUILDERS: dict[str, Callable[[RewriteBuilder, Operation, _Turn], Any]] = {
    **dict.fromkeys(UNARY_OPS, _build_unary),
    **dict.fromkeys(BINARY_OPS, _build_binary),
    **dict.fromkeys((*_CONV_OPS, *_POOL_OPS), _build_spatial),
    **dict.fromkeys(_SLICE_OPS, _build_slice),
    "pad": _build_pad,
    "concat": _build_concat,
}
_EXITS: dict[str, Callable[[RewriteBuilder, Operation, Var], Var]] = {
    **dict.fromkeys(("reduce_mean", "reduce_sum", "reduce_max", "reduce_min"), _build_reduction),
    "squeeze": _build_squeeze,
    "transpose": _build_transpose,
    "reshape": _build_reshape,
}


def _conv_op(*weight: int, **settings: Any) -> Callable[[Var], Var]:
    return lambda x: Builder.conv(x=x, weight=make_weight(*weight), **settings)


def _pad_op(*amounts: int) -> Callable[[Var], Var]:
    return lambda x: Builder.pad(x=x, pad=[0, 0, *amounts], constant_val=np.float16(0.5))


def _make_region_example(
    name: str, *steps: Callable[[Var], Var], at: int = 3, reason: str | None = None, within: float = float("inf")
) -> Example:
    """Make an example of `steps` on a value with a dummy axis at position `at`."""
    axis = -1 if at == 3 else 2

    def build_body(x: Var) -> Var:
        value = Builder.expand_dims(x=x, axes=[axis])
        for step in steps:
            value = step(value)
        built: Var = Builder.squeeze(x=value, axes=[axis], name="y")
        return built

    return make_example(name, build_body, reason=reason, within=within, x=(1, 4, 40))


def _build_between_transposes(x: Var) -> Var:
    """Build a conv 20 wide between transposes from and to channels last."""
    inside = Builder.conv(x=Builder.transpose(x=x, perm=[0, 3, 1, 2]), weight=make_weight(8, 8, 1, 20), pad_type="same")
    total: Var = Builder.transpose(x=Builder.relu(x=inside), perm=[0, 2, 3, 1], name="y")
    return total
