"""Sizes as numbers: `int(x.shape[0])`, `a, b, _ = x.shape`, `x.shape[0] // 2`, traced or scripted; exported `min`.

`math.ceil`, `math.floor`, `math.trunc` and `round` of a size, such as `math.ceil(x.shape[-1] / 8)`, are ints in Python.
coremltools makes floats of them, which a slice, an expand or arithmetic with other sizes rejects. Here the quotient of
two sizes is rounded in integers, which are exact for every divisor; any other number is computed in fp32.

A size that is temporarily a tensor (`NumToTensor`) becomes a const of shape (1,) in coremltools, and its casts call
`int(array)`, which numpy >= 2.4 allows for rank 0 only. torch's value has rank 0, and so does this one (which also
keeps `int(x.shape[0]) // 2 + 1` of rank 0 throughout). The casts read the single element of an operand of any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Lowering, Patch
from ..lowering import add_result, bind_arguments, cast_to, name_result, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH139",
              title="`int()` of a size, and arithmetic with it, fails with numpy >= 2.4, scripted `float()` always",
              upstream=(
        "https://github.com/apple/coremltools/issues/2633",
        "https://github.com/apple/coremltools/pull/2632",
        "https://github.com/apple/coremltools/issues/2755",
    ))

_NUMBER_TYPES: dict[str, tuple[type, Any]] = {"bool": (bool, types.bool), "int": (int, types.int32),
                                              "float": (float, types.fp32)}
_ROUNDED_KINDS = frozenset(("ceil", "floor", "round", "trunc"))
_EXACT_IN_FP32 = 2 ** 24


@PATCH.probe
def probe() -> str | None:
    return find_fault(lambda x: x[:, :x.shape[1] // 2] * int(x.shape[0] * 2), torch.ones(2, 4))


@PATCH.op("numtotensor")
def numtotensor(context: Any, node: Any) -> None:
    """Lower NumToTensor(a): the number itself, of rank 0."""
    x = to_tensor(bind_arguments(context, node, "a").a)
    add_result(context, node, x if x.val is None else mb.const(val=_get_single_element(x), name=node.name))


@PATCH.op("bool", "int", "float", "sym_float", "sym_int", "intimplicit", "floatimplicit", "scalarimplicit", "item")
def lower_number_cast(context: Any, node: Any) -> None:
    """Lower Int(a), Float(a), Bool(a), IntImplicit(a), item(a), ...: the one element of `a` as that type."""
    x = to_tensor(bind_arguments(context, node, "a").a)
    if any(size != 1 for size in x.shape):
        raise ValueError("input to cast must be either a scalar or a length 1 tensor")
    convert, dtype = _NUMBER_TYPES.get(node.kind.lower().removesuffix("implicit").removeprefix("sym_"), (None, x.dtype))
    if x.val is not None:
        value = _get_single_element(x)
        add_result(context, node, mb.const(val=value if convert is None else convert(value), name=node.name))
        return
    add_result(context, node, cast_to(mb.squeeze(x=x) if x.rank else x, dtype))


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.internal_graph",
                        "InternalTorchIRNode.from_torchscript_node")
def from_torchscript_node(host: Callable[..., Any], cls: Any, node: Any, *more: Any, **named: Any) -> Any:
    """Read a node of TorchScript, and note whether its result is an int, not a tensor."""
    read = host(cls, node, *more, **named)
    read.gives_int = [value.type().kind() for value in node.outputs()] == ["IntType"]
    return read


@PATCH.wrap_lowerings
def lower_rounded_numbers(lowering: Lowering, context: Any, node: Any) -> None:
    """Lower a node; ceil, floor, round and trunc of a number that is not a tensor give an int32."""
    if node.kind not in _ROUNDED_KINDS or not _gives_int(node):
        lowering(context, node)
        return
    x = to_tensor(bind_arguments(context, node, "self").self)
    quotient = _find_integer_quotient(x)
    if quotient is not None:
        rounded = _round_quotient(node.kind, *quotient)
    else:
        rounded = _round_float(node.kind, x) if types.is_float(x.dtype) else x
    add_result(context, node, name_result(rounded, node, x))


def _gives_int(node: Any) -> bool:
    """Return whether torch's result is an int or, exported, a symbol of one."""
    value = (getattr(node, "meta", None) or {}).get("val")
    return getattr(node, "gives_int", False) or isinstance(value, int | torch.SymInt)


