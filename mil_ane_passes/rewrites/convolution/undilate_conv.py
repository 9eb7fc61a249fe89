"""Run a dilated conv without dilation over the phases of its input."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_reshape_extents, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_2020_layer_list
from ...passes.examples import make_weight
from ...passes.targets import get_generations_between
from ...rules.convolution import DilatedConv
from ._conv_geometry import (
    ConvSizes,
    crop_ends,
    make_neutral_settings,
    pad_or_crop,
    pad_with_zeros,
    read_conv_sizes,
    resolve_conv_pads,
)
from ._examples import make_conv_example

_UP_TO_A13 = get_generations_between(last="a13")
"Generations that existed when the list was written; an M4 supports dilated convs."


class UndilateConv(Rewrite):
    """Compute a dilated conv without dilation on every d-th element, with the phases of the input as a batch.

    why     A list of 2020 includes dilated convs in the layers that leave the ANE. An M4 supports them, so this pass
            runs by name only.
    when    fp16; a dilated axis of static size and stride 1 (not of a 3-D conv), or one whose stride is a multiple of
            the dilation, which reads one phase only. Only for targets up to A13, or with always=true.
    exact   rounding: output u * d + r is the sum over k of w[k] * x[(u + k) * d + r], the undilated conv at u of phase
            r: the same products. The weight stays as it is, compressed or not.
    cost    for each axis a transpose between two reshapes before the conv, and another one after it; a strided slice if
            only one phase is read. The conv computes as much as before. A kernel with zeros between its taps, the
            alternative, would cost d times as much and multiply elements that were not read before.

    before
        %y: fp16[1, 4, 20] = conv(x=%x, weight=<fp16[4, 4, 3]>, pad_type=same, dilations=[2])
    after
        %0: fp16[1, 4, 24] = pad(x=%x, pad=[0, 0, 0, 0, 2, 2])
        %1: fp16[1, 4, 12, 2] = reshape(x=%0, shape=[1, 4, 12, 2])
        %2: fp16[1, 2, 4, 12] = transpose(x=%1, perm=[0, 3, 1, 2])
        %3: fp16[2, 4, 12] = reshape(x=%2, shape=[2, 4, 12])
        %4: fp16[2, 4, 10] = conv(x=%3, weight=<fp16[4, 4, 3]>)
        %5: fp16[1, 2, 4, 10] = reshape(x=%4, shape=[1, 2, 4, 10])
        %6: fp16[1, 4, 10, 2] = transpose(x=%5, perm=[0, 2, 3, 1])
        %y: fp16[1, 4, 20] = reshape(x=%6, shape=[1, 4, 20])
    """

    fixes = (DilatedConv,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "the rounding of the same sum of products"
    preset = "named"
    confidence = "low"
    roots = ("conv",)
    evidence = (
        cite_2020_layer_list(
            "dilated convolutions are among the layers known not to work; parts of the list are guesses"
        ),
        *collect_evidence("pool-kernel"),
        Community(
            "contradicts it: dilated convs leave the ANE only from a width of 16384",
            chip="M2",
            source="https://github.com/FluidInference/mobius/pull/53",
            date="2026-05-05",
        ),
    )

    always: bool = False
    "Rewrite dilated convs for any target."

    def match(self, op: Operation) -> Hit | Miss:
        if any(map(is_symbolic, op.weight.shape[2:])):
            return Miss(op, "the weight is of symbolic shape")
        sizes = read_conv_sizes(op, [])
        axes = [axis for axis, step in enumerate(sizes.dilations) if step > 1 and sizes.kernel[axis] > 1]
        if not axes:
            return Miss(op, "is not dilated", near=False)
        if not self.always and any(one not in _UP_TO_A13 for one in self.generations):
            return Miss(op, "supported on M4; choose A13 or older as the target, or always=true")
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        pads = resolve_conv_pads(op)
        if isinstance(pads, str):
            return Miss(op, pads)
        single = [axis for axis in axes if sizes.strides[axis] % sizes.dilations[axis] == 0]
        phased = [axis for axis in axes if axis not in single]
        if any(sizes.strides[axis] > 1 for axis in phased):
            return Miss(op, "a stride that is not a multiple of the dilation")
        if phased and op.x.rank == 5:
            return Miss(op, "3-D, and its phases would need rank 6")
        if any(is_symbolic(op.x.shape[2 + axis]) for axis in phased) or (
                phased and sum(map(is_symbolic, op.x.shape)) > 1):
            return Miss(op, "the dilated axis, or more than one axis, is of symbolic size")
        steps = ", ".join(str(sizes.dilations[axis]) for axis in axes)
        return Hit(op, note=f"dilation {steps}: {'phases as a batch' if phased else 'one phase is read'}",
                   single=single, phased=phased, sizes=read_conv_sizes(op, pads))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, sizes, phased = hit.op, hit.sizes, hit.phased
        wanted = {}
        for axis in phased:
            outputs = -(-sizes.counts[axis] // sizes.dilations[axis])  # of the longest phase
            wanted[axis] = sizes.pads[axis][0], (outputs + sizes.kernel[axis] - 1) * sizes.dilations[axis]
        x = pad_or_crop(mb, op.x, wanted)
        settings = make_neutral_settings(sizes, tuple(phased))
        if hit.single:
            x = _subsample_input(mb, x, sizes, hit.single)
            settings = make_neutral_settings(sizes, (*phased, *hit.single))
            settings["strides"] = [step // sizes.dilations[axis] if axis in hit.single else step
                                   for axis, step in enumerate(sizes.strides)]
        for axis in phased:
            x = _move_phases_to_batch(mb, x, 2 + axis, sizes.dilations[axis])
        y = rebuild_op(mb, op, x=x, **settings)
        for axis in reversed(phased):
            y = _restore_phases_from_batch(mb, y, 2 + axis, sizes.dilations[axis])
        ends = [0] * op.x.rank
        for axis in phased:
            if sizes.counts[axis] % sizes.dilations[axis]:  # the shorter phases were padded
                ends[2 + axis] = sizes.counts[axis]
        if any(ends):
            y = crop_ends(mb, y, ends)
        return y

    def examples(self) -> Iterable[Example]:
        always = {"always": True}
        example = partial(make_conv_example, options=always)
        signal = partial(example, x=(1, 2, 20), weight=(4, 2, 3))
        yield example("1-D", (1, 4, 20), (4, 4, 3), dilations=[2], pad_type="same")
        yield example("2-D", (2, 2, 9, 11), (4, 2, 3, 3), dilations=[2, 3], pad_type="same", bias=make_weight(4))
        yield example("one axis", (1, 4, 6, 15), (8, 2, 3, 2), dilations=[1, 4], groups=2, strides=[2, 1],
                      pad_type="custom", pad=[1, 0, 2, 1])
        yield signal("strided as dilated", dilations=[2], strides=[4], pad_type="custom", pad=[3, 2])
        yield signal("newer chips", dilations=[2], options=None,
                     reason="supported on M4; choose A13 or older as the target, or always=true")
        yield signal("strided", dilations=[2], strides=[3], reason="a stride that is not a multiple of the dilation")
        yield example("symbolic", (1, 2, None), (4, 2, 3), dilations=[2],
                      reason="the dilated axis, or more than one axis, is of symbolic size")
        yield signal("undilated", dilations=[1], reason="is not dilated")


def _subsample_input(mb: RewriteBuilder, x: Var, sizes: ConvSizes, axes: list[int]) -> Var:
    """Return every d-th element of the padded input, the only ones that are read."""
    before, behind = ([0, 0, *(pair[side] if axis in axes else 0 for axis, pair in enumerate(sizes.pads))]
                      for side in (0, 1))
    x = pad_with_zeros(mb, x, before, behind)
    steps = [1, 1, *(sizes.dilations[axis] if axis in axes else 1 for axis in range(x.rank - 2))]
    thin: Var = mb.slice_by_index(x=x, begin=[0] * x.rank, end=[0] * x.rank, stride=steps, end_mask=[True] * x.rank)
    return thin


def _move_phases_to_batch(mb: RewriteBuilder, x: Var, at: int, step: int) -> Var:
    """Reshape [N, C, ..., L, ...] to [N * step, C, ..., L / step, ...]: the phases of an axis become batch."""
    shape = get_reshape_extents(x.shape)
    x = mb.reshape(x=x, shape=[*shape[:at], shape[at] // step, step, *shape[at + 1:]])
    x = mb.transpose(x=x, perm=[0, at + 1, *(axis for axis in range(1, x.rank) if axis != at + 1)])
    joined: Var = mb.reshape(x=x, shape=[max(-1, shape[0] * step), *shape[1:at], shape[at] // step, *shape[at + 1:]])
    return joined


def _restore_phases_from_batch(mb: RewriteBuilder, x: Var, at: int, step: int) -> Var:
    """Move the phases from the batch back to their axis: the inverse of `_move_phases_to_batch`."""
    shape = get_reshape_extents(x.shape)
    x = mb.reshape(x=x, shape=[shape[0] // step if shape[0] > 0 else -1, step, *shape[1:]])
    x = mb.transpose(x=x, perm=[0, *range(2, at + 2), 1, *range(at + 2, x.rank)])
    joined: Var = mb.reshape(x=x, shape=[*get_reshape_extents(x.shape)[:at], shape[at] * step, *shape[at + 1:]])
    return joined
