"""Arithmetic of 8 and 16-bit integers, which wraps around in torch: 255 + 1 is 0 in uint8, 127 + 1 is -128 in int8.

Before iOS17 a cast to uint8 gives int32, and coremltools computes 256, silently. From iOS17 on it gives uint8, which
most MIL ops reject: their operands are cast to int32 here. A result that may not fit its dtype in torch is wrapped by a
remainder, and a float that is cast is limited to its range, as by Core ML from iOS17 on. Traces and exported programs
state that dtype. Scripts do not: there an operand has it from iOS17 on.

coremltools has no dtype for exported inputs of uint8 and int8 ("KeyError: torch.uint8"), and makes images of exported
integers int32, which Core ML does not have. Here such inputs are int32, as those of int16 are, or what `inputs=`
declares: an image, which is fp32, or floats. Those are cast to int32 first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.frontend.torch.utils import (
    TORCH_DTYPE_TO_MIL_DTYPE,
    sanitize_op_kind,
    unify_inplace_and_functional,
)
from coremltools.converters.mil.input_types import ImageType
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.input_type import TupleInputType

from ...ir.integer_bounds import IntegerBounds, can_hold_integers, find_integer_bounds
from ...passes.severity import Severity
from ..contract import Lowering, Patch
from ..errors import NotConverted
from ..lowering import cast_to
from ..probes import find_fault

PATCH = Patch(code="TORCH193", severity=Severity.WRONG,
              title="8 and 16-bit integers do not wrap around, and most ops reject them from iOS17 on",
              upstream=("none known",))

_NODE = ("coremltools.converters.mil.frontend.torch.internal_graph", "InternalTorchIRNode")
_NARROW_TYPES = {torch.uint8: types.uint8, torch.int8: types.int8, torch.int16: types.int16}
_BOUNDS: dict[Any, IntegerBounds] = {types.uint8: (0, 255), types.int8: (-128, 127), types.int16: (-32768, 32767)}
_WIDENED_TYPES = (*_BOUNDS, types.uint16)
_COMPUTED_KINDS = frozenset((
    "add", "sub", "rsub", "mul", "neg", "bitwise_not", "invert", "lshift", "bitwise_left_shift", "abs", "pow", "square",
    "div", "divide", "floor_divide", "floordiv", "diff", "addcmul", "addmm", "baddbmm", "addmv", "addbmm", "addr",
    "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger", "einsum", "tensordot", "cross", "kron",
    "sum", "cumsum", "prod", "cumprod", "trace", "__matmul__", "multiply", "subtract", "negative", "absolute", "linear",
    "linalg_cross", "chain_matmul", "linalg_multi_dot", "float_power", "index_add", "scatter_add", "scatter_reduce",
))
"Ops whose results may not fit the dtype of their operands."
_CONVERSION_KINDS = frozenset(("to", "_to_copy", "type_as", "byte", "char", "short", "type"))
_TYPED_KINDS = frozenset((
    "add", "sub", "rsub", "mul", "neg", "bitwise_not", "lshift", "bitwise_left_shift", "abs", "square", "div",
    "floor_divide", "floordiv",
    "lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "maximum", "minimum",
    "clamp", "clamp_min", "clamp_max", "remainder", "fmod", "rshift", "bitwise_right_shift",
))
"Ops of scripts that may widen their operands: the dtype of the result is a bool's, or that of the operands."
_BINARY_KINDS: dict[str, Callable[[IntegerBounds, IntegerBounds], list[int]]] = {
    "add": lambda x, y: [x[0] + y[0], x[1] + y[1]],
    "sub": lambda x, y: [x[0] - y[1], x[1] - y[0]],
    "rsub": lambda x, y: [y[0] - x[1], y[1] - x[0]],
    "mul": lambda x, y: [one * other for one in x for other in y],
    "lshift": lambda x, y: [one << max(0, min(amount, 31)) for one in x for amount in y],
    # a quotient fits the dtype of the dividend, except that of -128 and -1
    "div": lambda x, y: [*x, -x[0]] if y[0] <= -1 <= y[1] else [*x],
}
_BINARY_KINDS |= {"multiply": _BINARY_KINDS["mul"], "subtract": _BINARY_KINDS["sub"],
                   "bitwise_left_shift": _BINARY_KINDS["lshift"],
                   **dict.fromkeys(("divide", "floor_divide", "floordiv"), _BINARY_KINDS["div"])}
_UNARY_KINDS: dict[str, Callable[[IntegerBounds], list[int]]] = {
    "neg": lambda x: [-x[1], -x[0]], "negative": lambda x: [-x[1], -x[0]],
    "bitwise_not": lambda x: [~x[1], ~x[0]], "invert": lambda x: [~x[1], ~x[0]],
    "abs": lambda x: [0, *map(abs, x)], "absolute": lambda x: [0, *map(abs, x)],
    "square": lambda x: [0, *(each * each for each in x)],
}
_SCALAR_KINDS = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum", "div", "divide", "floor_divide",
                           "floordiv", "remainder", "fmod"))
"Ops for which a number beside a tensor must fit its dtype: others compute the same modulo 256."
_widens: ContextVar[bool] = ContextVar("mil_ane_passes_widens", default=False)


@PATCH.probe
def probe() -> str | None:
    return find_fault(lambda x: (x.to(torch.uint8) + 200).float(), torch.tensor([3.0, 99.0]))


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.exir_utils", "_construct_ct_tensor_type_from_torch")
def construct_input_type(host: Callable[..., Any], name: str, tensor: Any, ranges: Any) -> Any:
    """Construct the type of an exported input: int32 for uint8 and int8; raises NotConverted for unknown dtypes."""
    dtype = torch.int32 if tensor.dtype in (torch.uint8, torch.int8) else tensor.dtype
    if dtype not in TORCH_DTYPE_TO_MIL_DTYPE:
        raise NotConverted(f"the input '{name}' is {tensor.dtype}, which Core ML does not have; export the model with "
                           "an example input of another dtype, and cast it in the model")
    declared = host(name, SimpleNamespace(dtype=dtype, shape=tensor.shape), ranges)
    declared.torch_dtype = tensor.dtype
    return declared


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "TorchConverter._match_user_exir_inputs")
def match_inputs(host: Callable[..., Any], self: Any, user_inputs: Any) -> Any:
    """Match the declared inputs with those of an exported program; images of integers are fp32.

    Raises NotConverted for an image of int8, which has no values above 127.
    """
    for declared, (name, own) in zip(user_inputs or (), self.graph.inputs.items(), strict=False):
        if not isinstance(declared, ImageType) or not types.is_int(own.dtype):
            continue
        if getattr(own, "torch_dtype", None) == torch.int8:
            raise NotConverted(f"the input '{name}' is torch.int8, which does not hold the values of an image; export "
                               "the model with an example input of torch.uint8, or declare a TensorType")
        declared.dtype = declared.dtype or types.fp32
    return host(self, user_inputs)


@PATCH.replace_function(_NODE[0], f"{_NODE[1]}.from_torchscript_node")
def from_torchscript_node(host: Callable[..., Any], cls: Any, node: Any, *more: Any, **named: Any) -> Any:
    """Read a node of TorchScript, and note the dtypes of its arguments and of its results."""
    read = host(cls, node, *more, **named)
    read.torch_dtypes = ([_get_value_dtype(value) for value in node.inputs()],
                         [_get_value_dtype(value) for value in node.outputs()])
    return read


@PATCH.replace_function(_NODE[0], f"{_NODE[1]}.from_exir_node")
def from_exir_node(host: Callable[..., Any], cls: Any, node: Any) -> Any:
    """Read a node of an exported program, and note the dtypes of its arguments and of its result."""
    read = host(cls, node)
    value = (getattr(node, "meta", None) or {}).get("val")
    results = value if isinstance(value, tuple | list) else [value]
    read.torch_dtypes = ([_get_fake_dtype(each) for each in node.args],
                         [getattr(each, "dtype", None) for each in results])
    return read


def _get_value_dtype(value: Any) -> Any:
    return value.type().dtype() if isinstance(value.type(), torch.TensorType) else None


def _get_fake_dtype(value: Any) -> Any:
    return getattr((getattr(value, "meta", None) or {}).get("val"), "dtype", None)


@PATCH.replace_function("coremltools.converters.mil.mil.builder", "Builder._add_op")
def add_op(host: Callable[..., Any], cls: Any, op_cls: Any, **inputs: Any) -> Any:
    """Add an op, in a lowering with its narrow integers as int32 where it does not take them."""
    if _widens.get() and op_cls.__name__ not in ("cast", "const"):
        inputs |= {name: _widen_input(op_cls, name, value) for name, value in inputs.items()}
    return host(cls, op_cls, **inputs)


def _widen_input(op_cls: Any, name: str, value: Any) -> Any:
    kind = op_cls.input_spec.input_types.get(name)
    if isinstance(kind, TupleInputType) and isinstance(value, list | tuple):
        dtypes = {_get_mil_type(each) for each in value}
        return [_widen(each) for each in value] if len(dtypes) > 1 and dtypes & set(_WIDENED_TYPES) else value
    # coremltools fills the named domains of a class in when it makes the first op of it
    named = getattr(op_cls, "type_domains", {}).get(getattr(kind, "type_domain_id", None), ())
    domain = named or getattr(kind, "type_domain", ())
    return _widen(value) if types.int32 in domain and _get_mil_type(value) not in domain else value


def _get_mil_type(value: Any) -> Any:
    """Return the MIL type of an argument that has narrow integers or is a Var; None for others."""
    if isinstance(value, Var):
        return value.dtype
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return None
    return next((kind for kind in _WIDENED_TYPES if types.nptype_from_builtin(kind) == dtype), None)


def _widen(value: Any) -> Any:
    """Return narrow integers as int32, other values unchanged."""
    if _get_mil_type(value) not in _WIDENED_TYPES:
        return value
    if not isinstance(value, Var):
        return value.astype(np.int32)
    return cast_to(value, types.int32) if value.val is None else mb.const(val=value.val.astype(np.int32))


@PATCH.wrap_lowerings
def lower_integers(lowering: Lowering, context: Any, node: Any) -> None:
    """Lower a node; integers that may not fit torch's dtype of the result are wrapped."""
    kind = str(unify_inplace_and_functional(sanitize_op_kind(node.kind))).partition(".")[0]
    dtypes: tuple[list[Any], list[Any]] = getattr(node, "torch_dtypes", ([], []))
    arguments, results = dtypes
    dtype = results[0] if len(results) == 1 else None
    operands = [context[each] if isinstance(each, str) and each in context else each for each in node.inputs]
    if kind in _SCALAR_KINDS and (dtype == torch.bool or dtype in _NARROW_TYPES):
        node, operands = _wrap_scalars(context, node, operands, arguments)
    narrow = {each.dtype for each in operands if isinstance(each, Var) and each.dtype in _WIDENED_TYPES}
    stated = dtype is not None or any(each in _NARROW_TYPES for each in arguments)
    with _widen_operands(context, node, operands, mixed=len(narrow) > 1), _widening(stated or kind in _TYPED_KINDS):
        lowering(context, node)
    inferred = not stated and kind in _TYPED_KINDS and bool(narrow)
    target = _infer_dtype(operands) if inferred else _NARROW_TYPES.get(dtype)
    result = context[node.name] if target is not None and node.name in context else None
    if not isinstance(result, Var) or result.dtype != types.int32:
        return
    if kind in _CONVERSION_KINDS and isinstance(operands[0], Var) and types.is_float(operands[0].dtype):
        context.add(_saturate(result, target, node.name), torch_name=node.name, override=True)
        return
    scaled = kind in ("add", "sub", "rsub") and (len(operands) > 2 and getattr(operands[2], "val", operands[2]) != 1
                                                 or "alpha" in (node.kwinputs or {}))
    bounds = None if scaled else _bound_result(kind, operands, arguments)
    if kind in _COMPUTED_KINDS | _CONVERSION_KINDS and not can_hold_integers(target, bounds):
        context.add(_wrap(result, target, bounds, node.name), torch_name=node.name, override=True)
    if inferred:  # later ops of a script know the dtype by that of the Var alone
        context.add(cast_to(context[node.name], target), torch_name=node.name, override=True)


