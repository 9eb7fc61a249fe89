"""Size of unrolled loops and layers: the chain of dependent products in a function, and the ops of the program.

Compilers recurse along a chain, and time and files grow with every op, so that all that is unrolled shares two limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ...ir.query import get_flat_inputs, get_function, iterate_nested_ops
from ...passes.contract import Rule

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
    rule: Rule, op: Operation, measure: Callable[[Operation], UnrolledSize | None], most: UnrolledSize,
) -> UnrolledSize:
    """Measure the longest chain of products through `op` once it is unrolled, and count the ops of all functions then.

    `measure` returns the size of an op alone when it is unrolled, None for an op that is not. Ops before `op` count as
    unrolled, too, where they fit in `most`, as they are rewritten first.
    """
    functions = rule.functions or [get_function(op)]
    return rule.compute_once(measure_unrolled_size, lambda: _plan_unrolling(functions, measure, most))[op]


def _plan_unrolling(
    functions: Sequence[Function], measure: Callable[[Operation], UnrolledSize | None], most: UnrolledSize,
) -> dict[Operation, UnrolledSize]:
    """Measure each op that can be unrolled, as `measure_unrolled_size` does."""
    sizes = {op: size for function in functions for op in iterate_nested_ops(function)
             if (size := measure(op)) is not None}
    planned: dict[Operation, UnrolledSize] = {}
    total = sum(map(_count_nested_ops, functions))

    def choose(after: Mapping[Var, int], op: Operation, depth: int) -> int | None:
        """Return the products of `op`, which `depth` products precede; `after` has those behind each value."""
        nonlocal total
        size = sizes.get(op)
        if size is None:
            return _count_products(op)
        behind = max((after.get(var, 0) for var in op.outputs), default=0)
        made = UnrolledSize(depth + size.chain + behind, total - 1 - sum(map(_count_nested_ops, op.blocks)) + size.ops)
        planned[op] = made
        if made.chain > most.chain or made.ops > most.ops:
            return _count_products(op)
        total = made.ops
        return size.chain

    for function in functions:
        after: dict[Var, int] = {}
        _fill_chain_heights(function, after)
        depths: dict[Var, int] = dict.fromkeys(function.inputs.values(), 0)
        _fill_chain_depths(function, depths, partial(choose, after), all_start=True)
    return planned


def measure_step_chain(block: Block, inner: Callable[[Operation], int]) -> int:
    """Measure the longest chain of products from the inputs of a loop's step to its outputs; `inner` returns the chain
    of a nested loop."""
    through: dict[Var, int] = dict.fromkeys(block.inputs, 0)
    _fill_chain_depths(block, through, lambda op, _: inner(op) if op.op_type == "while_loop" else _count_products(op))
    return max((through[var] for var in block.outputs if var in through), default=0)


def _count_products(op: Operation) -> int | None:
    """Return the number of products of an op, 0 or 1; None where its blocks decide."""
    return None if op.blocks else int(op.op_type in _PRODUCT_OPS)


def _fill_chain_depths(
    block: Block, depth: dict[Var, int], weight: Callable[[Operation, int], int | None], all_start: bool = False,
) -> None:
    """Fill `depth` with the most products on a path to each value; `weight` gets an op and the products before it.

    A path begins at a value that has a depth already, or with `all_start` anywhere.
    """
    for op in block.operations:
        if op.op_type.startswith("const"):
            continue
        reached = [depth[var] for var in get_flat_inputs(op) if var in depth] or ([0] if all_start else [])
        own = weight(op, max(reached, default=0))
        for inner in op.blocks if own is None else ():
            depth.update(dict.fromkeys(inner.inputs, max(reached)) if reached else {})
            _fill_chain_depths(inner, depth, weight, all_start)
            reached += [depth[var] for var in inner.outputs if var in depth]
        if reached:
            depth.update(dict.fromkeys(op.outputs, max(reached) + (own or 0)))


def _fill_chain_heights(block: Block, height: dict[Var, int]) -> None:
    """Fill `height` with the most products on a path from each value to the end of the function, loops as they are."""
    for op in reversed(list(block.operations)):
        if op.op_type.startswith("const"):
            continue
        behind = max((height.get(var, 0) for var in op.outputs), default=0)
        highest = behind + (_count_products(op) or 0)
        for inner in op.blocks:
            _raise_heights(height, inner.outputs, behind)
            _fill_chain_heights(inner, height)
            highest = max([highest, *(height.get(var, 0) for var in inner.inputs)])
        _raise_heights(height, get_flat_inputs(op), highest)


def _raise_heights(height: dict[Var, int], values: Iterable[Var], least: int) -> None:
    for var in values:
        height[var] = max(height.get(var, 0), least)


def _count_nested_ops(block: Block) -> int:
    """Count the ops of a block and of the blocks in it, without consts."""
    return sum(not op.op_type.startswith("const") for op in iterate_nested_ops(block))
