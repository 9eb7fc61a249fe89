"""Find reshapes and transposes that rewrite entire tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var

from ..ir.query import get_const_value, get_itemsize, get_type_info, is_opaque
from ..passes.contract import BlockRule, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_apple_authoring_rules
from ..passes.examples import build_program
from ..passes.layout import format_bytes
from ..utils.text_format import format_count
from ._plan_rules import format_op_types


class MovedRows(BlockRule):
    """Reshapes and transposes that touch the last axis copy all their data.

    why     Apple's rules for the Neural Engine: what changes the last axis rewrites the whole tensor, since rows lie
            one behind the other; what leaves it alone may cost nothing. Apple's transformers are laid out so that
            hardly any is needed. The bytes are computed from the shapes, nobody published times.
    when    reshape and transpose whose last axis is another or of another length behind it, which together move
            `least` bytes and more. One finding for each block.
    fix     Stay in one layout, (B, C, 1, S), from input to output; move what cannot go to the model's border; let pairs
            cancel (coremltools' reduce_transposes, ane::cancel_lift_pairs for squeeze and expand_dims).
    """

    code, slug = "ANE520", "rewritten-rows"
    level, confidence = "note", "high"
    advice = "Stay in one layout, (B, C, 1, S), so that reshapes and transposes of the last axis cancel."
    evidence = (
        cite_apple_authoring_rules(
            "a reshape or transpose that touches the last axis rewrites the data: keep them few"
        ),
        Vendor(
            "reshapes and transposes are likely to cause copies: choose an einsum that needs none",
            date="2022-06",
            source="https://machinelearning.apple.com/research/neural-engine-transformers",
        ),
    )
    least: int = 8 << 20
    "Bytes that such ops of a block move together, below which none is reported; the number is ours."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        sizes = {op: size for op in block.operations
                 if op.op_type in ("reshape", "transpose") and not is_opaque(op) and (size := _count_moved_bytes(op))}
        if sizes and sum(sizes.values()) >= self.least:
            found = sorted(sizes, key=lambda op: -sizes[op])
            yield Hit(found[0], covers=found,
                      note=f"{format_count(len(found), 'op')} ({format_op_types(found)}) change the last axis and move "
                           f"{format_bytes(sum(sizes.values()))}, the largest {format_bytes(sizes[found[0]])}")

    def examples(self) -> Iterable[Example]:
        yield Example("channels last", lambda: _build_transpose((0, 2, 3, 1), 512))
        yield Example("other axes", lambda: _build_transpose((0, 2, 1, 3), 512), reason="")
        yield Example("small", lambda: _build_transpose((0, 2, 3, 1), 8), reason="")


def _count_moved_bytes(op: Operation) -> int:
    """Count the bytes of the output if the last axis changes; 0 otherwise, and for unknown shapes."""
    before, after = get_type_info(op.x).shape, get_type_info(op.outputs[0]).shape
    if not before or not after:
        return 0
    if op.op_type == "reshape":
        stays = before[-1] == after[-1]
    else:
        perm = get_const_value(op.perm)
        stays = perm is None or perm[-1] % len(before) == len(before) - 1
    return 0 if stays else prod(after) * get_itemsize(op.outputs[0])


def _build_transpose(perm: tuple[int, ...], side: int) -> Program:
    def body(x: Var) -> Var:
        result: Var = Builder.transpose(x=x, perm=list(perm), name="y")
        return result

    return build_program(body, x=(1, 64, side, side))
