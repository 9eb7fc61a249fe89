"""Find inputs of a size with which the ANE's compiler failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Block, Builder, Function, Program, types

from ..ir.query import get_consumers, get_type_info
from ..passes.contract import BlockRule, Community, Example, Hit, Miss
from ..passes.examples import build_program

_MIN_FAILING_PLANE = 5568 * 5568
"Height times width of the one input that was reported to fail."


class LargeInput(BlockRule):
    """An input has a plane as large as one with which a model failed to compile for the ANE.

    why     One report: a model whose input is 1x3x5568x5568 fails to load on an iPhone, the ANE's compiler giving up.
            Whether it was the input's size, what the model did with it, or memory, nobody found out. A compiler that
            gives up can leave the whole model on the CPU, or end the process at the first prediction.
    when    An input of rank 4 whose height times width is 5568 * 5568 and more.
    fix     Cut the image into tiles that overlap by what the kernels reach, and run the model on each.
    """

    code, slug = "ANE523", "large-input"
    level, confidence = "note", "low"
    advice = "Run the model on overlapping tiles of the image."
    evidence = (
        Community("with an input of 1x3x5568x5568 ANECCompile fails when the model is loaded",
                  source="https://github.com/apple/coremltools/issues/2247", date="2024-06-19"),
        Community("after a failure of ANECCompile that loading does not report, the first prediction with CPU_AND_NE "
                  "ends the process", source="https://github.com/apple/coremltools/issues/2758", date="2026-07-14"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        first = next((op for op in block.operations if op.op_type != "const"), None)
        for name, var in block.inputs.items():
            shape = () if types.is_state(var.sym_type) else get_type_info(var).shape or ()
            if first is not None and len(shape) == 4 and prod(shape[2:]) >= _MIN_FAILING_PLANE:
                yield Hit(next(iter(get_consumers(var)), first), note=f"input '{name}' is {'x'.join(map(str, shape))}; "
                                                                  "1x3x5568x5568 failed to compile")

    def examples(self) -> Iterable[Example]:
        yield Example("as reported", lambda: _build_max_pool(5568))
        yield Example("smaller", lambda: _build_max_pool(5567), reason="")


def _build_max_pool(side: int) -> Program:
    return build_program(
        lambda x: Builder.max_pool(x=x, kernel_sizes=[8, 8], strides=[8, 8], pad_type="valid", name="y"),
        x=(1, 3, side, side),
    )
