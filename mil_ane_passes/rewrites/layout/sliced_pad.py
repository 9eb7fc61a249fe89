"""Build reflecting pads from slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...passes.examples import make_example
from ...passes.targets import Gate
from ...rules.unsupported_ops import TextureOps
from .._target_gate import find_length_obstacle, skip_if_supported
from ._pad_amounts import read_pad_amounts


class SlicedPad(Rewrite):
    """Replace a reflecting pad by a concat with reversed edges for chips without it.

    why     When the ANE's compiler is called without Core ML, reflecting pads are native from M2 on and emulated on M1.
            Through Core ML only an M4 was measured, which supports them: targets that include M4 are not changed.
    when    pad with mode reflect and constant amounts, in fp16, along axes of static length, up to the limits of all
            chips of the target. All chips of the target (with `always`: one of them) are M1 or older. Replicating pads
            are not reported as unsupported. PyTorch's decomposed export contains a gather instead.
    exact   bitwise: elements are moved, none is computed with.
    cost    a concat of the entire value per padded axis, and slices and reverses of the edges.

    before
        %y: fp16[1, 2, 6] = pad(x=%x, pad=[1, 1], mode=reflect)
    after
        %0: fp16[1, 2, 1] = slice_by_index(x=%x, begin=[0, 0, 1], end=[0, 0, 2], end_mask=[True, True, False])
        %1: fp16[1, 2, 1] = slice_by_index(x=%x, begin=[0, 0, 2], end=[0, 0, 3], end_mask=[True, True, False])
        %y: fp16[1, 2, 6] = concat(values=(%0, %x, %1), axis=2)
    """

    fixes = (TextureOps,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("pad",)
    targets = Gate(last="m1")
    evidence = (
        cite_m4_study("contradicts it for M4: reflecting and replicating pads are accepted"),
        cite_ane_compiler("reverse is native on M1", chip="M1"),
    )

    always: bool = False
    "Rewrite even if a chip of the target supports such pads."

    def match(self, op: Operation) -> Hit | Miss:
        mode = get_const_value(op.mode, "constant")
        if mode != "reflect":
            return Miss(op, f"pads with mode {mode}", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        supported = skip_if_supported(self, op, self.always)
        if supported is not None:
            return supported
        padded = read_pad_amounts(op)
        if padded is None:
            return Miss(op, "how much is padded is dynamic")
        if any(is_symbolic(op.x.shape[axis]) for axis in padded):
            return Miss(op, "the length of an axis is dynamic")
        reason = find_length_obstacle(op.outputs[0].shape[-2:], self.generations)
        if reason:
            return Miss(op, reason)
        return Hit(op, note=f"reflects along {len(padded)} axes: slices, reversed and joined", padded=padded)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x: Var = hit.op.x
        for axis, (before, behind) in hit.padded.items():
            end = int(x.shape[axis]) - 1
            front = _reverse_edge(mb, x, axis, 1, before)
            back = _reverse_edge(mb, x, axis, end - behind, behind)
            x = mb.concat(values=[*front, x, *back], axis=axis)
        return x

    def examples(self) -> Iterable[Example]:
        always = {"always": True}
        yield _make_pad_example("one row", (1, 2, 4), [1, 1], options=always)
        yield _make_pad_example("an image", (1, 2, 5, 6), [2, 1, 3, 3], options=always)
        yield _make_pad_example("one side, for iOS15", (2, 5, 4), [2, 0, 0, 0], opset=ct.target.iOS15, options=always)
        yield _make_pad_example("nothing", (2, 5), [0, 0], options=always)
        yield _make_pad_example("taken", (2, 5), [1, 1],
                                reason="supported on M2, M3, M4, A18, M5 and M6; choose an older target, or "
                                       "always=true")
        yield _make_pad_example("flexible", (2, None), [1, 1], options=always,
                                reason="the length of an axis is dynamic")
        yield _make_pad_example("long", (1, 16380), [4, 4], options=always, reason=(
            "a value of length 16388 would be created: > 16384 (M1, M2 and M3; assumed on A12 and A13)"))
        yield _make_pad_example("replicate", (2, 5), [1, 1], mode="replicate", options=always,
                                reason="pads with mode replicate")
        yield _make_pad_example("fp32", (2, 5), [1, 1], dtype=types.fp32, options=always,
                                reason=FP32_UNSUPPORTED_REASON)


def _reverse_edge(mb: RewriteBuilder, x: Var, axis: int, begin: int, count: int) -> list[Var]:
    """Return `count` elements of `x` along `axis` from `begin` on, reversed, in a list; [] for a count of 0."""
    if not count:
        return []
    at = [number == axis for number in range(x.rank)]
    edge = mb.slice_by_index(x=x, begin=[begin * here for here in at], end=[(begin + count) * here for here in at],
                             end_mask=[not here for here in at])
    return [edge if count == 1 else mb.reverse(x=edge, axes=[axis])]


def _make_pad_example(
    name: str, x: tuple[int | None, ...], pad: list[int], *, mode: str = "reflect", **expected: Any
) -> Example:
    return make_example(name, lambda x: Builder.pad(x=x, pad=pad, mode=mode, name="y"), x=x, **expected)
