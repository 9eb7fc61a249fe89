"""Find models whose linear layers run on sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import is_compressed, is_const, is_opaque
from ..passes.contract import BlockRule, Community, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program, make_weight
from ..utils.text_format import format_count


class SequenceLinears(BlockRule):
    """Linear layers on (batch, sequence, channels) are the form that Apple advises against on the ANE.

    why     Apple's transformers for the ANE write every linear layer as a 1x1 conv on (B, C, 1, S), so that the longer
            axis is last and no transposes are needed; its rules for Core AI say the same. Others measured it both ways:
            an audio encoder became 1.5 times faster with that, other models loaded faster and ran no faster, and Core
            ML on an M4 accepts linear and matmul as they are. So nothing leaves the ANE for it.
    when    `least` and more linears, or matmuls with a stored operand, on values of rank 3 whose sequence is longer
            than 1. One finding for each block.
    fix     In the model: (B, C, 1, S) throughout and Conv2d(1x1) for Linear, the weight with two more axes (rounded
            otherwise). Turning single layers only adds transposes. Measure both.
    """

    code, slug = "ANE519", "linears-on-sequences"
    level, confidence = "note", "medium"
    advice = "Try the layout (B, C, 1, S) with 1x1 convs for the linear layers, and measure both."
    evidence = (
        Vendor("linear layers become 1x1 convs on (B, C, 1, S), the data format that suits the ANE", date="2022-06",
               source="https://machinelearning.apple.com/research/neural-engine-transformers"),
        cite_apple_authoring_rules("the same for Core AI, where a linear layer may fall back"),
        cite_m4_study("contradicts it: linear and matmul are accepted"),
        Community("an encoder with 1x1 convs for linears, (B, C, 1, S) and attention head by head runs in 7.60 ms, "
                  "before in 11.61 ms", source="https://github.com/FluidInference/FluidAudio/pull/410", chip="M4 Max",
                  date="2026-03-22"),
    )
    least: int = 4
    "Fewest such layers that are reported; the number is ours."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type in ("linear", "matmul") and _is_on_sequence(op)]
        if len(found) >= self.least:
            shape = "x".join("?" if is_symbolic(extent) else str(extent) for extent in found[0].x.shape)
            yield Hit(found[0], covers=found,
                      note=f"{format_count(len(found), 'linear layer')} on sequences, the first on {shape}")

    def examples(self) -> Iterable[Example]:
        yield Example("a stack", lambda: _build_linears(4, (1, 16, 8)))
        yield Example("a few", lambda: _build_linears(3, (1, 16, 8)), reason="")
        yield Example("no sequence", lambda: _build_linears(4, (16, 8)), reason="")


def _is_on_sequence(op: Operation) -> bool:
    if is_opaque(op) or op.x.rank != 3:
        return False
    stored = op.op_type == "linear" or is_const(op.y) or is_compressed(op.y)
    return bool(stored and (is_symbolic(op.x.shape[1]) or op.x.shape[1] > 1))


def _build_linears(count: int, shape: tuple[int, ...]) -> Program:
    def body(x: Var) -> Var:
        for number in range(count):
            x = Builder.linear(x=x, weight=make_weight(8, 8), name=f"y{number}")
        return x

    return build_program(body, x=shape)
