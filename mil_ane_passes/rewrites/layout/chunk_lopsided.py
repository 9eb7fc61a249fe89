"""Compute elementwise ops on a long axis in a shape that is supported on the ANE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isqrt, prod

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import get_consumers, get_static_shape, is_const, is_opaque, is_used
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_surgery_tip
from ...passes.examples import make_example
from ...passes.layout import compute_padded_bytes
from ...passes.targets import Generation
from ...rules.shapes import DimensionLimit
from ...utils.text_format import format_count
from .._target_gate import describe_supporting_targets, find_limiting_generations
from ._broadcasts import BROADCASTING_OPS
from ._rank_lowering import UNARY_OPS

__all__ = ["find_balanced_shape"]

_ELEMENTWISE_OPS = frozenset({*UNARY_OPS, *BROADCASTING_OPS, "select"})
_OPERAND_NAMES = ("cond", "a", "b", "x", "y")
"Inputs that an elementwise op combines element by element."


class ChunkLopsided(BlockRewrite):
    """Reshape [.., n] to [1, 1, a, b] around elementwise ops whose values exceed the ANE's limit on an axis.

    why     Core ML rejects a width of 240000: the limit is 16384 up to M3, 65536 from M4 on. Elementwise ops work in
            any shape.
    when    Neighbouring elementwise ops on values of one shape, with scalars or constants of that shape, whose static
            size has a suitable divisor, if every generation of the target rejects them. The reshapes of long values are
            unsupported themselves, so there must be fewer values that enter or leave than ops. Convs and other ops
            along the axis are skipped.
    exact   bitwise: elementwise ops.
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
    "Rewrite even if a generation of the target supports the values."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for ops, shape in _iterate_long_axis_regions(block, self.generations):
            yield self._match_region(ops, shape)

    def _match_region(self, ops: list[Operation], shape: tuple[int, ...]) -> Hit | Miss:
        unsupported = [each for each in self.generations if _is_shape_unsupported(shape, each)]
        if len(unsupported) < len(self.generations) and not self.always:
            return Miss(ops[0], describe_supporting_targets(self.generations, unsupported))
        inside, count = set(ops), format_count(len(ops), "op")
        entering = {var for op in ops for var in _get_elementwise_operands(op)
                    if var.op not in inside and not is_const(var) and get_static_shape(var) == shape}
        leaving = [var for op in ops for var in op.outputs
                   if var.consuming_blocks or any(reader not in inside for reader in get_consumers(var))]
        reshapes = len(entering) + len(leaving)
        if reshapes >= len(ops):
            return Miss(ops[0], f"{reshapes} reshapes for {count}: no reduction of unsupported ops")
        chosen = find_balanced_shape(prod(shape), unsupported)
        if chosen is None:
            return Miss(ops[0], f"{prod(shape)} elements have no divisor that makes both axes short enough")
        before, after = ("x".join(map(str, each)) for each in (shape, chosen))
        return Hit(ops[0], ops=ops, leaving=leaving, old=shape, new=chosen, covers=ops,
                   note=f"{count} on {before} as {after}")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        reshaped: dict[Var, Var] = {}

        def reshape_value(var: Var) -> Var:
            if var.rank == 0:
                return var
            shape = hit.new if get_static_shape(var) == hit.old else (1,) * len(hit.new)
            if is_const(var):
                return mb.reshaped(var, shape)
            if var not in reshaped:
                reshaped[var] = mb.reshape(x=var, shape=np.array(shape, dtype=np.int32))
            return reshaped[var]

        replaced: dict[Var, Var] = {}
        for op in hit.ops:
            (out,) = op.outputs
            with mb.at(op):
                operands = {name: reshape_value(op.inputs[name]) for name in _OPERAND_NAMES if name in op.inputs}
                reshaped[out] = rebuild_op(mb, op, **operands)
                if out in hit.leaving:
                    replaced[out] = mb.reshape(x=reshaped[out], shape=np.array(hit.old, np.int32))
        return replaced

    def examples(self) -> Iterable[Example]:
        yield _make_signal_example("a signal", 70000)
        yield _make_signal_example("a gain of each signal", 70000, lambda x: Builder.mul(
            x=x, y=Builder.reduce_max(x=x, axes=[0, 1], keep_dims=True)))
        yield make_example("one op", lambda x: Builder.relu(x=x), x=(70000,),
                           reason="2 reshapes for 1 op: no reduction of unsupported ops")
        yield _make_signal_example("a prime", 70001,
                                   reason="70001 elements have no divisor that makes both axes short enough")
        yield _make_signal_example("supported on M4", 20000,
                                   reason="supported on M4, A18, M5 and M6; choose an older target, or always=true")
        yield _make_signal_example("short", 16384, reason="")


def _iterate_long_axis_regions(
    block: Block, generations: Iterable[Generation]
) -> Iterator[tuple[list[Operation], tuple[int, ...]]]:
    """Yield groups of elementwise ops on values of one unsupported shape, connected by their values."""
    groups: dict[Operation, list[Operation]] = {}
    unsupported: dict[tuple[int, ...], bool] = {}
    generations = list(generations)
    for op in block.operations:
        if op.op_type not in _ELEMENTWISE_OPS or is_opaque(op) or not is_used(op.outputs[0]):
            continue
        shape = get_static_shape(op.outputs[0])
        if shape is None:
            continue
        if shape not in unsupported:
            unsupported[shape] = any(_is_shape_unsupported(shape, each) for each in generations)
        operands = _get_elementwise_operands(op)
        shapes = [get_static_shape(var) for var in operands]
        if not unsupported[shape] or any(each is None or (each != shape and prod(each) != 1) for each in shapes):
            continue
        groups[op] = [op]
        for var in operands:
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
    return [op.inputs[name] for name in _OPERAND_NAMES if name in op.inputs]


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


def _make_signal_example(
    name: str, length: int, first: Callable[[Var], Var] | None = None, reason: str | None = None
) -> Example:
    """Make an example of five elementwise ops, of which `first` (a relu) is the first, on a signal."""

    def build_body(x: Var) -> Var:
        value = first(x) if first is not None else Builder.relu(x=x)
        value = Builder.mul(x=value, y=np.float16(0.5))
        result: Var = Builder.add(x=Builder.sqrt(x=Builder.abs(x=value)), y=x, name="y")
        return result

    return make_example(name, build_body, reason=reason, x=(1, length))
