"""Find tensors with a dimension that is too long for the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from coremltools.converters.mil.mil import Block, Builder, Program, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane.limits import ExceededLimit, collect_evidence, find_exceeded_limit, find_limit
from ..ir.large_values import Shape, group_ops_by_large_values
from ..passes.contract import BlockRule, Example, Hit, Miss
from ..passes.evidence import cite_m1_gpt_notes
from ..passes.examples import build_program
from ..passes.targets import Generation
from ._sizes import select_generations

_M4_RANGE, _PRE_M4_RANGE = (f"N[1-65536]D[1-{most}]C[1-65536]H[1-{most}]W[1-{most}]" for most in (65536, 16384))


class DimensionLimit(BlockRule):
    """A tensor is longer in one dimension than the ANE holds.

    why     Core ML says on an M4 that no dimension may exceed 65536. On older chips it names 16384 for width, height
            and depth; M1, M2 and M3 were seen to end there.
    when    A value that is read or made, with a dimension over the limit of the strictest generation looked at. Ops
            that hand such values to one another are one finding. Which axis of a value of rank below 4 is the width
            is known for none but the last, so the others are judged as channels, and not known in between.
    fix     Elementwise ops: reshape [.., W] to [.., W / k, k] first (the same bits). A conv or a product: chunks, with
            overlap for a conv. A large vocabulary: several outputs, none over the limit.
    """

    code, slug = "ANE223", "dimension-limit"
    refuses, confidence = True, "high"
    advice = "Reshape the long axis into two (the same bits where ops are elementwise), or work in chunks."
    evidence = (
        *collect_evidence("spatial", "channels"),
        cite_m1_gpt_notes("products with 50257 columns exceed a limit of the ANE"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        looked_at = tuple(self.generations)
        shortest = find_limit("spatial", looked_at)
        if shortest is None:
            return
        judged: dict[tuple[int, ...], tuple[int, ExceededLimit] | None] = {}

        def large(shape: Shape) -> bool:
            extents = _to_numeric_shape(shape)
            if max(extents, default=0) <= shortest.most:
                return False
            if extents not in judged:
                judged[extents] = _find_longest_over_limit(extents, looked_at)
            return judged[extents] is not None

        for ops, var in group_ops_by_large_values(block, large):
            found = judged[_to_numeric_shape(var.shape)]
            if found is None:
                continue
            more = f"; {len(ops)} ops read or make such values" if len(ops) > 1 else ""
            message = _format_coreml_message(
                var, bool(select_generations(looked_at, "m4")), bool(select_generations(looked_at, "m1", "m2"))
            )
            yield Hit(ops[0], covers=ops, sure=found[1].sure, message=message,
                      note=f"'{var.name}' is {_format_shape(var)}: dimension {found[0]} {found[1].words}{more}")

    def examples(self) -> Iterable[Example]:
        yield Example("a width of 65537", lambda: _build_relu_sqrt(1, 1, 1, 65537))
        yield Example("channels", lambda: _build_relu_sqrt(1, 65537, 1, 1))
        yield Example("an M1's width", lambda: _build_relu_sqrt(1, 1, 1, 16385))
        yield Example("rank 1", lambda: _build_relu_sqrt(70000))
        yield Example("a long sequence", lambda: _build_relu_sqrt(1, 20000, 4))
        yield Example("at the limit", lambda: _build_relu_sqrt(1, 1, 1, 16384), reason="")
        yield Example("channels of a width's length", lambda: _build_relu_sqrt(1, 20000, 1, 1), reason="")


def _to_numeric_shape(shape: Shape) -> tuple[int, ...]:
    """Return the dimensions as numbers, symbolic ones as 1."""
    return tuple(1 if is_symbolic(extent) else int(str(extent)) for extent in shape)


def _find_longest_over_limit(
    shape: tuple[int, ...], looked_at: Sequence[Generation]
) -> tuple[int, ExceededLimit] | None:
    """Return the longest dimension that exceeds a limit, and that limit; None where all are within the limits."""
    found: list[tuple[int, ExceededLimit]] = []
    for place, extent in enumerate(shape):
        wide = find_exceeded_limit("spatial", extent, looked_at)
        if place == len(shape) - 1 or (len(shape) > 3 and place > 1):
            broken = wide
        else:
            broken = find_exceeded_limit("channels", extent, looked_at)
            if broken is None and wide and len(shape) < 4:
                broken = ExceededLimit(wide.most, False, f"{wide.words}, if that is the height")
        if broken:
            found.append((extent, broken))
    return max(found, key=lambda item: (item[1].sure, item[0]), default=None)


def _format_shape(var: Var) -> str:
    return "x".join(map(str, var.shape))


def _format_coreml_message(var: Var, m4: bool, older: bool) -> str | None:
    """Return Core ML's message, as measured: for rank 4, and for values of one dimension whatever their rank."""
    if any(is_symbolic(extent) for extent in var.shape) or var.rank > 4:
        return None
    extents = [int(extent) for extent in var.shape]
    if var.rank < 4 and extents[:-1] != [1] * (var.rank - 1):
        return None
    batch, channels, height, width = [1] * (4 - var.rank) + extents
    if m4 and max(extents) > 65536:
        allowed = _M4_RANGE
    elif older and (max(batch, channels) > 65536 or max(height, width) > 16384):
        allowed = _PRE_M4_RANGE
    else:
        return None
    return f"Tensor dimensions N{batch}D1C{channels}H{height}W{width} are not within supported range, {allowed}."


def _build_relu_sqrt(*shape: int) -> Program:
    def body(x: Var) -> Var:
        result: Var = Builder.sqrt(x=Builder.relu(x=x), name="y")
        return result

    return build_program(body, x=shape)
