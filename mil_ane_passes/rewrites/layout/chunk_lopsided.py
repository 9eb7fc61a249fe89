"""Compute elementwise ops on a long axis in a shape that is supported on the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isqrt, prod

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import get_consumers, get_static_shape, is_const, is_opaque, is_used
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_surgery_tip
from ...passes.examples import build_program, make_example
from ...passes.layout import compute_padded_bytes
from ...passes.targets import Generation
from ...rules.dimension_limit import DimensionLimit
from ...utils.text_format import format_count
from .._target_gate import describe_supporting_targets, find_limiting_generations
from ._broadcasts import BROADCASTING_OPS
from ._rank_lowering import UNARY_OPS

__all__ = ["find_balanced_shape"]

_ELEMENTWISE_OPS = frozenset({*UNARY_OPS, *BROADCASTING_OPS, "select"})


class ChunkLopsided(BlockRewrite):
    """Reshape [.., n] to [1, 1, a, b] around elementwise ops whose values are longer in one axis than the ANE holds.

    why     Core ML rejects a width of 240000: 16384 is the most up to M3, 65536 from the M4 on. Elementwise ops do not
            care where an element stands.
    when    Neighbouring elementwise ops on values of one shape, with scalars or constants of that shape, whose size is
            known and has a fitting divisor; every generation looked at rejects them. A reshape reads or makes the long
            value and is unsupported itself, so there must be fewer values that enter or leave than ops. Convs and other
            ops that look along the axis stay as they are.
    exact   bitwise: each element by itself.
    cost    a reshape for each value that enters or leaves.

    before
        %0: fp16[1, 70000] = relu(x=%x)
        %1: fp16[1, 70000] = mul(x=%0, y=0.5)
        %2: fp16[1, 70000] = abs(x=%1)
        %3: fp16[1, 70000] = sqrt(x=%2)
        %y: fp16[1, 70000] = add(x=%3, y=%x)
    after
        %0: fp16[1, 1, 10, 7000] = reshape(x=%x, shape=[1, 1, 10, 7000])
        %1: fp16[1, 1, 10, 7000] = relu(x=%0)
        %2: fp16[1, 1, 10, 7000] = mul(x=%1, y=0.5)
        %3: fp16[1, 1, 10, 7000] = abs(x=%2)
        %4: fp16[1, 1, 10, 7000] = sqrt(x=%3)
        %5: fp16[1, 1, 10, 7000] = add(x=%4, y=%0)
        %y: fp16[1, 70000] = reshape(x=%5, shape=[1, 70000])
    """

    fixes = (DimensionLimit,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        *collect_evidence("spatial"),
        cite_surgery_tip("tensors lopsided to a shape like (50000,): chunk or parallelise"),
    )

    always: bool = False
    "Rewrite also where a requested generation supports the values as they are."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for ops, shape in _iterate_long_axis_regions(block, self.generations):
            inside, made = set(ops), [var for op in ops for var in op.outputs]
            entering = {
                var
                for op in ops
                for var in _get_elementwise_operands(op)
                if var.op not in inside and not is_const(var) and get_static_shape(var) == shape
            }
            leaving = [var for var in made if var.consuming_blocks or any(
                reader not in inside for reader in get_consumers(var))]
            refused = [each for each in self.generations if _is_shape_unsupported(shape, each)]
            chosen = find_balanced_shape(prod(shape), refused)
            if len(refused) < len(self.generations) and not self.always:
                yield Miss(ops[0], describe_supporting_targets(self.generations, refused))
            elif len(entering) + len(leaving) >= len(ops):
                yield Miss(
                    ops[0],
                    f"{len(entering) + len(leaving)} reshapes for {format_count(len(ops), 'op')}: no less is "
                    f"unsupported",
                )
            elif chosen is None:
                yield Miss(ops[0], f"{prod(shape)} elements have no divisor that leaves both axes short enough")
            else:
                yield Hit(ops[0], ops=ops, leaving=leaving, old=shape, new=chosen, covers=ops,
                          note=f"{format_count(len(ops), 'op')} on {'x'.join(map(str, shape))} as "
                               f"{'x'.join(map(str, chosen))}")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        shown: dict[Var, Var] = {}

        def view(var: Var) -> Var:
            if var.rank == 0:
                return var
            shape = hit.new if get_static_shape(var) == hit.old else (1,) * len(hit.new)
            if is_const(var):
                return mb.reshaped(var, shape)
            if var not in shown:
                shown[var] = mb.reshape(x=var, shape=np.array(shape, dtype=np.int32))
            return shown[var]

        replaced: dict[Var, Var] = {}
        for op in hit.ops:
            with mb.at(op):
                shown[op.outputs[0]] = rebuild_op(mb, op, **{
                    name: view(op.inputs[name]) for name in ("cond", "a", "b", "x", "y") if name in op.inputs})
                if op.outputs[0] in hit.leaving:
                    replaced[op.outputs[0]] = mb.reshape(x=shown[op.outputs[0]], shape=np.array(hit.old, np.int32))
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("a signal", lambda: _build_signal(70000))
        yield Example("a gain of each signal", lambda: _build_signal(70000, lambda x: Builder.mul(
            x=x, y=Builder.reduce_max(x=x, axes=[0, 1], keep_dims=True))))
        yield make_example(
            "one op", lambda x: Builder.relu(x=x), reason="2 reshapes for 1 op: no less is unsupported", x=(70000,)
        )
        yield Example("a prime", lambda: _build_signal(70001),
                      reason="70001 elements have no divisor that leaves both axes short enough")
        yield Example("taken on M4", lambda: _build_signal(20000),
                      reason="taken on M4, A18, M5 and M6; name an older target, or always=true")
        yield Example("short", lambda: _build_signal(16384), reason="")


def _iterate_long_axis_regions(
    block: Block, generations: Iterable[Generation]
) -> Iterator[tuple[list[Operation], tuple[int, ...]]]:
    """Yield groups of elementwise ops on values of one unsupported shape, connected by their values."""
    groups: dict[Operation, list[Operation]] = {}
    judged: dict[tuple[int, ...], bool] = {}
    wanted = list(generations)
    for op in block.operations:
        if op.op_type not in _ELEMENTWISE_OPS or is_opaque(op) or not is_used(op.outputs[0]):
            continue
        shape = get_static_shape(op.outputs[0])
        if shape is None or not judged.setdefault(shape, any(_is_shape_unsupported(shape, each) for each in wanted)):
            continue
        given = _get_elementwise_operands(op)
        if any(
            get_static_shape(var) is None or (get_static_shape(var) != shape and prod(var.shape) != 1) for var in given
        ):
            continue
        groups[op] = [op]
        for var in given:
            if var.op in groups and get_static_shape(var) == shape:
                merge_groups(groups, var.op, op)
    for members in list_groups(groups):
        yield members, get_static_shape(members[0].outputs[0]) or ()


def _is_shape_unsupported(shape: tuple[int, ...], generation: Generation) -> bool:
    """Return whether a limit of `generation` excludes a value of `shape` from the ANE."""
    return bool(shape) and bool(find_limiting_generations("spatial", shape[-1], [generation])
                                or find_limiting_generations("channels", max(shape), [generation]))


def _get_elementwise_operands(op: Operation) -> list[Var]:
    """Return the operands that the op combines element by element."""
    return [op.inputs[name] for name in ("cond", "a", "b", "x", "y") if name in op.inputs]


def find_balanced_shape(size: int, generations: Iterable[Generation]) -> tuple[int, ...] | None:
    """Return a shape [1, 1, a, b] of `size` elements that those generations support, with the least row padding.

    Rows are padded to 64 bytes. Return None where no such shape is supported.
    """
    most = min((bound.most for each in generations if (bound := find_limit("spatial", [each]))), default=0)
    # A side shorter than this leaves the other too long; without the bound the search takes hours on a hostile shape.
    shortest = -(-size // most) if most else size + 1
    low = [number for number in range(max(1, shortest), min(isqrt(size), most) + 1) if size % number == 0]
    fits = [(1, 1, size // width, width) for each in low for width in (each, size // each)
            if max(width, size // width) <= most]
    return min(fits, key=lambda shape: (compute_padded_bytes(shape, 2), max(shape)), default=None)


def _build_signal(length: int, first: object = None) -> Program:
    def body(x: Var) -> Var:
        value = first(x) if callable(first) else Builder.relu(x=x)
        value = Builder.mul(x=value, y=np.float16(0.5))
        result: Var = Builder.add(x=Builder.sqrt(x=Builder.abs(x=value)), y=x, name="y")
        return result

    return build_program(body, x=(1, length))
