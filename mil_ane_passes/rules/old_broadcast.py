"""Find broadcasts between two computed values, on chips before the M4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Block, Builder, Operation, Program

from ..ane.op_support import BEFORE_M4
from ..ir.query import get_type_info, is_compressed, is_const
from ..passes.contract import BlockRule, Community, Example, Hit, Miss
from ..passes.evidence import cite_2020_layer_list, cite_m4_study
from ..passes.examples import build_program, make_example, make_weight
from ..utils.text_format import format_count
from ._plan_rules import format_op_types

_BINARY_OPS = frozenset({"add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "floor_div"})


class OldBroadcast(BlockRule):
    """Two computed values of different shapes are combined: in the old model format that left the ANE.

    why     Logs and lists of 2020 say that a product of (C, H, W) with (C, 1, 1) leaves the ANE unless one side is a
            constant, and that the broadcastable layers do. That is the NeuralNetwork format. In an ML Program Core ML
            on an M4 accepts every form of broadcast; between the two, M1 to M3, nobody measured.
    when    add, sub, mul, real_div, maximum, minimum, pow and floor_div of two values that are computed and differ in
            shape, where chips before the M4 are looked at. One finding for each block. Nothing is concluded: the
            prediction takes the ANE to accept them.
    fix     None by default. Where a device shows that it falls off, make both sides equal with tile or concat; a tile
            of a constant grows to a constant of full size, and others saw their model slow down with tiles in it.
    """

    code, slug = "ANE234", "broadcast-before-m4"
    targets = BEFORE_M4
    level, confidence = "note", "low"
    advice = "Leave it unless a device shows that it falls off the ANE; then bring both sides to one shape first."
    evidence = (
        Community(
            "elementwise with channel broadcast supported only with constant vector or transplant input (a log "
            "of Core ML's; NeuralNetwork format)",
            date="2020-07-14",
            source="https://github.com/hollance/neural-engine/issues/2",
        ),
        cite_2020_layer_list(
            "broadcastable and ND layers, and certain broadcasts, are among the layers that leave the ANE; some of "
            "the list is guessed"
        ),
        Community(
            "MobileNetV3 takes 11 ms with the ANE allowed, MobileNetV2 3 ms: it seems to be the products with "
            "broadcast; plain multiply layers, which broadcast within limits, seem to work",
            source="https://github.com/apple/coremltools/issues/657",
            date="2020-04-15",
        ),
        cite_m4_study(
            "contradicts it for ML Programs: add, sub, mul, real_div, pow, floor_div, maximum, minimum, comparisons "
            "and select are accepted with every broadcast"
        ),
        Community(
            "a pass that takes tiles out, so that ops broadcast, gets them back on the ANE; the model with all "
            "units allowed became slower for it (24.6 to 31.8 ms)",
            chip="M4",
            source="https://github.com/kasper0406/stablehlo-coreml/issues/105",
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type in _BINARY_OPS and _is_computed_broadcast(op)]
        if found:
            yield Hit(
                found[0],
                covers=found,
                note=f"{format_count(len(found), 'broadcast')} between computed values ({format_op_types(found)}): "
                     f"accepted on "
                "M4, refused in the NeuralNetwork format of 2020, not measured in between",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("channels", lambda: _build_mul((1, 4, 8, 8), (1, 4, 1, 1)))
        yield Example("rank", lambda: _build_mul((2, 3, 4), (4,)))
        yield Example("one shape", lambda: _build_mul((1, 4, 8, 8), (1, 4, 8, 8)), reason="")
        yield make_example(
            "a constant", lambda x: Builder.mul(x=x, y=make_weight(1, 4, 1, 1), name="y"), reason="", x=(1, 4, 8, 8)
        )


def _is_computed_broadcast(op: Operation) -> bool:
    if any(is_const(var) or is_compressed(var) for var in (op.x, op.y)):
        return False
    one, other = get_type_info(op.x).shape, get_type_info(op.y).shape
    return bool(one is not None and other is not None and one and other and one != other)


def _build_mul(one: tuple[int, ...], other: tuple[int, ...]) -> Program:
    return build_program(lambda x, z: Builder.mul(x=x, y=z, name="y"), x=one, z=other)