def _find_integer_quotient(x: Var) -> tuple[Var, Var] | None:
    """Return the two int32 whose quotient a float is; None for other floats."""
    if x.op is None or x.op.op_type != "real_div":
        return None
    dividend, divisor = _find_integer(x.op.x), _find_integer(x.op.y)
    return None if dividend is None or divisor is None else (dividend, divisor)


def _find_integer(x: Var) -> Var | None:
    """Return the int32 that a float was cast from, or is as a constant; None if it may have a fraction."""
    if x.val is not None:
        # a larger constant may have been rounded to fp32
        is_exact = np.ndim(x.val) == 0 and float(x.val).is_integer() and abs(x.val) < _EXACT_IN_FP32
        return mb.const(val=np.int32(x.val)) if is_exact else None
    is_cast = x.op is not None and x.op.op_type == "cast" and x.op.x.dtype == types.int32
    return x.op.x if is_cast else None


def _round_quotient(kind: str, dividend: Var, divisor: Var) -> Var:
    """Round dividend / divisor, two int32, in integers."""
    if divisor.val is None or divisor.val < 0:
        sign = mb.sign(x=divisor)
        dividend, divisor = mb.mul(x=dividend, y=sign), mb.mul(x=divisor, y=sign)
    if kind == "floor":
        return mb.floor_div(x=dividend, y=divisor)
    if kind == "ceil":
        return mb.floor_div(x=mb.add(x=dividend, y=mb.sub(x=divisor, y=1)), y=divisor)
    if kind == "trunc":
        return mb.mul(x=mb.floor_div(x=mb.abs(x=dividend), y=divisor), y=mb.sign(x=dividend))
    # half to even: floor(n / d + 1 / 2), less 1 where that was a whole number and is odd
    numerator = mb.add(x=mb.mul(x=dividend, y=2), y=divisor)
    denominator = mb.mul(x=divisor, y=2)
    nearest = mb.floor_div(x=numerator, y=denominator)
    remainder = mb.sub(x=numerator, y=mb.mul(x=nearest, y=denominator))
    is_odd = mb.sub(x=nearest, y=mb.mul(x=mb.floor_div(x=nearest, y=2), y=2))
    return mb.sub(x=nearest, y=mb.mul(x=is_odd, y=mb.sub(x=1, y=mb.minimum(x=remainder, y=1))))


def _round_float(kind: str, x: Var) -> Var:
    """Round a float to an int32; the cast alone truncates."""
    rounding = {"ceil": mb.ceil, "floor": mb.floor, "round": mb.round}.get(kind)
    return cast_to(x if rounding is None else rounding(x=x), types.int32)


@PATCH.op("sym_ite")
def lower_choice_of_sizes(context: Any, node: Any) -> None:
    """Lower sym_ite(b, t, f) of exported numbers: t where b is true, else f."""
    inputs = bind_arguments(context, node, "b t f")
    add_result(context, node, mb.select(cond=to_tensor(inputs.b), a=to_tensor(inputs.t), b=to_tensor(inputs.f),
                                        name=node.name))


@PATCH.op("sym_min", "sym_max")
def lower_extreme_of_sizes(context: Any, node: Any) -> None:
    """Lower min(a, b) and max(a, b) of exported sizes."""
    inputs = bind_arguments(context, node, "a b")
    x, y = to_tensor(inputs.a), to_tensor(inputs.b)
    if x.val is not None and y.val is not None:
        extreme = min if node.kind == "sym_min" else max
        add_result(context, node, mb.const(val=extreme(x.val, y.val), name=node.name))
        return
    extreme_op = mb.minimum if node.kind == "sym_min" else mb.maximum
    add_result(context, node, extreme_op(x=x, y=y, name=node.name))


def _get_single_element(x: Any) -> Any:
    """Return the value of a const with one element as a numpy scalar."""
    return np.asarray(x.val).reshape(-1)[0]