@contextmanager
def _widening(enabled: bool) -> Iterator[None]:
    token = _widens.set(enabled)
    try:
        yield
    finally:
        _widens.reset(token)


@contextmanager
def _widen_operands(context: Any, node: Any, operands: list[Any], *, mixed: bool) -> Iterator[None]:
    """Make int32 of operands of several narrow dtypes, none of which can hold the others."""
    replaced = {name: var for name, var in zip(node.inputs, operands, strict=True)
                if mixed and isinstance(var, Var) and var.dtype in _WIDENED_TYPES}
    for name, var in replaced.items():
        context.add(_widen(var), torch_name=name, override=True)
    yield
    for name, var in replaced.items():
        context.add(var, torch_name=name, override=True)


def _wrap_scalars(context: Any, node: Any, operands: list[Any], dtypes: Any) -> tuple[Any, list[Any]]:
    """Return the node and its operands with numbers wrapped into the dtype of a tensor beside them, as torch does."""
    dtype = next((_NARROW_TYPES[dtype] for dtype, each in zip(dtypes, operands, strict=False)
                  if dtype in _NARROW_TYPES and isinstance(each, Var) and each.rank), None)
    others = [each for each in operands[:2] if isinstance(each, Var) and each.rank]
    if dtype is None or len(others) != 1:
        return node, operands
    inputs, operands = list(node.inputs), list(operands)
    for place, each in enumerate(operands[:2]):
        number = each.val if isinstance(each, Var) and not each.rank else each
        if np.asarray(number).dtype.kind == "i" and not can_hold_integers(dtype, (int(number), int(number))):
            inputs[place] = f"{node.name}_number"
            low, high = _BOUNDS[dtype]
            operands[place] = mb.const(val=np.int32((int(number) - low) % (high - low + 1) + low))
            context.add(operands[place], torch_name=inputs[place])
    node = copy.copy(node)
    node.inputs = inputs
    return node, operands


