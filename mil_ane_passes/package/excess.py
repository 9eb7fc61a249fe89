"""What the host's rules must not be asked: they would count out sizes that a file only claims, or miss a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil.mil import Var, types

from .limits import EVALUATED, RANK

__all__ = ["Rejected", "refuse_excess"]

# Inputs whose length is a rank.
_VECTORS = frozenset({"shape", "reps", "pad", "begin", "end", "size", "perm", "axes", "elem_shape", "resized_dims"})
# Constants that may be unread: compressed weights have no value, and those in weight files stay where they are.
_WEIGHTS = frozenset(
    {"weight", "bias", "gamma", "beta", "mean", "variance", "weight_ih", "weight_hh", "weight_ih_back",
     "weight_hh_back", "bias_back", "input_bias", "peephole", "peephole_back", "quant_bias", "quant_scale", "scale",
     "zero_point", "val"}
)
# Inputs whose rows the host counts out as the default of another.
_COUNTED = {"linear": "weight", "crop_resize": "boxes"}


class Rejected(Exception):
    """The host's class for an op does not take what the file binds."""


def refuse_excess(cls: Any, bound: Mapping[str, Any], outputs: int) -> None:
    """Rejected when the host's class `cls` would make something huge of `bound`, or find no value in it."""
    op_type, kinds = cls.__name__, cls.input_spec.input_types
    for param, var in bound.items():
        if not isinstance(var, Var):
            continue
        if param in _VECTORS and _length(var) > RANK:
            raise Rejected(f"{param} of {_length(var)} dimensions")
        missing = kinds[param].const and var._sym_val is None and param not in _WEIGHTS
        if missing and not op_type.startswith("constexpr_"):
            raise Rejected(f"{param} has no value")
    if op_type == "split" and "num_splits" in bound and bound["num_splits"].val != outputs:
        raise Rejected(f"{outputs} outputs")
    counted = bound.get(_COUNTED.get(op_type, ""))
    if isinstance(counted, Var) and _length(counted) > EVALUATED:
        raise Rejected(f"{_length(counted)} rows")


def _length(var: Var) -> int:
    """The first dimension, as far as it is known."""
    shape = var.sym_type.get_shape() if types.is_tensor(var.sym_type) else ()
    return shape[0] if shape and isinstance(shape[0], int) else 0
