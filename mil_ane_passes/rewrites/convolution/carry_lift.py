"""Keep an entire 1-D region in the layout of its lifted ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Program, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_itemsize, get_static_shape
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import build_program, make_weight
from ...passes.layout import compute_padded_bytes, format_bytes
from ...utils.text_format import format_count
from ._conv_1d_lifting import HEIGHT, WIDTH, insert_dummy_axis, remove_dummy_axis
from ._dummy_axis_ops import build_carried_op
from ._lift_regions import LiftRegion, is_dummy_axis_expansion, is_needed_without_axis, iterate_lift_regions


class CarryLift(BlockRewrite):
    """Carry the ops between lifted ops with the dummy axis, so that a region is expanded once and squeezed once.

    why     Each lifted op expands its input and squeezes its output. Where only element-wise ops stand between two of
            them, these layout ops undo each other: the ops between do the same on the longer shape.
    when    Between lifted ops: element-wise ops, activations, binary ops with a const or with another lifted value
            (residual adds), batch_norm, pad and slices with constant parameters, concat, split, and 1-D convs that were
            not lifted themselves; all of rank 3. One operand that is not lifted (a mask) gets an expand_dims of its
            own. Only where the region ends up with fewer layout ops than it had.
    exact   bitwise: each op works element by element, or on the other axes only.
    cost    a dummy axis that is the last makes rows of one element, which the 64-byte row rule pads 32 times at fp16:
            the values in between get that large, too. One on axis 2 costs nothing.

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
    """Bytes that the padded rows of one region may add. A region carried with a last axis of one takes 32 times the
    bytes, and the gains of other rewrites would hide that from the prediction."""

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for at in (3, 2):
            for region in iterate_lift_regions(block, at):
                first, ops = region.ops[0], format_count(len(region.ops), "op")
                added = _count_padding_bytes(region)
                if region.after < region.before and added > self.most_padded:
                    yield Miss(
                        first,
                        f"{ops} carried with a last axis of one would add {format_bytes(added)} of padded "
                        f"rows, more than {format_bytes(self.most_padded)} (most_padded)",
                    )
                elif region.after < region.before:
                    yield Hit(first, region=region, note=f"{ops} carried with the dummy axis: {region.after} layout "
                                                         f"ops instead of {region.before}")
                else:
                    yield Miss(first, f"carrying {ops} would leave {region.after} layout ops where there are "
                                      f"{region.before}", near=region.after > region.before)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        region: LiftRegion = hit.region
        axis = HEIGHT if region.at == 3 else WIDTH
        twins: dict[Var, Var] = {}

        def wide(var: Var) -> Var:
            if var not in twins:
                twins[var] = insert_dummy_axis(mb, var, axis)
            return twins[var]

        replaced: dict[Var, Var] = {}
        members = set(region.ops)
        for op in region.ops:
            with mb.at(op):
                twins.update(zip(op.outputs, build_carried_op(mb, op, wide, region.at)))
                for var in op.outputs:
                    if is_needed_without_axis(var, members, mb.block, region.at):
                        replaced[var] = remove_dummy_axis(mb, twins[var], axis)
        for var in region.values:
            for reader in get_consumers(var):
                ours = reader is twins[var].op if var in twins else False
                if is_dummy_axis_expansion(reader, mb.block, region.at) and not ours:
                    replaced[reader.outputs[0]] = wide(var)
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("activation", lambda: _build_chain(lambda v: Builder.leaky_relu(x=v, alpha=np.float16(0.125))))
        yield Example("scale per channel", lambda: _build_chain(lambda v: Builder.mul(x=v, y=make_weight(1, 4, 1))))
        yield Example("scale along the length", lambda: _build_chain(lambda v: Builder.mul(x=make_weight(8), y=v)))
        yield Example("scalar", lambda: _build_chain(lambda v: Builder.add(x=v, y=np.float16(0.5))))
        yield Example("residual", lambda: _build_chain(lambda v: Builder.add(x=Builder.relu(x=v), y=v)))
        yield Example("replicate pad and slice", lambda: _build_chain(lambda v: Builder.slice_by_index(
            x=Builder.pad(x=v, pad=[2, 1], mode="replicate", constant_val=np.float16(0)),
            begin=[0, 0, 1], end=[0, 0, -2], begin_mask=[True, True, False], end_mask=[True, True, False])))
        yield Example("constant pad", lambda: _build_chain(lambda v: Builder.pad(
            x=v, pad=[0, 0, 1, 1, 2, 0], constant_val=np.float16(0.5))))
        yield Example("concat", lambda: _build_chain(lambda v: Builder.concat(values=[v, Builder.relu(x=v)], axis=-2)))
        yield Example("gated split", lambda: _build_chain(lambda v: Builder.mul(**dict(zip(
            "xy", Builder.split(x=v, num_splits=2, axis=1))))))
        yield Example("two ways in", _build_fork)
        yield Example("conv between", lambda: _build_chain(lambda v: Builder.conv(x=v, weight=make_weight(4, 4, 3))))
        yield Example(
            "large",
            lambda: _build_chain(lambda v: Builder.leaky_relu(x=v, alpha=np.float16(0.125)), length=8000),
            reason="1 op carried with a last axis of one would add 1.98 MB of padded rows, more than 1.05 MB "
            "(most_padded)",
        )
        yield Example("on axis 2", lambda: _build_chain(lambda v: Builder.mul(x=v, y=make_weight(4, 1)), axis=2))
        yield Example("softmax is no bridge", lambda: _build_chain(lambda v: Builder.softmax(x=v, axis=-1)),
                      reason="")
        yield Example("every value is returned", _build_taps,
                      reason="carrying 3 ops would leave 3 layout ops where there are 2")


def _count_padding_bytes(region: LiftRegion) -> int:
    """Count the bytes of padded rows that carrying adds, as outputs get the dummy axis as their last one."""
    made = [var for op in region.ops for var in op.outputs] if region.at == 3 else []
    sizes = [(shape, get_itemsize(var)) for var in made if (shape := get_static_shape(var)) is not None]
    return sum(compute_padded_bytes((*shape, 1), size) - compute_padded_bytes(shape, size) for shape, size in sizes)


def _build_chain(between: object, axis: int = -1, length: int = 8) -> Program:
    assert callable(between)
    shape = (1, 4, length, 1) if axis == -1 else (1, 4, 1, length)

    def body(x: Var) -> Var:
        middle = between(Builder.squeeze(x=Builder.relu(x=x), axes=[axis]))
        return Builder.relu(x=Builder.expand_dims(x=middle, axes=[axis]), name="y")

    return build_program(body, x=shape)


def _build_fork() -> Program:
    """Build two ops on one input, each expanded afterwards: one expand_dims before both is enough."""

    def body(x: Var) -> Var:
        ends = [Builder.expand_dims(x=op(x=x), axes=[-1]) for op in (Builder.relu, Builder.sigmoid)]
        return Builder.add(x=ends[0], y=ends[1], name="y")

    return build_program(body, x=(1, 4, 8))


def _build_taps() -> Program:
    """Build a chain of three values, each of which is an output of the function as well."""

    def body(x: Var) -> list[Var]:
        value = Builder.squeeze(x=Builder.relu(x=x), axes=[-1])
        taps = []
        for number in range(3):
            value = Builder.sigmoid(x=value, name=f"tap{number}")
            taps.append(value)
        return [*taps, Builder.relu(x=Builder.expand_dims(x=value, axes=[-1]), name="y")]

    return build_program(body, x=(1, 4, 8, 1))
