"""Size of unrolled loops and layers: the chain of dependent products in a function, and the ops of the program.

Compilers recurse along a chain, and time and files grow with every op, so that all that is unrolled shares two limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ...ir.query import get_flat_inputs

__all__ = ["MAX_CHAIN_PRODUCTS", "MAX_FUNCTION_OPS", "UnrolledSize", "measure_step_chain", "measure_unrolled_size"]

MAX_CHAIN_PRODUCTS = 320
"""Maximum length of a chain of dependent products. An M6 compiles at most 386 convs in sequence, and other ops are
between the products here, so a sixth is kept in reserve: one layer of 256 steps fits, several share the limit."""
MAX_FUNCTION_OPS = 8192
"""Maximum number of ops of all functions of a program, which are compiled together. The largest network in our records
has 2475, and coremltools takes minutes for about 10000."""
_PRODUCT_OPS = frozenset({"conv", "conv_transpose", "einsum", "linear", "matmul"})


class UnrolledSize(NamedTuple):
    """The size of an unrolled loop or layer: the products that depend on each other, and all ops."""

    chain: int
    ops: int


def measure_unrolled_size(
    op: Operation,
    size: Callable[[Operation], UnrolledSize | None],
    most: UnrolledSize,
    functions: Sequence[Function] = (),
) -> UnrolledSize:
    """Measure the longest chain through `op` once it is unrolled, and count the ops of `functions`.

    By default only the function of `op` is counted. Ops before `op` count as unrolled, too, where they fit in `most`,
    as they are rewritten first. `size` returns None for an op that is not unrolled.
    """
    order = [each for function in functions or [_find_enclosing_function(op)] for each in _collect_nested_ops(function)
             if each is op or not each.op_type.startswith("const")]
    total, chosen = len(order), dict[Operation, int]()
    for each in order[:order.index(op) + 1]:
        own = size(each)
        if own is None:
            continue
        chain = _measure_chain_through(_find_enclosing_function(each), each, {**chosen, each: own.chain})
        unrolled = UnrolledSize(chain, total - 1 + own.ops)
        if each is op:
            return unrolled
        if unrolled.chain <= most.chain and unrolled.ops <= most.ops:
            chosen[each], total = own.chain, unrolled.ops
    return UnrolledSize(0, total)


def measure_step_chain(block: Block, inner: Callable[[Operation], int]) -> int:
    """Measure the longest chain of products from the inputs of a loop's step to its outputs; `inner` returns the chain
    of a nested loop."""
    through: dict[Var, int] = dict.fromkeys(block.inputs, 0)
    _fill_chain_depths(block, through, lambda op: inner(op) if op.op_type == "while_loop" else _count_products(op))
    return max((through[var] for var in block.outputs if var in through), default=0)


def _measure_chain_through(function: Function, op: Operation, weights: Mapping[Operation, int]) -> int:
    """Measure the longest chain of products through `op`; `weights` has the number of products of unrolled ops."""
    def get_weight(each: Operation) -> int | None:
        return weights.get(each, _count_products(each))

    depth: dict[Var, int] = dict.fromkeys(function.inputs.values(), 0)
    _fill_chain_depths(function, depth, get_weight, all_start=True)
    through = {var: depth[var] for var in op.outputs}
    _fill_chain_depths(function, through, get_weight)
    return max(through.values(), default=0)


def _count_products(op: Operation) -> int | None:
    """Return the number of products of an op, 0 or 1; None where its blocks decide."""
    return None if op.blocks else int(op.op_type in _PRODUCT_OPS)


def _fill_chain_depths(
    block: Block, depth: dict[Var, int], weight: Callable[[Operation], int | None], all_start: bool = False,
) -> None:
    """Fill `depth` with the most products on a path to each value.

    A path begins at a value that has a depth already, or with `all_start` anywhere.
    """
    for op in block.operations:
        if op.op_type.startswith("const") or op.outputs[0] in depth:
            continue
        reached = [depth[var] for var in get_flat_inputs(op) if var in depth] or ([0] if all_start else [])
        own = weight(op)
        for inner in op.blocks if own is None else ():
            depth.update(dict.fromkeys(inner.inputs, max(reached)) if reached else {})
            _fill_chain_depths(inner, depth, weight, all_start)
            reached += [depth[var] for var in inner.outputs if var in depth]
        if reached:
            depth.update(dict.fromkeys(op.outputs, max(reached) + (own or 0)))


def _collect_nested_ops(block: Block) -> list[Operation]:
    """Collect the ops of a block and of the blocks in it, in program order."""
    found: list[Operation] = []
    for op in block.operations:
        found.append(op)
        for inner in op.blocks:
            found += _collect_nested_ops(inner)
    return found


def _find_enclosing_function(op: Operation) -> Function:
    block = op.enclosing_block
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return block