def _infer_dtype(operands: list[Any]) -> Any:
    """Return the one narrow dtype of all tensors of integers; None if there are others."""
    found = {each.dtype for each in operands if isinstance(each, Var) and each.rank}
    return next(iter(found)) if len(found) == 1 and found <= set(_BOUNDS) else None


def _bound_result(kind: str, operands: list[Any], dtypes: Any) -> IntegerBounds | None:
    """Return the bounds of the integers that an op computes; None where they are unknown."""
    known = [_bound_operand(each, dtypes[place] if place < len(dtypes) else None)
             for place, each in enumerate(operands)]
    ends: list[int] = []
    if kind in _CONVERSION_KINDS:
        return known[0]
    if kind in _UNARY_KINDS and known and known[0] is not None:
        ends = _UNARY_KINDS[kind](known[0])
    elif kind in _BINARY_KINDS and len(known) >= 2 and known[0] is not None and known[1] is not None:
        ends = _BINARY_KINDS[kind](known[0], known[1])
    return (min(ends), max(ends)) if ends else None


def _bound_operand(value: Any, dtype: Any) -> IntegerBounds | None:
    if isinstance(value, int):
        return int(value), int(value)
    if not isinstance(value, Var) or types.is_float(value.dtype):
        return None
    own = find_integer_bounds(value)
    declared = _NARROW_TYPES.get(dtype)
    return own if declared is None or can_hold_integers(declared, own) else _BOUNDS[declared]


