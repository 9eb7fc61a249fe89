"""Integers that coremltools narrows to 16 bits though they may not fit: ids above 32767 and sizes of long inputs.

At float16 and for iOS17, the pass `add_int16_cast` casts int32 operands of `gather`, `squeeze` and `topk` to int16, if
nothing is known about their values. An id of 40000 becomes -25536 then, and a flexible input of 40,000 samples
gets outputs of another size. Here an operand stays int32, unless a bound on its values fits: ids that select a row of a
table of at most 32,768 rows, sizes up to the upper end of a `RangeDim`, positions along a static axis.

The pass casts constants that are not negative to uint16, and keeps this choice for the computed operands of later ops:
-1 becomes 65535. Here each operand that is no constant is cast to int16 again, except for positions counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Operation, Var, types

from ...equivalence.input_domains import infer_input_domains
from ...equivalence.interval_propagation import Interval
from ...ir.integer_bounds import can_hold_integers, find_integer_bounds, follow_integers
from ...ir.query import get_function, is_symbolic
from ...passes.examples import build_program
from ...passes.severity import Severity
from ..contract import Patch

PATCH = Patch(code="TORCH182", severity=Severity.WRONG,
              title="float16 conversions narrow large or negative integers to 16 bits that do not hold them", upstream=(
        "https://github.com/apple/coremltools/issues/2222",
        "https://github.com/kasper0406/stablehlo-coreml/pull/107",
    ))
_PASS_MODULE = "coremltools.converters.mil.mil.passes.defs.quantization"
_INT16 = np.iinfo(np.int16)
_domains: WeakKeyDictionary[Function, dict[str, Interval]] = WeakKeyDictionary()
"The domains of the inputs of functions; passes do not change them."


@PATCH.probe
def probe() -> str | None:
    """Squeeze ids of any size, and look at the dtype that the pass chooses."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    program = build_program(lambda ids: mb.squeeze(x=ids, axes=[0]), dtype=types.int32, opset=ct.target.iOS17,
                            ids=(1, 3))
    PASS_REGISTRY["common::add_int16_cast"](program)
    (op,) = program.functions["main"].find_ops(op_type="squeeze")
    if op.x.dtype != types.int32:
        return "silently miscompiled: ids of any size are cast to int16"
    program = build_program(_squeeze_signed_integers, dtype=types.int32, opset=ct.target.iOS17, ids=(1, 3))
    PASS_REGISTRY["common::add_int16_cast"](program)
    (op,) = program.functions["main"].find_ops(op_type="squeeze")
    return None if op.x.dtype == types.int16 else "silently miscompiled: negative integers are cast to uint16"


def _squeeze_signed_integers(ids: Var) -> list[Var]:
    looked_up = mb.gather(x=np.ones(4, np.float16), indices=np.array([2, 1], np.int32), axis=0, validate_indices=False)
    signed = mb.minimum(x=mb.maximum(x=ids, y=np.int32(-9)), y=np.int32(9))
    return [mb.mul(x=looked_up, y=np.float16(2)), mb.squeeze(x=signed, axes=[0])]


@PATCH.replace_function(_PASS_MODULE, "add_int16_cast.should_cast_parameter")
def should_cast_parameter(host: Callable[..., Any], graph_pass: Any, op: Operation, param_name: str) -> Any:
    """Return coremltools' decision; None, which means no cast, if the values may not fit int16."""
    # The host chooses for constants and casts alone. Core ML needs further ops for indices that may be negative.
    is_count = param_name == "indices" and _is_count(op.inputs[param_name])
    if type(graph_pass).target_dtype.fset is not None:  # before 9.1 the host keeps its choice for later operands
        graph_pass.target_dtype = "uint16" if is_count else "int16"
    decided = host(graph_pass, op, param_name)
    if decided == "int16" and is_count and op.inputs[param_name].op.op_type != "cast" and (
            graph_pass._check_target_dtype_for_param(op, param_name, "uint16")):
        decided = "uint16"
    return decided if decided and _fits_int16(op, param_name) else None


def _is_count(var: Var) -> bool:
    """Return whether integers are positions counted upwards from 0 or more."""
    op = follow_integers(var).op
    return op is not None and op.op_type == "range_1d" and all(
        bound.val is not None and bound.val >= least for bound, least in ((op.start, 0), (op.step, 1)))


def _fits_int16(op: Operation, name: str) -> bool:
    var, sizes = op.inputs[name], _find_largest_sizes(op)
    if var.dtype == types.str:  # the dtype of the indices of topk
        return _get_largest(op.x.shape[int(op.axis.val)], sizes) <= _INT16.max + 1
    if var.val is not None:
        return True  # coremltools looks at constants itself
    if name == "indices" and _find_largest_index(op, sizes) <= _INT16.max:
        return True
    if can_hold_integers(types.int16, find_integer_bounds(var)):
        return True
    low, high = _bound_source(follow_integers(var), sizes)
    return low >= _INT16.min and high <= _INT16.max


def _find_largest_index(op: Operation, sizes: dict[Any, int]) -> float:
    """Return the largest valid index of a gather."""
    if op.op_type == "gather_nd":
        first = int(op.batch_dims.val) if "batch_dims" in op.inputs and op.batch_dims is not None else 0
        count = op.indices.shape[-1]
        extents = op.x.shape[first:] if is_symbolic(count) else op.x.shape[first:first + count]
    else:
        extents = op.x.shape[int(op.axis.val):][:1]
    return max((_get_largest(extent, sizes) for extent in extents), default=1) - 1


def _bound_source(var: Var, sizes: dict[Any, int]) -> Interval:
    """Bound an input by what its users require of it, and the sizes of a Var by the largest sizes of the inputs."""
    if var.op is not None and var.op.op_type == "shape":
        return 0, max((_get_largest(dim, sizes) for dim in var.op.x.shape), default=0)
    function = get_function(var.child_ops[0])
    if var.op is None and function.inputs.get(var.name) is var:
        if function not in _domains:
            _domains[function] = infer_input_domains(function, {}, negative=True)
        return _domains[function][var.name]
    return -math.inf, math.inf


def _get_largest(size: Any, sizes: dict[Any, int]) -> float:
    return float(sizes.get(size, math.inf)) if is_symbolic(size) else float(size)


def _find_largest_sizes(op: Operation) -> dict[Any, int]:
    """Find the largest value of each symbol in the sizes of the function's inputs, where it is declared."""
    found: dict[Any, int] = {}
    for declared in getattr(get_function(op), "input_types", None) or ():
        shape = getattr(declared, "shape", None)
        if isinstance(shape, ct.EnumeratedShapes):
            for place, symbol in enumerate(shape.symbolic_shape):
                if is_symbolic(symbol):
                    found[symbol] = max(int(each.shape[place]) for each in shape.shapes)
        else:
            found.update({dim.symbol: int(dim.upper_bound) for dim in getattr(shape, "shape", ())
                          if isinstance(dim, ct.RangeDim) and dim.upper_bound > 0})
    return found
