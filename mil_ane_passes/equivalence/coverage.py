"""Coverage of an equivalence check: blocks that no run entered, and outputs that were never finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, types

from ..ir.coremltools_internals import get_typed_value
from ..ir.printer import format_block
from ..ir.value_numbering import ValueNumbering
from ..utils.option_spelling import format_option
from .adversarial_feeds import SPECIAL
from .execution import Run

__all__ = [
    "BlockPath",
    "Unknown",
    "find_outputs_without_numbers",
    "find_unentered_blocks",
    "iterate_nested_blocks",
    "select_differing",
]

BlockPath = tuple[str, ...]
"The path of a block: the function, and for each level the op's first output and the block's number."


def find_unentered_blocks(
    before: Program, after: Program, seen_before: set[Block], seen_after: set[Block]
) -> list[str]:
    """Find functions and blocks that differ (or are new) and that the runs of either program never entered."""
    old, new = dict(_iterate_blocks(before)), dict(_iterate_blocks(after))
    return [
        " > ".join(place) for place, block in new.items()
        if (block not in seen_after or (place in old and old[place] not in seen_before))
        and (place not in old or _has_differences(old[place], block))  # last, because it prints both blocks
    ]


@dataclass(frozen=True)
class Unknown:
    """An output of a function that the runs could not compare, or only in part.

    `nan` of its `size` elements are NaN in all runs. If it is `throughout`, no element is finite in any run; with
    `beyond`, some are finite, but beyond the range for which the rewrites hold.
    """

    function: str
    output: str
    nan: int
    size: int
    "Number of elements; 0 for an output that was empty in all runs."
    throughout: bool
    beyond: bool = False

    def __str__(self) -> str:
        where = f"of the output '{self.output}' of function '{self.function}'"
        if not self.throughout:
            are = "element was" if self.nan == 1 else "elements were"
            return f"{self.nan} of {self.size} {are} NaN in all runs {where} and not compared"
        if not self.size:
            return (f"the output '{self.output}' of function '{self.function}' was empty in all runs, so it was not "
                    f"compared; give {format_option('feeds')} for which it is not empty")
        was = ("beyond what rewrites declare, NaN or infinite" if self.beyond else
               "NaN" if self.nan == self.size else "NaN or infinite")
        return (f"every element {where} was {was} in all runs, so it was not compared; give "
                f"{format_option('feeds')} for which it is a number")


def find_outputs_without_numbers(program: Program, runs: Iterable[Run]) -> Iterator[Unknown]:
    """Yield the outputs whose comparison is not meaningful, because any two NaN are equal, and so are overflowed sums.

    These are outputs without a finite element in all of `runs`, at any precision; outputs that were empty in all runs
    although their type is not; and outputs of fixed shape of which some elements were NaN in all runs without fed NaN.
    The runs may be those of an entire pipeline.
    """
    made = [(run, (run.plan.function, name), value) for run in runs
            for outputs in run.results.values() for name, value in outputs.items()]
    for function, name in dict.fromkeys(key for _, key, _ in made):
        found = [(run, value) for run, key, value in made if key == (function, name) and value.size]
        if not found:
            functions = [program.functions[function]] if function in program.functions else program.functions.values()
            if not any(_is_empty_by_type(each, name) for each in functions):
                yield Unknown(function, name, 0, 0, True)
            continue
        if not any(np.any(_is_judged(run, name, value)) for run, value in found):
            nan = all(value.dtype.kind == "f" and np.all(np.isnan(value)) for _, value in found)
            beyond = any(value.dtype.kind != "f" or np.any(np.isfinite(value)) for _, value in found)
            yield Unknown(function, name, int(nan), 1, True, beyond)
            continue
        masks = [np.isnan(value) for run, value in found if value.dtype.kind == "f" and run.plan.adversarial != SPECIAL]
        if len({mask.shape for mask in masks}) == 1 and np.any(both := np.logical_and.reduce(masks)):
            yield Unknown(function, name, int(np.count_nonzero(both)), both.size, False)


def _is_empty_by_type(function: Function, output: str) -> bool:
    return any(var.name == output and 0 in var.shape for var in function.outputs if types.is_tensor(var.sym_type))


def _is_judged(run: Run, name: str, value: Any) -> Any:
    """Return the mask of the elements of an output of `run` with which the other program is compared."""
    finite = np.isfinite(value) if value.dtype.kind == "f" else np.ones(value.shape, bool)
    moved = (run.moved or {}).get(name)
    return finite if moved is None or moved.shape != value.shape else finite & np.isfinite(moved)


def select_differing(before: Program, after: Program, found: Iterable[Unknown]) -> list[Unknown]:
    """Select the outputs that the two programs compute by different ops; results of the same ops are always equal."""
    return [each for each in found
            if not _has_same_ops(before.functions[each.function], after.functions[each.function], each.output)]


def _has_same_ops(before: Function, after: Function, output: str) -> bool:
    """Return whether both programs compute `output` by the same ops on the same inputs and constants, ignoring names.
    """
    numbering = ValueNumbering()
    for function in (before, after):
        numbering.number_function(function)
    made = [{var.name: numbering.numbers[var] for var in function.outputs} for function in (before, after)]
    return output in made[0] and made[0][output] == made[1].get(output)


def _iterate_blocks(program: Program) -> Iterator[tuple[BlockPath, Block]]:
    """Yield every function and every nested block with its path."""
    for name, function in program.functions.items():
        yield from iterate_nested_blocks(name, function)


def iterate_nested_blocks(name: str, function: Function) -> Iterator[tuple[BlockPath, Block]]:
    """Yield the function called `name` and every block nested in it, each with its path, outer blocks first."""
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
    """Return whether two consts have equal values; the printed text cannot tell, as it shows only the type of large
    ones."""
    if get_typed_value(one.outputs[0]) is get_typed_value(other.outputs[0]):
        return True
    values = [np.asarray(op.outputs[0].val) for op in (one, other)]
    return bool(np.array_equal(values[0], values[1], equal_nan=values[0].dtype.kind == "f"))
