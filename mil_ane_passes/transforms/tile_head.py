"""Tiling of the product that computes the logits: it is cut along its outputs, and each tile is a separate output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Var

from ..ir.builder import RewriteBuilder, UniqueNames, rebuild_op
from ..ir.query import get_const_value, is_compressed, is_const
from ..ir.weight_cuts import cut_weight, find_cut_unit, slice_weight
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_advised_option, format_option_values
from ..utils.text_format import add_article
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, remove_dead_ops
from .names import make_unknown_name_error

__all__ = ["TileHead", "list_tiles"]

_OPTION = "--tile-output"


@dataclass(frozen=True)
class TileHead(Transform):
    """Replaces the output `output` (..., width) by `count` outputs OUTPUT_1, OUTPUT_2, ..., its parts in order.

    The parts are not concatenated: a result above a chip's limit on the width would be unsupported on the ANE again.
    Results agree to rounding: a product of fewer outputs may add its terms in another order.
    """

    output: str
    count: int
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Cut in place. Raises InputError if the output is not a product with a stored weight or cannot be cut."""
        functions = draft.select_functions(self.function)
        known = {var.name for function in functions.values() for var in function.outputs}
        if self.output not in known:
            raise make_unknown_name_error(self.output, format_option_values(
                "tile_output", f"{self.output}={self.count}"), known, "output", draft.gone)
        for name, function in functions.items():
            if any(var.name == self.output for var in function.outputs):
                self._cut(draft, name, function)
        return [draft]

    def _cut(self, draft: Draft, name: str, function: Function) -> None:
        whole = next(var for var in function.outputs if var.name == self.output)
        op, weight, axis = self._find_product(whole)
        bounds = self._list_bounds(op.inputs[weight], axis)
        dead = set(find_dead_ops(function))
        whole.name = f"{self.output}_whole"
        names = list_tiles(self.output, self.count)
        taken = ({*function.inputs, *(var.name for var in function.outputs)} & set(names))
        if taken:
            raise InputError(f"a tile of the output '{self.output}' would have the name of the input or output "
                             f"'{min(taken)}'; expected a free name: rename that one first, by "
                             f"{format_advised_option('rename')}")
        tiles: list[Var] = []
        with function:
            mb = RewriteBuilder(function, UniqueNames(function))
            with mb.at(op, self.output):
                for tile, part in zip(names, bounds, strict=True):
                    changes: dict[str, Any] = {weight: cut_weight(mb, op.inputs[weight], axis, *part)}
                    if op.inputs.get("bias") is not None:
                        changes["bias"] = slice_weight(mb, op.bias, 0, *part)
                    tiles.append(rebuild_op(mb, op, **changes))
                    tiles[-1].name = tile
            function.set_outputs([each for var in function.outputs for each in (tiles if var is whole else [var])])
            remove_dead_ops(function, dead)
        draft.gone[self.output] = "tile_output"
        draft.change_interface(name, InterfaceChange("output", self.output, None, "removed", tiles=tuple(names)), *(
            InterfaceChange("output", None, tile, "added") for tile in names))
        most = max(stop - start for start, stop in bounds)
        draft.done.append(EditRecord(_OPTION, name, self.output, f"'{self.output}' ({bounds[-1][1]:,} wide) is cut "
                                     f"into {self.count} outputs of at most {most:,}: {names[0]} to {names[-1]}",
                                     exact=False))

    def _find_product(self, whole: Var) -> tuple[Operation, str, int]:
        """Return the op that computes the output, the name of its weight input, and the weight's axis to cut."""
        op = whole.op
        if op is not None and op.op_type in ("linear", "matmul"):
            name = "weight" if op.op_type == "linear" else "y"
            weight = op.inputs[name]
            if weight.rank == 2 and (is_const(weight) or is_compressed(weight)):
                turned = op.op_type == "linear" or bool(get_const_value(op.inputs.get("transpose_y"), False))
                return op, name, 0 if turned else 1
        made = "an input" if op is None else f"made by {add_article(op.op_type)} op"
        raise InputError(f"the output '{self.output}' is {made}; expected a linear or matmul with a stored weight, to "
                         "cut it along its outputs")

    def _list_bounds(self, weight: Var, axis: int) -> list[tuple[int, int]]:
        """List the bounds of even tiles; tiles of a compressed weight end at block boundaries."""
        width, unit = int(weight.shape[axis]), find_cut_unit(weight, axis)
        if isinstance(unit, str):
            raise InputError(f"the output '{self.output}' cannot be cut: {unit}")
        blocks = -(-width // unit)
        if not 2 <= self.count <= blocks:
            raise InputError(f"{self.count} tiles of the output '{self.output}', which is {width:,} wide"
                             f"{f' in blocks of {unit}' if unit > 1 else ''}; expected 2 to {blocks:,}")
        ends = [min(int(end) * unit, width) for end in np.linspace(0, blocks, self.count + 1).round()]
        return list(zip(ends[:-1], ends[1:], strict=True))


def list_tiles(output: str, count: int) -> list[str]:
    """List the names of the outputs that replace `output`."""
    return [f"{output}_{number}" for number in range(1, count + 1)]