def _saturate(x: Var, dtype: Any, name: str) -> Var:
    """Return integers of int32, which floats were cast to, limited to the range of a narrow dtype.

    torch does not define what floats that do not fit become. This is what Core ML gives from iOS17 on, and torch on
    arm64.
    """
    low, high = _BOUNDS[dtype]
    if x.val is not None:
        return mb.const(val=np.clip(x.val, low, high), name=name)
    if x.name == name and x.op is not None:
        x.name = x.op.name = f"{name}_unlimited"
    return mb.maximum(x=mb.minimum(x=x, y=np.int32(high)), y=np.int32(low), name=name)


def _wrap(x: Var, dtype: Any, bounds: IntegerBounds | None, name: str) -> Var:
    """Return integers of int32 wrapped into the range of a narrow dtype."""
    low, high = _BOUNDS[dtype]
    count = high - low + 1
    if x.name == name and x.op is not None:
        x.name = x.op.name = f"{name}_unwrapped"
    if bounds is None or not can_hold_integers(types.int32, (bounds[0] - 2 * count, bounds[1] + 2 * count)):
        # runtimes differ in the sign of the remainder of a negative number
        x = mb.add(x=mb.mod(x=x, y=np.int32(count)), y=np.int32(count - low))
    elif (turns := (bounds[0] - low) // count) == (bounds[1] - low) // count:
        return mb.sub(x=x, y=np.int32(turns * count), name=name)
    elif offset := -low - min(0, turns) * count:
        x = mb.add(x=x, y=np.int32(offset))
    if low == 0:
        return mb.mod(x=x, y=np.int32(count), name=name)
    return mb.add(x=mb.mod(x=x, y=np.int32(count)), y=np.int32(low), name=name)
