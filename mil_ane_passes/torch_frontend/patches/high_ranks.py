"""Tensors of rank 6 and more raise an error with the op, the module and the line, and why fewer axes are not possible.

Core ML has tensors of rank 5 at most. `ane.convert` runs `lower_rank`, which merges axes that every op treats alike.
coremltools' own check names the MIL op of the first remaining tensor, but no location in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.mil import Builder, Program

from ...ir.query import iterate_ops
from ...passes.engine import find_matches
from ...passes.registry import find_rewrite
from ..contract import Patch
from ..errors import NotConverted
from ..failures import describe_op_location
from ..lowering import MAX_RANK

PATCH = Patch(code="TORCH161",
              title="tensors of rank 6 are rejected without module and line",
              upstream=("https://github.com/apple/coremltools/issues/1723",))


@PATCH.probe
def probe() -> str | None:
    """Return coremltools' message for a reshape to rank 6, or None when it raises no error."""
    program = Builder.program(input_specs=[Builder.TensorSpec(shape=(2, 3))])(
        lambda x: Builder.reshape(x=x, shape=[1, 1, 1, 1, 2, 3], name="high"))
    try:
        program._check_invalid_tensor_rank()
    except ValueError as error:
        return f"says only: {error}"
    return None


@PATCH.replace_function("coremltools.converters.mil.mil.program", "Program._check_invalid_tensor_rank")
def check_ranks(host: Callable[..., None], self: Program) -> None:
    """Run coremltools' check of the ranks before a program is written, and add the location to its error."""
    try:
        host(self)
    except ValueError as error:
        raise _make_rank_error(self, error) from error


def _make_rank_error(program: Program, error: ValueError) -> NotConverted:
    high = next((op for _, op in iterate_ops(program) if op.op_type != "const"
                 and any(_get_rank(var) > MAX_RANK for var in op.outputs)), None)
    if high is None:
        return NotConverted(str(error))
    rank = max(_get_rank(var) for var in high.outputs)
    missed = find_matches(find_rewrite("lower_rank").configured(any_extent=True), program).near_misses
    reason = f" and cannot be done in fewer axes ({missed[0].reason})" if missed else ""
    return NotConverted(
        f"{describe_op_location(high)}: makes a tensor of rank {rank}, but Core ML supports {MAX_RANK} at "
        f"most{reason}; "
        "merge adjacent axes, index or loop over one of the axes, or pass numbers in place of -1 and of computed "
        f"sizes, so that no tensor has more than {MAX_RANK} axes"
    )


def _get_rank(var: Any) -> int:
    return int(getattr(var, "rank", 0) or 0)
