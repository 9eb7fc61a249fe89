"""Find large softmaxes over another axis than the channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Block, Builder, Operation, Program

from ..ir.query import get_const_value, get_type_info, is_opaque
from ..passes.contract import BlockRule, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program
from ..utils.text_format import format_count


class SoftmaxAxis(BlockRule):
    """A large softmax runs over height or width, which keeps the ANE's compiler from splitting the work there.

    why     Apple's rules for the Neural Engine: a softmax over a spatial axis of a large tensor limits how the tensor
            can be split; over the channels it does not. Any axis is accepted on an M4, so this is about speed alone.
            Nobody published a time.
    when    softmax of a value of rank 4 over axis 2 or 3, of `least` elements and more. One finding for each block.
    fix     Write attention in the layout (1, C, 1, S), keys on the channel axis, so that the softmax is over axis 1, as
            Apple's transformers do. A transpose there and back only pays where it can be cancelled.
    """

    code, slug = "ANE518", "softmax-axis"
    level, confidence = "note", "high"
    advice = "Lay attention out so that the softmax is over axis 1, the channels."
    evidence = (
        cite_apple_authoring_rules(
            "softmax over a spatial axis of a large tensor limits spatial splitting: put the axis on the channels"
        ),
        Vendor(
            "attention with the keys on axis 1, softmax over it",
            date="2022",
            source="apple/ml-ane-transformers ane_transformers/reference/multihead_attention.py",
        ),
        cite_m4_study("softmax over any axis is accepted"),
    )
    least: int = 1 << 20
    "Elements from which a tensor counts as large; the number is ours (2 MiB in fp16)."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type == "softmax" and not is_opaque(op) and self._large(op)]
        if found:
            largest = max(found, key=lambda op: prod(get_type_info(op.x).shape or ()))
            shape = "x".join(map(str, largest.x.shape))
            yield Hit(found[0], covers=found, note=f"{format_count(len(found), 'op')} over height or width, the "
                                                   f"largest of {shape}")

    def _large(self, op: Operation) -> bool:
        shape, axis = get_type_info(op.x).shape, get_const_value(op.axis, -1)
        return shape is not None and len(shape) == 4 and axis % 4 > 1 and prod(shape) >= self.least

    def examples(self) -> Iterable[Example]:
        yield Example("heads", lambda: _build_softmax((1, 8, 512, 512), -1))
        yield Example("channels", lambda: _build_softmax((1, 512, 8, 512), 1), reason="")
        yield Example("small", lambda: _build_softmax((1, 8, 16, 16), -1), reason="")


def _build_softmax(shape: tuple[int, ...], axis: int) -> Program:
    return build_program(lambda x: Builder.softmax(x=x, axis=axis, name="y"), x=shape)
