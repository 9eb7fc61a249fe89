"""Pad last axes to a multiple of 64, once where a region begins, and slice once where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.layout import format_bytes
from ...utils.text_format import format_count
from ._padded_regions import PaddedRegion, iterate_padded_regions
from ._row_padding import RowPadding
from ._row_padding_examples import iterate_row_padding_examples


class PadLastAxis(BlockRewrite):
    """Run whole regions on a last axis that is a multiple of 64.

    why     One source advises to pad the last axis to a multiple of 64, as "suggestions on bigger neural nets"; nobody
            has published a gain. Apple and a driver's author have rows aligned to 64 bytes, 32 numbers of fp16, whether
            the model pads or not: the memory of a buffer never falls by padding, and grows where 64 numbers take
            more such pieces than the row did (600 -> 640). What has documented gain is a longer axis in the last place.
    when    By name. fp16 rows of fixed extent above 1, where no row takes more bytes than before (`min_gain`), and
            regions of at least `min_ops` ops for each pad and slice. Carried are ops that work element by element or on
            other axes, matmul and linear (also over the last axis, where one padding is zero and the other known to
            be finite), and sums over rows that end in zeros. All else ends a region: a softmax, norm or mean of the
            last axis would need its padding masked, which is a pass over the data as the slice is, and with -inf,
            which the ANE treats as an ordinary number in a softmax.
    exact   rounding, and bitwise where no sum is formed: what stands in the padding never mixes with the rest. A sum
            gets exact zeros as further terms and may be taken in another order.
    cost    a pass over the data for each pad and slice; bytes of new constants up to `max_bytes` for one op.

    before
        %0: fp16[2, 3, 50] = add(x=%x, y=0.5)
        %1: fp16[2, 3, 50] = tanh(x=%0)
        %2: fp16[2, 3, 50] = mul(x=%1, y=%0)
        %y: fp16[2, 3, 50] = relu(x=%2)
    after
        %0: fp16[2, 3, 64] = pad(x=%x, pad=[0, 14])
        %1: fp16[2, 3, 64] = add(x=%0, y=0.5)
        %2: fp16[2, 3, 64] = tanh(x=%1)
        %3: fp16[2, 3, 64] = mul(x=%2, y=%1)
        %4: fp16[2, 3, 64] = relu(x=%3)
        %y: fp16[2, 3, 50] = slice_by_size(x=%4, begin=[0, 0, 0], size=[-1, -1, 50])
    """

    code, slug = "ANE104", "last-axis-not-multiple-of-64"
    stage = "layout"
    exactness = Exactness.ROUNDING
    bound = ("the roundings of one sum with zeros as further terms, taken in another order; at fp16 the error against "
             "double precision was the same before and after (2.6e-4 for a perceptron, 1.7e-3 for attention)")
    preset = "named"
    evidence = (
        Community(
            "pad the last axis to a multiple of 64: not a requirement, suggestions on bigger nets",
            source="coreml102: Model Surgery Tips (an author of eiln/ane)",
            chip="M1",
        ),
        cite_apple_authoring_rules(
            "the last axis of inputs and outputs is aligned to 64 bytes; values between may tolerate smaller "
            "widths (against it: 32 numbers of fp16, and the padding is there anyway)"
        ),
        Community(
            "row and plane strides are multiples of 64 bytes (a driver for Linux)",
            source="eiln/ane libane/ane.c",
            chip="M1",
        ),
        cite_apple_authoring_rules("the ANE does not handle minus infinity in softmax correctly"),
    )

    multiple: int = 64
    "Last axes are padded to a multiple of this number."
    unit: Literal["elements", "bytes"] = "elements"
    "Unit of `multiple`: 64 elements of fp16 are 128 bytes."
    min_gain: float = 0.0
    "Smallest share of a row's bytes that is saved. It is never above 0; -0.1 lets rows take a tenth more."
    min_ops: int = 2
    "Fewest ops of a region for each pad and each slice at its ends."
    max_bytes: int = 1 << 20
    "The most bytes of padded constants for one op."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        rows = RowPadding(self.multiple, self.unit, self.min_gain)
        heavy: dict[Operation, int] = {}
        for region in iterate_padded_regions(block, rows, self.max_bytes, heavy):
            first, ops = next(iter(region.steps)), len(region.steps)
            if not region.sliced_values and not any(not step.padded_outputs for step in region.steps.values()):
                yield Miss(first, "nothing reads what the region makes", near=False)
            elif ops < self.min_ops * region.moves:
                yield Miss(first, f"{format_count(ops, 'op')} on padded rows for {len(region.padded_values)} pads and "
                                  f"{len(region.sliced_values)} slices, fewer than min_ops {self.min_ops} for each")
            else:
                exact = all(step.exact for step in region.steps.values())
                yield Hit(first, region=region, rows=rows, exactness=Exactness.BITWISE if exact else None,
                          note=_describe_region(region, rows))
        for op, count in heavy.items():
            yield Miss(
                op, f"its constants would take {format_bytes(count)} padded, more than max_bytes {self.max_bytes}"
            )
        for width, op in rows.refused.items():
            yield Miss(op, rows.reason(width))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        region: PaddedRegion = hit.region
        twins: dict[Var, Var] = {}
        replaced: dict[Var, Var] = {}

        def wide(var: Var) -> Var:
            if var not in twins:
                missing = (hit.rows.extent(var) or 0) - int(var.shape[-1])
                twins[var] = mb.pad(x=var, pad=[0, missing], mode="constant", constant_val=np.float16(0))
            return twins[var]

        for op, step in region.steps.items():
            with mb.at(op):
                built = step.build(mb, wide)
                made = list(built) if isinstance(built, (list, tuple)) else [built]
                _rebind_to_slices(made[0].op, replaced)
                if not step.padded_outputs:
                    replaced.update(zip(op.outputs, made))
                    continue
                twins.update(zip(op.outputs, made))
                replaced.update(
                    (var, _remove_padding(mb, twins[var], var))
                    for var in step.padded_outputs
                    if var in region.sliced_values
                )
        return replaced

    def examples(self) -> Iterable[Example]:
        return iterate_row_padding_examples()


def _rebind_to_slices(op: Operation, slices: dict[Var, Var]) -> None:
    """Let an op read the slices of values that its region computes padded and it reads without padding."""
    found = {name: slices[var] for name, var in op.inputs.items() if isinstance(var, Var) and var in slices}
    if found:
        op.set_inputs(**found)


def _remove_padding(mb: RewriteBuilder, wide: Var, var: Var) -> Var:
    """Slice padded `wide` to the last axis of `var`; all other axes are unchanged."""
    cut: Var = mb.slice_by_size(x=wide, begin=[0] * var.rank, size=[-1] * (var.rank - 1) + [int(var.shape[-1])])
    return cut


def _describe_region(region: PaddedRegion, rows: RowPadding) -> str:
    widths = dict.fromkeys((int(var.shape[-1]), rows.extent(var)) for var in region.values)
    each = ", ".join(f"{width} -> {wide}" for width, wide in widths)
    return (f"{len(region.steps)} ops with a last axis of {each}, by {len(region.padded_values)} pads and "
            f"{len(region.sliced_values)} slices")
