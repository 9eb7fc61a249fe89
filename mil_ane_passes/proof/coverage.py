"""What the runs of two programs that differ leave open: blocks that none entered, outputs that were NaN throughout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var

from ..core.printer import format_block
from .execution import Run

__all__ = ["BlockPath", "find_unentered_blocks", "iterate_nested_blocks", "outputs_without_numbers"]

BlockPath = tuple[str, ...]
"Where a block is: the function, and for each level the op's first output and the block's number."


def find_unentered_blocks(
    before: Program, after: Program, seen_before: set[Block], seen_after: set[Block]
) -> list[str]:
    """The places of functions and blocks that differ (or are new) and that the runs of either program never entered."""
    old, new = dict(_iterate_blocks(before)), dict(_iterate_blocks(after))
    return [
        " > ".join(place) for place, block in new.items()
        if (place not in old or _has_differences(old[place], block))
        and (block not in seen_after or (place in old and old[place] not in seen_before))
    ]


def outputs_without_numbers(before: Program, after: Program, runs: Iterable[Run]) -> list[tuple[str, str]]:
    """(function, output) where every element was NaN in all `runs` of `before`, at all precisions, and the ops that
    make the output differ: any two NaN are equal, so that such runs tell nothing."""
    numbers: dict[tuple[str, str], bool] = {}
    for run in runs:
        for outputs in run.results.values():
            for name, value in outputs.items():
                if value.size:
                    key = (run.plan.function, name)
                    numbers[key] = numbers.get(key, False) or value.dtype.kind != "f" or not np.all(np.isnan(value))
    return [(function, name) for (function, name), any_number in numbers.items()
            if not any_number and not _same_ops(before.functions[function], after.functions[function], name)]


def _same_ops(before: Function, after: Function, output: str) -> bool:
    """Whether the same ops on the same inputs and constants make `output`, whatever their values are called."""
    known: dict[Any, int] = {}
    made = [{var.name: keys[var] for var in function.outputs}
            for function, keys in ((before, _keys(before, known)), (after, _keys(after, known)))]
    return output in made[0] and made[0][output] == made[1].get(output)


def _keys(function: Function, known: dict[Any, int]) -> dict[Var, int]:
    """A number for each value of a function, the same for values that are computed alike; `known` is shared."""
    keys = {var: known.setdefault(("input", name), len(known)) for name, var in function.inputs.items()}
    for op in function.operations:
        inputs = tuple((param, _keys_of(bound, keys)) for param, bound in sorted(op.inputs.items()))
        held = _held(op) if op.op_type == "const" else tuple(map(format_block, op.blocks))
        for place, var in enumerate(op.outputs):
            keys[var] = known.setdefault((op.op_type, place, inputs, held), len(known))
    return keys


def _keys_of(bound: Any, keys: Mapping[Var, int]) -> tuple[Any, ...]:
    """The numbers of what one input reads; of what lives in pymil only, its text."""
    found = bound if isinstance(bound, (list, tuple)) else () if bound is None else (bound,)
    return tuple(keys[var] if var in keys else str(getattr(var, "val", var)) for var in found)


def _held(const: Operation) -> tuple[Any, ...]:
    value = np.asarray(const.outputs[0].val)
    return (str(value.dtype), value.shape, value.tobytes() if value.dtype != object else repr(value.tolist()))


def _iterate_blocks(program: Program) -> Iterator[tuple[BlockPath, Block]]:
    """Every function and every nested block under its place."""
    for name, function in program.functions.items():
        yield from iterate_nested_blocks(name, function)


def iterate_nested_blocks(name: str, function: Function) -> Iterator[tuple[BlockPath, Block]]:
    """The function called `name` and every block nested in it, each under its place, outer blocks first."""
    pending: list[tuple[BlockPath, Block]] = [((name,), function)]
    while pending:
        place, block = pending.pop()
        yield place, block
        for op in block.operations:
            pending += [((*place, f"block {number} of {op.op_type} '{_get_op_name(op)}'"), inner)
                        for number, inner in enumerate(op.blocks)]


def _get_op_name(op: Operation) -> str:
    return str(op.outputs[0].name) if op.outputs else str(op.name)


def _has_differences(one: Block, other: Block) -> bool:
    if format_block(one) != format_block(other):
        return True
    return not all(_is_equal_const(a, b) for a, b in zip(_list_consts(one), _list_consts(other)))


def _list_consts(block: Block) -> list[Operation]:
    return [op for op in block.operations if op.op_type == "const"]


def _is_equal_const(one: Operation, other: Operation) -> bool:
    """Whether two consts hold the same; the text shows large ones by type only."""
    if one.outputs[0]._sym_val is other.outputs[0]._sym_val:
        return True
    values = [np.asarray(op.outputs[0].val) for op in (one, other)]
    return bool(np.array_equal(values[0], values[1], equal_nan=values[0].dtype.kind == "f"))
