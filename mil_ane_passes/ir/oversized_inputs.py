"""Inputs that must not reach coremltools' type inference.

Type inference would allocate memory for sizes that a file only claims, or need the value of a constant without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil.mil import Var, types

from .coremltools_internals import get_typed_value
from .type_inference import MAX_EVALUATED_ELEMENTS

__all__ = ["MAX_RANK", "Rejected", "reject_oversized_inputs"]

MAX_RANK = 32
"Highest rank passed to pymil. Core ML supports ranks 5 to 8, depending on the op; a type of higher rank stays opaque."
# Inputs with one element for each axis of a tensor.
_PER_AXIS_INPUTS = frozenset(
    {"shape", "reps", "pad", "begin", "end", "size", "perm", "axes", "elem_shape", "resized_dims"}
)
# Inputs that may be constants without a value: compressed weights have no value, and weight files are not read.
_WEIGHT_INPUTS = frozenset(
    {"weight", "bias", "gamma", "beta", "mean", "variance", "weight_ih", "weight_hh", "weight_ih_back",
     "weight_hh_back", "bias_back", "input_bias", "peephole", "peephole_back", "quant_bias", "quant_scale", "scale",
     "zero_point", "val"}
)
# Inputs from whose number of rows coremltools derives the size of another input's default, and allocates it.
_SIZED_INPUTS = {"linear": "weight", "crop_resize": "boxes"}


class Rejected(Exception):
    """coremltools' class for an op does not accept the inputs that the file binds."""


def reject_oversized_inputs(cls: Any, bound: Mapping[str, Any], outputs: int) -> None:
    """Raise Rejected if type inference of coremltools' class `cls` would allocate far too much for the inputs `bound`,
    or need a missing value."""
    op_type, kinds = cls.__name__, cls.input_spec.input_types
    for param, var in bound.items():
        if not isinstance(var, Var):
            continue
        if param in _PER_AXIS_INPUTS and _get_first_dimension(var) > MAX_RANK:
            raise Rejected(f"{param} of {_get_first_dimension(var)} dimensions")
        missing = kinds[param].const and get_typed_value(var) is None and param not in _WEIGHT_INPUTS
        if missing and not op_type.startswith("constexpr_"):
            raise Rejected(f"{param} has no value")
    if op_type == "split" and "num_splits" in bound and bound["num_splits"].val != outputs:
        raise Rejected(f"{outputs} outputs")
    counted = bound.get(_SIZED_INPUTS.get(op_type, ""))
    if isinstance(counted, Var) and _get_first_dimension(counted) > MAX_EVALUATED_ELEMENTS:
        raise Rejected(f"{_get_first_dimension(counted)} rows")


def _get_first_dimension(var: Var) -> int:
    """Return the first dimension; 0 if it is unknown."""
    shape = var.sym_type.get_shape() if types.is_tensor(var.sym_type) else ()
    return shape[0] if shape and isinstance(shape[0], int) else 0
